"""Begins pytest inside a sandbox, clear of the project's code. Standard library and pytest, Python 3.7 on.

Run as ``python3 -s -S -c SOURCE``, with the variables of `HIDE` by other names; standard input holds one JSON object
{"nonce", "modules", "compiled", "paths", "wanted", "prefixes", "done", "workers", "dist", "args", "test_timeout_s",
"own_options", "tests", "start", "programs"}, of which ``modules`` are the sources of `plugin` and of what it imports,
by name, and ``compiled`` the same as files of some Python's bytecode, in base64. Standard output becomes the report
(`plugin`), to which this process adds

    {"start": {"pytest", "xdist", "workers", "noticed"}}   {"absent": why}   {"blocked": why}   {"end": exit status}
    {"clean": whether Python, pytest and its plugins began with nothing of the agent's}

What the suite prints goes to standard error. Nothing of the project is imported before pytest and the plugins of the
installation are: not from the working directory, PYTHONPATH or the user's own site directory, and no entry point of
theirs.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import os
import re
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: The modules that lie in a directory of their own.
MODULE, BASELINE, START, PROGRAMS = "tangram_pytest", "tangram_baseline", "tangram_start", "tangram_grading"
#: Variables by which a project would have a part in Python's start, and what precedes the names that they have then.
HIDE = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONSTARTUP", "PYTHONPYCACHEPREFIX")
HIDDEN = "TANGRAM_HIDDEN_"
#: What tells the processes of a run where the project's modules are, and what their environment was.
PROJECT = "TANGRAM_PROJECT"
NOTICED_MAX = 10
WORKER_MESSAGE_MAX_BYTES = 64 * 2**20  # all the ids of a suite are one
#: Names under which a file of the project passes for a module of Python's or of ours.
NOT_THE_PROJECTS = (
    *("pytest", "_pytest", "pluggy", "xdist", "execnet", "sitecustomize", "usercustomize"),
    *(MODULE, BASELINE, START, PROGRAMS),
)

Send = Callable[..., None]


def main() -> None:
    with open(0, "rb", closefd=False) as incoming:
        told = json.load(incoming)
    send = sender(os.dup(1), told["nonce"])
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        directory = _own_directory(told["modules"], told["compiled"])
    except OSError as error:
        send(blocked=f"no temporary file can be made: {error}")
        return
    try:
        project = _project(told, directory)
        installation = begin(project)
        try:
            pytest = _pytest_of(project, installation)
        except ImportError:
            send(absent="no pytest")
            return
        status = int(_run(pytest, send, told, project, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    send(end=status)
    os._exit(status)  # a thread that a test left behind must not keep the answer waiting


def _project(told: dict[str, Any], directory: str) -> dict[str, Any]:
    """Return where the project's modules are, and its part of the environment, which it gets back before its code."""
    kept = {name: os.environ.pop(HIDDEN + name, None) for name in HIDE}
    kept["PYTHONNOUSERSITE"] = "1"  # as we were started, and so that workers and what tests start are
    os.environ["PYTHONNOUSERSITE"] = "1"
    here = os.getcwd()  # noqa: PTH109
    places = [os.path.abspath(place) for place in (kept["PYTHONPATH"] or "").split(":") if place]  # noqa: PTH100
    start = told["start"]
    if not any((here + "/").startswith(root.rstrip("/") + "/") for root in start["roots"]):
        start["brought"] = None  # a sandbox without a root of its own: its files have other names here
    return {
        "paths": [here, *places],
        "environment": kept,
        "tests": [os.path.abspath(path) for path in told["tests"]],  # noqa: PTH100
        "directory": directory,
        "own_options": told["own_options"],
        "programs": told["programs"],
        "start": {
            **start,
            "roots": [here, *start["roots"]],
            "kept": [*start["kept"], directory],
            "since_ns": time.time_ns(),
        },
    }


def begin(project: dict[str, Any]) -> Any:
    """Run Python's `site` without the project, and return what is installed."""
    sys.path.insert(0, project["directory"])
    module = importlib.import_module(START)
    sys.path.remove(project["directory"])
    return module.begin(project["start"])


def sender(fd: int, nonce: str) -> Send:
    """Return what writes one line of the report, whatever a test has put in the place of json or os by then."""
    encode, write = json.JSONEncoder().encode, os.write

    def send(**record: Any) -> None:
        data = memoryview((encode({"nonce": nonce, **record}) + "\n").encode())
        while data:
            data = data[write(fd, data) :]

    return send


def _own_directory(modules: dict[str, str], compiled: dict[str, str]) -> str:
    """Return a new directory with our modules, compiled if that is for this Python, and no options; raises OSError."""
    directory = tempfile.mkdtemp(prefix="tangram-")
    for name, source in modules.items():
        path = Path(directory, name + ".py")
        path.write_text(source, encoding="utf-8")
        bytecode = base64.b64decode(compiled.get(name, ""))
        if bytecode.startswith(importlib.util.MAGIC_NUMBER) and not sys.flags.optimize:
            place = Path(importlib.util.cache_from_source(str(path)))
            if place.parent.parent == path.parent:  # else PYTHONPYCACHEPREFIX names a place that is not ours
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(bytecode)
    Path(directory, "pytest.ini").write_text("[pytest]\n", encoding="ascii")
    return directory


def _pytest_of(project: dict[str, Any], installation: Any) -> Any:
    """Return pytest as it is installed, or else from the project or the caller's PYTHONPATH; raises ImportError."""
    try:
        return importlib.import_module("pytest")
    except ImportError:
        installation.clean = False
        installation.admit(project["tests"])
        sys.path += project["paths"][1:]
        return importlib.import_module("pytest")


def _run(pytest: Any, send: Send, told: dict[str, Any], project: dict[str, Any], directory: str) -> int:
    sys.path.insert(0, directory)  # before xdist, whose workers begin with what it finds there
    paths = [path for path in told["paths"] if Path(path).exists()]
    xdist = "" if _is_off("xdist", told["args"]) else _xdist_version()
    workers = told["workers"] if xdist else 1
    noticed = noticed_in(dict.fromkeys([*project["paths"], *sys.modules[START].installation().waiting]))
    send(start={"pytest": pytest.__version__, "xdist": xdist, "workers": workers, "noticed": noticed})
    if told["paths"] and not paths:
        return 5  # pytest's own status for no tests
    plugin: Any = importlib.import_module(MODULE)
    plugin.hide()
    if not plugin.drop_bytecode(paths):
        # What was compiled before could not be taken away: nothing of it is read.
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(directory) / "compiled")
        project["environment"]["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    plugin._reporter, plugin._has_workers = plugin.Reporter(send), workers > 1
    plugin._selection = plugin.TestSelection(told["wanted"], told["prefixes"], told["done"])
    plugin._test_timeout_s = told["test_timeout_s"]
    arguments = ["-p", MODULE]
    width: list[str] = []
    if xdist:
        # Also where one process is enough: the project's own addopts, or the caller's, may ask for more.
        width = ["-n", str(workers), "--dist", _dist(told["dist"], xdist)] if workers > 1 else ["-n", "0"]
    if told["own_options"]:
        arguments += ["-c", str(Path(directory) / "pytest.ini"), "--rootdir", str(Path.cwd()), "--noconftest"]
    project["listener"] = plugin.listen()
    if workers > 1:
        os.environ.setdefault("PYTHONHASHSEED", "0")  # else workers may disagree on the ids of parameters from sets
        os.environ[PROJECT] = json.dumps(project)
        _check_messages()
    plugin._project.update(project)
    plugin.load_installed_first()
    status: int = pytest.main([*arguments, *told["args"], *width, *paths])
    plugin.hear()
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


def _is_off(plugin: str, arguments: list[str]) -> bool:
    """Return whether the caller keeps a plugin of the installation out."""
    return f"-pno:{plugin}" in arguments or ("-p", f"no:{plugin}") in zip(arguments, arguments[1:])  # noqa: B905, RUF007  # Python 3.7


def noticed_in(places: Iterable[str]) -> list[str]:
    """Return what of the project would pass for a part of the installation, and is not taken for one."""
    installed = {*NOT_THE_PROJECTS, *getattr(sys, "stdlib_module_names", sys.builtin_module_names)}
    found = []
    for place in places:
        for name in sorted(path.name for path in Path(place).glob("*")):
            stem = name[:-3] if name.endswith(".py") else name if name in NOT_THE_PROJECTS else ""
            points = Path(place, name, "entry_points.txt")  # of a distribution, with its plugins if it has any
            plugin = points.is_file() and b"[pytest11]" in points.read_bytes()
            if stem in installed or name.endswith(".pth") or plugin:
                found.append(f"{name} of the project was kept from pytest and its plugins")
    user = Path("~/.local/lib/python{}.{}/site-packages".format(*sys.version_info)).expanduser()
    found += [f"{path.name} of the user's own site directory was passed over" for path in sorted(user.glob("*.p*"))]
    return found[:NOTICED_MAX]


def _xdist_version() -> str:
    """Return the version of what pytest will load, empty if that is not there.

    It is not imported before: pytest would warn that it can no longer be rewritten, which ``filterwarnings = error`` of
    a project makes an error.
    """
    try:
        if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD") or importlib.util.find_spec("xdist") is None:
            return ""
    except ImportError:  # it is the project's
        return ""
    try:
        metadata = importlib.import_module("importlib.metadata")
    except ImportError:  # Python 3.7, where pytest brings its own
        metadata = importlib.import_module("importlib_metadata")
    try:
        return str(metadata.version("pytest-xdist"))
    except metadata.PackageNotFoundError:
        return "0"


def _dist(wanted: str, version: str) -> str:
    """Return the wanted distribution, if this xdist knows it: ``worksteal`` is as old as 3.2."""
    numbers = [int(word) for word in re.findall(r"\d+", version)[:2]]
    return "load" if wanted == "worksteal" and numbers < [3, 2] else wanted


if __name__ == "__main__":
    main()
