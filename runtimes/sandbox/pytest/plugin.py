"""Runs pytest inside a sandbox and reports every verdict as it is known. Standard library and pytest, Python 3.7 on.

Run as ``python3 -I -S -c START SOURCE``; standard input holds one JSON object {"nonce", "source", "paths", "wanted",
"prefixes", "done", "workers", "dist", "args", "test_timeout_s", "own_options"}. Standard output becomes the report, one
JSON line each:

    {"start": {"pytest", "xdist", "workers", "noticed"}}   {"selected": [id, ...]}   {"run": id}
    {"test": id, "verdict"}   {"broken": path, "message"}   {"absent": why}   {"altered": [name]}   {"turned": id}
    {"crashed": worker's error}   {"blocked": why}   {"end": exit status}

each with the nonce. What the suite prints goes to standard error. Nothing of the project is imported before pytest and
the plugins of the installation are: not from the working directory, PYTHONPATH or the user's own site directory, and no
entry point of theirs. Then the project's code runs in this process, or in its workers. It is the gateway that judges,
outside the sandbox: it takes each verdict once, and whatever does not fit together is worth nothing. What that cannot
hold is code that lies in the process of the test which judges it (docs/SANDBOXES.md).
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MODULE = "tangram_pytest"
IDS_PER_LINE, MESSAGE_MAX_CHARS = 500, 4000
ALTERED_MAX = NOTICED_MAX = 10
#: Seconds between the exception that ends an overlong test and the end of its process.
TEST_GRACE_S = 5.0
WORKER_MESSAGE_MAX_BYTES = 64 * 2**20  # all the ids of a suite are one
#: ``--dist loadgroup`` puts the group's name behind the id.
_GROUP = re.compile(r"@[^\]@]*$")
#: What tells the processes of a run where the project's modules are, and what their environment was.
PROJECT = "TANGRAM_PROJECT"
#: The functions that make a verdict of what a test does; whoever changes one of them changes what is told.
JUDGES = (
    ("_pytest.runner", ("CallInfo", "runtestprotocol", "pytest_runtest_call", "pytest_runtest_makereport")),
    ("_pytest.reports", ("BaseReport", "TestReport", "CollectReport")),
    ("_pytest.python", ("Function", "pytest_pyfunc_call")),
    ("_pytest.python_api", ("ApproxBase", "ApproxScalar", "RaisesContext")),
    ("_pytest.raises", ("AbstractRaises", "RaisesExc")),
    ("_pytest.skipping", ("pytest_runtest_makereport",)),
    ("_pytest.outcomes", ("fail", "skip", "exit", "xfail")),
    ("unittest.case", ("TestCase", "_Outcome", "_AssertRaisesContext")),
)
#: Names under which a file of the project passes for a module of Python's or of ours.
NOT_THE_PROJECTS = ("pytest", "_pytest", "pluggy", "xdist", "execnet", "sitecustomize", "usercustomize", MODULE)
#: A worker is a process of the same kind, and takes its first modules from the installation too.
WORKER = "import sys; sys.path[:] = [place for place in sys.path if place]; exec(sys.argv[-1])"
#: Trees in which nobody edits Python.
SKIPPED_FOLDERS = frozenset({".git", ".hg", "node_modules", "site-packages"})
#: Compiled tests, by their names or because pytest compiled them.
_TESTS = re.compile(r"^(test_|conftest\.)|_test\.|-pytest-")


class Reporter:
    """Writes the report, and keeps the running verdict of each test."""

    def __init__(self, fd: int, nonce: str) -> None:
        self._fd = fd
        self._nonce = nonce
        self._verdicts: dict[str, str] = {}

    def send(self, **record: Any) -> None:
        data = memoryview((json.dumps({"nonce": self._nonce, **record}) + "\n").encode())
        while data:
            data = data[os.write(self._fd, data) :]

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
            self.send(test=id, verdict=self._verdicts.pop(id, "error"))


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
_judges: dict[str, Any] = {}
_altered: list[str] = []
_reporter: Reporter | None = None
_selection = TestSelection((), (), ())
_grouped = False
_test_timeout_s = 0.0
_config: Any = None
_started_in = ""


def pytest_load_initial_conftests() -> None:
    """Let the project in: the plugins of the installation are loaded, and no conftest is yet."""
    if not _project:
        _project.update(json.loads(os.environ.pop(PROJECT)))  # a worker
    _judges.update(judges())
    sys.path[:0] = _project["paths"]
    if not _has_workers:
        for name, value in _project["environment"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


pytest_load_initial_conftests.pytest_impl = {"tryfirst": True}  # type: ignore[attr-defined]  # without pytest at hand


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
    if _reporter is not None and session.items:
        _reporter.selected([name_of(item.nodeid) for item in session.items])


def pytest_collectreport(report: Any) -> None:
    if _reporter is not None and report.failed:
        _reporter.send(broken=name_of(report.nodeid), message=str(report.longrepr)[-MESSAGE_MAX_CHARS:])


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
    """Take what the test raised for its end, whatever the project's hooks have made of it."""
    made: Any = yield
    report = made.get_result()
    if call.excinfo is not None and report.outcome == "passed" and not hasattr(report, "wasxfail"):
        report.outcome, report.tangram_turned = "failed", True
        report.longrepr = report.longrepr or str(call.excinfo.value)


pytest_runtest_makereport.pytest_impl = {"hookwrapper": True, "tryfirst": True}  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "teardown" and not _has_workers:
        look_at_judges()
    if _reporter is not None:
        if getattr(report, "tangram_turned", False):
            _reporter.send(turned=name_of(report.nodeid))
        _reporter.phase(name_of(report.nodeid), report)


def pytest_sessionfinish(session: Any) -> None:
    look_at_judges()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tangram_altered"] = _altered


def judges() -> dict[str, Any]:
    """Return the functions that make verdicts, each with its code, by name; ours are among them."""
    found: dict[str, Any] = {}
    ours = sys.modules.get(MODULE)
    for module, names in (*JUDGES, (MODULE, tuple(vars(ours)) if ours is not None else ())):
        for name in names:
            thing = getattr(sys.modules.get(module), name, None)
            for key, value in vars(thing).items() if isinstance(thing, type) else [("", thing)]:
                function = getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    found[f"{module}.{name}.{key}".rstrip(".")] = function, function.__code__
    return found


def look_at_judges() -> None:
    """Note which of them the project has changed."""
    if not _altered:
        now = judges()
        _altered.extend(name for name, judge in _judges.items() if now.get(name) != judge)
        if _altered and _reporter is not None:
            _reporter.send(altered=_altered[:ALTERED_MAX])


def worker_of(spec: str) -> str:
    """Return how a worker is started: of the project's modules it takes none for one of the installation."""
    if spec != "popen":
        return spec
    return f"popen//python={shlex.quote(sys.executable)} -c {shlex.quote(WORKER)}"


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
        altered = (getattr(node, "workeroutput", None) or {}).get("tangram_altered")
        if altered and _reporter is not None:
            _reporter.send(altered=altered[:ALTERED_MAX])

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


# --- the controlling process


def main() -> None:
    with open(0, "rb", closefd=False) as incoming:
        told = json.load(incoming)
    reporter = Reporter(os.dup(1), told["nonce"])
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    project = json.loads(os.environ.pop(PROJECT))
    try:
        pytest = _pytest_of(project)
    except ImportError:
        reporter.send(absent="no pytest")
        return
    try:
        directory = _own_directory(told["source"])
    except OSError as error:
        reporter.send(blocked=f"no temporary file can be made: {error}")
        return
    try:
        status = int(_run(pytest, reporter, told, project, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    reporter.send(end=status)
    os._exit(status)  # a thread that a test left behind must not keep the answer waiting


def _own_directory(source: str) -> str:
    """Return a new directory with this source as a module, and without options; raises OSError."""
    directory = tempfile.mkdtemp(prefix="tangram-")
    Path(directory, MODULE + ".py").write_text(source, encoding="utf-8")
    Path(directory, "pytest.ini").write_text("[pytest]\n", encoding="ascii")
    return directory


def _pytest_of(project: dict[str, Any]) -> Any:
    """Return pytest as it is installed, or else from the caller's PYTHONPATH; raises ImportError."""
    try:
        return importlib.import_module("pytest")
    except ImportError:
        sys.path += project["paths"][1:]
        return importlib.import_module("pytest")


def _run(pytest: Any, reporter: Reporter, told: dict[str, Any], project: dict[str, Any], directory: str) -> int:
    sys.path.insert(0, directory)  # before xdist, whose workers begin with what it finds there
    paths = [path for path in told["paths"] if Path(path).exists()]
    xdist = _xdist_version()
    workers = told["workers"] if xdist else 1
    noticed = noticed_in(project["paths"])
    reporter.send(start={"pytest": pytest.__version__, "xdist": xdist, "workers": workers, "noticed": noticed})
    if told["paths"] and not paths:
        return 5  # pytest's own status for no tests
    drop_bytecode(paths)
    plugin: Any = importlib.import_module(MODULE)
    plugin._reporter, plugin._has_workers = reporter, workers > 1
    plugin._selection = plugin.TestSelection(told["wanted"], told["prefixes"], told["done"])
    plugin._test_timeout_s = told["test_timeout_s"]
    arguments = ["-p", MODULE]
    if xdist:
        # Also where one process is enough: the project's own addopts may ask for more.
        arguments += ["-n", str(workers), "--dist", _dist(told["dist"], xdist)] if workers > 1 else ["-n", "0"]
    if told["own_options"]:
        arguments += ["-c", str(Path(directory) / "pytest.ini"), "--rootdir", str(Path.cwd()), "--noconftest"]
    project["plugins"] = named_plugins(told["args"])
    if workers > 1:
        os.environ.setdefault("PYTHONHASHSEED", "0")  # else workers may disagree on the ids of parameters from sets
        os.environ[PROJECT] = json.dumps(project)
        _hide()
        _check_messages()
    plugin._project.update(project)
    plugin.import_plugins(project)
    status: int = pytest.main([*arguments, *told["args"], *paths])
    return status


def _check_messages() -> None:
    """Take a worker that says what is no message for one that has crashed, rather than await what it announces."""
    message = importlib.import_module("execnet.gateway_base").Message

    def from_io(io: Any) -> Any:
        kind, channel, length = struct.unpack("!bii", io.read(9) or b"\xff" * 9)
        if not (0 <= kind < len(message._types) and 0 <= length <= WORKER_MESSAGE_MAX_BYTES):
            raise EOFError("a worker said what is no message")
        return message(kind, channel, io.read(length))

    message.from_io = staticmethod(from_io)


def _hide() -> None:
    """Keep the workers' hands off this process, which runs no tests: nobody but root may trace it or open its files."""
    importlib.import_module("ctypes").CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def named_plugins(arguments: list[str]) -> list[str]:
    """Return the plugins that the caller names, which may be modules of the project."""
    named = [arguments[at + 1] for at, option in enumerate(arguments[:-1]) if option == "-p"]
    named += [argument[2:] for argument in arguments if argument.startswith("-p") and len(argument) > 2]
    named += os.environ.get("PYTEST_PLUGINS", "").split(",")
    return [name for name in named if name and not name.startswith("no:")]


def import_plugins(project: dict[str, Any]) -> None:
    """Import the plugins that the caller names, those of the installation first."""
    kept = list(sys.path)
    sys.path += project["paths"]
    for name in project["plugins"]:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # an entry point's name, or pytest says what is wrong with it
    sys.path[:] = kept


def noticed_in(places: Iterable[str]) -> list[str]:
    """Return what of the project would pass for a part of the installation, and is not taken for one."""
    installed = {*NOT_THE_PROJECTS, *getattr(sys, "stdlib_module_names", sys.builtin_module_names)}
    found = []
    for place in places:
        for name in sorted(path.name for path in Path(place).glob("*")):
            stem = name[:-3] if name.endswith(".py") else ""
            points = Path(place, name, "entry_points.txt")  # of a distribution, with its plugins if it has any
            plugin = points.is_file() and b"[pytest11]" in points.read_bytes()
            if stem in installed or name.endswith(".pth") or plugin:
                found.append(f"{name} of the project was kept from pytest and its plugins")
    user = Path("~/.local/lib/python{}.{}/site-packages".format(*sys.version_info)).expanduser()
    found += [f"{path.name} of the user's own site directory was passed over" for path in sorted(user.glob("*.p*"))]
    return found[:NOTICED_MAX]


def drop_bytecode(paths: Iterable[str]) -> None:
    """Delete compiled files beneath the working directory: those of tests, and those older than their source.

    Python takes compiled code for fresh when the source's size and *second* are the same: a fix that is written in
    the second of the run before it would be tested as it was before, and tests could be compiled from another text.
    """
    tested = {os.path.normpath(path if Path(path).is_dir() else Path(path).parent) for path in paths}
    for directory, folders, files in os.walk("."):
        folders[:] = [folder for folder in folders if folder not in SKIPPED_FOLDERS]
        if not directory.endswith("__pycache__"):
            continue
        home = os.path.normpath(Path(directory).parent)
        ours = any(place == "." or begins(home, place) for place in tested)
        for name in files:
            compiled, source = Path(directory, name), Path(directory).parent / (name.partition(".")[0] + ".py")
            try:
                if ours or _TESTS.search(name) or source.stat().st_mtime_ns >= compiled.stat().st_mtime_ns:
                    compiled.unlink()
            except OSError:
                continue


def _xdist_version() -> str:
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        return ""
    try:
        return str(getattr(importlib.import_module("xdist"), "__version__", "0"))
    except ImportError:
        return ""


def _dist(wanted: str, version: str) -> str:
    """Return the wanted distribution, if this xdist knows it: ``worksteal`` is as old as 3.2."""
    numbers = [int(word) for word in re.findall(r"\d+", version)[:2]]
    return "load" if wanted == "worksteal" and numbers < [3, 2] else wanted


if __name__ == "__main__":
    main()
elif PROJECT in os.environ:
    import_plugins(json.loads(os.environ[PROJECT]))  # a worker
