"""Leftovers: what an engine that was killed forgets of containers, found by their ids and taken away.

An engine that dies between the making of a container's task and its start (or its end) knows nothing of that task when
it comes back: it removes the container as one that never ran, and its control groups, the process in them and its shim
stay for ever (containerd before 1.7). Only what bears the id of a container of ours is touched, and only once the
engine has said that there is no such container. Which ones to look after is kept in files, for the next gateway.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from runtimes.sandbox.cgroup import Cgroup, Hierarchy

logger = structlog.get_logger("sandbox.container")

#: An engine that lives needs a moment to take down what it has removed.
GRACE_S = 5.0
#: Containers to be looked after at a time, and how often for each.
WATCHED_MAX, LOOKS_MAX = 4096, 10
SHIM = b"containerd-shim"


class LeftoverCleaner:
    """Looks after containers that were removed. `watch` and `sweep` block and may be called in any thread."""

    def __init__(
        self, hierarchy: Hierarchy | None, directory: Path, *, proc: Path = Path("/proc"), grace_s: float = GRACE_S
    ) -> None:
        """Look after containers that have a file in ``directory``."""
        self._hierarchy = hierarchy
        self._directory = directory
        self._proc = proc
        self._grace_s = grace_s
        #: Where this engine puts a container's groups, below every hierarchy's root: ``{}`` stands for the id.
        self._places: set[str] = set()
        #: Container -> (when it was removed, looks so far).
        self._removed: dict[str, tuple[float, int]] = {}
        if hierarchy is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._removed = {file.name: (time.monotonic(), 0) for file in directory.iterdir()}

    def learn(self, container: str, pid: int) -> None:
        """Learn from a container's first process where its engine puts control groups."""
        with suppress(OSError):
            for line in (self._proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
                place = line.split(":", 2)[2].strip("/")
                if container in place:
                    self._places.add(place.replace(container, "{}"))

    def watch(self, container: str) -> None:
        """Look after a container that the engine has removed, or does not know."""
        if self._hierarchy is not None and len(self._removed) < WATCHED_MAX:
            self._removed[container] = time.monotonic(), 0
            with suppress(OSError):  # a full disk: this gateway knows it all the same
                (self._directory / container).touch()

    def sweep(self) -> int:
        """Take away what is left of containers removed a while ago; return how many had left something."""
        now_s = time.monotonic()
        due = {one: seen for one, seen in list(self._removed.items()) if now_s - seen[0] >= self._grace_s}
        if not self._places or not due:
            return 0  # nobody has shown yet where to look, or nothing to look for
        found, shims = 0, self._shims()
        for container, (since_s, looks) in due.items():
            left = list(self._groups(container))
            if left or container in shims:
                found += 1
                logger.warning("the engine forgot a container; what is left of it goes", container=container[:12])
                self._take_away(container, left, shims.get(container, []))
            if (left or container in shims) and looks + 1 < LOOKS_MAX:
                self._removed[container] = since_s, looks + 1
            else:
                del self._removed[container]
                (self._directory / container).unlink(missing_ok=True)
        return found

    def _groups(self, container: str) -> Iterator[Path]:
        """Yield its control groups in every hierarchy."""
        assert self._hierarchy is not None
        for root in self._hierarchy.roots:
            for place in sorted(self._places):
                group = root / place.format(container)
                if group.is_dir():
                    yield group

    def _take_away(self, container: str, groups: list[Path], shims: list[int]) -> None:
        """End the shim first: as long as it lives it may start what it was asked to."""
        for pid in shims:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        assert self._hierarchy is not None
        for place in self._places:
            mounts = {name: root / place.format(container) for name, root in self._hierarchy.mounts.items()}
            held = Cgroup(self._hierarchy.version, {name: at for name, at in mounts.items() if at.is_dir()})
            if held.places.keys() >= {"cpu", "freezer"}:
                with suppress(OSError):  # not ours to write, where the gateway is not root
                    held.kill()
        for group in groups:
            with suppress(OSError):  # somebody in it is not gone yet: at the next look
                group.rmdir()

    def _shims(self) -> dict[str, list[int]]:
        """Return the shims of this machine by container; one may live on without any group."""
        found: dict[str, list[int]] = {}
        for place in self._proc.glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                words = (place / "cmdline").read_bytes().split(b"\0")
                if SHIM in words[0].rpartition(b"/")[2]:
                    container = words[words.index(b"-id") + 1].decode("ascii", "replace")
                    found.setdefault(container, []).append(int(place.name))
        return found
