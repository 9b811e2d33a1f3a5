"""Skips and expected failures that a test asks for stay what they are, in whatever words it asks."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import pytest

from manager.function import PytestSpec
from runtimes.sandbox.pytest.report import SuiteReport, SuiteRequest, judge, notes
from runtimes.sandbox.pytest.texts import SourceText
from tests.runtimes.sandbox.pytest.conftest import ARGS, FUNCTION, SuiteBench

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
FRESH = replace(FUNCTION, pytest=PytestSpec(args=ARGS, grade="fresh", tree_options="ignore"))


@pytest.mark.parametrize(
    ("function", "given", "cores"),
    [(FUNCTION, False, (0,)), (FUNCTION, True, (0, 1)), (FRESH, True, (0,))],
    ids=["uploaded", "given_to_workers", "fresh"],
)
async def test_whatever_asks_for_a_skip_has_one(
    bench: SuiteBench, function: Any, given: bool, cores: tuple[int, ...]
) -> None:
    await bench.write({"plugged.py": PLUGIN, **({} if given else OWN)})
    value = await bench.run(
        function=function, cores=cores, env={"PYTHONPATH": "tests"}, **({"tests": GIVEN} if given else {})
    )
    told = {id: verdict for id, verdict in value["tests"].items() if verdict != _wanted(id)}
    assert told == {}, value["note"]
    assert (value["reward"], value["note"]) == (1.0, "")
    assert value["counts"]["passed"] == 3 and value["counts"]["xfailed"] == 4
    assert value["counts"]["skipped"] == sum(text.count("def test_s_") for text in (FUNCTIONS, CASES)) + 4


def _wanted(id: str) -> str:
    if "::test_x_" in id:
        return "xfailed"
    return "passed" if "::test_passed" in id or id.endswith("::test_parameter[1]") else "skipped"


TEXT = SourceText(
    textwrap.dedent(
        """
        import pytest, unittest, calc
        from calc import skip_blanks, Lexer
        lexer = Lexer()
        later = pytest.skip
        def test(self, lexing, skipper):
            pytest.skip("x")
            pytest.fail("x")
            calc.skip("x")
            skip_blanks("x")
            lexer.skip(3)
            later("x")
            lexing.skip(3)
            skipper("x")
            self.skipTest("x")
            self.lexer.skip(3)
            raise unittest.SkipTest
            raise calc.WrongError
            assert pytest.importorskip("x")
            raise AssertionError
            if pytest.skip("x"):
                calc.f()
        """
    ).encode(),
    lambda module, level, name: module == "calc",
)


def test_a_statement_asks_for_a_skip_by_no_name_of_the_project() -> None:
    first = 7
    asks = [TEXT.says(line, raised_here=False) for line in range(first, first + 16)]
    assert asks == [
        *(True, False, False, False, False, True, False, True, True, False),
        *(True, False, True, False, True, False),
    ]
    raises = [TEXT.says(line, raised_here=True) for line in range(first, first + 16)]
    assert [at for at, said in enumerate(raises) if said] == [10]


def test_a_reward_below_one_says_why_where_all_tests_were_skipped() -> None:
    report = SuiteReport("n")
    for id in ("a::x", "a::y"):
        report.feed(
            f'{{"nonce": "n", "run": "{id}"}}\n{{"nonce": "n", "test": "{id}", "verdict": "skipped"}}\n'.encode()
        )
    value = judge(SuiteRequest(), report)
    said = notes(SuiteRequest(), report, value)
    assert (value["reward"], said) == (0.0, ["all 2 test(s) were skipped, so that none counts: a::x, a::y"])
    assert notes(SuiteRequest(fail_to_pass=("a::x",)), report, judge(SuiteRequest(fail_to_pass=("a::x",)), report))


@pytest.mark.parametrize("verdict", ["failed", "error", "skipped", "xfailed", "xpassed", "passed"])
@pytest.mark.parametrize("other", ["failed", "skipped", "passed", "none", "missing"])
@pytest.mark.parametrize("listed", [(), ("a::x",)])
def test_every_reward_below_one_has_a_note(verdict: str, other: str, listed: tuple[str, ...]) -> None:
    report, request = SuiteReport("n"), SuiteRequest(fail_to_pass=listed)
    report.tests = {"a::x": verdict}
    if other == "missing":
        report.selected = ["a::x", "a::y"]
    elif other != "none":
        report.tests["a::y"] = other
    value = judge(request, report)
    assert bool(notes(request, report, value)) or value["reward"] == 1.0
