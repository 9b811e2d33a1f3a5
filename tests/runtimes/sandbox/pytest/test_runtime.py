"""The pytest runtime on small suites in real process sandboxes: whatever a suite does, its verdicts are told."""

from __future__ import annotations

import asyncio
import re
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from manager.errors import ActionFailed, Reason
from manager.function import PytestSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.pytest.runtime import PytestRuntime, PytestSettings
from runtimes.sandbox.sandbox import Sandbox
from tests.runtimes.recorder import execution_of
from tests.runtimes.sandbox.pytest.conftest import ARGS, FUNCTION, SPEC, SuiteBench

CALC = "def add(a, b):\n    return a {sign} b\n"
SUITE = {
    "calc.py": CALC.format(sign="-"),
    "tests/test_calc.py": """
        import calc
        def test_add(): assert calc.add(2, 2) == 4
        def test_zero(): assert calc.add(0, 0) == 0
        class TestMore:
            def test_left(self): assert calc.add(3, 0) == 3
    """,
}
LISTS: dict[str, Any] = {
    "fail_to_pass": ["tests/test_calc.py::test_add"],
    "pass_to_pass": ["tests/test_calc.py::test_zero", "tests/test_calc.py::TestMore::test_left"],
}


@pytest.mark.promise("A reward is the verdict of the tests.")
async def test_every_kind_of_verdict_is_told_apart(bench: SuiteBench) -> None:
    value = await bench.run(
        {
            "test_kinds.py": """
            import pytest
            def test_passed(): pass
            def test_failed(): assert False
            def test_skipped(): pytest.skip()
            @pytest.mark.xfail
            def test_xfailed(): assert False
            @pytest.mark.xfail
            def test_xpassed(): pass
            @pytest.mark.xfail(strict=True)
            def test_strict(): pass
            @pytest.fixture
            def broken(): raise RuntimeError
            def test_setup(broken): pass
            @pytest.fixture
            def leaky():
                yield
                raise RuntimeError
            def test_teardown(leaky): pass
        """
        }
    )
    assert {id.partition("::")[2]: verdict for id, verdict in value["tests"].items()} == {
        "test_passed": "passed",
        "test_failed": "failed",
        "test_skipped": "skipped",
        "test_xfailed": "xfailed",
        "test_xpassed": "xpassed",
        "test_strict": "failed",
        "test_setup": "error",
        "test_teardown": "error",
    }
    assert value["reward"] == pytest.approx(1 / 8)
    assert value["resolved"] is False


@pytest.mark.parametrize("cores", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
async def test_ids_with_odd_characters_are_selected_exactly(bench: SuiteBench, cores: tuple[int, ...]) -> None:
    odd = ["a b", "x::y", "[z]", "p/q", "ünï", "new\nline", "-k", "quo'te\"", "$HOME;ls", "a@b"]
    source = f"""
        import pytest
        @pytest.mark.parametrize("v", {odd!r}, ids={odd!r})
        def test_odd(v): assert v
        @pytest.mark.parametrize("v", {odd!r}, ids={odd!r})
        def test_other(v): assert False
    """
    everything = await bench.run({"tests/test_odd.py": source}, cores=cores)
    ids = [id for id in everything["tests"] if "::test_odd[" in id]
    assert len(ids) == len(odd) and everything["counts"] == {"passed": 10, "failed": 10}
    chosen = await bench.run(cores=cores, fail_to_pass=ids)
    assert chosen["tests"] == dict.fromkeys(ids, "passed")
    assert (chosen["reward"], chosen["note"]) == (1.0, "")
    plain = "tests/test_odd.py::test_odd[ünï]"
    assert (await bench.run(cores=cores, fail_to_pass=[plain]))["tests"] == {plain: "passed"}


async def test_targets_choose_directories_files_classes_and_tests(bench: SuiteBench) -> None:
    await bench.write(SUITE | {"calc.py": CALC.format(sign="+"), "other/test_no.py": "def test_no(): assert False"})
    for targets, count in (
        (["tests"], 3),
        (["./tests/test_calc.py"], 3),
        (["tests/test_calc.py::TestMore"], 1),
        (["tests/test_calc.py::test_add"], 1),
        (["."], 4),
    ):
        assert len((await bench.run(targets=targets))["tests"]) == count, targets
    none = await bench.run(targets=["tests/test_calc.py::test_ad", "no/such/dir"])
    assert none["tests"] == {"tests/test_calc.py::test_ad": "missing"}
    assert (none["reward"], none["resolved"], none["valid"]) == (None, None, False)


@pytest.mark.promise("A suite that found none of the requested tests has no reward, and a reason, never a silent zero.")
@pytest.mark.parametrize(
    ("input", "reason"),
    [
        ({"targets": ["tests/other.py"]}, "no test was collected"),
        ({"targets": ["tests"]}, "no test was collected"),
        (LISTS, r"none of the 3 listed test\(s\) was found: tests/test_calc.py::test_add"),
        ({**LISTS, "cwd": "elsewhere"}, "working directory: .*elsewhere: No such file"),
    ],
)
async def test_a_suite_that_found_nothing_asked_for_has_no_reward(
    bench: SuiteBench, input: dict[str, Any], reason: str
) -> None:
    """As after an upload that went elsewhere."""
    files = {f"elsewhere-than-asked/{path}": text for path, text in SUITE.items()} | {"tests/other.py": ""}
    value = await bench.run(files, cores=(0, 1), **input)
    assert (value["reward"], value["resolved"], value["valid"]) == (None, None, False)
    assert re.search(reason, value["reason"]) and "xdist" not in value["note"]
    zero = replace(FUNCTION, pytest=PytestSpec(args=ARGS, missing="zero"))
    value = await bench.run(function=zero, **input)
    assert (value["reward"], value["valid"], value["reason"]) == (0.0, True, "")


async def test_tests_that_came_with_the_request_and_are_not_found_are_the_agents_doing(bench: SuiteBench) -> None:
    tests = {"tests/test_calc.py": textwrap.dedent(SUITE["tests/test_calc.py"])}
    files = {"calc.py": CALC.format(sign="+")}
    value = await bench.run(files, tests=tests, **LISTS)
    assert (value["reward"], value["note"]) == (1.0, "")
    assert {"tests_given", "swept", "clean_start", "report_whole"} <= set(value["checked"])
    hidden = "def pytest_collection_modifyitems(items): items.clear()\n"
    value = await bench.run({"conftest.py": hidden}, tests=tests, **LISTS)
    assert (value["reward"], value["valid"]) == (0.0, True)
    assert "3 requested test(s) did not run" in value["note"]


async def test_a_root_elsewhere_does_not_change_the_names(bench: SuiteBench) -> None:
    files = {"sub/pytest.ini": "[pytest]\n", "sub/tests/test_x.py": "def test_x(): pass"}
    value = await bench.run(files, fail_to_pass=["sub/tests/test_x.py::test_x"])
    assert (value["reward"], value["tests"]) == (1.0, {"sub/tests/test_x.py::test_x": "passed"})


@pytest.mark.parametrize(
    "statement", ["import os; os._exit(0)", "import sys; sys.exit(0)", "import pytest; pytest.exit('', 0)"]
)
async def test_exit_zero_without_the_requested_tests_is_no_pass(bench: SuiteBench, statement: str) -> None:
    value = await bench.run(SUITE | {"calc.py": CALC.format(sign="+"), "tests/conftest.py": statement}, **LISTS)
    assert (value["reward"], value["resolved"]) == (0.0, False)
    assert set(value["tests"].values()) == {"missing"}
    assert "3 requested test(s) did not run" in value["note"]


CRASH = {
    "test_crash.py": """
        import os
        def test_a(): pass
        def test_b(): os._exit(0)
        def test_c(): pass
        def test_d(): os.kill(os.getpid(), 11)
        def test_e(): pass
    """
}


@pytest.mark.parametrize("cores", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
async def test_a_test_that_ends_its_process_costs_no_other_verdict(bench: SuiteBench, cores: tuple[int, ...]) -> None:
    value = await bench.run(CRASH, cores=cores)
    assert {id[-1]: verdict for id, verdict in sorted(value["tests"].items())} == {
        "a": "passed",
        "b": "error",
        "c": "passed",
        "d": "error",
        "e": "passed",
    }
    assert value["reward"] == pytest.approx(3 / 5)
    assert ("exit code 0" in value["note"]) == (len(cores) == 1)  # pytest-xdist replaces its workers itself


HANG = {
    "test_hang.py": """
        def test_a(): pass
        def test_b():
            while True: pass
        def test_c(): pass
    """
}


@pytest.mark.promise("A suite that times out keeps the verdicts known so far.")
async def test_a_timeout_keeps_the_verdicts_known_so_far(bench: SuiteBench) -> None:
    failure = await bench.failure(files=HANG, function=replace(FUNCTION, timeout_s=8.0))
    assert failure.reason is Reason.TIMEOUT
    assert failure.usage["cpu_s"] > 0.0 and failure.usage["tests"] == 1
    assert "under way: test_hang.py::test_b" in failure.message
    assert isinstance(failure.result, dict)
    assert failure.result["tests"] == {
        "test_hang.py::test_a": "passed",
        "test_hang.py::test_b": "missing",
        "test_hang.py::test_c": "missing",
    }
    assert failure.result["reward"] is None


@pytest.mark.parametrize("cores", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
async def test_a_tests_own_timeout_fails_it_and_spares_the_others(bench: SuiteBench, cores: tuple[int, ...]) -> None:
    value = await bench.run(HANG, cores=cores, test_timeout_s=0.3)
    assert sorted(value["tests"].items()) == [
        ("test_hang.py::test_a", "passed"),
        ("test_hang.py::test_b", "failed"),
        ("test_hang.py::test_c", "passed"),
    ]
    assert "ran longer than 0.3 s" in bench.log.text("stdout")


async def test_cancelling_is_a_cancellation_and_at_the_timeout_a_failure_with_verdicts(bench: SuiteBench) -> None:
    await bench.write(HANG)
    for timeout_s, expected in ((60.0, asyncio.CancelledError), (0.1, ActionFailed)):
        execution, log = execution_of(FUNCTION, {}, trajectory="t1")
        began = asyncio.Event()
        log.write = lambda stream, data, began=began: began.set()  # type: ignore[method-assign,misc]  # to know it runs
        task = asyncio.create_task(bench.runtime.execute(execution))
        async with asyncio.timeout(120.0):
            await began.wait()
        execution.action = replace(execution.action, timeout_s=timeout_s)
        task.cancel()
        with pytest.raises(expected):
            await task


async def test_a_file_that_cannot_be_collected_is_told(bench: SuiteBench) -> None:
    files = SUITE | {
        "calc.py": CALC.format(sign="+"),
        "tests/test_broken.py": "import no_such_module\ndef test_x(): pass",
    }
    value = await bench.run(files)
    assert value["tests"]["tests/test_broken.py"] == "error"
    assert "no_such_module" in value["collection_errors"]["tests/test_broken.py"]
    listed = await bench.run(fail_to_pass=["tests/test_broken.py::test_x"])
    assert listed["tests"] == {"tests/test_broken.py::test_x": "error"}
    assert "1 file(s) could not be collected: tests/test_broken.py" in listed["note"]


async def test_a_broken_configuration_is_no_reward_and_says_so(bench: SuiteBench) -> None:
    value = await bench.run(SUITE | {"pytest.ini": "[pytest]\naddopts = --no-such-option\n"}, **LISTS)
    assert (value["reward"], value["exit_code"]) == (0.0, 4)
    assert "--no-such-option" in value["note"]


async def test_without_xdist_one_process_is_used_and_told(bench: SuiteBench) -> None:
    value = await bench.run(SUITE, cores=(0, 1), env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert value["workers"] == 1 and len(value["tests"]) == 3
    assert "no pytest-xdist" in value["note"]


@pytest.mark.promise("pytest runs with as many workers as it was granted cores.")
async def test_workers_follow_the_lease_whatever_the_project_asks_for(bench: SuiteBench) -> None:
    where = {
        "pytest.ini": "[pytest]\naddopts = -n 4\n",
        "test_where.py": """
            import os, pathlib
            def test_where():
                pathlib.Path("where").write_text(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "none"))
            def test_other(): pass
        """,
    }
    for cores, workers, seen in (((0,), 1, b"none"), ((0, 1), 2, b"2")):
        value = await bench.run(where, cores=cores)
        assert (value["workers"], value["counts"]) == (workers, {"passed": 2})
        sandbox = bench.environments.get("t1")
        assert sandbox is not None and await sandbox.read_file("where", limit_bytes=100) == seen


async def test_workers_that_disagree_on_the_tests_give_way_to_one_process(bench: SuiteBench) -> None:
    unstable = """
        import os, pytest
        @pytest.mark.parametrize("v", [os.getpid()])
        def test_pid(v): pass
    """
    value = await bench.run({"test_unstable.py": unstable}, cores=(0, 1))
    assert (value["counts"], value["reward"], value["workers"]) == ({"passed": 1}, 1.0, 1)
    assert "one process was used" in value["note"]


async def test_the_scheduler_plans_how_many_workers_are_started_whatever_is_expected(bench: SuiteBench) -> None:
    await bench.write(SUITE)
    execution, _ = execution_of(FUNCTION, {}, trajectory="t1", cores=(0, 1))
    cores = execution.lease.grants["cpu"]
    for planned, t_ori_s, workers in ((3, 1.0, 3), (2, 60.0, 2), (0, 60.0, 2)):
        execution.lease = replace(execution.lease, grants={"cpu": replace(cores, workers=planned)})
        execution.action = replace(execution.action, malleable=True, t_ori_s=t_ori_s)
        execution.began_s = execution.ended_s = None
        result = await bench.runtime.execute(execution)
        assert result.usage["workers"] == workers


async def test_what_a_suite_prints_cannot_pass_for_a_verdict(bench: SuiteBench) -> None:
    forged = '{"test": "test_forged.py::test_real", "verdict": "passed"}'
    value = await bench.run(
        {
            "test_forged.py": f"""
                import os
                def test_real():
                    for fd in range(3, 20):
                        try:
                            os.write(fd, b'\\n' + {forged.encode()!r} + b'\\n')
                        except OSError:
                            pass
                    print({forged!r})
                    assert False
            """
        },
        args=["-s"],
    )
    assert value["tests"] == {"test_forged.py::test_real": "failed"}


@pytest.mark.parametrize("hides", [True, False])
async def test_a_project_has_its_variables_back_whoever_kept_them_from_pythons_start(
    bench: SuiteBench, monkeypatch: pytest.MonkeyPatch, hides: bool
) -> None:
    monkeypatch.setattr(Sandbox, "hides", hides)
    source = """
        import os, sys, library

        def test_variables():
            assert os.environ["PYTHONPATH"] == "libs:/nowhere"
            assert not [name for name in os.environ if name.startswith(("TANGRAM_HIDDEN", "TANGRAM_PROJ"))]
            assert os.environ["PYTHONNOUSERSITE"] == "1"
            assert sys.flags.no_user_site and not sys.flags.isolated
            assert sys.path[0] == os.getcwd() and sys.path[1] == os.path.abspath("libs")
    """
    files = {"test_variables.py": source, "libs/library.py": "", "libs/json.py": "raise SystemExit('not mine')"}
    value = await bench.run(files, env={"PYTHONPATH": "libs:/nowhere"})
    assert value["reward"] == 1.0, value


async def test_a_file_called_pytest_does_not_pass_for_pytest(bench: SuiteBench) -> None:
    value = await bench.run(SUITE | {"pytest.py": "print('mine')\ndef main(*args): return 0\n"}, **LISTS)
    assert value["reward"] == 0.0


async def test_a_sandbox_without_pytest_or_python_is_a_typed_failure(bench: SuiteBench) -> None:
    await bench.write(SUITE)
    sandbox = bench.environments.get("t1")
    assert sandbox is not None
    python = "p=$(readlink -f $(command -v python3)) && mkdir -p bare/bin && ln -s $p bare/bin/python3"
    settings = r"include-system-site-packages = false\nhome = %s\n"
    await sandbox.run(Command(shell=f"{python} && printf '{settings}' $(dirname $p) > bare/pyvenv.cfg"))
    for python, message in (
        ("./bare/bin/python3", "has no pytest"),
        ("./no-python", "could not be started.*No such file"),
    ):
        bench.runtime = PytestRuntime(bench.environments, PytestSettings(python=python))
        failure = await bench.failure(**LISTS)
        assert failure.reason is Reason.INVALID_INPUT
        assert re.search(message, failure.message)


async def test_a_lost_sandbox_keeps_the_verdicts_known_so_far(bench: SuiteBench) -> None:
    await bench.write(HANG)
    execution, log = execution_of(FUNCTION, {}, trajectory="t1")
    began = asyncio.Event()
    log.write = lambda stream, data: began.set()  # type: ignore[method-assign]  # to know when it runs
    task = asyncio.create_task(bench.runtime.execute(execution))
    async with asyncio.timeout(120.0):
        await began.wait()
        sandbox = bench.environments.get("t1")
        assert sandbox is not None
        await sandbox.close()
        with pytest.raises(ActionFailed) as failure:
            await task
    assert failure.value.reason is Reason.ENVIRONMENT_LOST
    assert isinstance(failure.value.result, dict) and failure.value.result["reward"] is None


async def test_a_huge_result_is_told_by_what_did_not_pass(bench: SuiteBench) -> None:
    source = """
        import pytest
        @pytest.mark.parametrize("n", range(200))
        def test_many(n): assert n != 7
    """
    value = await bench.run({"test_many.py": source}, function=replace(FUNCTION, output_limit_bytes=2000))
    assert value["tests"] == {"test_many.py::test_many[7]": "failed"}
    assert value["counts"] == {"failed": 1, "passed": 199}
    assert "199 passed tests are left out" in value["note"]


@pytest.mark.parametrize(
    ("input", "path"),
    [
        ({"tests": ["x"]}, "$.tests"),
        ({"targets": "x"}, "$.targets"),
        ({"fail_to_pass": ["/abs/test_x.py::t"]}, "$.fail_to_pass"),
        ({"env": {"A": 1}}, "$.env"),
        ({"cwd": 3}, "$.cwd"),
        ({"workers": -1}, "$.workers"),
    ],
)
async def test_bad_input_names_its_path(bench: SuiteBench, input: dict[str, object], path: str) -> None:
    execution, _ = execution_of(FUNCTION, input, trajectory="t1")
    with pytest.raises(ActionFailed) as failure:
        await bench.runtime.execute(execution)
    assert (failure.value.reason, failure.value.detail) == (Reason.INVALID_INPUT, {"path": path})


async def test_the_end_of_what_a_loud_suite_says_is_told_however_much_came_before(bench: SuiteBench) -> None:
    bench.runtime = PytestRuntime(bench.environments, PytestSettings(output_max_bytes=20_000))
    source = """
        import os
        os.write(2, b"x" * 100_000)
        raise ValueError("last words")
    """
    quiet = replace(FUNCTION, log_limit_bytes=1000)
    value = await bench.run({"conftest.py": source}, function=quiet)
    assert "last words" in value["note"]
    assert bench.log.omitted_bytes >= 80_000


@pytest.mark.promise("An agent cannot turn its 0.0 into no reward by its files, disk, memory or names.")
@pytest.mark.parametrize("grade", ["same_sandbox", "fresh"])
async def test_a_sandbox_that_was_ended_for_what_its_agent_did_is_worth_nothing(bench: SuiteBench, grade: Any) -> None:
    await bench.write(SUITE)
    sandbox = bench.environments.get("t1")
    assert sandbox is not None
    await sandbox.kill_for("its disk bound is exceeded")
    function = replace(FUNCTION, pytest=PytestSpec(args=ARGS, grade=grade))
    execution, _ = execution_of(function, LISTS, trajectory="t1", cores=(0,))
    value = (await bench.runtime.execute(execution)).value
    assert isinstance(value, dict)
    assert (value["reward"], value["valid"], value["graded"]) == (0.0, True, grade)
    assert "its disk bound is exceeded" in value["note"]
    with pytest.raises(ActionFailed, match="died"):  # and the next action is told that the files are gone
        await bench.environments.ensure("t1", SPEC)


async def test_a_test_that_takes_pythons_own_functions_away_spoils_no_verdict(bench: SuiteBench) -> None:
    text = "import json, os\ndef test_a(): json.dumps = None\ndef test_b(): os.write = None\ndef test_c(): pass\n"
    value = await bench.run({"test_odd.py": text})
    assert (value["reward"], value["counts"], value["note"]) == (1.0, {"passed": 3}, "")
