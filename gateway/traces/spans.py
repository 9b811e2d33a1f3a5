"""An ended invocation as spans: one of the whole call, and below it queue, overhead and execution of each try.

Every id is derived from the invocation's own, so that a span is the same whichever gateway ends it, and what runs can
be told its parent before that span exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gateway.invocations.record import Record, action_id_of
from manager.outcome import State

#: The last of a traceparent's four parts: this bit says that the caller keeps its trace.
SAMPLED = 1
PARTS = ("queue", "overhead", "execution")
Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanContext:
    """Where an invocation stands in a trace; ids in hexadecimal."""

    trace_id: str
    #: The caller's span; empty if it gave none.
    parent_id: str
    sampled: bool

    def traceparent(self, span_id: str) -> str:
        """The header that makes a span the parent of what comes."""
        return f"00-{self.trace_id}-{span_id}-{int(self.sampled):02x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span; instants are wall-clock seconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    #: What went wrong; None if nothing did.
    error: str | None = None


def context_of(invocation_id: str, traceparent: str | None, share: float) -> SpanContext:
    """Return the caller's trace, whose choice to keep it or not holds, or one of its own for a ``share`` of them."""
    if traceparent is not None:
        _, trace_id, parent_id, flags = traceparent.split("-")[:4]
        return SpanContext(trace_id=trace_id, parent_id=parent_id, sampled=bool(int(flags, 16) & SAMPLED))
    trace_id = derived(f"{invocation_id} trace", 16)
    return SpanContext(trace_id=trace_id, parent_id="", sampled=int(trace_id[:8], 16) < share * 2**32)


def derived(name: str, size_bytes: int) -> str:
    """Return an id in hexadecimal that belongs to the name, and is never zero."""
    digest = hashlib.blake2b(name.encode(), digest_size=size_bytes).hexdigest()
    return digest if digest.strip("0") else "1" * (2 * size_bytes)


def execution_id(action_id: str) -> str:
    """Return the id of the span of an action's execution: each try of an invocation is an action."""
    return derived(f"{action_id} execution", 8)


def spans_of(record: Record, share: float) -> list[Span]:
    """Return the spans of a record that has ended; none if its trace is not kept."""
    context = context_of(record.id, record.trace["traceparent"], share)
    if not context.sampled or record.ended_s is None:
        return []
    whole = Span(
        trace_id=context.trace_id,
        span_id=derived(f"{record.id} invocation", 8),
        parent_id=context.parent_id,
        name=f"invoke {record.function}",
        began_s=record.accepted_s,
        ended_s=record.ended_s,
        attributes=_attributes(record),
        error=_error(record.state, record.reason, record.message),
    )
    return [whole, *_tries(record, whole)]


def _tries(record: Record, whole: Span) -> Iterator[Span]:
    """Each try's three parts, end to end: what is overhead after an execution is shown before it."""
    left = {part: 1000 * (getattr(record, f"{part}_s") or 0.0) for part in PARTS}
    for past in record.attempts:
        spent = {part: getattr(past, f"{part}_ms") or 0.0 for part in PARTS}
        left = {part: max(0.0, left[part] - spent[part]) for part in PARTS}
        if past.ended_at is not None:
            error = _error(State(past.state), past.reason, past.message)
            yield from _parts(record, whole, past.attempt, past.ended_at.timestamp(), spent, error)
    yield from _parts(record, whole, record.attempt, whole.ended_s, left, whole.error)


def _parts(
    record: Record, whole: Span, attempt: int, ended_s: float, spent_ms: Mapping[str, float], error: str | None
) -> Iterator[Span]:
    at_s = ended_s - sum(spent_ms.values()) / 1000
    action_id = action_id_of(record.id, attempt)
    for part in PARTS:
        began_s, at_s = at_s, at_s + spent_ms[part] / 1000
        executes = part == "execution"
        if executes and not spent_ms[part]:
            continue  # it never began
        yield Span(
            trace_id=whole.trace_id,
            span_id=execution_id(action_id) if executes else derived(f"{action_id} {part}", 8),
            parent_id=whole.span_id,
            name=part,
            began_s=began_s,
            ended_s=at_s,
            attributes={"tangram.attempt": attempt},
            error=error if executes else None,
        )


def _attributes(record: Record) -> dict[str, Attribute]:
    given: dict[str, Attribute | None] = {
        "tangram.invocation": record.id,
        "tangram.function": record.function,
        "tangram.revision": record.revision,
        "tangram.task": record.task,
        "tangram.trajectory": record.trajectory,
        "tangram.parent": record.parent,
        "tangram.mode": record.mode.value,
        "tangram.state": record.state.value,
        "tangram.reason": None if record.reason is None else record.reason.value,
        "tangram.node": record.node,
        "tangram.attempts": record.attempt,
        **{f"tangram.units.{kind}": units for kind, units in record.units.items()},
        **{f"tangram.usage.{name}": amount for name, amount in record.usage.items()},
    }
    return {name: value for name, value in given.items() if value is not None}


def _error(state: State, reason: object, message: str) -> str | None:
    return None if state is State.SUCCEEDED else f"{reason}: {message}"
