"""Marks count where a test's own source gives them, or a conftest or a plugin that marks tests."""

from __future__ import annotations

import textwrap
from collections import namedtuple
from typing import Any

import pytest

from runtimes.sandbox.pytest.marks import MarkText
from tests.runtimes.sandbox.pytest.conftest import SuiteBench

#: Every test says by its name what becomes of it: s is skipped, x fails as expected, p passes.
FUNCTIONS = """
    import sys
    import unittest
    import pytest
    from helpers import CASES, known
    from more import *

    needs_new = pytest.mark.skipif(sys.version_info < (99,), reason="new")
    later = pytest.mark.xfail(reason="later")
    OWN = [1, pytest.param(0, marks=later)]
    STRICT = pytest.mark.xfail(raises=AssertionError, strict=True)
    BOTH = [pytest.param(0, marks=[STRICT, pytest.mark.filterwarnings("error")])]

    @pytest.mark.skip
    def test_s_bare(): assert False
    @pytest.mark.skip("why")
    def test_s_called(): assert False
    @needs_new
    def test_s_alias(): assert False
    @pytest.mark.skipif("sys.version_info > (3,)", reason="words")
    def test_s_words(): assert False
    @pytest.mark.skipif(True, False, reason="several")
    def test_s_several(): assert False
    @pytest.mark.parametrize("a", [])
    def test_s_empty(a): assert False
    @unittest.skip("why")
    def test_s_unittest(): assert False
    @later
    def test_x_alias(): assert False
    @pytest.mark.xfail(run=False)
    def test_x_not_run(): assert False
    @pytest.mark.xfail(reason="a")(raises=AssertionError)
    def test_x_chained(): assert False
    @pytest.mark.xfail(*[True], **{"reason": "x"})
    def test_x_starred(): assert False
    @known
    def test_x_helpers(): assert False
    @pytest.mark.parametrize("a", CASES)
    def test_x_cases(a): assert a
    @pytest.mark.parametrize("a", OWN[1:])
    def test_x_own(a): assert a
    @pytest.mark.parametrize("a", BOTH)
    def test_x_both(a): assert a
    def test_x_request(request):
        request.applymarker(pytest.mark.xfail(reason="now"))
        assert False
    def test_x_named(request):
        request.node.add_marker("xfail")
        assert False
    @pytest.fixture
    def expecting(request): request.node.add_marker(pytest.mark.xfail)
    def test_x_fixture(expecting): assert False
    def test_x_conftest(): assert False
    def test_p(): pass

    @pytest.mark.xfail
    class TestClass:
        def test_x_class(self): assert False
        class TestInner:
            def test_x_inner(self): assert False
    class TestMarked:
        pytestmark = [pytest.mark.skip("all"), pytest.mark.xfail]
        def test_s_listed(self): assert False
    class TestBase(unittest.TestCase):
        pytestmark = pytest.mark.skipif(True, reason="all")
    class TestHeir(TestBase):
        def test_s_heir(self): assert False
    class TestCase(unittest.TestCase):
        @unittest.expectedFailure
        def test_x_expected(self): assert False
        @unittest.skipIf(True, "why")
        def test_s_if(self): assert False
    @unittest.skip("all")
    class TestNone(unittest.TestCase):
        def test_s_none(self): assert False
    def test_s_set(): assert False
    test_s_set = pytest.mark.skip(test_s_set)
"""
HELPERS = "import pytest\nknown = pytest.mark.xfail\nCASES = [pytest.param(0, marks=pytest.mark.xfail)]\n"
CONFTEST = """
    import pytest
    def pytest_collection_modifyitems(items):
        for item in items:
            if "conftest" in item.name: item.add_marker(pytest.mark.xfail)
"""
MODULE = (
    "import pytest\nif True:\n    pytestmark = pytest.mark.xfail(reason='all')\ndef test_x_module(): assert False\n"
)
GENERATED = """
    import pytest
    def pytest_generate_tests(metafunc):
        metafunc.parametrize("a", [pytest.param(0, marks=pytest.mark.xfail)])
    def test_x_generated(a): assert a
"""
IMPORTED = "from helpers import known\nfrom test_module import test_x_module as test_x_other\npytestmark = known\n"
OWN = {
    "tests/conftest.py": CONFTEST,
    "tests/helpers.py": HELPERS,
    "tests/more.py": "MORE = 1\n",
    "tests/test_functions.py": FUNCTIONS,
    "tests/test_module.py": MODULE,
    "tests/test_generated.py": GENERATED,
    "tests/test_imported.py": IMPORTED,
}


@pytest.mark.parametrize(("given", "cores"), [(False, (0,)), (True, (0, 1))], ids=["uploaded", "given_to_workers"])
async def test_a_mark_of_the_tests_counts(bench: SuiteBench, given: bool, cores: tuple[int, ...]) -> None:
    tests = {path: textwrap.dedent(text) for path, text in OWN.items()}
    await bench.write({} if given else OWN)
    asked: dict[str, Any] = {"tests": tests} if given else {}
    value = await bench.run(cores=cores, env={"PYTHONPATH": "tests"}, **asked)
    wanted = {"s": "skipped", "x": "xfailed", "p": "passed"}
    verdicts = {id: wanted[id.partition("::test_")[2][:1] or id.rpartition("test_")[2][:1]] for id in value["tests"]}
    assert value["tests"] == verdicts, value["note"]
    assert len(verdicts) == sum(text.count("def test_") for text in OWN.values()) + 1  # one is imported
    assert (value["reward"], value["note"]) == (1.0, "")


Mark = namedtuple("Mark", ["name", "args", "kwargs"])
TEXT = MarkText(
    textwrap.dedent(
        """
        import sys, calc, pytest, unittest
        from unittest import mock
        from calc import wrapped
        def test_plain(): assert "skip" in "xfail"
        @mock.patch("calc.x")
        @pytest.mark.usefixtures("tmp_path")
        def test_patched(x): pass
        @pytest.mark.parametrize("a", [1, calc.add, sys.platform])
        def test_parameters(a): pass
        @pytest.mark.xfail(sys.platform == "win32", reason="old")
        def test_condition(): pass
        @pytest.mark.skipif(False, reason="old")
        def test_never(): pass
        @wrapped
        def test_wrapped(): pass
        class TestCase(unittest.TestCase):
            def test_in_case(self): pass
        """
    ).encode(),
    lambda module, level, name: module == "calc",
)


@pytest.mark.parametrize(
    ("path", "verdict", "mark", "accounts"),
    [
        ("test_plain", "xfail", Mark("xfail", (), {}), False),
        ("test_plain", "skip", Mark("skip", (), {}), False),
        ("test_patched", "xfail", Mark("xfail", (), {}), False),
        ("test_parameters", "skip", Mark("skip", (), {}), False),
        ("test_condition", "xfail", Mark("xfail", (True,), {"reason": "old"}), True),
        ("test_condition", "xfail", Mark("xfail", (True,), {"reason": "new"}), False),
        ("test_condition", "xfail", Mark("xfail", (), {}), False),
        ("test_condition", "skip", Mark("skip", (), {}), False),
        ("test_never", "skip", Mark("skipif", (False,), {"reason": "old"}), True),
        ("test_never", "skip", Mark("skipif", (True,), {"reason": "old"}), False),
        ("test_wrapped", "skip", Mark("skip", (), {}), True),
        ("TestCase.test_in_case", "xfail", Mark("xfail", (), {}), False),
        ("test_elsewhere", "xfail", Mark("xfail", (), {}), True),
    ],
)
def test_a_source_accounts_for_marks(path: str, verdict: str, mark: Any, accounts: bool) -> None:
    assert TEXT.accounts_for(verdict, path.split("."), [mark]) is accounts


async def test_a_planted_mark_leaves_what_passed(bench: SuiteBench) -> None:
    planted = """
        import sys, pytest
        def add(a, b):
            frame = sys._getframe()
            while "pyfuncitem" not in frame.f_locals: frame = frame.f_back
            frame.f_locals["pyfuncitem"].add_marker("xfail")
            return a - b
    """
    test = "import calc\ndef test_none(): assert calc.add(0, 0) == 0\ndef test_add(): assert calc.add(1, 1) == 2\n"
    value = await bench.run({"calc.py": planted}, tests={"test_calc.py": test})
    assert value["tests"] == {"test_calc.py::test_none": "passed", "test_calc.py::test_add": "failed"}
    assert "a mark that test_calc.py does not give" in value["note"]


async def test_a_file_that_skips_itself_is_told(bench: SuiteBench) -> None:
    absent = "import pytest\nnp = pytest.importorskip('no_such_library')\ndef test_x(): pass\n"
    value = await bench.run({}, tests={"test_absent.py": absent})
    assert (value["reward"], value["valid"]) == (0.0, True)
    assert "1 file(s) skipped themselves when they were imported: test_absent.py" in value["note"]
    assert "no_such_library" in value["note"]
    value = await bench.run({"test_there.py": "def test_y(): pass"}, targets=["test_absent.py", "test_there.py"])
    assert (value["reward"], value["note"]) == (1.0, "")


async def test_a_test_by_two_spellings_is_run_once(bench: SuiteBench) -> None:
    listed = ["test_s.py::test_a", "./test_s.py::test_a", "sub/../test_s.py::test_a"]
    files = {"test_s.py": "def test_a(): pass", "sub/test_b.py": "def test_b(): pass"}
    value = await bench.run(files, fail_to_pass=listed, pass_to_pass=listed[:1])
    assert (value["reward"], value["fail_to_pass"]["passed"], value["note"]) == (1.0, listed, "")
    value = await bench.run(targets=[".", "sub", "./sub/", "test_s.py"])
    assert (value["reward"], value["counts"], value["note"]) == (1.0, {"passed": 2}, "")


def test_pytest_leaves_generators_and_coroutines_alone() -> None:
    text = MarkText(
        b"def test_g(): yield 1\ndef test_n():\n    def g(): yield 1\n"
        b"async def test_a(): pass\nasync def test_ag(): yield\n"
    )
    alone = {
        (name, verdict, when)
        for name in ("test_g", "test_n", "test_a", "test_ag")
        for verdict in ("xfail", "skip")
        for when in ("setup", "call")
        if text.is_left_alone(verdict, [name], when)
    }
    assert alone == {
        *(("test_g", "xfail", when) for when in ("setup", "call")),
        *(("test_ag", "xfail", when) for when in ("setup", "call")),
        *((name, "skip", "call") for name in ("test_a", "test_ag")),
    }
