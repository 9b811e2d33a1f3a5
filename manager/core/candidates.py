"""Candidates: what could start now at its minimum, by reservation per resource (docs/SCHEDULING.md 1.1).

The queue is walked in order of service. An action whose minimum fits everywhere becomes a candidate and takes it; one
that does not reserves its minimum wherever it can, so that a later action starts only in capacity that no earlier
waiting one could use. It holds back all that it needs, also what is free while something else is missing (cores
behind an empty quota): whoever took these meanwhile would have to give them back at the very instant the quota
returns, and durations are estimates; so no action starts later than under strict first come first served. A call that
needs no core holds none back.

What does not fit once never fits later in the walk, so from then on its group only reserves,
and only while some other group could still take what it would reserve: the cost of a walk grows with the free units
and the number of groups, not with the length of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from manager.action import ANYWHERE, UnitSet
from manager.core.waiting.queue import Key, QueueGroup, Signature, Waiting
from manager.resources.nodes import Nodes
from manager.resources.pool import Headroom, Pool
from manager.resources.resources import Resources


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

    def __init__(
        self,
        resources: Resources,
        nodes: Nodes,
        caps: Mapping[tuple[str, str], Headroom],
        *,
        memory_waits_from: int | None,
        memory_waits_bytes: int,
        strict: bool,
    ) -> None:
        self._resources = resources
        self._nodes = nodes
        #: What is left of (task, kind) caps.
        self._caps = caps
        #: Submission of the first trajectory that waits for memory, and what it needs: later actions get only what
        #: it could not use.
        self._memory_waits_from = memory_waits_from
        self._memory_waits_bytes = memory_waits_bytes
        self._strict = strict
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
        if not option.needs or not option.together or (option.memory_bytes and self._memory_waits_from is not None):
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
        if chosen.memory_bytes and self._memory_waits_from is not None:
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
        if self._is_late(waiting):
            return contender.roomiest.first(lambda option: not self._exceeds_kept(option))
        return contender.roomiest.first()

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
            among = self._nodes.right_for(signature.placement)
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
        return [name for name in nodes.names if nodes.may_start(placement, name)]

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
            free_bytes = place.kept_bytes(self._memory_waits_bytes) - (place.held_bytes - place.pinned_bytes)
            headroom = self._kept[node] = Headroom(max(0, free_bytes))
        return headroom

    def _exceeds_kept(self, option: StartOption) -> bool:
        return option.memory_bytes > 0 and not self._kept_of(option.node).fits(option.memory_bytes)

    def _is_late(self, waiting: Waiting) -> bool:
        """Return whether an action came after a trajectory that waits for memory."""
        return self._memory_waits_from is not None and self._memory_waits_from < waiting.seq

    def _reserve(self, waiting: Waiting, option: StartOption) -> None:
        """Keep later actions from passing one that waits, but not in memory that it cannot have before a trajectory."""
        memory_bytes = option.memory_bytes
        if not memory_bytes or self._memory_waits_from is None:
            option.reserve()
            return
        kept = memory_bytes <= self._nodes[option.node].kept_bytes(self._memory_waits_bytes)
        option.reserve(memory=kept or not self._is_late(waiting))
        if kept:
            self._kept_of(option.node).reserve(memory_bytes)
