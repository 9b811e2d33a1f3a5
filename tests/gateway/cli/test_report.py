"""Recorded invocations become a trace and a report, which tells what a run took and what it would have taken."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.report import COMPARED, PlayedRun, ReportedRun, RunAction, actions_of, page, play, workload_of
from gateway.cli.simulate import recorded
from gateway.cli.trace import read_trace, write_trace
from manager.action import Amdahl
from manager.simulation.simulate import Size, run, simulate
from manager.simulation.workloads import Workload
from tangram import InvocationResult
from tests.gateway.conftest import RunningGateway
from tests.tangram.cli.conftest import Served, invocation, served

FUNCTIONS: dict[str, Any] = {
    "shell": {"name": "shell", "runtime": "exec", "cost": {"cpu": 1}, "sandbox": {"memory_bytes": 1024}},
    "judge": {"name": "judge", "runtime": "model", "cost": {"gpu": 1}, "model": {"path": "m"}},
    "tests": {
        "name": "tests",
        "runtime": "pytest",
        "cost": {"cpu": {"min": 1, "max": 8}},
        "key": "cpu",
        "elasticity": {"serial_fraction": 0.0},
    },
}
__all__ = ["served"]
VOID = {"meta", "br", "rect", "line", "polygon", "td", "tr", "th"}


def record(id: str, function: str, start_s: float, end_s: float, execution_s: float, **more: Any) -> InvocationResult:
    times: dict[str, Any] = {
        "accepted_at": datetime.fromtimestamp(start_s, UTC),
        "ended_at": datetime.fromtimestamp(end_s, UTC),
        "queue_ms": 0.0,
        "overhead_ms": 0.0,
        "execution_ms": 1000 * execution_s,
    }
    about: dict[str, Any] = {"id": id, "task": "t", "trajectory": "r1", "state": "succeeded", "units": {}, "node": None}
    return invocation(0, function, **{**about, **times, **more})


def test_pauses_become_thinking_and_granted_units_become_work() -> None:
    newest_first = [
        record("i2", "tests", 1010.0, 1015.0, 4.0, units={"cpu": 4}),
        record("i1", "shell", 1000.0, 1002.0, 1.5, units={"cpu": 1}),
        record("i3", "shell", 1020.0, 1021.0, 1.0, state="failed"),
        record("i4", "gone", 1020.0, 1021.0, 1.0),
    ]
    (trajectory,) = recorded(newest_first, FUNCTIONS)
    assert (trajectory.id, trajectory.arrival_s, trajectory.memory_bytes) == ("r1", 0.0, 1024)
    shell, tests = trajectory.steps
    assert (shell.think_s, shell.t_ori_s) == (0.0, 1.5)
    assert tests.think_s == pytest.approx(8.0) and tests.t_ori_s == pytest.approx(14.8) and tests.malleable
    assert read_trace(write_trace([trajectory])) == [trajectory]
    workload = Workload(name="replay", trajectories=(trajectory,))
    assert run(workload, ["adaptive"], Size(nodes=1, cores=8)).rows[0].act_s > 0


def test_the_replay_of_a_history_takes_what_its_actions_took_overhead_and_workers_included() -> None:
    suite = record("i1", "tests", 0.0, 5.0, 4.0, units={"cpu": 4}, overhead_ms=1000.0, usage={"workers": 4.0})
    (trajectory,) = recorded([suite], FUNCTIONS)
    assert trajectory.steps[0].overhead_s == pytest.approx(1.0)
    assert read_trace(write_trace([trajectory])) == [trajectory]
    replay = simulate(Workload(name="replay", trajectories=(trajectory,)), "fixed:4", Size(nodes=1, cores=4))
    (action,) = replay.records
    assert [action.overhead_s, action.execution_s] == pytest.approx([1.0, 4.0])


def test_what_was_learned_of_a_functions_elasticity_is_that_of_its_trace() -> None:
    learned = {key: {"serial_fraction": part, "observations": 1} for key, part in (("a", 0.2), ("b", 0.4), ("c", None))}
    functions = {**FUNCTIONS, "tests": {"key": "cpu", "cost": {"cpu": {"min": 1, "max": 8}}, "learned": learned}}
    (trajectory,) = recorded([record("i1", "tests", 0.0, 5.0, 4.0, units={"cpu": 4})], functions)
    elasticity = trajectory.steps[0].elasticity
    assert isinstance(elasticity, Amdahl) and elasticity.serial_fraction == pytest.approx(0.3)


def test_a_batch_is_shared_out_among_its_members() -> None:
    usage = {"batch": 4.0, "tokens": 2000.0}
    (trajectory,) = recorded([record("i1", "judge", 0.0, 2.0, 2.0, units={"gpu": 1}, usage=usage)], FUNCTIONS)
    assert (trajectory.steps[0].t_ori_s, trajectory.steps[0].batch_tokens) == (0.5, 500)
    (alone,) = recorded([record("i1", "shell", 0.0, 2.0, 2.0, usage={"tokens": 9.0})], FUNCTIONS)
    assert (alone.steps[0].t_ori_s, alone.steps[0].batch_tokens) == (2.0, 0)


def test_the_size_of_a_call_is_taken_from_its_record() -> None:
    sized = record("i1", "shell", 0.0, 2.0, 2.0, usage={"size": 300.0})
    without = record("i2", "shell", 3.0, 4.0, 1.0)
    (trajectory,) = recorded([without, sized], FUNCTIONS)
    assert [step.size for step in trajectory.steps] == [300.0, None]
    assert read_trace(write_trace([trajectory])) == [trajectory]


def test_no_history_is_an_empty_trace() -> None:
    assert recorded([], FUNCTIONS) == []


def action(number: int, begin_s: float, execution_s: float, **given: object) -> RunAction:
    values: dict[str, object] = {
        "id": f"{number}",
        "function": "tests",
        "task": "t",
        "lane": f"swe-{number % 3}",
        "state": "succeeded",
        "reason": "",
        "accepted_s": begin_s,
        "queue_s": 1.0,
        "overhead_s": 0.5,
        "execution_s": execution_s,
        "units": {"cpu": 2},
        **given,
    }
    return RunAction(**values)  # type: ignore[arg-type]  # by name


def run_of(*actions: RunAction) -> ReportedRun:
    return ReportedRun(title="Task t", server="http://g", actions=actions, capacity={"cpu": 4}, played=(), left_out=())


class Checked(HTMLParser):
    """Fails for what loads anything, and for tags that are closed and were not opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "base", "form")
        assert not {name for name, _ in attrs} & {"src", "href", "onload", "onclick"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(html: str) -> str:
    checked = Checked()
    checked.feed(html)
    return checked.text


def test_units_in_use_are_those_of_the_actions_over_time() -> None:
    run = run_of(action(0, 0.0, 8.5), action(1, 4.0, 4.5))
    assert run.span_s == 10.0
    used = run.in_use("cpu", 10)
    assert used == pytest.approx([0, 2, 2, 2, 2, 4, 4, 4, 4, 4])
    assert run.in_use("gpu", 4) == [0, 0, 0, 0]


def test_the_page_tells_the_run_and_loads_nothing() -> None:
    failed = action(2, 1.0, 1.0, state="timed_out", reason="timeout", function="shell")
    text = text_of(page(run_of(action(0, 0.0, 8.5), action(1, 4.0, 4.5), failed)))
    assert "3 actions over 10s" in text and "did not succeed1" in text
    assert "tests" in text and "shell" in text and "in the mean" in text


def test_hostile_names_stay_text() -> None:
    hostile = "<img src=x onerror=alert(1)>'\"&"
    html = page(run_of(action(0, 0.0, 1.0, function=hostile, lane=hostile, reason=hostile)))
    assert "<img" not in html
    text_of(html)
    problem = PlayedRun(name="x", row=None, problem=hostile)
    assert "<img" not in page(replace(run_of(action(0, 0.0, 1.0)), played=(problem,)))


def test_the_same_work_is_played_with_every_policy() -> None:
    records = [record(f"{at:011x}-{at:012x}", "tests", at, at + 2.0, 2.0, units={"cpu": 1}) for at in range(6)]
    workload, left_out = workload_of(records, FUNCTIONS)
    assert left_out == []
    played = play(workload, 1, 8, 0)
    assert [each.problem for each in played if each.row is None] == []
    rows = {each.name: each.row for each in played}
    ours, pods = rows["Tangram: adaptive"], rows[COMPARED["k8s/static-gpu"]]
    assert ours is not None and pods is not None
    assert 0 < ours.act_s < 12.0, "suites are elastic here: eight cores are faster than the one that was recorded"
    html = page(replace(run_of(*actions_of(records)), played=played))
    assert "static pods" in text_of(html) and "1.00 x" in html


def test_the_page_says_where_a_better_policy_saved_time() -> None:
    records = [record(f"{at:011x}-{at:012x}", "tests", at, at + 2.0, 2.0, units={"cpu": 1}) for at in range(6)]
    ours = next(each.row for each in play(workload_of(records, FUNCTIONS)[0], 1, 8, 0) if each.row is not None)
    slower = replace(ours, act_s=10.0, queue_s=4.0, execution_s=6.0)
    better = replace(ours, act_s=8.0, queue_s=1.0, execution_s=7.0)
    played = (PlayedRun(name="ours", row=slower), PlayedRun(name="one unit each", row=better))
    text = text_of(page(replace(run_of(*actions_of(records)), played=played)))
    assert "one unit each is better here by 20 %: a trajectory queues 3s less and executes 1s more" in text


def test_what_waits_for_quotas_is_played_without_them_and_said() -> None:
    functions = {**FUNCTIONS, "web": {"name": "web", "runtime": "api", "cost": {"search": 1}}}
    records = [record("00000000001-000000000001", "web", 0.0, 1.0, 1.0, units={"search": 1})]
    workload, left_out = workload_of(records, functions)
    assert left_out == ["search"]
    assert all(each.row is not None for each in play(workload, 1, 2, 0))


async def test_a_real_run_is_reported_by_task_trajectory_and_invocation(
    served: Served, gateway: RunningGateway, tmp_path: Path
) -> None:
    headers = {"X-Task": "swe", "X-Trajectory-Id": "t1"}
    for number in range(3):
        await gateway.invoke({"n": number}, headers=headers)
    await gateway.invoke({"reason": "handler_error"}, headers={"X-Task": "swe"})
    listed = (await gateway.http.get("/v1/invocations", params={"trajectory": "t1"})).json()["invocations"]
    out = tmp_path / "r.html"
    for words, count in ((("--task", "swe"), 4), (("t1",), 3), ((listed[0]["id"],), 3)):
        status, shown, err = await served("report", *words, "--out", str(out), "--json")
        assert status == 0, err
        assert json.loads(shown)["actions"] == count
        assert f"{count} actions" in text_of(out.read_text())
    assert (await served("report", "--task", "nobody", "--out", str(out)))[0] == 66
    assert (await served("report", "--out", str(out)))[0] == 2
