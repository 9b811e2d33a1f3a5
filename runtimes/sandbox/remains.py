"""Remains: what gateways that are gone left on this machine, of any state directory. Everything here blocks."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtimes.sandbox.cgroup import ASIDE, STEP_S, Hierarchy
from runtimes.sandbox.record import SANDBOXES, SandboxRecord, is_held
from runtimes.sandbox.snapshots.record import SNAPSHOTS

#: In the command line of whatever leads to a runner: its directory on this machine.
RUN_DIRECTORY = re.compile(rf"^(/.*)/{SANDBOXES}/([^/]+)/run$")
RUNNER_FILE = "runner.py"
GROUP = "tangram-"
#: Times that the processes of a sandbox are killed until none is left.
KILLS_MAX = 200
#: An empty control group younger than this may be about to be entered.
YOUNG_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remnant:
    """Something of ours that was found. It is removed by whoever found it."""

    kind: str
    name: str
    #: The directory of the provider that made it; empty if nothing tells.
    state_dir: str
    #: Whether a living gateway may need it.
    held: bool
    why: str


class Remains(Protocol):
    """Finds and removes remnants of some kinds."""

    def find(self) -> list[Remnant]: ...

    def remove(self, remnant: Remnant) -> None:
        """Raises CodedError or OSError if it cannot be removed."""
        ...


def verdict(state_dir: str) -> tuple[bool, str]:
    """Return whether the sandboxes of a state directory of this machine are somebody's, and why."""
    try:
        there = Path(state_dir).is_dir()
    except PermissionError:
        return True, "it is another user's"
    if is_held(Path(state_dir)):
        return True, "its gateway lives"
    return False, "its gateway is gone" if there else "its state directory is gone"


class LocalRemains:
    """Process sandboxes, their directories and snapshots, and control groups that nobody is in.

    Directories are looked for in ``known`` state directories and in those of the processes that are found; those of
    ``others`` (names) are left to whoever found these.
    """

    def __init__(self, known: Iterable[str] = (), others: Collection[str] = ()) -> None:
        self._known = set(known)
        self._others = others
        self._hierarchy = Hierarchy.discover()

    def find(self) -> list[Remnant]:
        running = _runners()
        found = [self._remnant("process sandbox", place) for place in running]
        for state_dir in sorted({*self._known, *(state_dir for state_dir, _ in running)}):
            for directory in sorted(Path(state_dir, SANDBOXES).glob("*/")):
                place = (state_dir, directory.name)
                if place not in running and directory.name not in self._others:
                    found += [self._remnant("directory", place)]
            for directory in sorted(Path(state_dir, SNAPSHOTS).glob("*/")):
                if directory.name not in self._others:
                    found += [self._remnant("snapshot", (state_dir, directory.name))]
        return [*found, *self._empty_groups()]

    def _remnant(self, kind: str, place: tuple[str, str]) -> Remnant:
        held, why = verdict(place[0])
        return Remnant(kind=kind, name=place[1], state_dir=place[0], held=held, why=why)

    def _empty_groups(self) -> list[Remnant]:
        """Return control groups without processes: whoever makes one is in it a moment later."""
        user = os.geteuid()
        groups = [group for group in self._groups(f"{GROUP}*") if not user or _owner(group) == user]
        old_s = time.time() - YOUNG_S
        kept = {group.name for group in groups if _any_process(group) or _born_s(group) > old_s}
        return [
            Remnant(kind="control group", name=name, state_dir="", held=False, why="nobody is in it")
            for name in sorted({group.name for group in groups} - kept)
        ]

    def _groups(self, pattern: str) -> Iterator[Path]:
        for root in () if self._hierarchy is None else self._hierarchy.roots:
            for directory, names, _ in os.walk(root):  # passes over groups that go meanwhile
                yield from (Path(directory, name) for name in fnmatch.filter(names, pattern))

    def remove(self, remnant: Remnant) -> None:
        place = (remnant.state_dir, remnant.name)
        if remnant.kind == "snapshot":
            shutil.rmtree(Path(remnant.state_dir, SNAPSHOTS, remnant.name), ignore_errors=True)
            return
        if remnant.kind == "process sandbox":
            for group in self._groups(f"{GROUP}{remnant.name}"):
                with suppress(OSError):  # of another controller; what is frozen under version 1 cannot be ended
                    (group / "freezer.state").write_text("THAWED", encoding="ascii")
            _end(lambda: _runners().get(place, []))
        if remnant.kind == "control group":
            self._remove_groups(remnant.name)
        else:
            shutil.rmtree(Path(remnant.state_dir, SANDBOXES, remnant.name), ignore_errors=True)
            self._remove_groups(f"{GROUP}{remnant.name}")

    def _remove_groups(self, name: str) -> None:
        for group in sorted([*self._groups(name), *self._groups(f"{name}{ASIDE}")], reverse=True):
            for below in sorted(group.glob("**/"), reverse=True):
                with suppress(OSError):  # somebody is in it
                    below.rmdir()


def _runners() -> dict[tuple[str, str], list[int]]:
    """Return the processes of each process sandbox, by state directory and name: only our own where we are not root."""
    found: dict[tuple[str, str], list[int]] = {}
    user = os.geteuid()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if user and place.stat().st_uid != user:
                continue
            words = os.fsdecode((place / "cmdline").read_bytes()).split("\0")
            names = [match.groups() for word in words if (match := RUN_DIRECTORY.match(word))]
            if names and any(word.endswith(f"/{RUNNER_FILE}") for word in words):
                state_dir, name = names[0]
                found.setdefault((state_dir, name), []).append(int(place.name))
    for (state_dir, name), pids in found.items():
        record = SandboxRecord.read(Path(state_dir, SANDBOXES, name))
        pids += [] if record is None or not record.runs() else [record.pid]
    return found


def _end(pids: Callable[[], list[int]]) -> None:
    """SIGKILL processes and all that descends from them; bounded."""
    for _ in range(KILLS_MAX):
        if not (found := pids()):
            return
        for pid in [*found, *descendants(found)]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(STEP_S)


def descendants(pids: Iterable[int]) -> list[int]:
    """Return every process below these."""
    found: list[int] = []
    fresh = list(pids)
    while fresh:
        below: list[int] = []
        for pid in fresh:
            for thread in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    below += map(int, thread.read_text(encoding="ascii").split())
        found += below
        fresh = below
    return found


def _any_process(group: Path) -> bool:
    """Whether somebody is in a group or below it; nobody is in one that goes meanwhile."""
    for directory, _, _ in os.walk(group):
        with suppress(FileNotFoundError):
            if Path(directory, "cgroup.procs").read_text(encoding="ascii").strip():
                return True
    return False


def _owner(group: Path) -> int:
    """Whose it is; nobody's if it has gone."""
    try:
        return group.stat().st_uid
    except FileNotFoundError:
        return -1


def _born_s(group: Path) -> float:
    """When it was made; now if it has gone, so that it is left alone."""
    try:
        return group.stat().st_ctime
    except FileNotFoundError:
        return time.time()
