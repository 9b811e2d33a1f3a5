"""A model worker killed and stopped under its action: it is replaced, the action tried again, others do not notice."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tangram import Client
from tests.e2e.gateway import GatewayProcess, document
from tests.faults.world import at_rest, balanced, prepared, record, series, until

pytest.importorskip("torch")
from tests.runtimes.model import checkpoints  # it imports torch

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model-worker")]
STUCK_S = 2.5
#: Some seconds of work for one device, in many small batches.
ROWS = 250
LONG = {"token_ids": [[3] * 120] * ROWS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("checkpoint"), "llama", "lm")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("models")
    model = {"path": str(checkpoint), "action": "logprobs", "batch_tokens": 128}
    teacher = {"runtime": "model", "model": model, "cost": {"gpu": 1}, "timeout": "60s"}
    described = document("process", directory / "state", teacher=teacher)
    described["server"]["body_limit"] = "1Mi"
    described["node"] = {"devices": {"kind": "cpu", "count": 2, "memory": "64Mi"}}
    described["models"] = {"host_memory": "64Mi", "stuck": f"{STUCK_S}s"}
    made = GatewayProcess(directory, described)
    made.start()
    until(lambda: prepared(made), "the workers have started")
    yield made
    assert made.stop() == 0


def devices(client: Client) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(each) for each in client.resources().models.devices]


def busy_s(pid: int) -> float:
    """Seconds of processor time that it has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.promise("A killed model worker costs its action one more try, and others nothing.")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_worker_costs_its_action_one_more_try_and_others_nothing(
    gateway: GatewayProcess, checkpoint: Path, number: signal.Signals
) -> None:
    with Client(gateway.url) as client:
        before = devices(client)
        used_s = [busy_s(device["pid"]) for device in before]
        running = [client.submit("teacher", LONG).id for _ in before]
        until(
            lambda: all(busy_s(each["pid"]) > used + 0.1 for each, used in zip(before, used_s, strict=True)),
            "both devices compute",
        )
        os.kill(before[1]["pid"], number)
        ends = [record(gateway, each, 60.0) for each in running]
        assert [(end["state"], end["reason"], end["attempt"]) for end in ends] == [("succeeded", None, 1)] * 2, ends
        expected = math.fsum(checkpoints.plain_logprobs(checkpoint, [3] * 120))
        for end in ends:
            assert len(end["result"]["sums"]) == ROWS
            assert end["result"]["sums"][-1] == pytest.approx(expected, abs=1e-2)
        after = devices(client)
        assert [(each["pid"], each["alive"], each["restarts"]) for each in (before[0], after[0])] == [
            (before[0]["pid"], True, 0)
        ] * 2
        assert after[1]["restarts"] == before[1]["restarts"] + 1
        assert after[1]["pid"] != before[1]["pid"]
    assert balanced(series(gateway))
    until(lambda: at_rest(gateway), "the gateway is at rest")
    until(lambda: not Path(f"/proc/{before[1]['pid']}").exists(), "the worker that was hit is gone")
