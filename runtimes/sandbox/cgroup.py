"""Control groups, v1 and v2: the cores, the freezer, the memory and the end of everything in one sandbox.

Plain writes of a few bytes, about 20 us each: they are made on the event loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

#: The controllers that a sandbox is governed by, under v1 each with a tree of its own.
CONTROLLERS = ("cpuset", "cpu", "memory", "freezer", "pids")
PERIOD_US = 100_000
#: The kernel writes more than this if there is no bound.
UNLIMITED_BYTES = 2**60
#: Bounds of the waits for the kernel.
SETTLE_S, STEP_S = 2.0, 0.005
#: Times that processes are moved until none is left behind.
ROUNDS_MAX = 100
#: What the name of a runner's group ends with while it is aside, beside the group that it belongs to.
ASIDE = ".runner"


class CpuWeight(Enum):
    """A sandbox's part of cores that others want too, as cpu.shares (v1) and cpu.weight (v2) count it."""

    #: Its action runs.
    ACTION = (1024, 100)
    #: Files travel between two actions, on cores that are leased to others: somebody waits for it.
    TRANSFER = (512, 50)
    #: What its actions left running: the lowest there is.
    BACKGROUND = (2, 1)

    def __init__(self, shares: int, weight: int) -> None:
        self.shares = shares
        self.weight = weight


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where the controllers are mounted, as this process sees them."""

    version: int
    #: Controller -> mount point (v2: all the same).
    mounts: Mapping[str, Path]
    #: Every mounted hierarchy, those of other controllers included.
    roots: tuple[Path, ...] = ()

    @classmethod
    def discover(cls, mountinfo: str | None = None) -> Hierarchy | None:
        """Return what ``/proc/self/mountinfo`` says, None if no hierarchy is mounted."""
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8") if mountinfo is None else mountinfo
        mounts: dict[str, Path] = {}
        unified: Path | None = None
        roots: list[Path] = []
        for line in text.splitlines():
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            if kind not in ("cgroup", "cgroup2"):
                continue
            root = Path(left.split(" ")[4])
            roots.append(root)
            if kind == "cgroup2":
                unified = root
            else:
                for name in options.split(","):
                    if name in CONTROLLERS:
                        mounts.setdefault(name, root)
        if {"cpu", "cpuset", "memory"} <= mounts.keys():
            return cls(1, mounts, tuple(roots))
        return None if unified is None else cls(2, dict.fromkeys(CONTROLLERS, unified), (unified,))

    def of_process(self, pid: int | str) -> Cgroup | None:
        """Return the group that a process is in, None if it cannot be seen or written from here."""
        try:
            group = self.places_of(Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8"))
        except OSError:
            return None
        return group if group.writable else None

    def places_of(self, membership: str) -> Cgroup:
        """Return the group that a ``/proc/PID/cgroup`` text names."""
        places: dict[str, Path] = {}
        for line in membership.splitlines():
            _, names, place = line.split(":", 2)
            for name in CONTROLLERS if names == "" and self.version == 2 else names.split(","):
                if name in self.mounts:
                    places[name] = self.mounts[name] / place.lstrip("/").removesuffix(ASIDE)
        return Cgroup(self.version, places)


class Cgroup:
    """The group of one sandbox. Writes raise OSError if the group is gone."""

    def __init__(self, version: int, places: Mapping[str, Path]) -> None:
        self.version = version
        self.places = places
        self._weight = CpuWeight.ACTION

    @property
    def writable(self) -> bool:
        """Whether cores can be granted by a write."""
        files = ("cpuset.cpus", "cpu.max" if self.version == 2 else "cpu.cfs_quota_us")
        return all(
            name in self.places and os.access(self.places[name] / file, os.W_OK)
            for name, file in zip(("cpuset", "cpu"), files, strict=True)
        )

    @property
    def freezable(self) -> bool:
        return "freezer" in self.places and os.access(self.freezer, os.W_OK)

    @property
    def freezer(self) -> Path:
        return self.places["freezer"] / ("cgroup.freeze" if self.version == 2 else "freezer.state")

    def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None:
        """Exactly these cores, and no more than their time."""
        _write(self.places["cpuset"] / "cpuset.cpus", ",".join(map(str, cores)))
        quota_us = len(cores) * PERIOD_US
        if self.version == 2:
            _write(self.places["cpu"] / "cpu.max", f"{quota_us} {PERIOD_US}")
        else:
            _write(self.places["cpu"] / "cpu.cfs_quota_us", str(quota_us))
        if weight is not self._weight:
            self.set_weight(weight)

    def set_weight(self, weight: CpuWeight) -> None:
        self._weight = weight
        if self.version == 2:
            _write(self.places["cpu"] / "cpu.weight", str(weight.weight))
        else:
            _write(self.places["cpu"] / "cpu.shares", str(weight.shares))

    def cores(self) -> tuple[int, ...]:
        """Return the cores that it may use now."""
        return tuple(parse_cores(_read(self.places["cpuset"] / "cpuset.cpus")))

    def freeze(self, runner: int = 0) -> None:
        """Stop every process but the ``runner`` (0: all of them).

        Under v1 it steps aside, into a group of its own, so that the engine finds what is frozen where it looks for
        it. Under v2 that would take it out of its bounds: there all others go into a group below.
        """
        if self.version == 1 and runner:
            self._aside.mkdir(exist_ok=True)
            _write(self._aside / "cgroup.procs", str(runner))
        _write(self.freezer, "FROZEN" if self.version == 1 else "1")
        if self.version == 1 or not runner:
            return
        # What is frozen can be moved, and does not fork.
        self._below.mkdir(exist_ok=True)
        for _ in range(ROUNDS_MAX):
            left = set(_pids(self.places["freezer"])) - {runner}
            for pid in left:
                with suppress(ProcessLookupError):
                    _write(self._below / "cgroup.procs", str(pid))
            if not left:
                break
        _write(self._below / "cgroup.freeze", "1")
        _write(self.freezer, "0")

    def thaw(self, runner: int = 0) -> None:
        """Let every process run, and take the ``runner`` back."""
        _write(self.freezer, "0" if self.version == 2 else "THAWED")
        if self.version == 2 and self._below.is_dir():
            _write(self._below / "cgroup.freeze", "0")
        if self.version == 1 and runner and self._aside.is_dir():
            _write(self.places["freezer"] / "cgroup.procs", str(runner))

    @property
    def _aside(self) -> Path:
        """The group of the runner while all others are frozen (v1)."""
        return self.places["freezer"].with_name(f"{self.places['freezer'].name}{ASIDE}")

    @property
    def _below(self) -> Path:
        """The group of all others (v2)."""
        return self.places["freezer"] / "user"

    def remove_aside(self) -> None:
        """Remove what `freeze` made; what somebody is in stays."""
        for place in (self._aside, self._below) if "freezer" in self.places else ():
            with suppress(OSError):
                place.rmdir()

    def frozen(self) -> bool:
        """Return whether the kernel has stopped all of it (a freeze takes effect a moment after the write)."""
        if self.version == 2:
            return "frozen 1" in _read(self.places["freezer"] / "cgroup.events")
        return _read(self.freezer) == "FROZEN"

    def quota_cores(self) -> float:
        """Return the processor time that this group and those above it are allowed, in cores; 0 without a bound."""
        bounds = []
        for place in self._ancestry("cpu"):
            with suppress(OSError, ValueError):
                if self.version == 2:
                    quota, period = _read(place / "cpu.max").split()
                else:
                    quota, period = _read(place / "cpu.cfs_quota_us"), _read(place / "cpu.cfs_period_us")
                if int(quota) > 0:
                    bounds.append(max(1.0, int(quota) / int(period)))
        return min(bounds, default=0.0)

    def memory_limit_bytes(self) -> int:
        """Return the memory that this group and those above it are allowed; 0 without a bound."""
        bounds = []
        for place in self._ancestry("memory"):
            with suppress(OSError, ValueError):
                bounds.append(int(_read(place / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))))
        return min((bound for bound in bounds if bound < UNLIMITED_BYTES), default=0)

    def _ancestry(self, controller: str) -> Iterator[Path]:
        """Yield the group's directory and those above it, up to the mount point (where the files end)."""
        place = self.places.get(controller)
        while place is not None and (place / "cgroup.procs").exists():
            yield place
            place = place.parent

    def oom_kills(self) -> int:
        """Return how many processes the kernel ended for want of memory so far."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with suppress(OSError, KeyError):
            for line in _read(self.places["memory"] / name).splitlines():
                word, _, value = line.partition(" ")
                if word == "oom_kill":
                    return int(value)
        return 0

    def forks_refused(self) -> int:
        """Return how many new processes the kernel refused so far because of ``pids.max``."""
        with suppress(OSError, KeyError):
            for line in _read(self.places["pids"] / "pids.events").splitlines():
                word, _, value = line.partition(" ")
                if word == "max":
                    return int(value)
        return 0

    def peak_memory_bytes(self) -> int:
        """Return the most memory it ever used, 0 if the kernel does not keep it."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        with suppress(OSError, KeyError):
            return int(_read(self.places["memory"] / name))
        return 0

    def processes(self) -> list[int]:
        """Return every process in it, in this side's numbers."""
        return [
            *_pids(self.places.get("pids") or self.places["cpu"]),
            *(_pids(self._below) if self.version == 2 else ()),
        ]

    def kill(self) -> None:
        """SIGKILL everything in it, frozen or not, however fast it forks; bounded."""
        with suppress(OSError):
            self.thaw()
        kill_file = self.places["cpu"] / "cgroup.kill"
        deadline_s = time.monotonic() + SETTLE_S
        while (pids := self.processes()) and time.monotonic() < deadline_s:
            if kill_file.exists():
                _write(kill_file, "1")
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, 9)
            time.sleep(STEP_S)

    def make(self, *, memory_bytes: int, pids: int) -> None:
        """Create it with its bounds; raises OSError if that is not allowed."""
        for place in dict.fromkeys(self.places.values()):
            place.mkdir(exist_ok=True)
        if self.version == 1:
            for file in ("cpuset.cpus", "cpuset.mems"):
                _write(self.places["cpuset"] / file, _read(self.places["cpuset"].parent / file))
            _write(self.places["memory"] / "memory.limit_in_bytes", str(memory_bytes))
            with suppress(OSError):  # absent without swap accounting
                _write(self.places["memory"] / "memory.memsw.limit_in_bytes", str(memory_bytes))
        else:
            _write(self.places["memory"] / "memory.max", str(memory_bytes))
            with suppress(OSError):
                _write(self.places["memory"] / "memory.swap.max", "0")
        if "pids" in self.places:
            _write(self.places["pids"] / "pids.max", str(pids))

    def enter(self, pid: int) -> None:
        """Move a process in, with whatever it starts from then on."""
        for place in dict.fromkeys(self.places.values()):
            _write(place / "cgroup.procs", str(pid))

    def remove(self) -> None:
        """Remove the empty group; one that cannot be removed yet stays for the reaper."""
        self.remove_aside()
        for place in dict.fromkeys(self.places.values()):
            with suppress(OSError):
                place.rmdir()


class Freezer:
    """Stops a sandbox's processes between two actions, all but its runner. Raises OSError if the group is gone."""

    def __init__(self, group: Cgroup | None, runner: int) -> None:
        """``runner`` is the process as this machine knows it, 0 if it does not."""
        self._group = group if group is not None and runner and group.freezable else None
        self._runner = runner
        self._lent = False
        #: Whether there is something to be thawed; at first that is unknown.
        self._stopped = True

    def freeze(self, lend: Callable[[int], bool]) -> bool:
        """Return False if that is not for us, or if the runner could not end itself (and them) any more."""
        group = self._group
        if group is None:
            return False
        if set(group.processes()) - {self._runner}:
            if not (self._lent or self._lend(group, lend)):
                return False
            self._stopped = True
            group.freeze(self._runner)
        return True

    def _lend(self, group: Cgroup, lend: Callable[[int], bool]) -> bool:
        """Under v1 what is frozen cannot be killed: lend the runner what thaws it."""
        if group.version == 1:
            fd = os.open(group.freezer, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._lent = lend(fd)
            finally:
                os.close(fd)
            return self._lent
        return True

    def thaw(self) -> None:
        if self._group is not None and self._stopped:
            self._group.thaw(self._runner)
            self._stopped = False


def parse_cores(text: str) -> Iterator[int]:
    """Yield the cores of the kernel's list format: ``0-3,8,10-11``."""
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)


def _pids(place: Path) -> list[int]:
    """Return the processes of a group, none if it is gone."""
    with suppress(OSError):
        return [int(word) for word in _read(place / "cgroup.procs").split()]
    return []


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
