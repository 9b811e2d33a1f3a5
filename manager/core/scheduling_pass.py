"""One pass of the scheduler over what changed."""

from __future__ import annotations

import heapq
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import inf
from pathlib import Path

from manager.action import ANYWHERE, Action, Chunk, NodeChoice, UnitSet
from manager.core.queue import Key, QueueGroup, Signature, Waiting
from manager.core.state import Dispatcher, SchedulerState
from manager.resources.cores import PlacedPool
from manager.resources.nodes import Nodes
from manager.resources.pools import Headroom, Pool, PoolRequest
from manager.scheduler.policy import ChunkView, CrowdView, Decision, PoolView, PromptPolicy, Start, WaitingView
from manager.scheduler.rank import Drawn


class Changes:
    """Asks the queue, the pools, the nodes, the caps and the policies what may start now that could not before."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._rooms = state.cap_rooms()
        self._memory_waits_from: int | None = None
        #: The version of the resources at the last round.
        self._version = -1
        #: Groups to look at, whatever happens to their pools.
        self._groups: set[QueueGroup] = set()

    def look_again(self, groups: Iterable[QueueGroup]) -> None:
        """Have these groups looked at in the next round."""
        self._groups.update(groups)

    def count_arrivals(self) -> None:
        """Look at the groups that something was offered to.

        Each action counts once for each kind that it needs.
        """
        state = self._state
        arrived, state.queue.arrived = state.queue.arrived, {}
        for group, count in arrived.items():
            for kind in group.demand:
                state.executing.load(kind).arrivals.add(state.now_s, count)
            self._groups.add(group)

    def take(self) -> tuple[set[str], set[QueueGroup]]:
        """Return the names of the pools, and the groups, that the next round must look at."""
        state = self._state
        pools = state.resources.take_changed()
        if self._version != state.resources.version:
            self._version = state.resources.version
            self._look_everywhere(pools)
        forsaken, state.queue.forsaken = state.queue.forsaken, set()
        for group in forsaken:
            if state.spec.strict:  # it may have stood in the way of everything behind it
                self._look_everywhere(pools)
            else:
                pools.update(state.resources.names_on(group.signature.node))
                pools.update(pool.name for pool in state.opens(group))
        if state.capped or self._rooms:
            self._compare_caps(pools)
        self._compare_memory(pools)
        if state.wakes:
            for pool, wake_s in list(state.wakes.items()):
                if wake_s <= state.now_s:
                    del state.wakes[pool]
                    pools.add(pool)
        groups, self._groups = self._groups, set()
        return pools, groups

    def _compare_caps(self, pools: set[str]) -> None:
        """Look at the pools of which a task may hold more than before, and at groups whose cap has come to block them.

        What such a group had reserved may serve others.
        """
        before, self._rooms = self._rooms, self._state.cap_rooms()
        now = self._rooms
        if before == now:
            return
        for task, kind in before:
            if (task, kind) not in now or now[task, kind] > before[task, kind]:
                pools.update(pool.name for pool in self._state.open_pools(kind))
        for group in self._state.queue.groups():
            for kind, units in group.signature.demand:
                key = (group.signature.task, kind)
                if key in now and now[key] < units and (key not in before or units <= before[key]):
                    self._groups.add(group)

    def _look_everywhere(self, pools: set[str]) -> None:
        """Look at all pools in which anything may start."""
        pools.update(pool.name for kind in self._state.resources.kinds for pool in self._state.open_pools(kind))

    def _compare_memory(self, pools: set[str]) -> None:
        """Look at every place where memory has returned, or is no longer kept for a trajectory that waited first."""
        state = self._state
        nodes = state.nodes.take_changed()
        before, self._memory_waits_from = self._memory_waits_from, state.memory_waits_from
        for node in nodes:
            pools.update(state.resources.names_on(node))
        everywhere = before not in (None, state.memory_waits_from)
        if everywhere:
            self._look_everywhere(pools)
        if (nodes or everywhere) and (groups := state.queue.groups_of("")):
            self.look_again(group for group in groups if group.signature.memory_bytes)


# Actions that wait for one pool alone, and have no choice of units: there is nothing to decide about them.
#
# Most commands of a trajectory come to a node where nothing else waits, and most calls of a single node are alike. No
# count of units is to be found for such actions, and nobody whose reservation they could touch: a policy that is a
# `PromptPolicy` would start one that is alone, and of several as many as fit, in order, if it says so. So they are
# started without being weighed against others, and their pool has no turn.


def first_in_line(state: SchedulerState, pool: Pool, groups: Sequence[QueueGroup], *, only: bool) -> list[Waiting]:
    """Return the actions that may start in a pool at once; none if anything is to be decided there.

    ``groups`` are all whose actions the pool could serve; ``only``, whether nothing else can start, and nowhere else.
    What would have to be weighed: other actions, a second pool, a cap, a running action that could be resized, and
    memory that a trajectory waits for.
    """
    if len(groups) != 1 or not pool.node or state.spec.strict:
        return []
    group = groups[0]
    task, demand, memory_bytes, node, batch_service, child, placement = group.signature
    if (
        len(demand) != 1
        or batch_service
        or not (node or only)
        or group.keyed[None] != group.live
        or (memory_bytes and state.memory_waits_from is not None)
        or (not child and task in state.tasks and state.tasks[task].caps)
        or state.executing.can_resize(pool.name)
    ):
        return []
    policy = state.policy(pool)
    if not isinstance(policy, PromptPolicy) or (group.live > 1 and not policy.starts_in_order(group.longest_s)):
        return []
    place = state.nodes[pool.node]
    if not (place.keeps(placement) if node else place.is_right_for(placement)):
        return []
    count = pool.free // demand[0][1]
    if memory_bytes:
        count = min(count, place.free_bytes // memory_bytes)
    first = [waiting for _, _, waiting in islice(group.items(), count)]
    return [] if any(waiting.action.cost[pool.kind].elastic for waiting in first) else first


# Candidates: what could start now at its minimum, by reservation per resource (docs/SCHEDULING.md 1.1).
#
# The queue is walked in order of service. An action whose minimum fits everywhere becomes a candidate and takes it; one
# that does not reserves its minimum wherever it can, so that a later action starts only in capacity that no earlier
# waiting one could use. It holds back all that it needs, also what is free while something else is missing (cores
# behind an empty quota): whoever took these meanwhile would have to give them back at the very instant the quota
# returns, and durations are estimates; so no action starts later than under strict first come first served. A call that
# needs no core holds none back.
#
# What does not fit once never fits later in the walk, so from then on its group only reserves, and only while some
# other group could still take what it would reserve: the cost of a walk grows with the free units and the number of
# groups, not with the length of the queue.


@dataclass(slots=True, eq=False)
class StartOption:
    """One way to place a group's actions: a node and the pools there."""

    node: str
    #: The pool and the minimum of each resource of the cost.
    needs: tuple[tuple[Pool, int], ...]
    memory_bytes: int
    #: What is left of each pool, and of the node's memory (last, if any is needed), each with the minimum.
    headrooms: tuple[tuple[Headroom, int], ...]
    #: Without a node: those whose places are right for it; empty for all.
    among: frozenset[str] = frozenset()
    #: Whether several of the group can be started in one go: nobody's place or batch depends on who started before.
    together: bool = True

    def fits(self, beside: Headroom | None = None) -> bool:
        """Return whether the minimum of everything is left, what is left of the pool ``beside`` not counted."""
        for headroom, least in self.headrooms:
            if not headroom.fits(least, self.node, self.among) and headroom is not beside:
                return False
        return True

    def count(self) -> int:
        """Return how many times the minimum of everything is left, where units are interchangeable."""
        return min(headroom.free // least for headroom, least in self.headrooms)

    def take(self, times: int = 1) -> None:
        for headroom, least in self.headrooms:
            headroom.take(least * times, self.node, self.among)

    def reserve(self, *, memory: bool = True) -> None:
        missing = [headroom for headroom, least in self.headrooms if not headroom.fits(least, self.node, self.among)]
        for headroom, least in self.headrooms if memory else self.headrooms[:-1]:
            free = headroom.free
            headroom.reserve(least, self.node, self.among)
            if missing == [headroom]:
                headroom.awaited += free - headroom.free

    def compete(self, groups: int) -> None:
        """Count ``groups`` more (or fewer) that may take of what this option needs."""
        for headroom, _ in self.headrooms:
            headroom.rivals += groups

    @property
    def contended(self) -> bool:
        """Return whether something is left that it could reserve, and somebody could take."""
        return any(headroom.rivals > 0 and headroom.free > 0 for headroom, _ in self.headrooms)

    @property
    def shortage(self) -> tuple[int, int]:
        """Return how little is left, as negative numbers: what is least is where an unpinned action goes."""
        free = [headroom.free for headroom, _ in self.headrooms]
        memory_bytes = free.pop() if self.memory_bytes else 0
        return -min(free, default=0), -memory_bytes


class RoomiestFirst:
    """The options of a group, the one with most left first, of equals the first.

    During a walk what is left only shrinks: an option that does not fit never will, and one whose place in the heap is
    out of date belongs behind it.
    """

    def __init__(self, options: Collection[StartOption]) -> None:
        self._heap: list[tuple[tuple[int, int], int, StartOption]] = []
        if len(options) == 1:  # the first whatever is left of it
            self._heap = [((0, 0), 0, option) for option in options]
            return
        self._heap = [(option.shortage, number, option) for number, option in enumerate(options)]
        heapq.heapify(self._heap)

    def first(self, allowed: Callable[[StartOption], bool] | None = None) -> StartOption | None:
        """Return the first that fits and, if it is asked, is ``allowed``; None if there is none."""
        heap = self._heap
        passed_over = []
        found = None
        while heap and found is None:
            known, number, option = heap[0]
            if not option.fits():
                heapq.heappop(heap)
            elif len(heap) > 1 and known != (shortage := option.shortage):
                heapq.heapreplace(heap, (shortage, number, option))
            elif allowed is None or allowed(option):
                found = option
            else:
                passed_over.append(heapq.heappop(heap))
        for each in passed_over:
            heapq.heappush(heap, each)
        return found


@dataclass(slots=True)
class Candidate:
    """A waiting action that can start now, and where."""

    waiting: Waiting
    option: StartOption
    #: The pool whose policy chooses its units, and from which; empty and None for an action that needs nothing.
    pool: str
    units: UnitSet | None
    cap: Headroom | None

    @property
    def choice(self) -> UnitSet:
        """Return the units that the policy chooses from."""
        assert self.units is not None, f"{self.waiting.id} needs nothing"
        return self.units


@dataclass(slots=True)
class CandidateSelection:
    """The outcome of one walk."""

    candidates: list[Candidate] = field(default_factory=list)
    headrooms: dict[str, Headroom] = field(default_factory=dict)
    #: Every option that was looked at, by group and node.
    options: dict[QueueGroup, dict[str, StartOption]] = field(default_factory=dict)
    #: Groups held back by their task's cap.
    capped: set[QueueGroup] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Contender:
    """One group in a walk, with what its actions have in common."""

    group: QueueGroup
    #: Those that were not considered yet, in order of service.
    rest: Iterator[tuple[Key, int, Waiting]]
    options: Collection[StartOption]
    roomiest: RoomiestFirst
    #: What is left of the caps that hold for each, with what it takes of them.
    caps: Sequence[tuple[Headroom, int]]
    #: Whether nothing more of it can start.
    beaten: bool = False


class Selector:
    """One walk over some groups."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._resources = state.resources
        self._nodes = state.nodes
        #: What is left of (task, kind) caps.
        self._caps = {key: Headroom(room) for key, room in state.cap_rooms().items()}
        self._strict = state.spec.strict
        #: Whether a trajectory waits for memory: actions that came later get only what it could not use.
        self._memory_is_awaited = state.memory_waits_from is not None
        #: By kind, the nodes whose pools are open.
        self._open: dict[str, list[str]] = {}
        self._memory: dict[str, Headroom] = {}
        #: By node, what those later actions may still take.
        self._kept: dict[str, Headroom] = {}
        self._found = CandidateSelection()

    def walk(self, groups: Iterable[QueueGroup]) -> CandidateSelection:
        """Return the candidates in order of service."""
        heap: list[tuple[Key, int, Waiting, _Contender]] = []
        for contender in [self._contender(group) for group in groups]:
            if self._is_unrivalled(contender):
                self._take_all(contender)
                continue
            first = next(contender.rest, None)
            if first is not None:
                heap.append((*first, contender))
        heapq.heapify(heap)
        while heap:
            _, _, waiting, contender = heap[0]
            more = self._consider(waiting, contender)
            if self._strict and not more:
                break
            following = next(contender.rest, None) if more else None
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (*following, contender))
        return self._found

    def _contender(self, group: QueueGroup) -> _Contender:
        found = self._found.options[group] = self._options(group)
        options = found.values()
        for option in options:
            option.compete(1)
        return _Contender(group, group.items(), options, RoomiestFirst(options), self._caps_of(group))

    def _is_unrivalled(self, contender: _Contender) -> bool:
        """Return whether nobody else can take of what a group needs, so that its actions are weighed against none."""
        if len(contender.options) != 1 or contender.caps or self._strict:
            return False
        (option,) = contender.options
        if not option.needs or not option.together or (option.memory_bytes and self._memory_is_awaited):
            return False
        return all(headroom.rivals == 1 for headroom, _ in option.headrooms)

    def _take_all(self, contender: _Contender) -> None:
        """Take for as many of an unrivalled group as fit, and reserve for the next one."""
        (option,) = contender.options
        count = option.count()
        first = [waiting for _, _, waiting in islice(contender.rest, count)]
        option.take(len(first))
        self._found.candidates += [self._candidate(waiting, option) for waiting in first]
        if len(first) == count and (following := next(contender.rest, None)) is not None:
            self._give_up(contender)
            self._reserve(following[2], option)

    def _consider(self, waiting: Waiting, contender: _Contender) -> bool:
        """Take or reserve for one action; return whether its group has more to say."""
        caps, options = contender.caps, contender.options
        if caps and any(cap.free < units for cap, units in caps):
            for cap, units in caps:
                cap.reserve(units)
            self._found.capped.add(contender.group)
            self._give_up(contender)
            return False
        chosen = None if contender.beaten else self._choose(waiting, contender)
        if chosen is None:
            self._give_up(contender)
            for option in options:
                self._reserve(waiting, option)
            return not self._strict and any(option.contended for option in options)
        chosen.take()
        if chosen.memory_bytes and self._memory_is_awaited:
            self._kept_of(chosen.node).take(chosen.memory_bytes)
        for cap, units in caps:
            cap.take(units)
        self._found.candidates.append(self._candidate(waiting, chosen))
        return True

    def _give_up(self, contender: _Contender) -> None:
        """Note that nothing more of the group can start: headrooms only shrink."""
        if not contender.beaten:
            contender.beaten = True
            for option in contender.options:
                option.compete(-1)

    def _choose(self, waiting: Waiting, contender: _Contender) -> StartOption | None:
        if not self._is_late(waiting):
            return contender.roomiest.first()
        return contender.roomiest.first(
            lambda option: not option.memory_bytes or self._kept_of(option.node).fits(option.memory_bytes)
        )

    def _candidate(self, waiting: Waiting, option: StartOption) -> Candidate:
        action = waiting.action
        name = action.chooser
        cap = None if waiting.child or not self._caps else self._caps.get((action.task, name))
        for pool, _ in option.needs:
            if pool.kind == name:
                return Candidate(waiting, option, pool.name, action.cost[name], cap)
        return Candidate(waiting, option, "", None, cap)

    def _caps_of(self, group: QueueGroup) -> list[tuple[Headroom, int]]:
        """Return the caps that hold for the group; children run under what their parent was granted."""
        if group.signature.child or not self._caps:
            return []
        task = group.signature.task
        caps = ((self._caps.get((task, kind)), units) for kind, units in group.signature.demand)
        return [(cap, units) for cap, units in caps if cap is not None]

    def _options(self, group: QueueGroup) -> dict[str, StartOption]:
        signature, resources = group.signature, self._resources
        bound = signature.memory_bytes > 0 or resources.any_on_nodes(group.demand)
        placed = resources.any_placed(group.demand)
        names: Iterable[str] = (signature.node,)
        among: frozenset[str] = frozenset()
        if bound:
            names = self._nodes_for(signature)
        elif placed and signature.placement != ANYWHERE:
            among = self._nodes.with_devices_for(signature.placement)
            names = names if among else ()
        together = not (signature.batch_service or placed)
        found = {}
        for name in names:
            option = self._option(group, name, among, together)
            if option is not None:
                found[name] = option
        return found

    def _nodes_for(self, signature: Signature) -> list[str]:
        """Return the nodes on which actions that hold something of a node may start now."""
        nodes, placement = self._nodes, signature.placement
        if signature.node:
            return [signature.node] if nodes.may_go_on(placement, signature.node) else []
        names: Iterable[str] = nodes.names
        if len(signature.demand) == 1 and self._resources.on_nodes(kind := signature.demand[0][0]):
            # Where its only units are not to be had, there is nothing else that it could reserve.
            if kind not in self._open:
                self._open[kind] = [pool.node for pool in self._state.open_pools(kind)]
            names = self._open[kind]
        return [name for name in names if nodes.may_start(placement, name)]

    def _option(self, group: QueueGroup, node: str, among: frozenset[str], together: bool) -> StartOption | None:
        needs, headrooms = [], []
        for kind, units in group.signature.demand:
            pool = self._resources.find(kind, node)
            if pool is None:
                return None
            needs.append((pool, units))
            headrooms.append((self._headroom(pool), units))
        memory_bytes = group.signature.memory_bytes
        if memory_bytes:
            headrooms.append((self._memory_of(node), memory_bytes))
        return StartOption(node, tuple(needs), memory_bytes, tuple(headrooms), among, together)

    def _headroom(self, pool: Pool) -> Headroom:
        headroom = self._found.headrooms.get(pool.name)
        if headroom is None:
            headroom = self._found.headrooms[pool.name] = pool.headroom()
        return headroom

    def _memory_of(self, node: str) -> Headroom:
        headroom = self._memory.get(node)
        if headroom is None:
            headroom = self._memory[node] = Headroom(self._nodes[node].free_bytes)
        return headroom

    def _kept_of(self, node: str) -> Headroom:
        """Return what of the node's memory actions may take that came after the first trajectory that waits for it."""
        headroom = self._kept.get(node)
        if headroom is None:
            place = self._nodes[node]
            free_bytes = place.kept_bytes(self._state.memory_waits_bytes) - (place.held_bytes - place.pinned_bytes)
            headroom = self._kept[node] = Headroom(max(0, free_bytes))
        return headroom

    def _is_late(self, waiting: Waiting) -> bool:
        """Return whether an action came after a trajectory that waits for memory."""
        waits_from = self._state.memory_waits_from
        return waits_from is not None and waits_from < waiting.seq

    def _reserve(self, waiting: Waiting, option: StartOption) -> None:
        """Keep later actions from passing one that waits, but not in memory that it cannot have before a trajectory."""
        memory_bytes = option.memory_bytes
        if not memory_bytes or not self._memory_is_awaited:
            option.reserve()
            return
        kept = memory_bytes <= self._nodes[option.node].kept_bytes(self._state.memory_waits_bytes)
        option.reserve(memory=kept or not self._is_late(waiting))
        if kept:
            self._kept_of(option.node).reserve(memory_bytes)


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
            right = self._right[placement] = self._nodes.with_devices_for(placement)
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
            policy, now_s = self._state.policy(self._pool).name, self._state.now_s
            told = f"policy {policy} failed on {name} at {now_s:.6f}: {error}; fixed decides in its place"
            self._state.faults[name] = told
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
            backlog=sum([-(-group.live // self._nodes_of(group)) for group in self._groups]),
            eligible=self._show_eligible(),
            has_elastic=has_elastic,
            longest_s=inf if has_elastic else max([group.longest_s for group in self._groups], default=inf),
            rigid=Drawn(self._show_rigid) if by_choice else None,
            crowd=self._show_crowd() if by_choice and self._placed is None else None,
            turns=None if state.spec.strict else self._show_turns(),
            arrival_rate=state.arrival_rate(pool),
            utilisation=state.executing.load(pool.name).utilisation(now_s),
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

    def _nodes_of(self, group: QueueGroup) -> int:
        """Return how many pools like this one could serve a group's actions, which count for each in part."""
        return max(1, self._state.places_of(group)) if self._pool.node else 1

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
            elsewhere = len(candidate.option.needs) > 1 or self._state.places_of(group) > 1
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


#: Rounds of one pass: units that a policy frees by resizing, or gives to somebody wider, are offered again this often.
_ROUNDS = 4


class SchedulingPass:
    """Runs the passes."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.dispatcher = Dispatcher(state)
        self._changes = Changes(state)

    def run(self) -> None:
        """Start what can start and resize what the policies want, until nothing changes (bounded)."""
        state = self._state
        if state.queue.arrived:
            self._changes.count_arrivals()
        for _ in range(_ROUNDS):
            # Where nothing waits and nobody can be resized, nothing is to be decided: so it is after most ends under
            # light load, and while a thousand nodes join. What has changed is left to the pass that has to decide.
            if not (state.queue or state.wakes or state.executing.any_resizable):
                break
            pools, groups = self._changes.take()
            if not (pools or groups) or not (state.queue or any(map(state.executing.can_resize, pools))):
                break
            if not self._round(pools, groups):
                break

    def _round(self, changed: set[str], changed_groups: set[QueueGroup]) -> bool:
        """Start and resize once; return whether anybody decided, so that others may start now."""
        state = self._state
        can_resize = state.executing.can_resize
        groups_of, groups = self._closure(changed, changed_groups)
        pools = state.resources.in_order([name for name, here in groups_of.items() if here or can_resize(name)])
        if not pools and not groups:
            return False
        lines: dict[str, list[Waiting]] = {}
        for pool in pools:
            line = first_in_line(state, pool, groups_of[pool.name], only=len(pools) == len(groups) == 1)
            if line:
                lines[pool.name] = line
        sure = {line[0].group for line in lines.values()}
        selection = self.select([group for group in groups if group not in sure])
        by_pool: dict[str, list[Candidate]] = {}
        for candidate in selection.candidates:
            by_pool.setdefault(candidate.pool, []).append(candidate)
        for candidate in by_pool.pop("", []):
            self.dispatcher.start([candidate.waiting], candidate.option.node, ())
        for pool in pools:
            if pool.name in lines:
                line = lines[pool.name]
                state.wakes.pop(pool.name, None)
                request = PoolRequest(line[0].action.demand[0][1], line[0].action.service, node=pool.node)
                self.dispatcher.start(line, pool.node, [(pool, request)])
                continue
            candidates, here = by_pool.get(pool.name, []), groups_of[pool.name]
            PoolDispatch(state, self.dispatcher, pool, here, candidates, selection, self._changes.look_again).take()
        return len(lines) < len(pools) or bool(selection.candidates)

    def select(self, groups: Sequence[QueueGroup]) -> CandidateSelection:
        """Return what could start now of these groups, by reservation."""
        return Selector(self._state).walk(groups) if groups else CandidateSelection()

    def _closure(
        self, changed: Iterable[str], changed_groups: Iterable[QueueGroup]
    ) -> tuple[dict[str, list[QueueGroup]], list[QueueGroup]]:
        """Return the open pools that compete for waiting actions with those that changed, and these actions' groups.

        By the name of each pool those that it could serve.
        """
        state = self._state
        chosen: dict[QueueGroup, None] = {}
        groups_of: dict[str, list[QueueGroup]] = {}
        beyond = [pool for pool in map(state.resources.get, changed) if pool is not None]

        def choose(groups: Iterable[QueueGroup]) -> None:
            for group in groups:
                if group in chosen or (state.paused and not group.signature.child):
                    continue
                opens = state.opens(group)
                if opens or not group.demand or state.spec.strict or state.capped:  # else nothing of it can start
                    chosen[group] = None
                    beyond.extend(opens)

        def spread() -> None:
            while beyond:
                pool = beyond.pop()
                if pool.name not in groups_of:
                    here = [group for group in state.groups_at(pool) if state.is_right(group, pool)]
                    choose(here)
                    groups_of[pool.name] = [group for group in here if group in chosen]

        choose(state.queue.groups() if state.spec.strict else [group for group in changed_groups if group.live])
        spread()
        if state.capped and any(not group.signature.node for group in chosen):
            # What waits for full pools takes part all the same: it may keep a cap from those behind it.
            kinds = {kind for spec in state.capped.values() for kind in spec.caps}
            groups = (group for kind in kinds for group in state.queue.groups_of(kind))
            choose(group for group in groups if group.signature.task in state.capped)
            spread()
        return groups_of, list(chosen)
