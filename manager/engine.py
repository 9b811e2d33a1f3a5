"""The engine: the asynchronous shell of the scheduling core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from manager.action import Action, Chunk, Lease, Outcome, Settlement, State, noun
from manager.clock import Clock, MonotonicClock
from manager.core.core import Core
from manager.core.outside import OutsideQueue
from manager.core.views import (
    queue_view,
    replicas_view,
    resources_view,
    summary,
    tasks_view,
    trajectories_view,
    trajectory_view,
)
from manager.errors import CapacityExceeded, CodedError, Conflict, Draining, Reason, TrajectoryHasEnded, Unsatisfiable
from manager.events import (
    Abort,
    CancelRequested,
    Command,
    EndTrajectory,
    Event,
    Execute,
    Finished,
    NodeClosed,
    NodeJoined,
    NodeLost,
    NodeOpened,
    Reconfigured,
    Refuse,
    ReplicaEnded,
    Replicate,
    ResidencyReported,
    Resize,
    Resumed,
    Settle,
    Submitted,
    TrajectoryEnded,
    TrajectoryOpened,
    TryAgain,
    TryGranted,
    UnitsConsumed,
    WakeAt,
)
from manager.executor import Call, Executor
from manager.function import FunctionSpec
from manager.learning import History

T = TypeVar("T")
#: Ended trajectories of which it is kept why.
WHY_MAX = 1024
#: Starts work in the background, whose failure is logged.
Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]
#: What is done in a trajectory in the place of a call.
Work = Callable[[], Awaitable[None]]
#: `Engine.take`.
Take = Callable[[str, str, Work, str, FunctionSpec], Awaitable[None]]


class TrajectoryLifecycle:
    """Opens and ends environments for the engine; one of a name begins only when an earlier one is gone."""

    def __init__(
        self, core: Core, executor: Executor, feed: Callable[[Sequence[Event]], None], spawn: Spawn, take: Take
    ) -> None:
        self._core = core
        self._executor = executor
        self._feed = feed
        self._spawn = spawn
        self._take = take
        #: Callers that open one that did not live, by trajectory: the last of them ends it if none could.
        self._opening: Counter[str] = Counter()
        #: Callers that wait for a trajectory to leave the core.
        self._leaving: dict[str, asyncio.Future[None]] = {}
        #: Why those were ended last that nobody asked to end.
        self._why: dict[str, str] = {}
        #: Removals under way; each waits for an earlier one of its name.
        self.removals: dict[str, asyncio.Task[None]] = {}

    async def open(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Hold memory on a node, then make the environment that the function describes; idempotent.

        It stands in the queue for its memory. Raises Unsatisfiable if no node could ever hold it, CapacityExceeded if
        none could within the function's ``queue_timeout`` or too many trajectories live, what refuses an action, and
        what the executor raises: Conflict if it lives otherwise.
        """
        await self.until_ended(trajectory)
        self.check(trajectory, task)
        known = self._core.state.trajectories.get(trajectory)
        self._check_nodes(trajectory, function)
        make = partial(self._executor.open_trajectory, trajectory, task, function)
        if known is not None and not known.waiting and not self._opening[trajectory]:
            try:
                await make()
            except CodedError as error:
                if not isinstance(error, Conflict):  # what is of this opening alone ends none that lived before it
                    self._feed([TrajectoryEnded(trajectory=trajectory)])
                raise
            return
        ours = known is None or self._opening[trajectory] > 0
        self._opening[trajectory] += ours
        try:
            await self._take(trajectory, "opening", make, task, function)
        except BaseException:
            self._opening[trajectory] -= ours
            if ours and self._opening[trajectory] == 0:  # else another is about to open it, or has done so
                await self.end(trajectory)
            raise
        else:
            self._opening.pop(trajectory, None)
            self._why.pop(trajectory, None)
        finally:
            self._opening += Counter()  # without those of which there are none

    def _check_nodes(self, trajectory: str, function: FunctionSpec) -> None:
        """Raise Unsatisfiable, or in a cluster CapacityExceeded, if no node could hold its memory."""
        memory_bytes = 0 if function.sandbox is None else function.sandbox.memory_bytes
        if self._core.state.nodes.hosts_of(memory_bytes, function.placement):
            return
        if function.placement.function:  # of a cluster, whose nodes come and go
            raise CapacityExceeded(
                f"no node that is here could hold {memory_bytes} bytes for trajectory {trajectory}"
                f" and is able to run {function.name} (GET /v1/nodes)",
                component="engine",
                retry_after_s=self._core.retry_after_s(),
            )
        raise Unsatisfiable(
            f"no node could ever hold {memory_bytes} bytes for trajectory {trajectory}", component="engine"
        )

    def check(self, trajectory: str, task: str, *, living: bool = False) -> None:
        """Raise CapacityExceeded if it may not begin now; with ``living`` TrajectoryHasEnded if it would begin."""
        known = self._core.state.trajectories.get(trajectory)
        if living and (known is None or known.ending):
            why = f": {self._why[trajectory]}" if trajectory in self._why else ""
            raise TrajectoryHasEnded(f"trajectory {trajectory!r} has ended{why}", component="engine")
        crowded = self._core.crowded(trajectory, task) if known is None else None
        if crowded is not None:
            raise crowded

    async def end(self, trajectory: str) -> bool:
        """Cancel its actions, remove its environment, give its memory back; return False if there is none.

        Whoever ends it a second time waits for the first, too.
        """
        if self._core.state.trajectories.get(trajectory) is None:
            await self.until_removed(trajectory)
            return False
        self._feed([TrajectoryEnded(trajectory=trajectory)])
        await self.until_ended(trajectory)
        return True

    async def until_ended(self, trajectory: str) -> None:
        """Wait until a trajectory that is ending is gone with its environment."""
        while (known := self._core.state.trajectories.get(trajectory)) is not None and known.ending:
            leaving = self._leaving.setdefault(trajectory, asyncio.get_running_loop().create_future())
            await asyncio.shield(leaving)  # something of it is being killed
        await self.until_removed(trajectory)

    async def until_removed(self, trajectory: str) -> None:
        """Wait until an earlier environment of this name is gone."""
        removal = self.removals.get(trajectory)
        if removal is not None:
            await asyncio.wait([removal])

    @property
    def waiting(self) -> Iterable[asyncio.Future[None]]:
        """Return what callers wait on until the core says it."""
        return tuple(self._leaving.values())

    def remove(self, trajectory: str, why: str) -> None:
        """Have the environment of a trajectory that has left the core removed, for a reason, and tell the callers."""
        if why:
            logger.warning("trajectory %s was ended: %s", trajectory, why)
            self._why[trajectory] = why
            while len(self._why) > WHY_MAX:
                del self._why[next(iter(self._why))]
        leaving = self._leaving.pop(trajectory, None)
        if leaving is not None and not leaving.done():
            leaving.set_result(None)
        removal = self._spawn(self._remove(trajectory, self.removals.get(trajectory)))
        self.removals[trajectory] = removal
        removal.add_done_callback(lambda done: self._removed(trajectory, done))

    async def _remove(self, trajectory: str, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        await self._executor.end_trajectory(trajectory)

    def _removed(self, trajectory: str, done: asyncio.Task[None]) -> None:
        if self.removals.get(trajectory) is done:
            del self.removals[trajectory]


# The engine: the asyncio shell round the core. It carries events in and commands out, and decides nothing.
#
# Submissions and ends within one turn of the event loop are taken in at once and answered by one scheduling pass.

logger = logging.getLogger("manager.engine")

#: Seconds after which what a gateway that ends has refused may be asked for again.
DRAINING_S = 1.0
#: Seconds until a timer that rang too early is looked at again.
EARLY_S = 0.001
#: Waiting actions, and living trajectories, of one page if nothing else is asked for.
QUEUE_PAGE, TRAJECTORIES_PAGE = 100, 1000


@noun
class Submission:
    """An action, and what its runtime needs to know."""

    action: Action
    call: Call
    #: The instant from which it may start, on the engine's clock.
    not_before_s: float = 0.0


class _Job(NamedTuple):
    """A submission that has not settled: a call, or work."""

    call: Call | Work
    future: asyncio.Future[Settlement]


class Listener(Protocol):
    """Whoever wants to know what the engine does; called from the event loop, must not block and must not raise."""

    def started(self, action: Action, lease: Lease, queue_s: float) -> None: ...

    def settled(self, settlement: Settlement) -> None: ...


class Engine:
    """Runs a core on the event loop it is started in."""

    def __init__(
        self,
        core: Core,
        executor: Executor,
        *,
        clock: Clock | None = None,
        history: History | None = None,
        listeners: Sequence[Listener] = (),
        on_fault: Callable[[], None] | None = None,
    ) -> None:
        self._core = core
        self._executor = executor
        self._clock = clock or MonotonicClock()
        self._history = history
        self._listeners = list(listeners)
        self._on_fault = on_fault
        #: The bug of ours after which the core is asked no more, and every submission is refused; None without one.
        self.fault: str | None = None
        self._told_faults: set[str] = set()
        self._jobs: dict[str, _Job] = {}
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}
        self._abort_messages: dict[str, str] = {}
        #: Resizes and trajectory ends under way.
        self._chores: set[asyncio.Task[None]] = set()
        #: Running actions that wait to make their call once more.
        self._tries: dict[str, list[asyncio.Future[None]]] = {}
        self._replicas: dict[int, asyncio.Task[bool]] = {}
        #: The function that asked for each service last: how a copy of the service is made.
        self._functions: dict[str, FunctionSpec] = {}
        self._lifecycle = TrajectoryLifecycle(core, executor, self._feed, self._chore, self.take)
        self._taken = 0
        #: When the core wants to be asked again at the latest, and the timer for that or an earlier instant.
        self._wake_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._pass: asyncio.Handle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    # -- life

    async def start(self) -> None:
        """Start passes; nothing runs before the first submission."""
        self._request_pass()

    async def drain(self, grace_s: float) -> int:
        """Start nothing more (but what running actions invoke), wait for what runs, and return how many still run.

        Who waits to open a trajectory, or for another turn to `take`, is told at once to ask the next gateway.
        """
        self._core.pause()
        for job_id, job in list(self._jobs.items()):
            if not isinstance(job.call, Call) and job_id not in self._tasks:
                self.cancel(job_id, "the gateway is shutting down")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        return len(self._tasks)

    async def close(self) -> None:
        """Kill what runs, end what was submitted as cancelled, and stop."""
        self._core.pause()
        for job_id in list(self._jobs):
            self.cancel(job_id, "the gateway is closing")
        for work in (*self._replicas.values(), *(self._tasks.values() if self.fault is not None else ())):
            work.cancel()
        while under_way := [*self._tasks.values(), *self._chores, *self._replicas.values()]:
            await asyncio.wait(under_way)
        self._closed = True
        for handle in (self._timer, self._pass):
            if handle is not None:
                handle.cancel()

    # -- actions

    def submit(self, submissions: Sequence[Submission]) -> list[asyncio.Future[Settlement]]:
        """Queue actions; each future gives its settlement, or raises the CodedError with which it was refused.

        One that is refused is so before this returns; none has ended by then.
        """
        jobs: list[tuple[Action, Call | Work, Submitted]] = []
        for submission in submissions:
            action, function = submission.action, submission.call.function
            jobs.append((action, submission.call, Submitted(action=action, not_before_s=submission.not_before_s)))
            if action.service is not None:
                self._functions[action.service] = function
        return self._accept(jobs)

    def _accept(self, jobs: Iterable[tuple[Action, Call | Work, Submitted]]) -> list[asyncio.Future[Settlement]]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Settlement]] = []
        events: list[Event] = []
        for action, call, event in jobs:
            future: asyncio.Future[Settlement] = loop.create_future()
            futures.append(future)
            if self._closed or self.fault is not None:
                _refuse(future, Draining(self.fault or "the gateway is closed", invocation_id=action.id))
            elif action.id in self._jobs:
                _refuse(future, Conflict(f"action {action.id} is queued or running", invocation_id=action.id))
            else:
                self._jobs[action.id] = _Job(call, future)
                events.append(event)
        self._feed(events)
        return futures

    async def take(
        self,
        trajectory: str,
        what: str,
        work: Callable[[], Awaitable[T]],
        task: str,
        function: FunctionSpec,
    ) -> T:
        """Do work in a trajectory when all that was asked of it before has ended, and before what comes later.

        It stands in the queue, as ``(what)``, for at most the function's ``queue_timeout``, and for the memory of its
        sandbox where the trajectory has none yet. Raises what refuses an action, CapacityExceeded if its turn does not
        come in time or its node is lost, Conflict if the trajectory ends, Draining if the engine does, and what
        ``work`` raises.
        """
        sandbox = function.sandbox
        self._taken += 1
        action = Action(
            id=f"{what}-{self._taken}-{trajectory}",
            function=f"({what})",
            task=task,
            trajectory=trajectory,
            memory_bytes=0 if sandbox is None else sandbox.memory_bytes,
            trajectory_ttl_s=1800.0 if sandbox is None else sandbox.idle_ttl_s,
            placement=function.placement,
            submitted_s=self._clock.now(),
            queue_timeout_s=function.queue_timeout_s,
        )
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def do() -> None:
            try:
                done.set_result(await work())
            except CodedError as error:
                done.set_exception(error)
                done.exception()  # seen, if its caller has gone

        (future,) = self._accept([(action, do, Submitted(action=action))])
        try:
            outcome = (await future).outcome
        except asyncio.CancelledError:
            self.cancel(action.id, "its caller has gone")
            await asyncio.wait([future])  # nothing of it is under way any more
            raise
        if done.done():
            return done.result()
        told = f"no {what} of trajectory {trajectory!r}: {outcome.message or outcome.reason}"
        if self._core.state.paused or self.fault is not None:
            raise Draining(told, component="engine", retry_after_s=DRAINING_S)
        if outcome.state in (State.TIMED_OUT, State.LOST):
            raise CapacityExceeded(told, component="engine", retry_after_s=self._core.retry_after_s())
        raise (CodedError if outcome.reason is Reason.INTERNAL else Conflict)(told, component="engine")

    def resume(
        self, submission: Submission, *, units: Mapping[str, int], node: str, started_s: float
    ) -> asyncio.Future[Settlement] | None:
        """Take up an action that runs since ``started_s`` (on the engine's clock); its runtime joins it.

        Return None if what it was granted, ``units`` by resource kind, cannot be had: then nothing has happened.
        """
        action = submission.action
        future: asyncio.Future[Settlement] = asyncio.get_running_loop().create_future()
        assert action.id not in self._jobs, f"action {action.id} is queued or running"
        self._jobs[action.id] = _Job(submission.call, future)
        self._feed([Resumed(action=action, units=units, node=node, started_s=started_s)])
        return future if action.id in self._jobs else None

    def cancel(self, action_id: str, message: str = "") -> bool:
        """Cancel a queued or running action, whose future gives the end; return False if there is none."""
        if action_id not in self._jobs:
            return False
        self._feed([CancelRequested(action_id=action_id, message=message)])
        return True

    # -- trajectories

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Make the environment that the function describes, as `TrajectoryLifecycle.open` says."""
        await self._lifecycle.open(trajectory, task, function)

    def check_trajectory(self, trajectory: str, task: str, *, living: bool = False) -> None:
        """Raise CapacityExceeded if it may not begin now; with ``living`` TrajectoryHasEnded if it would begin."""
        self._lifecycle.check(trajectory, task, living=living)

    def adopt_trajectory(self, trajectory: str, task: str, *, memory_bytes: int, ttl_s: float, node: str = "") -> None:
        """Take in a trajectory whose environment lives already, for example after a restart, on ``node`` if named."""
        opened = TrajectoryOpened(trajectory=trajectory, task=task, memory_bytes=memory_bytes, ttl_s=ttl_s, node=node)
        self._feed([opened])

    async def until_ended(self, trajectory: str) -> None:
        """Wait until a trajectory that is ending is gone with its environment."""
        await self._lifecycle.until_ended(trajectory)

    async def end_trajectory(self, trajectory: str) -> bool:
        """Cancel its actions, remove its environment, give its memory back; return False if there is none."""
        return await self._lifecycle.end(trajectory)

    # -- the world

    def report_residency(self, node: str, resident: Mapping[str, tuple[Chunk, ...]]) -> None:
        """Believe what a node's devices really hold: chunks by service."""
        self._feed([ResidencyReported(node=node, resident=resident)])

    def tell(self, event: NodeLost | NodeJoined | NodeClosed | NodeOpened | Reconfigured) -> None:
        """Take in that a node has come, gone, been closed or opened, or what is new in the configuration."""
        self._feed([event])

    def tell_consumed(self, resource: str, ages: Sequence[tuple[float, int]], *, running: int) -> None:
        """Take in what was consumed of a quota before: (seconds since its end, units), and what still ran."""
        now_s = self._clock.now()
        ended = [(now_s - age_s, units) for age_s, units in ages]
        self._feed([UnitsConsumed(resource=resource, ended=ended, running=running)])

    def _seen(self) -> Core:
        """The core as it stands now: between two events times go on."""
        self._core.look(self._clock.now())
        return self._core

    def resources(self) -> dict[str, object]:
        """Return the pools and nodes, JSON-able."""
        return resources_view(self._seen())

    def held_on(self, node: str) -> tuple[int, int]:
        """Return how many actions run on a node, and how many trajectories and actions of none hold memory there."""
        state = self._core.state
        running = sum(one.lease.node == node for one in state.executing.all())
        return running, len(state.nodes[node].holders) if node in state.nodes else 0

    def replicas(self) -> dict[str, int]:
        """Return how copies of services have fared, by outcome."""
        return replicas_view(self._seen())

    def queue(self, limit: int = QUEUE_PAGE, cursor: str | None = None) -> dict[str, object]:
        """Return how many wait, and a page of them in order of service; raise InvalidInput for a bad cursor."""
        return queue_view(self._seen(), limit, cursor)

    @property
    def outside(self) -> OutsideQueue:
        """Return who waits outside the queue, which is shown with it."""
        return self._core.outside

    def summary(self) -> dict[str, object]:
        """Return what fits a screen: pools with holders, causes of waiting, tasks, the longest running."""
        return summary(self._seen())

    def trajectories(self, limit: int = TRAJECTORIES_PAGE, cursor: str | None = None) -> dict[str, object]:
        """Return a page of the living trajectories, by name."""
        return trajectories_view(self._seen(), limit, cursor)

    def trajectory(self, name: str) -> dict[str, object] | None:
        """Return one living trajectory; None if there is none of that name."""
        found = self._seen().state.trajectories.get(name)
        return None if found is None else trajectory_view(self._seen(), found)

    def tasks(self, more: Iterable[str] = ()) -> list[dict[str, object]]:
        """Return what each task waits for, was given and how it fared; ``more`` names some that may be unseen yet."""
        return tasks_view(self._seen(), more)

    @property
    def policy_faults(self) -> Mapping[str, str]:
        """Return why policies are asked no more, by pool: each raised, or wanted what cannot be."""
        return self._core.state.faults

    def check(self) -> None:
        """Assert the core's invariants."""
        self._core.check()

    # -- events in

    def _feed(self, events: Sequence[Event]) -> None:
        if self.fault is not None:
            return
        try:
            commands = self._core.apply(events, self._clock.now())
            if commands:
                self._obey(commands)
        except Exception as error:  # noqa: BLE001 (as in `_schedule`)
            self._fail(error)
        else:
            self._request_pass()

    def _request_pass(self) -> None:
        if self._pass is None and not self._closed:
            self._pass = asyncio.get_running_loop().call_soon(self._schedule)

    def _schedule(self) -> None:
        self._pass = None
        if self.fault is not None:
            return
        try:
            commands = self._core.schedule(self._clock.now())
            if commands:
                self._obey(commands)
        except Exception as error:  # noqa: BLE001 (a lost pass would be a silence for ever)
            self._fail(error)
        faults = self._core.state.faults
        for pool in faults.keys() - self._told_faults if faults else ():
            self._told_faults.add(pool)
            logger.error("a policy failed", extra={"pool": pool, "why": faults[pool]})

    def _fail(self, error: Exception) -> None:
        """Stop asking the core after a bug: it stands between two states, and what it says next may not be believed.

        Whoever waits is told; what runs goes on until `close`, for the next engine may take it over.
        """
        self.fault = f"the scheduler failed: {error!r}"
        logger.critical("the scheduler failed; it is asked no more", exc_info=error)
        for handle in (self._timer, self._pass):
            if handle is not None:
                handle.cancel()
        told = CodedError(self.fault, component="engine")
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            _refuse(job.future, told)
        for waiting in self._lifecycle.waiting:
            _refuse(waiting, told)
        if self._on_fault is not None:
            self._on_fault()

    # -- commands out

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Execute():
                    self._execute(command)
                case Resize():
                    self._chore(self._executor.resize(command.action, command.lease))
                case Abort():
                    self._abort(command)
                case Replicate():
                    self._replicate(command)
                case Settle():
                    self._settle(command.settlement)
                case Refuse():
                    _refuse(self._jobs.pop(command.action_id).future, command.error)
                case EndTrajectory():
                    self._lifecycle.remove(command.trajectory, command.why)
                case TryGranted():
                    for granted in self._tries.pop(command.action_id, ()):
                        if not granted.done():
                            granted.set_result(None)
                case WakeAt():
                    self._wake_at(command.instant_s)

    def _execute(self, command: Execute) -> None:
        action, lease = command.action, command.lease
        job = self._jobs[action.id]
        task = asyncio.get_running_loop().create_task(self._run(action, lease, job.call), name=f"action {action.id}")
        self._tasks[action.id] = task
        self._idle.clear()
        task.add_done_callback(partial(self._done, action.id))
        for listener in self._listeners:
            listener.started(action, lease, command.queue_s)

    async def _run(self, action: Action, lease: Lease, call: Call | Work) -> Outcome:
        if action.trajectory is not None and self._lifecycle.removals:
            await self._lifecycle.until_removed(action.trajectory)
        if not isinstance(call, Call):
            await call()
            return Outcome(state=State.SUCCEEDED)
        try:
            return await self._executor.execute(action, lease, call)
        finally:
            self._tries.pop(action.id, None)

    async def try_again(self, action: Action) -> None:
        """Return when a running action may make its call once more (`manager.executor.CallHooks.again`)."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tries.setdefault(action.id, []).append(granted)
        self._feed([TryAgain(action_id=action.id)])
        await granted

    def _done(self, action_id: str, task: asyncio.Task[Outcome]) -> None:
        """Tell the core how an action has ended, whatever happened to its task."""
        del self._tasks[action_id]
        message = self._abort_messages.pop(action_id, "cancelled")
        if task.cancelled():
            outcome = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message=message, component="engine")
        elif (error := task.exception()) is not None:
            logger.error("action %s: the executor raised", action_id, exc_info=error)
            outcome = Outcome(
                state=State.FAILED, reason=Reason.INTERNAL, message=f"the executor raised {error!r}", component="engine"
            )
        else:
            outcome = task.result()
            if outcome.reason is Reason.CANCELLED:
                outcome = replace(outcome, message=message)
        if not self._tasks:
            self._idle.set()
        self._feed([Finished(action_id=action_id, outcome=outcome)])

    def _abort(self, command: Abort) -> None:
        task = self._tasks.get(command.action_id)
        if task is not None:
            self._abort_messages[command.action_id] = command.message
            task.cancel()

    def _replicate(self, command: Replicate) -> None:
        """Have a copy of a service made; whatever comes of it, the core is told."""
        function, number = self._functions[command.service], command.number
        work = self._executor.replicate(function, command.service, command.node, command.chunk)
        task = asyncio.get_running_loop().create_task(work, name=f"replica {number} of {command.service}")
        self._replicas[number] = task
        task.add_done_callback(lambda done: self._replicated(number, done))

    def _replicated(self, number: int, task: asyncio.Task[bool]) -> None:
        del self._replicas[number]
        done = False
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                logger.error("a replica: the executor raised", exc_info=error)
            done = error is None and task.result()
        self._feed([ReplicaEnded(number=number, done=done)])

    def _settle(self, settlement: Settlement) -> None:
        job = self._jobs.pop(settlement.action.id)
        if self._history is not None:
            try:
                self._history.observe(settlement)
            except Exception as error:  # what is learned is never worth an end
                logger.error("action %s: nothing was learned of it", settlement.action.id, exc_info=error)
        for listener in self._listeners:
            listener.settled(settlement)
        if not job.future.done():
            job.future.set_result(settlement)

    def _chore(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chore_done)
        return task

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a resize or the end of a trajectory failed", exc_info=error)

    def _wake_at(self, instant_s: float | None, least_s: float = 0.0) -> None:
        """Wish for a pass at an instant; a timer that is set for an earlier one looks again when it rings."""
        self._wake_s = instant_s
        if instant_s is None or self._closed or (self._timer is not None and self._timer_s <= instant_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = instant_s
        delay_s = max(least_s, instant_s - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._woken)

    def _woken(self) -> None:
        """Run a pass at its instant; a loop's timer may be a little early, and the core asks for each instant once."""
        self._timer, wake_s = None, self._wake_s
        if wake_s is not None and self._clock.now() >= wake_s:
            self._schedule()
        else:
            self._wake_at(wake_s, EARLY_S)


def _refuse(future: asyncio.Future[Settlement] | asyncio.Future[None], error: CodedError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: a caller that went away must not make the loop complain
