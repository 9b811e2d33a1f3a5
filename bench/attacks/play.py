"""Plays the attacks on rewards in real sandboxes."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from bench.attacks.rewards import ATTACKS, LISTED, NOTHING, PROJECT, TEST, VERDICTS, RewardAttack
from bench.inputs import unplugged
from manager.action import Action, Grant, Lease
from manager.executor import Call
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from runtimes.runtime import Execution
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.pytest.runtime import PytestRuntime
from runtimes.sandbox.sandbox import Provider

EVERY = (*ATTACKS, *VERDICTS)
SPEC = SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20, pids=512)
ARGS = ("-p", "no:cacheprovider", *unplugged())
#: Graded where the agent was, and where it never was.
SAME = FunctionSpec(name="reward", runtime="pytest", timeout_s=60.0, pytest=PytestSpec(args=ARGS))
FRESH = replace(SAME, pytest=PytestSpec(args=ARGS, grade="fresh", tree_options="ignore"))
GOOD = "def add(a, b):\n    return a + b\n"


class SaidLog:
    """Keeps what a suite prints."""

    def __init__(self) -> None:
        self.said = ""

    def write(self, stream: str, data: str) -> None:
        self.said += data

    def omit(self, size_bytes: int) -> None: ...


async def graded(
    environments: Environments,
    function: FunctionSpec,
    trajectory: str,
    input: Mapping[str, object],
    cores: int = 1,
    log: SaidLog | None = None,
    *,
    first_core: int = 0,
) -> Mapping[str, object]:
    """Return the result of a reward; raises ActionFailed if it has none."""
    all_cores = sorted(os.sched_getaffinity(0))
    cpus = tuple(all_cores[(first_core + number) % len(all_cores)] for number in range(cores))
    action = Action(id=f"reward-{trajectory}", function=function.name, trajectory=trajectory, timeout_s=60.0)
    lease = Lease(action_id=action.id, node="local", grants={"cpu": Grant(pool="cpu:local", units=cores, cores=cpus)})
    call = Call(function=function, input=input, log=log or SaidLog())
    value = (await PytestRuntime(environments).execute(Execution(action=action, lease=lease, call=call))).value
    assert isinstance(value, dict)
    return value


async def play(
    attack: RewardAttack,
    environments: Environments,
    spec: SandboxSpec,
    function: FunctionSpec = SAME,
    *,
    trajectory: str = "",
    solved: bool = False,
    log: SaidLog | None = None,
) -> Mapping[str, object]:
    """Let the agent do its worst, then upload the tests and grade; return the result."""
    async with done(attack, environments, spec, trajectory=trajectory or attack.name, solved=solved) as worst:
        return await worst.graded(function, log)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedAttack:
    """A trajectory whose agent has done its worst, and whose tests are uploaded."""

    attack: RewardAttack
    environments: Environments
    spec: SandboxSpec
    trajectory: str

    async def graded(
        self, function: FunctionSpec, log: SaidLog | None = None, first_core: int = 0
    ) -> Mapping[str, object]:
        """Return the result of a reward; raises ActionFailed if it has none."""
        attack = self.attack
        given: dict[str, object] = {"env": dict(attack.env), **({} if attack.tests else {"fail_to_pass": [LISTED]})}
        if attack.given or (function.pytest is not None and function.pytest.grade == "fresh"):
            given["tests"] = tests_of(attack)
        if attack.user:
            function = replace(function, sandbox=self.spec)
        return await graded(
            self.environments, function, self.trajectory, given, attack.cores, log, first_core=first_core
        )


@asynccontextmanager
async def done(
    attack: RewardAttack, environments: Environments, spec: SandboxSpec, *, trajectory: str, solved: bool = False
) -> AsyncIterator[PlayedAttack]:
    """Let the agent do its worst, upload the tests as a trainer does, and let it do its last."""
    if attack.user:
        # A directory of its own: of root's rights it has not that to write what others own.
        spec = replace(spec, user=attack.user, users=(attack.user,), workdir="/task")
    sandbox = await environments.ensure(trajectory, spec)
    files = {**PROJECT, **({"calc.py": GOOD} if solved else attack.files)}
    for path, text in files.items():
        await sandbox.write_file(path, text.encode())
    for act in () if solved else attack.acts:
        await sandbox.run(Command(shell=act, timeout_s=10.0))
    kept = await environments.snapshot(trajectory) if attack.forked else None
    try:
        if kept is not None:
            trajectory = f"{trajectory}-fork"
            sandbox = await environments.ensure(trajectory, replace(sandbox.spec, snapshot=kept.id))
        for path, text in tests_of(attack).items():
            await sandbox.write_file(path, text.encode())
        if attack.settle and not solved:
            for _ in range(3):
                await sandbox.run(Command(shell=attack.settle, timeout_s=10.0))
        for act in () if solved else attack.last:
            await sandbox.run(Command(shell=act, timeout_s=30.0))
        yield PlayedAttack(attack=attack, environments=environments, spec=spec, trajectory=trajectory)
    finally:
        if kept is not None:
            await environments.end(trajectory)
            await environments.provider.snapshots.remove(kept.id)


def tests_of(attack: RewardAttack) -> Mapping[str, str]:
    return attack.tests or {TEST: PROJECT[TEST]}


def is_earned(attack: RewardAttack, reward: object) -> bool:
    """Return whether a reward is no more than the code has earned."""
    return isinstance(reward, float) and reward <= attack.earned + 1e-9


def playable(attack: RewardAttack, provider: Provider) -> bool:
    """Return whether there can be such a user: root has to be one of a sandbox's own."""
    return not attack.user or provider.info.kind == "container" or provider.info.limits["root_separate"]


def small(spec: SandboxSpec) -> SandboxSpec:
    """Return a sandbox whose bounds are soon reached."""
    return replace(spec, disk_bytes=64 * 2**20)


async def solved(environments: Environments) -> Callable[[FunctionSpec], Awaitable[float]]:
    """Have an agent solve the task; return what grades it once more, and returns the seconds that it took."""
    value = await play(NOTHING[1], environments, SPEC, trajectory="timed", solved=True)
    assert value["reward"] == 1.0

    async def timed(function: FunctionSpec) -> float:
        began_s = time.perf_counter()
        value = await graded(
            environments, function, "timed", {"fail_to_pass": [LISTED], "tests": {TEST: PROJECT[TEST]}}
        )
        assert value["reward"] == 1.0, value
        return time.perf_counter() - began_s

    return timed
