"""Learning durations and serial fractions."""

from __future__ import annotations

import json
import random

from manager.history import History
from manager.lease import Grant, Lease
from manager.outcome import Outcome, Settlement, State
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
