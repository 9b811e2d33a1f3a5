"""Options of a suite, its report, and its worker processes."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from typing import Any

import orjson
import pytest

from manager.errors import Reason
from manager.function import PytestSpec
from runtimes.sandbox.pytest.verdicts import SuiteReport, SuiteRequest, judge, notes
from tests.runtimes.sandbox.pytest.conftest import ARGS, FUNCTION, SuiteBench

#: One file cannot be imported, the other passes.
BROKEN = {
    "calc.py": "def f(:\n",
    "test_hard.py": """
        import pytest
        from calc import f
        @pytest.mark.parametrize("number", range(9))
        def test_hard(number): assert f(number)
    """,
    "test_easy.py": "def test_easy(): pass\n",
}
#: The first of three fails.
FAILING = {
    "test_a.py": """
        def test_a(): assert False
        def test_b(): pass
        def test_c(): pass
    """,
}

both = pytest.mark.parametrize("cores", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])


@both
@pytest.mark.parametrize("options", ["filterwarnings = error", "addopts = -W error", "filterwarnings =\n  error\n"])
async def test_a_project_that_makes_warnings_errors_is_judged(
    bench: SuiteBench, cores: tuple[int, ...], options: str
) -> None:
    tests = """
        import warnings, pytest
        def test_a(): pass
        def test_b():
            with pytest.raises(UserWarning):
                warnings.warn("told")
    """
    value = await bench.run({"pytest.ini": f"[pytest]\n{options}\n", "test_a.py": tests}, cores=cores)
    assert (value["reward"], value["counts"], value["note"]) == (1.0, {"passed": 2}, ""), bench.log.text("stdout")
    assert value["workers"] == len(cores)
    assert "cannot be rewritten" not in bench.log.text("stdout")


@both
async def test_a_named_plugin_is_loaded_where_warnings_are_errors(bench: SuiteBench, cores: tuple[int, ...]) -> None:
    files = {
        "pytest.ini": "[pytest]\nfilterwarnings = error\n",
        "named.py": "import pytest\n@pytest.fixture\ndef number(): return 1\n",
        "test_a.py": "def test_a(number): assert number == 1\ndef test_b(): pass\n",
    }
    value = await bench.run(files, cores=cores, args=["-p", "named"])
    assert value["counts"] == {"passed": 2}, bench.log.text("stdout")


@pytest.mark.parametrize("tests", [{"data.json": "{}"}, {"conftest.py": ""}, {"data.json": "{}", "__init__.py": ""}])
async def test_given_files_of_which_none_is_a_module_of_tests_are_a_mistake(
    bench: SuiteBench, tests: dict[str, str]
) -> None:
    failure = await bench.failure(files=FAILING, tests=tests)
    assert failure.reason is Reason.INVALID_INPUT
    assert "$.tests" in failure.message
    value = await bench.run(tests=tests, targets=["test_a.py"])
    assert value["counts"] == {"failed": 1, "passed": 2}


@both
async def test_a_file_that_cannot_be_imported_makes_a_suite_worth_nothing(
    bench: SuiteBench, cores: tuple[int, ...]
) -> None:
    value = await bench.run(BROKEN, cores=cores)
    assert (value["reward"], value["resolved"], value["valid"]) == (0.0, False, True)
    assert value["tests"] == {"test_hard.py": "error", "test_easy.py::test_easy": "passed"}
    assert "1 file(s) could not be collected: test_hard.py, so that the suite is worth 0.0" in value["note"]


@both
async def test_a_caller_may_count_a_file_that_cannot_be_imported_as_one_test(
    bench: SuiteBench, cores: tuple[int, ...]
) -> None:
    value = await bench.run(BROKEN, cores=cores, args=["--continue-on-collection-errors"])
    assert (value["reward"], value["counts"]) == (0.5, {"error": 1, "passed": 1})
    assert "worth 0.0" not in value["note"]


@both
async def test_a_listed_test_is_judged_beside_a_file_that_cannot_be_imported(
    bench: SuiteBench, cores: tuple[int, ...]
) -> None:
    lists: dict[str, Any] = {"fail_to_pass": ["test_easy.py::test_easy"], "targets": ["test_hard.py", "test_easy.py"]}
    value = await bench.run(BROKEN, cores=cores, **lists)
    assert (value["reward"], value["fail_to_pass"]["passed"]) == (1.0, ["test_easy.py::test_easy"])


@both
@pytest.mark.parametrize("option", ["-x", "--maxfail=1", "--exitfirst -q"])
async def test_a_tree_that_ends_at_its_first_failure_is_judged_to_its_end(
    bench: SuiteBench, cores: tuple[int, ...], option: str
) -> None:
    value = await bench.run(FAILING | {"pytest.ini": f"[pytest]\naddopts = {option}\n"}, cores=cores)
    assert value["counts"] == {"failed": 1, "passed": 2}


@pytest.mark.parametrize(
    ("of_function", "input"),
    [
        (("-x",), {}),
        ((), {"args": ["--maxfail", "1"]}),
        ((), {"args": ["-qx"]}),
        ((), {"env": {"PYTEST_ADDOPTS": "--exitfirst"}}),
    ],
)
async def test_a_caller_who_ends_at_the_first_failure_has_one_worker_and_one_verdict(
    bench: SuiteBench, of_function: tuple[str, ...], input: dict[str, object]
) -> None:
    function = replace(FUNCTION, pytest=PytestSpec(args=(*ARGS, *of_function)))
    value = await bench.run(FAILING, cores=(0, 1), function=function, **input)
    assert (value["workers"], value["reward"]) == (1, 0.0)
    assert value["counts"] == {"failed": 1, "missing": 2}


def fed(*lines: bytes | dict[str, object]) -> SuiteReport:
    report = SuiteReport("n")
    for line in lines:
        data = line if isinstance(line, bytes) else json.dumps({"nonce": "n", **line}).encode()
        report.feed(data + b"\n")
    return report


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"1" * 5000])
def test_lines_of_others_are_told_and_break_nothing(line: bytes) -> None:
    assert fed(line).doubts == ["somebody else wrote to the report"]


@pytest.mark.promise("An agent cannot turn its 0.0 into no reward by its files, disk, memory or names.")
def test_names_that_are_no_text_can_be_told() -> None:
    name = "tests/test_\udcff.py"
    report = fed(
        {"start": {"xdist": "", "workers": 1, "noticed": [f"{name} of the project was kept"]}},
        {"broken": name, "message": "no \udcff"},
        {"selected": [f"{name}::test_a"]},
        {"run": f"{name}::test_a"},
        {"test": f"{name}::test_a", "verdict": "failed"},
        {"turned": name},
        {"end": 1},
    )
    value = judge(SuiteRequest(), report)
    assert orjson.loads(orjson.dumps({**value, "note": notes(SuiteRequest(), report, value)}))["reward"] == 0.0
    assert "tests/test_\\udcff.py::test_a" in report.tests


@pytest.mark.parametrize("record", [{"end": 10**30}, {"end": -1}, {"start": {"xdist": "", "workers": 10**30}}])
def test_numbers_are_those_that_there_can_be(record: dict[str, object]) -> None:
    report = fed({"start": {"xdist": "", "workers": 2, "noticed": []}}, record)
    assert (report.end, report.workers) == (None, 2)


def test_a_suite_that_finds_no_place_of_its_own_is_worth_nothing() -> None:
    report = fed({"blocked": "no temporary file can be made"})
    assert (judge(SuiteRequest(), report)["reward"], bool(report.doubts)) == (0.0, True)


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(b'{"test": "forged"}\n', id="a verdict"),
        pytest.param(b"[" * 60_000, id="no message", marks=pytest.mark.slow),
        pytest.param(b"\x04\x00\x00\x00\x01\x7f\xff\xff\xff", id="a long message", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("when", ["imported", pytest.param("called", marks=pytest.mark.slow)])
async def test_what_a_suite_writes_between_processes_is_a_crash_and_no_wait(
    bench: SuiteBench, written: bytes, when: str
) -> None:
    """Descriptors that a worker has: on one it speaks with the process that begins it, in messages of its own."""
    said = f"""
        import os
        for fd in range(3, 64):
            try:
                os.write(fd, {written!r})
            except OSError:
                pass
    """
    calc = textwrap.dedent(said) + "def add(a, b): return 99\n"
    if when == "called":
        calc = "def add(a, b):\n" + textwrap.indent(textwrap.dedent(said), "    ") + "    return 99\n"
    test = "from calc import add\ndef test_one(): assert add(1, 1) == 2\ndef test_two(): assert add(1, 2) == 3\n"
    wanted = ["test_calc.py::test_one", "test_calc.py::test_two"]
    value = await bench.run({"calc.py": calc, "test_calc.py": test}, cores=(0, 1), fail_to_pass=wanted)
    assert (value["reward"], value["resolved"]) == (0.0, False)
    assert value["note"]


@pytest.mark.parametrize("cores", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
async def test_a_program_that_a_test_starts_reads_nothing_of_its_process(
    bench: SuiteBench, cores: tuple[int, ...]
) -> None:
    test = """
        import multiprocessing, os, subprocess, sys
        def test_program():
            for name in ("mem", "environ", "fd/1"):
                read = f"open('/proc/{os.getpid()}/{name}', 'rb')"
                told = subprocess.run([sys.executable, "-c", read], stderr=subprocess.PIPE)
                assert b"PermissionError" in told.stderr
        def test_itself():
            assert os.listdir("/proc/self/fd") and open("/proc/self/maps").read() and open("/proc/self/status").read()
            with open("/dev/fd/2", "ab"): pass
            child = multiprocessing.get_context("fork").Process(target=print)
            child.start()
            child.join()
            assert child.exitcode == 0
    """
    value = await bench.run({"test_own.py": test}, cores=cores)
    assert value["counts"] == {"passed": 2}, bench.log.text("stdout")
