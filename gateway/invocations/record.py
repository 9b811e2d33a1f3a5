"""The record of an invocation: what is kept of it from acceptance on, and its form on the wire."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, cast

from msgspec import UNSET, Raw, UnsetType

from gateway import serialization
from manager.action import COMPLETED, LEGAL_MOVES, TERMINAL, Lease, Outcome, Settlement, State
from manager.errors import NotFound, Reason
from tangram.types import Attempt, Delivery, Invocation
from tangram.types import Reason as WireReason
from tangram.types import State as WireState


class Mode(StrEnum):
    """How the caller attends to the result."""

    SYNC = "sync"  #: the response is the result
    ASYNC = "async"  #: 202, the result is fetched, waited for or sent to a callback
    STREAM = "stream"  #: the response is the log, then the result


class ActTimes(NamedTuple):
    """How the seconds since the acceptance of an invocation divide; their sum is all of them."""

    queue_s: float
    overhead_s: float
    execution_s: float


#: What a record holds of nothing: never changed, only replaced.
NOTHING: Mapping[str, Any] = {}


def nothing() -> Mapping[str, Any]:
    return NOTHING


NO_TIME = ActTimes(0.0, 0.0, 0.0)


@dataclass(slots=True, kw_only=True)
class Record:
    """One invocation. Its state changes along `LEGAL_MOVES` only; instants are wall-clock seconds."""

    seq: int
    id: str
    function: str
    #: Of the definition that is, or was, executed: one that was not ready may be another by then.
    revision: str = ""
    task: str
    trajectory: str | None
    parent: str | None
    mode: Mode
    accepted_s: float
    #: The caller's input as JSON; None where a listing left it out.
    input: bytes | None
    #: Whether it goes on without its caller (asynchronous, keyed, or asked for).
    detached: bool = False
    #: The caller's choices that a restart must know: timeout_s, callback_url, traceparent, max_age_s ...
    options: Mapping[str, object] = field(default_factory=nothing)
    state: State = State.QUEUED
    reason: Reason | None = None
    message: str = ""
    component: str = ""
    detail: Mapping[str, object] = field(default_factory=nothing)
    retry_after_s: float | None = None
    #: The result as JSON; None until there is one.
    result: bytes | None = None
    attempt: int = 1
    attempts: tuple[Attempt, ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    #: Of all tries once it has ended. Before, of the present one: overhead until its own work began.
    queue_s: float | None = None
    overhead_s: float | None = None
    execution_s: float | None = None
    node: str | None = None
    #: Granted units by resource kind.
    units: Mapping[str, int] = field(default_factory=nothing)
    usage: Mapping[str, float] = field(default_factory=nothing)
    #: Whether it is in the dead-letter list.
    dead: bool = False
    #: None if no callback was asked for.
    callback: Delivery | None = None

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def begun(self) -> bool:
        """Whether the caller's own work may have begun in the present try; until then it is being made ready."""
        return self.overhead_s is not None

    @property
    def trace(self) -> serialization.TraceContext:
        """The caller's trace context, as far as it gave one; it was read when the invocation was accepted."""
        parent, state = self.options.get("traceparent"), self.options.get("tracestate")
        return serialization.TraceContext(traceparent=cast("str | None", parent), tracestate=cast("str | None", state))

    @property
    def _capped_s(self) -> float | UnsetType:
        """Return the function's bound, if a longer one was asked for."""
        capped_s = self.options.get("timeout_capped_s")
        return capped_s if isinstance(capped_s, float) else UNSET

    @property
    def completed(self) -> bool:
        """Whether it was started, and neither cancelled nor lost."""
        return self.started_s is not None and self.state in COMPLETED

    def move(self, state: State) -> None:
        """Change the state; an illegal move is our own bug."""
        assert state in LEGAL_MOVES[self.state], f"invocation {self.id} cannot go from {self.state} to {state}"
        self.state = state

    def start(self, now_s: float, *, begun: bool) -> None:
        """The present try was leased; ``begun``: a restart must take it for begun."""
        self.queue_s = self.times(now_s, waiting=True).queue_s
        if self.state is State.QUEUED:
            self.move(State.RUNNING)
        self.started_s, self.overhead_s = now_s, 0.0 if begun else None

    def grant(self, lease: Lease) -> None:
        """What it holds, and where."""
        self.node = lease.node
        self.units = {kind: grant.units for kind, grant in lease.grants.items()}

    def begin(self, now_s: float) -> None:
        """Its own work begins."""
        self.overhead_s = 0.0 if self.started_s is None else max(0.0, now_s - self.started_s)

    def take_back(self) -> None:
        """It waits again: what it was leased for has not begun, or its try has ended."""
        self.move(State.QUEUED)
        self.overhead_s = None

    def age_left_s(self, now_s: float, max_age_s: float) -> float | None:
        """Return the seconds that asynchronous work may still wait; None without a bound."""
        if self.mode is not Mode.ASYNC:
            return None
        request = self.options.get("max_age_s")
        return max(0.0, self.accepted_s + (request if isinstance(request, float) else max_age_s) - now_s)

    def patience_s(self, now_s: float, queue_timeout_s: float) -> float:
        """Return for how long what has not begun may be tried: durable work within its ``queue_timeout``."""
        return max(0.0, self.accepted_s + queue_timeout_s - now_s) if self.detached else 0.0

    def times(self, now_s: float, execution_s: float | None = None, *, waiting: bool = False) -> ActTimes:
        """Return how the time until now divides, over all tries and gateways; its parts sum to it exactly.

        What is not known to be execution or waiting is overhead; of one that waits, all else is waiting.
        ``execution_s`` is that of the present try, by default as long as its own work is under way.
        """
        total_s = max(0.0, now_s - self.accepted_s)
        past = self._past() if self.attempts else NO_TIME
        if execution_s is None:
            execution_s = self._under_way_s(now_s)
        execution_s = min(total_s, past.execution_s + execution_s)
        if waiting or self.state is State.QUEUED:
            overhead_s = min(total_s - execution_s, past.overhead_s)
            return ActTimes(total_s - execution_s - overhead_s, overhead_s, execution_s)
        queue_s = min(total_s - execution_s, self.queue_s or 0.0)
        return ActTimes(queue_s, total_s - execution_s - queue_s, execution_s)

    def _past(self) -> ActTimes:
        """Return the times of the tries that have ended."""
        if not self.attempts:
            return NO_TIME
        tries = [(each.queue_ms or 0.0, each.overhead_ms or 0.0, each.execution_ms or 0.0) for each in self.attempts]
        return ActTimes(*(sum(part) / 1000 for part in zip(*tries, strict=True)))

    def _under_way_s(self, now_s: float) -> float:
        """Return for how long the present try's own work has been under way."""
        if self.state is not State.RUNNING or self.overhead_s is None or self.started_s is None:
            return 0.0
        return max(0.0, now_s - self.started_s - self.overhead_s)

    def as_of(self, now_s: float) -> Record:
        """Return it with its times as they stand; what has ended as it is."""
        if self.terminal:
            return self
        times = self.times(now_s)
        return replace(self, queue_s=times.queue_s, overhead_s=times.overhead_s, execution_s=times.execution_s)

    def _close(self, now_s: float, execution_s: float | None) -> None:
        """Its times are those from its acceptance until now."""
        self.queue_s, self.overhead_s, self.execution_s = self.times(now_s, execution_s)
        self.ended_s = max(now_s, self.accepted_s)

    def settle(self, settlement: Settlement, now_s: float) -> None:
        """Take the end of the last try."""
        outcome, result = _written(settlement.outcome)
        self._close(now_s, settlement.execution_s)
        self.move(outcome.state)
        self.reason, self.message, self.component = (
            outcome.reason,
            serialization.unicode(outcome.message),
            outcome.component,
        )
        self.detail, self.retry_after_s = outcome.detail, outcome.retry_after_s
        self.usage = {name: float(value) for name, value in outcome.usage.items()}
        self.result = result
        if self.reason is Reason.TIMEOUT and self._capped_s:
            asked_s = self.options.get("timeout_s")
            self.message += f"; the function's timeout of {self._capped_s:g} s held, {asked_s:g} s were asked for"
        if settlement.lease is not None:
            self.grant(settlement.lease)

    def end(self, state: State, reason: Reason, message: str, now_s: float, *, ran: bool = False) -> None:
        """End it without a settlement: refused, cancelled between two tries, or lost with the gateway.

        ``ran``: its own work, if it had begun, went on until now; of a gateway that died nobody knows that.
        """
        self._close(now_s, None if ran else 0.0)
        self.move(state)
        self.reason, self.message, self.component = reason, serialization.unicode(message), "gateway"

    def summary(self) -> dict[str, object]:
        """Return what the gateway's own log says of its end."""
        return {
            "invocation": self.id,
            "trajectory": self.trajectory,
            "task": self.task,
            "function": self.function,
            "state": self.state,
            "reason": self.reason,
            "message": self.message or None,
            "queue_s": self.queue_s,
            "overhead_s": self.overhead_s,
            "execution_s": self.execution_s,
        }

    def tried(self, outcome: Outcome, now_s: float, execution_s: float = 0.0) -> Attempt:
        """Return the present try as one that has ended; its times begin at the end of the one before."""
        queue_s, overhead_s, execution_s = self.times(now_s, execution_s)
        past = self._past()
        return Attempt(
            attempt=self.attempt,
            state=cast(WireState, outcome.state),
            reason=cast("WireReason | None", outcome.reason),
            message=serialization.unicode(outcome.message),
            ended_at=serialization.instant(now_s),
            queue_ms=round(1000 * max(0.0, queue_s - past.queue_s), 3),
            overhead_ms=round(1000 * max(0.0, overhead_s - past.overhead_s), 3),
            execution_ms=round(1000 * max(0.0, execution_s - past.execution_s), 3),
        )

    def as_wire(self, *, payload: bool = True) -> Invocation:
        """Return it as every caller sees it; without ``payload`` (listings) input and result are left out."""
        parts = (self.queue_s, self.overhead_s, self.execution_s)
        queue_ms, overhead_ms, execution_ms = [None if each is None else round(each * 1000, 3) for each in parts]
        return Invocation(
            id=self.id,
            function=self.function,
            revision=self.revision,
            task=self.task,
            trajectory=self.trajectory,
            parent=self.parent,
            mode=self.mode.value,
            state=cast(WireState, self.state),
            reason=cast("WireReason | None", self.reason),
            message=self.message,
            component=self.component,
            detail=self.detail,
            retry_after_s=self.retry_after_s,
            accepted_at=serialization.instant(self.accepted_s),
            started_at=None if self.started_s is None else serialization.instant(self.started_s),
            ended_at=None if self.ended_s is None else serialization.instant(self.ended_s),
            queue_ms=queue_ms,
            overhead_ms=overhead_ms,
            execution_ms=execution_ms,
            act_ms=None if self.ended_s is None else round(1000 * sum(filter(None, parts)), 3),
            node=self.node,
            units=self.units,
            usage=self.usage,
            attempt=self.attempt,
            attempts=self.attempts,
            dead=self.dead,
            callback=self.callback,
            timeout_capped_s=self._capped_s,
            # Encoded already: neither is parsed again.
            input=Raw(self.input or b"null") if payload else UNSET,
            result=Raw(self.result or b"null") if payload else UNSET,
        )


def _written(outcome: Outcome) -> tuple[Outcome, bytes | None]:
    """Return the outcome with what JSON holds of its detail, and its result as JSON; without what cannot be written."""
    try:
        if outcome.detail:
            outcome = replace(outcome, detail=json.loads(serialization.dumps(outcome.detail)))
        return outcome, None if outcome.result is None else serialization.dumps(outcome.result)
    except RecursionError:
        bare = replace(outcome, result=None, detail={})
    if outcome.state is not State.SUCCEEDED:
        return bare, None
    message = "its result is nested too deeply to be written"
    return replace(bare, state=State.FAILED, reason=Reason.OUTPUT_LIMIT, message=message, component="gateway"), None


def action_id_of(invocation_id: str, attempt: int) -> str:
    """Return the id of the action that is a try of an invocation."""
    return invocation_id if attempt == 1 else f"{invocation_id}.{attempt}"


def new_id(seq: int) -> str:
    """An id that sorts by acceptance, tells its row, and cannot be guessed."""
    return f"{seq:011x}-{secrets.token_hex(6)}"


def cursor_of(seq: int | None) -> str | None:
    """Return what has the form of an id and names the row; None for none."""
    return None if seq is None else f"{seq:011x}-{0:012x}"


def seq_of(invocation_id: str) -> int:
    """The row that an id names; raises InvalidInput for odd characters and NotFound for what is no id of ours."""
    serialization.name(invocation_id, "invocation id")
    head, dash, tail = invocation_id.partition("-")
    if len(head) != 11 or not dash or len(tail) != 12:
        raise NotFound(f"no invocation {invocation_id!r}")
    try:
        return int(head, 16)
    except ValueError:
        raise NotFound(f"no invocation {invocation_id!r}") from None
