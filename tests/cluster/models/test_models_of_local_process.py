"""`cluster.local: process` with models: this machine's devices are its daemon's, and what is on them is told by it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.models.conftest import DEVICE, StartModels, alive, freeze, model, model_processes
from tests.cluster.test_local_process import HERE, daemon
from tests.cluster.world import until
from tests.runtimes.model import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


def test_models_are_served_by_this_machines_daemon_and_by_the_next_one_once_it_is_killed(
    start_models: StartModels, teacher: Path
) -> None:
    functions = {"judge": model(teacher), "write": model(teacher, "generate", idempotent=True)}
    devices = {"kind": "cpu", "count": 1, "memory": DEVICE}
    gateway = start_models(functions, devices=devices, local="process")
    for function in functions:
        gateway.until_able(HERE, function)
    answered = gateway.answer("judge")
    expected = checkpoints.plain_logprobs(teacher, [7, 3, 99])
    assert answered["result"]["logprobs"][0] == pytest.approx(expected, abs=1e-4)
    assert (answered["node"], gateway.has(HERE).devices) == (HERE, 1)
    assert gateway.has(HERE).local and gateway.has(HERE).resident
    first = daemon(gateway)
    gateway.answer("write", max_new_tokens=4)
    processes = model_processes(first)
    assert processes, "the devices are the daemon's"
    freeze(processes)
    asked = gateway.ask("write", max_new_tokens=4, seed=1)
    until(lambda: gateway.record(asked)["state"] == "running", "it has begun")
    os.kill(first, signal.SIGKILL)
    found = gateway.ended(asked)
    assert (found["state"], found["node"]) == ("succeeded", HERE), found
    until(lambda: not alive(processes), "nothing of the daemon before is left")
    second = daemon(gateway)
    assert second not in (0, first)
    gateway.until_able(HERE, "judge")
    until(lambda: bool(gateway.has(HERE).resident), "the daemon tells what is resident")
    assert gateway.answer("judge")["node"] == HERE
    gateway.stop()
    until(lambda: not daemon(gateway), "the daemon ends with its gateway")
