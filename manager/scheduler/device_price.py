"""The price on devices: a restore belongs to the duration, and a busy warm chunk is worth waiting for (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from manager.action import Action
from manager.resources.chunk_operator import best_fit, take, warm_fit
from manager.scheduler.durations import UNKNOWN_S, is_elastic, key_units, kind_of, shape_of
from manager.scheduler.policy import ChunkView, Decision, Hold, PoolView, Start

Chunk = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve an action: what it costs, where, and after what wait."""

    cost_s: float
    units: int
    chunk: Chunk
    #: None where the chunk is free now; 0.0 is a busy chunk whose action is overdue.
    wait_s: float | None
    #: Seconds that the chunk is taken, from its start on.
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrice:
    """Each candidate takes the cheapest of: a warm free chunk, a cold start on a free one, a busy warm one later."""

    c: float = 4.0
    a_s: float = 1.0
    #: Candidates considered in one decision; the others are asked about at the next event.
    window: int = 256

    def decide(self, view: PoolView) -> Decision:
        assert view.chunks is not None
        waiting = view.eligible or [candidate.action for candidate in view.candidates]
        if not waiting or not view.chunks.free:
            return Decision()
        return _Pass(view, view.chunks, self.c, self.a_s).run(waiting[: self.window])


class _Pass:
    """One decision over the chunks of a pool."""

    def __init__(self, view: PoolView, chunks: ChunkView, c: float, a_s: float) -> None:
        self._view = view
        self._kind = kind_of(view.name)
        self._restore_s = chunks.restore_s
        self._free = list(chunks.free)
        self._warm: Mapping[str, Sequence[Chunk]] = chunks.resident
        #: Seconds until a busy chunk is free again, promises of this decision included. An overdue action is expected
        #: to take as long again as it has taken, so that nobody waits for ever for one that hangs.
        self._busy_s: dict[Chunk, float] = {
            r.chunk: r.ends_in_s if r.ends_in_s > 0 else view.now_s - r.started_s
            for r in view.running
            if r.chunk is not None and r.ends_in_s is not None
        }
        self._scale = c / view.total
        self._coming = a_s * view.arrival_rate * view.utilisation**4
        self._behind = view.backlog
        self._limits = {candidate.action.id: candidate.limit for candidate in view.candidates}

    def run(self, waiting: Sequence[Action]) -> Decision:
        starts: list[Start] = []
        holds: list[Hold] = []
        for action in waiting:
            self._behind -= 1
            option = min(self._options(action), key=lambda one: one.cost_s, default=None)
            if option is None:
                continue
            wait_s = option.wait_s or 0.0
            if option.wait_s is None:
                take(self._free, option.chunk)
                starts.append(Start(action_id=action.id, units=option.units, chunk=option.chunk))
            else:
                until_s = self._view.now_s + wait_s
                waits_for = f"devices {option.chunk[0]}..{sum(option.chunk) - 1}, warm for {action.service}"
                holds.append(Hold(action_id=action.id, waits_for=waits_for, until_s=until_s))
            self._busy_s[option.chunk] = wait_s + option.busy_s
        return Decision(starts=starts, holds=holds)

    def _options(self, action: Action) -> Iterator[Option]:
        price = self._scale * (max(0, self._behind) + self._coming)
        service = action.service or ""
        warm = self._warm.get(service, ())
        limit = self._limits.get(action.id, self._view.total)
        for units, duration_s in self._durations(action):
            if units > limit:
                break
            place = warm_fit(self._free, units, warm)
            if place is not None:
                yield Option(duration_s * (1 + price * units), units, place, None, duration_s)
                continue
            place = self._cold_place(units)
            if place is not None:
                cold_s = duration_s + (self._restore_s(service, units) if service else 0.0)
                yield Option(cold_s * (1 + price * units), units, place, None, cold_s)
            yield from self._later(units, duration_s, price, warm)

    def _later(self, units: int, duration_s: float, price: float, warm: Sequence[Chunk]) -> Iterator[Option]:
        """Wait for the first busy chunk on which the service is resident."""
        busy = [(self._busy_s[chunk], chunk) for chunk in warm if chunk[1] == units and chunk in self._busy_s]
        if busy:
            wait_s, chunk = min(busy)
            yield Option(wait_s + duration_s * (1 + price * units), units, chunk, wait_s, duration_s)

    def _durations(self, action: Action) -> Iterator[tuple[int, float]]:
        unit_set = key_units(action, self._kind)
        assert unit_set is not None, f"action {action.id} does not use {self._kind}"
        if not is_elastic(action, self._kind):
            yield unit_set.minimum, action.duration_s(unit_set.minimum) or UNKNOWN_S
            return
        shape = shape_of(unit_set, action.elasticity)
        yield from zip(shape.units, (shape.factors * (action.t_ori_s or UNKNOWN_S)).tolist(), strict=True)

    def _cold_place(self, units: int) -> Chunk | None:
        """The free place whose eviction hurts least: no service that waits, and as few copies as possible."""
        return best_fit(self._free, units)
