"""Health as ``grpc.health.v1`` asks for it: serving while work is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from grpclib.health.check import CheckBase

#: Seconds between two looks while anybody watches.
LOOK_S = 1.0


class ReadinessCheck(CheckBase):
    """Whether work is taken now: what ``/readyz`` tells on HTTP."""

    def __init__(self, unready: Callable[[], str | None]) -> None:
        self._unready = unready
        self._watchers: set[asyncio.Event] = set()
        self._told = True
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Tell those who watch if it has changed."""
        if (serving := self.__status__()) != self._told:
            self._told = serving
            for watcher in self._watchers:
                watcher.set()

    def __status__(self) -> bool:
        return self._unready() is None

    async def __check__(self) -> bool:
        return self.__status__()

    async def __subscribe__(self) -> asyncio.Event:
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        if self._timer is None:
            self._told = self.__status__()
            self._look_again()
        return watcher

    async def __unsubscribe__(self, watcher: asyncio.Event) -> None:
        self._watchers.discard(watcher)
        if not self._watchers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_again(self) -> None:
        self.look()
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
