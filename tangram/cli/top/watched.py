"""What the stream of the gateway (``GET /v1/watch``) has told so far; nothing here reads a clock or a socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

#: Bars that are kept, and points of each small curve.
BARS_MAX, CURVE_MAX = 4000, 120
#: Sections of which a tick tells only the keys that changed.
KEYED = frozenset({"pools", "nodes", "tasks", "steps", "fns", "traj"})


class StreamEvent(NamedTuple):
    """One Server-Sent Event."""

    id: str | None
    kind: str
    told: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class WatchedBar:
    """One try of an action; instants are milliseconds on the gateway's clock."""

    id: str
    function: str
    task: str
    trajectory: str | None
    start_ms: float
    queue_ms: float
    #: (pool, first unit or -1, units)
    places: tuple[tuple[str, int, int], ...]
    overhead_ms: float = 0.0
    end_ms: float | None = None
    #: None while it runs, empty if it went well.
    reason: str | None = None


class WatchedStep(NamedTuple):
    """A step of a task that goes on; instants are milliseconds on the gateway's clock."""

    number: str
    #: Rollouts; None if nobody has told.
    expected: int | None
    living: int
    ended: int
    opened_ms: float
    #: None if nothing tells.
    expected_end_ms: float | None

    @property
    def progress(self) -> str:
        """Return ``120/256``, or what ended alone."""
        return str(self.ended) if self.expected is None else f"{self.ended}/{self.expected}"


class EventReader:
    """Makes events of the stream's lines."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._kind = ""
        self._data = ""

    def feed(self, line: str) -> StreamEvent | None:
        """Take a line; return the event that it ends. Raises msgspec.DecodeError for data that is no JSON."""
        if line:
            name, _, value = line.partition(": ")
            if name == "id":
                self._id = value
            elif name == "event":
                self._kind = value
            elif name == "data":
                self._data = value
            return None
        if not self._kind:
            return None
        event = StreamEvent(self._id, self._kind, msgspec.json.decode(self._data or "{}"))
        self._id, self._kind, self._data = None, "", ""
        return event


@dataclass(slots=True)
class Watched:
    """The state of one gateway as its stream told it."""

    #: What is shown, by section (`gateway.dashboard.sections`).
    sections: dict[str, Any] = field(default_factory=dict)
    bars: dict[int, WatchedBar] = field(default_factory=dict)
    curves: dict[str, deque[int]] = field(default_factory=dict)
    version: str = ""
    epoch: str = ""
    #: When the gateway began, and its clock as of the last event.
    began_ms: float = 0.0
    now_ms: float = 0.0
    #: The last event, with which a broken stream goes on.
    last: str | None = None
    #: Why the gateway said goodbye.
    goodbye: str = ""
    restarts: int = 0
    _names: list[str] = field(default_factory=lambda: ["other"])

    def take(self, event: StreamEvent) -> None:
        """Take one event; kinds that are not known are passed over."""
        told = event.told
        self.last = event.id or self.last
        self.now_ms = float(told.get("now", self.now_ms))
        if event.kind == "hello":
            self._greet(told)
        elif event.kind == "bye":
            self.goodbye = str(told.get("reason", ""))
        elif event.kind == "state":
            self.sections = dict(told.get("d") or {})
            self.bars.clear()  # the state tells all that runs: an end that was missed would stay for ever
            self._bars(told.get("bars") or {})
            self._note()
        elif event.kind == "tick":
            self._merge(told.get("d") or {})
            self._bars(told.get("bars") or {})
            self._note()

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section that is keyed by names; empty before the first state."""
        found = self.sections.get(name)
        return found if isinstance(found, dict) else {}

    def step_of(self, task: str) -> WatchedStep | None:
        """Return the step of a task that opened last, if it goes on."""
        steps: list[tuple[WatchedStep, bool]] = []
        for name, (expected, living, ended, opened_ms, ended_ms, expected_end_ms) in self.section("steps").items():
            owner, _, number = name.rpartition("/")
            if owner == task:
                step = WatchedStep(number, expected, living, ended, opened_ms, expected_end_ms)
                steps.append((step, ended_ms is None))
        last = max(steps, key=lambda each: each[0].opened_ms, default=None)
        return last[0] if last is not None and last[1] else None

    def running(self) -> Iterator[WatchedBar]:
        """Yield what runs, the oldest first."""
        return (bar for bar in self.bars.values() if bar.reason is None)

    def failed(self) -> Iterator[WatchedBar]:
        """Yield what failed, the newest first; what was cancelled did not."""
        return (bar for bar in reversed(self.bars.values()) if bar.reason and bar.reason != "cancelled")

    def _greet(self, told: Mapping[str, Any]) -> None:
        epoch = str(told.get("epoch", ""))
        if self.epoch and epoch != self.epoch:
            self.restarts += 1
            self.last = None
        self.epoch, self.version = epoch, str(told.get("version", ""))
        self.began_ms = float(told.get("began", 0.0))
        self.goodbye = ""

    def _merge(self, changes: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            old = self.sections.get(name)
            if name not in KEYED or not isinstance(old, dict):
                self.sections[name] = value
                continue
            for key, each in value.items():
                if each is None:
                    old.pop(key, None)
                else:
                    old[key] = each

    def _bars(self, told: Mapping[str, Any]) -> None:
        if names := told.get("names"):
            first, listed = names
            self._names[first:] = listed
        for number, id, function, task, trajectory, start_ms, queue_ms, places in told.get("s", ()):
            self.bars.setdefault(
                number,
                WatchedBar(
                    id=id,
                    function=self._name(function),
                    task=self._name(task),
                    trajectory=trajectory or None,
                    start_ms=start_ms,
                    queue_ms=queue_ms,
                    places=tuple((self._name(pool), first, count) for pool, first, count in places),
                ),
            )
        for number, overhead_ms, execution_ms, reason in told.get("e", ()):
            bar = self.bars.get(number)
            if bar is not None:
                bar.overhead_ms, bar.end_ms = overhead_ms, bar.start_ms + overhead_ms + execution_ms
                bar.reason = reason or ""
        while len(self.bars) > BARS_MAX:
            del self.bars[next(iter(self.bars))]

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else "other"

    def _note(self) -> None:
        rate = self.sections.get("rate") or [0, 0, 0]
        points = {
            "run": self.sections.get("run", 0),
            "wait": self.sections.get("wait", 0),
            "ended": rate[1],
            "failed": self.sections.get("failed_15min", 0),
        }
        for name, value in points.items():
            self.curves.setdefault(name, deque(maxlen=CURVE_MAX)).append(int(value))
