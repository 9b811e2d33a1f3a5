"""Recorded invocations become a trace that can be played."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.cli.simulate import recorded
from manager.simulation.simulate import Size, run
from manager.simulation.workloads import Workload, read_trace, write_trace
from tangram import InvocationResult

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


def record(id: str, function: str, start_s: float, end_s: float, execution_s: float, **more: Any) -> InvocationResult:
    values: dict[str, Any] = {
        **dict.fromkeys(("parent", "retry_after_s", "started_at", "node", "callback", "act_ms")),
        "id": id,
        "function": function,
        "task": "t",
        "trajectory": "r1",
        "revision": "",
        "mode": "sync",
        "state": "succeeded",
        "reason": None,
        "message": "",
        "component": "",
        "detail": {},
        "result": None,
        "queue_ms": 0.0,
        "overhead_ms": 0.0,
        "execution_ms": 1000 * execution_s,
        "units": {},
        "usage": {},
        "attempt": 1,
        "attempts": (),
        "dead": False,
        "accepted_at": datetime.fromtimestamp(start_s, UTC),
        "ended_at": datetime.fromtimestamp(end_s, UTC),
    }
    return InvocationResult(**{**values, **more})


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
    assert tests.think_s == pytest.approx(8.0) and tests.t_ori_s == pytest.approx(16.0) and tests.malleable
    assert read_trace(write_trace([trajectory])) == [trajectory]
    workload = Workload(name="replay", trajectories=(trajectory,))
    assert run(workload, ["adaptive"], Size(nodes=1, cores=8)).rows[0].act_s > 0


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
