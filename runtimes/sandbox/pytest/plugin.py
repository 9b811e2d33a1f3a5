"""A plugin of pytest that reports every verdict as it is known. Standard library and pytest, Python 3.7 on.

`launch` begins pytest with it, in the controlling process and in each worker. The report has one JSON line each of

    {"selected": [id, ...]}   {"run": id}   {"test": id, "verdict"}   {"broken" or "skipped": path, "message"}
    {"altered": [name]}   {"turned": id}   {"crashed": worker's error}   {"clean": bool, "watched": bool}
    {"children": true, if the process has any}
    {"inside": what of the agent's runs in a process of the tests, or as their user}: told once, before it begins

The project's code runs in the same process, or in its workers. It is the gateway that judges, outside the sandbox: it
takes each verdict once, and whatever does not fit together is worth nothing. What that cannot hold is code that lies in
the process of the test which judges it (docs/SANDBOXES.md).

PYTEST_DONT_REWRITE: it is imported before pytest begins, which would warn of that, and a project may make an error of
every warning.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import stat
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MODULE, BASELINE, START, PROGRAMS = "tangram_pytest", "tangram_baseline", "tangram_start", "tangram_grading"
#: Verdicts that no test has which raised something.
PASSING = ("passed", "xpassed")
IDS_PER_LINE, MESSAGE_MAX_CHARS, REASON_MAX_CHARS, ALTERED_MAX = 500, 4000, 200, 10
#: Processes of the tests that may tell what is inside; one more is kept from it.
TELLERS_MAX = 4096
#: Seconds between the exception that ends an overlong test and the end of its process.
TEST_GRACE_S = 5.0
#: Of entry points that are plugins of pytest's.
GROUP = "pytest11"
#: ``--dist loadgroup`` puts the group's name behind the id.
_GROUP = re.compile(r"@[^\]@]*$")
#: How the words on a program begin that runs as the tests' user.
PROGRAM = "the tests started as their own user "
OURS = (MODULE, BASELINE, START, PROGRAMS)
#: What Python says before it starts a program. One that it starts as another user is no matter (`programs`).
STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"})
#: Of that, and what else it says before it runs code or loads a library, or lets data name what is called.
MADE = frozenset({"marshal.load", "marshal.loads", "code.__new__"})
CHILDREN = frozenset({"os.fork", "os.forkpty"})
WATCHED = (
    STARTS
    | MADE
    | CHILDREN
    | {
        *("exec", "import", "ctypes.dlopen", "ctypes.dlsym", "ctypes.dlsym/handle", "ctypes.call_function"),
        *("pickle.find_class", "sqlite3.load_extension", "cpython.PyInterpreterState_New", "sys.remote_exec"),
    }
)
#: How the names of C functions begin that start programs, load libraries, or run Python or what is asked of the kernel.
STARTS_IN_C = (
    *("system", "popen", "exec", "fexec", "fork", "vfork", "clone", "posix_spawn"),
    *("dlopen", "dlmopen", "wordexp", "syscall"),
    *("PyRun_", "_PyRun_", "PyEval_EvalCode", "PyImport_ExecCode", "Py_Main", "Py_RunMain", "Py_BytesMain"),
)
#: The module that starts programs for the library, and what loads libraries or starts programs without Python's word.
FORKS = "_posixsubprocess"
UNSEEN = frozenset({"_cffi_backend", "_tkinter", FORKS})
#: Files of the library: that run texts of their own, that start programs for others, and that ask them to.
MAKERS = (
    *("/collections/__init__.py", "/dataclasses.py", "/typing.py", "/inspect.py", "/annotationlib.py"),
    *("/unittest/mock.py", "/gettext.py"),
)
STARTERS = ("/subprocess.py", "/os.py", "/pty.py", "<frozen os>")
#: That run the code of a module, and pytest's.
IMPORTERS = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", "/assertion/rewrite.py")
ASKERS = ("/platform.py", "/uuid.py", "/ctypes/util.py")
#: What tells the processes of a run where the project's modules are, and what their environment was.
PROJECT = "TANGRAM_PROJECT"
#: Modules of pytest's whose every function a test may compare by: where they are depends on pytest's version.
COMPARERS = ("_pytest.approx", "_pytest.python_api", "_pytest.raises", "_pytest.recwarn")
#: The functions that make a verdict of what a test does; whoever changes one of them changes what is told.
JUDGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("_pytest.runner", ("CallInfo", "runtestprotocol", "pytest_runtest_call", "pytest_runtest_makereport")),
    ("_pytest.reports", ("BaseReport", "TestReport", "CollectReport")),
    ("_pytest.python", ("Function", "pytest_pyfunc_call")),
    ("_pytest.skipping", ("evaluate_condition", "evaluate_skip_marks", "evaluate_xfail_marks")),
    ("_pytest.skipping", ("pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_makereport")),
    ("_pytest.mark.structures", ("Mark", "MarkDecorator", "MarkGenerator", "get_unpacked_marks", "store_mark")),
    ("_pytest.nodes", ("Node",)),
    ("_pytest.outcomes", ("fail", "skip", "exit", "xfail")),
    ("unittest.case", ("TestCase", "_Outcome", "_AssertRaisesContext")),
)
#: A worker is a process of the same kind, and takes its first modules from the installation too.
WORKER = (
    "import gc, sys; gc.disable(); sys.path[:] = [place for place in sys.path if place]; import json, os; "
    f"project = json.loads(os.environ['{PROJECT}']); sys.path.insert(0, project['directory']); import {START}; "
    f"del sys.path[0]; {START}.begin(project['start']); exec(sys.argv[-1])"
)
#: Trees in which nobody edits Python.
SKIPPED_FOLDERS = frozenset({".git", ".hg", "node_modules", "site-packages"})
#: Files that pytest reads wherever they lie.
READ_BY_PYTEST = frozenset(
    {"conftest.py", "__init__.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
    | {"pyproject.toml"}
)
#: The device that has nothing to read.
NULL = os.makedev(1, 3)
#: Compiled tests, by their names or because pytest compiled them.
_TESTS = re.compile(r"^(test_|conftest\.)|_test\.|-pytest-")


class Reporter:
    """Writes the report, and keeps the running verdict of each test."""

    def __init__(self, send: Callable[..., None]) -> None:
        #: Writes one line of the report.
        self.send = send
        self.pid = os.getpid()
        #: Whether it was told that this process has children, what they tell of goes with it.
        self.children = False
        self._verdicts: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def selected(self, ids: list[str]) -> None:
        for start in range(0, len(ids), IDS_PER_LINE):
            self.send(selected=ids[start : start + IDS_PER_LINE])

    def phase(self, id: str, report: Any) -> None:
        """Take in one phase of a test: the worst is its verdict; teardown, or the crash of a worker, is the last."""
        if report.outcome == "rerun" or report.when == "setup":
            self._verdicts.pop(id, None)
        if report.outcome == "rerun":
            return
        verdict = verdict_of(report)
        if verdict is not None and self._verdicts.get(id) != "error":
            self._verdicts[id] = "failed" if self._verdicts.get(id) == "failed" and verdict != "error" else verdict
        if report.when not in ("setup", "call"):
            self._told[id] = self._verdicts.pop(id, "error")
            self.send(test=id, verdict=self._told[id])

    def turned(self, failed: Iterable[str]) -> None:
        """Tell of tests that raised something and were reported as passed."""
        for id in failed:
            if self._told.get(id) in PASSING:
                self.send(turned=id)


class TestSelection:
    """Which of the collected tests are run: exact ids, whatever characters they hold, and prefixes of ids."""

    def __init__(self, wanted: Iterable[str], prefixes: Iterable[str], done: Iterable[str]) -> None:
        self.wanted = {key_of(id) for id in wanted}
        self.prefixes = [key_of(prefix) for prefix in prefixes]
        self.done = {key_of(id) for id in done}

    def takes(self, id: str) -> bool:
        key = key_of(id)
        if key in self.done:
            return False
        if not self.wanted and not self.prefixes:
            return True
        return key in self.wanted or any(begins(key, prefix) for prefix in self.prefixes)


def verdict_of(report: Any) -> str | None:
    """Return what one phase says about its test, None if it says nothing."""
    expected_to_fail = hasattr(report, "wasxfail")
    if report.outcome == "failed":
        return "failed" if report.when == "call" else "error"
    if report.outcome == "skipped":
        return "xfailed" if expected_to_fail else "skipped"
    if report.when == "call":
        return "xpassed" if expected_to_fail else "passed"
    return None


def key_of(id: str) -> str:
    """Return an id as it is compared: with a plain path, and every odd character as pytest's escape of it."""
    path, separator, rest = id.partition("::")
    plain = os.path.normpath(path) + separator + rest
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in plain)


def begins(key: str, prefix: str) -> bool:
    """Return whether the test is, or lies in, what the prefix names: a directory, a file, a class, or a test."""
    return prefix == "." or (key.startswith(prefix) and key[len(prefix) : len(prefix) + 1] in ("", "[", ":", "/"))


# --- the hooks; in the controlling process and in each worker

#: Where the project's modules are, and its part of the environment; empty until it is known.
_project: dict[str, Any] = {}
_has_workers = False
#: A name, where it is looked up by which key, what it was, and its function with the code of that.
_judges: list[tuple[str, Mapping[str, Any], str, Any, Any, Any]] = []
_altered: list[str] = []
_baseline: Any = None
#: Tests that raised something, whatever is reported of them.
_raised: set[str] = set()
_reporter: Reporter | None = None
_selection = TestSelection((), (), ())
_grouped = False
_test_timeout_s = 0.0
_config: Any = None
_started_in = ""
#: What of the agent's runs here, once it does; and where workers tell theirs.
_inside: list[str] = []
_listener: socket.socket | None = None


def pytest_load_initial_conftests() -> None:
    """Let the project in, if no plugin of its own was asked for before: no conftest is loaded yet."""
    let_in(clean=True)


pytest_load_initial_conftests.pytest_impl = {"tryfirst": True}  # type: ignore[attr-defined]  # without pytest at hand


def know_project() -> None:
    """Take in what a worker is told of the project."""
    if not _project:
        _project.update(json.loads(os.environ.pop(PROJECT)))


def let_in(*, clean: bool, load: Callable[[], object] = lambda: None) -> None:
    """Let the project in, once; ``clean`` says whether every plugin of the installation is loaded.

    ``load`` loads the project's own plugins, those that the installation names: none by what lies in its tree.
    """
    global _baseline
    if _baseline is not None:
        return
    gc.freeze()  # pytest collects twice at its end: what was there before is not looked through then
    gc.enable()
    know_project()
    _baseline = importlib.import_module(BASELINE).Baseline()
    tell_dropped_failures()
    _judges.extend(judges())
    installation: Any = sys.modules[START].installation()
    watched = watch(installation)
    if _reporter is not None:
        _reporter.send(clean=clean and installation.clean, watched=watched)
    installation.admit(_project["tests"], note_shadowed, _project["directory"])
    load_given_alone(installation.places)
    for name in installation.shadowed(_project["tests"], _project["paths"]):
        note_shadowed(name)
    load()
    sys.path[:0] = _project["paths"]
    if not _has_workers:
        for name, value in _project["environment"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def pytest_configure(config: Any) -> None:
    global _config, _grouped, _selection, _started_in, _test_timeout_s
    _config = config
    invocation = getattr(config, "invocation_params", None)
    _started_in = str(invocation.dir if invocation is not None else config.invocation_dir)
    if hasattr(config, "workerinput"):
        told = config.workerinput["tangram"]
        _selection = TestSelection(told["wanted"], told["prefixes"], told["done"])
        _grouped, _test_timeout_s = told["grouped"], told["test_timeout_s"]
    elif getattr(config.option, "tx", None):
        _grouped = config.getoption("dist") == "loadgroup"
        config.option.tx = [worker_of(each) for each in config.option.tx]
        config.pluginmanager.register(ControllerHooks(_test_timeout_s), "tangram_controller")
        _test_timeout_s = 0.0  # the tests run elsewhere


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    kept: list[Any] = []
    dropped: list[Any] = []
    for item in items:
        (kept if _selection.takes(name_of(item.nodeid)) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_collection_finish(session: Any) -> None:
    look_at_judges()
    if _reporter is not None and session.items:
        _reporter.selected([name_of(item.nodeid) for item in session.items])


def pytest_collectreport(report: Any) -> None:
    if _reporter is not None and report.failed:
        _reporter.send(broken=name_of(report.nodeid), message=str(report.longrepr)[-MESSAGE_MAX_CHARS:])
    elif _reporter is not None and report.skipped:
        why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        _reporter.send(skipped=name_of(report.nodeid), message=str(why)[:REASON_MAX_CHARS])


def pytest_runtest_logstart(nodeid: str) -> None:
    if _reporter is not None:
        _reporter.send(run=name_of(nodeid))
    if _test_timeout_s:
        faulthandler.dump_traceback_later(_test_timeout_s + TEST_GRACE_S, exit=True, file=2)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, _on_alarm)
            signal.setitimer(signal.ITIMER_REAL, _test_timeout_s)


def pytest_runtest_logfinish() -> None:
    if _test_timeout_s:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Note whether the test raised something, whatever the project's hooks make of it.

    pytest changes what was raised while it makes its report, and so may hooks: it is looked at before and after.
    unittest's cases keep theirs until then. A further try of a test begins with its setup.
    """
    name = name_of(item.nodeid)
    if call.when == "setup":
        _raised.discard(name)
    raised = call.excinfo or getattr(item, "_excinfo", None)
    made: Any = yield
    report = made.get_result()
    if raised or call.excinfo:
        _raised.add(name)
    report.tangram_raised = name in _raised
    if not _altered and not _baseline.is_found_by(item):
        note_altered([f"the builtins, or pytest, of {name}"])


pytest_runtest_makereport.pytest_impl = {"hookwrapper": True, "tryfirst": True}  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "teardown" and not _has_workers:
        look_at_judges()
    if _reporter is None:
        return
    name = name_of(report.nodeid)
    if _has_workers:
        (_raised.add if getattr(report, "tangram_raised", False) else _raised.discard)(name)
    _reporter.phase(name, report)
    if report.when == "teardown" and name in _raised:
        _reporter.turned([name])


def pytest_sessionfinish(session: Any) -> None:
    look_at_judges()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tangram_altered"] = _altered
        session.config.workeroutput["tangram_raised"] = sorted(_raised)


def watch(installation: Any) -> bool:
    """Tell before code of the agent's runs in this process, or a program as its user; return whether that can be seen.

    What was told once cannot be taken back, whatever that code does then.
    """
    add = getattr(sys, "addaudithook", None)
    if add is None:  # Python 3.7
        return False
    tests, told, places = frozenset(_project["tests"]), _inside, installation.places

    def is_librarys(file: str) -> bool:
        return installation.first is not None and installation.first.is_librarys(file)

    def runs_texts(file: str) -> bool:
        """Return whether it may run any text that it is given, and not only its own."""
        if file.startswith("<frozen importlib"):
            return False
        return file in tests or ((is_librarys(file) or file.startswith("<frozen")) and not file.endswith(MAKERS))

    def may_start(file: str) -> bool:
        """Return whether it starts programs of the installation, or processes in which no test runs yet."""
        if file.endswith(ASKERS):
            return is_librarys(file) and not any(map(places.are_the_agents, os.get_exec_path()))
        return file.startswith(_project["directory"]) or (_has_workers and f"{os.sep}execnet{os.sep}" in file)

    def hook(event: str, arguments: Any) -> None:
        if told or event not in WATCHED:
            return
        frame: Any = sys._getframe(1)
        by: str = frame.f_code.co_filename
        what: Any = next(iter(arguments), None)
        if event in CHILDREN:
            if _reporter is not None and not _reporter.children:
                _reporter.children = True
                _reporter.send(children=True)
        elif event == "exec":
            files = {what.co_filename, *origins_of(frame)} - tests
            brought = [file for file in files if file and not file.startswith("<") and places.is_brought(file)]
            if brought or runs_texts(by):
                note_inside(brought[0] if brought else f"a text that {by} runs")
        elif event == "import":
            if what in UNSEEN or (arguments[1] and places.is_brought(arguments[1])):
                note_inside(arguments[1] or f"what {what} loads or starts")
        elif event == "ctypes.dlopen":
            if what and places.is_brought(os.fsdecode(what)):
                note_inside(os.fsdecode(what))
        elif event == "ctypes.dlsym":
            if str(arguments[1]).startswith(STARTS_IN_C):
                note_inside(f"{PROGRAM}{arguments[1]}")
        elif event not in STARTS:
            if event not in MADE or (runs_texts(by) and not by.startswith("<")):
                note_inside(f"what {by} reads ({event})")
        else:
            while frame is not None and frame.f_code.co_filename.endswith(STARTERS):
                frame = frame.f_back
            if frame is None or not may_start(frame.f_code.co_filename):
                note_inside(f"{PROGRAM}{str(what)[:REASON_MAX_CHARS]}")

    forks: Any = sys.modules[FORKS]
    fork_exec = forks.fork_exec

    def told_fork_exec(*arguments: Any) -> Any:
        by = sys._getframe(1).f_code.co_filename
        if not (is_librarys(by) and by.endswith(STARTERS)):
            note_inside(f"{PROGRAM}{str(next(iter(arguments), None))[:REASON_MAX_CHARS]}")
        return fork_exec(*arguments)

    forks.fork_exec = told_fork_exec
    add(hook)
    return True


def origins_of(frame: Any) -> Iterator[str]:
    """Yield the files of a module that is imported, by its specification and by its loader: its code may name another.

    There is none where none is imported.
    """
    for each in (frame, frame.f_back):
        held = {} if each is None or not each.f_code.co_filename.endswith(IMPORTERS) else each.f_locals
        namespace: Any = (held.get("args") or ({},))[-1]
        named = namespace.get("__spec__") if isinstance(namespace, dict) else None
        for spec in (named, getattr(held.get("module"), "__spec__", None)):
            yield str(getattr(spec, "origin", None) or "")
        yield str(getattr(held.get("self"), "path", ""))


def note_inside(what: str) -> None:
    """Tell, once, what of the agent's runs where the tests do; raises OSError if nobody can be told.

    A child of the process that reports tells it as a worker does: it may have closed the report's descriptor.
    """
    if _inside:
        return
    if _reporter is not None and os.getpid() == _reporter.pid:
        _reporter.send(inside=what)
    elif "listener" in _project:
        with socket.socket(socket.AF_UNIX) as line:
            line.setblocking(False)
            line.connect("\0" + _project["listener"])
            line.send(what.encode("utf-8", "backslashreplace"))
    _inside.append(what)


def listen() -> str:
    """Return the name of a socket on which workers tell what is inside, before that could keep them from it."""
    global _listener
    _listener = socket.socket(socket.AF_UNIX)
    _listener.bind("")
    _listener.listen(TELLERS_MAX)
    _listener.setblocking(False)
    name: bytes = _listener.getsockname()
    return name[1:].decode("ascii")


def hear() -> None:
    """Take in what workers have told, and nobody of another user: programs of a solution may know the socket."""
    with contextlib.suppress(BlockingIOError):
        while _listener is not None:
            line, _ = _listener.accept()
            with line:
                _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                line.setblocking(False)
                told = b"a process of the tests"
                with contextlib.suppress(OSError):
                    told = line.recv(MESSAGE_MAX_CHARS) or told
                if uid == os.getuid():
                    note_inside(told.decode("utf-8", "replace"))


def load_given_alone(places: Any) -> None:
    """Have pytest import a given test by its file where the agent has others by its name, or code above it.

    What of them a test asks for it gets as ever. Nothing compiled of a given test is read or written: who may not read
    the test might read that.
    """
    tests = frozenset(_project["tests"])
    pythons, rewrite = sys.modules["_pytest.python"], sys.modules["_pytest.assertion.rewrite"]
    usual: Any = getattr(pythons, "import_path", None)
    write: Any = getattr(rewrite, "_write_pyc", None)
    read: Any = getattr(rewrite, "_read_pyc", None)

    def import_path(path: Any, **named: Any) -> Any:
        place = os.path.abspath(str(path))  # noqa: PTH100
        above = packages_above(place)
        others = [each for each in rivals(place) if place in tests and places.is_brought(each)]
        if not others and not any(map(places.is_brought, above)):
            return usual(path, **named)
        if place in tests:
            return loaded_alone(place, above, str(getattr(named.get("mode"), "value", named.get("mode"))))
        if place in above and any(test.startswith(os.path.join(os.path.dirname(place), "")) for test in tests):  # noqa: PTH118, PTH120
            return types.ModuleType("package")
        return usual(path, **named)

    if usual is not None:
        pythons.import_path = import_path  # type: ignore[attr-defined]
    if write is not None and read is not None:
        rewrite._write_pyc = lambda state, code, *rest: code.co_filename not in tests and write(state, code, *rest)  # type: ignore[attr-defined]
        rewrite._read_pyc = lambda source, *rest: None if str(source) in tests else read(source, *rest)  # type: ignore[attr-defined]


def rivals(path: str) -> list[str]:
    """Return what Python would import by the name of a file in its directory, before that file."""
    stem = path[: -len(".py")]
    others = [stem + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return [each for each in (os.path.join(stem, "__init__.py"), stem, *others) if os.path.exists(each)]  # noqa: PTH110, PTH118


def packages_above(path: str) -> list[str]:
    """Return the files of the packages in which a file lies, innermost first."""
    found = []
    directory = Path(path).parent
    while (directory / "__init__.py").is_file():
        found.append(str(directory / "__init__.py"))
        directory = directory.parent
    return found


def loaded_alone(path: str, above: list[str], mode: str) -> Any:
    """Return the module of a test, imported by its file under the name that it would have."""
    names = [Path(place).parent.name for place in reversed(above)]
    root = str(Path(above[-1]).parent.parent) if above else str(Path(path).parent)
    name = ".".join([*names, Path(path).stem])
    if name in sys.modules:
        return sys.modules[name]
    if mode == "prepend" and sys.path[0] != root:
        sys.path.insert(0, root)
    elif mode == "append" and root not in sys.path:
        sys.path.append(root)
    plain = importlib.util.spec_from_file_location(name, path)
    hook: Any = getattr(_config.pluginmanager, "rewrite_hook", None)
    spec = None
    if hasattr(hook, "_find_spec"):
        hook._find_spec = lambda *_: plain
        try:
            spec = hook.find_spec(name)
        finally:
            del hook._find_spec
    module = importlib.util.module_from_spec(spec or plain)  # type: ignore[arg-type]
    sys.modules[name] = module
    try:
        module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def hide() -> None:
    """Keep other processes' hands off this one: nobody but root may trace it, or open its memory or its files.

    A program that a test starts is of the same user, and else could write to the memory of the test that judges it.
    """
    with contextlib.suppress(ImportError, OSError, AttributeError):  # a Python without ctypes
        importlib.import_module("ctypes").CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def tell_dropped_failures() -> None:
    """Have unittest take its own `_ShouldStop` for a failure, which it drops, but from a subtest that has failed."""
    case: Any = importlib.import_module("unittest.case")
    execute, failure, dropped = case._Outcome.testPartExecutor, AssertionError, case._ShouldStop

    def testPartExecutor(outcome: Any, *args: Any, **named: Any) -> Iterator[None]:  # noqa: N802  # unittest's name
        with execute(outcome, *args, **named):
            try:
                yield
            except dropped as stop:
                if outcome.success:
                    raise failure("unittest would drop this exception") from stop
                raise

    case._Outcome.testPartExecutor = contextlib.contextmanager(testPartExecutor)


def judges() -> Iterator[tuple[str, Mapping[str, Any], str, Any, Any, Any]]:
    """Yield the functions that make verdicts, and the classes that hold them; ours are among them."""
    found: list[tuple[Any, str]] = [(sys.modules.get(module), name) for module, names in JUDGES for name in names]
    for own in filter(None, map(sys.modules.get, (*COMPARERS, *OURS))):
        things = vars(own).items()
        found += [(own, name) for name, thing in things if getattr(thing, "__module__", "") == own.__name__]
    for module, name in found:
        scope: Mapping[str, Any] = getattr(module, "__dict__", {})
        thing = scope.get(name)
        places = [("", scope, name)]
        if isinstance(thing, type):
            yield f"{module.__name__}.{name}", scope, name, thing, None, None
            places = [(f"{name}.", vars(thing), key) for key in vars(thing)]
        for of, place, key in places:
            value = place.get(key)
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                yield f"{module.__name__}.{of}{key}", place, key, value, function, function.__code__


def look_at_judges() -> None:
    """Note which of them the project has changed."""
    if not _altered:
        changed = [
            label
            for label, scope, key, value, function, code in _judges
            if scope.get(key) is not value or (function is not None and function.__code__ is not code)
        ]
        note_altered(changed + _baseline.altered())


def note_altered(names: list[str]) -> None:
    """Tell of what the project has changed, here or, from a worker, when its session ends."""
    _altered.extend(names)
    if names and _reporter is not None:
        _reporter.send(altered=names[:ALTERED_MAX])


def note_shadowed(name: str) -> None:
    note_altered([f"the module {name}"])


def worker_of(spec: str) -> str:
    """Return how a worker is started: of the project's modules it takes none for one of the installation."""
    if spec != "popen":
        return spec
    return f"popen//python={shlex.quote(sys.executable)} -s -S -c {shlex.quote(WORKER)}"


class ControllerHooks:
    """What pytest-xdist asks the controlling process."""

    def __init__(self, test_timeout_s: float) -> None:
        self._test_timeout_s = test_timeout_s
        self._told = False

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["tangram"] = {
            "wanted": sorted(_selection.wanted),
            "prefixes": _selection.prefixes,
            "done": sorted(_selection.done),
            "grouped": _grouped,
            "test_timeout_s": self._test_timeout_s,
        }

    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        if error and _reporter is not None:
            _reporter.send(crashed=str(error)[:MESSAGE_MAX_CHARS])
        output = getattr(node, "workeroutput", None) or {}
        if output.get("tangram_altered") and _reporter is not None:
            _reporter.send(altered=output["tangram_altered"][:ALTERED_MAX])
        if _reporter is not None:
            _reporter.turned(output.get("tangram_raised", ()))

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if _reporter is not None and not self._told:
            self._told = True
            _reporter.selected([name_of(id) for id in ids])


def name_of(nodeid: str) -> str:
    """Return the id as seen from the working directory, wherever pytest finds its root."""
    if _grouped:
        nodeid = _GROUP.sub("", nodeid)
    root = os.path.relpath(str(getattr(_config, "rootpath", None) or _config.rootdir), _started_in)
    if root == ".":
        return nodeid
    path, separator, rest = nodeid.partition("::")
    return os.path.normpath(str(Path(root) / path)) + separator + rest


def _on_alarm(*_: object) -> None:
    import pytest

    pytest.fail(f"the test ran longer than {_test_timeout_s:g} s")


def drop_bytecode(paths: Iterable[str]) -> bool:
    """Delete compiled files beneath the working directory: those of tests, and those older than their source.

    Return whether all could be looked at and deleted. What would keep whoever opens it waiting for ever goes as well.
    Python takes compiled code for fresh when the source's size and *second* are the same: a fix that is written in
    the second of the run before it would be tested as it was before, and tests could be compiled from another text.
    """
    whole = True
    tested = {os.path.normpath(path if Path(path).is_dir() else Path(path).parent) for path in paths}
    for directory, folders, files in os.walk("."):
        folders[:] = [folder for folder in folders if folder not in SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py") or name in READ_BY_PYTEST:
                with contextlib.suppress(OSError):
                    there = os.stat(f"{directory}/{name}")  # noqa: PTH116
                    if stat.S_ISFIFO(there.st_mode) or (stat.S_ISCHR(there.st_mode) and there.st_rdev != NULL):
                        Path(directory, name).unlink()
        cache = Path(directory, "__pycache__")
        if "__pycache__" in folders and (cache.is_symlink() or not os.access(cache, os.R_OK | os.W_OK | os.X_OK)):
            whole = False
        if not directory.endswith("__pycache__"):
            continue
        home = os.path.normpath(Path(directory).parent)
        ours = any(place == "." or begins(home, place) for place in tested)
        for name in files:
            compiled, source = Path(directory, name), Path(directory).parent / (name.partition(".")[0] + ".py")
            try:
                if not (ours or _TESTS.search(name) or source.stat().st_mtime_ns >= compiled.stat().st_mtime_ns):
                    continue
            except OSError:
                continue
            try:
                compiled.unlink()
            except OSError:
                whole = False
    return whole


def load_installed_first() -> None:
    """Have pytest load the plugins of the installation before the project is let in, and the project's then."""
    manager: Any = importlib.import_module("pluggy").PluginManager
    pytests: Any = importlib.import_module("_pytest.config").PytestPluginManager
    load, import_plugin = manager.load_setuptools_entrypoints, pytests.import_plugin

    def load_all(self: Any, *, clean: bool) -> int:
        """Load what is installed, then let the project in, then load those of its plugins that the installation names.

        What lies in the project's tree alone is never loaded, whatever it says of itself.
        """
        know_project()
        installation: Any = sys.modules[START].installation()
        waits = installation.waits
        later = [each for each in _projects_plugins() if not self.is_blocked(each)]
        places = [] if _project["own_options"] else installation.waiting
        for each in later:
            self.set_blocked(each)

        def load_others() -> None:
            for each in later:
                self._name2plugin.pop(each, None)
            for each in (*later, *_plugins_in(places)):
                load(self, GROUP, each)

        try:
            count: int = load(self, GROUP)
        except ImportError:
            if not waits:
                raise
            names = [name for name, _ in _entry_points()]
            let_in(clean=False, load=load_others)
            return sum(load(self, GROUP, each) for each in names)
        let_in(clean=clean, load=load_others)
        return count

    def load_setuptools_entrypoints(self: Any, group: str, name: str | None = None) -> Any:
        if group != GROUP or name is not None:
            return load(self, group, name)
        return load_all(self, clean=True) if _baseline is None else 0

    def import_named(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
        """Import a plugin that somebody names, which may be a module of the project."""
        essential = name in _builtin_plugins() or name in sys.modules or self.is_blocked(name)
        if _baseline is None and not essential and not _is_installed(name):
            if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
                let_in(clean=False)
            else:
                load_all(self, clean=False)
        return import_plugin(self, name, *arguments, **named)

    manager.load_setuptools_entrypoints, pytests.import_plugin = load_setuptools_entrypoints, import_named


def _builtin_plugins() -> Any:
    return sys.modules["_pytest.config"].builtin_plugins


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _projects_plugins() -> list[str]:
    """Return the names of the plugins of the installation whose modules lie in the project."""
    if not sys.modules[START].installation().waits:
        return []
    return [name for name, module in _entry_points() if not _is_installed(module)]


def _plugins_in(places: list[str]) -> list[str]:
    """Return the names of plugins whose distribution lies in these directories, which the installation names."""
    return [name for name, _ in _entry_points(path=places)] if places else []


def _entry_points(**where: Any) -> list[tuple[str, str]]:
    """Return the name and the module of each plugin of pytest that is installed on the path, or ``where``."""
    try:
        metadata = importlib.import_module("importlib.metadata")
    except ImportError:  # Python 3.7, where pytest brings its own
        metadata = importlib.import_module("importlib_metadata")
    points = [point for each in metadata.distributions(**where) for point in each.entry_points if point.group == GROUP]
    return [(point.name, point.value.partition(":")[0]) for point in points]


if PROJECT in os.environ:  # a worker
    hide()
    load_installed_first()
