"""Execute actions on this machine or on a node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

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
from runtimes.runtime import Execution, Result, Runtime, unheard

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
        execution = Execution(action=action, lease=lease, call=call, clock=self._clock)
        task = asyncio.get_running_loop().create_task(runtime.execute(execution))
        self._running[action.id] = runtime
        watch = _PhaseWatch(execution, task, self._deadlines)
        cancelled = False
        try:
            await watch.over
        except asyncio.CancelledError:
            cancelled = True
        finally:
            watch.close()
            if not task.done():
                await _kill(task, self._deadlines.kill_s)
            del self._running[action.id]
            if not task.done():
                logger.error("action %s outlived its kill by %g s", action.id, self._deadlines.kill_s)
                self._left_behind.add(task)
                task.add_done_callback(self._left_behind.discard)
        execution.end()
        return _failure(Reason.CANCELLED, "cancelled", execution) if cancelled else _outcome(task, execution, watch)

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


class _PhaseWatch:
    """Waits for the end of an execution, or until one of its phases has lasted too long."""

    __slots__ = ("_deadlines", "_due_s", "_execution", "_loop", "_rings_s", "_timer", "missed", "over")

    def __init__(self, execution: Execution, task: asyncio.Task[Result], deadlines: Deadlines) -> None:
        self._execution = execution
        self._deadlines = deadlines
        self._loop = asyncio.get_running_loop()
        #: Done when the wait is over.
        self.over: asyncio.Future[None] = self._loop.create_future()
        #: Which deadline was missed, as its action is told; empty if none was.
        self.missed = ""
        self._set(self._loop.time() + deadlines.prepare_s)
        execution.on_phase = self._rearm
        task.add_done_callback(self._end)

    def close(self) -> None:
        """Watch no longer."""
        self._execution.on_phase = unheard
        self._timer.cancel()

    def _end(self, task: asyncio.Task[Result]) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _rearm(self) -> None:
        """Let the deadline be that of the phase that begins; a timer that is too early looks again."""
        execution = self._execution
        running = execution.ended_s is None
        left_s = execution.action.timeout_s - execution.execution_s if running else self._deadlines.finish_s
        self._due_s = self._loop.time() + left_s
        if self._due_s < self._rings_s and not self.over.done():
            self._timer.cancel()
            self._set(self._due_s)

    def _set(self, due_s: float) -> None:
        self._due_s = self._rings_s = due_s  # a timer of uvloop's does not tell when it rings
        self._timer = self._loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        if self._loop.time() < self._due_s:
            self._set(self._due_s)
        elif not self.over.done():
            self.missed = self._overrun()
            self.over.set_result(None)

    def _overrun(self) -> str:
        if self._execution.ended_s is not None:
            return f"its runtime did not return within {self._deadlines.finish_s:g} s of its end"
        if self._execution.began_s is not None:
            return f"ran longer than timeout, {self._execution.action.timeout_s:g} s"
        return f"was not ready to begin within {self._deadlines.prepare_s:g} s"


async def _kill(task: asyncio.Task[Result], within_s: float) -> None:
    """Cancel work and wait for its end, so long at most; a cancellation meanwhile changes nothing."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    task.cancel()
    while not task.done() and (left_s := until_s - loop.time()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task], timeout=left_s)


def _outcome(task: asyncio.Task[Result], execution: Execution, watch: _PhaseWatch) -> Outcome:
    """How it ended, from what the runtime returned or raised; a missed deadline where it did neither."""
    if not task.done() or task.cancelled():
        if watch.missed:
            return _failure(Reason.TIMEOUT, watch.missed, execution)
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
