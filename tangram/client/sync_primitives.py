"""What differs between awaiting and blocking: pauses, slots, many calls at once, and who may use what is open.

Written by hand, as is its twin `tangram.client.aio_primitives`; `sync` is generated.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Generic, ParamSpec, TypeVar

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_P = ParamSpec("_P")


class CallSlots(threading.Semaphore):
    """So many may do something at once; the others wait without a bound in time."""


class Opened(Generic[_T]):
    """What is opened at its first use, once in each process, because two processes cannot share a socket.

    What a process inherits by fork is left alone: it is neither used nor closed there, it belongs to the parent.
    No lock is held: another thread might hold it at the instant of a fork, and nobody would ever release the copy.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._by_process: dict[int, _T] = {}

    def get(self) -> _T:
        """Return what is open here; make it if there is nothing yet."""
        here = os.getpid()
        found = self._by_process.get(here)
        return found if found is not None else self._by_process.setdefault(here, self._make())

    def take(self) -> _T | None:
        """Return what is open here, which is then no longer known; None if there is nothing."""
        return self._by_process.pop(os.getpid(), None)


def pause(seconds: float) -> None:
    """Let this caller wait."""
    time.sleep(seconds)


def aside(do: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
    """Call what reads or writes files of this machine."""
    return do(*arguments, **named)


def for_each(items: Iterable[_Item], do: Callable[[int, _Item], None], concurrency: int) -> None:
    """Call ``do`` with the index and the value of each item, in threads, at most ``concurrency`` at once.

    Items are taken when there is room for them. The first error of ``do`` or ``items`` is raised once the calls that
    are under way have ended; no further one begins.
    """
    left: Iterator[tuple[int, _Item]] = enumerate(items)
    with ThreadPoolExecutor(concurrency, thread_name_prefix="tangram-map") as threads:
        running: set[Future[None]] = set()
        while True:
            running.update(threads.submit(do, *each) for each in islice(left, concurrency - len(running)))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                each.result()
