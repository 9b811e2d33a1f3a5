"""The door that speaks Docker's API beside the real engine: a command over bare HTTP, and mini-swe-agent over each."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import statistics
import tempfile
import time
from pathlib import Path

from bench.facades.client_environments import client_environment
from bench.report import BenchReport
from gateway.app import gateway
from gateway.config.load import load

IMAGE = "tangram-base:bookworm"
ENGINE = Path("/var/run/docker.sock")
COMMANDS, WARM, LIMIT_S = 40, 3, 60.0
HEAD = "Host: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 2\r\nContent-Type: application/json"
HAS_ENGINE = ENGINE.is_socket()
CONFIG = """
version: 1
server:
  auth: none
  state_dir: state
  port: 0
  grpc_port: 0
  drain_grace: 100ms
  facades: {docker: {socket: SOCKET, function: box}}
sandbox: {provider: container, image: "tangram-base:bookworm"}
functions:
  box: {runtime: exec, cost: {cpu: 1}, timeout: 5m}
"""


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


async def docker_engine(report: BenchReport) -> None:
    """Compare the door, over containers, with the real engine, if this machine has one."""
    if not HAS_ENGINE:
        report.note("the door that speaks Docker's API was not measured: this machine has no Docker engine")
        return
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "docker.sock"
        (Path(name) / "tangram.yaml").write_text(CONFIG.replace("SOCKET", str(path)))
        async with gateway(load([Path(name)], {})) as app:
            serving = asyncio.create_task(app.serve())
            try:
                await compared(report, path)
            finally:
                app.stop()
                await serving


async def compared(report: BenchReport, path: Path) -> None:
    """Measure both, one after the other."""
    ours_s = await asyncio.to_thread(exec_p50_s, path)
    engine_s = await asyncio.to_thread(exec_p50_s, ENGINE)
    report.figure("docker_socket_exec_p50_ms", round(ours_s * 1000, 2))
    report.figure("engine_exec_p50_ms", round(engine_s * 1000, 2))
    report.check("engine_over_docker_socket_p50", round(engine_s / ours_s, 2), limit=8, better="higher")
    client = client_environment("mini_swe")
    ours = await client.run("mini_swe_docker", IMAGE, str(COMMANDS), DOCKER_HOST=f"unix://{path}")
    engine = await client.run("mini_swe_docker", IMAGE, str(COMMANDS), DOCKER_HOST=f"unix://{ENGINE}")
    report.figure("mini_swe_socket_p50_ms", round(ours["p50_s"] * 1000, 2))
    report.figure("mini_swe_engine_p50_ms", round(engine["p50_s"] * 1000, 2))
    report.check("mini_swe_engine_over_socket_p50", round(engine["p50_s"] / ours["p50_s"], 2), limit=2, better="higher")
