"""The watch: one stream of small changes, encoded once for all viewers, and made only while somebody looks.

Nothing is queued for a viewer. It has a place in the ring of the last ticks and takes the next one when it is ready;
one that has fallen out of the ring, or far behind, is told the whole state again, as if it had just come.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import NamedTuple

import structlog

from gateway import wire
from gateway.dashboard.activity import Activity
from gateway.dashboard.sections import (
    BEGUN_MAX,
    Names,
    Shown,
    Troubles,
    begun_rows,
    ended_rows,
    sections,
    step_rows,
)
from gateway.metrics import Metrics
from manager.errors import CapacityExceeded
from tangram.types import StepInfo

#: Version of the stream's form.
FORM = 1
#: Seconds between two ticks, and after which one is sent though nothing changed.
TICK_S, HEARTBEAT_S = 0.5, 5.0
#: Ticks that are kept for who resumes (two minutes), their bytes, and ticks that a viewer may lag before it is told the
#: whole state instead.
TICKS_KEPT, RING_BYTES, LAG_MAX = 240, 8 * 2**20, 8
VIEWERS_MAX = 64
#: Seconds of bars, and how many, that a new viewer is told.
HISTORY_S, HISTORY_BARS = 120.0, 1500
#: The same for one that asks for more: that is made for it alone.
LONG_HISTORY_BARS = 8000
#: The first ten bytes of a gzip stream: what follows are blocks of deflate, each of which can be the first.
GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
logger = structlog.get_logger("gateway.watch")


class WatchView(NamedTuple):
    """What of the stream a viewer takes."""

    bars: bool = False
    packed: bool = False


@dataclass(slots=True)
class _Tick:
    """One change, as bytes by view; packed ones are made when the first viewer wants them."""

    number: int
    bare: bytes
    barred: bytes
    packed: dict[bool, bytes] = field(default_factory=dict)

    def shown(self, view: WatchView) -> bytes:
        data = self.barred if view.bars else self.bare
        if not view.packed:
            return data
        found = self.packed.get(view.bars)
        if found is None:
            found = self.packed[view.bars] = packed(data)
        return found


def packed(data: bytes) -> bytes:
    """Return the data as blocks of raw deflate that lean on nothing before them, and do not end the stream."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    return deflate.compress(data) + deflate.flush(zlib.Z_FULL_FLUSH)


class Watch:
    """The stream. Use from one event loop; `close` ends it for all viewers."""

    def __init__(
        self,
        *,
        glance: Callable[[], Shown],
        activity: Activity,
        functions: Callable[[], Mapping[str, tuple[str, str]]],
        steps: Callable[[], Sequence[StepInfo]],
        troubles: Callable[[], Troubles],
        wanted: Callable[[], Collection[str]],
        wall: Callable[[], float],
        tick_s: float = TICK_S,
    ) -> None:
        """``functions`` tells each one's readiness and problem, ``steps`` the steps of tasks that a screen is shown,
        ``wanted`` the kinds of resources that functions cost.
        """
        self._glance, self._activity, self._functions, self._steps = glance, activity, functions, steps
        self._troubles, self._wanted = troubles, wanted
        self._wall, self._tick_s = wall, tick_s
        self._version = version("tangram-gateway")
        self.epoch = secrets.token_hex(4)
        self._names = Names()
        self._named = 0
        self._number = 0
        self._shown: dict[str, object] = {}
        self._ring: deque[_Tick] = deque()
        self._ring_bytes = 0
        self._sent_s = 0.0
        self._moved = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False
        #: The whole state as of a tick, by view.
        self._whole: dict[WatchView, tuple[int, bytes]] = {}
        self.viewers = 0
        self.gaps = 0

    def measured_by(self, metrics: Metrics) -> None:
        """Count who watches."""
        metrics.watch("tangram_viewers", "Pages that watch", lambda: self.viewers)
        gaps = "Times that a viewer fell behind and was told the whole state again"
        metrics.watch("tangram_watch_gaps", gaps, lambda: self.gaps, counter=True)

    def check(self) -> None:
        """Raise CapacityExceeded if there are as many viewers as there may be."""
        if self.viewers >= VIEWERS_MAX:
            raise CapacityExceeded(f"{VIEWERS_MAX} viewers watch already", component="watch", retry_after_s=5.0)

    async def follow(
        self, view: WatchView, since: str | None = None, history_s: float = HISTORY_S, is_admin: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """Yield what a viewer is sent, as Server-Sent Events; from ``since``, an event's id, on if that is kept.

        Who is told the state is told the bars of ``history_s`` with it. ``is_admin`` is told to the viewer alone.
        """
        self.viewers += 1
        try:
            if self._ticking is None and not self._closed:
                self._tick()
                self._ticking = asyncio.get_running_loop().create_task(self._tick_for_ever())
            place = self._place_of(since)
            head = GZIP_HEAD if view.packed else b""
            yield head + self._hello(view, is_admin)
            if place is None:
                place = self._number
                yield self._state(view) if history_s <= HISTORY_S else self._long_state(view, history_s)
            while not self._closed:
                if place == self._number:
                    await self._moved.wait()
                    continue
                behind = self._number - place
                if behind > LAG_MAX or not self._ring or place + 1 < self._ring[0].number:
                    self.gaps += 1
                    place = self._number
                    yield self._packed(view, _event("gap", {"ticks": behind})) + self._state(view)
                    continue
                following = [tick for tick in self._ring if tick.number > place]
                place = following[-1].number
                yield b"".join(tick.shown(view) for tick in following)
            yield self._packed(view, _event("bye", {"reason": self._troubles().stopped or "closed"}))
        finally:
            self.viewers -= 1
            if not self.viewers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    def close(self) -> None:
        """Tell every viewer goodbye."""
        self._closed = True
        self._wake()

    def _place_of(self, since: str | None) -> int | None:
        """Return the tick that a returning viewer has seen; None if it has to be told the whole state."""
        epoch, dot, number = (since or "").partition(".")
        if epoch != self.epoch or not dot or not number.isdigit() or not self._ring:
            return None
        place = int(number)
        return place if self._ring[0].number - 1 <= place <= self._number else None

    # Ticks

    async def _tick_for_ever(self) -> None:
        """A fault ends the stream for all: the page then says that it is not told anything."""
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                self._tick()
            except Exception as error:
                logger.exception("what the page is told could not be made", error=str(error))
                return self.close()

    def _tick(self) -> None:
        """Look, and tell what has changed since the last look."""
        now_s = self._wall()
        seen = sections(self._glance(), self._activity, now_s, self._troubles(), self._functions(), self._wanted())
        seen["steps"] = step_rows(self._steps(), now_s)
        changes = _changes(self._shown, seen)
        begun, ended = self._activity.take_bars()
        if now_s - self._sent_s > 2 * HEARTBEAT_S:
            begun, ended = [], []  # nobody looked for a while: who comes is told the bars with the state
        started, finished = begun_rows(begun[-BEGUN_MAX:], self._names), ended_rows(ended)
        if not (changes or begun or ended or now_s - self._sent_s >= HEARTBEAT_S):
            return
        self._shown, self._sent_s = seen, now_s
        self._number += 1
        told: dict[str, object] = {"now": round(now_s * 1000), **({"d": changes} if changes else {})}
        bars: dict[str, object] = {"s": started, "e": finished, "left_out": max(0, len(begun) - BEGUN_MAX)}
        names: dict[str, object] = {}
        if self._named < len(self._names.listed):
            names["names"] = [self._named, self._names.listed[self._named :]]
            self._named = len(self._names.listed)
        name = f"{self.epoch}.{self._number}"
        bare = _event("tick", told | names, name)
        has_bars = bool(begun or ended or names)
        self._keep(
            _Tick(self._number, bare, _event("tick", {**told, "bars": bars | names}, name) if has_bars else bare)
        )
        self._wake()

    def _keep(self, tick: _Tick) -> None:
        self._ring.append(tick)
        self._ring_bytes += len(tick.barred)
        while len(self._ring) > TICKS_KEPT or (self._ring_bytes > RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft().barred)

    def _wake(self) -> None:
        """Wake who waits for the next tick."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    # What is told at the beginning

    def _hello(self, view: WatchView, is_admin: bool) -> bytes:
        told: dict[str, object] = {"form": FORM, "epoch": self.epoch, "version": self._version, "admin": is_admin}
        told |= {"now": round(self._wall() * 1000), "began": round(self._activity.began_wall_s * 1000)}
        return self._packed(view, _event("hello", told))

    def _state(self, view: WatchView) -> bytes:
        """Return everything, made once for all that come within one tick."""
        number, data = self._whole.get(view, (-1, b""))
        if number != self._number:
            data = self._told_whole(view, HISTORY_S, HISTORY_BARS)
            self._whole[view] = self._number, data
        return data

    def _long_state(self, view: WatchView, history_s: float) -> bytes:
        return self._told_whole(view, history_s, LONG_HISTORY_BARS)

    def _told_whole(self, view: WatchView, history_s: float, bars_max: int) -> bytes:
        since_s = self._wall() - history_s
        told: dict[str, object] = {"now": round(self._wall() * 1000), "d": self._shown}
        told["spark"] = self._activity.per_second(int(HISTORY_S))
        if view.bars:
            recent, known_since_s = self._activity.recent_bars(since_s, bars_max)
            told["bars"] = {
                "s": begun_rows(recent, self._names),
                "e": ended_rows([bar for bar in recent if bar.reason is not None]),
                "left_out": 0,
                "names": [0, self._names.listed],
                # From when on these are all that there were.
                "since": round(known_since_s * 1000),
            }
        else:
            told["names"] = [0, self._names.listed]  # in their order functions have their colours
        return self._packed(view, _event("state", told, f"{self.epoch}.{self._number}"))

    @staticmethod
    def _packed(view: WatchView, data: bytes) -> bytes:
        return packed(data) if view.packed else data


def _event(name: str, told: Mapping[str, object], number: str | None = None) -> bytes:
    head = b"" if number is None else f"id: {number}\n".encode()
    return head + f"event: {name}\ndata: ".encode() + wire.encode(told) + b"\n\n"


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, object]:
    """Return the sections that differ; of one that is keyed by names those keys, null where one is gone."""
    found: dict[str, object] = {}
    for name, value in now.items():
        old = before.get(name)
        if value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            gone = dict.fromkeys(old.keys() - value.keys())
            found[name] = {key: each for key, each in value.items() if old.get(key) != each} | gone
        else:
            found[name] = value
    return found
