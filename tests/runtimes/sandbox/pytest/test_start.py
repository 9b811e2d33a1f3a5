"""Python's start is not the project's, whatever an installation names of it; what it names works all the same."""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runtimes.sandbox.pytest import changes
from runtimes.sandbox.pytest.runtime import _MODULES, _RUNTIME_SOURCE, CLEAN
from tests.runtimes.sandbox.pytest.conftest import ARGS

NONCE = "0" * 32
TEST = "tests/test_calc.py"
#: Whoever runs before the project is let in says so: pytest is not there yet.
EARLY = "import sys\nif 'tangram_baseline' not in sys.modules: open('early', 'w').close()\n"
WRONG = {"calc.py": "def add(a, b): return a - b\n", TEST: "import calc\ndef test_add(): assert calc.add(2, 2) == 4\n"}
#: A finder as setuptools has it for a project in development mode.
FINDER = """
    import importlib.util, sys
    class Finder:
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            place = {places!r}.get(name)
            return place and importlib.util.spec_from_file_location(name, place)
    def install(): sys.meta_path.append(Finder)
"""


class InstalledPython:
    """An installation of its own, with pytest, and a working directory."""

    def __init__(self, place: Path) -> None:
        self.work, self.venv = place / "work", place / "venv"
        self.work.mkdir()
        self.site = self.venv / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        self.site.mkdir(parents=True)
        (self.venv / "bin").mkdir()
        self.python = self.venv / "bin/python3"
        self.python.symlink_to(os.path.realpath(sys.executable))
        home = Path(os.path.realpath(sys.executable)).parent
        (self.venv / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
        installed = next(path for path in sys.path if path.endswith("site-packages"))
        for each in Path(installed).iterdir():
            if each.suffix != ".pth" and not each.name.startswith("__editable__"):
                (self.site / each.name).symlink_to(each)

    def write(self, files: Mapping[str, str], *, installed: Mapping[str, str] | None = None) -> None:
        for top, texts in ((self.work, files), (self.site, installed or {})):
            for name, text in texts.items():
                (top / name).parent.mkdir(parents=True, exist_ok=True)
                (top / name).write_text(textwrap.dedent(text))

    def run(self, *, workers: int = 1, args: tuple[str, ...] = (), **told: Any) -> list[dict[str, Any]]:
        """Run the tests as in a fresh sandbox; return the report."""
        start = {"fresh": True, "roots": [str(self.work)], "kept": []}
        given: dict[str, Any] = {
            "nonce": NONCE,
            "modules": _MODULES,
            "compiled": {},
            "paths": [TEST],
            "wanted": [],
            "prefixes": [],
        }
        given |= {"done": [], "workers": workers, "dist": "load", "args": [*ARGS, *args], "test_timeout_s": 0}
        given |= {"own_options": True, "tests": [TEST], "start": start, "programs": "", **told}
        argv = [str(self.python), "-s", "-S", "-c", CLEAN, _RUNTIME_SOURCE]
        done = subprocess.run(
            argv, input=json.dumps(given).encode(), cwd=self.work, capture_output=True, check=False, timeout=300
        )
        assert done.stdout, done.stderr.decode()
        return [json.loads(line) for line in done.stdout.splitlines()]

    def verdicts(self, **told: Any) -> tuple[dict[str, str], bool]:
        """Return the verdict of each test, and whether the start was clean."""
        report = self.run(**told)
        assert {each["nonce"] for each in report} == {NONCE}, report
        tests = {each["test"].partition("::")[2]: each["verdict"] for each in report if "test" in each}
        return tests, all(each["clean"] for each in report if "clean" in each)


@pytest.fixture
def machine(tmp_path: Path) -> InstalledPython:
    return InstalledPython(tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["sitecustomize/__init__.py", "sitecustomize.py", "usercustomize.py", "pluggy.py"])
def test_a_project_that_a_pth_file_names_has_no_part_in_the_start(
    machine: InstalledPython, name: str, workers: int
) -> None:
    machine.write({**WRONG, name: EARLY}, installed={"x.pth": f"{machine.work}\n"})
    assert machine.verdicts(workers=workers) == ({"test_add": "failed"}, True)
    assert not (machine.work / "early").exists()


@pytest.mark.parametrize(
    "line",
    [
        "import {name}",
        "import sys; sys.path.insert(0, {work!r})",
        "import site; site.addsitedir({work!r})",
        "import _finder; _finder.install(); import sitecustomize",
    ],
)
def test_a_line_of_code_brings_none_of_it_either(machine: InstalledPython, line: str) -> None:
    machine.write({**WRONG, "boot.py": EARLY, "sitecustomize.py": EARLY})
    places = {name: str(machine.work / f"{name}.py") for name in ("boot", "sitecustomize")}
    line = line.format(name="boot", work=str(machine.work))
    machine.write({}, installed={"x.pth": line + "\n", "_finder.py": FINDER.format(places=places)})
    assert machine.verdicts() == ({"test_add": "failed"}, True)
    assert not (machine.work / "early").exists()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", ["path", "finder"])
def test_a_plugin_in_development_is_loaded_when_its_project_is_let_in(
    machine: InstalledPython, way: str, workers: int
) -> None:
    plugin = EARLY + "import pytest\n@pytest.fixture\ndef four(): return 4\n"
    test = "import plugged\ndef test_four(four): assert four == 4\n"
    points = {"plugged-1.dist-info/METADATA": "Name: plugged\nVersion: 1\n"}
    points["plugged-1.dist-info/entry_points.txt"] = "[pytest11]\nplugged = plugged\n"
    places = {"plugged": str(machine.work / "src/plugged.py")}
    lines = {"path": f"{machine.work}/src\n", "finder": "import _finder; _finder.install()\n"}
    installed = {"x.pth": lines[way], "_finder.py": FINDER.format(places=places), **points}
    machine.write({"src/plugged.py": plugin, TEST: test}, installed=installed)
    assert machine.verdicts(workers=workers) == ({"test_four": "passed"}, True)
    assert not (machine.work / "early").exists()


def test_what_a_test_starts_begins_as_ever(machine: InstalledPython) -> None:
    test = """
        import multiprocessing, os, subprocess, sys
        def put(queue): import calc; queue.put((calc.__name__, sys.flags.no_site, sys.prefix))
        def test_child():
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=put, args=(queue,))
            process.start()
            assert queue.get() == ("calc", 0, sys.prefix)
            process.join()
            code = "import calc, sys; print(sys.flags.no_user_site)"
            assert subprocess.check_output([sys.executable, "-c", code]) == b"1\\n"
    """
    machine.write({**WRONG, TEST: test}, installed={"x.pth": f"{machine.work}\n"})
    assert machine.verdicts() == ({"test_child": "passed"}, True)


def test_the_projects_module_does_not_stand_for_the_librarys(machine: InstalledPython) -> None:
    test = "import calc, fractions\ndef test_add(): assert fractions.Fraction(calc.add(2, 2)) == 4\n"
    liar = "class Fraction:\n    def __init__(self, *a): pass\n    def __eq__(self, other): return True\n"
    machine.write({**WRONG, TEST: test, "fractions.py": liar})
    report = machine.run()
    assert [each["verdict"] for each in report if "test" in each] == ["failed"]
    assert {"nonce": NONCE, "altered": ["the module fractions"]} in report


#: Takes whatever judges it down, and says so.
PLANTED = "import sys\nopen('planted', 'w').close()\ndef __getattr__(name): return lambda *a, **k: None\n"


@pytest.mark.promise(
    "No variant of an attack on the start, on imports or on options forges a reward or an entry of `checked`."
)
@pytest.mark.parametrize(
    ("test", "planted"),
    [
        ("import attr\n", "attr.py"),
        ("import attr\n", "attr/__init__.py"),
        ("from attr import define\n", "tests/attr.py"),
        ("import chosen\n", "optional/__init__.py"),
        (
            "import sys\nfor name in ('copy', 'pickle'): sys.modules.pop(name, None)\nimport pickle\n",
            "org/python/core.py",
        ),
        ("", "pygments/__init__.py"),
        ("", "setproctitle.py"),
        ("", "numpy/__init__.py"),
        ("", "tests/test_calc/__init__.py"),
        ("from tangram_grading import run_solution\n", "tangram_grading/__init__.py"),
    ],
)
def test_what_the_agent_adds_is_found_by_no_test_and_nothing_installed(
    machine: InstalledPython, test: str, planted: str
) -> None:
    wrong = test + "def test_add(): assert 2 - 2 == 4\n"
    optional = "try:\n    import optional\nexcept ImportError:\n    optional = None\n"
    machine.write({TEST: wrong, planted: PLANTED}, installed={"chosen.py": optional})
    brought = {str(machine.work / planted): True}
    start = {"fresh": True, "roots": [str(machine.work)], "kept": [], "brought": brought}
    report = machine.run(start=start)
    assert [each["verdict"] for each in report if "test" in each] == ["failed"], report
    assert not (machine.work / "planted").exists()
    assert [each["inside"] for each in report if "inside" in each] == []


@pytest.mark.parametrize("new", [False, True])
def test_a_module_that_the_image_has_beside_an_installed_one_is_the_projects(
    machine: InstalledPython, new: bool
) -> None:
    test = "import chosen\ndef test_it(): assert chosen.WHOSE == 'project'\n"
    machine.write({TEST: test, "chosen.py": "WHOSE = 'project'\n"}, installed={"chosen.py": "WHOSE = 'installed'\n"})
    start = {"fresh": True, "roots": [str(machine.work)], "kept": [], "brought": {str(machine.work / "chosen.py"): new}}
    verdicts, _ = machine.verdicts(start=start)
    assert verdicts == {"test_it": "failed" if new else "passed"}


@pytest.mark.promise("Code of the agent that runs beside the tests is reported before it begins.")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("test", "inside"),
    [
        ("def test_it(): pass\n", ""),
        ("from pkg import calc\ndef test_it(): pass\n", "pkg/__init__.py"),
        ("def test_it():\n    exec(compile(open('pkg/calc.py').read(), 'calc', 'exec'))\n", "calc"),
        ("def test_it(): exec(compile('1', '', 'exec'))\n", "a text that"),
        ("def test_it(): exec(compile('1', __file__, 'exec'))\n", "a text that"),
        ("import timeit\ndef test_it(): timeit.timeit('1', number=1)\n", "a text that"),
        ("import code\ndef test_it(): code.InteractiveInterpreter({}).runsource('1', 'x')\n", "a text that"),
        (
            "import collections, dataclasses\n@dataclasses.dataclass\nclass A: x: int\n"
            "def test_it(): assert collections.namedtuple('B', 'x')(1).x == A(1).x\n",
            "",
        ),
        ("import pickle\ndef test_it(): pickle.loads(pickle.dumps(len))\n", "pickle.find_class"),
        ("import ctypes\ndef test_it():\n    try: ctypes.CDLL(b'pkg/calc.py')\n    except OSError: pass\n", "calc"),
        ("import _cffi_backend\ndef test_it(): pass\n", "_cffi_backend"),
        ("import ctypes\ndef test_it(): ctypes.CDLL(None).system(b'true')\n", "as their own user"),
        ("import marshal\ndef test_it(): marshal.loads(marshal.dumps(1))\n", "marshal.loads"),
        (
            "import shutil, sys\ndef test_it(tmp_path):\n    shutil.copy('pkg/calc.py', tmp_path / 'copied.py')\n"
            "    sys.path.insert(0, str(tmp_path))\n    import copied\n",
            "copied.py",
        ),
        ("import sys\nsys.path.insert(0, 'pkg/lib.zip')\nimport zipped\ndef test_it(): pass\n", "pkg/lib.zip"),
        ("import sys\nsys.path.insert(0, 'pkg/lib.zip')\nimport lying\ndef test_it(): pass\n", "pkg/lib.zip"),
        ("import os\ndef test_it(): os.popen('true').read()\n", "as their own user"),
        ("import os\ndef test_it(): os.fork() or os.execvp('true', ['true'])\n", "as their own user"),
        (
            "import os, threading\ndef test_it():\n    one = threading.Thread(target=os.system, args=('true',))\n"
            "    one.start(); one.join()\n",
            "as their own user",
        ),
        (
            "import multiprocessing\ndef test_it():\n    one = multiprocessing.get_context('spawn').Process()\n"
            "    one.start(); one.join()\n",
            "multiprocessing",
        ),
        ("import platform\ndef test_it(): platform.processor()\n", ""),
        ("def test_it(): import runpy; runpy.run_path('pkg/calc.py')\n", "pkg/calc.py"),
        ("def test_it(): exec(open('pkg/calc.py').read())\n", "a text that"),
        ("import subprocess\ndef test_it(): subprocess.run(['true'])\n", "as their own user"),
        ("import os\ndef test_it(): os.system('true')\n", "as their own user"),
        ("from tangram_grading import run_solution\ndef test_it(): run_solution(['true'])\n", "as their own user"),
    ],
)
def test_it_is_told_what_of_the_agents_runs_where_the_tests_do(
    machine: InstalledPython, test: str, inside: str, workers: int
) -> None:
    place = "pkg/tests/test_it.py"
    machine.write({place: test, "pkg/calc.py": "x = 1\n", "pkg/__init__.py": "x = 1\n", "pkg/tests/__init__.py": ""})
    with zipfile.ZipFile(machine.work / "pkg/lib.zip", "w") as archive:
        archive.writestr("zipped.py", "x = 1\n")
        code = marshal.dumps(compile("x = 1", str(machine.work / place), "exec"))
        archive.writestr("lying.pyc", importlib.util.MAGIC_NUMBER + bytes(12) + code)
    brought = {str(machine.work / name): True for name in ("pkg/__init__.py", "pkg/calc.py", "calc", "pkg/lib.zip")}
    start = {"fresh": True, "roots": [str(machine.work)], "kept": [], "brought": brought}
    report = machine.run(start=start, tests=[place], paths=[place], workers=workers)
    assert [each["verdict"] for each in report if "test" in each] == ["passed"], report
    told = [each["inside"] for each in report if "inside" in each]
    assert len(told) == bool(inside) and inside in "".join(told), told
    assert any(each.get("watched") for each in report)


@pytest.mark.parametrize(
    ("value", "clean"),
    [("", True), ("/usr/lib:", False), ("lib", False), ("/usr/lib", True), ("{work}/kept", True), ("{work}", False)],
)
def test_a_start_whose_libraries_the_agent_may_have_made_is_not_called_clean(
    machine: InstalledPython, monkeypatch: pytest.MonkeyPatch, value: str, clean: bool
) -> None:
    """An empty part of LD_LIBRARY_PATH is the working directory."""
    machine.write({TEST: "def test_it(): pass\n"})
    monkeypatch.setenv("LD_LIBRARY_PATH", value.format(work=machine.work))
    start = {"fresh": True, "roots": [str(machine.work)], "kept": [str(machine.work / "kept")]}
    assert machine.verdicts(start=start) == ({"test_it": "passed"}, clean)


def test_a_lone_test_of_a_package_imports_what_is_beside_it(machine: InstalledPython) -> None:
    """The package's code is the agent's: it is not imported until the test asks for it."""
    test = """
        import sys
        early = "pkg" in sys.modules
        from .helper import four
        from .. import calc
        def test_it(): assert (early, four, calc.x, __name__) == (False, 4, 1, "pkg.tests.test_it")
        def test_told():
            try:
                assert four == 5
            except AssertionError as error:
                assert "assert 4 == 5" in str(error)
    """
    files = {"pkg/calc.py": "x = 1\n", "pkg/__init__.py": "x = 1\n", "pkg/tests/helper.py": "four = 4\n"}
    machine.write({**files, "pkg/tests/__init__.py": "", "pkg/tests/test_it.py": test})
    start = {
        "fresh": True,
        "roots": [str(machine.work)],
        "kept": [],
        "brought": {str(machine.work / "pkg/__init__.py"): True},
    }
    verdicts, _ = machine.verdicts(start=start, tests=["pkg/tests/test_it.py"], paths=["pkg/tests/test_it.py"])
    assert verdicts == {"test_it": "passed", "test_told": "passed"}
    assert not list((machine.work / "pkg/tests").rglob("test_it*.pyc")), "who may not read a test may read that"


def test_the_interpreter_stays_that_of_the_fresh_sandbox(tmp_path: Path) -> None:
    """Programs, libraries and links to them below the working directory are of the installation."""
    machine = InstalledPython(tmp_path)
    machine.venv.rename(machine.work / ".venv")
    (machine.work / "bin").symlink_to(".venv/bin")
    (machine.work / "tool").mkdir()
    path = f"{machine.work}/bin:{machine.work}/.venv/bin:{machine.work}/tool:/usr/bin:/bin"
    argv = [str(machine.work / "bin/python3"), "-I", "-S", "-c", Path(changes.__file__).read_text(), "list"]
    listed = json.loads(subprocess.check_output(argv, cwd=machine.work, env={"PATH": path}, input=b""))
    assert (listed["python"], listed["known"]["bin"]) == (argv[0], "link .venv/bin")
    rules = {"paths": [], "left_out": [], "kept": listed["kept"], "ignore": True, "limit_bytes": 1}
    stays = ["bin", "bin/python3", ".venv", ".venv/bin/python3", ".venv/pyvenv.cfg", ".venv/lib/x.py", "tool/git"]
    assert [path for path in stays if not changes.Rules(rules).stays_behind(path)] == []
    comes = ["calc.py", "binary/x.py", "src/bin/x.py"]
    assert [path for path in comes if changes.Rules(rules).stays_behind(path)] == []
