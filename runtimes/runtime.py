"""The contract of a runtime."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import orjson

from manager.action import Action, Chunk, Lease, noun
from manager.clock import Clock, MonotonicClock
from manager.executor import Call
from manager.function import FunctionSpec


def unheard() -> None:
    """Nobody listens."""


@dataclass(slots=True, kw_only=True)
class Execution:
    """One action on its way through a runtime: what was asked, what was granted, and its stopwatch.

    A runtime calls `begin` when the user's own work starts (after the sandbox is ready or the model restored)
    and `end` when it is over; between the two the execution ``timeout`` runs. Everything else is overhead.
    """

    action: Action
    lease: Lease
    call: Call
    clock: Clock = field(default_factory=MonotonicClock)
    began_s: float | None = None
    ended_s: float | None = None
    #: Called when the work has begun, and when it has ended.
    on_phase: Callable[[], None] = unheard

    def begin(self, ran_s: float = 0.0) -> None:
        """``ran_s``: seconds that it has run already, under an earlier gateway."""
        if self.began_s is None:
            self.began_s = self.clock.now() - ran_s
            self.call.hooks.begun()
            self.on_phase()

    def end(self) -> None:
        if self.began_s is not None and self.ended_s is None:
            self.ended_s = self.clock.now()
            self.on_phase()

    @property
    def execution_s(self) -> float:
        """Seconds of the user's work so far; 0 when it has not begun."""
        if self.began_s is None:
            return 0.0
        return (self.clock.now() if self.ended_s is None else self.ended_s) - self.began_s


@noun
class Result:
    """What a runtime returns: plain JSON values, and the measured use (cpu_s, peak_memory_bytes, workers ...)."""

    value: object
    usage: Mapping[str, float] = field(default_factory=dict)


class Runtime:
    """One runtime kind. Failures are `manager.errors.ActionFailed`; the caller enforces the deadline.

    ``execute`` is cancelled on timeout and on cancel: it must then kill the work, including every process the
    work started, within ``kill_grace_s``, and only then let CancelledError through.
    """

    async def prepare(self, function: FunctionSpec) -> None:
        """Check at registration that the function can ever run here, and warm up.

        Raises InvalidConfig or Unsupported with the remedy (a missing image, a missing or pickled checkpoint).
        """

    async def execute(self, execution: Execution) -> Result:
        """Run one action to its end; raises ActionFailed."""
        raise NotImplementedError

    async def resize(self, action: Action, lease: Lease) -> None:
        """Apply a new lease to a running, malleable action; others never get here."""

    async def end_trajectory(self, trajectory: str) -> None:
        """Drop what is kept for the trajectory; idempotent."""

    async def replicate(self, function: FunctionSpec, service: str, chunk: Chunk) -> bool:
        """Make a service resident on free memory of a chunk before anybody asks; return False if there is no room.

        Nothing is evicted, and what computes is not disturbed but by the bytes that travel.
        """
        return False

    async def close(self) -> None:
        """Release everything; idempotent."""


def loads(data: bytes | str) -> object:
    """Return a JSON value; raises orjson.JSONDecodeError, which names line and column."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value: object = orjson.loads(data)
        return value


def dumps(value: object, *, sort_keys: bool = False) -> bytes:
    """Return plain JSON values as compact JSON; raises TypeError or ValueError for what JSON cannot hold."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    return text.encode("utf-8")
