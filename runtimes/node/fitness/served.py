"""A node's side: it looks at its disk and its sandboxes, and says when nothing can begin there and when it can again.

An attempt is written down before it begins: on a disk that takes nothing none can. A disk is found short by what is
free of it, before anything fails, and by a write that it refused, until it takes one. Where no sandbox
can be made, as the Docker engine is gone, nothing new can begin, and what lives there goes on: without a word of it
such a node looks the emptiest of all, and draws what comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog

from manager.function import Setting
from runtimes.node.fitness.messages import FitnessChanged
from runtimes.sandbox.disk.room import REMEDY, shortage_of

logger = structlog.get_logger("node.fitness")

#: Beyond its bound so much more must be free before a node is fit again: what is at the bound would come and go.
AGAIN = 1.25
#: A disk that has refused is tried with so many bytes, more than a beginning writes.
TRIAL_BYTES = 64 * 2**10
TRIAL = "trial"

#: Says why no sandbox can be made now, and what mends that; empty if one can.
Trouble = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitnessSettings:
    """What a node needs of its disk, and how often it looks at that and at its sandboxes."""

    look_s: Annotated[float, Setting("seconds between two looks", gt=0)] = 1.0
    free_min_bytes: Annotated[int, Setting("free bytes of the state directory below which nothing begins", ge=0)] = (
        32 * 2**20
    )


class NodeFitness:
    """Whether anything can begin on this node. Use from one event loop."""

    def __init__(
        self, directory: Path, settings: FitnessSettings | None = None, *, trouble: Trouble | None = None
    ) -> None:
        self._directory = directory
        self._settings = settings or FitnessSettings()
        #: Why nothing can begin; empty if anything can.
        self.why = ""
        #: Why no sandbox can be made; empty if one can, as far as is known.
        self.newcomers = ""
        self._trouble = trouble
        #: The last refusal of a write, until the disk takes one.
        self._refusal = ""
        #: Called when it turns.
        self.on_change: Callable[[FitnessChanged], None] = lambda changed: None
        self.look()

    async def watch_for_ever(self) -> None:
        """Look again and again: an engine that hangs holds up no look at the disk."""
        async with asyncio.TaskGroup() as looks:
            looks.create_task(self._watch_disk())
            if self._trouble is not None:
                looks.create_task(self._watch_sandboxes(self._trouble))

    def refused(self, error: OSError) -> None:
        """The disk refused a write."""
        self._refusal = str(error)
        self.look()

    def look(self) -> None:
        """See how it is now, and tell it if it has turned."""
        self._turn(self._found(), self.newcomers)

    async def _watch_disk(self) -> None:
        while True:
            await asyncio.sleep(self._settings.look_s)
            self.look()

    async def _watch_sandboxes(self, trouble: Trouble) -> None:
        while True:
            await asyncio.sleep(self._settings.look_s)
            self._turn(self.why, await trouble())

    def _turn(self, why: str, newcomers: str) -> None:
        was = bool(self.why), bool(self.newcomers)
        self.why, self.newcomers = why, newcomers
        if was == (bool(why), bool(newcomers)):
            return
        if why:
            logger.error("nothing can begin on this node", why=why)
        elif newcomers:
            logger.error("nothing new can begin on this node", why=newcomers)
        else:
            logger.info("this node is fit again")
        self.on_change(FitnessChanged(why, newcomers))

    def _found(self) -> str:
        if self._refusal:
            self._refusal = self._tried()
        if self._refusal:
            return f"its disk refuses what is written: {self._refusal} ({self._directory}): {REMEDY}"
        needed_bytes = self._settings.free_min_bytes
        return shortage_of(self._directory, int(needed_bytes * AGAIN) if self.why else needed_bytes)

    def _tried(self) -> str:
        """Return why the disk takes nothing; empty if it does."""
        trial = self._directory / TRIAL
        try:
            trial.write_bytes(bytes(TRIAL_BYTES))
        except OSError as error:
            return str(error)
        finally:
            with suppress(OSError):
                trial.unlink()
        return ""
