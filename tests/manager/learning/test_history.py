"""Learning durations and serial fractions."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manager.action import PRIOR_BATCH_MARGINAL, Grant, Kin, Lease, Outcome, Settlement, State, UnitSet, Work
from manager.learning import PRIOR_SERIAL_FRACTION, History
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


def test_what_ran_on_one_unit_goes_on_by_doubling() -> None:
    """On devices a first run of unknown duration is narrow: the widths between it and a wide one are tried as well."""
    history = History()
    widths = []
    for units in (1, 2, 4):
        history.record("f", "", units, seconds(8.0, 0.1, units))
        widths.append(history.learned("f").units_max)
    assert widths == [2, 4, 8]


def test_first_runs_are_narrow_and_widen_by_steps() -> None:
    history = History()
    widths = []
    for _ in range(4):
        widths.append(history.learned("f", "k").units_max)
        history.record("f", "k", widths[-1], seconds(80.0, 0.05, widths[-1]))
    assert widths == [4, 8, 16, 32]


def test_a_new_key_inherits_half_of_the_trust_in_its_function() -> None:
    history = taught(0.1)
    history.record("f", "k", 32, seconds(20.0, 0.1, 32))
    assert history.learned("f", "k").units_max == 64
    assert history.learned("f", "new").units_max == 16


def test_what_is_learned_from_is_the_width_that_ran() -> None:
    """A suite of one test has one worker, whatever was leased."""
    history = History()
    ran = action("a", {"cpu": UnitSet.span(1, 8)}, key="cpu")
    lease = Lease(action_id="a", node="n", grants={"cpu": Grant(pool="cpu:n", units=8)})
    outcome = Outcome(state=State.SUCCEEDED, execution_s=3.0, usage={"workers": 1})
    history.observe(Settlement(action=ran, outcome=outcome, lease=lease, queue_s=0.0, overhead_s=0.0, execution_s=3.0))
    assert history.learned(ran.function, "").t_ori_s == pytest.approx(3.0)


def test_the_serial_fraction_and_the_duration_are_found_together() -> None:
    learned = taught(0.2).learned("f", "k")
    assert abs(learned.serial_fraction - 0.2) <= 0.1
    assert learned.t_ori_s is not None
    assert abs(learned.t_ori_s / 20.0 - 1) < 0.2


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


def test_history_survives_a_restart() -> None:
    history = taught(0.3)
    copy = History.from_json(json.loads(json.dumps(history.to_json())))
    assert copy.describe("f") == history.describe("f")
    assert History.from_json({"version": 99}).describe("f") == {}


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
def test_noise_among_the_members_moves_the_marginal_little(marginal: float) -> None:
    learned = batched(marginal, noise=0.3).learned("f")
    assert abs(learned.batch_marginal - marginal) <= 0.15
    assert learned.t_ori_s == pytest.approx(20.0, rel=0.35)


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


def test_a_marginal_that_was_found_stays_while_all_batches_are_alike() -> None:
    history = batched(0.5, noise=0.05)
    for _ in range(1600):
        history.record("f", "", 1, 20.0 * 4.5, {Kin("f"): 8})
    learned = history.learned("f")
    assert abs(learned.batch_marginal - 0.5) <= 0.1
    assert learned.t_ori_s == pytest.approx(20.0, rel=0.15)


def test_a_batch_is_one_observation() -> None:
    history = History()
    for _ in range(8):
        history.record("f", "k", 1, 80.0, {Kin("f", "k"): 8})
    assert history.learned("f", "k").observations == 1
    assert history.learned("f", "k").t_ori_s == pytest.approx(80.0 / (1 + 7 * PRIOR_BATCH_MARGINAL))
    for _ in range(10):
        history.record("f", "k", 1, 20.0)
    assert history.learned("f", "k").t_ori_s == pytest.approx(20.0, rel=0.1), "eight members weigh as one run"


def test_what_was_found_of_batches_survives_a_restart() -> None:
    history = batched(0.5)
    copy = History.from_json(json.loads(json.dumps(history.to_json())))
    assert copy.to_json() == history.to_json()
    assert copy.learned("f") == history.learned("f")


#: What this version's predecessor wrote for one function.
BEFORE_BATCHES = {
    "version": 1,
    "profiles": [
        {
            "function": "f",
            "key": key,
            "estimate": {"count": 7, "log_mean": math.log(20.0), "log_deviation": 0.3, "error": 0.1},
            "fit": {"sums": [1.0] * 21, "squares": [2.0] * 21, "weight": 7.0, "widths": 0.0, "width_squares": 0.0},
        }
        for key in ("", "k")
    ],
}


def test_a_history_from_before_batches_were_fitted_is_kept() -> None:
    history = History.from_json(json.loads(json.dumps(BEFORE_BATCHES)))
    learned = history.learned("f", "k")
    assert (learned.observations, learned.batch_marginal) == (7, PRIOR_BATCH_MARGINAL)
    assert learned.t_ori_s == pytest.approx(20.0)
    for size in (1, 8) * 40:
        for _ in range(size):
            history.record("f", "k", 1, 20.0 * (1 + 0.5 * (size - 1)), {Kin("f", "k"): size})
    assert history.learned("f", "k").batch_marginal == pytest.approx(0.5)


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


def test_what_never_runs_in_batches_has_no_marginal() -> None:
    history = History()
    for _ in range(5):
        history.observe(replace(settled(1), action=action("a", {"gpu": 1})))
    shown = history.describe("f")[""]
    assert isinstance(shown, dict) and shown["batch_marginal"] is None
