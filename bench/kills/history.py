"""What was asked of the gateway, what it told, and what was really done: the evidence that the judge reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A record on the wire, as JSON.
Record = Mapping[str, Any]
#: One record of a log: offset, stream, data.
Line = tuple[int, str, str]


@dataclass(slots=True, kw_only=True)
class KilledCall:
    """One call by its name, which is in its input, and all that was said of it."""

    name: str
    function: str
    #: Repeated under one key until it was accepted.
    keyed: bool = False
    #: May be run again after a kill.
    idempotent: bool = False
    #: It was accepted with a promise to outlive its gateway: asynchronous or keyed.
    durable: bool = False
    trajectory: str | None = None
    #: How it is to end, though its command goes on for longer: ``cancelled`` or ``timed_out``; empty for by itself.
    cut: str = ""
    #: A callback was asked for.
    calls_back: bool = False
    #: Every id under which it was accepted.
    ids: set[str] = field(default_factory=set)
    #: Ended records that callers were told, in order.
    told: list[Record] = field(default_factory=list)
    #: The record when all is over; None where there is none.
    last: Record | None = None
    #: Readings of its log, a live one first: each what it saw from some offset on.
    logs: list[Sequence[Line]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class KillHistory:
    """Everything that a run saw."""

    calls: list[KilledCall] = field(default_factory=list)
    #: How often each name was done, in the upstream or in its sandbox.
    done: Counter[str] = field(default_factory=Counter)
    #: Bodies of the callbacks by the invocation's id.
    callbacks: defaultdict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    #: Names in the order in which each trajectory's sandbox did them; None where it is gone.
    files: dict[str, list[str] | None] = field(default_factory=dict)
    #: Instants in seconds at which calls of the metered function arrived.
    arrivals: list[float] = field(default_factory=list)
    #: Answers 429 and 503 that did not say when to come again.
    unhelpful: list[str] = field(default_factory=list)
    #: Answers that are no refusal of a full or restarting gateway.
    refused: list[str] = field(default_factory=list)
    #: Metrics by which accepted was not queued + running + ended.
    unbalanced: list[str] = field(default_factory=list)
    #: Exit statuses of the gateway where it was told to stop.
    exits: list[int] = field(default_factory=list)
    #: What there is more than before the first start, by kind.
    left: dict[str, int] = field(default_factory=dict)
