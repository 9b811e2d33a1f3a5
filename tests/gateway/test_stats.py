"""Stats and metrics: what happened lately is counted as it happens, and forgotten in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from gateway.invocations.record import Mode, Record, new_id
from gateway.metrics import Metrics, invocation_families
from gateway.stats import (
    BARS_MAX,
    BUCKETS_S,
    ENDS_MAX,
    FAILURES_MAX,
    FUNCTIONS_MAX,
    KEPT_S,
    OTHER,
    Spread,
    Stats,
)
from manager.action import Action, Grant, Lease, Outcome, Settlement, State, UnitSet
from manager.errors import Reason


class Clocks:
    """A clock and a time of day that go together."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s + 1e9


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def stats(clocks: Clocks) -> Stats:
    return Stats(clocks.now, clocks.wall)


def record(
    reason: Reason | None = None,
    *,
    times: tuple[float, float, float] = (1.0, 0.5, 2.0),
    state: State | None = None,
    started: bool = True,
    **given: str,
) -> Record:
    made = Record(
        seq=1,
        id=new_id(1),
        function=given.get("function", "f"),
        revision="r",
        task=given.get("task", "rl"),
        trajectory=None,
        parent=None,
        mode=Mode.ASYNC,
        accepted_s=0.0,
        input=b"{}",
    )
    made.queue_s, made.overhead_s, made.execution_s = times
    made.state = state or (State.SUCCEEDED if reason is None else State.FAILED)
    made.started_s = 1.0 if started else None
    made.reason = reason
    return made


def action(name: str = "a") -> Action:
    return Action(id=name, function="f", task="rl", trajectory="t", cost={"cpu": UnitSet.fixed(3)})


LEASE = Lease(action_id="a", node="n0", grants={"cpu": Grant(pool="cpu:n0", units=3, cores=(0, 1, 5))})


def test_the_last_minute_is_told_and_no_more(stats: Stats, clocks: Clocks) -> None:
    stats.accepted(record())
    stats.ended(record())
    stats.ended(record(Reason.TIMEOUT, times=(3.0, 0.5, 4.0)))
    found = stats.info()
    assert (found.accepted, found.ended, found.failed) == (1, 2, 1)
    assert (found.act.queue_s, found.act.overhead_s, found.act.execution_s) == (2.0, 0.5, 3.0)
    assert found.act.p50_s is not None and found.act.p99_s is not None
    assert 2.5 <= found.act.p50_s <= 5.0 <= found.act.p99_s <= 10.0
    clocks.now_s += 61
    found = stats.info()
    assert (found.accepted, found.ended, found.failed, found.act.p50_s) == (0, 0, 0, None)
    assert found.failed_15min == 1


def test_failures_are_counted_by_function_reason_and_task_for_fifteen_minutes(stats: Stats, clocks: Clocks) -> None:
    for _ in range(3):
        stats.ended(record(Reason.TIMEOUT))
    clocks.now_s += 5
    stats.ended(record(Reason.OUT_OF_MEMORY, function="g"))
    rows = [(each.function, each.reason, each.task, each.count) for each in stats.info().failures]
    assert rows == [("f", "timeout", "rl", 3), ("g", "out_of_memory", "rl", 1)]
    assert stats.info().failures[1].last_at_s == clocks.wall()
    clocks.now_s += KEPT_S - 5
    assert [each.function for each in stats.info().failures] == ["g"]
    clocks.now_s += 6
    assert stats.info().failures == ()


def test_callers_invent_names_and_what_is_kept_stays_bounded(stats: Stats, clocks: Clocks) -> None:
    for number in range(3 * KEPT_S):
        clocks.now_s += 1
        stats.ended(record(Reason.TIMEOUT, task=f"task-{number}"))
    assert len(stats.info().failures) == FAILURES_MAX
    assert len(stats._seconds) <= KEPT_S
    assert len(stats._last) <= KEPT_S + 1


def test_a_bar_tells_its_units_as_runs_and_how_it_ended(stats: Stats) -> None:
    stats.started(action(), LEASE, 0.25)
    (bar,), done = stats.take_bars()
    assert done == [] and bar.places == (("cpu:n0", 0, 2), ("cpu:n0", 5, 1))
    assert (bar.queue_s, bar.reason) == (0.25, None)
    outcome = Outcome(state=State.FAILED, reason=Reason.TIMEOUT)
    settled = Settlement(action=action(), outcome=outcome, lease=LEASE, queue_s=0.25, overhead_s=0.5, execution_s=2.0)
    stats.settled(settled)
    assert stats.take_bars() == ([], [bar])
    assert (bar.overhead_s, bar.execution_s, bar.reason) == (0.5, 2.0, "timeout")
    assert stats.running == {} and list(stats.done) == [bar]
    assert stats.take_bars() == ([], [])


def test_bars_that_nobody_takes_stay_bounded(stats: Stats) -> None:
    outcome = Outcome(state=State.SUCCEEDED)
    for number in range(BARS_MAX + 10):
        one = action(f"a{number}")
        stats.started(one, LEASE, 0.0)
        stats.settled(
            Settlement(action=one, outcome=outcome, lease=LEASE, queue_s=0.0, overhead_s=0.0, execution_s=0.0)
        )
    begun, done = stats.take_bars()
    assert len(begun) == len(done) == len(stats.done) == BARS_MAX


def test_only_bars_that_ran_lately_are_shown_to_who_comes_new(stats: Stats, clocks: Clocks) -> None:
    outcome = Outcome(state=State.SUCCEEDED)
    for number in range(5):
        one = action(f"a{number}")
        stats.started(one, LEASE, 0.0)
        clocks.now_s += 10
        stats.settled(
            Settlement(action=one, outcome=outcome, lease=LEASE, queue_s=0.0, overhead_s=0.0, execution_s=10.0)
        )
    stats.started(action("late"), LEASE, 0.0)
    began_s, since_s = stats.began_wall_s, clocks.wall() - 25
    bars, known_since_s = stats.recent_bars(since_s, 100)
    assert ([bar.id for bar in bars], known_since_s) == (["a2", "a3", "a4", "late"], since_s)
    bars, known_since_s = stats.recent_bars(0.0, 2)
    assert ([bar.id for bar in bars], known_since_s) == (["a3", "a4", "late"], began_s + 30), "a2 had ended by then"
    assert stats.recent_bars(0.0, 100)[1] == began_s, "nothing was before the gateway"


def test_each_function_is_told_by_its_own_last_ends(stats: Stats, clocks: Clocks) -> None:
    for number in range(1, ENDS_MAX + 1):
        stats.ended(record(function="f", times=(0.0, 0.0, float(number))))
    stats.ended(record(Reason.TIMEOUT, function="g", times=(1.0, 0.0, 2.0)))
    found = stats.by_function()
    assert (found["f"].ended, found["f"].of, found["f"].failed) == (ENDS_MAX, ENDS_MAX, 0)
    assert (found["f"].p50_s, found["f"].p99_s) == (100.0, 198.0)
    assert (found["g"].ended, found["g"].failed, found["g"].p50_s) == (1, 1, 3.0)
    clocks.now_s += 61
    found = stats.by_function()
    assert (found["g"].ended, found["g"].of) == (0, 1), "its last ends stay, its rate does not"


def test_an_act_is_of_what_was_completed(stats: Stats) -> None:
    stats.ended(record(times=(0.0, 0.0, 1.0)))
    stats.ended(record(Reason.TIMEOUT, times=(0.0, 0.0, 3.0), state=State.TIMED_OUT))
    for started in (True, False):
        stats.ended(record(Reason.CANCELLED, times=(60.0, 0.0, 0.0), state=State.CANCELLED, started=started))
    stats.ended(record(Reason.QUEUE_TIMEOUT, times=(900.0, 0.0, 0.0), state=State.TIMED_OUT, started=False))
    stats.ended(record(Reason.NODE_LOST, times=(0.0, 0.0, 50.0), state=State.LOST))
    found = stats.whole_info()
    assert (found.ended, found.failed, found.cancelled) == (6, 3, 2)
    assert (found.ended_15min, found.failed_15min, found.cancelled_15min) == (6, 3, 2)
    assert (found.act.completed, found.act.queue_s, found.act.execution_s) == (2, 0.0, 2.0)
    assert found.act.p99_s is not None and found.act.p99_s <= 5.0
    of = found.functions["f"]
    assert (of.ended, of.of, of.failed, of.p50_s) == (6, 4, 3, 1.0)


@given(seconds=st.lists(st.one_of(st.sampled_from(BUCKETS_S), st.floats(0, 10_000)), max_size=30))
def test_seconds_fall_into_the_buckets_of_a_prometheus_histogram(seconds: list[float]) -> None:
    registry, spread = CollectorRegistry(), Spread()
    reference = Histogram("name", "about", registry=registry, buckets=BUCKETS_S)
    for one in seconds:
        reference.observe(one)
        spread.observe(one)
    expected = [
        (sample.labels["le"], sample.value)
        for metric in reference.collect()
        for sample in metric.samples
        if sample.name == "name_bucket"
    ]
    assert spread.buckets() == expected
    assert spread.sum_s == sum(seconds)


def test_functions_beyond_the_bound_share_one_tally() -> None:
    stats, metrics = Stats(lambda: 1.0, lambda: 1e9), Metrics()
    metrics.register(lambda: invocation_families(stats, ()))
    for number in range(FUNCTIONS_MAX + 2):
        stats.of(f"f{number}").accepted += 1
    accepted = next(each for each in metrics.registry.collect() if each.name == "tangram_invocations_accepted")
    counts = {sample.labels["function"]: sample.value for sample in accepted.samples}
    assert len(counts) == FUNCTIONS_MAX + 1
    assert counts[OTHER] == 2
    assert stats.of("f0") is not stats.of("another")
