"""The paper's evaluation: what is drawn of it, and what a budget leaves out."""

from __future__ import annotations

import pytest

from bench.paper.__main__ import interval, main
from bench.paper.figures import TRAIN_S, Play, factors_of, figures, trainers
from bench.paper.page import page
from bench.paper.reality import kendall_tau, reality_figures
from bench.report import BenchReport


def measured(value: float) -> dict[str, object]:
    names = ("act", "execution", "queue", "overhead", "generation", "tools", "reward", "makespan", "synchronous")
    return {**dict.fromkeys((*names, "one_step_off"), value), "failures": 0, "windows": [[1.0, value]]}


def test_a_factor_is_the_baseline_over_ours_beside_the_papers() -> None:
    figure = figures()["steps"]
    over, under, _, _ = figure.factors["coding tools"]
    done = {over: measured(6.0), under: measured(2.0)}
    assert factors_of(figure, done) == {  # type: ignore[arg-type]
        "coding tools": (3.0, 9.0),
        "coding reward": (3.0, 2.8),
        "coding, both": (3.0, 4.3),
        "coding step": ((6.0 + TRAIN_S) / (2.0 + TRAIN_S), 1.4),
    }


def test_what_was_not_played_is_left_out_of_the_page_and_the_rest_is_drawn() -> None:
    drawn = figures(quick=True)
    assert "Not played." in page(drawn, {}, [], {})
    done = {each: measured(2.0) for each in drawn["cpu_batch"].plays()}
    text = page(drawn, done, ["a note"], {"cpu_batch": {"pods, 160": (1.0, 0.9, 1.1)}})  # type: ignore[arg-type]
    assert text.count("<polyline") >= len(drawn["cpu_batch"].lines) and "a note" in text
    assert "1.00x (0.90 to 1.10)" in text


def test_a_play_is_of_the_papers_cluster_and_repeats_itself() -> None:
    one = Play("AI coding", "adaptive", 24, cores=256)
    workload, size = one.make()
    assert (len(workload.trajectories), size.nodes, size.cores, size.gpus) == (24, 1, 256, 0)
    assert one.measure() == one.measure()
    with pytest.raises(SystemExit, match="no figure or part is named nothing"):
        main(["--only", "nothing"])


def test_a_trainer_one_step_off_hides_the_shorter_of_rollouts_and_training() -> None:
    assert trainers([100.0, 300.0, 60.0]) == {"rollouts": 460.0, "synchronous": 820.0, "one_step_off": 640.0}


def test_an_interval_is_students_around_the_mean() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 1.037, 4.963), abs=1e-3)


def test_the_order_of_two_lists_agrees_wholly_not_at_all_or_by_half() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1.0
    assert kendall_tau([(1, 10), (2, 30), (3, 20)]) == pytest.approx(1 / 3)


@pytest.mark.slow
def test_what_a_real_gateway_recorded_is_played_by_the_simulator() -> None:
    report = BenchReport("paper")
    reality_figures(report, 2.0, ("searches",))
    found = report.figures["reality_searches"]
    assert isinstance(found, dict) and int(str(found["actions"])) > 20
    assert {check.name for check in report.checks} == {"reality_mean_error", "reality_tail_error", "reality_order_tau"}
