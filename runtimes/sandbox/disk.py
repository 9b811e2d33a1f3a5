"""The disk watch: a sandbox that fills the disk is ended before it hurts the others.

Needed if the engine cannot bound a layer itself. It measures only when the file system has lost space.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from manager.errors import CodedError
from runtimes.sandbox.sandbox import Sandbox

logger = structlog.get_logger("sandbox.disk")

#: Seconds between two looks at the free space, and between two measurements when it did not shrink.
LOOK_S, MEASURE_S = 1.0, 60.0
#: Free bytes lost since the last measurement that call for another.
SHRUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """A sandbox's own files, and how much they may be."""

    sandbox: Sandbox
    limit_bytes: int
    measure: Callable[[], Awaitable[int]]
    #: Their place on this machine; None if they lie on another.
    path: Path | None = None


class DiskWatch:
    """Looks after any number of sandboxes with one task."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._task: asyncio.Task[None] | None = None
        self._free_bytes = 0
        self._measured_s = 0.0

    def add(self, sandbox: Sandbox, path: Path, limit_bytes: int) -> None:
        """Watch it until it ends."""

        async def measure() -> int:
            return await asyncio.to_thread(used_bytes, path, limit_bytes)

        self._watch_place(Place(sandbox, limit_bytes, measure, path))

    def add_remote(self, sandbox: Sandbox, measure: Callable[[], Awaitable[int]], limit_bytes: int) -> None:
        """Watch one whose files ``measure`` knows alone: looked after every `MEASURE_S`, however fast it grows."""
        self._watch_place(Place(sandbox, limit_bytes, measure))

    async def check(self) -> None:
        """Measure all of them now, and end those above their bound."""
        self._places = [place for place in self._places if place.sandbox.alive]
        for place in self._places:
            try:
                used = await place.measure()
            except CodedError as error:
                logger.warning("a sandbox's disk cannot be measured", why=error.message)
                continue
            if used > place.limit_bytes:
                logger.warning("a sandbox exceeds its disk", used_bytes=used, limit_bytes=place.limit_bytes)
                await place.sandbox.condemn(f"its disk bound of {place.limit_bytes} bytes is exceeded")

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
                self._free_bytes = self._free_now()

    def _due(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._free_now() > self._free_bytes - SHRUNK_BYTES and now - self._measured_s < MEASURE_S:
            return False
        self._measured_s = now
        return True

    def _free_now(self) -> int:
        """Return the free bytes of the first file system that can be asked."""
        for path in [place.path for place in self._places if place.path is not None]:
            with suppress(OSError):
                status = os.statvfs(path)
                return status.f_bavail * status.f_frsize
        return 0


def used_bytes(root: Path, enough_bytes: int) -> int:
    """Return the bytes on disk below ``root``, links not followed; counting stops above ``enough_bytes``."""
    used, fresh = 0, [str(root)]
    while fresh and used <= enough_bytes:
        with suppress(OSError), os.scandir(fresh.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        fresh.append(entry.path)
    return used
