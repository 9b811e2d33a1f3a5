"""The machines of a Ray cluster as nodes: each that holds its reservation gets a ticket, and joins by it over our door.

Ray is a child process away (`runtimes.node.ray`). What is known here is built anew from what the driver says: a daemon
that was started by the gateway before is found by its actor and not started twice.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from manager.clock import Clock
from manager.errors import CodedError
from runtimes.chores import end_chores
from runtimes.node.ray.process import RayDriverProcess, RayMessage, RaySettings
from tangram.types import NodeTicket, RayMachineState, RayMachineStatus

#: Seconds between two looks at who has not joined yet, and longest wait until such a one gets another ticket.
LOOK_S, AGAIN_MAX_S = 1.0, 600.0
#: Seconds after which a machine that a new driver has not spoken of is forgotten.
UNREPORTED_S = 60.0
#: Seconds for daemons to end and reservations to be given back at the end of a gateway that releases them.
RELEASE_S = 90.0
#: Problems that are told at once.
PROBLEMS_MAX = 8
#: In Ray's words for a machine that was ended on purpose.
ENDED = "received SIGTERM"


@dataclass(slots=True, eq=False)
class RayMachine:
    """One machine that Ray has told of."""

    id: str
    node: str
    address: str
    labels: Mapping[str, str]
    since_s: float
    state: RayMachineState = "found"
    why: str = "its actor is being made"
    #: Whether an actor holds what is reserved.
    held: bool = False
    #: Tickets handed over since it last joined, and when the next one is due.
    tickets: int = 0
    again_s: float = 0.0
    #: When a new driver began that has not spoken of it; None once it has.
    unreported_s: float | None = None


class RayNodes:
    """Starts daemons by tickets, and says how far each machine is. Use from one event loop."""

    def __init__(
        self,
        settings: RaySettings,
        *,
        ticket: Callable[[str], NodeTicket],
        is_connected: Callable[[str], bool],
        drain: Callable[[str, str], None],
        report: Callable[[str, str, bool], None],
        ticket_ttl_s: float,
        clock: Clock,
    ) -> None:
        """``ticket`` and ``is_connected`` are of a node; ``drain`` has Ray take one away soon, and says why.

        ``report`` is called with what Ray says of a node's machine, and whether it was ended on purpose.
        """
        self._settings = settings
        self._ticket, self._is_connected, self._drain, self._report = ticket, is_connected, drain, report
        self._ticket_ttl_s = ticket_ttl_s
        self._clock = clock
        self._machines: dict[str, RayMachine] = {}
        self._driver: RayDriverProcess | None = None
        self._tasks: list[asyncio.Future[None]] = []
        #: Set when no machine holds a reservation any more.
        self._released = asyncio.Event()
        self._log = structlog.get_logger("gateway.cluster")

    def open(self, driver: RayDriverProcess) -> None:
        """Have a driver run, and machines join, until `close`."""
        self._driver = driver
        self._tasks = [asyncio.ensure_future(driver.run()), asyncio.ensure_future(self._look_for_ever())]

    async def close(self) -> None:
        """End the driver; daemons stay, or are ended first if so configured."""
        if self._settings.at_end == "release" and self._driver is not None:
            away = self._driver.warning()
            if away is None:
                await self._release_all()
            else:
                self._log.warning("nothing is given back to Ray: daemons end by themselves when unattended", why=away)
        await end_chores(*self._tasks)

    def left(self, node: str) -> None:
        """A node was drained and is gone: its machine is given back to Ray."""
        machine = self._owner(node)
        if machine is not None and machine.held and self._driver is not None:
            self._move(machine, "released", "its node was drained")
            self._driver.release(machine.id)

    # -- for people

    def status(self) -> tuple[RayMachineStatus, ...]:
        """Return every machine, by the name of its node."""
        now_s = self._clock.now()
        return tuple(
            RayMachineStatus(
                machine=each.id,
                node=each.node,
                address=each.address,
                state=each.state,
                why=each.why,
                since_s=max(0.0, now_s - each.since_s),
            )
            for each in sorted(self._machines.values(), key=lambda each: (each.node, each.id))
        )

    def warnings(self) -> list[str]:
        """Return what should be looked at: Ray is away, or machines wait or fail."""
        away = None if self._driver is None else self._driver.warning()
        problems = [f"{each.node}: {each.why}" for each in self.status() if each.state in ("waiting", "failed")]
        if (more := len(problems) - PROBLEMS_MAX) > 0:
            problems[PROBLEMS_MAX:] = [f"{more} more machines of Ray's wait or fail"]
        return [*([] if away is None else [away]), *problems]

    # -- what the driver says

    def take(self, message: RayMessage) -> None:
        """Take in one message."""
        machine = self._machines.get(message.node)
        match message.kind:
            case "connected":
                self._log.info("a Ray cluster is seen", ray=message.version, driver=message.pid)
                for each in self._machines.values():
                    each.unreported_s = self._clock.now()
            case "alive":
                self._found(message)
            case "dead":
                self._died(message)
            case _ if machine is not None:
                self._update(machine, message)

    def _found(self, message: RayMessage) -> None:
        machine = self._machines.get(message.node)
        if machine is None:
            machine = RayMachine(
                id=message.node,
                node=self._name_of(message),
                address=message.address,
                labels=message.labels,
                since_s=self._clock.now(),
            )
            self._machines[message.node] = machine
            self._log.info("a machine of Ray's is to be a node", machine=machine.id, node=machine.node)
        machine.unreported_s = None
        if self._owner(machine.node) is machine:
            self._report(machine.node, "Ray has it", False)

    def _died(self, message: RayMessage) -> None:
        machine = self._machines.get(message.node)
        if machine is None:
            return
        self._forget(machine)
        self._log.warning("Ray has lost a machine", machine=machine.id, node=machine.node, why=message.why)
        if self._owner(machine.node) is None:
            self._report(machine.node, f"Ray: {message.why}", ENDED in message.why)

    def _update(self, machine: RayMachine, message: RayMessage) -> None:
        match message.kind:
            case "actor":
                self._hold(machine)
            case "started" if not message.daemon:
                report = message.why or f"see daemon.log in {self._state_dir(machine)} there"
                self._move(machine, "failed", f"its daemon did not come up: {report}")
            case "waiting":
                self._move(machine, "waiting", message.reservation())
            case "actor_failed":
                machine.held = False
                self._note_released()
                self._move(machine, "failed", f"its actor failed: {message.why}")
            case "refused" if machine.state == "released":
                machine.held = False  # there is nothing to give back any more
                self._note_released()
            case "refused" if machine.state == "starting":
                self._move(machine, "failed", message.why)
            case "draining":
                if self._owner(machine.node) is machine:
                    self._drain(machine.node, "Ray drains its machine")
                self._move(machine, "draining", "Ray drains it")
            case "released":
                machine.held = False
                self._log.info("a machine is given back to Ray", node=machine.node, its_daemon_has_gone=message.gone)
                self._note_released()

    # -- joining

    def _hold(self, machine: RayMachine) -> None:
        """Its actor is there: use it, or give it back if its node was drained under this gateway.

        Nothing is started on a machine that Ray drains.
        """
        machine.held, machine.tickets = True, 0
        self._released.clear()
        if machine.state not in ("released", "draining"):
            self._start(machine)
        elif machine.state == "released" and self._driver is not None:
            self._driver.release(machine.id)

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Note who has joined, hand another ticket to who has not in time, and forget who is not told of any more."""
        now_s = self._clock.now()
        for machine in list(self._machines.values()):
            if machine.unreported_s is not None and now_s - machine.unreported_s > UNREPORTED_S:
                self._forget(machine)
            elif machine.held and machine.state in ("starting", "serving", "failed", "found"):
                self._look_at(machine, now_s)

    def _look_at(self, machine: RayMachine, now_s: float) -> None:
        if self._owner(machine.node) is not machine:
            return
        if self._is_connected(machine.node):
            machine.tickets = 0
            machine.again_s = now_s + self._ticket_ttl_s
            self._move(machine, "serving", "")
        elif machine.state == "serving":
            self._move(machine, "starting", "its node is not heard")
        elif now_s >= machine.again_s:
            self._start(machine)

    def _start(self, machine: RayMachine) -> None:
        """Have a machine's actor start its daemon, or watch over the one that lives, with a ticket to join by."""
        now_s, driver = self._clock.now(), self._driver
        owner = self._owner(machine.node)
        if owner is not None and owner is not machine:
            message = f"machine {owner.id[:12]} of Ray's is node {machine.node} already: tell them apart in cluster.ray"
            self._move(machine, "failed", f"{message} (name: ray-{{id}}, and {{name}} in state_dir)")
            return
        machine.again_s = now_s + min(AGAIN_MAX_S, self._ticket_ttl_s * 2.0 ** min(machine.tickets, 20))
        machine.tickets += 1
        try:
            ticket = self._ticket(machine.node)
        except CodedError as error:
            self._move(machine, "failed", f"no ticket for it: {error.message}")
            return
        self._move(machine, "starting", "its daemon is started, and has not joined yet")
        if driver is not None:
            driver.start_daemon(machine.id, self._command(machine, ticket), {}, self._state_dir(machine))

    def _command(self, machine: RayMachine, ticket: NodeTicket) -> list[str]:
        options = {
            "--gateway": ticket.gateway,
            "--fingerprint": ticket.fingerprint,
            "--name": machine.node,
            "--ticket": ticket.ticket,
            "--state-dir": self._state_dir(machine),
        }
        labels = {key: value for key, value in machine.labels.items() if not key.startswith("ray.io/")}
        if labels:
            options["--labels"] = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        words = [word for pair in options.items() for word in pair]
        return [*self._settings.command, "node", "join", *words, *self._settings.join]

    # -- names

    def _name_of(self, message: RayMessage) -> str:
        name = self._settings.name.replace("{address}", message.address).replace("{id}", message.node[:12])
        return re.sub(r"[^A-Za-z0-9_.-]", "-", name)

    def _state_dir(self, machine: RayMachine) -> str:
        return self._settings.state_dir.replace("{name}", machine.node)

    def _owner(self, node: str) -> RayMachine | None:
        """Return the machine that has the name of a node: the first that holds a reservation, else the first."""
        named = [each for each in self._machines.values() if each.node == node]
        return next((each for each in named if each.held), named[0] if named else None)

    def _move(self, machine: RayMachine, state: RayMachineState, why: str) -> None:
        """Note how far it is. One that was given back stays so, whatever becomes of its actor."""
        if machine.state == "released" or (machine.state, machine.why) == (state, why):
            return
        if machine.state != state:
            machine.since_s = self._clock.now()
        if state in ("waiting", "failed"):
            self._log.warning("a machine of Ray's is no node", node=machine.node, state=state, why=why)
        machine.state, machine.why = state, why

    def _forget(self, machine: RayMachine) -> None:
        del self._machines[machine.id]
        self._note_released()

    # -- the end

    async def _release_all(self) -> None:
        assert self._driver is not None
        self._note_released()
        for machine in self._machines.values():
            self._move(machine, "released", "the gateway ends")
            if machine.held:
                self._driver.release(machine.id)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._released.wait(), RELEASE_S)

    def _note_released(self) -> None:
        if not any(machine.held for machine in self._machines.values()):
            self._released.set()
