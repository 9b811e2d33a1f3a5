"""Real repair tasks: their failing tests fail before the upstream fix, and everything passes after it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from manager.function import FunctionSpec, PytestSpec, RuntimeKind, SandboxSpec
from runtimes.sandbox.creation_gate import CreationGate
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.process.provider import ProcessProvider
from runtimes.sandbox.pytest.runtime import PytestRuntime
from scripts.swe_task import apply_patch, files_of, install_dependencies, load_task, prepare
from tests.runtimes.recorder import execution_of

TASKS = Path(__file__).parents[5] / "shared" / "workloads" / "swe_tasks"
SPEC = SandboxSpec(memory_bytes=1024 * 2**20)
FUNCTION = FunctionSpec(
    name="unit_tests",
    runtime=RuntimeKind.PYTEST,
    timeout_s=120.0,
    pytest=PytestSpec(args=("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:asyncio", "-q")),
)


@pytest.fixture
async def environments(tmp_path: Path) -> AsyncIterator[Environments]:
    provider = ProcessProvider(state_dir=tmp_path / "state", starting=CreationGate(4), shared_cores=(0,))
    environments = Environments(provider, EnvironmentSettings(default=SPEC))
    yield environments
    await environments.close()


async def reward_of(environments: Environments, task: dict[str, Any]) -> dict[str, Any]:
    """Run the task's lists in the sandbox of trajectory t1."""
    lists = {"fail_to_pass": task["FAIL_TO_PASS"], "pass_to_pass": task["PASS_TO_PASS"]}
    value = {**lists, "cwd": "project", "env": {"PYTHONPATH": f"{task['pythonpath']}:../dependencies"}}
    execution, _ = execution_of(FUNCTION, value, trajectory="t1", cores=(0, 1))
    result = (await PytestRuntime(environments).execute(execution)).value
    assert isinstance(result, dict)
    return result


@pytest.mark.network
@pytest.mark.skipif(not TASKS.is_dir(), reason="the shared workloads are absent")
@pytest.mark.parametrize(("name", "absent"), [("sqlparse-issue601", 13), ("marshmallow-1867", 0)])
async def test_the_upstream_fix_turns_the_reward(
    environments: Environments, tmp_path: Path, name: str, absent: int
) -> None:
    task = load_task(TASKS / f"{name}.json")
    root = prepare(task, tmp_path)
    dependencies = tmp_path / "dependencies"
    install_dependencies(task, dependencies)
    sandbox = await environments.ensure("t1", SPEC)
    for place, tree in (("project", root), ("dependencies", dependencies)):
        for path, data in files_of(tree):
            await sandbox.write_file(f"{place}/{path}", data)

    before = await reward_of(environments, task)
    assert (before["reward"], before["resolved"], before["workers"]) == (0.0, False, 2)
    assert before["fail_to_pass"] == {"passed": [], "failed": task["FAIL_TO_PASS"]}
    # The lists were made from the repository: a few of their tests are newer than the sdist.
    missing = [id for id, verdict in before["tests"].items() if verdict == "missing"]
    assert before["pass_to_pass"]["failed"] == missing and len(missing) == absent
    assert (f"{absent} requested test(s) did not run" in before["note"]) == (absent > 0)
    task["PASS_TO_PASS"] = before["pass_to_pass"]["passed"]

    for path in apply_patch(root, task["patch"]):
        await sandbox.write_file(f"project/{path}", (root / path).read_bytes())
    after = await reward_of(environments, task)
    assert (after["reward"], after["resolved"], after["note"]) == (1.0, True, "")
    assert len(after["tests"]) == len(task["FAIL_TO_PASS"]) + len(task["PASS_TO_PASS"])
