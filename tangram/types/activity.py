"""What happened lately: rates, times and failures of the last minutes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from tangram.types.values.scalars import AnyReason, Count


class ActSplit(Struct, frozen=True, kw_only=True):
    """The action completion time of what was completed in the last minute, in seconds.

    An action is completed that was started, and neither cancelled nor lost.
    """

    completed: Annotated[Count, Meta(description="Of so many actions")]
    queue_s: Annotated[float, Meta(description="Mean")]
    overhead_s: Annotated[float, Meta(description="Mean")]
    execution_s: Annotated[float, Meta(description="Mean")]
    p50_s: Annotated[float | None, Meta(description="Of the whole; null if nothing was completed")]
    p99_s: Annotated[float | None, Meta(description="Of the whole; null if nothing was completed")]


class FailureCount(Struct, frozen=True, kw_only=True):
    """Failures of one function and task for one reason in the last 15 minutes."""

    function: str
    reason: AnyReason
    task: str
    count: Count
    last_at_s: Annotated[float, Meta(description="Seconds since 1970 of the last of them")]


class FunctionActivity(Struct, frozen=True, kw_only=True):
    """How a function has fared of late."""

    ended: Annotated[Count, Meta(description="Ended in the last minute")]
    of: Annotated[
        Count, Meta(description="The last ends that the other fields are of, at most 200, none of them cancelled")
    ]
    failed: Annotated[Count, Meta(description="How many of them failed")]
    p50_s: Annotated[
        float | None, Meta(description="The action completion time of those that were completed; null if none was")
    ]
    p99_s: float | None


class ActivityInfo(Struct, frozen=True, kw_only=True):
    """Rates and times of the last minute, failures of the last 15; what was cancelled has not failed."""

    started_at_s: Annotated[float, Meta(description="Seconds since 1970 of the gateway's start")]
    uptime_s: float
    accepted: Annotated[Count, Meta(description="Accepted in the last minute")]
    ended: Annotated[Count, Meta(description="Ended in the last minute, however it ended")]
    failed: Annotated[Count, Meta(description="Failed in the last minute, timed out and lost ones included")]
    cancelled: Annotated[Count, Meta(description="Cancelled in the last minute")]
    act: ActSplit
    failures: Annotated[tuple[FailureCount, ...], Meta(description="The most frequent first, at most 24 rows")]
    failed_15min: Annotated[Count, Meta(description="All failures of the last 15 minutes")]
    ended_15min: Annotated[Count, Meta(description="All that ended in them")]
    cancelled_15min: Annotated[Count, Meta(description="How many of these were cancelled")]
    functions: Annotated[
        Mapping[str, FunctionActivity], Meta(description="Those of which something ended that was not cancelled")
    ] = {}
