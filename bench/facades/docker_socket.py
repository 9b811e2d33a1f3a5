"""The door that speaks Docker's API beside the real engine: a command over bare HTTP, and mini-swe-agent over each."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from bench.facades.client_environments import client_environment
from bench.facades.serving import SERVER, ServedDoors, served
from bench.report import BenchReport

IMAGE = "tangram-base:bookworm"
ENGINE = Path("/var/run/docker.sock")
COMMANDS, WARM, LIMIT_S = 40, 3, 60.0
#: What an agent does whose cores are looked at: commands so long, and so long a thought between two. Recorded ones of
#: agents on SWE-bench take 0.24 s (median) and their model 5.1 s, which is the same ratio.
THOUGHTS, THOUGHT_S, COMMAND_S = 8, 1.0, 0.05
HEAD = "Host: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 2\r\nContent-Type: application/json"
HAS_ENGINE = ENGINE.is_socket()
CONFIG = (
    SERVER
    + """\
  facades: {{docker: {{socket: {directory}/docker.sock, function: box}}}}
sandbox: {{provider: container, image: "tangram-base:bookworm"}}
functions:
  box: {{runtime: exec, cost: {{cpu: 1}}, timeout: 5m}}
"""
)


def asked(path: Path, method: str, target: str, body: object = None) -> dict[str, object]:
    """Return the answer to one request on a connection of its own."""
    conn = http.client.HTTPConnection("engine", timeout=LIMIT_S)
    conn.sock = socket.socket(socket.AF_UNIX)
    conn.sock.settimeout(LIMIT_S)
    conn.sock.connect(str(path))
    try:
        conn.request(method, target, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = conn.getresponse()
        said = answer.read()
        assert answer.status < 400, said
        return dict(json.loads(said)) if said else {}
    finally:
        conn.close()


def executed(path: Path, id: str) -> float:
    """Return the seconds of one command: described, started, heard to its end, looked at."""
    began = time.perf_counter()
    made = asked(path, "POST", f"/v1.41/containers/{id}/exec", {"Cmd": ["true"], "AttachStdout": True})
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(LIMIT_S)
        stream.connect(str(path))
        stream.sendall(f"POST /v1.41/exec/{made['Id']}/start HTTP/1.1\r\n{HEAD}\r\n\r\n{{}}".encode())
        while stream.recv(65536):
            pass
    told = asked(path, "GET", f"/v1.41/exec/{made['Id']}/json")
    assert told["ExitCode"] == 0, told
    return time.perf_counter() - began


def exec_p50_s(path: Path) -> float:
    """Return the median of many commands in a container of one engine."""
    made = asked(path, "POST", "/v1.41/containers/create", {"Image": IMAGE, "Cmd": ["sleep", "1h"]})
    id = str(made["Id"])
    try:
        asked(path, "POST", f"/v1.41/containers/{id}/start")
        return statistics.median([executed(path, id) for _ in range(WARM + COMMANDS)][WARM:])
    finally:
        asked(path, "DELETE", f"/v1.41/containers/{id}?force=1")


async def docker_engine(report: BenchReport, directory: Path) -> None:
    """Compare the door, over containers, with the real engine; without one on this machine the report says so."""
    if not HAS_ENGINE:
        report.note("the door that speaks Docker's API was not measured: this machine has no Docker engine")
        return
    path = directory / "docker.sock"
    async with served(directory, CONFIG) as doors:
        ours_s = await asyncio.to_thread(exec_p50_s, path)
        engine_s = await asyncio.to_thread(exec_p50_s, ENGINE)
        report.figure("docker_socket_exec_p50_ms", round(ours_s * 1000, 2))
        report.figure("engine_exec_p50_ms", round(engine_s * 1000, 2))
        report.check("engine_over_docker_socket_p50", round(engine_s / ours_s, 2), limit=8, better="higher")
        await agents(report, doors, path)


async def agents(report: BenchReport, doors: ServedDoors, path: Path) -> None:
    """Let mini-swe-agent work over both, as fast as it can and then with thoughts between its commands."""
    fast = {each: await agent(each, COMMANDS) for each in (path, ENGINE)}
    ours_s, engine_s = fast[path]["p50_s"], fast[ENGINE]["p50_s"]
    report.figure("mini_swe_socket_p50_ms", round(ours_s * 1000, 2))
    report.figure("mini_swe_engine_p50_ms", round(engine_s * 1000, 2))
    report.check("mini_swe_engine_over_socket_p50", round(engine_s / ours_s, 2), limit=2, better="higher")
    before = await held_core_s(doors)
    thinking = await agent(path, THOUGHTS, THOUGHT_S, COMMAND_S)
    held = (await held_core_s(doors) - before) / thinking["lived_s"]
    report.figure("mini_swe_socket_cores_held", round(held, 3))
    # An engine knows no turns: whoever places its containers gives each its cores for as long as it lives.
    report.figure("mini_swe_engine_cores_held", 1.0)


async def agent(path: Path, count: int, thought_s: float = 0.0, command_s: float = 0.0) -> dict[str, Any]:
    """Return what mini-swe-agent's script says over one engine."""
    arguments = (IMAGE, str(count), str(thought_s), str(command_s))
    told = await client_environment("mini_swe").run("mini_swe_docker", *arguments, DOCKER_HOST=f"unix://{path}")
    assert isinstance(told, dict)
    return told


async def held_core_s(doors: ServedDoors) -> float:
    """Return the core-seconds that leases of commands took up to now: from the turn of each to its end."""
    records = await doors.records("box")
    return float(sum((each["overhead_ms"] + each["execution_ms"]) * each["units"]["cpu"] for each in records)) / 1000
