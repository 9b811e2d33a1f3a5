"""The demo: a small agentic rollout on real projects against a real gateway, through HTTP and gRPC (``make demo``)."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson

from scripts.demo_projects import PROJECTS, Project, checkout, fix
from tangram import AsyncClient, AsyncTrajectory, InvocationResult
from tangram.client.requests import Bearer
from tangram.types import find_token

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".demo"
CACHE = ROOT / ".cache"
READY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where everything listens on loopback."""

    http: int
    grpc: int
    search: int


def main() -> int:
    """Run the demo; the exit status says whether everything ended as it should."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it leaves no sandbox behind then, too
    ports = Ports(http=free_port(), grpc=free_port(), search=free_port())
    step("models: two tiny checkpoints (trained once, a few seconds)")
    checkpoints()
    with ExitStack() as stack:
        stack.enter_context(search_server(ports.search))
        stack.enter_context(gateway(ports))
        resources = (
            httpx.get(f"http://127.0.0.1:{ports.http}/v1/resources", auth=Bearer(None)).raise_for_status().json()
        )
        say(f"gateway on http://127.0.0.1:{ports.http} and grpc://127.0.0.1:{ports.grpc}")
        say(f"sandboxes: {resources['sandboxes']['engine']}: {resources['sandboxes']['isolation']}")
        failures = asyncio.run(rollout(ports))
    say("")
    if failures:
        say(f"{failures} step(s) did not end as they should; the gateway's log is {STATE / 'gateway.log'}")
        return 1
    say("Where to look next: README.md; functions/*/function.yaml; docs/ARCHITECTURE.md; the gateway's own log,")
    say(f"{(STATE / 'gateway.log').relative_to(ROOT)}; and `make serve` with `.venv/bin/tangram --help` beside it.")
    return 0


async def rollout(ports: Ports) -> int:
    """Two trajectories at once and the other runtimes beside them; returns the number of surprises."""
    async with AsyncClient(f"http://127.0.0.1:{ports.http}") as client:
        step("two trajectories: shell actions, reward before the fix, the fix, reward after it")
        surprises = sum(await asyncio.gather(*(trajectory(client, project) for project in PROJECTS)))
        step("one log, live: each line arrives while the action runs")
        surprises += await follow(client)
        step("a reward model and a teacher (real checkpoints, torch)")
        surprises += await models(client)
        step("a rate-limited web API: sixteen calls at once under a quota of twenty a second, ten at once")
        surprises += await searches(client)
        step("the same gateway through gRPC")
        surprises += await through_grpc(ports)
        step("what ran")
        print_table([record async for record in client.list(limit=200)])
        return surprises


async def trajectory(client: AsyncClient, project: Project) -> int:
    """One rollout of a coding agent: look, run the tests, mend, run them again."""
    async with client.trajectory(f"demo-{project.name}", function="shell") as sandbox:
        await sandbox.upload("project.tar.gz", checkout(project, CACHE / "demo"))
        await sandbox.exec("mkdir -p project && tar xzf project.tar.gz -C project")
        found = await sandbox.exec(project.look, cwd="project")
        say(f"  [{project.name}] $ {project.look}\n{indent(text(found, 'stdout'))}")
        before = await reward(sandbox, project)
        await sandbox.upload("fix.tar.gz", fix(project, CACHE / "demo"))
        await sandbox.exec("tar xzf fix.tar.gz -C project")
        after = await reward(sandbox, project)
        say(f"  [{project.name}] reward before the fix {before:.1f}, after it {after:.1f}")
        return int((before, after) != (0.0, 1.0))


async def reward(sandbox: AsyncTrajectory, project: Project) -> float:
    """The pytest reward of the trajectory's sandbox."""
    result = await sandbox.invoke(
        "pytest_reward",
        {"cwd": "project", "fail_to_pass": list(project.fail_to_pass), "suite": project.name},
    )
    value = result.raise_for_failure().result
    assert isinstance(value, dict)
    return float(value["reward"])


async def follow(client: AsyncClient) -> int:
    """Submit a slow command and print its lines as they come; the first must come before the action ends."""
    script = "for i in 1 2 3 4; do echo line $i; sleep 0.2; done"
    invocation = await client.submit("shell", {"command": script})
    early = False
    async for line in client.logs(invocation.id, follow=True):
        if line.stream == "stdout":
            state = (await client.get(invocation.id)).state
            early = early or state == "running"
            say(f"  {line.text.rstrip()}    (the action is {state})")
    return int(not early)


async def models(client: AsyncClient) -> int:
    """Real Python must score above the same letters shuffled; a teacher must say so too."""
    real = "def main(argv):\n    for name in argv:\n        print(name)\n    return 0\n"
    letters = list(real)
    random.Random(0).shuffle(letters)
    shuffled = "".join(letters)
    scored = (await client.invoke("reward_model", {"texts": [real, shuffled]})).raise_for_failure().result
    taught = (await client.invoke("teacher", {"texts": [real, shuffled]})).raise_for_failure().result
    assert isinstance(scored, dict)
    assert isinstance(taught, dict)
    good, bad = scored["scores"]
    say(f"  reward model: real source {good:.2f}, the same letters shuffled {bad:.2f}")
    means = [total / max(1, len(each)) for total, each in zip(taught["sums"], taught["logprobs"], strict=True)]
    say(f"  teacher: mean log-probability of a token {means[0]:.2f} against {means[1]:.2f}")
    return int(good <= bad) + int(means[0] <= means[1])


async def searches(client: AsyncClient) -> int:
    """More calls than the quota lets through at once: they wait their turn, and none fails."""
    queries = [f"rust borrow checker {n}" for n in range(16)]
    results = await asyncio.gather(*(client.invoke("web_search", {"query": query}) for query in queries))
    waits = sorted(result.queue_s for result in results)
    answered = sum(result.state == "succeeded" for result in results)
    say(f"  {answered} of {len(results)} answered; the last waited {waits[-1]:.2f} s for the quota")
    return sum(result.state != "succeeded" for result in results)


async def through_grpc(ports: Ports) -> int:
    """A handler and a shell command through gRPC."""
    from grpclib.client import Channel

    from gateway.grpc.generated.tangram_grpc import GatewayStub
    from gateway.grpc.generated.tangram_pb2 import InvokeRequest

    surprises = 0
    channel = Channel("127.0.0.1", ports.grpc)
    token = {"authorization": f"Bearer {find_token('127.0.0.1', ports.http)}"}
    try:
        stub = GatewayStub(channel)
        for function, value in (
            ("math_reward", {"answer": "so the answer is \\boxed{\\frac{1}{2}}", "reference": "0.5"}),
            ("shell", {"command": "echo hello from $(uname -s)"}),
        ):
            request = InvokeRequest(function=function, input_json=orjson.dumps(value))
            reply = await stub.Invoke(request, metadata=token)
            say(f"  {function}: {reply.result_json.decode()}")
            surprises += int(reply.state != "succeeded")
    finally:
        channel.close()
    return surprises


def print_table(records: list[InvocationResult]) -> None:
    """Invocations with the three times that make their ACT, and what they were granted."""
    times = f"{'queue':>8} {'overhead':>9} {'execution':>10}"
    say(f"  {'invocation':<24} {'function':<14} {'trajectory':<14} {'state':<10} {times}  units")
    for record in sorted(records, key=lambda each: each.id):
        units = ", ".join(f"{kind} {count}" for kind, count in sorted(record.units.items()))
        say(
            f"  {record.id:<24} {record.function:<14} {record.trajectory or '-':<14} {record.state:<10}"
            f" {record.queue_s * 1e3:>8.1f} {record.overhead_s * 1e3:>9.1f} {record.execution_s * 1e3:>10.1f}  {units}"
        )
    say("  (milliseconds)")


def checkpoints() -> None:
    """The tiny real checkpoints that examples/models names."""
    target = CACHE / "models"
    if not (target / "teacher").exists() or not (target / "reward").exists():
        subprocess.run(
            [sys.executable, "-m", "scripts.make_checkpoint", str(target)], check=True, cwd=ROOT, timeout=300
        )


@contextmanager
def search_server(port: int) -> Iterator[None]:
    """A local web API that enforces a rate limit of its own."""
    command = [sys.executable, "-m", "scripts.quota_server", "--port", str(port), "--limit", "20"]
    with running(command, STATE / "search.log", {}, f"http://127.0.0.1:{port}/"):
        yield


@contextmanager
def gateway(ports: Ports) -> Iterator[None]:
    """A gateway of its own, with fresh state, on free ports."""
    shutil.rmtree(STATE / "state", ignore_errors=True)
    environment = {
        "TANGRAM_PORT": str(ports.http),
        "TANGRAM_GRPC_PORT": str(ports.grpc),
        "TANGRAM_STATE": str(STATE / "state"),
        "TANGRAM_MODELS": str(CACHE / "models"),
        "SEARCH_URL": f"http://127.0.0.1:{ports.search}",
        # Without Docker, the suites are run by the pytest of this environment.
        "TANGRAM_SANDBOX_PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
    }
    command = [sys.executable, "-m", "gateway", "serve", "tangram.yaml", "functions", "examples/models"]
    with running(command, STATE / "gateway.log", environment, f"http://127.0.0.1:{ports.http}/readyz"):
        yield


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str], probe: str) -> Iterator[None]:
    """A child process that answers ``probe``, ended with the block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: what a terminal sends to this group reaches it once, from here.
        child = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            wait_ready(child, probe, log)
            yield
        finally:
            child.send_signal(signal.SIGINT)  # SIGTERM would keep sandboxes for a next gateway
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_ready(child: subprocess.Popen[bytes], probe: str, log: Path) -> None:
    """Poll until the server answers; a child that ended or took too long shows the end of its log."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and child.poll() is None:
        try:
            if httpx.get(probe, timeout=1.0).status_code < 500:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise SystemExit(f"{' '.join(child.args if isinstance(child.args, list) else [])} did not become ready:\n{tail}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def text(result: InvocationResult, name: str) -> str:
    value = result.raise_for_failure().result
    assert isinstance(value, dict)
    return str(value[name])


def indent(block: str) -> str:
    return "\n".join(f"      {line}" for line in block.rstrip().splitlines())


def step(title: str) -> None:
    say(f"\n== {title}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
