"""Verdicts are plain pytest's, only ``passed`` is a pass, and what a function ignores is out of the count."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from manager.function import PytestSpec
from runtimes.sandbox.pytest.verdicts import SuiteReport, SuiteRequest, judge, notes
from tests.runtimes.sandbox.pytest.conftest import ARGS, FUNCTION, SuiteBench

IGNORING = PytestSpec(args=ARGS, ignore=("skipped", "xfailed"))
HELPERS = """
    import contextlib, unittest
    import pytest
    @contextlib.contextmanager
    def needed(there):
        if not there:
            pytest.skip("not there")
        yield
    def need(there):
        if not there: raise unittest.SkipTest("not there")
"""
#: A hook of the project's own plugin, which lies around each test.
PLUGIN = """
    def pytest_pyfunc_call(pyfuncitem):
        names = pyfuncitem._fixtureinfo.argnames
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
        return True
"""
CONFTEST = """
    import pytest
    from plugged import pytest_pyfunc_call
    @pytest.fixture(scope="session")
    def absent(): pytest.skip("no such machine")
    @pytest.fixture
    def skipper(): return lambda: pytest.skip("asked for")
    def pytest_collection_modifyitems(items):
        for item in items:
            if "marked_by_hook" in item.nodeid: item.add_marker(pytest.mark.skip(reason="hook"))
    def pytest_runtest_setup(item):
        if "skipped_by_hook" in item.nodeid: pytest.skip("hook")
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(item):
        yield
"""
FUNCTIONS = """
    import sys
    from unittest import SkipTest as NotHere
    import pytest
    import unittest
    from helpers import need, needed
    slow = pytest.mark.skipif(True, reason="slow")
    leave = pytest.skip
    class NotYet(unittest.SkipTest): pass
    def test_passed(): pass
    @pytest.mark.skip
    def test_s_mark(): assert False
    @pytest.mark.skipif(sys.version_info > (3,), reason="old")
    def test_s_skipif(): assert False
    @slow
    def test_s_alias_of_a_mark(): assert False
    @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.skip)])
    def test_parameter(a): assert a == 1
    def test_s_call():
        pytest.skip(
            "over "
            "lines"
        )
    def test_s_alias(): leave("x")
    def test_s_class(): raise pytest.skip.Exception("x")
    def test_s_renamed(): raise NotHere("x")
    def test_s_derived(): raise NotYet("x")
    def test_s_unittests(): raise unittest.SkipTest
    def test_s_import(): assert pytest.importorskip("no_such_module").f() == 1
    def test_s_except():
        try:
            import no_such_module
        except ImportError:
            pytest.skip("no such module")
    def test_s_nested():
        def inner():
            if True: pytest.skip("x")
        (lambda: inner())()
    def test_s_context():
        with needed(False): assert False
    def test_s_helper(): need(False)
    def test_s_fixture(absent): pass
    def test_s_fixture_again(absent): pass
    def test_s_value(request): request.getfixturevalue("absent")
    def test_s_function_of_a_fixture(skipper): skipper()
    def test_s_marked_by_hook(): assert False
    def test_s_skipped_by_hook(): assert False
    def test_x_call(): pytest.xfail("known")
    @pytest.mark.xfail
    def test_x_mark(): assert False
    @pytest.mark.xfail(run=False)
    def test_x_not_run(): assert False
    class TestSetUp:
        def setup_method(self): pytest.skip("x")
        def test_s_set_up(self): pass
"""
CASES = """
    import unittest
    from unittest import skipUnless
    try:
        from test.support.import_helper import import_module
    except ImportError:
        def import_module(name): raise unittest.SkipTest(name)
    class Mixin:
        def test_s_inherited(self): self.skipTest("x")
    class Named(unittest.TestCase):
        failureException = AssertionError
        def test_passed(self): pass
        def test_s_call(self): self.skipTest("x")
        def test_s_super(self): super().skipTest("x")
        def test_s_raise(self): raise unittest.SkipTest("x")
        @unittest.skip("x")
        def test_s_mark(self): assert False
        @skipUnless(False, "x")
        def test_s_unless(self): assert False
        def test_s_library(self): import_module("no_such_module")
        @unittest.expectedFailure
        def test_x_expected(self): self.fail("known")
        def test_s_later(self): assert False
        test_s_later = unittest.skip("x")(test_s_later)
    class Derived(Mixin, unittest.TestCase): pass
    @unittest.skipIf(True, "x")
    class Whole(unittest.TestCase):
        def test_s_class(self): assert False
    class SetUp(unittest.TestCase):
        def setUp(self): self.skipTest("x")
        def test_s_set_up(self): pass
    class SetUpClass(unittest.TestCase):
        @classmethod
        def setUpClass(cls): raise unittest.SkipTest("x")
        def test_s_set_up_class(self): pass
    class Async(unittest.IsolatedAsyncioTestCase):
        async def test_s_async(self): self.skipTest("x")
    for name in ("test_s_looped",):
        setattr(Named, name, unittest.skip("x")(lambda self: None))
"""
MODULES = {
    "tests/test_marked.py": "import pytest\npytestmark = pytest.mark.skip\ndef test_s_module(): assert False\n",
    "tests/marking.py": "import pytest\nneeds_gpu = pytest.mark.skipif(True, reason='x')\n",
    "tests/test_needs.py": "from marking import needs_gpu\npytestmark = [needs_gpu]\ndef test_s_needs(): assert 0\n",
    "tests/test_absent.py": "import pytest\nnp = pytest.importorskip('no_such_module')\ndef test_s_a(): pass\n",
    "tests/test_raised.py": "import unittest\nraise unittest.SkipTest('x')\n",
}
OWN = {
    "tests/helpers.py": HELPERS,
    "tests/conftest.py": CONFTEST,
    "tests/test_functions.py": FUNCTIONS,
    "tests/test_cases.py": CASES,
    **MODULES,
}
GIVEN = {path: textwrap.dedent(text) for path, text in OWN.items()}


@pytest.mark.parametrize(
    ("spec", "given", "cores"),
    [
        (PytestSpec(args=ARGS), False, (0,)),
        (IGNORING, True, (0, 1)),
        (replace(IGNORING, grade="fresh", tree_options="ignore"), True, (0,)),
    ],
    ids=["uploaded", "given_to_workers", "fresh"],
)
async def test_whatever_skips_or_expects_a_failure_has_pytests_verdict(
    bench: SuiteBench, spec: PytestSpec, given: bool, cores: tuple[int, ...]
) -> None:
    await bench.write({"plugged.py": PLUGIN, **({} if given else OWN)})
    value = await bench.run(
        function=replace(FUNCTION, pytest=spec),
        cores=cores,
        env={"PYTHONPATH": "tests"},
        **({"tests": GIVEN} if given else {}),
    )
    told = {id: verdict for id, verdict in value["tests"].items() if verdict != _wanted(id)}
    assert told == {}, value["note"]
    assert value["counts"]["passed"] == 3 and value["counts"]["xfailed"] == 4
    assert (
        value["counts"]["skipped"] == sum(text.count("def test_s_") for text in (FUNCTIONS, CASES)) + 6
    )  # inherited, parameter, modules
    assert value["counts"].keys() == {"passed", "skipped", "xfailed"}
    if spec.ignore:
        assert (value["reward"], value["resolved"], value["note"]) == (1.0, True, "")
    else:
        assert (value["reward"], value["resolved"]) == (pytest.approx(3 / len(value["tests"])), False)
        assert "4 test(s) xfailed, which is no pass" in value["note"]


def _wanted(id: str) -> str:
    if "::test_x_" in id:
        return "xfailed"
    return "passed" if "::test_passed" in id or id.endswith("::test_parameter[1]") else "skipped"


TESTED = """
    import unittest
    import pytest
    import calc
    def test_easy(): assert calc.easy() == 1
    def test_hard(): assert calc.hard() == 1
    class TestCase(unittest.TestCase):
        def test_hard(self): assert calc.hard() == 1
"""


@pytest.mark.promise(
    "Only `passed` is a pass: a skip or an expected failure is paid only where the function ignores it."
)
@pytest.mark.parametrize("cores", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("raising", "verdict"),
    [
        ("pytest.skip('x')", "skipped"),
        ("pytest.xfail('x')", "xfailed"),
        ("(_ for _ in ()).throw(unittest.SkipTest('x'))", "skipped"),
    ],
)
async def test_what_is_tested_does_not_get_out_of_a_share(
    bench: SuiteBench, raising: str, verdict: str, cores: tuple[int, ...]
) -> None:
    code = f"import pytest, unittest\ndef easy(): return 1\ndef hard(): return {raising}\n"
    value = await bench.run({"calc.py": code, "test_calc.py": TESTED}, cores=cores)
    assert value["reward"] == pytest.approx(1 / 3)
    assert value["counts"] == {verdict: 2, "passed": 1}
    assert f"2 test(s) {verdict}, which is no pass" in value["note"]
    assert "report_whole" in value["checked"]


async def test_a_listed_test_must_pass(bench: SuiteBench) -> None:
    code = "import pytest\ndef easy(): return 1\ndef hard(): pytest.xfail('known')\n"
    lists: dict[str, Any] = {"fail_to_pass": ["test_calc.py::test_hard"], "pass_to_pass": ["test_calc.py::test_easy"]}
    for spec in (PytestSpec(args=ARGS), IGNORING):
        function = replace(FUNCTION, pytest=spec)
        value = await bench.run({"calc.py": code, "test_calc.py": TESTED}, function=function, **lists)
        assert (value["reward"], value["fail_to_pass"]["failed"]) == (0.0, lists["fail_to_pass"])
        assert "1 test(s) xfailed, which is no pass: test_calc.py::test_hard" in value["note"]


async def test_a_module_that_what_it_imports_skips_is_a_skipped_test(bench: SuiteBench) -> None:
    files = {
        "calc.py": "import unittest\nraise unittest.SkipTest('later')\n",
        "test_calc.py": "import calc\ndef test_hard(): assert calc.hard() == 1",
        "test_other.py": "def test_other(): pass",
    }
    value = await bench.run(files)
    assert value["tests"] == {"test_calc.py": "skipped", "test_other.py::test_other": "passed"}
    assert (value["reward"], value["resolved"], value["valid"]) == (0.5, False, True)
    assert "1 file(s) skipped themselves when they were imported: test_calc.py" in value["note"]
    value = await bench.run(fail_to_pass=["test_calc.py::test_hard"])
    assert (value["reward"], value["valid"], value["tests"]) == (0.0, True, {"test_calc.py::test_hard": "skipped"})
    assert "later" in value["note"]


async def test_a_file_that_skips_itself_is_told(bench: SuiteBench) -> None:
    absent = "import pytest\nnp = pytest.importorskip('no_such_library')\ndef test_x(): pass\n"
    await bench.write({"test_absent.py": absent})
    tests: dict[str, Any] = {"tests": {"test_absent.py": absent}}
    for given in ({}, tests):
        value = await bench.run(**given)
        assert (value["reward"], value["valid"]) == (0.0, True)
        assert "1 file(s) skipped themselves when they were imported: test_absent.py" in value["note"]
        assert "no_such_library" in value["note"]
    both: dict[str, Any] = {"targets": ["test_absent.py", "test_there.py"]}
    value = await bench.run({"test_there.py": "def test_y(): pass"}, **both)
    assert value["reward"] == 0.5
    value = await bench.run(function=replace(FUNCTION, pytest=IGNORING), **both)
    assert (value["reward"], value["note"]) == (1.0, "")


async def test_a_case_whose_failure_unittest_drops_has_failed(bench: SuiteBench) -> None:
    """unittest swallows ``_ShouldStop``, with which it ends a case of subtests."""
    test = """
        import unittest
        from calc import WrongError
        class TestCalc(unittest.TestCase):
            def test_own_error(self): raise WrongError
            def test_subtests(self):
                for number in (1, 2):
                    with self.subTest(number=number): self.assertEqual(number, number)
            def test_dropped_in_subtests(self):
                with self.subTest(number=1): pass
                raise WrongError
            @unittest.expectedFailure
            def test_expected_in_subtests(self):
                with self.subTest(number=1): self.fail("known")
            def test_skipped_subtest(self):
                with self.subTest(number=1): self.skipTest("x")
    """
    value = await bench.run({"calc.py": "from unittest.case import _ShouldStop as WrongError", "test_calc.py": test})
    assert {id.rpartition("::")[2]: verdict for id, verdict in value["tests"].items()} == {
        "test_own_error": "failed",
        "test_dropped_in_subtests": "failed",
        "test_subtests": "passed",
        "test_expected_in_subtests": "xfailed",
        "test_skipped_subtest": "passed",
    }


@pytest.mark.promise("A reward below 1 has a note.")
async def test_a_share_below_one_says_what_did_not_pass(bench: SuiteBench) -> None:
    value = await bench.run({"test_x.py": "def test_a(): assert 0\ndef test_b(): pass"})
    assert (value["reward"], value["note"]) == (0.5, "1 test(s) did not pass: test_x.py::test_a")


@pytest.mark.promise("Only given tests count where tests are given.")
async def test_only_the_tests_that_came_with_the_request_count(bench: SuiteBench) -> None:
    mine = {
        "calc.py": "def hard(): return 0",
        "test_a.py": "import calc\ncalc.hard = lambda: 1\ndef test_mine(): pass",
        "test_many.py": "import pytest\n@pytest.mark.parametrize('n', range(50))\ndef test_mine(n): pass",
    }
    tests = {
        "test_s.py": "import calc\nfrom data import WANTED\ndef test_hard(): assert calc.hard() == WANTED\n",
        "data.py": "WANTED = 1\n",
    }
    value = await bench.run(mine, tests=tests)
    assert (value["reward"], value["tests"]) == (0.0, {"test_s.py::test_hard": "failed"})
    value = await bench.run(mine | {"calc.py": "def hard(): return 1"}, tests=tests)
    assert (value["reward"], value["tests"]) == (1.0, {"test_s.py::test_hard": "passed"})


async def test_tests_by_another_name_are_run_where_none_is_named_as_usual(bench: SuiteBench) -> None:
    value = await bench.run({}, tests={"suite/check.py": "def test_x(): pass\n", "conftest.py": "", "data.json": "{}"})
    assert value["tests"] == {"suite/check.py::test_x": "passed"}


async def test_a_test_by_two_spellings_is_run_once(bench: SuiteBench) -> None:
    listed = ["test_s.py::test_a", "./test_s.py::test_a", "sub/../test_s.py::test_a"]
    files = {"test_s.py": "def test_a(): pass", "sub/test_b.py": "def test_b(): pass"}
    value = await bench.run(files, fail_to_pass=listed, pass_to_pass=listed[:1])
    assert (value["reward"], value["fail_to_pass"]["passed"], value["note"]) == (1.0, listed, "")
    value = await bench.run(targets=[".", "sub", "./sub/", "test_s.py"])
    assert (value["reward"], value["counts"], value["note"]) == (1.0, {"passed": 2}, "")


def judged(verdicts: dict[str, str], **asked: Any) -> tuple[Any, list[str]]:
    """Return the reward of a suite with these verdicts, and what its note says."""
    report, request = SuiteReport("n"), SuiteRequest(**asked)
    report.tests = dict(verdicts)
    value = judge(request, report)
    assert value["resolved"] is (value["reward"] == 1.0)
    assert value["counts"] == Counter(value["tests"].values())  # type: ignore[attr-defined]
    return value["reward"], notes(request, report, value)


@pytest.mark.parametrize("verdict", ["skipped", "xfailed", "xpassed"])
def test_what_did_not_pass_counts_unless_it_is_ignored(verdict: str) -> None:
    verdicts, ignore = {"a::x": "passed", "a::y": verdict}, frozenset({verdict})
    assert judged(verdicts) == (0.5, [f"1 test(s) {verdict}, which is no pass: a::y"])
    assert judged(verdicts, ignore=ignore) == (1.0, [])
    assert judged(verdicts, pass_to_pass=("a::x", "a::y"))[0] == 0.0
    assert judged(verdicts, pass_to_pass=("a::x", "a::y"), ignore=ignore) == (1.0, [])
    assert judged(verdicts, pass_to_pass=("a::x",)) == (1.0, [])  # a test that no list names does not count
    assert judged(verdicts, fail_to_pass=("a::y",), pass_to_pass=("a::x",), ignore=ignore)[0] == 0.0


@pytest.mark.parametrize("listed", [(), ("a::x", "a::y")])
def test_a_suite_in_which_nothing_counts_is_worth_nothing_and_says_so(listed: tuple[str, ...]) -> None:
    verdicts = {"a::x": "skipped", "a::y": "xfailed"}
    assert judged(verdicts, pass_to_pass=listed, ignore=frozenset({"skipped", "xfailed"})) == (
        0.0,
        ["all 2 test(s) are ignored (skipped, xfailed), so that none counts: a::x, a::y"],
    )


@pytest.mark.parametrize("verdict", ["failed", "error", "skipped", "xfailed", "xpassed", "passed"])
@pytest.mark.parametrize("other", ["failed", "skipped", "passed", "none", "missing"])
@pytest.mark.parametrize("listed", [(), ("a::x",)])
@pytest.mark.parametrize("ignore", [(), ("skipped", "xfailed")])
def test_every_reward_below_one_has_a_note(
    verdict: str, other: str, listed: tuple[str, ...], ignore: tuple[str, ...]
) -> None:
    report, request = SuiteReport("n"), SuiteRequest(pass_to_pass=listed, ignore=frozenset(ignore))
    report.tests = {"a::x": verdict}
    if other == "missing":
        report.selected = ["a::x", "a::y"]
    elif other != "none":
        report.tests["a::y"] = other
    value = judge(request, report)
    assert bool(notes(request, report, value)) or value["reward"] == 1.0


@pytest.mark.parametrize(("workers", "children", "watched"), [(1, [], True), (1, [True], False), (2, [], False)])
def test_what_workers_and_children_have_told_is_lost_with_the_process_that_listens(
    workers: int, children: list[bool], watched: bool
) -> None:
    report = SuiteReport("n")
    start = {"pytest": "8", "xdist": "3", "workers": workers, "noticed": []}
    records: list[dict[str, Any]] = [{"start": start}, {"clean": True, "watched": True}]
    for record in records + [{"children": each} for each in children]:
        report.feed(json.dumps({"nonce": "n", **record}).encode() + b"\n")
    report.take_up()
    report.feed(json.dumps({"nonce": "n", "clean": True, "watched": True}).encode() + b"\n")
    assert report.watched is watched
