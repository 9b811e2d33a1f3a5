"""The report of a bench: figures, checks, the machine, and how its parts are played.

Each part says on standard error when it begins and how long it took. What is known after each lies in
``.cache/bench/NAME.json``, and a bench that is ended by SIGTERM or SIGINT prints what it has. ``--keep`` adds a run
that came to its end to ``docs/dev/figures``, from which `scripts.figures` makes the tables of the docs.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO

Better = Literal["lower", "higher"]
#: Where the report of each bench lies after each of its parts.
KEPT = Path(__file__).resolve().parents[1] / ".cache" / "bench"
#: The runs whose figures docs show.
PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "dev" / "figures"
Figure = float | int | str | bool | None | list["Figure"] | dict[str, "Figure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A named value that must stay on the good side of a limit."""

    name: str
    value: float
    limit: float
    better: Better

    @property
    def ok(self) -> bool:
        """Whether it holds; a value that is not a number never does."""
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit

    def as_json(self) -> dict[str, object]:
        value = self.value if math.isfinite(self.value) else None
        return {"name": self.name, "value": value, "limit": self.limit, "better": self.better, "ok": self.ok}


@dataclass(slots=True)
class BenchReport:
    """What one bench measured.

    >>> report = BenchReport("gateway")
    >>> report.figure("echo_p50_ms", 0.4)
    >>> report.check("exec_overhead_p50_ms", 1.3, limit=2.0, better="lower")
    >>> sys.exit(report.run(lambda: measure(report), as_json=True))
    """

    bench: str
    figures: dict[str, Figure] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    #: Sentences for people: what was left out on this machine, and how a figure is to be read.
    notes: list[str] = field(default_factory=list)
    #: Of the command line, without those that say what becomes of the report.
    arguments: Sequence[str] = ()
    #: Parts to play; empty for all of them.
    only: frozenset[str] = frozenset()
    #: Instant of the monotonic clock after which no further part is begun.
    ends_s: float = math.inf

    def figure(self, name: str, value: Figure) -> None:
        """Record a measured value that is not checked; dictionaries and lists nest."""
        self.figures[name] = value

    def check(self, name: str, value: float, limit: float, better: Better) -> bool:
        """Record a value against its limit, and say whether it holds."""
        check = Check(name=name, value=float(value), limit=float(limit), better=better)
        self.checks.append(check)
        return check.ok

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, text: str) -> None:
        """Say on standard error how far it is."""
        print(f"{time.strftime('%H:%M:%S')} {self.bench}: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Play one part: if it fails, that is a failed check ``NAME_ran``, and the bench goes on with the next."""
        began_s = time.monotonic()
        self.progress(f"{name} begins")
        try:
            yield
        except Exception as error:  # noqa: BLE001  # half of the figures are better than none
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            self.missing(name, f"{type(error).__name__}: {error}")
        gc.collect()
        self.progress(f"{name}: {time.monotonic() - began_s:.1f} s")
        self.keep()

    def play(self, parts: Mapping[str, Callable[[], object]]) -> None:
        """Play the chosen parts in their order; one for which no time is left is a failed check ``NAME_ran``."""
        for name, part in parts.items():
            if self.only and name not in self.only:
                continue
            if time.monotonic() >= self.ends_s:
                self.missing(name, "the time was up")
                continue
            with self.part(name):
                done = part()
                if inspect.iscoroutine(done):
                    import uvloop  # the loop that gateways run on; the bench of models needs none

                    uvloop.run(done)

    def missing(self, name: str, why: str) -> None:
        self.check(f"{name}_ran", 0, limit=1, better="higher")
        self.note(f"{name} is missing: {why}")

    def keep(self) -> None:
        """Write what is known so far into ``.cache/bench``."""
        KEPT.mkdir(parents=True, exist_ok=True)
        part = KEPT / f"{self.bench}.json.{os.getpid()}"
        part.write_text(json.dumps(self.as_json(), sort_keys=True), encoding="utf-8")
        part.replace(KEPT / f"{self.bench}.json")

    def publish(self) -> None:
        """Add this run to those of docs/dev/figures; earlier ones keep what was not measured again."""
        path = PUBLISHED / f"{self.bench}.json"
        runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        known = {check.name for check in self.checks}
        for run in runs:
            run["checks"] = [check for check in run["checks"] if check["name"] not in known]
            run["figures"] = {name: value for name, value in run["figures"].items() if name not in self.figures}
        runs = [run for run in runs if run["checks"] or run["figures"]]
        PUBLISHED.mkdir(parents=True, exist_ok=True)
        mine = {name: value for name, value in self.as_json().items() if name != "notes"}
        path.write_text(json.dumps([*runs, mine], indent=1) + "\n", encoding="utf-8")

    def run(self, work: Callable[[], object], *, as_json: bool) -> int:
        """Do the work, print, and return the exit status; SIGTERM and SIGINT end the work and not the report."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            work()
        except KeyboardInterrupt:
            self.check("completed", 0, limit=1, better="higher")
            self.note("cut before its end: this is what was known")
        finally:
            signal.signal(signal.SIGTERM, before)
        return self.print(as_json=as_json)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "command": f"python -m bench.{self.bench} {shlex.join(self.arguments)}".rstrip(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
            "figures": _finite(self.figures),
            "checks": [check.as_json() for check in self.checks],
            "notes": self.notes,
        }

    def print(self, *, as_json: bool, file: TextIO | None = None) -> int:
        """Print the table, and with ``as_json`` the object on the last line; returns the exit status."""
        out = sys.stdout if file is None else file
        print(self.text(), file=out)
        if as_json:
            print(json.dumps(self.as_json(), sort_keys=True), file=out)
        out.flush()
        return 0 if self.ok else 1

    def text(self) -> str:
        blocks = [f"{self.bench} on {describe_machine()}"]
        flat = [(name, value) for name, value in self.figures.items() if not isinstance(value, dict)]
        if flat:
            blocks.append(table(["figure", "value"], [[name, _cell(value)] for name, value in flat]))
        blocks += [_nested(name, value) for name, value in self.figures.items() if isinstance(value, dict)]
        if self.checks:
            rows = [
                [c.name, _cell(c.value), ("<= " if c.better == "lower" else ">= ") + _cell(c.limit), _verdict(c)]
                for c in self.checks
            ]
            blocks.append(table(["check", "value", "limit", ""], rows))
        blocks += self.notes
        return "\n\n".join(blocks)


def parser(bench: str, *, parts: bool = False) -> argparse.ArgumentParser:
    """The command line of every bench: ``quick``, ``json``, and with ``parts`` which of them are played."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{bench}")
    made.add_argument("--quick", action="store_true", help="smaller inputs and fewer rounds; the same figures")
    made.add_argument("--json", action="store_true", help="the report as one JSON object on the last line of stdout")
    made.add_argument("--keep", action="store_true", help="keep the figures in docs/dev/figures, for the docs' tables")
    if parts:
        made.add_argument("--only", default="", help="parts of the whole, joined by commas; a wrong one tells them")
    return made


def play(report: BenchReport, options: argparse.Namespace, parts: Mapping[str, Callable[[], object]]) -> int:
    """Play the parts that ``--only`` names, or all, and print; coroutines run on uvloop. Returns the exit status."""
    report.only = frozenset(filter(None, options.only.replace("|", ",").split(",")))
    if unknown := sorted(report.only - parts.keys()):
        raise SystemExit(f"--only: no part is named {', '.join(unknown)}; known are {', '.join(parts)}")
    report.arguments = [word for word in sys.argv[1:] if word not in ("--json", "--keep")]
    status = report.run(lambda: report.play(parts), as_json=options.json)
    if options.keep and not any(check.name == "completed" for check in report.checks):
        report.publish()
    return status


def machine() -> dict[str, Figure]:
    """The machine that the figures come from."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def describe_machine() -> str:
    info = machine()
    return (
        f"{info['cpu']}, {info['cores']} cores, {info['memory_gib']} GiB, "
        f"Python {info['python']}, load {info['load_1m']}"
    )


def median(values: Sequence[float]) -> float:
    """The middle value; not a number where there is none."""
    return percentile(values, 0.5)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie (nearest rank); not a number where there is none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns for people: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _nested(name: str, value: dict[str, Figure]) -> str:
    """A dictionary of rows as a table of its own; any other dictionary as name and value."""
    rows = {key: row for key, row in value.items() if isinstance(row, dict)}
    if len(rows) != len(value) or not rows:
        return table([name, "value"], [[key, _cell(cell)] for key, cell in value.items()])
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    body = [[key, *(_cell(row.get(column)) for column in columns)] for key, row in rows.items()]
    return table([name, *columns], body)


def _cell(value: Figure) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return "-" if value is None else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return json.dumps(value)


def _verdict(check: Check) -> str:
    return "ok" if check.ok else "FAILED"


def _finite(value: Figure) -> Figure:
    """JSON has no infinity and no not-a-number: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
