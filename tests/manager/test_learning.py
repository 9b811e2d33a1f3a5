"""Learning durations and serial fractions, how they hang on the size of a call, and the end of a batch."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manager.action import PRIOR_BATCH_MARGINAL, Grant, Kin, Lease, Outcome, Settlement, State, UnitSet, Work
from manager.learning import PRIOR_SERIAL_FRACTION, BatchState, History, Lifetimes, SavedHistory
from tests.manager.conftest import action


def seconds(t_ori_s: float, serial: float, units: int) -> float:
    return t_ori_s * ((1 - serial) / units + serial)


def taught(serial: float, *, runs: int = 60, noise: float = 0.1) -> History:
    chance = random.Random(1)
    history = History()
    for _ in range(runs):
        units = chance.choice((1, 2, 4, 8))
        history.record("f", "k", units, seconds(20.0, serial, units) * chance.uniform(1 - noise, 1 + noise))
    return history


def test_nothing_known_gives_the_prior() -> None:
    learned = History().learned("f", "k", prior_s=30.0)
    assert (learned.t_ori_s, learned.source) == (30.0, "prior")


def test_precision_rises_from_the_function_to_the_key() -> None:
    history = taught(0.1)
    assert history.learned("f", "other").source == "function"
    assert history.learned("f", "k").source == "key"


def test_a_suite_that_gains_nothing_from_width_is_learned_as_serial() -> None:
    assert taught(1.0).learned("f", "k").serial_fraction >= 0.9


def test_a_suite_that_is_slower_with_more_units_is_learned_as_such() -> None:
    history = History()
    for units in (4, 8, 4, 8, 1):
        history.record("f", "k", units, seconds(3.0, 1.5, units))
    assert history.learned("f", "k").serial_fraction > 1.0


@pytest.mark.parametrize("seed", range(20))
def test_what_widths_seem_to_gain_by_chance_is_discounted(seed: int) -> None:
    """Heavy-tailed durations at two widths say little: neither that all scales, nor that nothing does."""
    chance = random.Random(seed)
    history = History()
    for _ in range(8):
        for units in (1, 4):
            history.record("f", "", units, seconds(1.0, 0.1, units) * math.exp(chance.gauss(0.0, 1.0)))
    assert 0.02 <= history.learned("f").serial_fraction <= 0.6


def test_many_runs_speak_for_themselves_though_they_scatter() -> None:
    chance = random.Random(2)
    history = History()
    for _ in range(200):
        for units in (1, 4, 16):
            history.record("f", "", units, seconds(1.0, 0.5, units) * math.exp(chance.gauss(0.0, 0.3)))
    assert history.learned("f").serial_fraction == pytest.approx(0.5, abs=0.15)


def test_a_key_with_few_runs_is_taken_to_be_near_its_function() -> None:
    def of_key(function_serial: float) -> float:
        history = taught(function_serial)
        for units, seconds_taken in ((1, 10.0), (2, 6.5)):  # 0.3 by itself, on two runs
            history.record("f", "new", units, seconds_taken * chance.uniform(0.8, 1.2))
        return history.learned("f", "new").serial_fraction

    chance = random.Random(3)
    assert of_key(0.05) + 0.1 <= of_key(0.6)


def test_first_runs_are_narrow_and_widen_by_steps() -> None:
    history = History()
    widths = []
    for _ in range(4):
        widths.append(history.learned("f", "k").units_max)
        history.record("f", "k", widths[-1], seconds(80.0, 0.05, widths[-1]))
    assert widths == [4, 8, 16, 32]


def test_what_is_learned_from_is_the_width_that_ran() -> None:
    """A suite of one test has one worker, whatever was leased."""
    history = History()
    ran = action("a", {"cpu": UnitSet.span(1, 8)}, key="cpu")
    lease = Lease(action_id="a", node="n", grants={"cpu": Grant(pool="cpu:n", units=8)})
    outcome = Outcome(state=State.SUCCEEDED, execution_s=3.0, usage={"workers": 1})
    history.observe(Settlement(action=ran, outcome=outcome, lease=lease, queue_s=0.0, overhead_s=0.0, execution_s=3.0))
    assert history.learned(ran.function, "").t_ori_s == pytest.approx(3.0)


def test_an_outlier_moves_little() -> None:
    history = taught(0.1, runs=40)
    before = history.learned("f", "k").t_ori_s
    history.record("f", "k", 1, 20_000.0)
    after = history.learned("f", "k").t_ori_s
    assert before is not None
    assert after is not None
    assert after / before < 1.25


def test_a_drift_is_followed() -> None:
    history = taught(0.1)
    for run in range(80):
        units = (1, 2, 4, 8)[run % 4]
        history.record("f", "k", units, seconds(100.0, 0.1, units))
    learned = history.learned("f", "k").t_ori_s
    assert learned is not None
    assert 75 < learned < 130


def test_a_resized_action_is_learned_at_its_mean_width_and_not_at_its_last() -> None:
    def settlement(usage: dict[str, float]) -> Settlement:
        return Settlement(
            action=action("a", key="cpu"),
            outcome=Outcome(state=State.SUCCEEDED, usage=usage),
            lease=Lease(action_id="a", node="n0", grants={"cpu": Grant(pool="cpu:n0", units=8)}),
            queue_s=0.0,
            overhead_s=0.0,
            execution_s=10.0,
        )

    resized, steady = History(), History()
    resized.observe(settlement({"mean_units": 2.5}))
    steady.observe(settlement({}))
    alike = History()
    alike.record("f", "", 2.5, 10.0)
    assert resized.learned("f").t_ori_s == alike.learned("f").t_ori_s
    assert resized.learned("f").t_ori_s != steady.learned("f").t_ori_s


def batched(
    marginal: float,
    *,
    serial: float = 0.2,
    batches: int = 240,
    noise: float = 0.2,
    seed: int = 1,
    widths: dict[int, tuple[int, ...]] | None = None,
    keys: dict[str, float] | None = None,
) -> History:
    """Taught by batches of a function whose members take 20 s alone on one unit (or by key), sizes drawn by width."""
    chance = random.Random(seed)
    history = History()
    sizes = widths or dict.fromkeys((1, 2, 4, 8), (1, 2, 3, 5, 8, 16))
    t_ori_s = keys or {"": 20.0}
    for _ in range(batches):
        units = chance.choice(tuple(sizes))
        members = [chance.choice(tuple(t_ori_s)) for _ in range(chance.choice(sizes[units]))]
        alone_s = [seconds(t_ori_s[key] * math.exp(chance.gauss(0, noise)), serial, units) for key in members]
        duration_s = Work.of(alone_s).seconds(marginal)
        for key in members:
            history.record("f", key, units, duration_s, Counter(Kin("f", member) for member in members))
    return history


@pytest.mark.slow
@settings(max_examples=12)
@given(st.sampled_from((0.0, 0.5, 1.0)), st.sampled_from((0.0, 0.2, 1.0)), st.integers(0, 1000))
def test_the_marginal_the_serial_fraction_and_the_duration_are_found_together(
    marginal: float, serial: float, seed: int
) -> None:
    learned = batched(marginal, serial=serial, noise=0.1, seed=seed).learned("f")
    assert abs(learned.batch_marginal - marginal) <= 0.1
    assert abs(learned.serial_fraction - serial) <= 0.15
    assert learned.t_ori_s == pytest.approx(20.0, rel=0.3)


@pytest.mark.parametrize("marginal", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("serial", [0.0, 0.5, 1.0])
def test_large_batches_on_narrow_chunks_are_not_taken_for_what_width_saves(marginal: float, serial: float) -> None:
    together = {1: (8, 12, 16), 2: (4, 6, 8), 4: (2, 3), 8: (1, 2)}
    learned = batched(marginal, serial=serial, noise=0.05, widths=together).learned("f")
    assert abs(learned.batch_marginal - marginal) <= 0.1
    assert abs(learned.serial_fraction - serial) <= 0.15
    assert learned.t_ori_s == pytest.approx(20.0, rel=0.3)


@pytest.mark.parametrize("marginal", [0.0, 0.5, 1.0])
def test_a_batch_of_long_and_short_ones_is_shared_by_what_each_key_takes(marginal: float) -> None:
    history = batched(marginal, noise=0.05, keys={"long": 40.0, "short": 2.0})
    long, short = history.learned("f", "long").t_ori_s, history.learned("f", "short").t_ori_s
    assert long == pytest.approx(40.0, rel=0.35)
    assert short == pytest.approx(2.0, rel=0.6), "its own share is a small part of most batches"


def test_while_batch_sizes_hardly_differ_the_prior_stands_and_width_is_learned_from_lone_runs_only() -> None:
    history = batched(0.0, batches=50, widths=dict.fromkeys((1, 2, 4, 8), (6,)))
    learned = history.learned("f")
    assert learned.batch_marginal == PRIOR_BATCH_MARGINAL
    assert learned.serial_fraction == PRIOR_SERIAL_FRACTION
    assert learned.t_ori_s is not None
    assert learned.t_ori_s < 20.0, "as if each had added all of its work"


def settled(members: int, **usage: float) -> Settlement:
    """The end of one of so many members of a batch that took 40 s."""
    return Settlement(
        action=action("a", {"gpu": 1}, batch_tokens=9),
        outcome=Outcome(state=State.SUCCEEDED, usage=usage),
        lease=Lease(action_id="a", node="n0", grants={"gpu": Grant(pool="gpu", units=1)}),
        queue_s=0.0,
        overhead_s=0.0,
        execution_s=40.0,
        batch={Kin("f"): members} if members > 1 else {},
    )


@pytest.mark.parametrize(
    ("settlement", "t_ori_s"),
    [
        (settled(1), 40.0),
        (settled(4), 10.0),
        (settled(4, batch=4.0), 10.0),
        (settled(4, batch=1.0), 40.0),
        (settled(4, batch=3.0), None),
    ],
)
def test_a_member_is_learned_by_what_it_ran_with(settlement: Settlement, t_ori_s: float | None) -> None:
    history = History()
    history.observe(settlement)
    assert history.learned("f").t_ori_s == (None if t_ori_s is None else pytest.approx(t_ori_s))


Truth = Callable[[float], float]


def line(size: float) -> float:
    """T(x) = 0.2 s + 20 ms x."""
    return 0.2 + 0.02 * size


def taught_sizes(
    truth: Truth, runs: int, *, noise: float = 0.15, seed: int = 1, history: History | None = None, key: str = ""
) -> History:
    """Taught by runs of sizes around 50, at the widths 1 to 8 of a function of which 10 % cannot be shared."""
    chance = random.Random(seed)
    history = history or History()
    for _ in range(runs):
        size, units = max(1, round(chance.lognormvariate(4, 1))), chance.choice((1, 2, 4, 8))
        duration_s = truth(size) * math.exp(chance.gauss(0, noise)) * (0.9 / units + 0.1)
        history.record("f", key, units, duration_s, size=size)
    return history


def foretold(history: History, size: float | None, key: str = "") -> float:
    found = history.learned("f", key, size).t_ori_s
    assert found is not None
    return found


def shown_line(history: History) -> dict[str, float] | None:
    """T(x) as it is shown: fixed_s, per_unit_s and the sizes seen; None where it is not fitted."""
    shown = history.describe("f")[""]
    assert isinstance(shown, dict)
    found = shown["size"]
    assert found is None or isinstance(found, dict)
    return found


def test_a_duration_is_foretold_by_its_size() -> None:
    history = taught_sizes(line, 60)
    for size in (10, 50, 200, 500):
        assert foretold(history, size) == pytest.approx(line(size), rel=0.3)
    assert history.learned("f", "", 50.0).error < 0.3 < history.learned("f").error


@pytest.mark.parametrize("size", [None, 0.0, 1.0, 50.0, 1e9])
def test_the_line_of_an_estimate_says_what_the_estimate_does(size: float | None) -> None:
    found = taught_sizes(line, 60).learned("f", "", size)
    assert found.line is not None and found.line.at(size) == pytest.approx(found.t_ori_s)
    assert History().learned("f", "", size, prior_s=3.0).line is None


def test_a_line_is_found_in_the_mean_where_the_medians_are_alike() -> None:
    """Large calls have the median of small ones and four times their mean."""
    chance, history = random.Random(5), History()
    for index in range(400):
        size, deviation = (10, 0.3) if index % 2 else (1000, 1.7)
        history.record("f", "", 1, math.exp(chance.gauss(0, deviation)), size=size)
    assert foretold(history, 1000) > 1.5 * foretold(history, 10)


def test_what_the_width_saves_and_what_the_size_costs_are_found_together() -> None:
    learned = taught_sizes(line, 300).learned("f", "", 50.0)
    assert abs(learned.serial_fraction - 0.1) <= 0.1
    assert learned.t_ori_s == pytest.approx(line(50), rel=0.25)


def test_where_the_size_tells_nothing_the_plain_estimate_stands() -> None:
    for seed in range(20):
        history = taught_sizes(lambda size: 3.0, 40, noise=0.8, seed=seed)
        assert foretold(history, 5) == pytest.approx(foretold(history, 500), rel=2.0)
    found = [shown_line(taught_sizes(lambda size: 3.0, 40, noise=0.8, seed=seed)) for seed in range(20)]
    assert sum(each is not None for each in found) <= 4


def test_where_larger_is_faster_the_plain_estimate_stands() -> None:
    history = taught_sizes(lambda size: 100.0 / size, 60)
    assert shown_line(history) is None
    assert foretold(history, 5) == foretold(history, 500)


def test_one_size_alone_tells_nothing() -> None:
    history = History()
    for run in range(40):
        history.record("f", "", 1, 2.0 + run % 2, size=100)
    assert shown_line(history) is None
    assert foretold(history, 100) == foretold(history, 10_000) == foretold(history, None)


def test_calls_without_a_size_are_of_usual_size() -> None:
    history = taught_sizes(line, 60)
    assert line(20) < foretold(history, None) < line(120)
    for _ in range(10):
        history.record("f", "", 1, line(55))
    assert foretold(history, 200) == pytest.approx(line(200), rel=0.3)


def test_no_line_is_followed_far_beyond_what_was_seen() -> None:
    history = taught_sizes(line, 60)
    shown = shown_line(history)
    assert shown is not None
    assert foretold(history, 1e15) == pytest.approx(foretold(history, 2 * shown["most"]))
    assert foretold(history, 0.0) > 0


def test_a_new_key_borrows_the_line_of_its_function() -> None:
    history = History()
    for key in range(6):
        taught_sizes(lambda size: (1 + key) * line(size), 12, seed=key, history=history, key=str(key))  # noqa: B023
    history.record("f", "new", 1, 3 * line(20), size=20)
    assert foretold(history, 200, "new") == pytest.approx(3 * line(200), rel=0.4)
    assert foretold(history, 200, "5") == pytest.approx(6 * line(200), rel=0.4)


def test_a_key_that_its_size_says_nothing_of_borrows_no_line() -> None:
    history = taught_sizes(line, 60)
    taught_sizes(lambda size: 4.0, 30, history=history, key="flat")
    assert foretold(history, 300, "flat") == pytest.approx(4.0, rel=0.4)


def test_members_of_a_batch_are_told_apart_by_their_size() -> None:
    history = History()
    for size in (10, 40, 160, 640) * 4:
        history.record("f", "", 1, line(size), size=size)
    members = Counter([Kin("f", "", 10.0), Kin("f", "", 640.0)])
    together_s = line(10) + line(640)  # what is guessed: each adds all of its work
    for _ in range(20):
        for kin in members:
            history.record("f", "", 1, together_s, members, size=kin.size)
    assert foretold(history, 10) == pytest.approx(line(10), rel=0.4)
    assert foretold(history, 640) == pytest.approx(line(640), rel=0.3)


def restarted(history: History) -> History:
    """A history of what the other wrote down."""
    return History(msgspec.json.decode(msgspec.json.encode(history.saved()), type=SavedHistory))


@pytest.mark.parametrize(
    ("taught_by", "key"),
    [(lambda: taught(0.3), "k"), (lambda: batched(0.5), ""), (lambda: taught_sizes(line, 60), "")],
    ids=["widths", "batches", "sizes"],
)
def test_what_was_learned_survives_a_restart(taught_by: Callable[[], History], key: str) -> None:
    history = taught_by()
    copy = restarted(history)
    assert copy.saved() == history.saved() and copy.describe("f") == history.describe("f")
    assert copy.learned("f", key, 200.0) == history.learned("f", key, 200.0)
    with pytest.raises(msgspec.ValidationError, match="version"):
        msgspec.json.decode(b'{"version": 99, "profiles": [], "size_paths": {}}', type=SavedHistory)


@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(0, 1e300, allow_nan=False), st.floats(0, 1e12, allow_nan=False), st.integers(1, 64)
        ),
        max_size=40,
    ),
    st.none() | st.floats(0, 1e300, allow_nan=False),
)
def test_whatever_ran_what_is_foretold_is_a_positive_number(
    runs: list[tuple[float | None, float, int]], asked: float | None
) -> None:
    history = History()
    for size, duration_s, units in runs:
        history.record("f", "k", units, duration_s, size=size)
    found = history.learned("f", "k", asked).t_ori_s
    assert found is None if not runs else found is not None and 0 < found < math.inf
    assert restarted(history).learned("f", "k", asked).t_ori_s == found
    json.dumps(history.describe("f"), allow_nan=False)


def test_what_was_learned_of_another_field_is_forgotten() -> None:
    history = History()
    history.measured_by("f", "max_tokens")
    taught_sizes(line, 60, history=history)
    copy = restarted(history)
    for each in (history, copy):
        each.measured_by("f", "max_tokens")
        assert shown_line(each) is not None
        each.measured_by("f", "messages.content")
        assert shown_line(each) is None
        assert foretold(each, 5) == foretold(each, 500) == foretold(each, None)


def ends_in_s(seen_s: list[float], ages_s: list[float], *, needed: int, at_once: int = 0) -> float | None:
    """The estimate for a batch when lifetimes of the same weight were seen."""
    lifetimes = Lifetimes([(each, 1.0) for each in seen_s], ages_s)
    return lifetimes.ends_in_s(BatchState(ages_s=ages_s, needed=needed, at_once=at_once or len(ages_s)))


def test_what_takes_as_long_as_all_before_ends_when_they_did() -> None:
    assert ends_in_s([10.0] * 20, [4.0] * 8, needed=8) == pytest.approx(6.0, abs=0.01)
    assert ends_in_s([10.0] * 20, [4.0] * 7 + [1.0], needed=8) == pytest.approx(9.0, abs=0.01)


def test_the_short_ones_of_a_batch_do_not_speak_for_its_long_ones() -> None:
    assert ends_in_s([1.0] * 8, [2.0] * 8, needed=8) is None
    told = ends_in_s([1.0] * 50 + [10.0] * 50, [2.0] * 8, needed=8)
    assert told == pytest.approx(8.0, abs=0.1)


def test_what_has_not_begun_waits_for_a_place() -> None:
    assert ends_in_s([10.0] * 20, [0.0] * 10, needed=100) == pytest.approx(100.0, abs=1.0)
    assert ends_in_s([10.0] * 20, [], needed=30, at_once=10) == pytest.approx(30.0, abs=1.0)
    assert ends_in_s([10.0] * 20, [9.0] * 2, needed=10, at_once=10) == pytest.approx(10.0, abs=0.1)


def test_more_than_are_needed_end_it_sooner() -> None:
    seen_s = [float(each) for each in range(1, 101)]
    all_of_them, half = ends_in_s(seen_s, [0.0] * 20, needed=20), ends_in_s(seen_s, [0.0] * 20, needed=10)
    assert all_of_them is not None
    assert half == pytest.approx(50.0, abs=8.0)
    assert all_of_them > 90.0
    assert ends_in_s(seen_s, [0.0], needed=0) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_estimate_is_near_the_end_whatever_has_ended_of_a_batch(share: float) -> None:
    chance = random.Random(7)
    told, true = [], []
    for _ in range(60):
        seen_s = [chance.lognormvariate(3.0, 0.6) for _ in range(512)]
        batch_s = sorted(chance.lognormvariate(3.0, 0.6) for _ in range(128))
        now_s = batch_s[int(share * 128)]
        left_s = [each for each in batch_s if each > now_s]
        estimate = ends_in_s(
            [*seen_s, *(each for each in batch_s if each <= now_s)], [now_s] * len(left_s), needed=len(left_s)
        )
        if estimate is not None:
            told.append(estimate)
            true.append(batch_s[-1] - now_s)
    assert len(told) >= 50
    assert sum(told) / len(told) == pytest.approx(sum(true) / len(true), rel=0.15)
