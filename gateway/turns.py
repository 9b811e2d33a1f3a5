"""Turns: work of the gateway's own that takes its place among the actions of a trajectory, without cores."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.engine import Engine, Submission
from manager.errors import CodedError, Conflict, NotFound, Reason
from manager.executor import Call, Executor
from manager.function import FunctionSpec

COMPONENT = "trajectories"
T = TypeVar("T")
#: Any: each piece of work has a result of its own type, which `TrajectoryTurns.take` hands to whoever gave it.
_Work = Callable[[], Coroutine[Any, Any, None]]


class _Silence:
    """The log of an action that nobody reads."""

    def write(self, stream: str, data: str) -> None:
        """Say nothing."""

    def omit(self, size_bytes: int) -> None:
        """Count nothing."""


class TrajectoryTurns:
    """An executor round another: what was given to `take` it does itself, when the core says that its turn has come."""

    def __init__(self, executor: Executor, wait_max_s: float) -> None:
        """``wait_max_s``: how long work waits for its turn, and how long it may take."""
        self._executor = executor
        self._wait_max_s = wait_max_s
        self._work: dict[str, _Work] = {}

    async def take(self, engine: Engine, trajectory: str, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do work in a trajectory when all that was asked of it before has ended, and before what comes later.

        ``what`` is shown where waiting actions are. Raises NotFound if there is no such trajectory, Conflict if it ends
        or the turn does not come in time, and what ``work`` raises.
        """
        found = engine.trajectory(trajectory)
        if found is None or found["state"] == "ending":
            raise NotFound(f"no trajectory {trajectory!r}", component=COMPONENT)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def do() -> None:
            done.set_result(await work())

        action = Action(
            id=f"{what}-{secrets.token_hex(8)}",
            function=f"({what})",
            task=str(found["task"]),
            trajectory=trajectory,
            timeout_s=self._wait_max_s,
            queue_timeout_s=self._wait_max_s,
        )
        function = FunctionSpec(name=action.function, runtime=what)
        call = Call(function=function, input={}, log=_Silence(), context={"invocation_id": action.id})
        failures: list[CodedError] = []
        self._work[action.id] = lambda: _caught(do(), failures)
        (settled,) = engine.submit([Submission(action=action, call=call)])
        try:
            settlement = await settled
        except asyncio.CancelledError:
            engine.cancel(action.id, "its caller has gone")
            raise
        finally:
            self._work.pop(action.id, None)
        if failures:
            raise failures[0]
        if settlement.outcome.state is not State.SUCCEEDED:
            why = settlement.outcome.message or str(settlement.outcome.reason)
            raise Conflict(f"no {what} of trajectory {trajectory!r}: {why}", component=COMPONENT)
        return done.result()

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        work = self._work.pop(action.id, None)
        if work is None:
            return await self._executor.execute(action, lease, call)
        try:
            await asyncio.wait_for(work(), action.timeout_s)
        except TimeoutError:
            told = f"it took longer than {action.timeout_s:g} s"
            return Outcome(state=State.TIMED_OUT, reason=Reason.TIMEOUT, message=told, component=COMPONENT)
        return Outcome(state=State.SUCCEEDED)

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._executor.resize(action, lease)

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        return await self._executor.replicate(function, service, node, chunk)

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        await self._executor.open_trajectory(trajectory, task, function)

    async def end_trajectory(self, trajectory: str) -> None:
        await self._executor.end_trajectory(trajectory)


async def _caught(work: Coroutine[Any, Any, None], failures: list[CodedError]) -> None:
    """Do the work, and keep its typed error for whoever gave it."""
    try:
        await work
    except CodedError as error:
        failures.append(error)
