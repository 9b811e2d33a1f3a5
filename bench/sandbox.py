"""What a sandbox costs an action: the resident runner against ``docker exec`` and a bare spawn.

Peers and floors run interleaved in the same run, on real containers; ratios are of medians.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import inputs
from bench.docker_exec import DockerExec
from bench.private_docker import PrivateDocker, private_docker
from bench.report import BenchReport, median, parser, percentile, play
from bench.serving import GATEWAY, IMAGE, TOKEN, process, process_cpu_s
from manager.action import Action, Settlement, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec
from manager.engine import Engine, Submission
from manager.executor import Call
from manager.function import Background, FunctionSpec, SandboxSpec
from runtimes.executor import LocalExecutor
from runtimes.node.topology import discover
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import ExecRuntime
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Provider, Sandbox
from tangram import AsyncClient

NOOP = Command(argv=("true",))
PARALLEL = 32
#: How often runner and daemon take turns at it.
TURNS = 3
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

    provider: Provider
    environments: Environments
    engine: Engine
    function: FunctionSpec
    count: int = 0

    async def act(self, trajectory: str | None, input: dict[str, object], timeout_s: float = 60.0) -> Settlement:
        """One action through the whole of it: queue, cores, thaw, run, freeze."""
        self.count += 1
        action = Action(
            id=f"bench-{self.count}",
            function=self.function.name,
            trajectory=trajectory,
            cost=self.function.cost,
            timeout_s=timeout_s,
            submitted_s=time.monotonic(),
        )
        call = Call(function=self.function, input=input, log=DiscardedOutput())
        return await self.engine.submit([Submission(action=action, call=call)])[0]

    async def sandbox(self, trajectory: str) -> Sandbox:
        return await self.environments.ensure(trajectory, self.function.sandbox)


@asynccontextmanager
async def rig() -> AsyncIterator[SandboxRig]:
    state_dir = Path(tempfile.mkdtemp(prefix="tangram-bench-"))
    provider = make_provider(ProviderSettings(kind="container", state_dir=state_dir))
    environments = Environments(provider)
    spec = SandboxSpec(image=IMAGE, memory_bytes=2 * 2**30, pids=128)
    function = FunctionSpec(name="bench", runtime="exec", cost={"cpu": UnitSet.fixed(1)}, sandbox=spec)
    runtime = ExecRuntime(environments)
    node = replace(discover().node("local"), memory_bytes=2**50)
    engine = Engine(build_core(ManagerSpec(nodes=(node,))), LocalExecutor({"exec": runtime}))
    await engine.start()
    try:
        yield SandboxRig(provider, environments, engine, function)
    finally:
        await engine.close()
        await environments.close()
        await provider.reap(())
        await provider.close()
        shutil.rmtree(state_dir, ignore_errors=True)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds that it takes."""
    started = time.perf_counter()
    await work()
    return (time.perf_counter() - started) * 1e3


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50_ms": round(median(values), 4), "p95_ms": round(percentile(values, 0.95), 4), "n": len(values)}


async def one_command(rig: SandboxRig, report: BenchReport, rounds: int) -> None:
    """The same no-op by every way there is, in turn."""
    sandbox = await rig.sandbox("one")
    container = container_of(sandbox)
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
            docker.run(container, ["true"])
            ways["docker_exec"].append((time.perf_counter() - started) * 1e3)
        ways["spawn"].append(await timed(spawn))
        ways["runner"].append(await timed(lambda: sandbox.run(NOOP)))
        ways["runner_sh"].append(await timed(lambda: sandbox.run(Command(shell="echo hi"))))
        ways["action"].append(await timed(action))
    docker.close()
    report.figure("one_command", {name: dict(spread(values)) for name, values in ways.items()})
    p50 = {name: median(values) for name, values in ways.items()}
    report.check("docker_exec_over_runner_p50", p50["docker_exec"] / p50["runner"], limit=40, better="higher")
    report.check("docker_exec_over_action_p50", p50["docker_exec"] / p50["action"], limit=20, better="higher")
    report.check("runner_over_spawn_p50", p50["runner"] / p50["spawn"], limit=1.5, better="lower")


async def at_once(rig: SandboxRig, report: BenchReport, rounds: int) -> None:
    """32 trajectories at once: the runners', the whole actions' and the daemon's throughput."""
    names = [f"wide-{index}" for index in range(PARALLEL)]
    sandboxes = list(await asyncio.gather(*(rig.sandbox(name) for name in names)))
    await asyncio.gather(*(sandbox.thaw() for sandbox in sandboxes))
    containers = [container_of(sandbox) for sandbox in sandboxes]
    seconds = {"runner": 0.0, "docker_exec": 0.0}
    for _ in range(TURNS):
        started = time.perf_counter()
        await asyncio.gather(*(repeat(lambda box=box: box.run(NOOP), rounds) for box in sandboxes))  # type: ignore[misc]
        seconds["runner"] += time.perf_counter() - started
        seconds["docker_exec"] += await asyncio.to_thread(daemon_seconds, containers)
    runner_per_s = TURNS * PARALLEL * rounds / seconds["runner"]
    docker_per_s = TURNS * PARALLEL / seconds["docker_exec"]
    started = time.perf_counter()
    await asyncio.gather(*(repeat(lambda name=name: rig.act(name, {"argv": ["true"]}), rounds) for name in names))  # type: ignore[misc]
    action_per_s = PARALLEL * rounds / (time.perf_counter() - started)
    for name in names:
        await rig.environments.end(name)
    figures = {"runner_per_s": runner_per_s, "action_per_s": action_per_s, "docker_exec_per_s": docker_per_s}
    report.figure("at_once_32", {name: round(value, 1) for name, value in figures.items()})
    report.check("parallel_32_over_docker", runner_per_s / docker_per_s, limit=25, better="higher")


def daemon_seconds(containers: Sequence[str]) -> float:
    """Seconds for one ``docker exec`` in each container, all at once, one connection each."""

    def run(container: str) -> None:
        docker = DockerExec()
        docker.run(container, ["true"])
        docker.close()

    started = time.perf_counter()
    with ThreadPoolExecutor(len(containers)) as pool:
        list(pool.map(run, containers))
    return time.perf_counter() - started


async def repeat(work: Callable[[], Awaitable[object]], rounds: int) -> None:
    for _ in range(rounds):
        await work()


async def grip(rig: SandboxRig, report: BenchReport, rounds: int) -> None:
    """What taking and giving back cores costs, and freezing and thawing."""
    sandbox = await rig.sandbox("one")
    cores = sorted(os.sched_getaffinity(0))
    changes: list[float] = []
    freezes: list[float] = []
    for round_ in range(rounds):
        chosen = [cores[round_ % len(cores)]]
        changes.append(await timed(lambda chosen=chosen: sandbox.set_cores(chosen)))  # type: ignore[misc]
        started = time.perf_counter()
        await sandbox.quiesce(Background.FREEZE)
        await sandbox.thaw()
        freezes.append((time.perf_counter() - started) * 1e3)
    await sandbox.set_cores(cores)
    report.figure("grip", {"cores": dict(spread(changes)), "freeze_and_thaw": dict(spread(freezes))})
    report.check("cgroup_change_ms", median(changes), limit=0.2, better="lower")
    report.check("freeze_thaw_ms", median(freezes), limit=1.0, better="lower")


async def warm_claims(rig: SandboxRig, report: BenchReport, rounds: int) -> None:
    """A sandbox from the pool against one made on the spot."""
    warm = replace(rig.function.sandbox or SandboxSpec(), warm=replace(SandboxSpec().warm, min=rounds, max=rounds))
    pool = rig.environments.pool(warm)
    pool.start()
    await pool.filled()
    claims = [await timed(lambda r=r: rig.environments.ensure(f"claim-{r}", warm)) for r in range(rounds)]  # type: ignore[misc]
    await pool.filled()
    creations = [await timed(lambda r=r: rig.sandbox(f"cold-{r}")) for r in range(rounds)]  # type: ignore[misc]
    for round_ in range(rounds):
        await rig.environments.end(f"claim-{round_}")
        await rig.environments.end(f"cold-{round_}")
    report.figure("a_sandbox", {"claim": dict(spread(claims)), "create": dict(spread(creations))})
    report.check("create_over_claim_p50", median(creations) / median(claims), limit=20, better="higher")


async def idle_crowd(rig: SandboxRig, report: BenchReport, rounds: int, crowd: int) -> None:
    """Many idle, frozen sandboxes beside one that works; and what each costs the gateway in memory."""
    sandbox = await rig.sandbox("one")
    await sandbox.thaw()
    before = [await timed(lambda: sandbox.run(NOOP)) for _ in range(rounds)]
    memory_before, started = resident_bytes(), time.perf_counter()
    spec = replace(rig.function.sandbox or SandboxSpec(), memory_bytes=64 * 2**20)
    names = [f"idle-{index}" for index in range(crowd)]
    await asyncio.gather(*(rig.environments.ensure(name, spec) for name in names))
    created_s = time.perf_counter() - started
    for name in names:
        crowded = rig.environments.get(name)
        assert crowded is not None
        await crowded.quiesce(Background.FREEZE)
    memory_each = (resident_bytes() - memory_before) / crowd
    during = [await timed(lambda: sandbox.run(NOOP)) for _ in range(rounds)]
    await asyncio.gather(*(rig.environments.end(name) for name in names))
    after = [await timed(lambda: sandbox.run(NOOP)) for _ in range(rounds)]
    report.figure("idle", {"none": dict(spread(before)), str(crowd): dict(spread(during)), "gone": dict(spread(after))})
    report.figure("idle_created_per_s", round(crowd / created_s, 2))
    report.figure("gateway_bytes_per_idle_sandbox", round(memory_each))
    slowdown = median(during) / median([median(before), median(after)])
    report.check("idle_300_slowdown", slowdown, limit=1.2, better="lower")


async def humaneval(rig: SandboxRig, report: BenchReport, limit: int | None) -> None:
    """Programs, all submitted at once: is every verdict the recorded one?"""
    programs = inputs.programs()[:limit]
    report.note(f"humaneval: {inputs.told(inputs.PROGRAMS)}")
    names = [f"eval-{index}" for index in range(PARALLEL)]
    await asyncio.gather(*(rig.sandbox(name) for name in names))
    started, cpu, mine = time.perf_counter(), machine_cpu_s(), time.process_time()
    verdicts = await asyncio.gather(*(verdict(rig, names[i % PARALLEL], p) for i, p in enumerate(programs)))
    wall_s = time.perf_counter() - started
    capacity_s = wall_s * len(os.sched_getaffinity(0))
    busy_s, mine_s = machine_cpu_s() - cpu, time.process_time() - mine
    wrong = [program["id"] for program, seen in zip(programs, verdicts, strict=True) if seen != program["verdict"]]
    for name in names:
        await rig.environments.end(name)
    report.figure("humaneval_programs", len(programs))
    report.figure("humaneval_per_s", round(len(programs) / wall_s, 2))
    report.figure("humaneval_cpu_utilisation", round(busy_s / capacity_s, 3))
    report.figure("humaneval_gateway_cpu_share", round(mine_s / capacity_s, 4))
    if wrong:
        report.note(f"wrong verdicts: {', '.join(wrong[:10])}")
    report.check("humaneval_verdicts_wrong", len(wrong), limit=0, better="lower")


async def verdict(rig: SandboxRig, trajectory: str, program: dict[str, str]) -> str:
    """As the recorded ones were made: 8 s of processor time, 10 s of wall time."""
    limits = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (8, 8))\n"
    input: dict[str, object] = {"argv": ["python3", "-"], "stdin": limits + program["program"]}
    outcome = (await rig.act(trajectory, input, timeout_s=10.0)).outcome
    if outcome.state is State.TIMED_OUT:
        return "timeout"
    assert isinstance(outcome.result, dict), outcome.message
    if outcome.result["signal"] in (9, 24):
        return "timeout"
    return "pass" if outcome.result["exit_code"] == 0 else "fail"


async def replay(rig: SandboxRig, report: BenchReport, trajectories: int, actions: int) -> None:
    """Agents' commands, in order, trajectories side by side: every action ends."""
    steps = inputs.commands()
    report.note(f"replay: {inputs.told(inputs.STEPS)}")
    chosen = dict(sorted(steps.items())[:: max(1, len(steps) // trajectories)])
    ends: dict[str, int] = {}

    async def walk(name: str, commands: Sequence[str]) -> None:
        for command in commands[:actions]:
            outcome = (await rig.act(name, {"command": command}, timeout_s=10.0)).outcome
            key = outcome.state.value if outcome.reason is None else outcome.reason.value
            ends[key] = ends.get(key, 0) + 1
        await rig.environments.end(name)

    started = time.perf_counter()
    await asyncio.gather(*(walk(name, commands) for name, commands in chosen.items()))
    report.figure("replay_trajectories", len(chosen))
    report.figure("replay_actions_per_s", round(sum(ends.values()) / (time.perf_counter() - started), 1))
    report.figure("replay_ends", dict(sorted(ends.items())))
    living = [str(entry["trajectory"]) for entry in rig.environments.list()]
    report.check("replay_leaked", len([name for name in living if name in chosen]), limit=0, better="lower")


def container_of(sandbox: Sandbox) -> str:
    """The engine's name of a sandbox's container."""
    return f"tangram-{sandbox.id}"


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine_cpu_s() -> float:
    """Seconds that all cores were busy since the machine's start."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    return sum(float(field) for index, field in enumerate(fields[:8]) if index not in (3, 4)) / os.sysconf("SC_CLK_TCK")


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

    def on_rig(work: Callable[[SandboxRig], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def part() -> None:
            async with rig() as made:
                await work(made)

        return part

    return play(
        report,
        options,
        {
            "one_command": on_rig(lambda made: one_command(made, report, 100 if quick else 300)),
            "grip": on_rig(lambda made: grip(made, report, 200 if quick else 1000)),
            "at_once": on_rig(lambda made: at_once(made, report, 10 if quick else 30)),
            "warm_claims": on_rig(lambda made: warm_claims(made, report, 5 if quick else 10)),
            "idle_crowd": on_rig(lambda made: idle_crowd(made, report, 150 if quick else 400, 60 if quick else 300)),
            "humaneval": on_rig(lambda made: humaneval(made, report, 60 if quick else None)),
            "replay": on_rig(lambda made: replay(made, report, 4 if quick else 12, 20 if quick else 60)),
            "fresh": lambda: fresh(report, 20 if quick else 60),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
