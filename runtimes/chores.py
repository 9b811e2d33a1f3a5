"""Chores: asyncio tasks that somebody begins beside his own work, and has to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Chores:
    """Those of one owner that are under way. What one raises is told to ``failed``."""

    def __init__(self, failed: Callable[[BaseException], object]) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._failed = failed

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin one."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)


async def end_chores(*chores: asyncio.Future[Any] | None) -> None:
    """Cancel those that there are, and return when all have ended, however they did."""
    there = [chore for chore in chores if chore is not None]
    for chore in there:
        chore.cancel()
    await asyncio.gather(*there, return_exceptions=True)
