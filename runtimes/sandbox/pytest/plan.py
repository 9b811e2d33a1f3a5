"""What a reward is asked for: the input of a pytest action, read and checked."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Annotated, TypedDict

from msgspec import Meta

from manager.function import PytestSpec
from runtimes.runtime import Execution
from runtimes.sandbox.exec.runtime import Directory, Env, checked, invalid, traced
from runtimes.sandbox.pytest.mistakes import (
    added_options,
    ends_early,
    goes_on,
    left_out,
    option_at_fault,
    testless,
    undefined,
)
from runtimes.sandbox.pytest.report import SuiteRequest

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
    #: Workers started for each core of a malleable action, which may be given more cores while it runs.
    growth: float = 1.5
    #: Least expected seconds on one core from which that is done: a further worker costs 0.2 to 1.4 CPU seconds,
    #: and shorter suites end before they could be given anything.
    growth_from_s: float = 20.0
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


def plan_of(execution: Execution, settings: PytestSettings) -> SuitePlan:
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
    workers = _workers(execution, spec, request, given.get("workers"), settings)
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


def _workers(
    execution: Execution, spec: PytestSpec, request: SuiteRequest, asked: int | None, settings: PytestSettings
) -> int:
    """Return how many processes: one per core, more if the action may grow, fewer if there are fewer tests."""
    action = execution.action
    wanted = max(1, execution.lease.units("cpu"))
    if action.malleable and "cpu" in action.cost and (action.t_ori_s or 0.0) >= settings.growth_from_s:
        wanted = min(math.ceil(wanted * settings.growth), max(wanted, action.cost["cpu"].maximum))
    wanted = asked or wanted
    if request.listed and not request.targets:
        wanted = min(wanted, len(request.listed))
    return max(1, min(wanted, spec.max_workers))
