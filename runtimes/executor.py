"""Execute actions on this machine or on a node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.clock import Clock, MonotonicClock
from manager.errors import (
    ActionFailed,
    CapacityExceeded,
    CodedError,
    InvalidInput,
    QuotaExceeded,
    Reason,
    StorageUnavailable,
    TooLarge,
    Unsupported,
    exhaustion,
)
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.runtime import Execution, Result, Runtime

logger = logging.getLogger("runtimes.executor")

COMPONENT = "executor"

#: What some reasons make of an action; the others make it ``failed``.
_STATES: Mapping[Reason, State] = {
    Reason.TIMEOUT: State.TIMED_OUT,
    Reason.QUEUE_TIMEOUT: State.TIMED_OUT,
    Reason.CANCELLED: State.CANCELLED,
    Reason.NODE_LOST: State.LOST,
    Reason.GATEWAY_RESTART: State.LOST,
}

#: Errors that a runtime may raise besides ActionFailed.
_REASONS: Mapping[type[CodedError], Reason] = {
    InvalidInput: Reason.INVALID_INPUT,
    TooLarge: Reason.INVALID_INPUT,
    Unsupported: Reason.INVALID_INPUT,
    QuotaExceeded: Reason.QUOTA,
    CapacityExceeded: Reason.ENVIRONMENT_LOST,
    StorageUnavailable: Reason.ENVIRONMENT_LOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Bounds besides the action's own ``timeout``, in seconds."""

    #: From the lease until the user's own work begins (a sandbox made, a model restored).
    prepare_s: float = 300.0
    #: From the end of the user's work until the runtime returns.
    finish_s: float = 60.0
    #: For a runtime to kill its work; one that takes longer is left behind, and the action ends all the same.
    kill_s: float = 30.0


class LocalExecutor:
    """A `manager.executor.Executor` over the runtimes of this process."""

    def __init__(
        self,
        runtimes: Mapping[str, Runtime],
        clock: Clock | None = None,
        *,
        deadlines: Deadlines | None = None,
        open_environment: Callable[[str, str, FunctionSpec], Awaitable[object]] | None = None,
    ) -> None:
        self._runtimes = dict(runtimes)
        self._clock = clock or MonotonicClock()
        self._deadlines = deadlines or Deadlines()
        #: Makes a trajectory's sandbox ahead of its first action.
        self._open_environment = open_environment
        self._running: dict[str, Runtime] = {}
        #: Work that outlived ``kill_s``; held, so that it is not collected before it ends.
        self._left_behind: set[asyncio.Task[Result]] = set()

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        """Run the action to its end. A cancellation is an end like others, once the work was killed."""
        runtime = self._runtimes.get(call.function.runtime)
        if runtime is None:
            kind = call.function.runtime
            return Outcome(
                state=State.FAILED,
                reason=Reason.INTERNAL,
                message=f"no runtime serves {kind} functions here",
                component=COMPONENT,
            )
        execution = _Watched(action=action, lease=lease, call=call, clock=self._clock)
        watch = _Watch(execution, self._deadlines)
        task = watch.begin(runtime)
        self._running[action.id] = runtime
        try:
            await watch.end()
        except asyncio.CancelledError:
            await watch.kill()
            execution.end()
            return _failure(Reason.CANCELLED, "cancelled", execution)
        finally:
            del self._running[action.id]
            if not task.done():
                logger.error("action %s outlived its kill by %g s", action.id, self._deadlines.kill_s)
                self._left_behind.add(task)
                task.add_done_callback(self._left_behind.discard)
        if execution.ended_s is None:
            execution.end()
        return _outcome(task, execution, watch.overrun)

    async def resize(self, action: Action, lease: Lease) -> None:
        """Pass the new lease on; a no-op once the action has ended."""
        runtime = self._running.get(action.id)
        if runtime is not None:
            await runtime.resize(action, lease)

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        """Copy a service into free memory within ``prepare_s``; a failure is told by False and logged."""
        runtime = self._runtimes.get(function.runtime)
        if runtime is None:
            return False
        try:
            return await asyncio.wait_for(runtime.replicate(function, service, chunk), self._deadlines.prepare_s)
        except Exception as error:  # noqa: BLE001  # a hint: whoever needs the service meets the same error and tells it
            logger.warning("the copy of %s to devices %s of %s failed: %r", service, chunk, node, error)
            return False

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Make the trajectory's environment; raises TangramError."""
        if self._open_environment is None:
            return
        try:
            await asyncio.wait_for(self._open_environment(trajectory, task, function), self._deadlines.prepare_s)
        except TimeoutError:
            seconds = self._deadlines.prepare_s
            raise ActionFailed(
                Reason.TIMEOUT, f"trajectory {trajectory} was not ready within {seconds:g} s", component=COMPONENT
            ) from None

    async def end_trajectory(self, trajectory: str) -> None:
        """Let every runtime drop what it keeps for the trajectory; idempotent."""
        ends = [runtime.end_trajectory(trajectory) for runtime in self._runtimes.values()]
        for failure in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(failure, Exception):
                logger.error("the end of trajectory %s failed", trajectory, exc_info=failure)

    async def close(self) -> None:
        """Close every runtime, even where one of them fails."""
        async with AsyncExitStack() as closers:
            for runtime in self._runtimes.values():
                closers.push_async_callback(runtime.close)


def _unheard() -> None:
    """Nobody listens."""


@dataclass(slots=True, kw_only=True)
class _Watched(Execution):
    """An execution that tells when its phase changes, so that the right deadline is armed."""

    on_phase: Callable[[], None] = field(default=_unheard)

    def begin(self, ran_s: float = 0.0) -> None:
        Execution.begin(self, ran_s)
        self.on_phase()

    def end(self) -> None:
        if self.began_s is not None and self.ended_s is None:
            self.ended_s = self.clock.now()
            self.on_phase()


class _Watch:
    """The work of one execution, and its deadlines: to get ready, to run, to come to an end, and to die."""

    def __init__(self, execution: _Watched, deadlines: Deadlines) -> None:
        self._execution = execution
        self._deadlines = deadlines
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        #: Made anew whenever a cancellation takes its waiter away.
        self._over: asyncio.Future[None] = self._loop.create_future()
        #: None before it begins, and once it is over: an error's traceback leads here, and must not lead back.
        self._task: asyncio.Task[Result] | None = None
        #: The message of the deadline that was missed; empty where none was.
        self.overrun = ""
        self._killing = False

    def begin(self, runtime: Runtime) -> asyncio.Task[Result]:
        """Set it to work."""
        name = f"execute {self._execution.action.id}"
        task = self._task = self._loop.create_task(self._work(runtime), name=name)
        self._execution.on_phase = self._arm
        self._arm()
        return task

    async def _work(self, runtime: Runtime) -> Result:
        try:
            return await runtime.execute(self._execution)
        finally:
            self._finish()

    def end(self) -> asyncio.Future[None]:
        """Return what is done when the work is over, or was killed and will not die."""
        return self._over

    async def kill(self) -> None:
        """Cancel the work and wait for its end (bounded); further cancellations change nothing."""
        self._kill()
        while self._task is not None:
            self._over = self._loop.create_future()
            try:
                await self._over
            except asyncio.CancelledError:
                continue

    def _arm(self) -> None:
        if self._killing or self._task is None:
            return
        execution = self._execution
        if execution.ended_s is not None:
            left_s = self._deadlines.finish_s
        elif execution.began_s is not None:
            left_s = execution.action.timeout_s - execution.execution_s
        else:
            left_s = self._deadlines.prepare_s
        self._ring(max(0.0, left_s), self._missed)

    def _ring(self, wait_s: float, ring: Callable[[], None]) -> None:
        """Call ``ring`` in so many seconds, in place of what was to be called."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, ring)

    def _missed(self) -> None:
        execution, deadlines = self._execution, self._deadlines
        if execution.ended_s is not None:
            self.overrun = f"its runtime did not return within {deadlines.finish_s:g} s of its end"
        elif execution.began_s is not None:
            self.overrun = f"ran longer than timeout, {execution.action.timeout_s:g} s"
        else:
            self.overrun = f"was not ready to begin within {deadlines.prepare_s:g} s"
        self._kill()

    def _kill(self) -> None:
        if self._killing or self._task is None:
            return
        self._killing = True
        self._task.add_done_callback(lambda _: self._finish())  # one that never began does not tell its end itself
        self._task.cancel()
        self._ring(self._deadlines.kill_s, self._finish)

    def _finish(self) -> None:
        self._task = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._execution.on_phase = _unheard  # else both would hold each other until the collector comes
        if not self._over.done():
            self._over.set_result(None)


def _outcome(task: asyncio.Task[Result], execution: Execution, overrun: str) -> Outcome:
    """How it ended, from what the runtime returned or raised; a missed deadline where it did neither."""
    if not task.done() or task.cancelled():
        if overrun:
            return _failure(Reason.TIMEOUT, overrun, execution)
        return _failure(Reason.INTERNAL, "its runtime gave up without a reason", execution)
    error = task.exception()
    if error is None:
        result = task.result()
        return Outcome(
            state=State.SUCCEEDED, result=result.value, usage=result.usage, execution_s=execution.execution_s
        )
    if isinstance(error, ActionFailed):
        return Outcome(
            state=_STATES.get(error.reason, State.FAILED),
            result=error.result,
            usage=error.usage,
            reason=error.reason,
            message=error.message,
            component=error.component,
            execution_s=execution.execution_s,
            retry_after_s=error.retry_after_s,
            detail=error.detail,
        )
    error = exhaustion(error, COMPONENT) or error
    if isinstance(error, CodedError):
        reason = _REASONS.get(type(error), Reason.INTERNAL)
        return _failure(reason, error.message, execution, component=error.component)
    logger.error("action %s: its runtime raised", execution.action.id, exc_info=error)
    return _failure(Reason.INTERNAL, f"its runtime raised {error!r}", execution)


def _failure(reason: Reason, message: str, execution: Execution, *, component: str = COMPONENT) -> Outcome:
    return Outcome(
        state=_STATES.get(reason, State.FAILED),
        reason=reason,
        message=message,
        component=component,
        execution_s=execution.execution_s,
    )
