"""What the page shows, kept current for each viewer."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, cast

import structlog

from gateway import serialization
from gateway.metrics import Metrics
from gateway.stats import RATE_S, Bar, Stats
from manager.core.state import CauseKind
from manager.errors import CapacityExceeded
from tangram.types import ActivityInfo, StepInfo

# Sections: what the page shows, as small values that are compared from one look to the next.
#
# Instants are whole milliseconds since 1970 on the gateway's clock, so that what only grows older does not change.

#: Verdict -> what is told of it; the first that holds is shown.
Verdict = Literal[
    "stopped", "draining", "lost", "unavailable", "quota", "memory", "devices", "units", "waiting", "ok", "idle"
]
#: Starts of one look that are told one by one.
BEGUN_MAX = 400
#: A cause -> the verdict where most wait for it.
_BOUND: Mapping[CauseKind, Verdict] = {"quota": "quota", "memory": "memory", "devices": "devices", "units": "units"}
#: Share of what waits from which on a shortage is the verdict, though more waits for something else.
_TELLING = 0.1
#: Seconds for which a machine that was lost is the first thing that is said.
LOST_SHOWN_S = 300.0
#: Ends in a minute below which they tell no rate.
_RATE_MIN = 10
#: JSON-able values: what the core shows has no types of its own.
Shown = Mapping[str, Any]


class Troubles(NamedTuple):
    """What is wrong with the gateway itself."""

    #: Why no work is taken now.
    stopped: str | None = None
    #: Machines that were lost of late.
    lost: Sequence[str] = ()


class Names:
    """Functions, tasks and pools by number: what repeats in every bar is told once. Bounded: later ones share 0."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._numbers: dict[str, int] = {"other": 0}
        self.listed: list[str] = ["other"]

    def of(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            if len(self.listed) >= self._most:
                return 0
            number = self._numbers[name] = len(self.listed)
            self.listed.append(name)
        return number


def sections(
    seen: Shown,
    stats: Stats,
    wall_s: float,
    troubles: Troubles,
    functions: Mapping[str, tuple[str, str]],
    wanted: Collection[str],
) -> dict[str, object]:
    """Return everything that is shown of a summary at the core, by name. Functions cost the ``wanted`` kinds."""
    info = stats.info()
    return {
        "run": seen["running"],
        "wait": seen["waiting"],
        "rate": [info.accepted, info.ended, info.failed, info.cancelled],
        "act": _act(info),
        "failed": [[each.function, each.reason, each.task, each.count, _ms(each.last_at_s)] for each in info.failures],
        "failed_15min": info.failed_15min,
        "ended_15min": info.ended_15min,
        "cancelled_15min": info.cancelled_15min,
        "causes": [
            [each["kind"], each["pool"], each["text"], each["task"], each["count"], _ms(wall_s - each["oldest_s"])]
            for each in seen["causes"]
        ],
        "causes_left_out": seen["causes_left_out"],
        "pools": {name: _pool(pool, wall_s) for name, pool in seen["pools"].items() if _is_shown(pool, wanted)},
        "nodes": seen["nodes"],
        "tasks": seen["tasks"],
        "long": [_running(each, wall_s) for each in seen["longest"]],
        "traj": seen["trajectories"],
        "fns": functions,
        "verdict": verdict(seen, troubles, functions, info.ended),
    }


def _act(info: ActivityInfo) -> list[float | None]:
    act = info.act
    parts = (act.queue_s, act.overhead_s, act.execution_s, act.p50_s, act.p99_s)
    return [*(None if each is None else round(1000 * each) for each in parts), act.completed]


def _pool(pool: Shown, wall_s: float) -> dict[str, object]:
    result = {name: pool[name] for name in ("kind", "node", "total", "free")}
    result |= {name: pool[name] for name in ("cells", "by_function", "timed") if name in pool}
    if "next_return_s" in pool:
        next_s = pool["next_return_s"]
        result["next"] = None if next_s is None else _ms(wall_s + next_s, step_ms=100)
        result["period"] = round(1000 * pool["period_s"])
    if "devices" in pool:
        result["devices"] = [
            [each["memory_bytes"], each["used_bytes"], [[one["service"], one["bytes"]] for one in each["resident"]]]
            for each in pool["devices"]
        ]
        result["regions"] = pool["regions"]
        looked = pool["hits"] + pool["restores"]
        result["warm"] = round(100 * pool["hits"] / looked) if looked else None
    return result


def _is_shown(pool: Shown, wanted: Collection[str]) -> bool:
    """Devices of a processor are there for whoever has no other: they are nothing until a function wants some."""
    kinds = {kind for _, _, kind in pool.get("regions", {}).values()}
    return kinds != {"cpu"} or pool["kind"] in wanted


def _running(one: Shown, wall_s: float) -> list[object]:
    takes_s = one["takes_s"]
    return [
        one["id"],
        one["function"],
        one["task"],
        one["trajectory"],
        one["units"],
        one["node"],
        _ms(wall_s - one["running_s"], step_ms=100),
        None if takes_s is None else _ms(takes_s, step_ms=100),
    ]


def _ms(seconds: float, step_ms: int = 1000) -> int:
    """Return whole milliseconds, in steps: an instant that was computed twice must come out the same."""
    return round(seconds * 1000 / step_ms) * step_ms


def verdict(
    seen: Shown, troubles: Troubles, functions: Mapping[str, tuple[str, str]], ended: int
) -> tuple[Verdict, str]:
    """Return why what waits does wait, or that nothing does: the page's first line. ``ended`` have, in a minute."""
    waiting, running = seen["waiting"], seen["running"]
    if troubles.stopped is not None:
        return ("draining" if troubles.stopped == "draining" else "stopped"), troubles.stopped
    if troubles.lost:
        more = len(troubles.lost) - 1
        message = f"{troubles.lost[0]} was lost" + (f", and {more} more" if more else "")
        return "lost", f"{message}; {running} running, {waiting} waiting"
    missing = [name for name, (status, _) in functions.items() if status == "unavailable"]
    if missing:
        return "unavailable", f"{missing[0]}: {functions[missing[0]][1]}" if functions[missing[0]][1] else missing[0]
    if not waiting:
        return ("ok", f"{running} running, nothing waits") if running else ("idle", "nothing runs and nothing waits")
    counts: dict[str, int] = {}
    pools: dict[str, str] = {}
    for cause in seen["causes"]:
        counts[cause["kind"]] = counts.get(cause["kind"], 0) + cause["count"]
        pools.setdefault(cause["kind"], cause["pool"])
    most = max(counts, key=lambda each: counts[each], default="turn")
    # What waits for an earlier action of its trajectory waits for what that waits for.
    kind = max((each for each in counts if each in _BOUND), key=lambda each: counts[each], default=most)
    if kind != most and kind in _BOUND:
        # What waits for its turn stands behind what lacks the units.
        counts[kind] += counts.get("turn", 0)
        kind = kind if counts[kind] >= _TELLING * waiting else most
    bound = _BOUND.get(cast(CauseKind, kind), "waiting")
    what = {
        "trajectory": "for earlier actions of their trajectories",
        "task_cap": "under a cap of their task",
        "hold": "because the policy holds them back",
        "turn": "for their turn",
        "memory": "for memory",
        "node": "for a node that is open to them",
        "image": "for images that are pulled",
        "requirements": "for requirements that are installed",
        "function": "for functions that are prepared",
    }.get(kind, f"for {_unit(seen, pools.get(kind, ''))}")
    message = f"{counts.get(kind, 0)} of {waiting} waiting actions wait {what}{_use(seen, pools.get(kind, ''))}"
    return bound, f"{message}{_drain(waiting, ended)}"


def _unit(seen: Shown, pool: str) -> str:
    """Return what the units of a pool are called."""
    result = seen["pools"].get(pool, {})
    return "devices" if "devices" in result else "cores" if result.get("kind") == "cpu" else pool


def _use(seen: Shown, pool: str) -> str:
    """Return how many units are in use, of all nodes that have such."""
    result = seen["pools"].get(pool)
    if result is None:
        return ""
    alike = [each for each in seen["pools"].values() if each["kind"] == result["kind"]]
    total = sum(each["total"] for each in alike)
    used = total - sum(each["free"] for each in alike)
    return f"; {used} of {total} are {'used up' if 'timed' in result else 'busy'}"


def _drain(waiting: int, ended: int) -> str:
    """Return when what waits will have begun at the rate of the last minute; nothing where that says little."""
    if ended < _RATE_MIN:
        return ""
    seconds = RATE_S * waiting / ended
    if seconds < 1:
        return ""
    about = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return f". At the present rate they have begun in about {about}"


def step_rows(steps: Sequence[StepInfo], wall_s: float) -> dict[str, object]:
    """Return steps as ``TASK/STEP: [expected, living, ended, opened_ms, ended_ms, expected_end_ms, waiting]``."""
    return {
        f"{each.task}/{each.step}": [
            each.expected,
            each.living,
            each.ended,
            round(1000 * each.opened_at.timestamp()),
            None if each.ended_at is None else round(1000 * each.ended_at.timestamp()),
            None if each.ends_in_s is None else _ms(wall_s + each.ends_in_s),
            each.waiting,
        ]
        for each in steps
    }


def begun_rows(bars: Sequence[Bar], names: Names) -> list[list[object]]:
    """Return the starts as ``[number, id, function, task, trajectory, start_ms, queue_ms, [[pool, first, count]]]``."""
    return [
        [
            bar.number,
            bar.id,
            names.of(bar.function),
            names.of(bar.task),
            bar.trajectory or 0,
            round(bar.start_s * 1000),
            round(bar.queue_s * 1000),
            [[names.of(pool), first, count] for pool, first, count in bar.places],
        ]
        for bar in bars
    ]


def ended_rows(bars: Sequence[Bar]) -> list[list[object]]:
    """Return the ends as ``[number, overhead_ms, execution_ms, reason or 0]``."""
    return [[bar.number, round(bar.overhead_s * 1000), round(bar.execution_s * 1000), bar.reason or 0] for bar in bars]


# The watch: one stream of small changes, encoded once for all viewers, and made only while somebody looks.
#
# Nothing is queued for a viewer. It has a place in the ring of the last ticks and takes the next one when it is ready;
# one that has fallen out of the ring, or far behind, is told the whole state again, as if it had just come.

#: Version of the stream's form.
FORM = 1
#: Seconds between two ticks, and after which one is sent though nothing changed.
TICK_S, HEARTBEAT_S = 0.5, 5.0
#: Ticks that are kept for who resumes (two minutes), their bytes, and ticks that a viewer may lag before it is told the
#: whole state instead.
TICKS_KEPT, RING_BYTES, LAG_MAX = 240, 8 * 2**20, 8
VIEWERS_MAX, VIEWERS_RESERVED = 64, 8
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
        result = self.packed.get(view.bars)
        if result is None:
            result = self.packed[view.bars] = packed(data)
        return result


def packed(data: bytes) -> bytes:
    """Return the data as blocks of raw deflate that lean on nothing before them, and do not end the stream."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    return deflate.compress(data) + deflate.flush(zlib.Z_FULL_FLUSH)


class Watch:
    """The stream. Use from one event loop; `close` ends it for all viewers."""

    def __init__(
        self,
        *,
        summary: Callable[[], Shown],
        stats: Stats,
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
        self._summary, self._stats, self._functions, self._steps = summary, stats, functions, steps
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

    def check(self, *, is_admin: bool) -> None:
        """Raise CapacityExceeded if there are as many viewers as there may be; some are the admin's alone."""
        limit = VIEWERS_MAX if is_admin else VIEWERS_MAX - VIEWERS_RESERVED
        if self.viewers >= limit:
            raise CapacityExceeded(f"{self.viewers} viewers watch already", component="watch", retry_after_s=5.0)

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
        seen = sections(self._summary(), self._stats, now_s, self._troubles(), self._functions(), self._wanted())
        seen["steps"] = step_rows(self._steps(), now_s)
        changes = _changes(self._shown, seen)
        begun, ended = self._stats.take_bars()
        if now_s - self._sent_s > 2 * HEARTBEAT_S:
            begun, ended = [], []  # nobody looked for a while: who comes is told the bars with the state
        started, finished = begun_rows(begun[-BEGUN_MAX:], self._names), ended_rows(ended)
        if not (changes or begun or ended or now_s - self._sent_s >= HEARTBEAT_S):
            return
        self._shown, self._sent_s = seen, now_s
        self._number += 1
        fields: dict[str, object] = {"now": round(now_s * 1000), **({"d": changes} if changes else {})}
        bars: dict[str, object] = {"s": started, "e": finished, "left_out": max(0, len(begun) - BEGUN_MAX)}
        names: dict[str, object] = {}
        if self._named < len(self._names.listed):
            names["names"] = [self._named, self._names.listed[self._named :]]
            self._named = len(self._names.listed)
        name = f"{self.epoch}.{self._number}"
        bare = _event("tick", fields | names, name)
        has_bars = bool(begun or ended or names)
        self._keep(
            _Tick(self._number, bare, _event("tick", {**fields, "bars": bars | names}, name) if has_bars else bare)
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
        fields: dict[str, object] = {"form": FORM, "epoch": self.epoch, "version": self._version, "admin": is_admin}
        fields |= {"now": round(self._wall() * 1000), "began": round(self._stats.began_wall_s * 1000)}
        return self._packed(view, _event("hello", fields))

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
        fields: dict[str, object] = {"now": round(self._wall() * 1000), "d": self._shown}
        fields["spark"] = self._stats.per_second(int(HISTORY_S))
        if view.bars:
            recent, known_since_s = self._stats.recent_bars(since_s, bars_max)
            fields["bars"] = {
                "s": begun_rows(recent, self._names),
                "e": ended_rows([bar for bar in recent if bar.reason is not None]),
                "left_out": 0,
                "names": [0, self._names.listed],
                # From when on these are all that there were.
                "since": round(known_since_s * 1000),
            }
        else:
            fields["names"] = [0, self._names.listed]  # in their order functions have their colours
        return self._packed(view, _event("state", fields, f"{self.epoch}.{self._number}"))

    @staticmethod
    def _packed(view: WatchView, data: bytes) -> bytes:
        return packed(data) if view.packed else data


def _event(name: str, fields: Mapping[str, object], number: str | None = None) -> bytes:
    head = b"" if number is None else f"id: {number}\n".encode()
    return head + f"event: {name}\ndata: ".encode() + serialization.encode(fields) + b"\n\n"


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, object]:
    """Return the sections that differ; of one that is keyed by names those keys, null where one is gone."""
    result: dict[str, object] = {}
    for name, value in now.items():
        old = before.get(name)
        if value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            gone = dict.fromkeys(old.keys() - value.keys())
            result[name] = {key: each for key, each in value.items() if old.get(key) != each} | gone
        else:
            result[name] = value
    return result
