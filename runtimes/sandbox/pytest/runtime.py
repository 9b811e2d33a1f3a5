"""The pytest runtime: a suite in the trajectory's sandbox, as wide as its lease, with verdicts and a reward."""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from manager.action import Action, Lease
from manager.errors import ActionFailed, CodedError, InvalidInput, NotFound, Reason, TooLarge
from manager.function import FunctionSpec
from runtimes.runtime import Execution, Result
from runtimes.sandbox.command import Command, CommandResult, claims_of, memory_ended, processes_refused
from runtimes.sandbox.disk.bound import WalkBound
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec.runtime import LogLines, Stage, begin
from runtimes.sandbox.pytest import baseline, launch, plugin
from runtimes.sandbox.pytest.fresh import ChangeTransfer
from runtimes.sandbox.pytest.mistakes import no_python
from runtimes.sandbox.pytest.plan import COMPONENT, PytestSettings, SuitePlan, plan_of
from runtimes.sandbox.pytest.plugin import key_of
from runtimes.sandbox.pytest.report import SuiteReport, SuiteRequest, judge, notes, nothing_judged
from runtimes.sandbox.runner.packing import compiled
from runtimes.sandbox.runner.protocol import FILE_ERROR, unmade
from runtimes.sandbox.sandbox import Sandbox

#: What a record can say that held: nobody else was at work in the sandbox; Python and pytest began with nothing of the
#: agent's; the tests came with the request; the suite's user could not change them; the tree's options did not count;
#: the report fits together.
Check = Literal["swept", "clean_start", "tests_given", "tests_locked", "tree_options_ignored", "report_whole"]

_SOURCE = Path(launch.__file__).read_text(encoding="utf-8")
#: The modules that it finds in a directory of its own.
_MODULES = {
    name: Path(str(module.__file__)).read_text(encoding="utf-8")
    for name, module in ((launch.MODULE, plugin), (launch.BASELINE, baseline))
}
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
os.execvp(sys.argv[2], [sys.argv[2], "-s", "-c", {CLEAN!r}, sys.argv[1]])
"""
#: What mends a sandbox without pytest.
INSTALL = "install it in the image, for process sandboxes for the host's python3, or name one by sandbox.path"
_TAIL_BYTES = 4000
#: How pytest ends its words on a file that is no Python.
_SYNTAX = re.compile(r"^E +(?:SyntaxError|IndentationError|TabError)\b", re.MULTILINE)
#: Seconds by which two clocks may disagree on whether the timeout is reached.
_CLOCK_S = 0.02


class PytestRuntime:
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
        plan = plan_of(execution, self._settings)
        trajectory = execution.action.trajectory
        ended = None if trajectory is None else self._environments.get(trajectory)
        if ended is not None and not ended.alive and ended.condemned:
            execution.begin()  # what its agent did ended it: that is no way out of the reward, and the next one is told
            return self._begun(execution, ended, plan, fresh=plan.spec.grade == "fresh").worthless(ended.condemned)
        if plan.spec.grade == "fresh" and trajectory is not None:
            return await self._graded_fresh(execution, plan, trajectory)
        async with self._stage.enter(execution) as sandbox:
            return await self._run(execution, sandbox, plan, fresh=trajectory is None)

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
        async with self._stage.enter_fresh(execution, original.spec) as sandbox:
            claims = claims_of(execution.action.id, execution.action.attempt)
            notes: list[str] = []
            if not any(claim.startswith(claims) for claim in sandbox.resumable):
                known = await transfer.known(sandbox)
                try:
                    async with self._stage.visit(original, execution):
                        changed = await transfer.collect(original, known)
                    notes = await transfer.apply(sandbox, changed)
                except ValueError as error:
                    execution.begin()
                    return self._begun(execution, sandbox, plan, fresh=True).worthless(str(error))
            return await self._run(execution, sandbox, plan, fresh=True, notes=notes)

    async def _run(
        self, execution: Execution, sandbox: Sandbox, plan: SuitePlan, *, fresh: bool, notes: Sequence[str] = ()
    ) -> Result:
        run = self._begun(execution, sandbox, plan, fresh=fresh, notes=notes)
        run.detached = await begin(execution, sandbox)
        try:
            return await run.result()
        finally:
            execution.end()

    def _begun(
        self, execution: Execution, sandbox: Sandbox, plan: SuitePlan, *, fresh: bool, notes: Sequence[str] = ()
    ) -> _Run:
        info = self._environments.provider.info
        work = info.disk != WalkBound.name
        bounds = _Bounds(work=work, tmp=work or info.kind != "container")
        return _Run(execution, sandbox, plan, self._settings, bounds, fresh=fresh, notes=notes)

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._stage.resize(action, lease)

    async def end_trajectory(self, trajectory: str) -> None:
        """Do nothing: nothing is kept between actions."""

    async def close(self) -> None:
        """Do nothing: whoever made the environments closes them."""


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
        fresh: bool,
        notes: Sequence[str] = (),
    ) -> None:
        self._execution = execution
        self.detached = False
        self._fresh = fresh
        self._sandbox = sandbox
        self._plan = plan
        self._settings = settings
        self._bounds = bounds
        self._claims = claims_of(execution.action.id, execution.action.attempt)
        self._report = SuiteReport(sandbox.secret(self._claims))
        self._lines = LogLines(execution.call.log)
        self._tail = b""
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
            if self._sandbox.condemned:  # it has asked for that, and must not get out of its reward so
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
        if ended.timed_out:
            raise self._timed_out()
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
                locked.append(await self._sandbox.lock_file(_joined(self._plan.cwd, path), text.encode()))
            except (InvalidInput, NotFound) as refused:  # the tree is in its way, which is the agent's
                self._report.doubt(f"the tests could not be written: {refused.message}")
            except TooLarge as full:
                self._require_own(self._bounds.work, full.message)
                self._report.doubt(f"the tests could not be written: {full.message}")
        if locked:
            self._checked |= {"tests_given", "tests_locked"} if all(locked) else {"tests_given"}

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
        if ended.forks_refused:
            self._notes.append(processes_refused(ended.forks_refused, self._sandbox.spec.pids))
        if ended.unshown.get("stdout"):
            self._report.doubt(f"the report lacks {ended.unshown['stdout']} bytes and is incomplete")
        if unlogged := ended.unshown.get("stderr"):
            self._tail = ended.stderr[-_TAIL_BYTES:]
            self._execution.call.log.omit(unlogged)
        return ended

    def _command(self, workers: int, timeout_s: float) -> Command:
        plan, request = self._plan, self._plan.request
        told = {
            "nonce": self._report.nonce,
            "modules": _MODULES,
            "compiled": _COMPILED,
            "paths": request.paths,
            # Without ids or prefixes everything collected is run.
            "wanted": request.listed,
            "prefixes": request.targets,
            "done": list(self._report.tests),
            "workers": workers,
            "dist": plan.dist,
            "args": plan.args,
            "own_options": plan.spec.tree_options == "ignore" and not self._fresh,
            "test_timeout_s": plan.test_timeout_s,
        }
        python, hides = self._settings.python, self._sandbox.hides
        start = (python, "-I", "-S", "-c", START, _SOURCE, python)
        return Command(
            argv=(python, "-s", "-c", CLEAN, _SOURCE) if hides else start,
            hide=launch.HIDE if hides else (),
            cwd=plan.cwd,
            env=plan.env,
            stdin=json.dumps(told).encode(),
            timeout_s=timeout_s,
            output_limit_bytes=2 * _TAIL_BYTES,
            shown_limit_bytes=max(self._settings.output_max_bytes, self._execution.call.function.log_limit_bytes),
            claim=f"{self._claims}{self._runs}",
            detached=self.detached,
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
            "graded": "fresh" if self._fresh else "same_sandbox",
            "checked": sorted(self._checks()),
            "workers": report.workers,
            "duration_s": round(self._execution.execution_s, 6),
            "exit_code": exit_code if report.end is None else report.end,
            "note": "; ".join(said),
        }
        return _within(value, plan.request, self._execution.call.function.output_limit_bytes)

    def _checks(self) -> set[Check]:
        """Return what held of this run, of all that can be checked."""
        plan, report = self._plan, self._report
        checked = set(self._checked)
        if report.started:
            checked.add("clean_start")
        if plan.spec.tree_options == "ignore":
            checked.add("tree_options_ignored")
        if report.end is not None and not report.doubts:
            checked.add("report_whole")
        return checked

    def _timed_out(self) -> ActionFailed:
        running = ", ".join(sorted(self._report.running)) or "none"
        limit_s = self._execution.action.timeout_s
        told = f"the suite ran longer than timeout, {limit_s:g} s; tests under way: {running}"
        return self._failed(Reason.TIMEOUT, told)

    def _failed(self, reason: Reason, message: str, detail: Mapping[str, object] | None = None) -> ActionFailed:
        value = self._value(None)
        # What is known of a run that did not come to its end is no reward.
        value |= {"reward": None, "resolved": None, "valid": False, "reason": message}
        return ActionFailed(reason, message, component=COMPONENT, result=value, detail=detail, usage=self._usage())

    def _said(self) -> str:
        return self._tail.decode("utf-8", "replace").strip()[-_TAIL_BYTES // 4 :]


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
