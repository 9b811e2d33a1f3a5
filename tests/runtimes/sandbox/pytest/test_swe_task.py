"""Repair tasks: their failing tests fail before the upstream fix, and pass with it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from bench.inputs import OWN_PATH, unplugged
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.pytest.runtime import PytestRuntime
from tests.runtimes.recorder import execution_of
from tests.runtimes.sandbox.pytest.swe_task import (
    apply_patch,
    files_of,
    install_dependencies,
    load_task,
    prepare,
)

#: A project with a mistake, the tests that show it, and the mend: as a task has them.
SOURCES = {
    "tallies-1.0/src/tallies.py": "def mean(values):\n    return sum(values) / 2\n",
    "tallies-1.0/tests/test_old.py": "from tallies import mean\n\ndef test_two():\n    assert mean([1, 3]) == 2\n",
}
TEST_PATCH = """\
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1,8 @@
+import pytest
+from tallies import mean
+
+def test_three():
+    assert mean([1, 2, 3]) == 2
+
+@pytest.mark.parametrize("n", [1, 5])
+def test_ones(n): assert mean([1] * n) == 1
"""
PATCH = """\
--- a/src/tallies.py
+++ b/src/tallies.py
@@ -1,2 +1,2 @@
 def mean(values):
-    return sum(values) / 2
+    return sum(values) / len(values)
"""
GENERATED = {
    "pypi_sdist": "tallies==1.0",
    "pythonpath": "src",
    "test_patch": TEST_PATCH,
    "patch": PATCH,
    "FAIL_TO_PASS": [
        "tests/test_new.py::test_three",
        "tests/test_new.py::test_ones[1]",
        "tests/test_new.py::test_ones[5]",
    ],
    "PASS_TO_PASS": ["tests/test_old.py::test_two", "tests/test_old.py::test_newer_than_the_sdist"],
}

SPEC = SandboxSpec(memory_bytes=1024 * 2**20)

FUNCTION = FunctionSpec(
    name="unit_tests",
    runtime="pytest",
    timeout_s=120.0,
    pytest=PytestSpec(args=("-p", "no:cacheprovider", *unplugged(), "-q")),
)


@pytest.fixture
async def environments(tmp_path: Path) -> AsyncIterator[Environments]:
    provider = make_provider(ProviderSettings(kind="process", state_dir=tmp_path / "state", path=OWN_PATH))
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


@pytest.mark.slow
async def test_a_fix_turns_the_reward(environments: Environments, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with tarfile.open(cache / "tallies-1.0.tar.gz", "w:gz") as sdist:
        for name, text in SOURCES.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            sdist.addfile(entry, io.BytesIO(text.encode()))
    await assert_fix_turns_the_reward(dict(GENERATED), 1, environments, tmp_path, cache)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(("name", "absent"), [("sqlparse-issue601", 13), ("marshmallow-1867", 0)])
async def test_the_upstream_fix_turns_the_reward(
    real: Callable[[str], Path], environments: Environments, tmp_path: Path, name: str, absent: int
) -> None:
    task = load_task(real("swe_tasks") / f"{name}.json")
    await assert_fix_turns_the_reward(task, absent, environments, tmp_path, None)


async def assert_fix_turns_the_reward(
    task: dict[str, Any], absent: int, environments: Environments, tmp_path: Path, cache: Path | None
) -> None:
    """Play the task before and after its fix; ``absent`` tests of its lists are not in its sdist."""
    root = prepare(task, tmp_path, cache=cache)
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
