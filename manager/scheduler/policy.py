"""The contract of a policy, and what policies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol, overload

from manager.action import Action, Chunk, outside


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """An action that holds units of the pool now."""

    action: Action
    units: int
    #: Seconds from now until its expected end with the units that it holds; None when unknown.
    ends_in_s: float | None
    started_s: float
    #: Fraction of the work still to do by estimate, in (0, 1]; None when unknown.
    remaining: float | None = None
    #: Its devices, where the pool has places.
    chunk: Chunk | None = None
    #: Earliest instant at which it may be resized again (damping).
    resize_after_s: float = 0.0
    #: The most units it may grow to: the workers that it was started with.
    workers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingView:
    """An action that could start now at its minimum, in FCFS order and within the reservations of earlier ones."""

    action: Action
    #: Units of this pool that it may take at most now, by its unit set and the pool's reservations.
    limit: int


def _nothing_goes(service: str, chunk: Chunk) -> Sequence[tuple[str, int]]:
    return ()


def _runs_alone(service: str) -> int:
    return 0


def _all_places(action: Action, places: Sequence[Chunk]) -> Sequence[Chunk]:
    return places


def _never_used(service: str) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkView:
    """The places of a pool whose units are not interchangeable (devices): read-only."""

    #: Free chunks, aligned powers of two, merged as far as possible.
    free: tuple[Chunk, ...]
    #: Service name -> chunks on which it is resident now.
    resident: Mapping[str, tuple[Chunk, ...]]
    #: Seconds to restore a service that is not resident on a chunk of ``size`` devices.
    restore_s: Callable[[str, int], float]
    #: Copies that go where a service is restored on a chunk, each as (service, size).
    evicts: Callable[[str, Chunk], Sequence[tuple[str, int]]] = _nothing_goes
    #: Uses of a service in the last seconds, smoothed.
    recent: Callable[[str], float] = _never_used
    #: Tokens that actions of a service may add up to in one batch; 0 where each runs alone.
    batch_tokens: Callable[[str], int] = _runs_alone
    #: Free places that are kept for actions ahead of the candidates.
    kept: tuple[Chunk, ...] = ()
    #: Those of some places that lie on a node that is right for an action.
    allowed: Callable[[Action, Sequence[Chunk]], Sequence[Chunk]] = _all_places

    #: Seconds of a restore on a certain place, where nodes differ; None where they are alike.
    restore_here: Callable[[str, Chunk], float] | None = None

    def restore_at(self, service: str, place: Chunk) -> float:
        """Return the seconds to restore a service on a place."""
        return self.restore_s(service, place.size) if self.restore_here is None else self.restore_here(service, place)

    @property
    def open(self) -> Sequence[Chunk]:
        """What the candidates may take: the free chunks without the places that are kept."""
        return outside(self.free, self.kept) if self.kept else self.free


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdView:
    """What nothing but a pool's free units keeps from starting, by its expected work; of all nodes the pool's part."""

    #: How many have a choice of units here.
    elastic: int
    #: Unit-seconds of all, each at its minimum, by estimate.
    work_s: Callable[[], float]
    #: They, the shortest first. Once they were looked at, these may be started as those of ``eligible`` may.
    shortest: Callable[[], Iterator[Action]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """All that a policy may look at: one pool, its running actions, and the candidates in FCFS order."""

    name: str
    now_s: float
    total: int
    free: int
    running: Sequence[RunningView]
    #: Candidates: a start at the minimum is certain to fit for all of them together.
    candidates: Sequence[WaitingView]
    #: Everything that waits for this pool in FCFS order, candidates first (bounded by ``queue_window``).
    queued: Sequence[Action]
    #: Actions that wait for this pool in all (also beyond ``queued``).
    backlog: int
    #: Those of ``queued`` that nothing but this pool's free units keeps from starting, in FCFS order, candidates
    #: included. A policy that reorders (short rigid actions first, with an ageing bound) or that frees units by
    #: resizing looks here; a Start of one that turns out not to fit is left waiting by the core.
    eligible: Sequence[Action] = ()
    #: Whether any of these may have a choice of units here: where none has, nobody need look for one.
    has_elastic: bool = True
    #: What none of ``eligible`` exceeds in expected seconds with one unit, where they are known and none is elastic.
    longest_s: float = inf
    #: Free units besides ``free``, reserved for eligible actions ahead of the candidates: a policy that looks after
    #: these itself, and starts them in time, may use them.
    reserved: int = 0
    #: Those of ``eligible`` that have no choice of units here, in the same order; None if nobody has set them apart,
    #: or all are.
    rigid: Sequence[Action] | None = None
    #: ``eligible`` by their expected work; None where they start in order, several tasks wait, or none has a choice.
    crowd: CrowdView | None = None
    #: Tasks by the turns to come, with an entry for each of their actions; None where one task waits.
    turns: Callable[[], Iterator[str]] | None = None
    #: Arrivals per second of actions for this pool, smoothed.
    arrival_rate: float = 0.0
    #: Smoothed fraction of the pool in use.
    utilisation: float = 0.0
    chunks: ChunkView | None = None
    #: The price of a worker process: core-seconds charged per unit at a start.
    worker_cost_s: float = 0.0


class Start(NamedTuple):
    """Start a candidate now with ``units`` of the pool, on ``chunk`` where the pool has places.

    A tuple, because it is made for each start: that takes a third of the time of a frozen dataclass.
    """

    action_id: str
    units: int
    chunk: Chunk | None = None
    #: Malleable actions: the most units it may grow to later, so that as many workers are started; 0 means ``units``.
    workers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeChoice:
    """Change a running, malleable action to ``units``."""

    action_id: str
    units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A candidate that the policy leaves waiting on purpose: what for, and until when by estimate."""

    action_id: str
    waits_for: str
    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy wants done with one pool; the core checks and carries it out: shrinks, then starts, then growths.

    Starts may use what the shrinks of the same decision give back.
    """

    starts: Sequence[Start] = ()
    resizes: Sequence[ResizeChoice] = ()
    holds: Sequence[Hold] = ()
    #: Ask again at this instant even if nothing happens (a wait that ends, a damped resize); None otherwise.
    wake_s: float | None = None


class Policy(Protocol):
    """Decides on one pool at a time; pure: the same view gives the same decision."""

    @property
    def name(self) -> str: ...

    def decide(self, view: PoolView) -> Decision:
        """Choose units for the candidates (starting none of them is allowed; idling for ever is not)."""
        ...


class PromptPolicy:
    """A policy that lets nothing wait without a reason: an action that waits alone is started if it fits.

    The core does not ask it where one action waits for a pool, has a single count of units, and nothing that runs
    there can be resized. Bases of policies say so; a policy that holds such actions back must not be one.
    """

    __slots__ = ()

    def starts_in_order(self, longest_s: float) -> bool:
        """Return whether several such actions, of one task and minimum, are started in order as long as they fit.

        None of them takes longer than ``longest_s`` with one unit, where that is known. Then it is not asked either.
        """
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """The choice of a policy and its constants."""

    name: str = "paper"
    #: Constants by name, for example ``{"dop": 8}`` for fixed.
    options: Mapping[str, float] = field(default_factory=dict)


class RunningSet(Sequence[RunningView]):
    """Views by holder, in the order of their starts: an event changes few of them, and a decision looks at few."""

    def __init__(self, kind: str, look: Callable[[str], RunningView] | None = None) -> None:
        """``look`` makes the views of holders that are entered without one."""
        self._kind = kind
        self._look = look
        #: Views that were made, and behind them the holders of those that were not: these have no choice of units.
        self._made: dict[str, RunningView] = {}
        self._unseen: dict[str, None] = {}
        #: Those whose units may change.
        self.malleable: dict[str, RunningView] = {}
        #: Units above the minimum, of those malleable ones that hold more.
        self._above: dict[str, int] = {}
        #: How many have no choice of units here.
        self.rigid = 0

    @classmethod
    def of(cls, running: Iterable[RunningView], kind: str) -> RunningSet:
        """Return running actions as a set, which they may be already."""
        if isinstance(running, cls):
            return running
        running_set = cls(kind)
        for view in running:
            running_set.add(view.action.id, view)
        return running_set

    def enter(self, holder: str, action: Action) -> None:
        """Add a holder of which no view is made before somebody looks."""
        if action.key != self._kind:
            self._unseen[holder] = None
            self.rigid += 1
        else:
            assert self._look is not None, f"{holder} cannot be looked at"
            self.add(holder, self._look(holder))

    def add(self, holder: str, view: RunningView) -> None:
        self._views[holder] = view
        if view.action.key != self._kind:
            self.rigid += 1
        elif view.action.malleable:
            self.malleable[holder] = view
            self.note_units(holder, view.units)

    def remove(self, holder: str) -> None:
        if holder in self._unseen:
            del self._unseen[holder]
            self.rigid -= 1
            return
        view = self._made.pop(holder)
        self.rigid -= view.action.key != self._kind
        self.malleable.pop(holder, None)
        self._above.pop(holder, None)

    def note_units(self, holder: str, units: int) -> None:
        """Note what a malleable one holds from now on."""
        above = units - self.malleable[holder].action.cost[self._kind].minimum
        if above:
            self._above[holder] = above
        else:
            self._above.pop(holder, None)

    @property
    def slack(self) -> int:
        """Return the units that malleable ones hold above their minima."""
        return sum(self._above.values())

    @property
    def _views(self) -> dict[str, RunningView]:
        """Return all views; those that are missing are made."""
        if self._unseen:
            assert self._look is not None, f"{self._unseen} cannot be looked at"
            for holder in self._unseen:
                self._made[holder] = self._look(holder)
            self._unseen.clear()
        return self._made

    def __len__(self) -> int:
        return len(self._made) + len(self._unseen)

    def __iter__(self) -> Iterator[RunningView]:
        return iter(self._views.values())

    @overload
    def __getitem__(self, index: int) -> RunningView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RunningView]: ...
    def __getitem__(self, index: int | slice) -> RunningView | Sequence[RunningView]:
        if isinstance(index, slice) and index.step is None and (index.start or 0) >= 0 and (index.stop or -1) >= 0:
            return list(islice(self._views.values(), index.start, index.stop))
        return list(self._views.values())[index]
