"""The pytest runtime: a suite in the trajectory's sandbox, as wide as its lease, with verdicts and a reward."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import orjson
from msgspec import Meta

from manager.action import Action
from manager.errors import ActionFailed, Reason
from manager.function import FunctionSpec, PytestSpec
from manager.lease import Lease
from runtimes.runtime import Execution, Result
from runtimes.sandbox.command import Command, CommandResult, claims_of
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec.runtime import Directory, Env, LogLines, Stage, begin, checked, invalid
from runtimes.sandbox.pytest import plugin
from runtimes.sandbox.pytest.report import SuiteReport, SuiteRequest, judge, notes
from runtimes.sandbox.sandbox import Sandbox

COMPONENT = "pytest"

_SOURCE = Path(plugin.__file__).read_text(encoding="utf-8")
_TAIL_BYTES = 4000
#: Seconds by which two clocks may disagree on whether the timeout is reached.
_CLOCK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestSettings:
    """How suites are run."""

    python: str = "python3"
    #: Workers started for each core of a malleable action, which may be given more cores while it runs.
    growth: float = 1.5
    #: Least expected seconds on one core from which that is done: a further worker costs 0.2 to 1.4 CPU seconds
    #: (``bench/pytest_width.py``), and shorter suites end before they could be given anything.
    growth_from_s: float = 20.0
    #: Times that a run is taken up again after its process ended under its tests.
    resumes_max: int = 4
    #: Bytes of a report, and of what a suite prints, that are taken in.
    output_max_bytes: int = 16 * 2**20


class PytestInput(TypedDict, total=False):
    """Which tests to run; all that pytest collects by default."""

    targets: Annotated[list[str], Meta(description="Files, directories and test ids that pytest is given")]
    fail_to_pass: Annotated[list[str], Meta(description="Test ids that must pass for a reward of 1")]
    pass_to_pass: Annotated[list[str], Meta(description="Test ids that must still pass for it")]
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
    cwd: str
    env: Mapping[str, str]
    args: tuple[str, ...]
    workers: int
    dist: str
    test_timeout_s: float


class PytestRuntime:
    """Runs ``pytest -n WORKERS`` and answers with the verdicts, whatever the suite's process did.

    A suite that fails, breaks, ends its own process or runs other tests than it was asked for has a result, with
    reward 0.0 and a note. ActionFailed is for runs that say nothing about the code: no pytest in the sandbox
    (invalid_input), timeout, out_of_memory, environment_lost; the verdicts known by then are the failure's result.
    """

    def __init__(self, environments: Environments, settings: PytestSettings | None = None) -> None:
        self._environments = environments
        self._settings = settings or PytestSettings()
        self._stage = Stage(environments)

    async def prepare(self, function: FunctionSpec) -> None:
        await self._environments.warm(function.sandbox)

    async def execute(self, execution: Execution) -> Result:
        plan = plan_of(execution, self._settings)
        async with self._stage.enter(execution) as sandbox:
            detached = await begin(execution, sandbox)
            try:
                return await _Run(execution, sandbox, plan, self._settings, detached=detached).result()
            finally:
                execution.end()

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._stage.resize(action, lease)

    async def end_trajectory(self, trajectory: str) -> None:
        """Do nothing: nothing is kept between actions."""

    async def close(self) -> None:
        """Do nothing: whoever made the environments closes them."""


class _Run:
    """One action under way: pytest once, and again for the tests that a crash left over."""

    def __init__(
        self, execution: Execution, sandbox: Sandbox, plan: SuitePlan, settings: PytestSettings, *, detached: bool
    ) -> None:
        self._execution = execution
        self._detached = detached
        self._sandbox = sandbox
        self._plan = plan
        self._settings = settings
        self._claims = claims_of(execution.action.id, execution.action.attempt)
        self._report = SuiteReport(sandbox.secret(self._claims))
        self._lines = LogLines(execution.call.log)
        self._tail = b""
        self._notes: list[str] = []
        self._cpu_s = 0.0
        self._peak_bytes = 0
        self._runs = 0

    async def result(self) -> Result:
        try:
            ended = await self._run_all()
        except ActionFailed as lost:
            raise self._failed(lost.reason, lost.message, lost.detail) from lost
        except BaseException:
            # The executor cancels at the timeout; then what is known must not be lost with the task.
            if self._execution.execution_s >= self._execution.action.timeout_s - _CLOCK_S:
                raise self._timed_out() from None
            raise
        finally:
            self._lines.close()
        if ended.timed_out:
            raise self._timed_out()
        if self._report.absent:
            raise self._failed(Reason.INVALID_INPUT, f"the sandbox has {self._report.absent}")
        if ended.out_of_memory and self._report.end is None:
            raise self._failed(Reason.OUT_OF_MEMORY, f"the sandbox ran out of memory (peak {self._peak_bytes} bytes)")
        if not self._report.started:
            raise self._failed(Reason.INVALID_INPUT, f"pytest could not be started: {self._said()}")
        if ended.out_of_memory:
            self._notes.append("the sandbox ran out of memory under some of the tests")
        usage = {"workers": self._report.workers, "runs": self._runs, "tests": len(self._report.tests)}
        return Result(
            value=self._value(ended.exit_code),
            usage={**usage, "cpu_s": self._cpu_s, "peak_memory_bytes": self._peak_bytes},
        )

    async def _run_all(self) -> CommandResult:
        """Run until pytest came to its end, or nothing more is won by another run."""
        workers = self._plan.workers
        while True:
            known = len(self._report.tests)
            ended = await self._run_once(workers)
            report = self._report
            if ended.timed_out or not report.started or report.absent:
                return ended
            if report.end is None:
                crashed = sorted(report.running)
                report.take_up()
                self._notes.append(f"the process ended by itself ({_how(ended)}) in {', '.join(crashed) or 'no test'}")
            elif workers > 1 and report.selected and not report.tests:
                self._notes.append("with several workers no test ran: one process was used")
                self._report = SuiteReport(report.nonce)
                workers = 1
                continue
            else:
                return ended
            if not report.left or len(report.tests) == known or self._runs > self._settings.resumes_max:
                return ended

    async def _run_once(self, workers: int) -> CommandResult:
        self._runs += 1
        left_s = self._execution.action.timeout_s - self._execution.execution_s
        ended = await self._sandbox.run(self._command(workers, max(0.01, left_s)), self._on_output)
        self._cpu_s += ended.cpu_s
        self._peak_bytes = max(self._peak_bytes, ended.peak_memory_bytes)
        if ended.stdout_truncated:
            self._notes.append(f"the report exceeds {self._settings.output_max_bytes} bytes and is incomplete")
        return ended

    def _command(self, workers: int, timeout_s: float) -> Command:
        plan, request = self._plan, self._plan.request
        told = {
            "nonce": self._report.nonce,
            "source": _SOURCE,
            "paths": request.paths,
            # Without ids or prefixes everything collected is run.
            "wanted": request.listed,
            "prefixes": request.targets,
            "done": list(self._report.tests),
            "workers": workers,
            "dist": plan.dist,
            "args": plan.args,
            "test_timeout_s": plan.test_timeout_s,
        }
        return Command(
            argv=(self._settings.python, "-c", _SOURCE),
            cwd=plan.cwd,
            env=plan.env,
            stdin=json.dumps(told).encode(),
            timeout_s=timeout_s,
            output_limit_bytes=self._settings.output_max_bytes,
            claim=f"{self._claims}{self._runs}",
            detached=self._detached,
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
        said = [*notes(plan.request, report, value), *self._notes]
        if plan.workers > 1 and report.started and not report.xdist:
            said.append("the sandbox has no pytest-xdist: the suite ran in one process")
        if report.end not in (None, 0, 1, 5):
            said.append(f"pytest ended with status {report.end}: {self._said()}")
        value |= {
            "workers": report.workers,
            "duration_s": round(self._execution.execution_s, 6),
            "exit_code": exit_code if report.end is None else report.end,
            "note": "; ".join(said),
        }
        return _within(value, plan.request, self._execution.call.function.output_limit_bytes)

    def _timed_out(self) -> ActionFailed:
        running = ", ".join(sorted(self._report.running)) or "none"
        limit_s = self._execution.action.timeout_s
        return self._failed(Reason.TIMEOUT, f"the suite ran longer than {limit_s:g} s; tests under way: {running}")

    def _failed(self, reason: Reason, message: str, detail: Mapping[str, object] | None = None) -> ActionFailed:
        value = self._value(None)
        # What is known of a run that did not come to its end is no reward.
        value |= {"reward": None, "resolved": None}
        return ActionFailed(reason, message, component=COMPONENT, result=value, detail=detail)

    def _said(self) -> str:
        return self._tail.decode("utf-8", "replace").strip()[-_TAIL_BYTES // 4 :]


def plan_of(execution: Execution, settings: PytestSettings) -> SuitePlan:
    """Return the caller's input as a plan; raises ActionFailed(invalid_input) with the path at fault."""
    function = execution.call.function
    given = checked(execution.call.input, PytestInput, learned=function.duration.key, component=COMPONENT)
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
    return SuitePlan(
        request=request,
        cwd=cwd,
        env=given.get("env", {}),
        args=spec.args + args,
        workers=_workers(execution, spec, request, given.get("workers"), settings),
        dist=spec.dist,
        test_timeout_s=given.get("test_timeout_s", 0.0),
    )


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
