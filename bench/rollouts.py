"""Rollouts on real sandboxes: what the policies are worth on this machine's own cores, not only in simulation.

Every policy plays the same trajectories in turn: a think, a shell action, and so on, then a test suite as reward.
Think times and shell seconds are recorded ones where they are given (`bench.inputs`), scaled down; else drawn from a
seed. ``static`` gives each trajectory one core for its life, idle while it thinks; others wait for theirs.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np

from bench.inputs import OWN_PATH, STEPS, real_input, told
from bench.report import BenchReport, median, parser, percentile, play
from bench.sandbox import DiscardedOutput
from manager.action import Action, Amdahl, State, UnitSet
from manager.assembly import build_core
from manager.clock import MonotonicClock
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec
from manager.engine import Engine, Submission
from manager.executor import Call
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from manager.simulation.simulator import policies
from runtimes.executor import LocalExecutor
from runtimes.node.topology import discover
from runtimes.runtime import Runtime
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.exec import ExecRuntime
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.pytest.runtime import PytestRuntime

SEED = 1
#: Each policy as the manager knows it; static has a core a trajectory besides.
POLICIES = {"adaptive": "adaptive", "price": "price", "paper": "paper", "static": "fixed:1"}
#: Loop turns of awk, and of a test of the suite, that take about a second on one core.
AWK_TURNS_PER_S = 45e6
SPIN_PER_S = 16e6
TESTS = 16
#: Seconds of a test run besides its tests, which do not shrink with workers.
START_S = 0.3
#: No recorded action of these is longer than that, scaled.
SHELL_MAX_S = 1.0
THINK_MAX_S = 4.0
SPEC = SandboxSpec(memory_bytes=512 * 2**20)
#: Nothing but work.
SUITE = """import pytest
@pytest.mark.parametrize('n', range({tests}))
def test_spin(n):
    assert sum(i * i for i in range({spin})) > n
"""


def unplugged() -> Iterator[str]:
    """Options that keep pytest from importing whatever plugins this machine has: only xdist is wanted."""
    for entry in entry_points(group="pytest11"):
        if not entry.value.startswith("xdist"):
            yield from ("-p", f"no:{entry.name}")


SHELL = FunctionSpec(name="shell", runtime="exec", cost={"cpu": UnitSet.fixed(1)}, timeout_s=120.0)
REWARD = FunctionSpec(
    name="reward",
    runtime="pytest",
    timeout_s=600.0,
    pytest=PytestSpec(args=("-q", "-p", "no:cacheprovider", *unplugged())),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory: its turns as (seconds of thinking, core-seconds of shell), and its reward's core-seconds."""

    name: str
    turns: tuple[tuple[float, float], ...]
    reward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one policy made of all rollouts."""

    acts_s: tuple[float, ...]
    rollouts: int
    makespan_s: float

    def figures(self) -> dict[str, float]:
        """Mean over trajectories of the sum of their ACTs, the 99th percentile of an action's, and the makespan."""
        return {
            "act_mean_s": sum(self.acts_s) / self.rollouts,
            "act_p99_s": percentile(self.acts_s, 0.99),
            "makespan_s": self.makespan_s,
        }


def rollouts(count: int, turns: int, think_scale: float, reward_s: float) -> list[Rollout]:
    """``count`` trajectories of at most ``turns`` turns; rewards have ``reward_s`` core-seconds in the median."""
    rng = np.random.default_rng(SEED)
    recording = real_input(STEPS)
    sources = [] if recording is None else list(recorded(recording))
    made = []
    for index in range(count):
        source = sources[index % len(sources)] if sources else drawn(rng, turns)
        steps = tuple(
            (min(THINK_MAX_S, think_scale * think_s), min(SHELL_MAX_S, shell_s)) for think_s, shell_s in source[:turns]
        )
        work_s = float(np.clip(rng.lognormal(np.log(reward_s), 0.6), 0.3 * reward_s, 4.0 * reward_s))
        made.append(Rollout(name=f"r{index}", turns=steps, reward_s=work_s))
    return made


def recorded(path: Path) -> Iterator[list[tuple[float, float]]]:
    """(think, shell) seconds of each recorded trajectory, in the order of the file."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    ends_s: dict[tuple[str, str], float] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            step = json.loads(line)
            key = (step["run"], step["traj"])
            if key in ends_s:
                think_s = max(0.0, step["t_llm_end"] - ends_s[key])
                found.setdefault(key, []).append((think_s, max(0.0, step["t_obs"] - step["t_llm_end"])))
            ends_s[key] = step["t_obs"]
    yield from found.values()


def drawn(rng: np.random.Generator, turns: int) -> list[tuple[float, float]]:
    """What recorded trajectories look like: some seconds of generation, then a quarter of a second in the shell."""
    return [(float(rng.lognormal(np.log(5.0), 0.6)), float(rng.lognormal(np.log(0.26), 1.3))) for _ in range(turns)]


@dataclass(slots=True)
class RolloutStage:
    """An engine with one policy over this machine's cores and real sandboxes."""

    engine: Engine
    environments: Environments
    clock: MonotonicClock

    async def play(self, chosen: Sequence[Rollout], cores: asyncio.Semaphore | None) -> Played:
        """All of them at once; with ``cores`` each holds one from its start to its end."""
        started_s = self.clock.now()
        acts = await asyncio.gather(*(self._trajectory(rollout, cores) for rollout in chosen))
        return Played(
            acts_s=tuple(act_s for some in acts for act_s in some),
            rollouts=len(chosen),
            makespan_s=self.clock.now() - started_s,
        )

    async def furnish(self, rollout: Rollout) -> None:
        """Its sandbox with its suite inside, before anything is timed."""
        sandbox = await self.environments.ensure(rollout.name, SPEC)
        spin = int(rollout.reward_s / TESTS * SPIN_PER_S)
        await sandbox.write_file("test_spin.py", SUITE.format(tests=TESTS, spin=spin).encode())

    async def _trajectory(self, rollout: Rollout, cores: asyncio.Semaphore | None) -> list[float]:
        asked_s = self.clock.now()
        acts = []
        async with AsyncExitStack() as held:
            if cores is not None:
                await held.enter_async_context(cores)
            waited_s = self.clock.now() - asked_s  # for its core: it delays the first action, whenever that comes
            for number, (think_s, shell_s) in enumerate(rollout.turns):
                await asyncio.sleep(think_s)
                command = (
                    f"awk 'BEGIN {{ for (i = 0; i < {int(shell_s * AWK_TURNS_PER_S)}; i++) x += i * i; print x }}'"
                )
                acts.append(waited_s + await self._act(shell(rollout, number, shell_s), SHELL, {"command": command}))
                waited_s = 0.0
            acts.append(waited_s + await self._act(reward(rollout), REWARD, {"targets": ["."]}))
        return acts

    async def _act(self, action: Action, function: FunctionSpec, value: dict[str, object]) -> float:
        """Seconds from submission to settlement."""
        submitted_s = self.clock.now()
        call = Call(function=function, input=value, log=DiscardedOutput())
        settlement = await self.engine.submit([Submission(action=replace(action, submitted_s=submitted_s), call=call)])[
            0
        ]
        assert settlement.outcome.state is State.SUCCEEDED, f"{action.id}: {settlement.outcome}"
        return self.clock.now() - submitted_s


def shell(rollout: Rollout, number: int, shell_s: float) -> Action:
    return Action(
        id=f"{rollout.name}-{number}",
        function=SHELL.name,
        trajectory=rollout.name,
        cost=SHELL.cost,
        t_ori_s=shell_s,
        timeout_s=SHELL.timeout_s,
    )


def reward(rollout: Rollout) -> Action:
    """A malleable suite whose profile is known, as after a first training step."""
    t_ori_s = START_S + rollout.reward_s
    return Action(
        id=f"{rollout.name}-reward",
        function=REWARD.name,
        trajectory=rollout.name,
        cost={"cpu": UnitSet.span(1, TESTS)},
        key="cpu",
        elasticity=Amdahl(START_S / t_ori_s),
        t_ori_s=t_ori_s,
        malleable=True,
        timeout_s=REWARD.timeout_s,
    )


@asynccontextmanager
async def stage(policy: str, node: NodeSpec, scratch: Path) -> AsyncIterator[RolloutStage]:
    provider = make_provider(
        ProviderSettings(kind="process", state_dir=scratch, shared_cores=tuple(node.numa[0][:1]), path=OWN_PATH)
    )
    environments = Environments(provider, EnvironmentSettings(default=SPEC))
    runtimes: dict[str, Runtime] = {
        "exec": ExecRuntime(environments),
        "pytest": PytestRuntime(environments),
    }
    clock = MonotonicClock()
    spec = ManagerSpec(nodes=(node,), scheduler=SchedulerSpec(policies=policies(policy)))
    engine = Engine(build_core(spec), LocalExecutor(runtimes, clock), clock=clock)
    await engine.start()
    try:
        yield RolloutStage(engine, environments, clock)
    finally:
        await engine.close()
        await environments.close()
        await provider.close()


async def measure(report: BenchReport, *, quick: bool) -> None:
    """Each policy in turn, again and again; the median of each figure, and its ratio to adaptive's."""
    chosen = rollouts(6, 3, 0.1, 1.0) if quick else rollouts(24, 5, 0.25, 3.0)
    node = replace(discover().node("local"), memory_bytes=2**50)
    played: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
    for round_ in range(1 if quick else 2):
        for name, policy in POLICIES.items():
            report.progress(f"round {round_ + 1}, {name}")
            with tempfile.TemporaryDirectory() as scratch:
                async with stage(policy, node, Path(scratch)) as made:
                    for rollout in chosen:
                        await made.furnish(rollout)
                    cores = asyncio.Semaphore(node.cores) if name == "static" else None
                    played[name].append((await made.play(chosen, cores)).figures())
            compare(report, {name: runs for name, runs in played.items() if runs})
    report.note(
        f"{len(chosen)} trajectories on {node.cores} cores; think times: {told(STEPS)}."
        " With so few cores a suite can hardly be wider than one; elasticity shows little here, and what shows is"
        " short actions that pass long ones, and cores that are not held while a model thinks."
    )


def compare(report: BenchReport, played: dict[str, list[dict[str, float]]]) -> None:
    """Record the median of each figure, and its ratio to that of ``adaptive``."""
    rows = {name: {key: median([run[key] for run in runs]) for key in runs[0]} for name, runs in played.items()}
    report.figure("rollouts", {name: dict(row) for name, row in rows.items()})
    ours = rows["adaptive"]
    ratios = {name: {key: row[key] / ours[key] for key in row} for name, row in rows.items() if name != "adaptive"}
    report.figure("over_adaptive", {name: dict(row) for name, row in ratios.items()})
    report.keep()


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("rollouts", parts=True).parse_args(argv)
    report = BenchReport("rollouts")
    return play(report, options, {"rollouts": lambda: measure(report, quick=options.quick)})


if __name__ == "__main__":
    sys.exit(main())
