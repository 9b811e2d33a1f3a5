"""Recorded workloads as simulations play them, and what is said where there are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.figures.traces import (
    CODE_REQUESTS,
    FIRST_MINUTE,
    FUNCTIONS,
    MINUTES,
    MOONCAKE,
    REQUEST_DEVICES,
    SIZED,
    RecordedFunction,
    agents,
    invocations,
    minutes_of,
    over_best_baseline,
    read_code_requests,
    read_functions,
    read_mooncake,
    recordings,
    requests,
    trace_figures,
)
from bench.inputs import STEPS, VARIABLE
from bench.report import BenchReport

DURATIONS = ",".join(f"percentile_Average_{share}" for share in (0, 1, 25, 50, 75, 99, 100))


def test_without_recordings_nothing_is_checked_and_each_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    report = BenchReport("figures")
    trace_figures(report, (1,))
    assert report.checks == [] and report.figures == {}
    assert len(report.notes) == 4 and all(VARIABLE in note for note in report.notes)


def test_a_function_comes_in_its_minutes_and_takes_its_percentiles(tmp_path: Path) -> None:
    minutes = ",".join(f"minute_{minute}" for minute in range(1, 1441))
    counts = ",".join("50" if minute == FIRST_MINUTE + 2 else "0" for minute in range(1440))
    (tmp_path / "200_inv.csv").write_text(f"HashFunction,HashApp,HashOwner,{minutes}\nf,a,o,{counts}\ng,a,o,{counts}\n")
    (tmp_path / "200_run.csv").write_text(f"HashFunction,{DURATIONS}\nf,0,1,1000,2000,4000,8000,8000\n")
    functions = read_functions(tmp_path)
    assert [one.name for one in functions] == ["f"]
    assert functions[0].seconds == (0.001, 0.001, 1.0, 2.0, 4.0, 8.0, 8.0)
    played = invocations(functions, seed=3).trajectories
    assert 0 < len(played) < 50
    assert all(120.0 <= each.arrival_s < 180.0 and each.steps[0].t_ori_s <= 8.0 for each in played)
    elastic = invocations(functions, seed=3, elastic=True).trajectories
    assert [each.arrival_s for each in elastic] != [] and all(each.steps[0].key == "cpu" for each in elastic)


def test_between_two_percentiles_it_goes_by_ratio() -> None:
    function = RecordedFunction("f", (0,) * (FIRST_MINUTE + MINUTES), (1.0, 1.0, 1.0, 4.0, 16.0, 16.0, 16.0))
    assert function.at(0.0) == 1.0
    assert function.at(0.375) == pytest.approx(2.0)
    assert function.at(0.625) == pytest.approx(8.0)
    assert function.at(1.0) == 16.0


def test_requests_come_so_fast_that_they_give_the_load(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    rows = ("2023-11-16 18:17:03.5000000,1000,10", "2023-11-16 18:17:05.5000000,1000,5")
    path.write_bytes("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]).encode())
    recorded = read_code_requests(path)
    assert [(one.arrival_s, one.prompt, one.generated) for one in recorded] == [(0.0, 1000, 10), (2.0, 1000, 5)]
    played = requests("code", recorded, load=0.5).trajectories
    device_s = sum(each.steps[0].t_ori_s for each in played)
    assert [each.steps[0].size for each in played] == [1000, 1000], "the prompt is what a caller knows"
    assert device_s / (REQUEST_DEVICES * played[-1].arrival_s) == pytest.approx(0.5)


def test_a_sample_is_the_first_calls_of_a_recording(tmp_path: Path) -> None:
    lines = b"".join(b'{"timestamp": %d, "input_length": 7, "output_length": 3}\n' % (1000 * at) for at in range(9))
    path = tmp_path / "mooncake.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    assert [one.arrival_s for one in read_mooncake(path, 4)] == [0.0, 1.0, 2.0, 3.0]
    counts = (0,) * FIRST_MINUTE + (100,) * MINUTES
    functions = [RecordedFunction("f", counts, (1.0,) * 7)]
    assert minutes_of(functions, sample=17) == 3, "6 of each minute's are kept"
    assert minutes_of(functions, sample=10**6) == MINUTES
    last_s = max(each.arrival_s for each in invocations(functions, 1, 3).trajectories)
    assert 60.0 < last_s < 180.0


def test_the_report_says_what_was_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recordings in the form in which they lie in a directory of recorded inputs, small."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / FUNCTIONS).mkdir(parents=True)
    minutes = ",".join(f"minute_{minute}" for minute in range(1, 1441))
    counts = ",".join("100" if minute >= FIRST_MINUTE else "0" for minute in range(1440))
    (tmp_path / FUNCTIONS / "200_inv.csv").write_text(f"HashFunction,HashApp,HashOwner,{minutes}\nf,a,o,{counts}\n")
    (tmp_path / FUNCTIONS / "200_run.csv").write_text(f"HashFunction,{DURATIONS}\nf,1,1,1,1,1,1,1\n")
    rows = [f"2023-11-16 18:17:0{second}.5000000,1000,10" for second in range(5)]
    (tmp_path / CODE_REQUESTS).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    lines = b"".join(b'{"timestamp": %d, "input_length": 7, "output_length": 3}\n' % (1000 * at) for at in range(5))
    (tmp_path / MOONCAKE).write_bytes(gzip.compress(lines))
    step = {"traj": "a", "run": "r", "t_llm_end": 10.0, "t_obs": 11.0}
    (tmp_path / STEPS).write_bytes(gzip.compress(json.dumps(step).encode()))
    report = BenchReport("figures")
    found = recordings(report, sample=3)
    assert {len(found[f"{name}, load 1.1"].make(1).trajectories) for name in ("code model", "mooncake")} == {3}
    assert [note.partition(": ")[2] for note in report.notes] == [
        "6% of the invocations of 1 minutes, drawn",
        "the first 3 requests",
        "the first 3 requests",
        "all of its 1 agents",
    ]


def test_mooncake_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl.gz"
    lines = [
        b'{"timestamp": %d, "input_length": 7, "output_length": 3, "hash_ids": [1]}\n' % at for at in (500, 3000, 4000)
    ]
    path.write_bytes(gzip.compress(b"".join(lines)))
    assert [(one.arrival_s, one.prompt, one.generated) for one in read_mooncake(path, 2)] == [(0.0, 7, 3), (2.5, 7, 3)]


def test_requests_that_are_passed_over_leave_the_rest_as_if_they_were_the_first(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    rows = [f"2023-11-16 18:17:0{second}.5000000,{second},10" for second in range(5)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    found = read_code_requests(path, 2, skip=3)
    assert [(one.arrival_s, one.prompt) for one in found] == [(0.0, 3), (1.0, 4)]


def test_agents_think_between_what_they_saw_and_what_they_ask_for_next(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl.gz"
    times = (("a", 10.0, 11.0), ("b", 10.5, 10.6), ("a", 15.0, 15.5))
    lines = [{"traj": name, "run": "r", "t_llm_end": issued, "t_obs": seen} for name, issued, seen in times]
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    first, second = agents(path).trajectories
    assert [(step.think_s, step.t_ori_s) for step in first.steps] == [(0.0, 1.0), (4.0, 0.5)]
    assert len(second.steps) == 1


def test_ours_is_held_against_the_best_of_all_baselines_with_the_same_knowledge() -> None:
    means = {"adaptive": 6.0, "adaptive, learned": 9.0, "fixed:1": 8.0, "paper": 10.0, "paper, greedy": 4.0}
    rows = {name: {"mean": value, "best_fixed": 7.0} for name, value in means.items()}
    rows |= {"paper, learned": {"mean": 6.0}, "paper, greedy, learned": {"mean": 9.0}}
    assert over_best_baseline(rows) == {"known": 1.5, "learned": 1.5}
    by_size = over_best_baseline({**rows, SIZED: {"mean": 3.0}})
    assert by_size == {"known": 1.5, "learned": 1.5, "learned by size": 0.5}
