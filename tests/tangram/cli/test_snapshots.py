"""Snapshots and forks from the command line, against a real gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from manager.function import SandboxSpec
from tests.gateway.conftest import FUNCTIONS, GatewayBench, RunningGateway, serving
from tests.tangram.cli.conftest import Served


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    shell = replace(FUNCTIONS["shell"], sandbox=SandboxSpec(image="any", memory_bytes=2**28))
    async with serving(GatewayBench(tmp_path, functions={"shell": shell})) as running:
        yield running


async def test_a_trajectory_is_kept_forked_and_begun_with(served: Served, gateway: RunningGateway) -> None:
    assert (await served("invoke", "shell", '{"command": "echo kept > file"}', "--trajectory", "one"))[0] == 0
    status, out, _ = await served("trajectories", "snapshot", "one")
    snapshot = out.strip()
    assert (status, len(snapshot)) == (0, 12)
    assert (await served("trajectories", "fork", "one", "two", "three"))[:2] == (0, "two is open\nthree is open\n")
    assert (await served("trajectories", "open", "four", "--snapshot", snapshot))[0] == 0
    _, out, _ = await served("invoke", "shell", '{"command": "cat file"}', "--trajectory", "three")
    assert json.loads(out)["stdout"] == "kept\n"
    _, out, _ = await served("invoke", "shell", '{"command": "cat file"}', "--trajectory", "four")
    assert json.loads(out)["stdout"] == "kept\n"
    _, out, _ = await served("trajectories", "snapshots", "list", "--json")
    assert [(each["trajectory"], each["in_use"]) for each in json.loads(out)] == [("one", True)] * 2
    _, out, _ = await served("trajectories", "snapshots", "list")
    assert snapshot in out and "IN USE" in out
    status, _, err = await served("trajectories", "snapshots", "remove", snapshot)
    assert status == 73 and "in use by trajectory 'four'" in err
    await served("trajectories", "end", "four")
    assert (await served("trajectories", "snapshots", "remove", snapshot))[:2] == (0, f"{snapshot} removed\n")
    assert (await served("trajectories", "snapshots", "remove", snapshot))[0] == 66
    assert (await served("trajectories", "snapshot", "nobody"))[0] == 66
    assert (await served("trajectories", "fork", "one", "five", "--task", "math", "--step", "4"))[0] == 0
    (step,) = json.loads((await served("steps", "math", "--json"))[1])
    assert (step["step"], step["living"]) == (4, 1)
