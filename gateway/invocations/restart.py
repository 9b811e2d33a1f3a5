"""Take up, after a restart, what the gateway before left behind: invocations, trajectories and quota counts."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from gateway import serialization
from gateway.invocations.invocations import GONE, RETRY_MIN_S, Admission, Invocations, LiveInvocation
from gateway.invocations.logs import Logs
from gateway.invocations.record import Mode, Record, action_id_of
from gateway.registry import Registry
from gateway.store.store import OpenTrajectory, Store
from manager.action import Lease, Outcome, State
from manager.engine import Engine
from manager.errors import ActionFailed, Draining, NotFound, Reason, StorageUnavailable
from manager.function import FunctionSpec, SandboxSpec
from manager.resources.pools import QuotaSpec, ResourceSpec
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.command import claims_of
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.runner.client import lost


class Reattachment:
    """Joins the records of an earlier gateway to what sandboxes and nodes still hold, and leaves to the next what runs.

    What runs on a node goes on there without a gateway: handlers too, as a daemon that is no part of it executes them.
    """

    def __init__(
        self,
        environments: Environments,
        node: Callable[[str], RemoteNode | None] = lambda name: None,
        nodes: Callable[[], Iterable[RemoteNode]] = tuple,
    ) -> None:
        """``environments`` are this machine's, ``node`` finds one that has joined or is awaited, of all ``nodes``."""
        self._environments = environments
        self._node, self._nodes = node, nodes
        #: What the claims of each held try begin with, and whether it runs.
        self._resumable: dict[str, bool] = {}
        self._taken: set[str] = set()

    def look(self) -> None:
        """See what the adopted sandboxes hold."""
        held = self._environments.resumable()
        self._resumable = {claim.rpartition("/")[0] + "/": each.running for claim, each in held.items()}

    def holds(self, invocation: LiveInvocation) -> bool:
        """Return whether a living sandbox holds the present try, which the record says has begun."""
        record = invocation.record
        begun = record.detached and record.state is State.RUNNING
        return begun and self.may_hold(invocation) and claims_of_try(record) in self._resumable

    def take_ended(self, invocation: LiveInvocation) -> bool:
        """Have how its present try ended be kept for it, though its record does not even tell of the begin."""
        claims = claims_of_try(invocation.record)
        ended = self._resumable.get(claims) is False and invocation.record.detached and self.may_hold(invocation)
        if ended:
            self._taken.add(claims)
        return ended

    def may_hold(self, invocation: LiveInvocation) -> bool:
        """Return whether work of its kind outlives the gateway that began it.

        Not models: which devices they compute on is not on record.
        """
        function = invocation.function
        is_handler = function is not None and function.handler is not None
        return invocation.inside or (is_handler and self._node(invocation.record.node or "") is not None)

    def never_started(self, invocation: LiveInvocation) -> bool:
        """Whether the present try is certain not to have begun, whatever the record feared."""
        record = invocation.record
        if not invocation.inside or not record.begun:
            return not record.begun
        return record.trajectory is not None and self._environments.never_started(
            record.trajectory, claims_of_try(record)
        )

    def take(self, invocation: LiveInvocation) -> None:
        """It goes on under this gateway."""
        self._taken.add(claims_of_try(invocation.record))

    async def end_unclaimed(self) -> None:
        """End what was not taken."""
        await self._environments.end_unclaimed(self._taken)
        self._resumable.clear()

    async def leave(self, invocation: LiveInvocation) -> bool:
        """Leave what runs to the next gateway, as it runs; return False where that cannot be."""
        holder = self._node(invocation.record.node or "") or self._environments
        return self.may_hold(invocation) and await holder.leave(claims_of_try(invocation.record))

    def detached(self, invocation: LiveInvocation) -> None:
        """It goes on without its caller, and from now on without this gateway too."""
        if self.may_hold(invocation):
            holder = self._node(invocation.record.node or "") or self._environments
            holder.detach(claims_of_try(invocation.record))

    def settled(self, invocation: LiveInvocation) -> None:
        """Let whoever holds its ends forget them, wherever its tries were: no gateway asks for them again."""
        record, node = invocation.record, self._node(invocation.record.node or "")
        if node is not None:
            node.acknowledge(claims_of_try(record))
        elif record.detached and self.may_hold(invocation):
            self._environments.acknowledge(record.trajectory, claims_of_try(record))
        for attempt in range(1, record.attempt):
            for each in self._nodes():
                each.acknowledge(claims_of_try(record, attempt))


def claims_of_try(record: Record, attempt: int = 0) -> str:
    """Return what the claims of the present try begin with, or those of an earlier one."""
    number = attempt or record.attempt
    return claims_of(action_id_of(record.id, number), number)


RESTARTED = "the gateway was restarted"


class Restart:
    """Takes over at the start (`recover`) and leaves behind at the end (`drain`)."""

    def __init__(
        self,
        *,
        invocations: Invocations,
        functions: Registry,
        store: Store,
        logs: Logs,
        admission: Admission,
        takeover: Reattachment,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._invocations = invocations
        self._functions = functions
        self._store = store
        self._logs = logs
        self._admission = admission
        self._takeover = takeover
        self._wall = wall
        self._log = structlog.get_logger("gateway.restart")

    async def recover(self, awaited: Callable[[Record], bool] = lambda record: False) -> Mapping[str, int]:
        """Decide on what an earlier gateway left unfinished, in order; returns how many went which way.

        One whose command its sandbox still holds goes on; else what was queued, or was being made ready, runs, and what
        ran runs again when its function is idempotent, else it is ``lost``; one whose caller went down with its
        connection is cancelled.

        What is ``awaited`` may run on a node that is not back yet: it counts as running, with its units and the turn of
        its trajectory, and the node's return or loss decides how it ends.
        """
        again: list[LiveInvocation] = []
        left: list[LiveInvocation] = []
        counts = {"queued": 0, "resumed": 0, "rerun": 0, "lost": 0, "cancelled": 0, "awaited": 0}
        self._takeover.look()
        for record in await self._store.unfinished():
            invocation = await self._enter(record)
            if awaited(record) and self._await(invocation):
                counts["awaited"] += 1
                if not record.detached:
                    left.append(invocation)
            else:
                counts[self._take_over(invocation, again)] += 1
        await self._takeover.end_unclaimed()
        self._invocations.submit(again)
        if left:
            await asyncio.sleep(0)  # their node is asked for them by now: what was not asked for cannot be cancelled
        for invocation in left:
            self._invocations.engine.cancel(
                action_id_of(invocation.record.id, invocation.record.attempt), f"{RESTARTED} and {GONE}"
            )
        return counts

    def awaited_on(self, node: str) -> Collection[str]:
        """Return what the claims begin with of that which an earlier gateway began on a node, and which is wanted."""
        living = [each for each in self._invocations.living if each.resumed and each.record.node == node]
        return {claims_of_try(each.record) for each in living}

    async def _enter(self, record: Record) -> LiveInvocation:
        """Let it live on, with its log."""
        function = self._function(record.function)
        limit_bytes = 0 if function is None else function.log_limit_bytes
        log = await self._logs.resume(record.seq, limit_bytes, record.started_s or record.accepted_s)
        fields = serialization.loads_object(record.input or b"{}")
        invocation = LiveInvocation(record=record, function=function, input=fields, log=log)
        self._invocations.enter(invocation)
        return invocation

    def _await(self, invocation: LiveInvocation) -> bool:
        """Have its node asked for it at its return; False if it has not begun there, or cannot go on."""
        return invocation.record.begun and self._takeover.may_hold(invocation) and self._invocations.resume(invocation)

    def _take_over(self, invocation: LiveInvocation, again: list[LiveInvocation]) -> str:
        """Decide on one that no other machine can tell of."""
        record, function = invocation.record, invocation.function
        was_queued = record.state is State.QUEUED
        if self._takeover.holds(invocation) and self._invocations.resume(invocation):
            self._takeover.take(invocation)
            return "resumed"
        if invocation.log is not None and not (was_queued and self._takeover.take_ended(invocation)):
            invocation.log.pass_over_nothing()
        if record.detached and function is not None and not was_queued and self._takeover.never_started(invocation):
            self._invocations.take_back(invocation)
            was_queued = True
        if not record.detached:
            record.end(State.CANCELLED, Reason.CANCELLED, f"{RESTARTED} and {GONE}", self._wall())
        elif function is None:
            record.end(State.LOST, Reason.GATEWAY_RESTART, f"{RESTARTED} without its function", self._wall())
        elif not was_queued and not function.idempotent:
            record.end(State.LOST, Reason.GATEWAY_RESTART, f"{RESTARTED} while it ran", self._wall())
        if record.terminal:
            record.dead = record.mode is Mode.ASYNC and record.state is State.LOST
            self._invocations.finish(invocation, waited=was_queued)
            return "lost" if record.state is State.LOST else "cancelled"
        if not was_queued:
            outcome = Outcome(state=State.LOST, reason=Reason.GATEWAY_RESTART, message=RESTARTED)
            self._invocations.requeue(invocation, record.tried(outcome, self._wall()))
        again.append(invocation)
        return "queued" if was_queued else "rerun"

    def _function(self, name: str) -> FunctionSpec | None:
        try:
            return self._functions.get(name)
        except NotFound:
            return None

    async def drain(self, grace_s: float) -> int:
        """Refuse new work and wait for what runs; returns how many are left for the next gateway."""
        self._admission.draining = True
        await self._invocations.engine.drain(grace_s)
        self._invocations.detach_scheduler()
        with suppress(StorageUnavailable):
            await self._store.commit()  # what was about to begin has begun: nothing else will
        for invocation in self._invocations.living:
            await self._leave_behind(invocation)
        try:
            await self._store.commit()
        except StorageUnavailable as error:
            self._log.error("the next gateway finds the record as it was", reason=error.message)
        return len(self._invocations.living)

    async def _leave_behind(self, invocation: LiveInvocation) -> None:
        """What is detached stays as it is, or runs on, for the next gateway; else what may not run again ends here."""
        record = invocation.record
        assert invocation.function is not None
        waited = record.state is State.QUEUED
        if record.detached:
            self._logs.leave(record.seq)  # what its command says from now on is the next gateway's
            if not waited and not self._invocations.has_begun(invocation):
                self._invocations.take_back(invocation)
                waited = True
            if waited or await self._takeover.leave(invocation) or invocation.function.idempotent:
                invocation.leave_behind(_draining("the gateway is shutting down; the next one goes on with the call"))
                return
        fault = self._invocations.engine.fault
        if fault is not None:
            record.end(State.FAILED, Reason.INTERNAL, fault, self._wall(), ran=True)
            record.dead = record.mode is Mode.ASYNC
        elif waited:
            message = "the gateway was shut down before it started"
            invocation.refusal = _draining(message)  # who waits may send it again: nothing has run
            record.end(State.CANCELLED, Reason.CANCELLED, message, self._wall())
        else:
            message = "the gateway was shut down while it ran"
            record.end(State.LOST, Reason.GATEWAY_RESTART, message, self._wall(), ran=True)
            record.dead = record.mode is Mode.ASYNC
        self._invocations.finish(invocation, waited=waited)


def _draining(why: str) -> Draining:
    """What is told to whoever waits for a call: to send it again, which joins it or runs what has not run."""
    return Draining(why, component="invocations", retry_after_s=RETRY_MIN_S)


#: Trajectories of whose loss no action was told; beyond it the eldest are forgotten.
LOST_MAX = 65536
#: Of an environment that is on no record.
DEFAULT_TASK = "default"


class TrajectoryRecovery:
    """Keeps on record which trajectories have an environment; the sandboxes themselves are `Environments`'."""

    def __init__(self, store: Store, environments: Environments) -> None:
        self._store = store
        self.environments = environments
        #: The node that a trajectory is on; empty for this machine.
        self.home: Callable[[str], str] = lambda name: ""
        #: This machine's name, if there are others on which the scheduler could place what lives here.
        self.here = ""
        self._open: dict[str, OpenTrajectory] = {}
        #: Those whose environment is lost, with a node or an earlier gateway, and of which no action was told yet: the
        #: one register of them. The latest last.
        self._lost: dict[str, None] = {}
        #: The snapshots that trajectories began with.
        self._began_with: dict[str, str] = {}

    def opened(self, name: str, task: str, function: FunctionSpec) -> bool:
        """It has, or is about to get, an environment; whether that is news, to be made durable first."""
        if name in self._open:
            return False
        spec = function.sandbox or self.environments.settings.default
        memory_bytes = 0 if function.sandbox is None else spec.memory_bytes
        chosen = msgspec.json.encode(spec).decode() if spec.chosen else ""
        self._open[name] = OpenTrajectory(task, memory_bytes, spec.idle_ttl_s, chosen, self.home(name))
        if spec.snapshot:
            self._began_with[name] = spec.snapshot
        self._store.save_trajectory(name, self._open[name])
        return True

    def keep_holds(self, name: str, holds: str) -> None:
        """Note which clients hold it, as JSON."""
        known = self._open.get(name)
        if known is not None:
            self._open[name] = replace(known, holds=holds)
            self._store.save_trajectory(name, self._open[name])

    def holds(self) -> Mapping[str, str]:
        """Return which clients hold trajectories, as JSON, by trajectory."""
        return {name: known.holds for name, known in self._open.items() if known.holds}

    def ended(self, name: str) -> None:
        """Its environment was removed."""
        self._began_with.pop(name, None)
        if self._open.pop(name, None) is not None:  # else it ends with its node, and its loss is to be told
            self._lost.pop(name, None)
            self._store.save_trajectory(name, None)

    def on_node(self, node: str) -> list[str]:
        """Return the trajectories that have an environment on another machine."""
        return [name for name, known in self._open.items() if known.node == node]

    def choose_on(self, node: str, choose: Callable[[str, SandboxSpec], None]) -> None:
        """Tell another machine what its trajectories have chosen, for when their sandboxes are made anew."""
        for name in self.on_node(node):
            if self._open[name].sandbox:
                choose(name, _chosen(self._open[name]))

    def snapshots_in_use(self) -> Mapping[str, str]:
        """Return the snapshots that living trajectories began with, and one trajectory of each."""
        return {snapshot: name for name, snapshot in self._began_with.items()}

    def lose(self, names: Iterable[str]) -> None:
        """Their environments are lost; the next action of each is to be told, by this gateway or the next one."""
        for name in names:
            began_with = self._began_with.pop(name, "")
            if (known := self._open.pop(name, None)) is not None:
                chosen = "" if began_with else known.sandbox  # that snapshot was on the node, too
                self._store.save_trajectory(name, replace(known, node="", sandbox=chosen))
            self._lost[name] = None
        while len(self._lost) > LOST_MAX:
            self.take_loss(next(iter(self._lost)))

    def take_loss(self, name: str | None) -> ActionFailed | None:
        """Return the end of the action that is told now that a trajectory's environment is lost; None if it is not."""
        if name is None or name not in self._lost:
            return None
        del self._lost[name]
        if name not in self._open:
            self._store.save_trajectory(name, None)
        why = "is gone, with its node or with an earlier gateway; what was in it is lost"
        return lost(f"the sandbox of trajectory {name!r} {why}")

    async def adopt(self, nodes: Collection[str] = ()) -> Mapping[str, int]:
        """Take over the environments that an earlier gateway left; how many live on, and how many are lost.

        Those on ``nodes``, which may come back, count as neither.

        To be called before anything makes a sandbox: what is no trajectory's is removed.
        """
        self._open = await self._store.trajectories()
        living = {name: self.environments.get(name) for name in await self.environments.start()}
        for name, sandbox in living.items():
            if name not in self._open and sandbox is not None:
                spec = sandbox.spec
                self._open[name] = OpenTrajectory(DEFAULT_TASK, spec.memory_bytes, spec.idle_ttl_s)
                self._store.save_trajectory(name, self._open[name])
        for name, known in self._open.items():
            if known.sandbox:
                spec = _chosen(known)
                self.environments.choose(name, spec)
                if spec.snapshot:
                    self._began_with[name] = spec.snapshot
        away = {name for name, known in self._open.items() if known.node in nodes}
        self._lost = {name: None for name in self._open if name not in living and name not in away}
        return {"adopted": len(living), "environment_lost": len(self._lost)}

    def release_lost(self) -> None:
        """Let the next actions of those whose environment is lost run on any machine."""
        self.lose(list(self._lost))

    def tell(self, engine: Engine) -> None:
        """Let the scheduler know of them all, before any of their actions is submitted.

        Those whose environment is lost are among them where there is no other machine: they go on here.
        """
        for name, known in self._open.items():
            engine.adopt_trajectory(
                name, known.task, memory_bytes=known.memory_bytes, ttl_s=known.ttl_s, node=known.node or self.here
            )


def _chosen(known: OpenTrajectory) -> SandboxSpec:
    return msgspec.json.decode(known.sandbox, type=SandboxSpec)


#: Instants that a window is kept as; each stands for what ended just before it.
INSTANTS = 100


@dataclass(slots=True)
class _Window:
    """Units of one quota: of calls under way, and of ended ones by the latest instant at which they ended."""

    running: int = 0
    ended: Counter[float] = field(default_factory=Counter)


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The document of one quota."""

    running: int = 0
    ended: Sequence[tuple[float, int]] = ()


class QuotaRecord:
    """Counts calls as they begin and end; one small document of the store for each quota."""

    def __init__(
        self, store: Store, resources: Callable[[], Mapping[str, ResourceSpec]], wall: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._resources = resources
        self._wall = wall
        self._windows: dict[str, _Window] = {}

    async def take_up(self, engine: Engine) -> None:
        """Tell the engine what earlier gateways consumed. What was under way when one died counts as ended now."""
        for name, spec in self._quotas().items():
            text = await self._store.document(_document(name))
            result = _Saved() if text is None else msgspec.json.decode(text, type=_Saved)
            now_s, window = self._wall(), self._window(name)
            for at_s, units in result.ended:
                window.ended[min(at_s, now_s)] += units
            self._forget(window, spec, now_s)
            ages = [(now_s - at_s, units) for at_s, units in sorted(window.ended.items())]
            engine.tell_consumed(name, ages, running=result.running)
            if result.running:
                window.ended[now_s] += result.running
                self._save(name)

    def begin(self, lease: Lease) -> Mapping[str, int]:
        """Note the quota units that an action consumes, if any; they are to be durable before it asks."""
        resources = self._resources()
        used = {}
        for kind, grant in lease.grants.items():
            if isinstance(resources.get(kind), QuotaSpec):
                used[kind] = grant.units
        for name, units in used.items():
            self._window(name).running += units
            self._save(name)
        return used

    def again(self, used: Mapping[str, int]) -> None:
        """The action makes its call once more: what the try before consumed returns a period from now."""
        for name, units in used.items():
            self._window(name).running += units
        self.end(used)

    def end(self, used: Mapping[str, int]) -> None:
        """The action that consumed them has ended: they return a period from now."""
        quotas, now_s = self._quotas(), self._wall()
        for name, units in used.items():
            window = self._window(name)
            window.running -= units
            if name in quotas:
                width_s = quotas[name].period_s / INSTANTS
                window.ended[math.ceil(now_s / width_s) * width_s] += units
                self._forget(window, quotas[name], now_s)
            self._save(name)

    def _quotas(self) -> dict[str, QuotaSpec]:
        return {name: spec for name, spec in self._resources().items() if isinstance(spec, QuotaSpec)}

    def _window(self, name: str) -> _Window:
        return self._windows.setdefault(name, _Window())

    @staticmethod
    def _forget(window: _Window, spec: QuotaSpec, now_s: float) -> None:
        for at_s in [at_s for at_s in window.ended if at_s + spec.period_s <= now_s]:
            del window.ended[at_s]

    def _save(self, name: str) -> None:
        window = self._window(name)
        body = _Saved(running=window.running, ended=sorted(window.ended.items()))
        self._store.save_document(_document(name), msgspec.json.encode(body).decode())


def _document(name: str) -> str:
    return f"quota/{name}"
