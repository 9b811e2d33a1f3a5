"""Whoever reaches a bound is told the key that raises it, whatever the bound is."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.invocations.invocations import Admission
from gateway.tls import Connections
from manager.errors import CapacityExceeded, CodedError
from manager.function import SandboxSpec
from tests.gateway.conftest import FUNCTIONS, GatewayBench, RunningGateway, serving
from tests.gateway.grpc.peer import echo, head, peer

#: Forks until that is refused.
FORKS = """
import os, time
while os.fork():
    pass
time.sleep(1)
"""
SHELL = replace(FUNCTIONS["shell"], sandbox=SandboxSpec(image="any", memory_bytes=2**26, pids=32))


async def ended(gateway: RunningGateway, command: str, **headers: str) -> dict[str, object]:
    """The record of a command in the trajectory."""
    names = {"X-Trajectory-Id": "t", **{f"X-{name}": value for name, value in headers.items()}}
    body: dict[str, object] = (await gateway.invoke({"command": command}, function="shell", headers=names)).json()
    record = body.get("invocation", body)
    assert isinstance(record, dict)
    return record


async def log_of(gateway: RunningGateway, record: Mapping[str, object]) -> str:
    return (await gateway.http.get(f"/v1/invocations/{record['id']}/logs")).text


@pytest.mark.slow
async def test_what_a_command_reaches_is_told(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, functions={"shell": SHELL})) as gateway:
        bounded = gateway.app.runtimes.provider.info.limits
        late = await ended(gateway, "sleep 60", Timeout="200ms")
        assert late["reason"] == "timeout" and "longer than timeout, 0.2 s" in str(late["message"])
        if bounded["memory"]:
            large = await ended(gateway, "python3 -c 'x = bytearray(10**9)'")
            assert large["reason"] == "out_of_memory" and "sandbox.memory" in str(large["message"])
        if bounded["pids"]:
            many = await ended(gateway, f"python3 -c '{FORKS}'")
            assert "refused once: the sandbox had 32, and sandbox.pids" in await log_of(gateway, many)


async def test_what_a_request_reaches_is_told(tmp_path: Path) -> None:
    small = {"body_limit": 1000, "file_limit": 2000, "batch_max": 1, "body_timeout": "200ms"}
    async with serving(GatewayBench(tmp_path, server=small)) as gateway:
        http = gateway.http
        await http.put("/v1/trajectories/t", json={"function": "shell"})
        place = "/v1/trajectories/t/files?path=f"
        calls = [{"function": "echo"}] * 2
        for answer, key in (
            (await gateway.invoke({"x": "y" * 2000}), "server.body_limit"),
            (await http.put(place, content=b"x" * 3000), "server.file_limit"),
            (await http.post("/v1/invocations:batch", json={"calls": calls}), "server.batch_max"),
        ):
            assert answer.status_code == 413 and key in answer.json()["detail"]
        await gateway.invoke(
            {"command": "head -c 3000 /dev/zero > f"}, function="shell", headers={"X-Trajectory-Id": "t"}
        )
        large = await http.get(place)
        assert large.status_code == 413 and "server.file_limit" in large.json()["detail"]
        packed = await http.get("/v1/trajectories/t/archive?path=.")
        assert packed.status_code == 413 and "server.file_limit" in packed.json()["detail"]
        async with peer(gateway) as other:
            answer_of = await other.ask(head(), struct.pack(">BI", 0, 10**6))
            assert "server.body_limit" in answer_of.headers["grpc-message"]
            slow = await other.answer(other.send(head(), echo()[:7], end=False))
            assert "server.body_timeout" in slow.headers["grpc-message"]


def test_what_waits_is_told_which_bound_it_is() -> None:
    admission = Admission(lambda: 0.0, total_max=3, task_max=lambda task: 2)
    narrow = replace(FUNCTIONS["echo"], max_queued=1)

    def refused(function: str, task: str) -> str:
        with pytest.raises(CodedError) as caught:
            admission.check(replace(narrow, name=function), task)
        return caught.value.message

    admission.enter("echo", "a")
    assert "functions.echo.max_queued" in refused("echo", "b")
    admission.enter("other", "a")
    assert "tasks.a.max_queued" in refused("third", "a")
    admission.enter("fourth", "b")
    assert "scheduler.max_queued" in refused("fifth", "c")


def test_a_full_door_names_its_bound() -> None:
    full = Connections(limit=0).enter("http")
    assert isinstance(full, CapacityExceeded) and "server.connections_max" in full.message
