"""Learning how a duration hangs on the size of a call."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Kin
from manager.learning import History

Truth = Callable[[float], float]


def line(size: float) -> float:
    """T(x) = 0.2 s + 20 ms x."""
    return 0.2 + 0.02 * size


def taught(
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
    history = taught(line, 60)
    for size in (10, 50, 200, 500):
        assert foretold(history, size) == pytest.approx(line(size), rel=0.3)
    assert history.learned("f", "", 50.0).error < 0.3 < history.learned("f").error


@pytest.mark.parametrize("size", [None, 0.0, 1.0, 50.0, 1e9])
def test_the_line_of_an_estimate_says_what_the_estimate_does(size: float | None) -> None:
    found = taught(line, 60).learned("f", "", size)
    assert found.line is not None and found.line.at(size) == pytest.approx(found.t_ori_s)
    assert History().learned("f", "", size, prior_s=3.0).line is None


def told_of_scatter(seed: int) -> History:
    """Taught by calls that take 5 s in the mean: small ones scatter by a factor of three, large ones hardly."""
    chance, history = random.Random(seed), History()
    for index in range(200):
        size, deviation = (10, 1.2) if index % 2 else (1000, 0.3)
        history.record("f", "", 1, 5.0 * math.exp(chance.gauss(-deviation * deviation / 2, deviation)), size=size)
    return history


def test_calls_that_only_scatter_more_are_not_expected_to_take_less() -> None:
    """The median of the small ones is half that of the large ones, the mean is the same: mostly neither goes first."""
    histories = [told_of_scatter(seed) for seed in range(12)]
    assert sum(foretold(each, 10) == pytest.approx(foretold(each, 1000)) for each in histories) >= 8


def test_a_line_is_found_in_the_mean_where_the_medians_are_alike() -> None:
    """Large calls have the median of small ones and four times their mean."""
    chance, history = random.Random(5), History()
    for index in range(400):
        size, deviation = (10, 0.3) if index % 2 else (1000, 1.7)
        history.record("f", "", 1, math.exp(chance.gauss(0, deviation)), size=size)
    assert foretold(history, 1000) > 1.5 * foretold(history, 10)


def test_sizes_that_were_learned_before_means_were_are_learned_anew() -> None:
    told = json.loads(json.dumps(taught(line, 60).to_json()))
    for profile in told["profiles"]:
        del profile["sizes"]["excesses"]
    history = History.from_json(told)
    assert shown_line(history) is None
    assert foretold(history, 50) == pytest.approx(foretold(taught(line, 60), None))
    assert shown_line(taught(line, 20, history=history)) is not None


def test_a_few_runs_are_enough_where_they_agree() -> None:
    history = History()
    for size in (10, 100, 1000, 30):
        history.record("f", "", 1, line(size), size=size)
    assert foretold(history, 500) == pytest.approx(line(500), rel=0.3)


def test_fewer_runs_keep_the_plain_estimate() -> None:
    history = History()
    for size in (10, 100, 1000):
        history.record("f", "", 1, line(size), size=size)
    assert foretold(history, 10) == foretold(history, 1000) == foretold(history, None)


def test_what_the_width_saves_and_what_the_size_costs_are_found_together() -> None:
    learned = taught(line, 300).learned("f", "", 50.0)
    assert abs(learned.serial_fraction - 0.1) <= 0.1
    assert learned.t_ori_s == pytest.approx(line(50), rel=0.25)


def test_where_the_size_tells_nothing_the_plain_estimate_stands() -> None:
    for seed in range(20):
        history = taught(lambda size: 3.0, 40, noise=0.8, seed=seed)
        assert foretold(history, 5) == pytest.approx(foretold(history, 500), rel=2.0)
    found = [shown_line(taught(lambda size: 3.0, 40, noise=0.8, seed=seed)) for seed in range(20)]
    assert sum(each is not None for each in found) <= 4


def test_where_larger_is_faster_the_plain_estimate_stands() -> None:
    history = taught(lambda size: 100.0 / size, 60)
    assert shown_line(history) is None
    assert foretold(history, 5) == foretold(history, 500)


def test_one_size_alone_tells_nothing() -> None:
    history = History()
    for run in range(40):
        history.record("f", "", 1, 2.0 + run % 2, size=100)
    assert shown_line(history) is None
    assert foretold(history, 100) == foretold(history, 10_000) == foretold(history, None)


def test_calls_without_a_size_are_of_usual_size() -> None:
    history = taught(line, 60)
    assert line(20) < foretold(history, None) < line(120)
    for _ in range(10):
        history.record("f", "", 1, line(55))
    assert foretold(history, 200) == pytest.approx(line(200), rel=0.3)


def test_no_line_is_followed_far_beyond_what_was_seen() -> None:
    history = taught(line, 60)
    shown = shown_line(history)
    assert shown is not None
    assert foretold(history, 1e15) == pytest.approx(foretold(history, 2 * shown["most"]))
    assert foretold(history, 0.0) > 0


@pytest.mark.parametrize(("size", "duration_s"), [(1e15, 1.0), (50.0, 1e5), (0.0, 1e5)])
def test_an_absurd_run_moves_little(size: float, duration_s: float) -> None:
    history = taught(line, 60)
    history.record("f", "", 1, duration_s, size=size)
    for asked in (10, 50, 200):
        assert foretold(history, asked) == pytest.approx(line(asked), rel=0.45)


def test_a_new_key_borrows_the_line_of_its_function() -> None:
    history = History()
    for key in range(6):
        taught(lambda size: (1 + key) * line(size), 12, seed=key, history=history, key=str(key))  # noqa: B023
    history.record("f", "new", 1, 3 * line(20), size=20)
    assert foretold(history, 200, "new") == pytest.approx(3 * line(200), rel=0.4)
    assert foretold(history, 200, "5") == pytest.approx(6 * line(200), rel=0.4)


def test_a_key_that_its_size_says_nothing_of_borrows_no_line() -> None:
    history = taught(line, 60)
    taught(lambda size: 4.0, 30, history=history, key="flat")
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


def test_what_was_learned_of_sizes_survives_a_restart() -> None:
    history = taught(line, 60)
    copy = History.from_json(json.loads(json.dumps(history.to_json(), allow_nan=False)))
    assert copy.to_json() == history.to_json()
    assert foretold(copy, 200) == foretold(history, 200)


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
    json.dumps(history.to_json(), allow_nan=False)
    json.dumps(history.describe("f"), allow_nan=False)


@pytest.mark.parametrize("odd", [6e7, 1e15, 0.0])
def test_an_odd_first_size_is_no_measure_of_the_others(odd: float) -> None:
    history = History()
    history.record("f", "", 1, 1.0, size=odd)
    taught(line, 120, history=history)
    for size in (10, 50, 200):
        assert foretold(history, size) == pytest.approx(line(size), rel=0.5)


def test_one_absurd_size_moves_the_bounds_of_what_was_seen_little() -> None:
    history = taught(line, 60)
    shown = shown_line(history)
    assert shown is not None
    history.record("f", "", 1, 1.0, size=1e15)
    assert foretold(history, 1e15) <= 50 * line(shown["most"])


def test_what_was_learned_of_another_field_is_forgotten() -> None:
    history = History()
    history.measured_by("f", "max_tokens")
    taught(line, 60, history=history)
    copy = History.from_json(json.loads(json.dumps(history.to_json())))
    for each in (history, copy):
        each.measured_by("f", "max_tokens")
        assert shown_line(each) is not None
        each.measured_by("f", "messages.content")
        assert shown_line(each) is None
        assert foretold(each, 5) == foretold(each, 500) == foretold(each, None)
