"""What differs between awaiting and blocking: pauses, slots, many calls at once, and who may use what is open.

Written by hand, as is its twin `tangram.client.sync_primitives`; `sync` is generated.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, ParamSpec, TypeVar

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_P = ParamSpec("_P")


class AsyncCallSlots(asyncio.Semaphore):
    """So many may do something at once; the others wait, in order of arrival, without a bound in time."""


class AsyncOpened(Generic[_T]):
    """What is opened at its first use, once in each process and event loop, because sockets cannot change either.

    What a process inherits by fork is left alone: it is neither used nor closed there, it belongs to the parent.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._by_process: dict[int, dict[asyncio.AbstractEventLoop, _T]] = {}

    def get(self) -> _T:
        """Return what is open here; make it if there is nothing yet."""
        here, loop = self._here(), asyncio.get_running_loop()
        opened = here.get(loop)
        if opened is None:
            opened = here[loop] = self._make()
        return opened

    def take(self) -> _T | None:
        """Return what is open here, which is then no longer known; None if there is nothing."""
        return self._here().pop(asyncio.get_running_loop(), None)

    def _here(self) -> dict[asyncio.AbstractEventLoop, _T]:
        """What is open in this process, by loop; what a loop left behind that is closed is let go."""
        here = self._by_process.setdefault(os.getpid(), {})
        for loop in [loop for loop in here.copy() if loop.is_closed()]:
            here.pop(loop, None)
        return here


async def pause(seconds: float) -> None:
    """Let this caller wait."""
    await asyncio.sleep(seconds)


async def aside(do: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
    """Call what reads or writes files of this machine, in a thread."""
    return await asyncio.to_thread(do, *arguments, **named)


async def for_each(items: Iterable[_Item], do: Callable[[int, _Item], Awaitable[None]], concurrency: int) -> None:
    """Call ``do`` with the index and the value of each item, at most ``concurrency`` at once.

    Items are taken when there is room for them. The first error of ``do`` or ``items`` ends everything and is raised.
    """
    left = enumerate(items)

    async def work() -> None:
        for index, item in left:
            await do(index, item)

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
