"""A mistake of whoever asks for a reward is an error before anything of the agent's runs, and no reward of 0.0."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import pytest

from manager.errors import Reason
from manager.function import PytestSpec
from runtimes.sandbox.pytest.runtime import testless as without_tests
from runtimes.sandbox.pytest.runtime import undefined
from tests.runtimes.sandbox.pytest.conftest import ARGS, FUNCTION, SuiteBench

GIVEN = {"test_a.py": "def test_a(): pass\n"}
LISTED = ["test_a.py::test_a"]


@pytest.mark.parametrize(
    ("input", "path", "told"),
    [
        ({"args": ["--collect-only"]}, "$.args", "--collect-only"),
        ({"args": ["-q", "--co"]}, "$.args", "--co"),
        ({"args": ["-vh"]}, "$.args", "-vh"),
        ({"args": ["-o", "addopts=--fixtures -q"]}, "$.args", "--fixtures"),
        ({"env": {"PYTEST_ADDOPTS": "--setup-plan"}}, "$.env", "--setup-plan"),
        ({"fail_to_pass": ["test_a.py"]}, "$.fail_to_pass", "targets"),
        ({"fail_to_pass": ["./test_a.py::test_b"], "tests": GIVEN}, "$.fail_to_pass", "test_b"),
        ({"pass_to_pass": ["test_a.py::TestA::test_a"], "tests": GIVEN}, "$.pass_to_pass", "TestA"),
        ({"targets": ["test_a.py::test_b"], "tests": GIVEN}, "$.targets", "test_b"),
        ({"pass_to_pass": LISTED, "args": ["--deselect", "test_a.py::test_a"]}, "$.pass_to_pass", "--deselect"),
        ({"fail_to_pass": LISTED, "args": ["--ignore=./test_a.py"]}, "$.fail_to_pass", "--ignore"),
        ({"tests": {"test_b.py": "assert True\n"}}, "$.tests", "targets"),
    ],
)
async def test_it_is_invalid_input_whatever_the_agent_has_done(
    bench: SuiteBench, input: dict[str, Any], path: str, told: str
) -> None:
    agents = {"test_a.py": "def test_a(): pass", "conftest.py": "import os; open('ran', 'w').close(); os._exit(4)"}
    failure = await bench.failure(files=agents, **input)
    assert failure.reason is Reason.INVALID_INPUT
    assert path in str(failure.detail["path"]) and told in failure.message
    ran = await bench.environments.ensure("t1", None)
    assert "ran" not in {each.path for each in await ran.list_files(".")}, "nothing of the agent's ran"


async def test_options_of_the_function_are_looked_at_as_well(bench: SuiteBench) -> None:
    function = replace(FUNCTION, pytest=PytestSpec(args=(*ARGS, "--markers")))
    failure = await bench.failure(files=GIVEN, function=function)
    assert failure.reason is Reason.INVALID_INPUT and "pytest.args" in failure.message


async def test_an_option_that_pytest_does_not_know_is_no_reward_if_the_caller_has_it(bench: SuiteBench) -> None:
    by_caller = await bench.run(GIVEN, args=["--no-such-option"])
    assert (by_caller["reward"], by_caller["valid"], by_caller["exit_code"]) == (None, False, 4)
    assert "no-such-option" in by_caller["reason"]
    by_agent = await bench.run({**GIVEN, "pytest.ini": "[pytest]\naddopts = --no-such-option\n"})
    assert (by_agent["reward"], by_agent["valid"], by_agent["exit_code"]) == (0.0, True, 4)
    assert "no-such-option" in by_agent["note"]


async def test_what_the_agent_leaves_of_a_right_request_is_a_reward_of_0(bench: SuiteBench) -> None:
    files = {"conftest.py": "def pytest_collection_modifyitems(items): items.clear()\n"}
    value = await bench.run(files, tests=GIVEN, fail_to_pass=LISTED)
    assert (value["reward"], value["valid"]) == (0.0, True)


async def test_a_suite_without_xdist_may_be_asked_for(bench: SuiteBench) -> None:
    value = await bench.run(GIVEN, cores=(0, 1), fail_to_pass=LISTED, args=["-p", "no:xdist"])
    assert (value["reward"], value["workers"]) == (1.0, 1)


async def test_more_workers_than_may_run_are_told(bench: SuiteBench) -> None:
    value = await bench.run(GIVEN, workers=10**9, fail_to_pass=LISTED)
    assert (value["reward"], value["workers"]) == (1.0, 1)
    assert "1000000000 workers were asked for, of which pytest.max_workers allows 64" in value["note"]


#: What makes tests that its text does not name.
MADE_ELSEWHERE = {
    "a star": "from base import *",
    "a base": "from base import Base\nclass TestX(Base): pass",
    "a decorated class": "@ddt\nclass TestX:\n  def test_one(self): pass",
    "a decorated function": "class TestX(TestCase):\n  @parameterized.expand([1])\n  def test_o(self, n): pass",
    "globals": "for n in range(3): globals()[f'test_{n}'] = print",
    "a call": "from pytest_bdd import scenarios\nscenarios('x.feature')",
    "an import": "from base import TestX",
    "an assignment": "TestX = Machine.TestCase",
    "another grammar": "class TestX: nonsense here\n",
}


@pytest.mark.parametrize("text", MADE_ELSEWHERE.values(), ids=MADE_ELSEWHERE)
def test_a_test_that_may_be_made_elsewhere_is_not_missed(text: str) -> None:
    assert not undefined(["t/test_x.py::TestX::test_one"], {"t/test_x.py": textwrap.dedent(text)})


def test_only_what_a_given_file_shows_to_lack_is_missed() -> None:
    given = {"./t/test_x.py": "import pytest\nclass TestX:\n  def test_one(self): pass\ndef test_two(): pass\n"}
    there = ["t/test_x.py::TestX::test_one", "t/test_x.py::test_two[a::test_b]", "t/test_y.py::test_z", "t/test_x.py"]
    plugins = ["t/test_x.py::FLAKE8", "t/test_x.py::t.test_x.made"]
    assert not undefined([*there, *plugins], given)
    for id in ("t/test_x.py::test_three", "t/test_x.py::TestX::test_three", "t/test_x.py::TestY::test_one"):
        assert undefined([*there, id], given) == id
    hooks = {"t/conftest.py": "def pytest_pycollect_makeitem(name): ..."}
    assert not undefined(["t/test_x.py::test_three"], {**given, **hooks}), "a hook makes tests"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("import pytest\nassert 1 + 1 == 2\n", True),
        ("def check(candidate): assert candidate(1) == 2\n", True),
        ("def test_a(): pass\n", False),
        ("class A(unittest.TestCase):\n  def runTest(self): pass\n", False),
        ("from base import *\n", False),
        ("nonsense here", False),
    ],
)
def test_a_file_has_no_tests_if_nothing_in_it_is_called_one(text: str, expected: bool) -> None:
    assert without_tests(["test_a.py"], {"test_a.py": text}) is expected
    assert not without_tests([], {})


@pytest.mark.parametrize("cores", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize("asked", [{}, {"fail_to_pass": ["tests/test_given.py::test_a"]}])
async def test_a_given_file_that_is_no_python_is_its_givers_mistake(
    bench: SuiteBench, cores: tuple[int, ...], asked: dict[str, Any]
) -> None:
    files = {"tests/test_good.py": "def test_b(): pass\n", "./tests/test_given.py": "def test_a(: pass\n"}
    failure = await bench.failure(cores=cores, tests=files, **asked)
    assert failure.reason is Reason.INVALID_INPUT
    assert "$.tests: ./tests/test_given.py is no Python: invalid syntax, line 1" in failure.message


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tests/conftest.py", "raise SyntaxError('invalid syntax')"),
        ("code.py", "def broken(: pass"),
        ("conftest.py", "def pytest_collectstart(collector):\n    raise SyntaxError('invalid syntax')"),
    ],
)
async def test_a_project_that_is_no_python_stays_worth_nothing(bench: SuiteBench, path: str, text: str) -> None:
    given = {"tests/test_given.py": "import code\ndef test_a(): pass\n"}
    value = await bench.run({path: text, "tests/__init__.py": ""}, tests=given, targets=["tests/test_given.py"])
    assert value["reward"] == 0.0
