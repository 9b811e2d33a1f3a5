"""Telling a gateway of attempts: that each runs, their logs in turn, no faster than it takes them, and each end last.

What is not urgent waits a moment: of a short attempt all is told at once, with its end, and its gateway wakes up once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import structlog

from manager.function import Setting
from runtimes.node.attempt import NodeAttempt
from runtimes.node.link import NodeLink
from runtimes.node.spool import Spool
from runtimes.node.wire import AttemptLog, AttemptStarted

logger = structlog.get_logger("node.telling")


@dataclass(frozen=True, slots=True, kw_only=True)
class TellingSettings:
    """How logs travel."""

    wait_s: Annotated[float, Setting("seconds for which a log waits for more before it is sent", ge=0)] = 0.02
    piece_bytes: Annotated[int, Setting("of a log, sent at once; so much does not wait", ge=1)] = 16 * 2**10
    unsent_bytes: Annotated[int, Setting("unsent bytes of the link beyond which logs wait", ge=1)] = 2**20


class Telling:
    """Which attempts have something to say, in the order in which it is said."""

    def __init__(self, settings: TellingSettings, owes: Callable[[str], bool]) -> None:
        """``owes``: whether there is more than a log to be told before the end of a claim's attempt."""
        self._settings = settings
        self._owes = owes
        self._loop = asyncio.get_running_loop()
        #: Where it is said; None while there is nobody.
        self.link: NodeLink | None = None
        self._talking: dict[str, NodeAttempt] = {}
        self._talk = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def more(self, attempt: NodeAttempt, *, at_once: bool = False) -> None:
        """There is something to tell, which waits a moment for more of it."""
        if not attempt.attached:
            return
        link = self.link
        if at_once and link is not None and self._has_room(link):
            self._talking.pop(attempt.claim, None)
            if not self._tell(attempt, link):
                return
        self._talking[attempt.claim] = attempt
        if at_once or attempt.spool.end - attempt.told_bytes >= self._settings.piece_bytes:
            self._talk.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._settings.wait_s, self._now)

    def forget(self, attempt: NodeAttempt) -> None:
        """Nothing more is told of it."""
        self._talking.pop(attempt.claim, None)

    def _now(self) -> None:
        self._timer = None
        if self._talking:
            self._talk.set()

    def _has_room(self, link: NodeLink) -> bool:
        return not link.closed.is_set() and link.unsent_bytes <= self._settings.unsent_bytes

    async def talk_for_ever(self) -> None:
        """Tell until it is cancelled."""
        while True:
            await self._talk.wait()
            self._talk.clear()
            while self._talking and (link := self.link) is not None and not link.closed.is_set():
                claim = next(iter(self._talking))
                attempt = self._talking.pop(claim)
                if attempt.attached and self._tell(attempt, link):
                    self._talking[claim] = attempt  # its next piece comes after those of the others
                if not self._has_room(link):
                    await link.drained()

    def _piece(self, attempt: NodeAttempt, spool: Spool) -> bytes:
        """Return what of a log is told next; one that cannot be read is left out."""
        try:
            spool.flush()  # a place that was told must mean the same to the next daemon, which reads it from the file
            return spool.read(attempt.told_bytes, self._settings.piece_bytes)
        except OSError as error:
            logger.error("a spool cannot be read", claim=attempt.claim, why=str(error))
            spool.omit(spool.end - attempt.told_bytes)
            attempt.told_bytes = spool.end
            return b""

    def _tell(self, attempt: NodeAttempt, link: NodeLink) -> bool:
        """Send that it runs, a piece of its log, or its end behind the last one; return whether there is more."""
        spool = attempt.spool
        if attempt.began_s is not None and not attempt.began_told:
            attempt.began_told = True
            link.send(AttemptStarted(attempt.claim))
        if attempt.told_bytes < spool.end:
            piece = self._piece(attempt, spool)
            if piece:
                link.send(AttemptLog(attempt.claim, attempt.told_bytes, piece))
                attempt.told_bytes += len(piece)
            if attempt.told_bytes < spool.end:
                return bool(piece)
        if attempt.end is not None and not attempt.end_told and not self._owes(attempt.claim):
            attempt.end_told = True
            spool.sent(attempt.told_bytes)
            link.send(attempt.end)
        return False
