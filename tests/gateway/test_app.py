"""The gateway as a whole: faults of the scheduler and of a policy, bounds and the keys that raise them, and memory."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.app import gateway
from gateway.limits import MachineLimits
from manager.errors import CodedError
from manager.function import SandboxSpec
from manager.scheduler.policy import Decision, PoolView
from runtimes.testing import ScriptedRuntime
from tests.gateway.conftest import (
    DEADLINE_S,
    FUNCTIONS,
    GatewayBench,
    RunningGateway,
    scripted_runtimes,
    serving,
    step_of,
    until,
)
from tests.gateway.grpc.peer import echo, head, peer
from tests.gateway.http.test_odd_requests import ask

BALLAST = "ballast " * 1000
#: Forks until that is refused.
FORKS = """
import os, time
while os.fork():
    pass
time.sleep(1)
"""
RAISED = """
import resource
from gateway.limits import raise_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
assert raise_descriptors() == 128
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128)
"""


@pytest.mark.promise("After a fault in a decision callers are answered, the process fails, and the next one goes on.")
async def test_after_a_bug_callers_are_answered_the_process_fails_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = GatewayBench(tmp_path)

    runtimes = scripted_runtimes(ScriptedRuntime(step_of), bench.directory)
    async with asyncio.timeout(DEADLINE_S), gateway(bench.config(), make=runtimes) as app:
        serving_task = asyncio.create_task(app.serve())
        await until(lambda: all(app.registry.preparation.of(each).status == "ready" for each in app.config.functions))
        schedule = app.engine._core.schedule

        def bug(now_s: float) -> object:
            assert not app.invocations.living, "a bug"  # what was prepared may still be told to the scheduler
            return schedule(now_s)

        monkeypatch.setattr(app.engine._core, "schedule", bug)
        head = "POST /v1/functions/echo/invocations{} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        accepted = await ask_port(app.http_port, head.format("?mode=async"))
        with pytest.raises(CodedError, match="the scheduler failed: AssertionError"):
            await serving_task
    assert b" 202 " in accepted.partition(b"\r\n")[0]
    async with serving(GatewayBench(tmp_path)) as second:
        (record,) = (await second.http.get("/v1/invocations")).json()["invocations"]
        ended = (await second.http.get(f"/v1/invocations/{record['id']}?wait=5s")).json()
        assert ended["state"] == "succeeded"


async def test_a_program_has_its_own_signal_handlers_back_when_a_gateway_in_it_ends(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    async with serving(GatewayBench(tmp_path)):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


async def ask_port(port: int, head: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + "Content-Length: 2\r\nConnection: close\r\n\r\n").encode() + b"{}")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


class BrokenEverywhere:
    """A policy that raises."""

    name = "broken"

    def decide(self, view: PoolView) -> Decision:
        raise ZeroDivisionError("a bug")


async def test_a_policy_that_fails_is_a_warning_of_readiness_and_no_failure(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        state = gateway.app.engine._core.state
        state.policies = {**state.policies, "cpu": BrokenEverywhere(), "default": BrokenEverywhere()}
        ended = await gateway.http.post("/v1/functions/echo/invocations", json={"n": 1})
        assert ended.json()["state"] == "succeeded"
        ready = await gateway.http.get("/readyz")
    assert ready.status_code == 200
    (warning,) = ready.json()["warnings"]
    assert "policy broken failed" in warning and "a bug" in warning


async def test_a_record_that_another_process_keeps_locked_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.maintenance.LOCK_S", 0.1)
    async with serving(GatewayBench(tmp_path)) as gateway:
        state_dir = gateway.app._state_dir
        with closing(sqlite3.connect(state_dir.database, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await asyncio.to_thread(state_dir.see_lock)
            ready = await gateway.http.get("/readyz")
            assert ready.status_code == 503 and "another process" in ready.json()["status"], ready.text
            other.execute("ROLLBACK")
        await asyncio.to_thread(state_dir.see_lock)
        assert (await gateway.http.get("/readyz")).status_code == 200


async def post(
    gateway: RunningGateway, path: str, body: object, header: str = "X-Unheard-Of: 1", verb: str = "POST"
) -> int:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await ask(gateway, f"{verb} /v1/{path} HTTP/1.1\r\n{header}\r\n".encode(), sent)
    return answer.status


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
    small, bounds = {"body_limit": 1000, "file_limit": 2000}, {"batch_max": 1, "body_timeout_s": 0.2}
    async with serving(GatewayBench(tmp_path, server=small, bounds=bounds)) as gateway:
        http = gateway.http
        await http.put("/v1/trajectories/t", json={"function": "shell"})
        place = "/v1/trajectories/t/files?path=f"
        calls = [{"function": "echo"}] * 2
        for answer, key in (
            (await gateway.invoke({"x": "y" * 2000}), "server.body_limit"),
            (await http.put(place, content=b"x" * 3000), "server.file_limit"),
            (await http.post("/v1/invocations:batch", json={"calls": calls}), "a batch may have, 1"),
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
            assert "longer than 0.2 s" in slow.headers["grpc-message"]


def test_descriptors_are_raised_to_what_the_machine_allows() -> None:
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_disk_below_its_bound_or_gone_is_named(tmp_path: Path) -> None:
    limits = MachineLimits(tmp_path, free_min_bytes=1, connections_max=1)
    assert limits.shortage() is None
    short = MachineLimits(tmp_path, free_min_bytes=2**60, connections_max=1).shortage()
    assert short is not None
    assert "server.free_min" in short and "make room" in short and "server.state_dir" in short
    tmp_path.rmdir()
    gone = limits.shortage()
    assert gone is not None
    assert str(tmp_path) in gone
