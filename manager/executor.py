"""The executor: what the engine asks of the runtimes. One implementation is ``runtimes.executor.LocalExecutor``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from manager.action import Action, Chunk, Lease, Outcome
from manager.function import FunctionSpec


class LogSink(Protocol):
    """Where an invocation's log lines go. Never blocks and never raises: it drops and says so."""

    def write(self, stream: str, data: str) -> None:
        """Append text to ``stream``: ``stdout``, ``stderr``, ``log`` (structured), or ``system`` (ours)."""
        ...

    def omit(self, size_bytes: int) -> None:
        """Count bytes that were said and are not written."""
        ...


class CallHooks:
    """What a runtime asks of a gateway while it makes a call; here nothing is asked, and everything may go on."""

    __slots__ = ()

    async def commit_begin(self) -> bool:
        """Return whether the call goes on when this process is gone, for the next one to take over.

        Awaited just before the caller's own work begins, by runtimes that take their time to get ready for it. Raises
        ActionFailed if it must not begin.
        """
        return False

    async def again(self) -> None:
        """Return when what the first try of the call consumed was had once more; awaited before each further try."""

    def begun(self) -> None:
        """Note that the work begins; called for every runtime (`runtimes.runtime.Execution.begin`)."""


@dataclass(slots=True, kw_only=True)
class Call:
    """What the caller sent, beside what the scheduler needs to know: opaque to the thinking.

    One is made for each try; whoever executes it may fill in what it knows before it hands it on.
    """

    function: FunctionSpec
    input: Mapping[str, object]
    log: LogSink
    #: W3C trace context of the caller, passed on.
    traceparent: str | None = None
    tracestate: str | None = None
    #: The invocation of which it is a try; empty where there is none but the action.
    invocation_id: str = ""
    #: Whether an earlier process may have begun it already: it is joined, and begun only where it never was.
    resumed: bool = False
    hooks: CallHooks = CallHooks()  # noqa: RUF009 (it has no state)


class Executor(Protocol):
    """Executes leased actions. Its methods bound their own time; ``execute`` never raises but CancelledError."""

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        """Run the action to its end.

        Cancelling the task kills the work and frees it; then it returns how long that ran, as ``cancelled``, or raises.
        """
        ...

    async def resize(self, action: Action, lease: Lease) -> None:
        """Give a running, malleable action the cores of the new ``lease``; a no-op once it has ended."""
        ...

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        """Copy a function's service into free memory of devices; return whether it is in place now.

        Nothing is evicted for it, and what computes there is not disturbed but by the bytes that travel.
        """
        ...

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Make the environment of a trajectory of ``task`` before its first action; raises CodedError."""
        ...

    async def end_trajectory(self, trajectory: str) -> None:
        """Remove the trajectory's environment; idempotent."""
        ...
