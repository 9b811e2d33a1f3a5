"""What a scripted gateway's functions do: the call they see, how they fail, and the record of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from tangram.types import UNSET, Invocation, LogLine, Reason, State

#: The beginning of a scripted gateway's time; nothing in it takes any.
BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
_STATES: Mapping[Reason, State] = {
    "timeout": "timed_out",
    "queue_timeout": "timed_out",
    "cancelled": "cancelled",
    "environment_lost": "lost",
    "node_lost": "lost",
    "gateway_restart": "lost",
}


class ScriptedFailure(Exception):
    """Raised by a script: the invocation ends with this reason, message and partial result."""

    def __init__(self, reason: Reason = "handler_error", message: str = "as scripted", result: object = None) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        self.result = result


@dataclass(eq=False, slots=True, kw_only=True)
class ScriptedCall:
    """One invocation, as its function's script sees it."""

    function: str
    input: Mapping[str, Any]
    task: str = "default"
    trajectory: str | None = None
    key: str | None = None
    #: The headers of its request, or none of a call of a batch.
    headers: Mapping[str, str] = field(default_factory=dict)
    record: Invocation
    lines: list[LogLine] = field(default_factory=list)

    def log(self, text: str, stream: str = "stdout") -> None:
        """Write to the invocation's log."""
        self.lines.append(LogLine(offset=len(self.lines), time=BEGINNING, stream=stream, data=text))

    def end(self, result: object, failure: ScriptedFailure | None = None) -> None:
        """Take the end of the script."""
        reason = None if failure is None else failure.reason
        self.record = msgspec.structs.replace(
            self.record,
            state="succeeded" if reason is None else _STATES.get(reason, "failed"),
            reason=reason,
            message="" if failure is None else failure.message,
            component="" if failure is None else "script",
            started_at=BEGINNING,
            ended_at=BEGINNING,
            overhead_ms=0.0,
            execution_ms=0.0,
            act_ms=0.0,
            result=msgspec.to_builtins(result) if failure is None else failure.result,
        )


#: What a function does with a call: its result, or the ScriptedFailure that it raises. For an AsyncClient it may be
#: a coroutine function. A value that is not callable is the result of every call.
Script = Callable[[ScriptedCall], object | Awaitable[object]]


def queued(
    number: int, function: str, input: Mapping[str, Any], *, mode: str, task: str, trajectory: str | None
) -> Invocation:
    """Return the record of an invocation that was just accepted."""
    body: dict[str, object] = {
        "id": f"scripted-{number}",
        "function": function,
        "revision": "scripted",
        "task": task,
        "trajectory": trajectory,
        "parent": None,
        "mode": mode,
        "state": "queued",
        "reason": None,
        "message": "",
        "component": "",
        "detail": {},
        "retry_after_s": None,
        "accepted_at": BEGINNING,
        "started_at": None,
        "ended_at": None,
        "queue_ms": 0.0,
        "overhead_ms": None,
        "execution_ms": None,
        "act_ms": None,
        "node": "scripted",
        "units": {},
        "usage": {},
        "attempt": 1,
        "attempts": [],
        "dead": False,
        "callback": None,
        "input": dict(input),
        "result": None,
    }
    return msgspec.convert(body, Invocation)


def listed(record: Invocation) -> Invocation:
    """Return the record as listings have it: without input and result."""
    return msgspec.structs.replace(record, input=UNSET, result=UNSET)
