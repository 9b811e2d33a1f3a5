"""The cluster: nodes join over TLS, and what the roster decides of them is told to the scheduler and to themselves."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from gateway.cluster.abilities import Abilities
from gateway.cluster.attempts import FleetReattachment, NodeReattachment
from gateway.cluster.door import NodeDoor, bind
from gateway.cluster.greeting import described, is_changed
from gateway.cluster.local_node import LocalNode
from gateway.cluster.machines import NodeRecovery, NodeServices
from gateway.cluster.model_services import DeclaredServices
from gateway.cluster.records import NodeRecords
from gateway.cluster.snapshots import NodeSnapshots
from gateway.cluster.state import ClusterNode, ClusterState
from gateway.cluster.tickets import TicketOffice, check_name, digest_of, new_node_key, signing_key
from gateway.cluster.voice import Voice
from gateway.config.sections import ClusterConfig, ServerConfig
from gateway.config.uploads import UPLOADS
from gateway.invocations.reattach import AttemptHolder, Reattachment
from gateway.invocations.trajectories import TrajectoryRecovery
from gateway.preparation import Prepare
from gateway.store.store import Store
from manager.clock import Clock
from manager.config import NodeSpec
from manager.engine import Engine
from manager.errors import CodedError, Conflict, Unauthorized
from manager.events import NodeClosed, NodeJoined, NodeLost, NodeOpened
from manager.executor import Executor
from manager.function import FunctionSpec
from runtimes.executor import FleetExecutor
from runtimes.node.certificate import NodeCertificate, ensure_certificate, server_side
from runtimes.node.membership import (
    HEARD,
    CountedOut,
    Emptied,
    Expected,
    Greeted,
    LinkLost,
    NodeState,
    Reconciled,
    RosterEvent,
    Serves,
    Shut,
    Ticked,
    TurnedAway,
    Verdict,
)
from runtimes.node.protocol import HandlerArchives, Inventory, NodeHello, NodeLink, NodeRefused, NodeWelcome
from runtimes.node.ray.process import KeeperProcess
from runtimes.node.remote import RemoteNode, told
from runtimes.sandbox.handler.sources import HandlerCopies
from runtimes.sandbox.session import SessionTable

#: Seconds between two looks whether a draining node is empty.
_LOOK_S = 0.5
#: Seconds after which a node that was refused for good may ask again.
_REFUSED_S = 60.0
#: Where this machine reaches itself, by the addresses that stand for all of its own.
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # listened at, if so configured


class Cluster(ClusterState):
    """The machines that join. Use from one event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        here: NodeSpec,
        *,
        records: NodeRecords,
        tickets: TicketOffice,
        certificate: NodeCertificate,
        clock: Clock,
        archives: HandlerArchives,
        snapshots: NodeSnapshots,
    ) -> None:
        """``archives`` has the files of handlers for the nodes that execute them."""
        abilities = Abilities(self._able_changed)
        super().__init__(config, here, abilities=abilities, records=records, tickets=tickets, clock=clock)
        self._certificate = certificate
        self._archives = archives
        self._snapshots = self.snapshots = snapshots
        snapshots.member = self._member
        self._declared = DeclaredServices()
        self._awaited = {name for name, known in records.all.items() if known.state != "lost"}
        self._door = NodeDoor(
            bind(config.listen),
            server_side(certificate),
            config.link,
            greeting_s=config.greeting_s,
            greetings_max=config.greetings_max,
            greet=self._greet,
        )
        host, _, _ = config.listen.rpartition(":")
        self.address = config.advertise or f"{host}:{self._door.port}"
        self.near = f"{_LOOPBACK.get(host, host)}:{self._door.port}"
        self.fingerprint = certificate.fingerprint
        self._trajectories: TrajectoryRecovery | None = None
        self._sessions: SessionTable | None = None
        self._recovery: NodeRecovery | None = None
        self._functions: Callable[[], Sequence[FunctionSpec]] = lambda: ()
        self._again: Callable[[Prepare], None] = lambda instead: None
        self._prepare_here: Prepare | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._log = structlog.get_logger("gateway.cluster")

    # -- what the gateway is made of

    @property
    def specs(self) -> tuple[NodeSpec, ...]:
        awaited = [known.spec for name, known in self._records.all.items() if name in self._awaited]
        return (*((self.here,) if self._inline else ()), *[replace(spec, able=frozenset()) for spec in awaited])

    @property
    def awaited(self) -> frozenset[str]:
        return frozenset(self._awaited)

    def preparing(self, here: Prepare) -> Prepare:
        self._prepare_here = here
        if self._inline:
            self.abilities.join(self.here.name, here)

        async def prepare(function: FunctionSpec) -> None:
            self._declared.declare(function)  # before a node tells what it costs there
            await (self.abilities.prepare(function) if _needs_node(function) else here(function))

        return prepare

    def executor(self, here: Executor, trajectories: TrajectoryRecovery) -> Executor:
        fleet = FleetExecutor(
            here, self.here.name if self._inline else "", self._member, mark_lost=trajectories.environments.mark_lost
        )
        self._fleet, self._trajectories, self._sessions = fleet, trajectories, trajectories.environments.sessions
        trajectories.home, fleet.on_told = fleet.home, trajectories.told
        trajectories.here = self.here.name if self._inline else ""
        fleet.lose(trajectories.part_with_lost())
        self._snapshots.users = trajectories.snapshots_in_use
        for name in self._awaited:
            for trajectory in trajectories.on_node(name):
                fleet.settle_in(trajectory, name)
        return fleet

    def reattachment(self, environments: AttemptHolder) -> Reattachment:
        return FleetReattachment(
            environments, self._member, lambda: [machine.remote for machine in self._machines.values()]
        )

    def begin(
        self,
        engine: Engine,
        recovery: NodeRecovery,
        functions: Callable[[], Sequence[FunctionSpec]],
        services: NodeServices,
    ) -> None:
        assert self._fleet is not None
        self._engine, self._recovery, self._functions, self._services = engine, recovery, functions, services
        self._fleet.place_of = self._place_of
        for name, known in self._records.all.items():
            if name in self._awaited:
                self._machines[name] = self._machine(replace(known.spec, able=frozenset()), known.epoch)
                self._step(Expected(name, draining=known.state == "draining"))

    def open(self, again: Callable[[Prepare], None]) -> None:
        self._again = again
        self._door.open()
        self._log.info("nodes may join", listen=self.address, fingerprint=self._certificate.fingerprint)
        if self.local is not None:
            self.local.open()
        if self.ray is not None and self._config.ray is not None:
            self.ray.open(KeeperProcess(self._config.ray, self.ray.hear, clock=self._clock))

    async def let_go(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*[machine.remote.close() for machine in self._machines.values()])
        await self._door.close()

    async def close(self) -> None:
        if not self._closed:
            await self.let_go()
        if self.local is not None:
            await self.local.close(keep=self.keep)
        if self.ray is not None:
            await self.ray.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- joining

    async def _greet(self, link: NodeLink, has_greeted: Callable[[], None]) -> None:
        """Let a daemon in, and take what it says until its link is gone."""
        hello = await link.receive(NodeHello, self._config.greeting_s)
        try:
            key = self._proven_key(hello)
            spec = self._described(hello)
            fence = self._admitted(hello)
        except CodedError as error:
            retry_s = error.retry_after_s or _REFUSED_S
            link.send(NodeRefused(code=error.code, message=error.message, retry_after_s=retry_s))
            self._log.warning("a node was refused", node=hello.name[:128], peer=link.peer, why=error.message)
            return
        has_greeted()
        machine = self._machines.get(spec.name)
        if machine is None:
            machine = self._machines[spec.name] = self._machine(spec)
        elif machine.link is not None:
            machine.link.close("its daemon joins again")
        machine.spec, machine.link, machine.hello = replace(spec, able=machine.spec.able), link, hello
        try:
            await self._welcome(machine, link, hello, key, fence)
        finally:
            if machine.link is link:
                machine.link = None
                self.abilities.leave(spec.name)
                if not self._closed:
                    self._step(LinkLost(spec.name, hello.instance, link.why or "its link was dropped"))

    def _proven_key(self, hello: NodeHello) -> str:
        """Return the key that the node has, or gets, after it has shown who it is; raises Unauthorized."""
        name = check_name(hello.name)
        if name == self.here.name and self.local is None:
            raise Conflict(f"{name} is the name of the gateway's own machine (node.name)", component="cluster")
        known = self._records.get(name)
        if hello.key and known is not None and hmac.compare_digest(digest_of(hello.key), known.key_digest):
            return hello.key
        if not hello.ticket:
            told = f"the key of {name} is not known here (any more): give it a ticket (tangram node ticket {name})"
            raise Unauthorized(told, component="cluster")
        self._tickets.take(hello.ticket, name)
        return new_node_key()

    def _described(self, hello: NodeHello) -> NodeSpec:
        """Return the node as the scheduler may use it; raises InvalidConfig, or Conflict if it has changed."""
        spec = described(hello)
        machine = self._machines.get(spec.name)
        if machine is not None and is_changed(spec, machine.spec, awaited=spec.name in self._awaited):
            told = f"{spec.name} has other cores, memory or devices than before: drain it first, or give it a new name"
            raise Conflict(told, component="cluster", retry_after_s=self._config.times.lost_after_s)
        return spec

    def _admitted(self, hello: NodeHello) -> bool:
        """Ask the roster; return whether the node must end all that it has first. Raises Conflict for a refusal."""
        greeted = Greeted(hello.name, hello.instance, hello.draining, *told(hello.unfit, hello.newcomers))
        for verdict in self._step(greeted):
            if isinstance(verdict, TurnedAway):
                raise Conflict(verdict.why, component="cluster", retry_after_s=verdict.retry_after_s)
        member = self._roster.get(hello.name)
        return member is not None and member.fenced

    async def _welcome(self, machine: ClusterNode, link: NodeLink, hello: NodeHello, key: str, fence: bool) -> None:
        name, config = hello.name, self._config
        self._records.joined(machine.spec, digest_of(key))
        await self._records.durable()
        beat_s, silent_s = config.link.beat_s, config.link.silent_s
        welcome = NodeWelcome(
            generation=self._records.generation,
            key=key,
            beat_s=beat_s,
            silent_s=silent_s,
            fence=fence,
        )
        link.send(welcome)
        within_s, largest_bytes = config.times.lost_after_s, config.link.frame_max_bytes
        inventory = await link.receive(Inventory, within_s, frame_max_bytes=largest_bytes)
        machine.remote.attach(link, inventory, recovering=name in self._awaited)
        serving = asyncio.create_task(machine.remote.serve(link))
        reconciling = asyncio.create_task(self._reconcile(machine, hello, inventory))
        try:
            await asyncio.wait({serving, reconciling}, return_when=asyncio.FIRST_COMPLETED)
            if reconciling.done():
                reconciling.result()  # which raises what it met
            why = await serving
            self._log.info("a node is gone", node=name, why=why)
        finally:
            for task in (serving, reconciling):
                task.cancel()
            await asyncio.gather(serving, reconciling, return_exceptions=True)

    async def _reconcile(self, machine: ClusterNode, hello: NodeHello, inventory: Inventory) -> None:
        """Bring both sides to agree on what runs and lives there, then let the node serve."""
        name, remote = hello.name, machine.remote
        assert self._trajectories is not None and self._fleet is not None and self._recovery is not None
        self.abilities.join(name, remote.prepare)
        machine.spec = replace(machine.spec, able=self.abilities.able(name))
        if name in self._awaited:
            here = set(self._trajectories.on_node(name))
            there = {facts.trajectory for facts in inventory.trajectories if facts.alive}
            remote.mark_lost(here - there)
            for trajectory in there - here:
                self._spawn(remote.end_trajectory(trajectory))
            self.engine.tell(NodeJoined(node=machine.spec))
            self._awaited.discard(name)
            await self._recovery.recover_on(name, NodeReattachment(remote))
        else:
            self.engine.tell(NodeJoined(node=machine.spec))
        self._records.compared(name, inventory.epoch)
        self._trajectories.choose_on(name, remote.choose)
        await self._snapshots.compare(remote)
        self._models_changed(name)
        self._step(Reconciled(name, hello.instance))
        self._log.info("a node serves", node=name, cores=machine.spec.cores, devices=machine.spec.devices)
        # An image may have to be pulled: until then it serves what it is able to run already.
        await self.abilities.prepare_all(name, tuple(filter(_needs_node, self._functions())))
        self._again(partial(self._as_told, name))

    async def _as_told(self, name: str, function: FunctionSpec) -> None:
        """Take the word of a node that has joined: the others have said already whether they can run the function."""
        if _needs_node(function):
            self.abilities.require_on(name, function)
        else:
            assert self._prepare_here is not None
            await self._prepare_here(function)

    def _machine(self, spec: NodeSpec, epoch: str = "") -> ClusterNode:
        machine: ClusterNode | None = None

        def instance() -> str:
            return "" if machine is None else machine.instance

        voice = Voice(spec.name, instance, self._step, self._is_empty)
        machine = ClusterNode(
            spec, RemoteNode(spec.name, on_event=voice, archives=self._archives, sessions=self._sessions, epoch=epoch)
        )
        machine.remote.models.on_change = partial(self._models_changed, spec.name)
        return machine

    def _models_changed(self, name: str) -> None:
        """Tell the scheduler what a node's model services cost, and on which of its devices they are."""
        machine = self._machines.get(name)
        if machine is not None and machine.spec.devices and self._services is not None:
            models = machine.remote.models
            self._declared.declare(*self._functions())
            self._services.learn(name, self._declared.services(models.services))
            self.engine.report_residency(name, self._declared.resident(models.resident, machine.spec.devices))

    # -- what the roster decides

    def _step(self, event: RosterEvent) -> list[Verdict]:
        verdicts = self._roster.step(self._clock.now(), event)
        for verdict in verdicts:
            match verdict:
                case Shut():
                    self.engine.tell(NodeClosed(node=verdict.node, why=verdict.why, finishing=verdict.finishing))
                    self._log.warning("a node is closed", node=verdict.node, why=verdict.why)
                    self._note_drain(verdict.node)
                case Serves():
                    self.engine.tell(NodeOpened(node=verdict.node))
                    self._records.moved(verdict.node, "ready")
                case CountedOut():
                    self._count_out(verdict)
                case _:
                    pass
        self._arm()
        return verdicts

    def _note_drain(self, name: str) -> None:
        member = self._roster.get(name)
        if member is not None and member.draining:
            self._records.moved(name, "draining")

    def _count_out(self, verdict: CountedOut) -> None:
        """Everything on the node is lost: first the scheduler decides what runs again, then whoever waits is told."""
        name = verdict.node
        machine = self._machines.pop(name, None)
        log = self._log.error if verdict.victims else self._log.info
        log("a node is counted out", node=name, why=verdict.why, with_what_it_had=verdict.victims)
        known = self._records.get(name)
        if known is not None and known.state == "draining":
            for starter in (self.local, self.ray):
                if starter is not None:
                    starter.left(name)
        self._records.moved(name, "lost")
        self.abilities.forget(name)
        self._snapshots.lose(name, verdict.why)
        if self._services is not None:
            self._services.forget(name)
        assert self._trajectories is not None and self._fleet is not None
        unaware = [one for one in self._trajectories.on_node(name) if self._is_unaware(one)]
        self._trajectories.lose(unaware)
        self._fleet.lose(unaware)
        self.engine.tell(NodeLost(node=name))
        if name in self._awaited and self._recovery is not None:
            self._awaited.discard(name)
            self._spawn(self._recovery.recover_on(name, None))
        if machine is not None:
            machine.remote.lost(verdict.why)
            if machine.link is not None:
                machine.link.close(verdict.why)

    def _is_unaware(self, trajectory: str) -> bool:
        """Whether no action of the trajectory is told of the loss of its sandbox by its own end."""
        found = self.engine.trajectory(trajectory)
        return found is None or found["state"] == "idle"

    def _arm(self) -> None:
        """Come back when time alone decides something, or a draining node may be empty."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        due_s = self._roster.next_s()
        waits_s = [] if due_s is None else [max(0.0, due_s - self._clock.now())]
        if self._roster.draining:
            waits_s.append(_LOOK_S)
        if waits_s:
            self._timer = asyncio.get_running_loop().call_later(min(waits_s), self._tick)

    def _tick(self) -> None:
        self._timer = None
        for name in self._roster.draining:
            if self._is_empty(name):
                self._step(Emptied(name))
        self._step(Ticked())

    def _able_changed(self, name: str) -> None:
        """Tell the scheduler what a machine that it knows is able to run by now."""
        if self._engine is None:
            return
        if self._inline and name == self.here.name:
            self.here = replace(self.here, able=self.abilities.able(name))
            self.engine.tell(NodeJoined(node=self.here))
            return
        machine, member = self._machines.get(name), self._roster.get(name)
        if machine is not None and member is not None and member.state in HEARD - {NodeState.JOINING}:
            machine.spec = replace(machine.spec, able=self.abilities.able(name))
            self.engine.tell(NodeJoined(node=machine.spec))

    def _place_of(self, trajectory: str) -> str:
        found = self.engine.trajectory(trajectory)
        return "" if found is None else str(found["node"])

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _needs_node(function: FunctionSpec) -> bool:
    """Whether its actions run on a node, and not in the gateway itself."""
    return function.sandbox is not None or not {"cpu", "gpu"}.isdisjoint(function.cost)


async def open_cluster(
    config: ClusterConfig,
    here: NodeSpec,
    paths: Sequence[Path],
    store: Store,
    server: ServerConfig,
    clock: Clock,
    wall: Callable[[], float],
    snapshot_age_s: float,
    copies: HandlerCopies,
) -> Cluster:
    """Return the cluster of a gateway that starts; raises InvalidConfig or StorageUnavailable."""
    state_dir = server.state_dir
    records = NodeRecords(store, wall, nodes_max=config.times.nodes_max)
    await records.open()
    tickets = TicketOffice(signing_key(state_dir), records.generation, config.ticket_ttl_s, wall=wall)
    directory = state_dir / "cluster"
    directory.mkdir(mode=0o700, exist_ok=True)
    certificate = await asyncio.to_thread(ensure_certificate, directory)
    archives = HandlerArchives(copies.excluded, state_dir / UPLOADS, copies)
    snapshots = NodeSnapshots(store, config.snapshots, age_s=snapshot_age_s, wall=wall)
    await snapshots.open(records.all)
    cluster = Cluster(
        config,
        here,
        records=records,
        tickets=tickets,
        certificate=certificate,
        clock=clock,
        archives=archives,
        snapshots=snapshots,
    )
    if config.local == "process":
        lost_after_s = config.times.lost_after_s
        cluster.local = LocalNode(here.name, state_dir, paths, cluster, clock, lost_after_s=lost_after_s)
    return cluster
