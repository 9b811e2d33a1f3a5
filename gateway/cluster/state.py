"""What a cluster knows of its machines, and how that is told to people."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from gateway.cluster.abilities import Abilities
from gateway.cluster.local_node import LocalNode
from gateway.cluster.machines import OneMachine
from gateway.cluster.ray_nodes import RayNodes
from gateway.cluster.records import NodeRecords
from gateway.cluster.tickets import TicketOffice, check_name
from gateway.config.sections import ClusterConfig
from manager.clock import Clock
from manager.config import NodeSpec
from manager.errors import CapacityExceeded, Conflict, NotFound, Unsupported
from runtimes.executor import FleetExecutor
from runtimes.node.daemon import Trouble
from runtimes.node.membership import HEARD, DrainAsked, Member, NodeState, RaySaid, Roster, RosterEvent
from runtimes.node.protocol import NodeHello, NodeLink
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.files import SandboxFiles
from tangram.types import LivingSandbox, NodeStatus, NodeStatusList, NodeTicket

#: Seconds for which a node that was lost is among what should be looked at, unless it joins again.
LOST_TOLD_S = 86400.0


@dataclass(slots=True, eq=False)
class ClusterNode:
    """One node that has joined, or is awaited."""

    spec: NodeSpec
    remote: RemoteNode
    link: NodeLink | None = None
    hello: NodeHello | None = None

    @property
    def instance(self) -> str:
        return "" if self.hello is None else self.hello.instance


class ClusterState(OneMachine):
    """The machines that have joined, without the joining."""

    def __init__(
        self,
        config: ClusterConfig,
        here: NodeSpec,
        *,
        abilities: Abilities,
        records: NodeRecords,
        tickets: TicketOffice,
        clock: Clock,
    ) -> None:
        self._inline = config.local == "inline"
        super().__init__(replace(here, able=frozenset()) if self._inline else here)
        self._config = config
        self.abilities = abilities
        self._records = records
        self._tickets = tickets
        self._clock = clock
        self._roster = Roster(config.times)
        self._machines: dict[str, ClusterNode] = {}
        self._fleet: FleetExecutor | None = None
        #: What starts this machine's own daemon, if it has one.
        self.local: LocalNode | None = None
        self.ray: RayNodes | None = None
        if config.ray is not None:
            self.ray = RayNodes(config.ray, self, ticket_ttl_s=config.ticket_ttl_s, clock=clock)
        #: Where nodes join, as they reach it and as this machine does, and what they know it by.
        self.address = self.near = ""
        self.fingerprint = ""

    def _step(self, event: RosterEvent) -> object:
        """Tell the roster what happened, and do what it decides."""
        return self._roster.step(self._clock.now(), event)

    def _is_empty(self, name: str) -> bool:
        """Return whether nothing of the scheduler's is on a node."""
        return self.engine.held_on(name) == (0, 0)

    def _member(self, name: str) -> RemoteNode | None:
        machine = self._machines.get(name)
        return None if machine is None else machine.remote

    # -- for people

    def info(self) -> NodeStatusList:
        here = []
        if self._inline:
            name = self.here.name
            here = [self._local_status(self.abilities.unable(name), sorted(self.abilities.able(name)))]
        others = [self._status(member.name) for member in self._roster.members()]
        ray = () if self.ray is None else self.ray.status()
        return NodeStatusList(nodes=(*here, *others), storm_s=self._roster.storm_left_s, ray=ray)

    def _status(self, name: str) -> NodeStatus:
        member, machine, known = self._roster.get(name), self._machines.get(name), self._records.get(name)
        assert member is not None
        now_s = self._clock.now()
        spec = machine.spec if machine is not None else None if known is None else known.spec
        hello = None if machine is None else machine.hello
        running, holders = self.engine.held_on(name)
        return NodeStatus(
            node=name,
            state="drained" if _is_drained(member) else member.state.value,
            why=member.why,
            since_s=max(0.0, now_s - member.since_s),
            local=name == self.here.name,
            cores=0 if spec is None else spec.cores,
            devices=0 if spec is None else spec.devices,
            device_kind="" if spec is None else spec.device_kind,
            memory_bytes=0 if spec is None else spec.memory_bytes,
            labels={} if spec is None else spec.labels,
            running=running,
            trajectories=holders,
            able=tuple(sorted(self.abilities.able(name))),
            unable=self.abilities.unable(name),
            resident={} if machine is None else machine.remote.models.resident,
            peer="" if machine is None or machine.link is None else machine.link.peer,
            version="" if hello is None else hello.version,
            isolation="" if hello is None else hello.isolation,
            losses=len(member.losses),
            refused_s=max(0.0, member.refused_until_s - now_s),
        )

    def drain(self, name: str, why: str) -> NodeStatus:
        member = self._roster.get(name)
        if member is None or member.state is NodeState.LOST:
            raise self._no_such(name)
        self._step(DrainAsked(name, why))
        machine = self._machines.get(name)
        if machine is not None:
            machine.remote.drain(why)
        return self._status(name)

    def ticket(self, name: str) -> NodeTicket:
        check_name(name)
        if name == self.here.name:
            raise Conflict(f"{name} is the name of the gateway's own machine (node.name)", component="cluster")
        return self._ticket(name, self.address)

    def local_ticket(self) -> NodeTicket:
        """Return what admits this machine's own daemon."""
        return self._ticket(self.here.name, self.near)

    def _ticket(self, name: str, address: str) -> NodeTicket:
        ticket, _ = self._tickets.issue(name)
        return NodeTicket(
            name=name,
            ticket=ticket,
            expires_in_s=self._config.ticket_ttl_s,
            gateway=address,
            fingerprint=self.fingerprint,
        )

    def living(self, trajectory: str) -> LivingSandbox | None:
        remote = self.remote_of(trajectory)
        facts = None if remote is None else remote.trajectories().get(trajectory)
        if facts is None:
            return None
        return LivingSandbox(
            image=facts.image,
            workdir=facts.workdir,
            user=facts.user,
            network=facts.network,
            memory_bytes=facts.memory_bytes,
        )

    def elsewhere(self, trajectory: str) -> str:
        remote = self.remote_of(trajectory)
        return "" if remote is None else remote.name

    def files(self, trajectory: str) -> SandboxFiles | None:
        remote = self.remote_of(trajectory)
        if remote is None:
            return None
        if not remote.attached:
            told = f"node {remote.name}, on which trajectory {trajectory!r} lives, is not reached now"
            raise CapacityExceeded(told, component="cluster", retry_after_s=self._config.link.silent_s)
        return remote.files(trajectory)

    def remote_of(self, trajectory: str) -> RemoteNode | None:
        return None if self._fleet is None else self._member(self._fleet.home(trajectory))

    def leaving(self, node: str) -> str:
        member = self._roster.get(node)
        return "it drains" if member is not None and member.draining else ""

    def lost(self, within_s: float) -> list[str]:
        since_s = self._clock.now() - within_s
        members = self._roster.members()
        lost = [each for each in members if each.state is NodeState.LOST and not _is_drained(each)]
        return [each.name for each in lost if each.since_s > since_s]

    async def watch_for_ever(self, trouble: Trouble) -> None:
        if self._inline:  # else its sandboxes, if any, are its daemon's, which looks itself
            await super().watch_for_ever(trouble)

    def warnings(self) -> list[str]:
        found = super().warnings()
        if self._roster.storm_left_s:
            told = "too many nodes were silent within a short time, so it may be the gateway's own network: "
            left_s = self._roster.storm_left_s
            found.append(f"{told}none is counted lost for {left_s:.0f} s, or until all are heard")
        suspects = [member.name for member in self._roster.members() if member.state is NodeState.SUSPECT]
        if suspects:
            found.append(f"nodes that are not heard: {', '.join(suspects[:8])} ({len(suspects)})")
        unfit = [member for member in self._roster.members() if member.state is NodeState.UNFIT]
        if unfit:
            told = "; ".join(f"{member.name}: {member.why}" for member in unfit[:8])
            found.append(f"nodes on which nothing, or nothing new, can begin ({len(unfit)}): {told}")
        if lost := self.lost(LOST_TOLD_S):
            told = f"nodes that were lost within a day and have not joined again: {', '.join(lost[:8])} ({len(lost)})"
            found.append(f"{told}: `tangram node check` says what mends it")
        return [*found, *[each for part in (self.local, self.ray) if part is not None for each in part.warnings()]]

    @property
    def serving(self) -> int:
        """How many nodes serve now, this machine not counted."""
        return sum(member.state is NodeState.READY for member in self._roster.members())

    # -- for what starts daemons through Ray

    def joined(self, name: str) -> bool:
        """Return whether a node is heard now."""
        member = self._roster.get(name)
        return member is not None and member.state in HEARD

    def ray_drains(self, name: str, why: str) -> None:
        """Ray takes a node's machine away soon."""
        with suppress(NotFound, Unsupported):  # it has not joined yet, or is gone
            self.drain(name, why)

    def ray_said(self, name: str, why: str, final: bool) -> None:
        """Ray says that a node's machine is there, or gone; ``final`` if it was ended on purpose."""
        self._step(RaySaid(name, why, final))


def _is_drained(member: Member) -> bool:
    """Return whether a node that is counted out has left empty: it has nothing that it must end first."""
    return member.state is NodeState.LOST and not member.fenced
