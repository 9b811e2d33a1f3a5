"""Runs pytest inside a sandbox and reports every verdict as it is known. Standard library and pytest, Python 3.7 on.

Run as ``python3 -c SOURCE``; standard input holds one JSON object {"nonce", "source", "paths", "wanted", "prefixes",
"done", "workers", "dist", "args", "test_timeout_s"}. Standard output becomes the report, one JSON line each:

    {"start": {"pytest", "xdist", "workers"}}   {"selected": [id, ...]}   {"run": id}
    {"test": id, "verdict"}   {"broken": path, "message"}   {"absent": why}   {"end": exit status}

each with the nonce. What the suite prints goes to standard error. The report's descriptor is private to the process
that controls the run, which executes no tests itself when there are workers, and the nonce came by a pipe. That keeps
accidents and plain forgeries out; but a suite runs as the same user (and without workers in the same process): one
that goes after the report with a debugger's means can forge it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MODULE = "tangram_pytest"
IDS_PER_LINE = 500
MESSAGE_MAX_CHARS = 4000
#: Seconds between the exception that ends an overlong test and the end of its process.
TEST_GRACE_S = 5.0
#: ``--dist loadgroup`` puts the group's name behind the id.
_GROUP = re.compile(r"@[^\]@]*$")
#: Trees in which nobody edits Python.
SKIPPED_FOLDERS = frozenset({".git", ".hg", "node_modules", "site-packages"})
_NO_PYTEST = "no pytest: install it in the sandbox's image"


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

_reporter: Reporter | None = None
_selection = TestSelection((), (), ())
_grouped = False
_test_timeout_s = 0.0
_config: Any = None
_started_in = ""


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


def pytest_runtest_logreport(report: Any) -> None:
    if _reporter is not None:
        _reporter.phase(name_of(report.nodeid), report)


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
    del sys.path[0]  # a file of the project must not pass for pytest
    try:
        import pytest
    except ImportError:
        reporter.send(absent=_NO_PYTEST)
        return
    drop_stale_bytecode()
    directory = tempfile.mkdtemp(prefix="tangram-")
    try:
        sys.path[:0] = [str(Path.cwd())]
        sys.path.append(directory)
        reporter.send(end=int(_run(pytest, reporter, told, directory)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that a test left behind must not keep the answer waiting


def _run(pytest: Any, reporter: Reporter, told: dict[str, Any], directory: str) -> int:
    (Path(directory) / (MODULE + ".py")).write_text(told["source"], encoding="utf-8")
    plugin: Any = importlib.import_module(MODULE)
    plugin._reporter = reporter
    plugin._selection = plugin.TestSelection(told["wanted"], told["prefixes"], told["done"])
    plugin._test_timeout_s = told["test_timeout_s"]
    paths = [path for path in told["paths"] if Path(path).exists()]
    if told["paths"] and not paths:
        reporter.send(start={"pytest": pytest.__version__, "xdist": "", "workers": 0})
        return 5  # pytest's own status for no tests
    xdist = _xdist_version()
    workers = told["workers"] if xdist else 1
    reporter.send(start={"pytest": pytest.__version__, "xdist": xdist, "workers": workers})
    arguments = ["-p", MODULE]
    if xdist:
        # Also where one process is enough: the project's own addopts may ask for more.
        arguments += ["-n", str(workers), "--dist", _dist(told["dist"], xdist)] if workers > 1 else ["-n", "0"]
    if workers > 1:
        os.environ.setdefault("PYTHONHASHSEED", "0")  # else workers may disagree on the ids of parameters from sets
    status: int = pytest.main([*arguments, *told["args"], *paths])
    return status


def drop_stale_bytecode() -> None:
    """Delete compiled files that are older than their source, beneath the working directory.

    Python takes compiled code for fresh when the source's size and *second* are the same: a fix that is written in
    the second of the run before it would be tested as it was before.
    """
    for directory, folders, files in os.walk("."):
        folders[:] = [folder for folder in folders if folder not in SKIPPED_FOLDERS]
        if not directory.endswith("__pycache__"):
            continue
        for name in files:
            compiled, source = Path(directory, name), Path(directory).parent / (name.partition(".")[0] + ".py")
            try:
                if source.stat().st_mtime_ns >= compiled.stat().st_mtime_ns:
                    compiled.unlink()
            except OSError:
                continue


def _xdist_version() -> str:
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        return ""
    try:
        xdist = importlib.import_module("xdist")
    except ImportError:
        return ""
    return str(getattr(xdist, "__version__", "0"))


def _dist(wanted: str, version: str) -> str:
    """Return the wanted distribution, if this xdist knows it: ``worksteal`` is as old as 3.2."""
    numbers = [int(word) for word in re.findall(r"\d+", version)[:2]]
    return "load" if wanted == "worksteal" and numbers < [3, 2] else wanted


if __name__ == "__main__":
    main()
