"""The tally: what the invocations of each function add up to, in plain numbers that become metrics when they are read.

A call touches a dozen of them: with a lock and a child looked up for each they would cost more than its log record.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

#: Upper bounds in seconds: from a no-op to an hour.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1200, 3600)
_LABELS = (*(str(float(bound)) for bound in BUCKETS_S), "+Inf")
#: Most functions that get a label of their own; later ones share ``other``.
FUNCTIONS_MAX = 1000
OTHER = "other"
PARTS = {"queue": "waiting", "overhead": "being made ready and cleaned up", "execution": "executing"}


@dataclass(slots=True)
class Spread:
    """How seconds are spread over the buckets."""

    counts: list[int] = field(default_factory=lambda: [0] * len(_LABELS))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that)."""
        reached, found = 0, []
        for label, count in zip(_LABELS, self.counts, strict=True):
            reached += count
            found.append((label, float(reached)))
        return found


@dataclass(slots=True)
class FunctionCounters:
    """The numbers of one function."""

    accepted: int = 0
    queued: int = 0
    running: int = 0
    #: By state and reason.
    ended: Tally[tuple[str, str]] = field(default_factory=Tally)
    queue: Spread = field(default_factory=Spread)
    overhead: Spread = field(default_factory=Spread)
    execution: Spread = field(default_factory=Spread)


class Counters(Collector):
    """All of them. Use from one thread."""

    def __init__(self) -> None:
        self._tallies: dict[str, FunctionCounters] = {}

    def of(self, function: str) -> FunctionCounters:
        """The function's own, or the one that all share which came too late for that."""
        tally = self._tallies.get(function)
        if tally is None and len(self._tallies) >= FUNCTIONS_MAX:
            function, tally = OTHER, self._tallies.get(OTHER)
        if tally is None:
            tally = self._tallies[function] = FunctionCounters()
        return tally

    def collect(self) -> Iterator[Metric]:
        """Everything, as it stands now."""
        accepted = CounterMetricFamily("tangram_invocations_accepted", "Invocations accepted", labels=("function",))
        queued = GaugeMetricFamily("tangram_invocations_queued", "Invocations that wait", labels=("function",))
        running = GaugeMetricFamily("tangram_invocations_running", "Invocations that run", labels=("function",))
        ended = CounterMetricFamily(
            "tangram_invocations_ended",
            "Invocations ended, by state and reason",
            labels=("function", "state", "reason"),
        )
        for name, tally in self._tallies.items():
            accepted.add_metric((name,), tally.accepted)
            queued.add_metric((name,), tally.queued)
            running.add_metric((name,), tally.running)
            for (state, reason), count in tally.ended.items():
                ended.add_metric((name, state, reason), count)
        yield from (accepted, ended, queued, running)
        for part, spent in PARTS.items():
            family = HistogramMetricFamily(
                f"tangram_act_{part}_seconds",
                f"The part of the ACT spent {spent}, of what was completed",
                labels=("function",),
            )
            for name, tally in self._tallies.items():
                spread: Spread = getattr(tally, part)
                family.add_metric((name,), spread.buckets(), spread.sum_s)
            yield family
