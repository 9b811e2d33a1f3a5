"""One pool's turn in a scheduling pass: its policy is shown a view, and what it wants is checked and done."""

from __future__ import annotations

import heapq
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from manager.action import ANYWHERE, Action, NodeChoice, UnitSet
from manager.chunk import Chunk
from manager.core.candidates import Candidate, CandidateSelection, StartOption
from manager.core.dispatcher import Dispatcher
from manager.core.state import SchedulerState
from manager.core.waiting.queue import Key, QueueGroup, Waiting
from manager.resources.nodes import Nodes
from manager.resources.placed import PlacedPool
from manager.resources.pool import Headroom, Pool, PoolRequest
from manager.scheduler.drawn import Drawn
from manager.scheduler.policy import ChunkView, CrowdView, Decision, PoolView, Start, WaitingView

#: A policy is not asked again sooner than this, whatever it wants.
_LEAST_WAKE_S = 0.001


class BrokenPromise(Exception):
    """A decision that cannot be carried out, with its story."""


class AllowedPlaces:
    """Which places of a pool an action may have: `manager.scheduler.policy.ChunkView.allowed`."""

    def __init__(self, nodes: Nodes, pool: PlacedPool) -> None:
        self._nodes = nodes
        self._pool = pool
        #: By placement, the nodes that are right.
        self._right: dict[NodeChoice, frozenset[str]] = {}

    def __call__(self, action: Action, places: Sequence[Chunk]) -> Sequence[Chunk]:
        """Return those of the places that lie on a node that is right for the action."""
        placement = action.placement
        if placement == ANYWHERE:
            return places
        right = self._right.get(placement)
        if right is None:
            right = self._right[placement] = self._nodes.right_for(placement)
        return [place for place in places if self._pool.node_of(place) in right]


class PoolDispatch:
    """The turn of one pool. A policy that raises, or breaks a promise, is asked no more about this pool."""

    def __init__(
        self,
        state: SchedulerState,
        dispatcher: Dispatcher,
        pool: Pool,
        groups: Sequence[QueueGroup],
        candidates: Sequence[Candidate],
        selection: CandidateSelection,
        look_again: Callable[[Iterable[QueueGroup]], None],
    ) -> None:
        self._state = state
        self._look_again = look_again
        self._dispatcher = dispatcher
        self._pool = pool
        #: The pool, if it has places.
        self._placed = pool if isinstance(pool, PlacedPool) else None
        self._candidates = {candidate.waiting.id: candidate for candidate in candidates}
        self._selection = selection
        #: Those that the pool could serve.
        self._groups = groups
        self._headroom = selection.headrooms.get(pool.name)
        #: Units that nobody holds and nobody earlier was promised, with the candidates' minima.
        self._free = pool.free if self._headroom is None else self._headroom.free
        self._free += sum([one.units.minimum for one in candidates if one.units is not None])
        #: Free units that are reserved for actions that the policy may start itself.
        self._reserved = 0 if self._headroom is None or state.spec.strict else self._headroom.awaited
        #: Groups of which nothing but this pool's units keeps anything from starting.
        self._startable: Sequence[QueueGroup] = ()
        #: Waiting actions that the policy was shown as eligible besides the candidates, by id.
        self._eligible: dict[str, Waiting] = {}
        #: Candidates that the policy started and whose place, or batch, was gone.
        self._missed: list[Candidate] = []

    def take(self) -> None:
        """Ask the policy, if there is anything to decide, and do what it wants."""
        executing, name = self._state.executing, self._pool.name
        if not self._candidates and not executing.can_resize(name) and not (self._groups and self._pool.free):
            return
        self._state.wakes.pop(name, None)
        if not self._candidates and not self._pool.free and not executing.can_shrink(name):
            return  # nothing can start, and nobody can grow
        try:
            decision = self._decide()
            started = self._carry_out(decision)
        except BrokenPromise as error:
            if name in self._state.faults:
                raise  # the stand-in failed as well: a bug of the core's
            self._state.faults[name] = self._fault(error)
            self._look_again(self._groups)
            return
        if decision.wake_s is not None:
            self._state.wakes[name] = max(decision.wake_s, self._state.now_s + _LEAST_WAKE_S)
        for hold in decision.holds:
            self._state.holds[hold.action_id] = hold
        if started or decision.resizes or decision.wake_s is not None:
            return
        if self._candidates and not executing.holders(name):
            # An idle pool with startable work would stay idle for ever: nothing happens that requests again.
            first = next(iter(self._candidates.values()))
            self._start([first.waiting], first.option, Start(action_id=first.waiting.id, units=first.choice.minimum))

    def _decide(self) -> Decision:
        try:
            return self._state.policy(self._pool).decide(self._view())
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise BrokenPromise(f"it raised {error!r} in {Path(where.filename).name}:{where.lineno}") from error

    def _view(self) -> PoolView:
        pool, state, now_s = self._pool, self._state, self._state.now_s
        load = state.executing.load(pool.name)
        self._startable = [group for group in self._groups if self._place(group) is not None]
        has_elastic = any(group.keyed[pool.kind] for group in self._groups)
        by_choice = has_elastic and not state.spec.strict
        return PoolView(
            name=pool.name,
            now_s=now_s,
            total=pool.total,
            free=self._free,
            reserved=self._reserved,
            running=state.executing.view(pool, now_s),
            candidates=Drawn(self._show_candidates),
            queued=Drawn(lambda: (waiting.action for waiting in self._queued(self._groups))),
            backlog=sum([self._share(group) for group in self._groups]),
            eligible=self._show_eligible(),
            has_elastic=has_elastic,
            rigid=Drawn(self._show_rigid) if by_choice else None,
            crowd=self._show_crowd() if by_choice and self._placed is None else None,
            turns=None if state.spec.strict else self._show_turns(),
            arrival_rate=load.arrivals.at(now_s),
            utilisation=load.utilisation(now_s),
            chunks=None if self._placed is None else self._show_chunks(self._placed),
            worker_cost_s=state.option(pool.kind, "worker_cost_s", 0.0),
        )

    def _show_chunks(self, pool: PlacedPool) -> ChunkView:
        view = pool.chunk_view(self._state.now_s)
        kept = () if self._headroom is None else tuple(self._headroom.kept)
        return replace(view, kept=kept, allowed=AllowedPlaces(self._state.nodes, pool))

    def _show_candidates(self) -> Iterator[WaitingView]:
        for candidate in self._candidates.values():
            yield WaitingView(action=candidate.waiting.action, limit=self._limit(candidate, self._free))

    def _limit(self, candidate: Candidate, free: int) -> int:
        """Return the units it may take now of what is free for the candidates, which may wait behind it."""
        units = candidate.choice
        room = free if candidate.cap is None else min(free, units.minimum + candidate.cap.free)
        limit = units.at_most(room)
        assert limit is not None
        return limit

    def _share(self, group: QueueGroup) -> int:
        """Return how many of a group's actions wait for this pool, if several nodes could serve them."""
        return -(-group.live // self._nodes_of(group))

    def _nodes_of(self, group: QueueGroup) -> int:
        """Return how many pools like this one could serve a group's actions."""
        return max(1, len(self._selection.options[group])) if self._pool.node else 1

    def _queued(self, groups: Sequence[QueueGroup]) -> Iterator[Waiting]:
        """Return waiting actions in order of service, candidates first, bounded by the window."""
        first = [candidate.waiting for candidate in self._candidates.values()]
        return chain(first, self._behind([group.items() for group in groups]))

    def _behind(self, parts: Sequence[Iterator[tuple[Key, int, Waiting]]]) -> Iterator[Waiting]:
        """Yield what waits behind the candidates, of sorted parts, bounded by the window."""
        in_order = parts[0] if len(parts) == 1 else heapq.merge(*parts)
        rest = (waiting for _, _, waiting in in_order if waiting.id not in self._candidates)
        yield from islice(rest, max(0, self._state.spec.queue_window - len(self._candidates)))

    def _show_rigid(self) -> Iterator[Action]:
        """Yield the eligible actions that have no choice of units here."""
        kind = self._pool.kind
        first = (one.waiting for one in self._candidates.values() if one.waiting.action.key != kind)
        return self._chosen_here(chain(first, self._behind([group.rigid(kind) for group in self._startable])))

    def _show_eligible(self) -> Drawn[Action]:
        if self._state.spec.strict:  # one queue for everything: nothing starts but the candidates
            return Drawn(lambda: (candidate.waiting.action for candidate in self._candidates.values()))
        return Drawn(lambda: self._chosen_here(self._queued(self._startable)))

    def _chosen_here(self, waiting: Iterable[Waiting]) -> Iterator[Action]:
        """Yield the actions that this pool's policy chooses for, and note that it was shown them.

        What another kind's policy chooses for is not this one's to start, though it needs this pool as well.
        """
        for one in waiting:
            if one.action.chooser == self._pool.kind:
                self._eligible[one.id] = one
                yield one.action

    def _show_crowd(self) -> CrowdView | None:
        """Return what could start here by its expected work, if it is of one task: several are served in fair order.

        Nothing is sorted before somebody asks.
        """
        kind, groups = self._pool.kind, self._startable
        if len({group.signature.task for group in self._groups}) != 1:
            return None

        def shortest() -> Iterator[Action]:
            in_order = heapq.merge(*(group.shortest() for group in groups))
            return self._chosen_here(waiting for _, _, waiting in in_order)

        return CrowdView(
            elastic=sum(-(-group.keyed[kind] // self._nodes_of(group)) for group in groups),
            work_s=lambda: sum(one.demand[kind] * one.seconds / self._nodes_of(one) for one in groups),
            shortest=shortest,
        )

    def _show_turns(self) -> Callable[[], Iterator[str]] | None:
        """Return the tasks in the order of their fair shares, if several wait here."""
        signatures = [group.signature for group in self._startable]
        if len({signature.task for signature in signatures}) < 2:
            return None
        demands = {(one.task, tuple([kind for kind, _ in one.demand])) for one in signatures}
        return lambda: self._state.fair.turns(sorted(demands))

    def _place(self, group: QueueGroup) -> StartOption | None:
        """Return where a group's actions could start, were this pool free; None if something else is missing."""
        if group in self._selection.capped:
            return None
        options = self._selection.options[group]
        here = (
            options.values()
            if not self._pool.node
            else [options[self._pool.node]]
            if self._pool.node in options
            else []
        )
        return next((option for option in here if option.fits(beside=self._headroom)), None)

    def _carry_out(self, decision: Decision) -> bool:
        """Shrink, start, grow, in this order; return whether anything was started."""
        pool, kind, grows = self._pool, self._pool.kind, []
        holders = self._state.executing.holders(pool.name)
        balance = self._free
        for resize in decision.resizes:
            running = holders.get(resize.action_id)
            if running is None or not running.action.malleable_in(kind):
                raise BrokenPromise(f"{resize} names no running action that is malleable here")
            if resize.units not in running.action.cost[kind]:
                raise BrokenPromise(f"{resize} is not in the unit set")
            balance -= resize.units - pool.held[running.id]
            if resize.units < pool.held[running.id]:
                self._dispatcher.resize(running, kind, resize.units)
            elif resize.units > pool.held[running.id]:
                grows.append((running, resize.units))
        started, balance = self._carry_out_starts(decision.starts, balance)
        if started:
            self._reconsider(balance)
        for running, units in grows:
            held = pool.held[running.id]
            if units - held > pool.free:
                raise BrokenPromise(f"{decision} grows {running.id} beyond what is free")
            room = self._state.cap_room(running, kind)
            allowed = units if room is None else running.action.cost[kind].at_most(min(units, held + room))
            if allowed is not None and allowed > held:
                self._dispatcher.resize(running, kind, allowed)
        return started

    def _carry_out_starts(self, starts: Sequence[Start], balance: int) -> tuple[bool, int]:
        """Start candidates, for which the policy must keep its sums, then whatever else it chose and still fits.

        Return whether anything was started, and what is left of the units that the policy was shown.
        """
        started = False
        mine, others = [], []
        kept = self._kept(self._pool)
        for start in starts:
            candidate = self._candidates.pop(start.action_id, None)
            if candidate is None:
                others.append(start)
            else:
                mine.append((start, candidate))
        for start, alike in _alike(mine):
            first = alike[0]
            if start.units != first.choice.minimum:
                start = self._admissible(start, first, balance)
            if self._placed is not None and start.units > balance + self._reserved:
                # A free place of that size is in sight, but some of its devices are promised to others by count.
                self._missed += alike
                continue
            balance -= start.units * len(alike)
            if balance < -self._reserved:
                raise BrokenPromise(f"{start} is beyond the {self._free} units to share")
            count = self._start([candidate.waiting for candidate in alike], first.option, start, kept=kept)
            started = started or count > 0
            if count < len(alike):
                self._missed += alike  # those that have started are in no group any more, and looked at no more
        for start in others:
            waiting = self._eligible.get(start.action_id)
            if waiting is None:
                raise BrokenPromise(f"{start} names neither a candidate nor an eligible action")
            if start.units not in _unit_set(waiting.action):
                raise BrokenPromise(f"{start} is not in the unit set")
            option = None if waiting.group is None else self._place(waiting.group)
            if option is not None:
                started |= self._start([waiting], option, start) > 0
        return started, balance

    def _admissible(self, start: Start, candidate: Candidate, balance: int) -> Start:
        """Return a start above the minimum, with no more units than the cap of its task leaves; raise if it may not."""
        if start.units not in candidate.choice:
            raise BrokenPromise(f"{start} is not in the unit set")
        if candidate.cap is not None:
            start = _within_cap(start, candidate, candidate.cap)
        if balance <= self._free and start.units > self._limit(candidate, self._free + self._reserved):
            raise BrokenPromise(f"{start} is above its limit")
        return start

    def _reconsider(self, balance: int) -> None:
        """Ask for another round for candidates whose promise was given to an earlier one that started wider.

        Such a candidate may have been promised other resources, which would idle; may start elsewhere; or may still
        fit here, if the policy was shown less than there is (a reservation of somebody behind, a narrower start).
        If the pool has places, others may find that the shape that they need was left free.
        """
        if self._placed is not None:
            self._look_again(group for group in self._groups if group.live)
        beaten = [one for one in self._candidates.values() if one.choice.minimum > balance]
        for candidate in (*beaten, *self._missed):
            group = candidate.waiting.group
            if group is None:
                continue
            elsewhere = len(candidate.option.needs) > 1 or len(self._selection.options[group]) > 1
            if elsewhere or candidate.choice.minimum <= self._pool.free:
                self._look_again([group])
            self._release_cap(group.signature.task)

    def _release_cap(self, task: str) -> None:
        """Offer what an action was promised of its task's caps to others of the task, wherever they wait."""
        spec = self._state.tasks.get(task)
        if spec is not None and spec.caps:
            self._look_again(group for group in self._state.queue.groups() if group.signature.task == task)

    def _kept(self, pool: Pool) -> Sequence[Chunk]:
        """Return the places of a pool that actions ahead of the candidates have reserved."""
        headroom = self._selection.headrooms.get(pool.name)
        return () if headroom is None else headroom.kept

    def _start(self, alike: Sequence[Waiting], option: StartOption, start: Start, *, kept: Sequence[Chunk] = ()) -> int:
        """Start actions alike, unless a start of this very turn took what they need (a batch, a place, a resource).

        Return how many of them have started. ``kept``: places of this pool that they leave to others. In other pools
        nobody but their own policies reorders.
        """
        alike = [waiting for waiting in alike if waiting.group is not None]
        if not alike:
            return 0
        waiting, count = alike[0], len(alike)
        if self._placed is not None and start.chunk is not None and option.node:
            # It needs something else of a node as well: that of the chunk, if it may be there.
            assert waiting.group is not None
            option = self._selection.options[waiting.group].get(self._placed.node_of(start.chunk), option)
        room = self._state.cap_room(waiting, self._pool.kind)
        allowed = start.units if room is None else _unit_set(waiting.action).at_most(min(start.units, room))
        if allowed is None:
            return 0
        requests = []
        for pool, minimum in option.needs:
            if pool is self._pool:
                units, chunk, others = self._shaped(waiting, option, allowed, start, kept), start.chunk, kept
            else:
                units, chunk, others = minimum, None, self._kept(pool)
            request = PoolRequest(units, waiting.action.service, chunk, option.node, others, option.among)
            if not pool.accepts(request):
                return 0
            if count > 1:
                count = min(count, pool.free // units)
            requests.append((pool, request))
        if option.memory_bytes:
            count = min(count, self._state.nodes[option.node].free_bytes // option.memory_bytes)
        if not count:
            return 0
        self._dispatcher.start(alike[:count], option.node, requests, workers=start.workers)
        for pool, _ in requests:
            if pool is not self._pool and isinstance(pool, PlacedPool):  # it may have left others the place they need
                self._look_again(group for group in self._state.groups_at(pool) if group.live)
        return count

    def _shaped(self, waiting: Waiting, option: StartOption, units: int, start: Start, kept: Sequence[Chunk]) -> int:
        """Return the widest count up to ``units`` that has a place, if the pool has places and none was named."""
        if self._placed is None or start.chunk is not None:
            return units
        counts = [count for count in _unit_set(waiting.action) if count <= units]
        for count in reversed(counts):
            if self._pool.accepts(PoolRequest(count, node=option.node, kept=kept, among=option.among)):
                return count
        return counts[0]

    def _fault(self, error: BrokenPromise) -> str:
        """Say what the policy did, and who decides now."""
        state, pool = self._state, self._pool
        policy = state.policy(pool).name
        return f"policy {policy} failed on {pool.name} at {state.now_s:.6f}: {error}; fixed decides in its place"


def _alike(starts: Iterable[tuple[Start, Candidate]]) -> Iterator[tuple[Start, list[Candidate]]]:
    """Yield the starts in order, those in a row together that are alike: of one group, at its minimum.

    What is the same for all of these is looked up, checked and counted once.
    """
    together = False
    start: Start | None = None
    alike: list[Candidate] = []
    for next_, candidate in starts:
        if start is not None:
            same = next_.units == start.units and next_.workers == start.workers
            if together and same and candidate.option is alike[0].option:
                alike.append(candidate)
                continue
            yield start, alike
        start, alike = next_, [candidate]
        together = candidate.option.together and candidate.cap is None and start.units == candidate.choice.minimum
    if start is not None:
        yield start, alike


def _within_cap(start: Start, candidate: Candidate, cap: Headroom) -> Start:
    """Return a start with no more units than the cap of the action's task leaves beside those promised to others."""
    most = candidate.choice.at_most(candidate.choice.minimum + cap.free)
    assert most is not None, f"{candidate.waiting.id} was promised its minimum"
    return start if start.units <= most else start._replace(units=most)


def _unit_set(action: Action) -> UnitSet:
    units = action.units
    assert units is not None, f"{action.id} needs nothing"
    return units
