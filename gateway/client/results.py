"""What the gateway answers, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from manager.errors import CodedError, Reason
from manager.outcome import State


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One record of a log; ``offset + 1`` is where to go on reading."""

    offset: int
    #: ``stdout``, ``stderr``, ``log`` (structured), ``system`` (ours), ``truncated``, ``dropped`` or ``expired``.
    stream: str
    text: str
    time: datetime | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> LogLine:
        """Any: it comes from the wire."""
        return cls(
            offset=int(body.get("offset", 0)),
            stream=str(body["stream"]),
            text=str(body.get("data", "")),
            time=_instant(body.get("time")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file or directory in a sandbox."""

    path: str
    size_bytes: int
    directory: bool
    mode: str

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> FileEntry:
        """Any: it comes from the wire."""
        return cls(
            path=str(body["path"]),
            size_bytes=int(body["size_bytes"]),
            directory=bool(body["directory"]),
            mode=str(body["mode"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationResult:
    """An invocation as its record stands; ``queue_s + overhead_s + execution_s`` is the ACT."""

    id: str
    function: str
    task: str
    trajectory: str | None
    state: State
    reason: Reason | None
    message: str
    component: str
    #: The function's result as plain JSON values; None in listings and before the end.
    result: Any
    queue_s: float
    overhead_s: float
    execution_s: float
    #: Granted units by resource, and measured use.
    units: Mapping[str, int] = field(default_factory=dict)
    usage: Mapping[str, float] = field(default_factory=dict)
    node: str | None = None
    attempt: int = 1
    accepted_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    #: The log, where it was asked for with ``logs=True``.
    logs: tuple[LogLine, ...] = ()
    #: The whole record as it came.
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> InvocationResult:
        """Any: it comes from the wire."""
        return cls(
            id=str(body["id"]),
            function=str(body["function"]),
            task=str(body["task"]),
            trajectory=body["trajectory"],
            state=State(body["state"]),
            reason=None if body["reason"] is None else Reason(body["reason"]),
            message=str(body["message"]),
            component=str(body["component"]),
            result=body.get("result"),
            queue_s=(body["queue_ms"] or 0.0) / 1000,
            overhead_s=(body["overhead_ms"] or 0.0) / 1000,
            execution_s=(body["execution_ms"] or 0.0) / 1000,
            units=body["units"],
            usage=body["usage"],
            node=body["node"],
            attempt=int(body["attempt"]),
            accepted_at=_instant(body["accepted_at"]),
            started_at=_instant(body["started_at"]),
            ended_at=_instant(body["ended_at"]),
            record=body,
        )

    @property
    def ok(self) -> bool:
        return self.state is State.SUCCEEDED

    @property
    def act_s(self) -> float:
        return self.queue_s + self.overhead_s + self.execution_s

    def raise_for_failure(self) -> InvocationResult:
        """Itself where it succeeded or has not ended; raises InvocationFailed."""
        if self.state.terminal and not self.ok:
            raise InvocationFailed(self)
        return self


class InvocationFailed(CodedError):
    """An invocation ended without success; ``invocation`` tells its reason, component and partial result."""

    code = "action_failed"

    def __init__(self, invocation: InvocationResult) -> None:
        super().__init__(
            f"{invocation.function} {invocation.id} {invocation.state} ({invocation.reason}): {invocation.message}",
            component=invocation.component,
            invocation_id=invocation.id,
        )
        self.invocation = invocation
        self.reason = invocation.reason


def _instant(text: object) -> datetime | None:
    return datetime.fromisoformat(text) if isinstance(text, str) else None
