"""Plays the attacks on rewards in real sandboxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.attacks.rewards import ATTACKS, LISTED, PROJECT, TEST, VERDICTS, RewardAttack
from bench.rollouts import unplugged
from manager.action import Action, Grant, Lease
from manager.executor import Call
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from runtimes.runtime import Execution
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.pytest.runtime import PytestRuntime
from runtimes.sandbox.sandbox import Provider, Sandbox

EVERY = (*ATTACKS, *VERDICTS)
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
) -> Mapping[str, object]:
    """Return the result of a reward; raises ActionFailed if it has none."""
    cpus = tuple(range(cores))
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
    trajectory = trajectory or attack.name
    if attack.user:
        # A directory of its own: of root's rights it has not that to write what others own.
        spec = replace(spec, user=attack.user, users=(attack.user,), workdir="/task")
        function = replace(function, sandbox=spec)
    sandbox = await environments.ensure(trajectory, spec)
    files = {**PROJECT, **({"calc.py": GOOD} if solved else attack.files)}
    for path, text in files.items():
        await sandbox.write_file(path, text.encode())
    for act in () if solved else attack.acts:
        await sandbox.run(Command(shell=act, timeout_s=10.0))
    if not attack.forked:
        return await _told_and_graded(attack, environments, sandbox, function, trajectory, solved, log)
    kept = await environments.snapshot(trajectory)
    try:
        sandbox = await environments.ensure(f"{trajectory}-fork", replace(sandbox.spec, snapshot=kept.id))
        return await _told_and_graded(attack, environments, sandbox, function, f"{trajectory}-fork", solved, log)
    finally:
        await environments.end(f"{trajectory}-fork")
        await environments.provider.snapshots.remove(kept.id)


async def _told_and_graded(
    attack: RewardAttack,
    environments: Environments,
    sandbox: Sandbox,
    function: FunctionSpec,
    trajectory: str,
    solved: bool,
    log: SaidLog | None,
) -> Mapping[str, object]:
    """Upload the tests as a trainer does, let the agent do its last, and grade."""
    tests = attack.tests or {TEST: PROJECT[TEST]}
    given: dict[str, object] = {"env": dict(attack.env), **({} if attack.tests else {"fail_to_pass": [LISTED]})}
    if attack.given or (function.pytest is not None and function.pytest.grade == "fresh"):
        given["tests"] = tests
    for path, text in tests.items():
        await sandbox.write_file(path, text.encode())
    if attack.settle and not solved:
        for _ in range(3):
            await sandbox.run(Command(shell=attack.settle, timeout_s=10.0))
    for act in () if solved else attack.last:
        await sandbox.run(Command(shell=act, timeout_s=30.0))
    return await graded(environments, function, trajectory, given, attack.cores, log)


def is_earned(attack: RewardAttack, reward: object) -> bool:
    """Return whether a reward is no more than the code has earned."""
    return isinstance(reward, float) and reward <= attack.earned + 1e-9


def playable(attack: RewardAttack, provider: Provider) -> bool:
    """Return whether there can be such a user: root has to be one of a sandbox's own."""
    return not attack.user or provider.info.kind == "container" or provider.info.limits["root_separate"]


def small(spec: SandboxSpec) -> SandboxSpec:
    """Return a sandbox whose bounds are soon reached."""
    return replace(spec, disk_bytes=64 * 2**20)
