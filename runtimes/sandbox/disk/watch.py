"""The disk watch: a sandbox that fills the disk is ended before it hurts the others.

The only bound if the machine has none of its own, and beside one for what that does not reach. It measures when the
file system has lost space or inodes, and every minute.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from manager.errors import CodedError
from runtimes.sandbox.disk.walk import DEPTH_MAX, DiskUsage, measure
from runtimes.sandbox.sandbox import Sandbox

logger = structlog.get_logger("sandbox.disk")

#: Seconds between two looks at the free space, and between two measurements when it did not shrink.
LOOK_S, MEASURE_S = 1.0, 60.0
#: Free bytes and inodes lost since the last measurement that call for another.
SHRUNK_BYTES, SHRUNK_FILES = 64 * 2**20, 20_000
#: What may lie where only the runner has something to write, but root inside could.
RUN_BYTES, RUN_FILES = 2**20, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A sandbox's own files, and how much they may be."""

    sandbox: Sandbox
    limit_bytes: int
    #: Returns what there is, and what is wrong with it: empty while it is within its bounds.
    measure: Callable[[], Awaitable[str]]
    #: Their place; None if it is not to be seen from here.
    path: Path | None = None


class DiskWatch:
    """Looks after any number of sandboxes with one task."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._task: asyncio.Task[None] | None = None
        self._free = (0, 0)
        self._measured_s = 0.0

    def add(
        self,
        sandbox: Sandbox,
        roots: Sequence[Path],
        limit_bytes: int,
        limit_files: int,
        processes: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Watch what lies below ``roots``, and what these processes hold open of it, until the sandbox ends."""

        def look() -> str:
            usage = measure(roots, limit_bytes, limit_files, processes())
            return _excess(usage, limit_bytes, limit_files)

        self._watch_place(
            Place(
                sandbox=sandbox,
                limit_bytes=limit_bytes,
                measure=lambda: asyncio.to_thread(look),
                path=roots[0],
            )
        )

    def add_unseen(self, sandbox: Sandbox, used_bytes: Callable[[], Awaitable[int]], limit_bytes: int) -> None:
        """Watch one whose bytes another knows alone: looked after every `MEASURE_S`, however fast it grows."""

        async def look() -> str:
            return _excess(DiskUsage(await used_bytes()), limit_bytes, 0)

        self._watch_place(Place(sandbox=sandbox, limit_bytes=limit_bytes, measure=look))

    async def check(self) -> None:
        """Measure all of them now, and end those above their bound."""
        self._places = [place for place in self._places if place.sandbox.alive]
        for place in self._places:
            try:
                excess = await place.measure()
            except (CodedError, OSError) as error:
                logger.warning("a sandbox's disk cannot be measured", sandbox=place.sandbox.id, why=str(error))
                continue
            if excess:
                logger.warning("a sandbox exceeds its disk", sandbox=place.sandbox.id, why=excess)
                await place.sandbox.condemn(excess)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _watch_place(self, place: Place) -> None:
        self._places.append(place)
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._places and self._due():
                await self.check()
                self._free = self._free_now()

    def _due(self) -> bool:
        now = asyncio.get_running_loop().time()
        free, files = self._free_now()
        shrunk = free <= self._free[0] - SHRUNK_BYTES or files <= self._free[1] - SHRUNK_FILES
        if not shrunk and now - self._measured_s < MEASURE_S:
            return False
        self._measured_s = now
        return True

    def _free_now(self) -> tuple[int, int]:
        """Return the free bytes and files of the first file system that can be asked."""
        for path in [place.path for place in self._places if place.path is not None]:
            with suppress(OSError):
                status = os.statvfs(path)
                return status.f_bavail * status.f_frsize, status.f_favail
        return 0, 0


def _excess(usage: DiskUsage, limit_bytes: int, limit_files: int) -> str:
    """Return which bound is exceeded, empty if none is. Without ``limit_files`` the bytes alone are bounded."""
    if usage.endless:
        return f"its directories are nested deeper than {DEPTH_MAX}"
    if usage.used_bytes > limit_bytes:
        return f"its disk bound of {limit_bytes} bytes (sandbox.disk) is exceeded"
    if limit_files and usage.files > limit_files:
        return f"its disk bound of {limit_files} files is exceeded"
    return ""
