"""How a process sandbox is governed from outside, and what an earlier gateway left of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from manager.function import SandboxSpec
from runtimes.sandbox.cgroup import Cgroup, CpuWeight, Freezer, Hierarchy
from runtimes.sandbox.disk.bound import DiskBound, WalkBound
from runtimes.sandbox.process.files import keep_files
from runtimes.sandbox.record import SandboxRecord, read_records

COMPONENT = "sandbox.process"


class ProcessControl:
    """How a process sandbox is governed: by its cgroup if it has one, else by signals and affinity of its tree."""

    def __init__(
        self,
        pid: int,
        directory: Path,
        group: Cgroup | None,
        children: Sequence[int] = (),
        bound: DiskBound | None = None,
    ) -> None:
        """``children`` are this gateway's own that end with it."""
        self.pid = pid
        self._directory = directory
        self.group = group
        self._children = [child for child in children if child]
        self._bound = bound or WalkBound()
        self._freezer = Freezer(group, pid)

    def processes(self) -> list[int]:
        """Return every process in it, in this side's numbers."""
        return self.group.processes() if self.group is not None else [self.pid, *_tree(self.pid)]

    async def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None:
        if self.group is not None:
            self.group.set_cores(cores, weight)
            return
        for pid in [self.pid, *_tree(self.pid)]:
            for thread in _threads(pid):
                with suppress(OSError):
                    os.sched_setaffinity(thread, cores)

    async def freeze(self, lend: Callable[[int], bool]) -> bool:
        return self._freezer.freeze(lend)

    async def thaw(self) -> None:
        with suppress(OSError):
            self._freezer.thaw()

    def oom_kills(self) -> int:
        return 0 if self.group is None else self.group.oom_kills()

    def forks_refused(self) -> int:
        return 0 if self.group is None else self.group.forks_refused()

    def peak_memory_bytes(self) -> int:
        return 0 if self.group is None else self.group.peak_memory_bytes()

    async def cause_of_death(self) -> str:
        return "out_of_memory" if self.oom_kills() > 0 else "its runner was ended"

    async def snapshot(self, spec: SandboxSpec, id: str, place: Path, limit_bytes: int) -> int:
        return await asyncio.to_thread(keep_files, self.pid, self._directory, spec, place, limit_bytes)

    async def remove(self) -> None:
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Do what `remove` does. Blocks."""
        if self.group is not None:
            self.group.kill()
        if self.pid:
            victims: set[int] = set()
            for _ in range(100):
                victims |= {self.pid, *_tree(self.pid)}
                victims -= {pid for pid in victims if _state(pid) in ("", "Z")}
                if not victims:
                    break
                for pid in victims:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
            self.pid = 0
        while self._children:
            child = self._children.pop()
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        if self.group is not None:
            self.group.remove()
        self._bound.release(self._directory / "work")
        shutil.rmtree(self._directory, ignore_errors=True)


def group_of(own: Cgroup | None, name: str) -> Cgroup | None:
    """Return the group of a sandbox below the gateway's own."""
    if own is None:
        return None
    return Cgroup(own.version, {key: place / f"tangram-{name}" for key, place in own.places.items()})


def control_of(
    own: Cgroup | None, directory: Path, record: SandboxRecord | None, bound: DiskBound | None = None
) -> ProcessControl:
    """Return the control of what an earlier gateway left: of its process only if it is still the same one."""
    pid = record.pid if record is not None and record.runs() else 0
    return ProcessControl(pid, directory, group_of(own, directory.name), (), bound)


def process_records(root: Path) -> list[tuple[Path, SandboxRecord | None]]:
    """Return the directories of process sandboxes, and those of which nothing is known, with their records."""
    return [found for found in read_records(root) if found[1] is None or not found[1].in_container]


def end_left(root: Path) -> int:
    """End what an earlier gateway left of process sandboxes, for one that makes none; return how many. Blocks."""
    hierarchy = Hierarchy.discover()
    own = None if hierarchy is None else hierarchy.of_process("self")
    left = [found for found in process_records(root) if found[1] is not None]
    for directory, record in left:
        control_of(own, directory, record).end()
    return len(left)


def _tree(pid: int) -> list[int]:
    """Return every descendant of a process."""
    found: list[int] = []
    fresh = [pid] if pid else []
    while fresh:
        children = [child for parent in fresh for child in _children(parent)]
        found += children
        fresh = children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in _threads(pid):
        with suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split())
    return found


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def started(pid: int) -> int:
    """Return when a process started, in ticks since boot; with its id that is its identity."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0
