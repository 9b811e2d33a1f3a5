"""Invocations on the wire: one, a page of them, and what a purge of dead letters answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from tangram.types.values.scalars import (
    AnyReason,
    AnyState,
    Count,
    Delivery,
    Instant,
    JsonObject,
    Milliseconds,
    Mode,
    Name,
)

#: Header of an answer that a call with a known Idempotency-Key latched on to.
REPLAY = "X-Idempotent-Replay"


class Attempt(Struct, frozen=True, kw_only=True):
    """One finished try of an invocation that was tried more than once."""

    attempt: Annotated[int, Meta(ge=1, description="Its number")]
    state: AnyState
    reason: AnyReason | None
    message: str
    ended_at: Instant | None
    queue_ms: Annotated[Milliseconds | None, Meta(description="It waited so long, in milliseconds")]
    overhead_ms: Annotated[Milliseconds | None, Meta(description="It was made ready so long, in milliseconds")]
    execution_ms: Annotated[Milliseconds | None, Meta(description="It ran so long, in milliseconds")]


class Invocation(Struct, frozen=True, kw_only=True):
    """The record of an invocation, there from its acceptance on.

    ``act_ms`` is ``queue_ms + overhead_ms + execution_ms``, which is the time from ``accepted_at`` to its end, over
    all tries and gateways. Before its end the three stand as they are at the time of asking.
    """

    id: Annotated[Name, Meta(description="Given by the gateway; sorts by acceptance")]
    function: str
    revision: Annotated[str, Meta(description="Digest of the function's definition that it runs")]
    task: Annotated[str, Meta(description="The RL task that it belongs to")]
    trajectory: Annotated[str | None, Meta(description="The rollout whose environment it needs")]
    parent: Annotated[str | None, Meta(description="The invocation that made it")]
    mode: Mode
    state: AnyState
    reason: Annotated[AnyReason | None, Meta(description="Why it ended otherwise than well")]
    message: Annotated[str, Meta(description="The same for people")]
    component: Annotated[str, Meta(description="The part of the gateway that says so")]
    detail: Annotated[JsonObject, Meta(description="Particulars of a failure, such as a traceback")]
    retry_after_s: Annotated[float | None, Meta(description="Seconds after which another try may succeed")]
    accepted_at: Instant
    started_at: Annotated[Instant | None, Meta(description="When its last try was leased")]
    ended_at: Instant | None
    queue_ms: Annotated[Milliseconds | None, Meta(description="It waited so long, in milliseconds")]
    overhead_ms: Annotated[Milliseconds | None, Meta(description="It was made ready so long, in milliseconds")]
    execution_ms: Annotated[Milliseconds | None, Meta(description="It ran so long, in milliseconds")]
    act_ms: Annotated[Milliseconds | None, Meta(description="Action completion time in milliseconds, once ended")]
    node: Annotated[str | None, Meta(description="Where it runs, or ran")]
    units: Annotated[Mapping[str, int], Meta(description="Units that it holds or held, by resource kind")]
    usage: Annotated[Mapping[str, float], Meta(description="What it was measured to use; the unit ends each name")]
    attempt: Annotated[int, Meta(ge=1, description="Number of the present or last try")]
    attempts: Annotated[tuple[Attempt, ...], Meta(description="The tries before, if there were any")]
    dead: Annotated[bool, Meta(description="Whether it is in the dead-letter list")]
    callback: Annotated[Delivery | None, Meta(description="What became of the callback, if one was asked for")]
    timeout_capped_s: Annotated[
        float | UnsetType, Meta(description="The function's own bound, which holds in place of a longer one asked for")
    ] = UNSET
    # Any JSON value, or UNSET: as types these two are one, and callers look into them.
    input: Annotated[Any, Meta(description="What was sent; left out in listings")] = UNSET
    result: Annotated[Any, Meta(description="What the function returned, null before that; left out in listings")] = (
        UNSET
    )

    @property
    def ended(self) -> bool:
        """Whether its state is final."""
        return self.state not in ("queued", "running")

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.state == "succeeded"

    @property
    def queue_s(self) -> float:
        """Seconds that it waited; 0 before it is known."""
        return (self.queue_ms or 0.0) / 1000

    @property
    def overhead_s(self) -> float:
        """Seconds for which it was made ready; 0 before it is known."""
        return (self.overhead_ms or 0.0) / 1000

    @property
    def execution_s(self) -> float:
        """Seconds that it ran; 0 before it is known."""
        return (self.execution_ms or 0.0) / 1000

    @property
    def act_s(self) -> float:
        """Its action completion time in seconds, as far as it is known."""
        return self.queue_s + self.overhead_s + self.execution_s


class InvocationPage(Struct, frozen=True, kw_only=True):
    """Invocations without input and result, newest first."""

    invocations: tuple[Invocation, ...]
    next_cursor: Annotated[Name | None, Meta(description="The cursor of the next page; null on the last")]


class Purged(Struct, frozen=True, kw_only=True):
    """How many invocations left the dead-letter list."""

    purged: Count
