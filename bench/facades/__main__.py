"""The doors in other protocols, driven by the real clients: verl's scorer with 64 at once, boto3 without patience,
and the door that speaks Docker's API beside the real engine.

Each client is installed from the package registry into an environment of its own (bench.facades.client_environments).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import httpx

from bench.facades.client_environments import client_environment
from bench.facades.docker_socket import docker_engine
from bench.inputs import programs
from bench.report import BenchReport, arguments
from gateway.app import gateway
from gateway.config.load import load

TOKEN = "bench"
AT_ONCE, TIMEOUT_S, CALLS = 64, 10, 4
PROGRAMS, QUICK_PROGRAMS = 480, 64
DONE = "\nprint('tangram-done')\n"
CONFIG = """
version: 1
server:
  token: bench
  state_dir: state
  port: 0
  grpc_port: 0
  drain_grace: 100ms
  facades: {sandboxfusion: {languages: {python: run_program}}, lambda: {}}
sandbox: {provider: process}
functions:
  run_program:
    {runtime: exec, sandbox: {memory: 512Mi}, timeout: 30s, output_limit: 16Mi, max_queued: 16, idempotent: true}
  slow: {runtime: exec, cost: {cpu: 1}, timeout: 30s}
"""


def asked_programs(count: int) -> list[dict[str, object]]:
    """Programs and whether they are right: the recorded ones if they are given, none that takes all its time."""
    kept = [each for each in programs() if each["verdict"] in ("pass", "fail")][:count]
    return [{"program": each["program"] + DONE, "right": each["verdict"] == "pass"} for each in kept]


async def verdicts(report: BenchReport, address: str, directory: Path, count: int) -> None:
    """verl's scorer, as it is on the registry."""
    asked = asked_programs(count)
    file = directory / "programs.json"
    file.write_text(json.dumps([each | {"stdin": "", "expected": "tangram-done\n"} for each in asked]))
    url = f"{address}/sandboxfusion/~{TOKEN}/run_code"
    client = client_environment("sandboxfusion")
    answer = await client.run("verl_scorer", url, str(file), str(AT_ONCE), str(TIMEOUT_S))
    pairs = list(zip(asked, answer["scores"], strict=True))
    report.figure("programs", len(asked))
    report.figure("programs_per_s", round(len(asked) / answer["seconds"], 2))
    wrong = sum(bool(each["right"]) != (score["score"] == 1.0) for each, score in pairs)
    silent = sum(score["score"] == 0.0 and score["error"] is not None for _, score in pairs)
    report.check("wrong_verdicts", wrong, limit=0, better="lower")
    report.check("silent_zero_rewards", silent, limit=0, better="lower")


async def tries(report: BenchReport, address: str) -> None:
    """boto3, which breaks off every call and sends it again."""
    codes = await client_environment("lambda").run("boto3_slow", f"{address}/lambda", TOKEN, str(CALLS))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=address, headers=headers) as client:
        page = (await client.get("/v1/invocations", params={"function": "slow"})).json()
    report.figure("lambda_calls", len(codes))
    report.check("lambda_runs_per_call", len(page["invocations"]) / len(codes), limit=1, better="lower")


async def measure(report: BenchReport, *, quick: bool) -> None:
    """Serve the doors, and let the clients in."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "tangram.yaml").write_text(CONFIG)
        async with gateway(load([directory], {})) as app:
            serving = asyncio.create_task(app.serve())
            address = f"http://127.0.0.1:{app.http_port}"
            try:
                await verdicts(report, address, directory, QUICK_PROGRAMS if quick else PROGRAMS)
                await tries(report, address)
            finally:
                app.stop()
                await serving
    await docker_engine(report)


def main() -> int:
    """Run the bench; the exit status says whether every check holds."""
    options = arguments("facades")
    report = BenchReport("facades")
    asyncio.run(measure(report, quick=options.quick))
    return report.print(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
