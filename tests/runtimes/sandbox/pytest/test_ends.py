"""Who may end a test by a skip or an expected failure: the test, and not what it tests."""

from __future__ import annotations

import pytest

from tests.runtimes.sandbox.pytest.conftest import SuiteBench

OWN = {
    "conftest.py": """
        import pytest
        @pytest.fixture
        def absent(): pytest.skip("no such machine")
    """,
    "decorators.py": """
        import functools, unittest
        def unless_there(test):
            @functools.wraps(test)
            def skipped(*a, **k): raise unittest.SkipTest("not there")
            return skipped
    """,
    "tests/helpers.py": """
        import pytest
        def expect(): pytest.xfail("known")
    """,
    "tests/test_own.py": """
        import unittest
        import pytest
        from decorators import unless_there
        from helpers import expect
        def test_passed(): pass
        def test_xfail(): pytest.xfail("known")
        def test_helper(): expect()
        def test_fixture(absent): pass
        def test_applied(request):
            request.applymarker(pytest.mark.xfail)
            assert False
        def test_import(): pytest.importorskip("no_such_module")
        @unless_there
        def test_decorated(): pass
        class TestCase(unittest.TestCase):
            def test_skip(self): self.skipTest("no")
            @unittest.expectedFailure
            def test_expected(self): assert False
    """,
    "tests/test_module.py": """
        import pytest
        pytest.skip("not here", allow_module_level=True)
        def test_x(): pass
    """,
}
VERDICTS = {
    "test_passed": "passed",
    "test_xfail": "xfailed",
    "test_helper": "xfailed",
    "test_fixture": "skipped",
    "test_applied": "xfailed",
    "test_import": "skipped",
    "test_decorated": "skipped",
    "TestCase::test_skip": "skipped",
    "TestCase::test_expected": "xfailed",
}


@pytest.mark.parametrize("cores", [(0,), (0, 1)])
async def test_a_test_skips_itself_and_expects_its_own_failure(bench: SuiteBench, cores: tuple[int, ...]) -> None:
    value = await bench.run(OWN, cores=cores, env={"PYTHONPATH": "tests"})
    assert value["tests"] == {f"tests/test_own.py::{name}": verdict for name, verdict in VERDICTS.items()}
    assert (value["reward"], value["note"]) == (1.0, "")


TESTED = """
    import unittest
    import pytest
    import calc
    def test_easy(): assert calc.easy() == 1
    def test_hard(): assert calc.hard() == 1
    class TestCase(unittest.TestCase):
        def test_hard(self): assert calc.hard() == 1
"""


@pytest.mark.parametrize("cores", [(0,), (0, 1)])
@pytest.mark.parametrize("word", ["pytest.skip('x')", "pytest.xfail('x')", "unittest.case._raise()"])
async def test_what_is_tested_does_not_get_out_of_a_share(bench: SuiteBench, word: str, cores: tuple[int, ...]) -> None:
    raising = word.replace("unittest.case._raise()", "(_ for _ in ()).throw(unittest.SkipTest('x'))")
    code = f"import pytest, unittest\ndef easy(): return 1\ndef hard(): return {raising}\n"
    value = await bench.run({"calc.py": code, "test_calc.py": TESTED}, cores=cores)
    assert value["reward"] == pytest.approx(1 / 3)
    assert value["counts"] == {"failed": 2, "passed": 1}
    assert (
        "2 test(s) count as failed, as what they test skipped them or expected their failure (calc.py)" in value["note"]
    )
    assert "2 test(s) did not pass" in value["note"]
    assert "report_whole" in value["checked"]


async def test_a_module_is_not_skipped_by_what_it_imports(bench: SuiteBench) -> None:
    files = {
        "calc.py": "import unittest\nraise unittest.SkipTest('later')\n",
        "test_calc.py": "import calc\ndef test_hard(): assert calc.hard() == 1",
        "test_other.py": "def test_other(): pass",
    }
    value = await bench.run(files)
    assert (value["reward"], value["resolved"], value["valid"]) == (0.0, False, True)
    assert list(value["collection_errors"]) == ["test_calc.py"]
    assert "a skip that the module did not ask for: calc.py" in value["collection_errors"]["test_calc.py"]


async def test_files_of_the_tests_are_those_that_came_with_the_request(bench: SuiteBench) -> None:
    files = {
        "calc.py": "def hard(): return 0",
        "tests/helpers.py": "import pytest\neasy = pytest.xfail",
    }
    helper = "import pytest\ndef easy(): pytest.xfail('known')\n"
    test = "import calc\nfrom tests.helpers import easy\ndef test_hard(): assert calc.hard() == 1 or easy()\n"
    listed = ["test_calc.py::test_hard"]
    await bench.write(files | {"tests/helpers.py": helper})
    value = await bench.run(tests={"test_calc.py": test}, fail_to_pass=listed)
    assert (value["reward"], value["tests"]) == (0.0, {listed[0]: "failed"})
    value = await bench.run(tests={"test_calc.py": test, "tests/helpers.py": helper}, fail_to_pass=listed)
    assert (value["reward"], value["tests"]) == (1.0, {listed[0]: "xfailed"})


async def test_a_tests_helper_by_a_name_of_the_project_is_not_asked_for(bench: SuiteBench) -> None:
    files = {"calc.py": "from tests.helpers import easy as hard"}
    helper = "import pytest\ndef easy(): pytest.xfail('known')\n"
    test = "import calc\ndef test_hard(): assert calc.hard() == 1\n"
    value = await bench.run(files, tests={"test_calc.py": test, "tests/helpers.py": helper})
    assert (value["reward"], value["counts"]) == (0.0, {"failed": 1})
    assert "(test_calc.py:2)" in value["note"]


async def test_a_share_below_one_says_what_did_not_pass(bench: SuiteBench) -> None:
    value = await bench.run({"test_x.py": "def test_a(): assert 0\ndef test_b(): pass"})
    assert (value["reward"], value["note"]) == (0.5, "1 test(s) did not pass: test_x.py::test_a")


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


@pytest.mark.parametrize("cores", [(0,), (0, 1)])
async def test_any_number_of_given_files_reaches_the_processes(bench: SuiteBench, cores: tuple[int, ...]) -> None:
    place = "a_directory_with_a_rather_long_name_" * 3
    tests = {f"{place}/data_{number}.txt": "" for number in range(1500)}
    tests["test_s.py"] = "import calc\ndef test_hard(): assert calc.hard() == 1\ndef test_easy(): pass\n"
    code = {"calc.py": "import pytest\ndef hard(): pytest.xfail('known')\n"}
    value = await bench.run(code, tests=tests, cores=cores)
    assert value["tests"] == {"test_s.py::test_hard": "failed", "test_s.py::test_easy": "passed"}
