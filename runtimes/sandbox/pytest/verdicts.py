"""What the report of a suite says, and the reward that it is worth: judged outside the sandbox."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from runtimes.sandbox.pytest.plugin import begins, key_of

#: Verdicts of pytest's that are no failure and no pass, which a function may take out of the count.
IGNORABLE = frozenset({"skipped", "xfailed", "xpassed"})
VERDICTS = frozenset({*IGNORABLE, "passed", "failed", "error"})

#: pytest's own exit status for no tests.
NO_TESTS = 5

LINE_MAX_BYTES = 1 * 2**20
TESTS_MAX = 100_000
DOUBTS_MAX = 5
STATUS_MAX = 255
WORKERS_MAX = 2**16
_NOTE_IDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRequest:
    """Which tests are run, and which of them decide the reward."""

    #: Paths, or ids with ``::``; empty runs what the lists name, or everything.
    targets: tuple[str, ...] = ()
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    #: Verdicts that take a test out of the count, if `fail_to_pass` does not name it.
    ignore: frozenset[str] = frozenset()
    #: Without lists, a file that cannot be collected is one test that failed; else nothing is worth anything then.
    goes_on: bool = False

    @property
    def listed(self) -> tuple[str, ...]:
        return self.fail_to_pass + self.pass_to_pass

    @property
    def paths(self) -> tuple[str, ...]:
        """Files and directories to collect, each once however it is spelled."""
        asked = (*self.targets, *self.listed)
        return tuple(dict.fromkeys(os.path.normpath(id.partition("::")[0]) for id in asked))


@dataclass(slots=True)
class SuiteReport:
    """What is known of a run; of several, where it had to be taken up again after a crash."""

    nonce: str
    #: Id -> verdict, as the suite names its tests.
    tests: dict[str, str] = field(default_factory=dict)
    #: File -> why it could not be collected.
    broken: dict[str, str] = field(default_factory=dict)
    #: File -> why it skipped itself when it was imported.
    skipped: dict[str, str] = field(default_factory=dict)
    #: Ids that were to run.
    selected: list[str] = field(default_factory=list)
    #: Started, and not yet ended.
    running: set[str] = field(default_factory=set)
    workers: int = 0
    xdist: bool = False
    #: pytest was there and began.
    started: bool = False
    #: Nothing of the agent's had a part in the start of Python, pytest and its plugins, in any run; None: not known.
    clean: bool | None = None
    #: Whether it was seen in every run whether something of the agent's runs where the tests do; and what does.
    watched: bool | None = None
    inside: str = ""
    #: Whether the suite's process had children that may have told it of that.
    has_children: bool = False
    #: Why pytest could not even begin.
    absent: str = ""
    #: Why the suite's process found no place of its own.
    blocked: str = ""
    #: pytest's exit status; None while it runs, or if its process ended without one.
    end: int | None = None
    #: Whether a worker ended before its time.
    crashed: bool = False
    #: What the suite's process saw before it let the project in.
    noticed: tuple[str, ...] = ()
    #: Why the report is not to be believed: what does not fit together, or what the project has changed.
    doubts: list[str] = field(default_factory=list)
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        """Take in what the run wrote; lines that are not ours are passed over."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            record = self._record(line)
            if record is not None:
                self._take(record)
            elif line.strip():
                self.doubt("somebody else wrote to the report")
        if len(self._rest) > LINE_MAX_BYTES:
            self._rest = b""

    def doubt(self, why: str) -> None:
        if why not in self.doubts and len(self.doubts) < DOUBTS_MAX:
            self.doubts.append(why)

    def take_up(self) -> None:
        """Go on after the process ended under its tests: those that ran are errors, another run may take the others.

        What workers and children have told it of the agent's code went with it.
        """
        self.watched = self.watched if self.workers == 1 and not self.has_children else False
        for id in self.running:
            self.tests.setdefault(id, "error")
        self.running.clear()
        self._rest = b""
        self.end = None

    @property
    def died(self) -> bool:
        """Whether pytest ended before any test could run, by what it is told or what it loads."""
        begun = self.selected or self.tests or self.running or self.crashed or self.broken
        return self.end not in (None, 0, NO_TESTS) and not begun

    @property
    def left(self) -> list[str]:
        """Selected tests without a verdict."""
        return [id for id in self.selected if id not in self.tests]

    def _record(self, line: bytes) -> Mapping[str, object] | None:
        try:
            record = _without_surrogates(json.loads(line))
        except (ValueError, RecursionError):  # which deep nesting raises
            return None
        return record if isinstance(record, dict) and record.get("nonce") == self.nonce else None

    def _take(self, record: Mapping[str, object]) -> None:
        if self.end is not None:
            self.doubt("the report went on after its end")
        match record:
            case {"start": {"xdist": str(xdist), "workers": int(workers), "noticed": list(noticed)}}:
                self.started, self.xdist = True, bool(xdist)
                self.workers = min(max(workers, self.workers), WORKERS_MAX)
                self.noticed = tuple(str(text) for text in noticed)
            case {"clean": bool(clean), "watched": bool(watched)}:
                self.clean = clean and self.clean is not False
                self.watched = watched and self.watched is not False
            case {"children": True}:
                self.has_children = True
            case {"inside": str(what)}:
                self.inside = what
            case {"selected": list(ids)}:
                known = set(self.selected)
                self.selected += [str(id) for id in ids if id not in known][: TESTS_MAX - len(known)]
            case {"run": str(id)}:
                self.running.add(id)
            case {"test": str(id), "verdict": str(verdict)} if verdict in VERDICTS and len(self.tests) < TESTS_MAX:
                if id in self.tests:
                    self.doubt(f"{id} was reported twice")
                elif id not in self.running:
                    self.doubt(f"{id} was reported without having begun")
                self.running.discard(id)
                self.tests[id] = verdict
            case {"altered": [str(name), *_]}:
                self.doubt(f"the project altered {name}, which makes the verdicts")
            case {"turned": str(id)}:
                self.doubt(f"{id} raised something, and a hook of the project called it passed")
            case {"broken": str(path), "message": str(message)}:
                self.broken[path] = message
            case {"skipped": str(path), "message": str(message)} if len(self.skipped) < TESTS_MAX:
                self.skipped[path] = message
            case {"crashed": str()}:
                self.crashed = True
            case {"absent": str(why)}:
                self.absent = why
            case {"blocked": str(why)}:
                self.blocked = why
                self.doubt(f"the suite could not begin: {why}")
            case {"end": int(status)} if 0 <= status <= STATUS_MAX:
                self.end = status
            case _:
                pass


def sayable(text: str) -> str:
    """Return a text that can be written as UTF-8: names of files may be any bytes, which Python reads as surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _without_surrogates(value: object) -> object:
    """Return a record with texts that can be told; raises RecursionError if it is nested too deeply."""
    if isinstance(value, str):
        return value if value.isascii() else sayable(value)
    if isinstance(value, list):
        return [_without_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {sayable(name): _without_surrogates(each) for name, each in value.items()}
    return value


def judge(request: SuiteRequest, report: SuiteReport) -> dict[str, object]:
    """Return verdicts and reward as plain JSON values.

    Only ``passed`` is a pass. With lists the reward is 1.0 when every listed test passes, else 0.0; without, the share
    of the tests that passed, and 0.0 where a file could not be collected: nobody knows how many tests it has, and
    pytest would have run none at all. A test that was asked for and did not run is ``missing``, a file that skipped
    itself one skipped test. Verdicts that the request ignores are out of the count, and where none is left in it the
    reward is 0.0. A report in doubt is worth 0.0.
    """
    tests = _verdicts(request, report)
    counted = _counted(request, tests)
    passing = sum(tests[id] == "passed" for id in counted)
    resolved = 0 < passing == len(counted)
    if request.listed:
        reward = 1.0 if resolved else 0.0
    else:
        reward = passing / len(counted) if counted else 0.0
        if report.broken and not request.goes_on:
            reward = 0.0
    if report.doubts:
        reward, resolved = 0.0, False
    return {
        "reward": reward,
        "resolved": resolved,
        "tests": tests,
        "fail_to_pass": _parted(request, request.fail_to_pass, tests),
        "pass_to_pass": _parted(request, request.pass_to_pass, tests),
        "counts": dict(sorted(Counter(tests.values()).items())),
        "collection_errors": dict(report.broken),
    }


def notes(request: SuiteRequest, report: SuiteReport, result: Mapping[str, object]) -> list[str]:
    """Return what a reader of the reward should know, in sentences."""
    said = []
    tests = result["tests"]
    assert isinstance(tests, dict)
    counted = _counted(request, tests)
    missing = [id for id, verdict in tests.items() if verdict == "missing"]
    if missing:
        said.append(f"{len(missing)} requested test(s) did not run: {_some(missing)}")
    failed = [id for id in counted if tests[id] in ("failed", "error")]
    if failed:
        said.append(f"{len(failed)}{' listed' if request.listed else ''} test(s) did not pass: {_some(failed)}")
    others = {verdict: [id for id in counted if tests[id] == verdict] for verdict in sorted(IGNORABLE)}
    said += [
        f"{len(those)} test(s) {verdict}, which is no pass: {_some(those)}"
        for verdict, those in others.items()
        if those
    ]
    if report.broken:
        told = f"{len(report.broken)} file(s) could not be collected: {_some(report.broken)}"
        whole = "" if request.listed or request.goes_on else ", so that the suite is worth 0.0, as it is to pytest"
        said.append(told + whole)
    if report.skipped and result["reward"] != 1.0:
        path, why = next(iter(report.skipped.items()))
        said.append(f"{len(report.skipped)} file(s) skipped themselves when they were imported: {path} ({why})")
    if not tests:
        said.append("no test was collected")
    elif not counted:
        ignored = ", ".join(sorted({str(verdict) for verdict in tests.values()}))
        said.append(f"all {len(tests)} test(s) are ignored ({ignored}), so that none counts: {_some(tests)}")
    return [*said, *report.doubts, *report.noticed]


def nothing_judged(request: SuiteRequest, report: SuiteReport, given: Collection[str]) -> str:
    """Return why the run says nothing about the code, empty if it does.

    That is a suite which came to its end without having found a test that was asked for, of files that are not
    ``given`` with the request. A suite that broke, ended its own process or ran something says something.
    """
    ran = report.broken or report.skipped or report.tests or report.selected or report.crashed
    if report.end != NO_TESTS or ran or report.doubts:
        return ""
    if given and {os.path.normpath(path) for path in request.paths} <= {os.path.normpath(path) for path in given}:
        return ""
    if request.listed:
        return f"none of the {len(request.listed)} listed test(s) was found: {_some(request.listed)}"
    return "no test was collected"


def _verdicts(request: SuiteRequest, report: SuiteReport) -> dict[str, str]:
    """Return every test's verdict, by the name under which it was asked for if it was."""
    known = {key_of(id): verdict for id, verdict in report.tests.items()}
    files = {
        **dict.fromkeys(map(key_of, report.skipped), "skipped"),
        **dict.fromkeys(map(key_of, report.broken), "error"),
    }
    asked = [*request.listed, *report.left]
    for target in request.targets:
        key = key_of(target)
        if "::" in target and (key in known or not any(begins(other, key) for other in known)):
            asked.append(target)
    tests = {}
    for id in asked:
        key = key_of(id)
        tests[id] = known.get(key) or files.get(key.partition("::")[0], "missing")
    keys = {key_of(id) for id in asked}
    tests.update({id: verdict for id, verdict in report.tests.items() if key_of(id) not in keys})
    if not request.listed:
        tests.update(dict.fromkeys(report.skipped, "skipped"))
        tests.update(dict.fromkeys(report.broken, "error"))
    return tests


def _counted(request: SuiteRequest, tests: Mapping[str, str]) -> list[str]:
    """Return the tests that decide: the listed ones or else all, without those of verdicts that are ignored."""
    named = set(request.fail_to_pass)
    asked = dict.fromkeys(request.listed) if request.listed else tests
    return [id for id in asked if id in named or tests[id] not in request.ignore]


def _parted(request: SuiteRequest, ids: Iterable[str], tests: Mapping[str, str]) -> dict[str, list[str]]:
    parted: dict[str, list[str]] = {"passed": [], "failed": []}
    counted = set(_counted(request, tests))
    for id in ids:
        if id in counted:
            parted["passed" if tests[id] == "passed" else "failed"].append(id)
    return parted


def _some(ids: Iterable[str]) -> str:
    listed = list(ids)
    more = f" and {len(listed) - _NOTE_IDS} more" if len(listed) > _NOTE_IDS else ""
    return ", ".join(listed[:_NOTE_IDS]) + more
