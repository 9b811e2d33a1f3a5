"""A test runs the solution as a program of another user by one line, and nothing of it reaches the test."""

from __future__ import annotations

import json
import textwrap
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.inputs import OWN_PATH
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.pytest.runtime import PytestRuntime
from tests.runtimes.recorder import assert_as_declared, execution_of
from tests.runtimes.sandbox.pytest.conftest import ARGS

SPEC = SandboxSpec(image="tangram-base:bookworm", memory_bytes=512 * 2**20, users=("root",))
FRESH = FunctionSpec(
    name="reward",
    runtime="pytest",
    timeout_s=60.0,
    pytest=PytestSpec(args=ARGS, grade="fresh", tree_options="ignore"),
)
TEST = "tests/test_sum.py"
SUITE = """
    from tangram_grading import run_solution
    def test_sum():
        done = run_solution(["python3", "solution.py", "2"], input="2")
        assert (done.returncode, done.stdout) == (0, "4\\n"), done
"""
SOLUTION = "import sys\nprint(int(sys.argv[1]) + int(sys.stdin.read()))\n"
APART = {"clean_start", "report_whole", "solution_apart", "swept", "tests_given", "tree_options_ignored"}


@pytest.fixture(params=["process", pytest.param("container", marks=pytest.mark.docker)])
async def environments(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Environments]:
    if request.param == "container":
        request.getfixturevalue("docker")
    path = OWN_PATH if request.param == "process" else ""
    provider = make_provider(ProviderSettings(kind=request.param, state_dir=tmp_path, path=path))
    if not (request.param == "container" or provider.info.limits["root_separate"]):
        await provider.close()
        pytest.skip("this machine's process sandboxes have no root of their own")
    environments = Environments(provider, EnvironmentSettings(default=SPEC))
    yield environments
    await environments.close()
    await provider.close()


async def graded(
    environments: Environments,
    files: Mapping[str, str],
    test: str = SUITE,
    *,
    user: str = "auto",
    cores: tuple[int, ...] = (0,),
    function: FunctionSpec = FRESH,
) -> dict[str, Any]:
    """Return the reward of a solution in a trajectory of its own."""
    # Root has no right to write what others own.
    spec = replace(SPEC, user=user, workdir="/task" if user == "root" else SPEC.workdir)
    function = replace(function, sandbox=spec)
    sandbox = await environments.ensure("t", spec)
    for path, text in files.items():
        await sandbox.write_file(path, text.encode())
    execution, _ = execution_of(function, {"tests": {TEST: textwrap.dedent(test)}}, trajectory="t", cores=cores)
    value = (await PytestRuntime(environments).execute(execution)).value
    await environments.end("t")
    assert_as_declared(function, value)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(("user", "cores"), [("auto", (0,)), ("auto", (0, 1)), ("root", (0,))])
async def test_a_solution_is_run_by_one_line_and_is_apart(
    environments: Environments, user: str, cores: tuple[int, ...]
) -> None:
    value = await graded(environments, {"solution.py": SOLUTION}, user=user, cores=cores)
    assert (value["reward"], value["note"]) == (1.0, ""), value
    assert set(value["checked"]) - {"tests_locked"} == APART
    assert ("tests_locked" in value["checked"]) == (user != "root")


@pytest.mark.promise("A program of the solution reaches nothing of its tests.")
@pytest.mark.parametrize("user", ["auto", "root"])
async def test_a_program_of_the_solution_reaches_nothing_of_its_tests(environments: Environments, user: str) -> None:
    looks = f"""
        import glob, json, os
        def reached(place, mode):
            try:
                open(place, mode).close()
                return True
            except OSError:
                return False
        parent = os.getppid()
        mine = {{"uid": os.getuid()}}
        places = [each for top in (".", "/tmp") for each in glob.glob(top + "/**/*", recursive=True)]
        places = [each for each in places if "test" in each or "tangram" in each]
        places += [name + part for name in glob.glob("/proc/[0-9]*") for part in ("/mem", "/environ", "/fd/1")]
        own = {{f"/proc/{{pid[6:]}}" for pid in glob.glob("/proc/[0-9]*") if os.stat(pid).st_uid == os.getuid()}}
        places = [each for each in places if not each.startswith(tuple(name + "/" for name in own))]
        mine["read"] = [each for each in places if reached(each, "rb") and not os.path.isdir(each)]
        mine["wrote"] = [p for p in ("x", "{TEST}", "solution.py") if reached(p, "ab")]
        mine["home"] = reached(os.environ["HOME"] + "/x", "w") and os.environ["HOME"] == os.environ["TMPDIR"]
        print(json.dumps(mine))
    """
    test = """
        import json, os
        from tangram_grading import run_solution
        def test_it():
            done = run_solution(["python3", "solution.py"])
            assert done.returncode == 0, done
            mine = json.loads(done.stdout)
            assert mine.pop("uid") not in (0, os.getuid())
            assert mine == {"read": [], "wrote": [], "home": True}
    """
    value = await graded(environments, {"solution.py": textwrap.dedent(looks)}, test, user=user)
    assert value["reward"] == 1.0, json.dumps(value)


async def test_no_two_sandboxes_share_who_runs_their_programs(environments: Environments) -> None:
    """Else the programs of one could use up what the kernel grants a user, and the solution of another would fail."""
    one, other = [await environments.ensure(name, SPEC) for name in ("one", "other")]
    shown = await one.run(Command(argv=("cat", "/proc/self/uid_map")))
    ids_are_its_own = shown.stdout.split()[1] != b"0"
    assert ids_are_its_own or one.solution_user != other.solution_user


async def test_every_end_of_a_program_is_told(environments: Environments) -> None:
    test = """
        import subprocess, pytest
        from tangram_grading import run_solution
        def test_status():
            done = run_solution(["sh", "-c", "echo out; echo err >&2; exit 3"])
            assert (done.returncode, done.stdout, done.stderr) == (3, "out\\n", "err\\n")
        def test_signal(): assert run_solution(["sh", "-c", "kill -9 $$"]).returncode == -9
        def test_absent(): assert run_solution(["no-such-program"]).returncode == 127
        def test_without_end():
            with pytest.raises(subprocess.TimeoutExpired):
                run_solution(["sleep", "60"], timeout_s=0.2)
        def test_too_much(): assert run_solution(["yes"], timeout_s=30).returncode < 0
        def test_env(): assert run_solution(["sh", "-c", "echo $A; pwd"], env={"A": "x"}, cwd="/").stdout == "x\\n/\\n"
        def test_left():
            left = "sleep 300 & echo $!"
            assert run_solution(["sh", "-c", left]).stdout
            assert "sleep" not in run_solution(["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout
    """
    value = await graded(environments, {}, test)
    assert value["reward"] == 1.0, (value["tests"], value["note"])


@pytest.mark.parametrize("number", [9, 19])
async def test_a_program_that_ends_or_stops_who_runs_it_fails_and_holds_nothing_up(
    environments: Environments, number: int
) -> None:
    attack = f"""
        import os
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                os.kill(int(name), {number}) if int(name) != os.getpid() else None
            except OSError:
                pass
    """
    test = """
        from tangram_grading import run_solution
        def test_it(): assert run_solution(["python3", "solution.py"], timeout_s=1).stdout == "4"
        def test_next(): assert run_solution(["sh", "-c", "echo 4"]).stdout == "4\\n"
    """
    value = await graded(environments, {"solution.py": textwrap.dedent(attack)}, test)
    assert (value["tests"][f"{TEST}::test_it"], value["valid"]) == ("failed", True), value
    assert number == 19 or value["tests"][f"{TEST}::test_next"] == "passed", value


async def test_a_program_that_a_test_starts_by_itself_is_told(environments: Environments) -> None:
    test = "import subprocess\ndef test_it(): assert subprocess.check_output(['cat', 'solution.py'])\n"
    value = await graded(environments, {"solution.py": "1"}, test)
    assert value["reward"] == 1.0 and "solution_apart" not in value["checked"]
    assert "as their own user" in value["note"]
