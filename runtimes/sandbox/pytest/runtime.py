"""The `pytest` runtime: rewards from test suites."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import math
import os
import posixpath
import re
import shlex
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import starmap
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import orjson
from msgspec import Meta

from manager.action import Action, Lease
from manager.errors import ActionFailed, CodedError, InvalidInput, NotFound, Reason, TooLarge, Unsupported
from manager.function import FunctionSpec, PytestSpec, Setting
from runtimes.kind import Kind, Schema, schema_of
from runtimes.runtime import Execution, Result, Runtime
from runtimes.sandbox.command import (
    KILLED,
    STOPPED,
    Command,
    CommandResult,
    claims_of,
    memory_ended,
    processes_refused,
)
from runtimes.sandbox.disk import DiskBound
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import Directory, Env, LogLines, Stage, begin, checked, invalid, traced
from runtimes.sandbox.pytest import baseline, changes, launch, plugin, programs, start
from runtimes.sandbox.pytest.plugin import key_of
from runtimes.sandbox.pytest.verdicts import SuiteReport, SuiteRequest, judge, notes, nothing_judged, sayable
from runtimes.sandbox.runner.client import FILE_ERROR, SandboxProcess, compiled, unmade
from runtimes.sandbox.sandbox import Sandbox

# Mistakes of whoever asks for a reward, found in the request alone, before anything of the agent's runs.
#
# Each of them would be a reward of 0.0 whatever the agent has done, told only in a note. What the agent's code can
# bring about is never looked at here: that stays a reward of 0.0. Where a request may be right, it is: tests come out
# of conftests, plugins and bases too, so that a name is missed only in a file that shows where all of its names come
# from.

#: Options with which pytest runs no test.
_RUNS_NONE = frozenset(
    {
        *("--collect-only", "--collectonly", "--co", "--fixtures", "--funcargs", "--fixtures-per-test", "--markers"),
        *("--setup-plan", "--setupplan", "--setup-only", "--setuponly", "--cache-show", "--help", "--version"),
        "--trace",  # which asks what there is nobody to answer
    }
)
#: Options with which the first failures end the suite, and short ones without a value of which -x is one.
_ENDS_EARLY = frozenset({"--exitfirst", "--maxfail", "--sw", "--stepwise", "--sw-skip", "--stepwise-skip"})
_NO_LIMIT = ["--maxfail", "0"]
_EXIT_FIRST = re.compile(r"-[vqslx]*x[vqslx]*")
#: With which pytest goes on after a file that it cannot collect.
_GOES_ON = "--continue-on-collection-errors"
#: Short options without a value, of which -h and -V end pytest before its tests.
_SHORT = re.compile(r"-[vqxslhV]*[hV][vqxslhV]*")
#: Names by which a module may make others.
_MAKERS = frozenset(
    {"globals", "locals", "vars", "exec", "eval", "setattr", "type", "__dict__", "modules", "__getattr__"}
)
#: Bases that bring no tests along.
_PLAIN_BASES = frozenset({"object", "TestCase", "IsolatedAsyncioTestCase"})
#: Words of a conftest that makes or renames tests.
_COLLECTS = re.compile(r"pytest_collect|pytest_pycollect|pytest_itemcollected|_nodeid|pytest_plugins")


def added_options(env: Mapping[str, str]) -> Sequence[str]:
    """Return the options that the environment has for pytest."""
    return _split(env.get("PYTEST_ADDOPTS", ""))


def option_at_fault(args: Sequence[str]) -> str:
    """Return what keeps pytest from running any test, empty if nothing does."""
    words = list(args)
    for value in _values(words, ("-o", "--override-ini")):
        words += _split(value.partition("=")[2]) if value.startswith("addopts=") else []
    return next((word for word in words if word.partition("=")[0] in _RUNS_NONE or _SHORT.fullmatch(word)), "")


def ends_early(args: Iterable[str]) -> bool:
    """Return whether the caller's own options end the suite at its first failures; ``--maxfail=0`` has no limit."""
    words = list(args)
    return any(
        _EXIT_FIRST.fullmatch(word)
        or (word.partition("=")[0] in _ENDS_EARLY and not (word == "--maxfail=0" or words[at : at + 2] == _NO_LIMIT))
        for at, word in enumerate(words)
    )


def goes_on(args: Iterable[str]) -> bool:
    """Return whether the caller's own options have a file that cannot be collected count as one test."""
    return _GOES_ON in args


def left_out(args: Sequence[str], ids: Iterable[str]) -> tuple[str, str]:
    """Return the first listed test that the caller's own options leave out, and by which; empty if none is."""
    dropped = [("--deselect", value) for value in _values(args, ("--deselect",))]
    ignored = [("--ignore", posixpath.normpath(value)) for value in _values(args, ("--ignore",))]
    for id in ids:
        path = posixpath.normpath(id.partition("::")[0])
        for option, value in dropped:
            if id.startswith(value):
                return id, f"{option} {value}"
        for option, value in ignored:
            if path == value or path.startswith(value + "/"):
                return id, f"{option} {value}"
    return "", ""


def undefined(ids: Iterable[str], tests: Mapping[str, str]) -> str:
    """Return the first id of a test that its file, which is given with the request, cannot have; empty if none is."""
    if any(posixpath.basename(path) == "conftest.py" and _COLLECTS.search(text) for path, text in tests.items()):
        return ""
    given = {posixpath.normpath(path): text for path, text in tests.items()}
    modules: dict[str, _Names | None] = {}
    for id in ids:
        path, _, name = id.partition("::")
        path = posixpath.normpath(path)
        if not name or path not in given or not path.endswith(".py"):
            continue
        if path not in modules:
            modules[path] = _names_of(given[path])
        names = modules[path]
        if names is not None and not names.may_have(name.partition("[")[0].split("::")):
            return id
    return ""


def testless(paths: Iterable[str], tests: Mapping[str, str]) -> bool:
    """Return whether none of these given files can have a test: nothing in them is called one, or made elsewhere."""
    if any(posixpath.basename(path) == "conftest.py" and _COLLECTS.search(text) for path, text in tests.items()):
        return False
    found = [_names_of(tests[path]) for path in paths]
    return bool(found) and all(names is not None and names.has_none for names in found)


def no_python(text: str) -> str:
    """Return why a file cannot be read as Python, with its line; empty if it can.

    Another Python may have grammar that this one has not: ask it as well.
    """
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"{error.msg}, line {error.lineno}"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error)
    return ""


class _Names:
    """What a module of tests defines, of which every name can be seen."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: set[str] = set()
        #: Names that a decorator may lengthen, as that of `parameterized` does.
        self._decorated: set[str] = set()
        #: Whether a class may have what it does not show.
        self._inherits = False
        for node in ast.walk(tree):
            self._see(node)

    @property
    def has_none(self) -> bool:
        return not any(_is_test(name) for name in self._names)

    def may_have(self, parts: Sequence[str]) -> bool:
        """Return whether there may be such a test: what is no name of a test is a plugin's."""
        if not all(part.isidentifier() and (_is_test(part) or part in self._names) for part in parts):
            return True
        return all(
            part in self._names
            or (self._inherits and level > 0)
            or any(part.startswith(name) for name in self._decorated)
            for level, part in enumerate(parts)
        )

    def _see(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._names.add(node.name)
                if node.decorator_list:
                    self._decorated.add(node.name)
            case ast.ClassDef():
                self._names.add(node.name)
                plain = all(_last_name(base) in _PLAIN_BASES for base in node.bases)
                self._inherits |= bool(not plain or node.keywords or node.decorator_list)
            case ast.Name(ctx=ast.Store()):
                self._names.add(node.id)
                self._inherits |= _is_test(node.id)  # it may be a class
            case ast.alias():
                bound = node.asname or node.name.partition(".")[0]
                self._names.add(bound)
                self._inherits |= _is_test(bound) and bound not in _PLAIN_BASES


def _names_of(text: str) -> _Names | None:
    """Return the names of a module; None if they cannot all be seen (another Python's grammar may read it, too)."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.alias) and node.name == "*":
            return None
        if isinstance(node, ast.Name | ast.Attribute) and _last_name(node) in _MAKERS:
            return None
    called = any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in tree.body)
    return None if called else _Names(tree)  # a call may make tests: `pytest_bdd.scenarios` does


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_test(name: str) -> bool:
    return "test" in name.lower().replace("pytest", "").replace("unittest", "")


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError:
        return []  # pytest says so itself


def _values(args: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yield what is given to one of the options, behind it or in the next word."""
    for at, word in enumerate(args):
        name, is_joined, value = word.partition("=")
        if name not in options and word[:2] in options and not word.startswith("--"):
            yield word[2:]
        elif name in options and is_joined:
            yield value
        elif word in options and at + 1 < len(args):
            yield args[at + 1]


COMPONENT = "pytest"
#: What a tree's own options must not change, as the verdicts would hang on how many workers there were: no failure ends
#: the suite, nor does a file that cannot be collected.
_TO_THE_END = ("--maxfail=0", "--continue-on-collection-errors")
#: Modules beside tests that hold none.
_NO_SUITES = ("conftest.py", "__init__.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestSettings:
    """How suites are run."""

    python: str = "python3"
    #: Times that a run is taken up again after its process ended under its tests.
    resumes_max: int = 4
    #: Seconds for each step in which a trajectory's changes are brought to a fresh sandbox.
    transfer_s: float = 60.0
    #: Bytes of a report, and of what a suite prints, that are taken in.
    output_max_bytes: int = 16 * 2**20


class PytestInput(TypedDict, total=False):
    """Which tests to run; by default those of ``tests``, or all that pytest collects."""

    targets: Annotated[
        list[str],
        Meta(
            description="Files, directories and test ids that pytest is given; without any, and without lists, the "
            "files of tests, so that nobody else's count"
        ),
    ]
    fail_to_pass: Annotated[list[str], Meta(description="Test ids that must pass for a reward of 1")]
    pass_to_pass: Annotated[list[str], Meta(description="Test ids that must still pass for it")]
    tests: Annotated[
        dict[str, str],
        Meta(
            description="Files of the tests by path, as seen from cwd. They are written when everything that the agent "
            "left running has ended, and are out of its user's hands where a runner is root and that user is not"
        ),
    ]
    paths: Annotated[
        list[str],
        Meta(
            description="With grade fresh: the files and directories of the workdir whose changes count; all by default"
        ),
    ]
    args: Annotated[list[str], Meta(description="Options of pytest, after those of the function")]
    cwd: Directory
    env: Env
    suite: Annotated[str, Meta(description="Name of the suite, by which a duration can be learned")]
    workers: Annotated[int, Meta(ge=1, description="Workers; as many as cores were granted by default")]
    test_timeout_s: Annotated[float, Meta(gt=0, description="Seconds that one test may take")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """One action's input, read and checked."""

    request: SuiteRequest
    spec: PytestSpec
    tests: Mapping[str, str]
    paths: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    args: tuple[str, ...]
    workers: int
    #: Workers that the caller wanted; 0 if none were named.
    asked_workers: int
    dist: str
    test_timeout_s: float


def plan_of(execution: Execution) -> SuitePlan:
    """Return the caller's input as a plan; raises ActionFailed(invalid_input) with the path at fault."""
    function = execution.call.function
    given = checked(execution.call.input, PytestInput, learned=function.duration.fields, component=COMPONENT)
    spec = function.pytest or PytestSpec()
    request = SuiteRequest(
        targets=tuple(given.get("targets", ())),
        fail_to_pass=tuple(given.get("fail_to_pass", ())),
        pass_to_pass=tuple(given.get("pass_to_pass", ())),
    )
    args, cwd = tuple(given.get("args", ())), given.get("cwd", "")
    paths = {"targets": request.targets, "fail_to_pass": request.fail_to_pass, "pass_to_pass": request.pass_to_pass}
    for name, texts in {**paths, "args": args}.items():
        if not all(text and "\0" not in text for text in texts):
            raise invalid(f"$.{name}", "must be a list of strings that are not empty", COMPONENT)
    for name, texts in paths.items():
        if any(id.startswith("/") for id in texts):
            raise invalid(f"$.{name}", "must be seen from the working directory, not from /", COMPONENT)
    if "\0" in cwd:
        raise invalid("$.cwd", "must be a string without NUL", COMPONENT)
    tests = given.get("tests", {})
    _check_tests(tests, given.get("paths", []), spec)
    _check_listed(request, tests, (*spec.args, *args))
    added = added_options(given.get("env", {}))
    words = {"$.args": args, "$.env": added, "pytest.args of the function": spec.args}
    for path, said in words.items():
        if option := option_at_fault(said):
            raise invalid(path, f"must have pytest run tests: with {option} it runs none", COMPONENT)
    if not request.targets and not request.listed:
        request = replace(request, targets=_suites(tests))
        if tests and (not request.targets or testless(request.targets, tests)):
            told = (
                "must hold a test: nothing in them is called one (if a plugin makes them, name their files in targets)"
            )
            raise invalid("$.tests", told, COMPONENT)
    options = (*spec.args, *added, *args)
    early = ends_early(options)
    workers = _workers(execution, spec, request, given.get("workers"))
    return SuitePlan(
        request=replace(request, ignore=frozenset(spec.ignore), goes_on=goes_on(options)),
        spec=spec,
        tests=tests,
        paths=tuple(given.get("paths", ())),
        cwd=cwd,
        env=traced(execution.call, given.get("env", {})),
        args=(*(_TO_THE_END[1:] if early else _TO_THE_END), *spec.args, *args),
        workers=1 if early else workers,
        asked_workers=given.get("workers", 0),
        dist=spec.dist,
        test_timeout_s=given.get("test_timeout_s", 0.0),
    )


def _check_listed(request: SuiteRequest, tests: Mapping[str, str], args: Sequence[str]) -> None:
    """Raise ActionFailed(invalid_input) where a listed test could not pass whatever was done."""
    for name, ids in (("fail_to_pass", request.fail_to_pass), ("pass_to_pass", request.pass_to_pass)):
        if whole := next((id for id in ids if "::" not in id), ""):
            told = f"must be ids of tests (file::test), which {whole} is not: files and directories stand in targets"
            raise invalid(f"$.{name}", told, COMPONENT)
        if missed := undefined(ids, tests):
            raise invalid(f"$.{name}", f"names {missed}, which its file in tests does not define", COMPONENT)
        id, option = left_out(args, ids)
        if id:
            raise invalid(f"$.{name}", f"names {id}, which {option} leaves out", COMPONENT)
    if missed := undefined(request.targets, tests):
        raise invalid("$.targets", f"names {missed}, which its file in tests does not define", COMPONENT)


def _suites(tests: Mapping[str, str]) -> tuple[str, ...]:
    """Return which files of the tests hold any: those that pytest would collect, or else every module."""
    modules = [path for path in tests if path.endswith(".py") and posixpath.basename(path) not in _NO_SUITES]
    named = [path for path in modules if fnmatch(posixpath.basename(path), "test_*.py") or path.endswith("_test.py")]
    return tuple(named or modules)


def _check_tests(tests: Mapping[str, str], paths: Sequence[str], spec: PytestSpec) -> None:
    for name, each in (("tests", list(tests)), ("paths", paths)):
        for path in each:
            if not path or "\0" in path or path.startswith("/") or ".." in path.split("/"):
                raise invalid(f"$.{name}", "must have paths below the working directory", COMPONENT)
    if paths and spec.grade != "fresh":
        raise invalid("$.paths", "is for functions with pytest: {grade: fresh}", COMPONENT)


def _workers(execution: Execution, spec: PytestSpec, request: SuiteRequest, asked: int | None) -> int:
    """Return how many processes: as the scheduler has planned, which grants no more cores; fewer for fewer tests."""
    grant = execution.lease.grants.get("cpu")
    wanted = asked or (1 if grant is None else grant.most)
    if request.listed and not request.targets:
        wanted = min(wanted, len(request.listed))
    return max(1, min(wanted, spec.max_workers))


_SOURCE = Path(changes.__file__).read_text(encoding="utf-8")
_NOTE_FILES = 3
#: Bytes of a listing of the fresh sandbox's files, and beside the changes for their names.
_LISTING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshFiles:
    """What a fresh sandbox has before anything comes over."""

    #: Digest by path, as `changes` makes it.
    known: Mapping[str, str]
    #: The interpreter, by its whole path.
    python: str
    #: Paths below the working directory of the installation, which stay as they are.
    kept: tuple[str, ...]
    #: The files that came over, each with whether there was none by that name; None if that is not known.
    brought: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTransfer:
    """How changes are brought over."""

    #: Interpreter in the trajectory's sandbox, and by which the fresh one's is looked for.
    python: str
    #: Files and directories, all by default.
    paths: Sequence[str]
    #: Files that stay as the fresh sandbox or the caller has them.
    left_out: Collection[str]
    #: Whether conftests and files with pytest's options stay as the image has them.
    ignore: bool
    #: Bytes that may have changed.
    limit_bytes: int
    #: Seconds for each step.
    timeout_s: float

    async def known(self, fresh: Sandbox) -> FreshFiles:
        """Return what the fresh sandbox has already; raises ActionFailed."""
        listed = await self._run(fresh, self.python, "list", b"", _LISTING_BYTES)
        if listed.exit_code != 0 or listed.stdout_truncated:
            why = _last(listed) or "it has too many files"
            message = f"the fresh sandbox's files cannot be listed: {why}"
            raise ActionFailed(Reason.INVALID_INPUT, message, component=COMPONENT)
        files = json.loads(listed.stdout)
        return FreshFiles(known=files["known"], python=files["python"] or self.python, kept=tuple(files["kept"]))

    async def collect(self, original: Sandbox, files: FreshFiles) -> bytes:
        """Return what the trajectory's sandbox says that it has changed, which nobody has looked at.

        Raises ValueError if it says nothing.
        """
        told = json.dumps({"known": files.known, **self._rules(files)}).encode()
        try:
            ended = await self._run(original, self.python, "collect", told, self.limit_bytes + _LISTING_BYTES)
        except (InvalidInput, NotFound, TooLarge) as refused:  # it cannot even be entered, which is the agent's
            raise ValueError(f"the trajectory's changes could not be read: {refused.message}") from None
        except ActionFailed as failure:
            if original.killed_reason:
                raise ValueError(f"the trajectory's changes could not be read: {failure.message}") from None
            raise
        if ended.exit_code != 0 or ended.stdout_truncated:
            raise ValueError(f"the trajectory's changes could not be read: {_last(ended)}")
        return ended.stdout

    async def apply(
        self, fresh: Sandbox, changed: bytes, files: FreshFiles
    ) -> tuple[list[str], Mapping[str, bool] | None]:
        """Bring them into the fresh sandbox; return notes for the record, and which files came, as `changes` tells.

        Raises ValueError if that cannot be.
        """
        told = json.dumps(self._rules(files)).encode()
        ended = await self._run(fresh, files.python, "apply", told + b"\n" + changed, _LISTING_BYTES)
        if ended.exit_code != 0:
            raise ValueError(f"the trajectory's changes could not be applied: {_last(ended)}")
        said = json.loads(ended.stdout)
        notes = []
        if said["left_out"]:
            notes.append(f"not taken from the trajectory: {_fresh_some(said['left_out'])}")
        if said["failed"]:
            notes.append(f"could not be applied: {_fresh_some(said['failed'])}")
        brought = said["brought"]
        if brought is not None:
            brought = {posixpath.join(fresh.spec.workdir, path): new for path, new in brought.items()}
        return notes, brought

    def _rules(self, files: FreshFiles) -> dict[str, object]:
        """Return what may come over, for whoever packs it and for whoever unpacks it."""
        return {
            "paths": list(self.paths),
            "left_out": list(self.left_out),
            "kept": list(files.kept),
            "ignore": self.ignore,
            "limit_bytes": self.limit_bytes,
        }

    async def _run(self, sandbox: Sandbox, python: str, mode: str, given: bytes, limit_bytes: int) -> CommandResult:
        return await sandbox.run(
            Command(
                argv=(python, "-I", "-S", "-c", _SOURCE, mode),
                stdin=given,
                timeout_s=self.timeout_s,
                kill_grace_s=0.0,
                output_limit_bytes=limit_bytes,
            )
        )


def _last(ended: CommandResult) -> str:
    """Return the last line that it wrote to standard error."""
    if ended.timed_out:
        return "it took too long"
    return (ended.stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:500]


def _fresh_some(paths: Sequence[object]) -> str:
    more = f" and {len(paths) - _NOTE_FILES} more" if len(paths) > _NOTE_FILES else ""
    return ", ".join(sayable(str(path)[:200]) for path in paths[:_NOTE_FILES]) + more


#: What a record can say that held: nobody else was at work in the sandbox; Python and pytest began with nothing of the
#: agent's; the tests came with the request; the suite's user could not change them; the tree's options did not count;
#: nothing of the agent's ran in a process of the tests, nor as their user; the report fits together.
Check = Literal[
    "swept", "clean_start", "tests_given", "tests_locked", "tree_options_ignored", "solution_apart", "report_whole"
]  # fmt: skip

Graded = Literal["fresh", "snapshot", "same_sandbox"]

_RUNTIME_SOURCE = Path(launch.__file__).read_text(encoding="utf-8")
#: The modules that it finds in a directory of its own.
_MODULES = {
    name: Path(str(module.__file__)).read_text(encoding="utf-8")
    for name, module in (
        (launch.MODULE, plugin), (launch.BASELINE, baseline), (launch.START, start), (launch.PROGRAMS, programs)
    )
}  # fmt: skip
#: The same, compiled by this Python, for one in a sandbox that reads its bytecode: the first bytes tell.
_COMPILED = {name: base64.b64encode(compiled(source, name)).decode("ascii") for name, source in _MODULES.items()}
#: Runs the source that follows, with no module of the working directory. What is imported until the project's code is
#: stays: nothing is looked for in it that could go (`plugin` begins that again).
CLEAN = "import gc, sys; gc.disable(); sys.path[:] = [place for place in sys.path if place]; exec(sys.argv[1])"
#: The first process where no runner hides variables for us: it does so itself, clear of what they and the user's files
#: would put in the way, and becomes the interpreter that it was given.
START = f"""
import os, sys
for name in {launch.HIDE!r}:
    if name in os.environ:
        os.environ[{launch.HIDDEN!r} + name] = os.environ.pop(name)
os.execvp(sys.argv[2], [sys.argv[2], "-s", "-S", "-c", {CLEAN!r}, sys.argv[1]])
"""
#: What mends a sandbox without pytest.
INSTALL = "install it in the image, for process sandboxes for the host's python3, or name one by sandbox.path"
_TAIL_BYTES = 4000
#: The module that an import did not find.
_ABSENT = re.compile(r"No module named '([^']+)'")
#: Times that what runs the programs of a solution is started anew.
_PROGRAMS_MAX = 100
#: How pytest ends its words on a file that is no Python.
_SYNTAX = re.compile(r"^E +(?:SyntaxError|IndentationError|TabError)\b", re.MULTILINE)
#: Of a warning that is an error there, and comes from what is installed.
_WARNING = re.compile(
    r"^(?:/|\.\./|.*site-packages/)\S*:\d+: in .*\n(?:(?!\S+:\d+: in ).*\n)*E +[\w.]*Warning\b", re.MULTILINE
)
#: Seconds by which two clocks may disagree on whether the timeout is reached.
_CLOCK_S = 0.02


class PytestRuntime(Runtime):
    """Runs ``pytest -n WORKERS`` and answers with the verdicts, whatever the suite's process did.

    A suite that fails, breaks, ends its own process, runs other tests than it was asked for or fills its sandbox's disk
    has a result, with reward 0.0 and a note. One in which nothing was found that was asked for has a result without a
    reward. ActionFailed is for runs that say nothing about the code: no pytest in the sandbox (invalid_input), timeout,
    out_of_memory, environment_lost; the verdicts known by then are the failure's result.
    """

    def __init__(self, environments: Environments, settings: PytestSettings | None = None) -> None:
        self._environments = environments
        self._settings = settings or PytestSettings()
        self._stage = Stage(environments)

    async def prepare(self, function: FunctionSpec) -> None:
        await self._environments.warm(function.sandbox)

    async def execute(self, execution: Execution) -> Result:
        plan = plan_of(execution)
        trajectory = execution.action.trajectory
        ended = None if trajectory is None else self._environments.get(trajectory)
        if ended is not None and not ended.alive and ended.killed_reason:
            execution.begin()  # what its agent did ended it: that is no way out of the reward, and the next one is told
            graded: Graded = "fresh" if plan.spec.grade == "fresh" else "same_sandbox"
            return self._begun(execution, ended, plan, graded).worthless(ended.killed_reason)
        if plan.spec.grade == "fresh" and trajectory is not None:
            return await self._graded_fresh(execution, plan, trajectory)
        async with self._stage.enter(execution) as sandbox:
            return await self._run(execution, sandbox, plan, "fresh" if trajectory is None else "same_sandbox")

    async def _graded_fresh(self, execution: Execution, plan: SuitePlan, trajectory: str) -> Result:
        """Run in a sandbox made as the trajectory's was, with what the trajectory has changed there."""
        try:
            spec, task = execution.call.function.sandbox, execution.action.task
            original = await self._environments.ensure(trajectory, spec, task=task)
        except CodedError as error:
            raise unmade(error) from error
        transfer = ChangeTransfer(
            python=self._settings.python,
            paths=plan.paths,
            left_out=tuple(_seen_from(plan.cwd, original.spec.workdir, path) for path in plan.tests),
            ignore=plan.spec.tree_options == "ignore",
            limit_bytes=plan.spec.changes_limit_bytes,
            timeout_s=self._settings.transfer_s,
        )
        # A snapshot holds what the agent did before a fork: what came with the image alone is nobody's.
        async with self._stage.enter_fresh(execution, replace(original.spec, snapshot="")) as sandbox:
            if not original.spec.snapshot or await self._has_pytest(sandbox):
                return await self._graded_in(sandbox, original, execution, plan, transfer)
        async with self._stage.enter_fresh(execution, original.spec) as sandbox:
            return await self._graded_in(sandbox, original, execution, plan, transfer)

    async def _has_pytest(self, sandbox: Sandbox) -> bool:
        """Return whether a suite can begin there: a snapshot may hold what the image lacks."""
        argv = (self._settings.python, "-I", "-c", "import pytest")
        return (await sandbox.run(Command(argv=argv, timeout_s=self._settings.transfer_s))).exit_code == 0

    async def _graded_in(
        self, sandbox: Sandbox, original: Sandbox, execution: Execution, plan: SuitePlan, transfer: ChangeTransfer
    ) -> Result:
        """Run in a sandbox that the agent has not used, with what it has changed since that began."""
        graded: Graded = "snapshot" if sandbox.spec.snapshot else "fresh"
        claims = claims_of(execution.action.id, execution.action.attempt)
        notes: list[str] = []
        files = None
        if not any(claim.startswith(claims) for claim in sandbox.resumable):
            files = await transfer.known(sandbox)
            try:
                async with self._stage.visit(original, execution):
                    changed = await transfer.collect(original, files)
                notes, brought = await transfer.apply(sandbox, changed, files)
                files = replace(files, brought=brought)
            except ValueError as error:
                execution.begin()
                return self._begun(execution, sandbox, plan, graded).worthless(str(error))
        return await self._run(execution, sandbox, plan, graded, notes=notes, files=files, original=original)

    async def _run(
        self,
        execution: Execution,
        sandbox: Sandbox,
        plan: SuitePlan,
        graded: Graded,
        *,
        notes: Sequence[str] = (),
        files: FreshFiles | None = None,
        original: Sandbox | None = None,
    ) -> Result:
        run = self._begun(execution, sandbox, plan, graded, notes=notes, files=files, original=original)
        run.detached = await begin(execution, sandbox)
        try:
            return await run.result()
        finally:
            execution.end()

    def _begun(
        self,
        execution: Execution,
        sandbox: Sandbox,
        plan: SuitePlan,
        graded: Graded,
        *,
        notes: Sequence[str] = (),
        files: FreshFiles | None = None,
        original: Sandbox | None = None,
    ) -> _Run:
        info = self._environments.provider.info
        work = info.disk != DiskBound.name
        bounds = _Bounds(work=work, tmp=work or info.kind != "container")
        made = replace(sandbox.spec, snapshot="")
        unused = None if execution.action.trajectory is None else lambda: self._environments.ephemeral(made)
        return _Run(
            execution,
            sandbox,
            plan,
            self._settings,
            bounds,
            graded=graded,
            notes=notes,
            files=files,
            unused=unused,
            uploaded=(original or sandbox).uploaded,
        )

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._stage.resize(action, lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Whether a sandbox that finds no room has reached a bound of its own: in its work, and for temporary files."""

    work: bool
    tmp: bool


class _Run:
    """One action under way: pytest once, and again for the tests that a crash left over."""

    def __init__(
        self,
        execution: Execution,
        sandbox: Sandbox,
        plan: SuitePlan,
        settings: PytestSettings,
        bounds: _Bounds,
        *,
        graded: Graded,
        notes: Sequence[str] = (),
        files: FreshFiles | None = None,
        unused: Callable[[], AbstractAsyncContextManager[Sandbox]] | None = None,
        uploaded: Mapping[str, bytes] | None = None,
    ) -> None:
        self._execution = execution
        #: What was uploaded before the agent could do anything, as `Sandbox.uploaded` says.
        self._uploaded = uploaded
        #: Makes a sandbox like that in which the agent worked, as it was before; None where no agent did.
        self._unused = unused
        self.detached = False
        self._graded = graded
        self._fresh = graded == "fresh"
        self._sandbox = sandbox
        self._plan = plan
        self._settings = settings
        self._python = settings.python if files is None else files.python
        self._kept = () if files is None else files.kept
        self._brought = None if files is None else files.brought
        self._bounds = bounds
        self._claims = claims_of(execution.action.id, execution.action.attempt)
        #: Where programs of the solution can be run as another user; empty where they cannot, or no test asks for it.
        self._programs = ""
        self._report = SuiteReport(sandbox.secret(self._claims))
        self._lines = LogLines(execution.call.log)
        self._tail = self._unused_tail = b""
        self._notes = list(notes)
        self._checked: set[Check] = set()
        #: Why the suite could not even begin, through the caller's fault.
        self._refused = ""
        self._cpu_s = 0.0
        self._peak_bytes = 0
        self._runs = 0

    async def result(self) -> Result:
        try:
            ended = await self._run_all()
        except ActionFailed as lost:
            if self._sandbox.killed_reason:  # it has asked for that, and must not get out of its reward so
                self._sandbox.loss_reported = False
                return self.worthless(lost.message)
            raise self._failed(lost.reason, lost.message, lost.detail) from lost
        except BaseException:
            # The executor cancels at the timeout; then what is known must not be lost with the task.
            if self._execution.execution_s >= self._execution.action.timeout_s - _CLOCK_S:
                raise self._timed_out() from None
            raise
        finally:
            self._lines.close()
        if ended.killed:
            raise self._failed(Reason.CANCELLED, KILLED)
        if ended.timed_out:
            raise self._timed_out(stopped=ended.stopped)
        if why := await self._undone():
            return self.worthless(why)
        if self._report.absent:
            raise self._failed(Reason.INVALID_INPUT, f"the sandbox has {self._report.absent}: {INSTALL}")
        if ended.out_of_memory and self._report.end is None:
            raise self._failed(Reason.OUT_OF_MEMORY, memory_ended("the sandbox", self._peak_bytes))
        if not self._report.started and not self._refused and not self._report.doubts:
            raise self._failed(Reason.INVALID_INPUT, f"pytest could not be started: {self._said()}")
        if ended.out_of_memory:
            self._notes.append("the sandbox ran out of memory under some of the tests (sandbox.memory bounds it)")
        if path := self._no_python():
            told = f"$.tests: {path} is no Python: {no_python(self._plan.tests[path])}"
            raise self._failed(Reason.INVALID_INPUT, told)
        return Result(value=self._value(ended.exit_code), usage=self._usage())

    async def _undone(self) -> str:
        """Return what the agent has undone: what the suite did not find here, and finds where nobody has been.

        Where it fails there as it does here, it is not the agent's doing, and the suite is refused.
        """
        report, given = self._report, self._plan.tests
        absent = report.absent or not (report.started or self._refused)
        unjudged = self._refused or report.died or nothing_judged(self._plan.request, report, given)
        if report.doubts or not (absent or unjudged or any(starmap(_is_the_environments, report.broken.items()))):
            return ""
        found = report if self._unused is None else await self._begun_unused()
        if absent:
            told = "pytest cannot be started here, and can in a sandbox that nobody has used"
            return told if found.started and self._unused is not None else ""
        if unjudged and found.selected:
            self._refused = ""
            return "none of the tests is found here, and some are in a sandbox that nobody has used"
        conftests = any(posixpath.basename(path) == "conftest.py" for path in given)
        if report.died and found.died and not conftests and not self._lacks_uploads():
            # Given conftests may ask for what is yet to be written.
            self._refused = f"the suite cannot run, whatever the agent does: {self._said()}"
        for path, why in report.broken.items():
            if _is_the_environments(path, why) and _is_the_environments(path, found.broken.get(path, "")):
                self._refused = f"{path} cannot be collected, whatever the agent does: {why.strip().splitlines()[-1]}"
        return ""

    def _lacks_uploads(self) -> bool:
        """Return whether the suite may have died of a module that was uploaded, and is there no more or another."""
        mine, theirs = (
            set(_ABSENT.findall(said.decode("utf-8", "replace"))) for said in (self._tail, self._unused_tail)
        )
        if not self._uploaded or not mine | theirs:
            return self._uploaded is None and bool(mine)
        parts = {part.partition(".")[0] for path in self._uploaded for part in path.split("/")}
        return mine != theirs or any(name.partition(".")[0] in parts for name in mine)

    async def _begun_unused(self) -> SuiteReport:
        """Return the report of the same start, that collects and runs nothing, in a sandbox that nobody has used.

        What was uploaded before the agent could do anything is there: its options and conftests, and of asked files
        that there are any.
        """
        assert self._unused is not None
        report = SuiteReport(self._report.nonce)
        left_s = self._execution.action.timeout_s - self._execution.execution_s
        command = self._command(1, max(0.01, left_s), probes=True)

        def on_output(stream: str, data: bytes) -> None:
            if stream == "stdout":
                report.feed(data)
            else:
                self._unused_tail = (self._unused_tail + data)[-_TAIL_BYTES:]

        cwd = posixpath.join(self._sandbox.spec.workdir, self._plan.cwd)
        asked = {posixpath.normpath(posixpath.join(cwd, path)) for path in self._plan.request.paths}
        try:
            async with self._unused() as sandbox:
                for path, content in (self._uploaded or {}).items():
                    if content or path in asked:
                        await sandbox.write_file(path, content)
                for path, text in self._plan.tests.items():
                    await sandbox.write_file(_joined(self._plan.cwd, path), text.encode())
                await sandbox.run(command, on_output)
        except CodedError:  # nothing is known then
            return SuiteReport(self._report.nonce)
        return report

    def worthless(self, why: str) -> Result:
        """Return the result of a run that the agent has made impossible."""
        self._report.doubt(why)
        return Result(value=self._value(None), usage=self._usage())

    def _usage(self) -> dict[str, float]:
        report = self._report
        usage: dict[str, float] = {"workers": report.workers, "runs": self._runs, "tests": len(report.tests)}
        if self._runs:
            usage |= {"cpu_s": self._cpu_s, "peak_memory_bytes": self._peak_bytes}
        return usage

    def _no_python(self) -> str:
        """Return a given file that neither this Python nor the suite's can read, empty if there is none."""
        if self._report.doubts:
            return ""  # whoever was altered may have said so
        refused = {key_of(path) for path, why in self._report.broken.items() if _SYNTAX.search(why)}
        return next(
            (path for path, text in self._plan.tests.items() if key_of(path) in refused and no_python(text)), ""
        )

    async def _prepare(self) -> None:
        """Leave nobody else at work in the sandbox, and write the tests."""
        claim = f"{self._claims}{self._runs + 1}"
        if claim in self._sandbox.resumable:
            return
        swept = await self._sandbox.sweep()
        self._checked.add("swept")
        if swept and self._runs == 0:
            self._notes.append(f"{swept} process(es) of earlier actions were ended before the suite")
        locked = []
        for path, text in self._plan.tests.items():
            try:
                place, shared = _joined(self._plan.cwd, path), self._is_solutions(path)
                locked.append(await self._sandbox.lock_file(place, text.encode(), mode=0o444 if shared else 0o440))
            except (InvalidInput, NotFound) as refused:  # the tree is in its way, which is the agent's
                self._report.doubt(f"the tests could not be written: {refused.message}")
            except TooLarge as full:
                self._require_own(self._bounds.work, full.message)
                self._report.doubt(f"the tests could not be written: {full.message}")
        if locked:
            self._checked |= {"tests_given", "tests_locked"} if all(locked) else {"tests_given"}

    def _is_solutions(self, path: str) -> bool:
        """Return whether a given file may be of the solution: without a trajectory that comes with its tests."""
        suites = {os.path.normpath(each) for each in self._plan.request.paths}
        return self._unused is None and os.path.normpath(path) not in suites

    def _require_own(self, bounded: bool, why: str) -> None:
        """Raise ActionFailed if it is not the sandbox's own bound that is reached, but the machine's disk."""
        if not bounded:
            raise ActionFailed(
                Reason.ENVIRONMENT_LOST,
                f"the machine's disk is full: {why}; make room below server.state_dir, or on the engine's disk",
                component=COMPONENT,
            )

    async def _run_all(self) -> CommandResult:
        """Run until pytest came to its end, or nothing more is won by another run."""
        workers = self._plan.workers
        while True:
            known = len(self._report.tests)
            try:
                await self._prepare()
                if self._report.doubts and not self._runs:
                    return CommandResult(exit_code=None)
                ended = await self._run_once(workers)
            except InvalidInput as refused:
                if not self._plan.cwd or refused.detail.get(FILE_ERROR) == "permission_denied":
                    self._report.doubt(refused.message)  # the agent has shut it: it was open when it was made
                else:
                    self._refused = refused.message
                return CommandResult(exit_code=None)
            report = self._report
            if report.blocked:
                self._require_own(self._bounds.tmp, report.blocked)
            if ended.timed_out or not report.started or report.absent:
                return ended
            if report.end is not None and ended.exit_code != report.end:
                report.doubt(f"pytest's status was {report.end}, its process ended with {_how(ended)}")
            if report.end is None:
                crashed = sorted(report.running)
                report.take_up()
                self._notes.append(f"the process ended by itself ({_how(ended)}) in {', '.join(crashed) or 'no test'}")
            elif workers > 1 and (report.selected or report.crashed) and not report.tests:
                self._notes.append("with several workers no test ran: one process was used")
                self._report = SuiteReport(report.nonce, watched=False)  # the agent's code may have run by then
                workers = 1
                continue
            else:
                return ended
            if not report.left or len(report.tests) == known or self._runs > self._settings.resumes_max:
                return ended

    async def _run_once(self, workers: int) -> CommandResult:
        self._runs += 1
        left_s = self._execution.action.timeout_s - self._execution.execution_s
        async with self._programs_of_the_solution():
            ended = await self._begun_in_time(self._command(workers, max(0.01, left_s)))
        self._cpu_s += ended.cpu_s
        self._peak_bytes = max(self._peak_bytes, ended.peak_memory_bytes)
        if ended.forks_refused:
            self._notes.append(processes_refused(ended.forks_refused, self._sandbox.spec.pids))
        if ended.unshown.get("stdout"):
            self._report.doubt(f"the report lacks {ended.unshown['stdout']} bytes and is incomplete")
        if unlogged := ended.unshown.get("stderr"):
            self._tail = ended.stderr[-_TAIL_BYTES:]
            self._execution.call.log.omit(unlogged)
        return ended

    async def _begun_in_time(self, command: Command) -> CommandResult:
        """Run the suite; give up one whose pytest has not begun in half of its time, as what it reads may have no end.

        Then there is time to see whether that is so where nobody has been.
        """
        run = asyncio.ensure_future(self._sandbox.run(command, self._on_output))
        try:
            await asyncio.wait({run}, timeout=command.timeout_s / 2)
            if run.done() or self._report.started:
                return await run
            return CommandResult(exit_code=None)
        finally:
            if not run.done():
                run.cancel()
                await asyncio.wait({run})

    @asynccontextmanager
    async def _programs_of_the_solution(self) -> AsyncIterator[None]:
        """Have programs of the solution run as a user of their own while a suite runs that asks for it."""
        self._programs, keeping = "", None
        if any(launch.PROGRAMS in text for text in self._plan.tests.values()):
            name = f"tangram-{self._sandbox.secret(f'{self._claims}programs')}"
            argv = ("-c", _MODULES[launch.PROGRAMS], name)
            command = Command(
                argv=argv, python=True, user=self._sandbox.solution_user, env=self._plan.env, timeout_s=math.inf
            )
            with suppress(InvalidInput, Unsupported):  # its runner is not root, or it has none
                process = await self._sandbox.spawn(command)
                self._programs = name
                keeping = asyncio.create_task(self._keep(process, command))
        try:
            yield
        finally:
            if keeping is not None:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping

    async def _keep(self, process: SandboxProcess, command: Command) -> None:
        """Start a process anew that a program of its user has ended, until nobody needs it."""
        try:
            for _ in range(_PROGRAMS_MAX):
                await process.wait()
                process = await self._sandbox.spawn(command)
        except CodedError:
            pass  # the sandbox is gone, as the suite is told
        finally:
            with suppress(CodedError):
                await process.kill()

    def _command(self, workers: int, timeout_s: float, *, probes: bool = False) -> Command:
        """Return how the suite is started; ``probes``: only to see what it finds where nobody has been."""
        plan, request = self._plan, self._plan.request
        told = {
            "nonce": self._report.nonce,
            "modules": _MODULES,
            "compiled": _COMPILED,
            "paths": request.paths,
            # Without ids or prefixes everything collected is run.
            "wanted": request.listed,
            "prefixes": request.targets,
            "done": [] if probes else list(self._report.tests),
            "workers": workers,
            "dist": plan.dist,
            "args": (*plan.args, "--collect-only") if probes else plan.args,
            "own_options": plan.spec.tree_options == "ignore" and not self._fresh,
            "test_timeout_s": plan.test_timeout_s,
            "tests": list(plan.tests),
            "programs": "" if probes else self._programs,
            "start": {
                "fresh": self._fresh or probes,
                "roots": [self._sandbox.spec.workdir],
                "kept": [posixpath.join(self._sandbox.spec.workdir, path) for path in self._kept],
                "brought": self._brought,
            },
        }
        python, hides = self._settings.python if probes else self._python, self._sandbox.hides
        begin_hiding = (python, "-I", "-S", "-c", START, _RUNTIME_SOURCE, python)
        return Command(
            argv=(python, "-s", "-S", "-c", CLEAN, _RUNTIME_SOURCE) if hides else begin_hiding,
            hide=launch.HIDE if hides else (),
            cwd=plan.cwd,
            env=plan.env,
            stdin=json.dumps(told).encode(),
            timeout_s=timeout_s,
            output_limit_bytes=2 * _TAIL_BYTES,
            shown_limit_bytes=max(self._settings.output_max_bytes, self._execution.call.function.log_limit_bytes),
            claim="" if probes else f"{self._claims}{self._runs}",
            detached=self.detached and not probes,
        )

    def _on_output(self, stream: str, data: bytes) -> None:
        if stream == "stdout":
            self._report.feed(data)
        else:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            self._lines.write("stdout", data)

    def _value(self, exit_code: int | None) -> dict[str, object]:
        """Return the result, within the function's output limit."""
        report, plan = self._report, self._plan
        value = judge(plan.request, report)
        said = [*notes(plan.request, report, value), *self._notes, *self._unheld()]
        reason = self._refused or nothing_judged(plan.request, report, self._plan.tests)
        if reason and plan.spec.missing == "invalid":
            value |= {"reward": None, "resolved": None}
        else:
            reason = ""
        if plan.workers > 1 and report.started and not report.xdist:
            said.append("the sandbox has no pytest-xdist: the suite ran in one process")
        if plan.asked_workers > plan.spec.max_workers:
            most = plan.spec.max_workers
            said.append(f"{plan.asked_workers} workers were asked for, of which pytest.max_workers allows {most}")
        if report.end not in (None, 0, 1, 5):
            said.append(f"pytest ended with status {report.end}: {self._said()}")
        value |= {
            "valid": not reason,
            "reason": reason,
            "graded": self._graded,
            "checked": sorted(self._checks()),
            "workers": report.workers,
            "duration_s": round(self._execution.execution_s, 6),
            "exit_code": exit_code if report.end is None else report.end,
            "note": "; ".join(said),
        }
        return _within(value, plan.request, self._execution.call.function.output_limit_bytes)

    def _unheld(self) -> Iterator[str]:
        """Yield what a fresh grade does not hold as it was asked for."""
        report = self._report
        if self._graded == "snapshot":
            yield "it was graded in the snapshot with which the trajectory began, as its image alone has no pytest"
        elif self._unused is not None and self._fresh and self._plan.request.listed and not self._plan.tests:
            yield "the tests are as the agent left them: give them in tests"
        if self._fresh and self._plan.tests and report.inside.startswith(plugin.PROGRAM):
            yield f"{report.inside}, and may have read the tests (docs/SANDBOXES.md, Rewards)"

    def _checks(self) -> set[Check]:
        """Return what held of this run, of all that can be checked."""
        plan, report = self._plan, self._report
        if self._graded == "snapshot":
            return set()  # the agent may have been there before it was taken
        checked = set(self._checked)
        if report.clean:
            checked.add("clean_start")
        if plan.spec.tree_options == "ignore":
            checked.add("tree_options_ignored")
        if report.end is not None and not report.doubts:
            checked.add("report_whole")
        apart = report.watched and not report.inside and self._unused is not None
        if apart and {"clean_start", "tests_given", "report_whole"} <= checked:
            checked.add("solution_apart")
        return checked

    def _timed_out(self, *, stopped: bool = False) -> ActionFailed:
        running = ", ".join(sorted(self._report.running)) or "none"
        limit_s = self._execution.action.timeout_s
        what = STOPPED if stopped else f"ran longer than timeout, {limit_s:g} s"
        told = f"the suite {what}; tests under way: {running}"
        return self._failed(Reason.TIMEOUT, told)

    def _failed(self, reason: Reason, message: str, detail: Mapping[str, object] | None = None) -> ActionFailed:
        value = self._value(None)
        # What is known of a run that did not come to its end is no reward.
        value |= {"reward": None, "resolved": None, "valid": False, "reason": message}
        return ActionFailed(reason, message, component=COMPONENT, result=value, detail=detail, usage=self._usage())

    def _said(self) -> str:
        return self._tail.decode("utf-8", "replace").strip()[-_TAIL_BYTES // 4 :]


def _is_the_environments(path: str, why: str) -> bool:
    """Return whether a test may be one that cannot be collected in this environment, whatever it tests.

    Its Python does not know the test's own grammar, or a warning of what is installed is an error.
    """
    return bool((_SYNTAX.search(why) and f'{path}", line' in why) or _WARNING.search(why))


def _joined(cwd: str, path: str) -> str:
    return posixpath.join(cwd, path) if cwd else path


def _seen_from(cwd: str, workdir: str, path: str) -> str:
    """Return a path below ``cwd`` as seen from the workdir."""
    return posixpath.relpath(posixpath.join(workdir, cwd, path), workdir)


def _within(value: dict[str, object], request: SuiteRequest, limit_bytes: int) -> dict[str, object]:
    """Return the result within its bound: of too many tests only those that did not pass, or were listed."""
    if len(orjson.dumps(value)) <= limit_bytes:
        return value
    tests = value["tests"]
    assert isinstance(tests, dict)
    listed = set(request.listed)
    told = {id: verdict for id, verdict in tests.items() if verdict != "passed" or id in listed}
    note = f"{len(tests) - len(told)} passed tests are left out of this result"
    return {**value, "tests": told, "note": f"{value['note']}; {note}" if value["note"] else note}


def _how(ended: CommandResult) -> str:
    return f"exit code {ended.exit_code}" if ended.signal is None else f"signal {ended.signal}"


Verdict = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestKeys:
    """The keys of a pytest function."""

    pytest: Annotated[PytestSpec, Setting("how the suite is run")] = field(default_factory=PytestSpec)


class ListedTests(TypedDict):
    """The tests of one list, by whether they passed; ignored ones are in neither."""

    passed: list[str]
    failed: list[str]


class PytestResult(TypedDict):
    """The verdicts of a suite, and the reward that they are worth."""

    reward: Annotated[
        float | None,
        Meta(
            description="1 or 0 by the listed tests; without lists the share of tests that passed. Only passed is a "
            "pass, and what pytest.ignore names does not count; null if it is not valid"
        ),
    ]
    valid: Annotated[
        bool,
        Meta(description="Whether the run says something about the code; not if it found none of the tests asked for"),
    ]
    reason: Annotated[str, Meta(description="Why it is not valid; empty if it is")]
    graded: Annotated[
        Graded,
        Meta(
            description="In a sandbox that nobody has used, in one from the snapshot with which the trajectory began "
            "(where its image alone has no pytest), or where the agent worked"
        ),
    ]
    checked: Annotated[
        list[Check],
        Meta(
            description="What held of this run (docs/SANDBOXES.md, Rewards). Without solution_apart the code that is "
            "tested ran in the process of its tests, and could forge the rest"
        ),
    ]
    resolved: Annotated[bool | None, Meta(description="Whether all that count passed; null likewise")]
    tests: Annotated[
        dict[str, Verdict],
        Meta(description="Verdict by test id; passed ones that no list names are left out if the result is too large"),
    ]
    fail_to_pass: Annotated[ListedTests, Meta(description="The input's list, parted")]
    pass_to_pass: Annotated[ListedTests, Meta(description="The input's list, parted")]
    counts: Annotated[dict[str, int], Meta(description="Tests by verdict")]
    collection_errors: Annotated[dict[str, str], Meta(description="Why a file could not be collected, by its path")]
    workers: Annotated[int, Meta(description="Workers that ran")]
    duration_s: Annotated[float, Meta(description="Seconds that the suite ran")]
    exit_code: Annotated[
        int | None, Meta(description="pytest's exit status; null if the suite did not come to its end")
    ]
    note: Annotated[str, Meta(description="What a reader of the reward should know; empty for nothing")]


_INPUT = schema_of(PytestInput, additionalProperties=False)
_RESULT = schema_of(PytestResult)


def _input_schema(function: FunctionSpec) -> Schema:
    """The fields that the learning looks at may be any value, unless they are pytest's own."""
    properties = _INPUT["properties"]
    assert isinstance(properties, dict)
    return {**_INPUT, "properties": {**dict.fromkeys(function.duration.fields, True), **properties}}


PYTEST = Kind(
    name="pytest",
    meaning="a test suite in the trajectory's sandbox, with a worker for each core; its verdicts are the reward",
    make=lambda deps: PytestRuntime(deps.environments),
    works_in_sandbox=True,
    section=PytestKeys,
    sandbox="its environment",
    spec=lambda section, place: {"pytest": section.pytest},
    input_schema=_input_schema,
    result_schema=lambda function: _RESULT,
    shown={"": (_INPUT, _RESULT)},
)
