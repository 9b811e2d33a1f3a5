"""What benches read and compare: recorded inputs and workloads, and pairs of checkouts."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import pairs
from bench.inputs import STEPS, VARIABLE, real_input
from bench.paper.windows import (
    CODE_REQUESTS,
    FIRST_MINUTE,
    FUNCTIONS,
    INVOCATIONS,
    LOADS,
    MOONCAKE,
    REQUEST_DEVICES,
    RecordedRequest,
    invocations,
    read_functions,
    requests,
    starts,
    window_figures,
    windows,
)
from bench.report import BenchReport

Bench = Callable[[Path], pairs.Values]


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of recorded inputs."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def test_a_directory_that_lacks_an_input_is_refused_by_name(named: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{VARIABLE}={named} holds no {STEPS}"):
        real_input(STEPS)


def test_without_a_directory_there_is_no_recorded_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert real_input(STEPS) is None


BEFORE, AFTER = Path("before"), Path("after")


@pytest.fixture
def report_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bench], dict[str, float]]:
    """Four pairs of a bench that is played instead; returns the checks."""

    def played(bench: Bench) -> dict[str, float]:
        monkeypatch.setattr(pairs, "values", lambda name, checkout, options: bench(checkout))
        report = BenchReport("pairs")
        given = argparse.Namespace(before=BEFORE, after=AFTER, pairs=4, options=[])
        pairs.compare(report, "part", given)
        return {check.name: check.value for check in report.checks}

    monkeypatch.setattr(BenchReport, "keep", lambda report: None)
    return played


Played = Callable[[Bench], dict[str, float]]


def test_a_ratio_above_one_is_worse_whichever_side_is_better(report_of: Played) -> None:
    def part(checkout: Path) -> pairs.Values:
        slow = checkout.name == "after"
        return {"ms": (3.0 if slow else 2.0, True), "per_s": (10.0 if slow else 20.0, False)}

    assert report_of(part) == {"part_ms_worse": 1.5, "part_per_s_worse": 2.0}


def test_both_checkouts_go_first_equally_often(report_of: Played) -> None:
    seen: list[str] = []

    def part(checkout: Path) -> pairs.Values:
        seen.append(checkout.name)
        return {"ms": (1.0, True)}

    report_of(part)
    assert seen == ["before", "after", "after", "before"] * 2


@pytest.mark.parametrize(("after", "ratio"), [(0.0, 1.0), (2.0, math.inf)])
def test_what_was_nothing_before_must_be_nothing_afterwards(report_of: Played, after: float, ratio: float) -> None:
    found = report_of(lambda checkout: {"wrong": (after if checkout.name == "after" else 0.0, True)})
    assert found == {"part_wrong_worse": ratio}


def test_a_part_that_never_ran_is_a_failure(report_of: Played) -> None:
    def part(checkout: Path) -> pairs.Values:
        raise ValueError("it printed nothing")

    assert report_of(part) == {"part_ran": 0.0}


DURATIONS = ",".join(f"percentile_Average_{share}" for share in (0, 1, 25, 50, 75, 99, 100))


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


def test_every_recording_is_cut_into_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recordings in the form in which they lie in a directory of recorded inputs, small."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / FUNCTIONS).mkdir(parents=True)
    minutes = ",".join(f"minute_{minute}" for minute in range(1, 1441))
    counts = ",".join("100" if minute == FIRST_MINUTE else "0" for minute in range(1440))
    (tmp_path / FUNCTIONS / "200_inv.csv").write_text(f"HashFunction,HashApp,HashOwner,{minutes}\nf,a,o,{counts}\n")
    (tmp_path / FUNCTIONS / "200_run.csv").write_text(f"HashFunction,{DURATIONS}\nf,1,1,1,1,1,1,1\n")
    (tmp_path / INVOCATIONS).write_text("app,func,end_timestamp,duration\na,f,2.5,0.5\na,f,3.0,2.0\n")
    rows = [f"2023-11-16 18:17:0{second}.5000000,1000,10" for second in range(5)]
    (tmp_path / CODE_REQUESTS).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    lines = b"".join(b'{"timestamp": %d, "input_length": 7, "output_length": 3}\n' % (1000 * at) for at in range(5))
    (tmp_path / MOONCAKE).write_bytes(gzip.compress(lines))
    step = {"traj": "a", "run": "r", "t_llm_end": 10.0, "t_obs": 11.0}
    (tmp_path / STEPS).write_bytes(gzip.compress(json.dumps(step).encode()))
    found = {each.name: each for each in windows(BenchReport("paper"))}
    kinds = ("agents", "code model", "functions", "functions, elastic", "invocations", "mooncake")
    assert sorted(found) == sorted(f"{kind}, load {load}, from 0" for kind in kinds for load in LOADS)
    (first, second) = found["invocations, load 1.1, from 0"].workload.trajectories
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.0)
    assert set(found["mooncake, load 1.1, from 0"].measure()) == {
        f"{how}: {measure}" for how in ("known", "learned", "learned by size") for measure in ("mean", "p99")
    }


def test_windows_begin_at_every_stride_and_a_short_rest_is_left_out() -> None:
    assert starts(199) == [0] and starts(2399) == [0, 500, 1000] and starts(2400) == [0, 500, 1000, 1500]
    assert starts(9000, count=2) == [0, 500]


def test_without_recordings_nothing_is_played_and_each_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    report = BenchReport("paper")
    window_figures(report)
    assert report.checks == [] and len(report.notes) == 5 and all(VARIABLE in note for note in report.notes)


def test_requests_from_the_middle_come_as_if_they_were_the_first() -> None:
    recorded = [RecordedRequest(at, 1000, 10) for at in (100.0, 102.0)]
    played = requests("code", recorded, load=0.5).trajectories
    device_s = sum(each.steps[0].t_ori_s for each in played)
    assert played[0].arrival_s == 0.0 and [each.steps[0].size for each in played] == [1000, 1000]
    assert device_s / (REQUEST_DEVICES * played[-1].arrival_s) == pytest.approx(0.5)
