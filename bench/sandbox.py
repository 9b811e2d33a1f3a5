"""What a sandbox costs an action: the resident runner against ``docker exec`` and a bare spawn.

Peers and floors run interleaved in the same run, on real containers; ratios are of medians.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.docker_exec import DockerExec
from bench.private_docker import PrivateDocker, private_docker
from bench.report import BenchReport, median, parser, percentile, play
from bench.serving import GATEWAY, IMAGE, TOKEN, process, process_cpu_s
from manager.action import Action, Settlement, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec
from manager.engine import Engine, Submission
from manager.executor import Call
from manager.function import FunctionSpec, SandboxSpec
from runtimes.executor import LocalExecutor
from runtimes.node.topology import discover
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import ExecRuntime
from runtimes.sandbox.provider import ProviderSettings, make_provider
from tangram import AsyncClient

NOOP = Command(argv=("true",))
#: Where processor time is accounted, actions before those that are counted, and seconds until containers have settled.
ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
FIRST, SETTLED_S, SETTLE_S = 8, 1.5, 60.0
#: Suites as of `examples/trl_grpo`, each in a sandbox of its own.
FRESH = """
version: 1
server: {{state_dir: {directory}/state, port: 0, grpc_port: 0, token: bench-bench-bench}}
sandbox: {{provider: container, image: "{image}", memory: 256Mi}}
functions:
  passes:
    runtime: pytest
    sandbox:
      warm: {{min: 2, max: 4}}
      env: {{PYTEST_DISABLE_PLUGIN_AUTOLOAD: "1"}}
    pytest: {{args: ["-p", "no:cacheprovider"]}}
    timeout: 60s
    idempotent: true
    max_queued: 4096
"""
SUITE = """from program import f

CASES = [(2, 3, 5), (7, 4, 11), (-5, 1, -4), (0, 6, 6)]


def test_it():
    assert [f(a, b) for a, b, _ in CASES] == [wanted for _, _, wanted in CASES]
"""


class DiscardedOutput:
    """A log sink for those who measure."""

    def write(self, stream: str, data: str) -> None:
        """Drop it."""

    def omit(self, size_bytes: int) -> None:
        """Do not count it either."""


@dataclass(slots=True)
class SandboxRig:
    """The parts of a gateway that an exec action passes through."""

    environments: Environments
    engine: Engine
    function: FunctionSpec
    count: int = 0

    async def act(self, trajectory: str, input: dict[str, object]) -> Settlement:
        """One action through the whole of it: queue, cores, thaw, run, freeze."""
        self.count += 1
        action = Action(
            id=f"bench-{self.count}",
            function=self.function.name,
            trajectory=trajectory,
            cost=self.function.cost,
            timeout_s=60.0,
            submitted_s=time.monotonic(),
        )
        call = Call(function=self.function, input=input, log=DiscardedOutput())
        return await self.engine.submit([Submission(action=action, call=call)])[0]


@asynccontextmanager
async def rig() -> AsyncIterator[SandboxRig]:
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as directory:
        provider = make_provider(ProviderSettings(kind="container", state_dir=Path(directory)))
        environments = Environments(provider)
        spec = SandboxSpec(image=IMAGE, memory_bytes=2 * 2**30, pids=128)
        function = FunctionSpec(name="bench", runtime="exec", cost={"cpu": UnitSet.fixed(1)}, sandbox=spec)
        node = replace(discover().node("local"), memory_bytes=2**50)
        executor = LocalExecutor({"exec": ExecRuntime(environments)})
        engine = Engine(build_core(ManagerSpec(nodes=(node,))), executor)
        await engine.start()
        try:
            yield SandboxRig(environments, engine, function)
        finally:
            await engine.close()
            await environments.close()
            await provider.reap(())
            await provider.close()


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds that it takes."""
    started = time.perf_counter()
    await work()
    return (time.perf_counter() - started) * 1e3


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50_ms": round(median(values), 4), "p95_ms": round(percentile(values, 0.95), 4), "n": len(values)}


async def one_command(report: BenchReport, rounds: int) -> None:
    """The same no-op by every way there is, in turn."""
    async with rig() as made:
        ways = await every_way(made, rounds)
    report.figure("one_command", {name: dict(spread(values)) for name, values in ways.items()})
    p50 = {name: median(values) for name, values in ways.items()}
    report.check("docker_exec_over_runner_p50", p50["docker_exec"] / p50["runner"], limit=40, better="higher")
    report.check("docker_exec_over_action_p50", p50["docker_exec"] / p50["action"], limit=20, better="higher")
    report.check("runner_over_spawn_p50", p50["runner"] / p50["spawn"], limit=1.5, better="lower")


async def every_way(rig: SandboxRig, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a no-op by each way."""
    sandbox = await rig.environments.ensure("one", rig.function.sandbox)
    docker = DockerExec()
    ways: dict[str, list[float]] = {name: [] for name in ("docker_exec", "spawn", "runner", "runner_sh", "action")}

    async def spawn() -> None:
        """As bare as it can be had: a vfork, and nothing else runs on this loop meanwhile."""
        subprocess.run(["true"], capture_output=True, check=True)  # noqa: ASYNC221

    async def action() -> None:
        settlement = await rig.act("one", {"argv": ["true"]})
        assert settlement.outcome.state is State.SUCCEEDED, settlement.outcome.message

    every = sorted(os.sched_getaffinity(0))
    for round_ in range(rounds):
        await sandbox.thaw()
        await sandbox.set_cores(every)  # an action leaves it on the cores that it was granted
        if round_ % 5 == 0:
            started = time.perf_counter()
            docker.run(f"tangram-{sandbox.id}", ["true"])
            ways["docker_exec"].append((time.perf_counter() - started) * 1e3)
        ways["spawn"].append(await timed(spawn))
        ways["runner"].append(await timed(lambda: sandbox.run(NOOP)))
        ways["runner_sh"].append(await timed(lambda: sandbox.run(Command(shell="echo hi"))))
        ways["action"].append(await timed(action))
    docker.close()
    return ways


# An action in a sandbox that nobody has used


class ProcessorAccounts:
    """Processor seconds by who spends them: an engine of its own, its containers, and a gateway in control groups."""

    def __init__(self, docker: PrivateDocker) -> None:
        self._containers = ACCOUNTS / docker.name
        self._engine, self.gateway = (ACCOUNTS / f"{docker.name}-{name}" for name in ("engine", "gateway"))
        for group in (self._engine, self.gateway):
            group.mkdir(exist_ok=True)
        file = docker.directory / "run/containerd/containerd.pid"
        self._daemons = {"dockerd": docker.pid, "containerd": int(file.read_text(encoding="ascii"))}
        for pid in self._daemons.values():
            (self._engine / "cgroup.procs").write_text(str(pid))

    def spent_s(self) -> dict[str, float]:
        """Seconds since the start, by part."""
        daemons = {name: process_cpu_s(pid) for name, pid in self._daemons.items()}
        return {
            "gateway": _group_s(self.gateway),
            **daemons,
            "shims and runc": _group_s(self._engine) - sum(daemons.values()),
            "in the containers": _group_s(self._containers) if self._containers.exists() else 0.0,
        }

    def remove(self) -> None:
        for group in (self._engine, self.gateway):
            if group.exists():
                group.rmdir()


def _group_s(group: Path) -> float:
    return int((group / "cpuacct.usage").read_text(encoding="ascii")) / 1e9


@contextmanager
def counted_docker() -> Iterator[tuple[PrivateDocker, ProcessorAccounts]]:
    """An engine whose processor time is counted, whatever else runs on the machine; the kernel's threads are not."""
    with ExitStack() as stack:
        docker = stack.enter_context(private_docker(IMAGE))
        accounts = ProcessorAccounts(docker)
        yield docker, accounts
    accounts.remove()


async def settle(docker: PrivateDocker) -> int:
    """Wait until no container has come or gone for a while; return how many there are."""
    deadline_s, since_s, before = time.monotonic() + SETTLE_S, time.monotonic(), docker.containers()
    while time.monotonic() < deadline_s and time.monotonic() - since_s < SETTLED_S:
        await asyncio.sleep(0.25)
        now = docker.containers()
        if now != before:
            since_s, before = time.monotonic(), now
    return len(before)


async def grade(client: AsyncClient, key: str, count: int) -> float:
    """Grade so many different programs at once, each in a container of its own; return the seconds that they took."""
    programs = [f"# {key}, {number}\ndef f(a, b):\n    return a + b\n" for number in range(count)]
    suites = [{"tests": {"program.py": program, "test_program.py": SUITE}} for program in programs]
    begun_s = time.monotonic()
    ends = await client.map("passes", suites, key=key, concurrency=count)
    wrong = [end.result for end in ends if not (isinstance(end.result, dict) and end.result.get("reward") == 1.0)]
    if wrong:
        raise RuntimeError(f"not passed: {wrong[0]}")
    return time.monotonic() - begun_s


async def fresh(report: BenchReport, count: int) -> None:
    """Processor time of a pytest action in a container that nobody has used, by who spends it."""
    if "cpuacct" not in os.listdir(ACCOUNTS.parent):  # noqa: PTH208
        report.note(f"left out: processor time is read from control groups of version 1, and there is no {ACCOUNTS}")
        return
    with tempfile.TemporaryDirectory(prefix="tangram-fresh-") as directory, counted_docker() as (docker, accounts):
        config = workplace(Path(directory))
        code = f"open('{accounts.gateway}/cgroup.procs', 'w').write('0')\n{GATEWAY}"  # 0 is itself
        async with (
            process(code, config, ending=signal.SIGINT, **docker.environment) as gateway,
            AsyncClient(f"http://127.0.0.1:{gateway.port}", token=TOKEN) as client,
        ):
            await grade(client, "first", FIRST)
            before, earlier_s = await settle(docker), accounts.spent_s()
            wall_s = await grade(client, "counted", count)
            after, later_s = await settle(docker), accounts.spent_s()
    if before != after:
        raise RuntimeError(f"{before} containers before the actions, {after} after them")
    spent_ms = {name: 1e3 * (later_s[name] - earlier_s[name]) / count for name in later_s}
    report.figure("fresh_action_ms", {name: round(value, 1) for name, value in spent_ms.items()})
    report.figure("fresh_action_wall_ms", round(1e3 * wall_s / count, 1))
    report.check("fresh_action_cpu_ms", sum(spent_ms.values()), limit=750, better="lower")


def workplace(directory: Path) -> str:
    """Write the configuration of the gateway that grades, and return where."""
    directory.chmod(0o755)
    (directory / "tangram.yaml").write_text(FRESH.format(directory=directory, image=IMAGE))
    return str(directory / "tangram.yaml")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("sandbox", parts=True).parse_args(argv)
    report, quick = BenchReport("sandbox"), options.quick

    parts = {
        "one_command": lambda: one_command(report, 100 if quick else 300),
        "fresh": lambda: fresh(report, 20 if quick else 60),
    }
    return play(report, options, parts)


if __name__ == "__main__":
    sys.exit(main())
