"""Counts of what the invocations and their tries come to, for the metrics and for the page."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from gateway.invocations.record import Record
from manager.action import Action, Lease, Settlement, State
from manager.core.views import runs_of
from manager.errors import Reason
from tangram.types import ActivityInfo, ActSplit, FailureCount, FunctionActivity

# Everything is counted as it happens and costs a few microseconds an invocation, whether anybody looks or not: plain
# numbers of each function since the start, and of the last minutes by second. Time is passed in.

#: Upper bounds in seconds: from a no-op to an hour.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1200, 3600)
_LABELS = (*(str(float(bound)) for bound in BUCKETS_S), "+Inf")
#: Most functions that get a label of their own; later ones share ``other``.
FUNCTIONS_MAX = 1000
OTHER = "other"

#: Seconds of failures that are kept, and of rates that are told.
KEPT_S, RATE_S = 900, 60
#: Ended bars that are kept, and rows of failures that are told.
BARS_MAX, FAILURES_MAX = 20_000, 24
#: Ends of each function that are kept, and functions of which they are.
ENDS_MAX, RECENT_FUNCTIONS_MAX = 200, 512


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
        reached, result = 0, []
        for label, count in zip(_LABELS, self.counts, strict=True):
            reached += count
            result.append((label, float(reached)))
        return result


@dataclass(slots=True)
class FunctionCounters:
    """The numbers of one function."""

    accepted: int = 0
    #: By state and reason.
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    queue: Spread = field(default_factory=Spread)
    overhead: Spread = field(default_factory=Spread)
    execution: Spread = field(default_factory=Spread)


@dataclass(slots=True)
class _Second:
    """What happened in one second."""

    second: int
    accepted: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    #: By function, reason and task.
    reasons: Counter[tuple[str, Reason, str]] = field(default_factory=Counter)
    #: Ended ones by their function.
    functions: Counter[str] = field(default_factory=Counter)
    #: Of those that were completed.
    completed: int = 0
    queue_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0
    #: Completed ones by their ACT.
    spread: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))


class _End(NamedTuple):
    """One invocation that has ended."""

    at_s: float
    #: None for one that was not completed: it has no ACT.
    act_s: float | None
    failed: bool


@dataclass(slots=True, kw_only=True)
class Bar:
    """One try of an action on the timeline; times are wall-clock seconds."""

    number: int
    id: str
    function: str
    task: str
    trajectory: str | None
    queue_s: float
    start_s: float
    #: (pool, first unit, units); first is -1 where units have no number.
    places: tuple[tuple[str, int, int], ...]
    overhead_s: float = 0.0
    execution_s: float = 0.0
    #: None while it runs, empty if it went well, else the reason.
    reason: str | None = None

    @property
    def end_s(self) -> float:
        """When it ended, if it has."""
        return self.start_s + self.overhead_s + self.execution_s


class Stats:
    """Counts each invocation when it is accepted and ended, and each try when the engine starts and settles it.

    It is a `manager.engine.Listener`. Use from one thread.
    """

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._now, self._wall = now, wall
        self.began_s = now()
        self.began_wall_s = wall()
        #: Counts since the start, by function.
        self.counters: dict[str, FunctionCounters] = {}
        self._seconds: deque[_Second] = deque()
        #: The last time of each failure that is still counted.
        self._last: dict[tuple[str, Reason, str], float] = {}
        #: The last ends of each function.
        self._functions: dict[str, deque[_End]] = {}
        self._number = 0
        self.running: dict[str, Bar] = {}
        self.done: deque[Bar] = deque(maxlen=BARS_MAX)
        #: Bars that began, and that ended, since they were last taken.
        self._begun: deque[Bar] = deque(maxlen=BARS_MAX)
        self._fresh: deque[Bar] = deque(maxlen=BARS_MAX)

    def of(self, function: str) -> FunctionCounters:
        """The function's own counters, or those that all share which came too late for that."""
        counters = self.counters.get(function)
        if counters is None and len(self.counters) >= FUNCTIONS_MAX:
            function, counters = OTHER, self.counters.get(OTHER)
        if counters is None:
            counters = self.counters[function] = FunctionCounters()
        return counters

    # Invocations

    def accepted(self, record: Record) -> None:
        """Count an invocation that was accepted, or recovered."""
        self.of(record.function).accepted += 1
        self._second().accepted += 1

    def ended(self, record: Record) -> None:
        """Count an invocation that has ended for good."""
        counters, second = self.of(record.function), self._second()
        counters.ended[record.state.value, "" if record.reason is None else record.reason.value] += 1
        second.ended += 1
        times, completed = (
            (record.queue_s or 0.0, record.overhead_s or 0.0, record.execution_s or 0.0),
            record.completed,
        )
        if completed:
            counters.queue.observe(times[0])
            counters.overhead.observe(times[1])
            counters.execution.observe(times[2])
            second.completed += 1
            second.queue_s += times[0]
            second.overhead_s += times[1]
            second.execution_s += times[2]
            second.spread[bisect_left(BUCKETS_S, sum(times))] += 1
        second.functions[record.function] += 1
        if record.state is State.CANCELLED:
            second.cancelled += 1
            return
        failed = record.state is not State.SUCCEEDED
        ends = self._ends_of(record.function)
        ends.append(_End(self._now(), sum(times) if completed else None, failed))
        if failed:
            second.failed += 1
            key = (record.function, record.reason or Reason.INTERNAL, record.task)
            second.reasons[key] += 1
            self._last[key] = self._wall()

    # Tries

    def started(self, action: Action, lease: Lease, queue_s: float) -> None:
        """Begin the bar of a try that was leased."""
        self._number += 1
        bar = Bar(
            number=self._number,
            id=action.id.partition(".")[0],
            function=action.function,
            task=action.task,
            trajectory=action.trajectory,
            queue_s=queue_s,
            start_s=self._wall(),
            places=_places(lease),
        )
        self.running[action.id] = bar
        self._begun.append(bar)

    def settled(self, settlement: Settlement) -> None:
        """End the bar of a try."""
        bar = self.running.pop(settlement.action.id, None)
        if bar is None:
            return
        bar.overhead_s, bar.execution_s = settlement.overhead_s, settlement.execution_s
        bar.reason = "" if settlement.outcome.reason is None else settlement.outcome.reason.value
        self.done.append(bar)
        self._fresh.append(bar)

    # What is read

    def take_bars(self) -> tuple[list[Bar], list[Bar]]:
        """Return the bars that began, and that ended, since the last call."""
        taken = list(self._begun), list(self._fresh)
        self._begun.clear()
        self._fresh.clear()
        return taken

    def recent_bars(self, since_s: float, limit: int) -> tuple[list[Bar], float]:
        """Return running bars, and the newest ended ones that ran after ``since_s`` (wall clock), oldest first.

        With them goes the instant from when on these are all that there were.
        """
        result: list[Bar] = []
        known_s = max(since_s, self.began_wall_s)
        for bar in reversed(self.done):
            if bar.end_s < since_s:
                break
            if len(result) >= limit:
                known_s = max(known_s, bar.end_s)
                break
            result.append(bar)
        else:
            if len(self.done) == BARS_MAX:
                known_s = max(known_s, self.done[0].end_s)
        return [*reversed(result), *list(self.running.values())[-limit:]], known_s

    def per_second(self, seconds: int) -> list[int]:
        """Return how many ended in each of the last whole seconds, oldest first."""
        last = int(self._now())
        ended = {each.second: each.ended for each in self._newest(seconds + 1)}
        return [ended.get(second, 0) for second in range(last - seconds, last)]

    def info(self) -> ActivityInfo:
        """Return rates and times of the last minute, and failures of the last 15."""
        self._prune()
        minute = list(self._newest(RATE_S))
        ended = sum(each.ended for each in minute)
        spread = [sum(column) for column in zip(*(each.spread for each in minute), strict=True)]
        completed = sum(each.completed for each in minute)
        mean = [sum(getattr(each, part) for each in minute) / max(1, completed) for part in _PARTS]
        reasons = Counter[tuple[str, Reason, str]]()
        for each in self._seconds:
            reasons.update(each.reasons)
        return ActivityInfo(
            started_at_s=self.began_wall_s,
            uptime_s=self._now() - self.began_s,
            accepted=sum(each.accepted for each in minute),
            ended=ended,
            failed=sum(each.failed for each in minute),
            cancelled=sum(each.cancelled for each in minute),
            act=ActSplit(
                completed=completed,
                queue_s=mean[0],
                overhead_s=mean[1],
                execution_s=mean[2],
                p50_s=_quantile(spread, 0.5),
                p99_s=_quantile(spread, 0.99),
            ),
            failures=tuple(
                [
                    FailureCount(
                        function=key[0], reason=key[1].value, task=key[2], count=count, last_at_s=self._last[key]
                    )
                    for key, count in reasons.most_common(FAILURES_MAX)
                ]
            ),
            failed_15min=sum(reasons.values()),
            ended_15min=sum(each.ended for each in self._seconds),
            cancelled_15min=sum(each.cancelled for each in self._seconds),
        )

    def whole_info(self) -> ActivityInfo:
        """Return the same, and how each function has fared: that costs more than a look twice a second may."""
        return replace(self.info(), functions=self.by_function())

    def by_function(self) -> dict[str, FunctionActivity]:
        """Return how each function has fared of late."""
        ended = Counter[str]()
        for each in self._newest(RATE_S):
            ended.update(each.functions)
        return {name: _fared(recent, ended[name]) for name, recent in self._functions.items()}

    def _ends_of(self, name: str) -> deque[_End]:
        result = self._functions.get(name)
        if result is None:
            if len(self._functions) >= RECENT_FUNCTIONS_MAX:  # the one that has ended nothing for longest goes
                del self._functions[min(self._functions, key=lambda each: self._functions[each][-1].at_s)]
            result = self._functions[name] = deque(maxlen=ENDS_MAX)
        return result

    def _second(self) -> _Second:
        second = int(self._now())
        if not self._seconds or self._seconds[-1].second != second:
            self._prune()
            self._seconds.append(_Second(second))
        return self._seconds[-1]

    def _newest(self, seconds: int) -> Iterator[_Second]:
        since = int(self._now()) - seconds
        for each in reversed(self._seconds):
            if each.second <= since:
                return
            yield each

    def _prune(self) -> None:
        since = int(self._now()) - KEPT_S
        while self._seconds and self._seconds[0].second <= since:
            self._seconds.popleft()
        if len(self._last) > 4 * FAILURES_MAX:
            known = {key for each in self._seconds for key in each.reasons}
            self._last = {key: at_s for key, at_s in self._last.items() if key in known}


_PARTS = ("queue_s", "overhead_s", "execution_s")


def _places(lease: Lease) -> tuple[tuple[str, int, int], ...]:
    places = []
    for grant in lease.grants.values():
        if grant.chunk is not None:
            places.append((grant.pool, grant.chunk.start, grant.chunk.size))
        elif len(grant.cores) == 1:
            places.append((grant.pool, grant.cores[0], 1))
        elif grant.cores:
            places += [(grant.pool, first, count) for first, count in runs_of(grant.cores)]
        else:
            places.append((grant.pool, -1, grant.units))
    return tuple(places)


def _fared(recent: deque[_End], ended: int) -> FunctionActivity:
    spread = sorted(each.act_s for each in recent if each.act_s is not None)
    last = len(spread) - 1
    return FunctionActivity(
        ended=ended,
        of=len(recent),
        failed=sum(each.failed for each in recent),
        p50_s=spread[last // 2] if spread else None,
        p99_s=spread[99 * last // 100] if spread else None,
    )


def _quantile(spread: list[int], share: float) -> float | None:
    """Return the seconds that ``share`` of what is spread over the buckets stayed below; None if there is nothing."""
    wanted, reached = share * sum(spread), 0
    if not wanted:
        return None
    for index, count in enumerate(spread):
        if count and reached + count >= wanted:
            low = BUCKETS_S[index - 1] if index else 0.0
            high = BUCKETS_S[min(index, len(BUCKETS_S) - 1)]
            return low + (high - low) * (wanted - reached) / count
        reached += count
    return float(BUCKETS_S[-1])
