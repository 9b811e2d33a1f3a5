"""Resources over several nodes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from manager.action import ANYWHERE, Demand, NodeChoice
from manager.config import NodeSpec
from manager.resources.cores import CpuPool, PlacedPool
from manager.resources.pools import DeclaredPool, Pool, ResourceSpec, TimedPool


class Resources:
    """R, the vector of all pools."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools: dict[str, Pool] = {}
        #: All kinds that there were.
        self.kinds: dict[str, None] = {}
        #: Counts the pools as they came.
        self._numbers: dict[str, int] = {}
        self._count = 0
        #: Kinds of which an action takes all units on one node.
        self._node_kinds: dict[str, dict[str, Pool]] = {}
        #: Pools whose units return with time, and pools of chunks.
        self.timed: tuple[TimedPool, ...] = ()
        self.placed: tuple[PlacedPool, ...] = ()
        self._changed: set[str] = set()
        #: The free units of each node's pool when it was last looked at, since when it may have less, and by kind and
        #: these units the pools that had any.
        self._free: defaultdict[str, int] = defaultdict(int)
        self._by_free: defaultdict[str, defaultdict[int, dict[str, Pool]]] = defaultdict(lambda: defaultdict(dict))
        #: Counts the changes of membership: what was derived from an earlier version is out of date.
        self.version = 0
        for pool in pools:
            self.add(pool)

    def add(self, pool: Pool) -> None:
        assert pool.name not in self._pools, f"two pools are named {pool.name}"
        self._pools[pool.name] = pool
        self._count += 1
        self._numbers[pool.name] = self._count
        self.kinds[pool.kind] = None
        pool.announce_to(self._changed)
        self._changed.add(pool.name)
        if isinstance(pool, TimedPool):
            self.timed += (pool,)
        if isinstance(pool, PlacedPool):
            self.placed += (pool,)
        if pool.node:
            self._node_kinds.setdefault(pool.kind, {})[pool.node] = pool
        self.note_membership()

    def remove(self, name: str) -> None:
        pool = self._pools.pop(name)
        del self._numbers[name]
        self.timed = tuple(one for one in self.timed if one is not pool)
        self.placed = tuple(one for one in self.placed if one is not pool)
        if pool.node:
            del self._node_kinds[pool.kind][pool.node]
            self._by_free[pool.kind][self._free.pop(name, 0)].pop(name, None)
        self.note_membership()

    def declare(self, name: str, spec: ResourceSpec) -> None:
        """Add a declared resource, or give the one that is there its new bounds; one of another kind stays."""
        pool = self._pools.get(name)
        if pool is None:
            self.add(spec.make_pool(name))
        elif isinstance(pool, DeclaredPool) and isinstance(spec, type(pool.spec)):
            pool.reconfigure(spec)

    def join(self, node: NodeSpec) -> None:
        """Take in a node's units: those of its own pools, and its part of the pools that span nodes."""
        if node.cores:
            self.add(CpuPool(node))
        for pool in self.placed:
            pool.join(node)

    def refit(self, node: NodeSpec, *, closed: bool) -> None:
        """Take up other places of a node for those that it had, of which nothing is held; ``closed`` ones stay so."""
        for pool in self.placed:
            pool.leave(node.name)
            pool.join(node)
            if closed:
                pool.close(node.name)

    def leave(self, node: str) -> None:
        """Forget a node's units, of which nothing is held any more."""
        for name in [pool.name for pool in self if pool.node == node]:
            self.remove(name)
        for pool in self.placed:
            pool.leave(node)

    def close(self, node: str, *, finishing: bool, devices: bool) -> None:
        """Give no units of a node any more, or its own only to what is bound to it; those that are held stay so.

        ``devices``: those are given on.
        """
        self._mark(node, closed=not finishing)
        for pool in self.placed:
            (pool.open if devices else pool.close)(node)

    def open(self, node: str) -> None:
        """Give a closed node's units again."""
        self._mark(node, closed=False)
        for pool in self.placed:
            pool.open(node)

    def _mark(self, node: str, *, closed: bool) -> None:
        for name in self.names_on(node):
            self._pools[name].closed = closed
            self._changed.add(name)
        self.note_membership()

    def take_changed(self) -> set[str]:
        """Return the names of the pools that announced a change since the last call."""
        if not self._changed:
            return set()
        changed = self._changed & self._pools.keys()
        self._changed.clear()
        for name in changed:
            self._look_at(self._pools[name])
        return changed

    def with_free(self, kind: str, least: int) -> list[Pool]:
        """Return the pools of the nodes that have ``least`` units of ``kind`` free, one at least.

        Whether more is free is known as of the last call of `take_changed`.
        """
        pools = [pool for free, alike in self._by_free[kind].items() if free >= least for pool in alike.values()]
        return [pool for pool in pools if self._look_at(pool) >= least]

    def _look_at(self, pool: Pool) -> int:
        """Return the free units of a pool, and note them if it is one of a node's."""
        free = pool.free
        before = self._free[pool.name]
        if free != before and pool.node:
            self._free[pool.name] = free
            by_free = self._by_free[pool.kind]
            by_free[before].pop(pool.name, None)
            if free:
                by_free[free][pool.name] = pool
        return free

    def note_membership(self) -> None:
        """Note that what waits has other pools to choose from."""
        self.version += 1

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __getitem__(self, name: str) -> Pool:
        return self._pools[name]

    def get(self, name: str) -> Pool | None:
        return self._pools.get(name)

    def on_nodes(self, kind: str) -> bool:
        """Whether ``kind`` is bound to the node that an action is placed on."""
        return kind in self._node_kinds

    def any_on_nodes(self, kinds: Iterable[str]) -> bool:
        """Whether any of these kinds is."""
        return not self._node_kinds.keys().isdisjoint(kinds)

    def any_placed(self, kinds: Collection[str]) -> bool:
        """Whether any of these kinds is one of places, which lie on nodes."""
        return bool(self.placed) and any(pool.kind in kinds for pool in self.placed)

    def find(self, kind: str, node: str) -> Pool | None:
        """The pool that serves ``kind`` for an action placed on ``node``; None where there is none (any more)."""
        by_node = self._node_kinds.get(kind)
        return self._pools.get(kind) if by_node is None else by_node.get(node)

    def of_kind(self, kind: str) -> tuple[Pool, ...]:
        by_node = self._node_kinds.get(kind)
        if by_node is not None:
            return tuple(by_node.values())
        return (self._pools[kind],) if kind in self._pools else ()

    def serving(self, kind: str, node: str) -> tuple[Pool, ...]:
        """Return the pools that could serve ``kind`` for an action bound to ``node``, or to none if it is empty."""
        if not node:
            return self.of_kind(kind)
        pool = self.find(kind, node)
        return () if pool is None else (pool,)

    def names_on(self, node: str) -> Iterable[str]:
        """Return the names of the pools whose units are those of one node."""
        return [by_node[node].name for by_node in self._node_kinds.values() if node in by_node]

    def in_order(self, names: Iterable[str]) -> list[Pool]:
        """Return those of these pools that are there, in the order in which they came."""
        known = [self._pools[name] for name in names if name in self._pools]
        return known if len(known) < 2 else sorted(known, key=lambda pool: self._numbers[pool.name])

    def check(self) -> None:
        for pool in self:
            pool.check()
            known = not pool.node or pool.free <= self._free[pool.name] or pool.name in self._changed
            assert known, f"{pool.name} has {pool.free} units free, and {self._free[pool.name]} are known"


#: Demands of which the able nodes are remembered.
_DEMANDS_MAX = 1024
#: What nodes are alike in, but for their names: cores, devices, bytes, labels, and what they are able to run.
_Shape = tuple[int, int, int, frozenset[tuple[str, str]], frozenset[str] | None]


@dataclass(slots=True)
class Node:
    """One living node and who holds how much of its memory."""

    spec: NodeSpec
    bound_bytes: int
    #: Where it notes its name whenever memory returns.
    changed: set[str]
    #: The nodes of its shape, in which its place changes with what it holds.
    alike: AlikeNodes
    #: Counts the nodes as they came: of two that are equally good the first is chosen.
    number: int
    #: What of it trajectories leave to actions of none.
    reserve_bytes: int = 0
    held_bytes: int = 0
    #: What of it trajectories hold.
    pinned_bytes: int = 0
    #: Bytes by holder: a trajectory, or an action without one.
    holders: dict[str, int] = field(default_factory=dict)
    #: Those that are trajectories.
    pinned: set[str] = field(default_factory=set)
    #: Why nothing is placed here; None while it is open.
    closed: str | None = None
    #: Whether, though it is closed, the trajectories that live here go on, and what needs devices alone starts.
    finishing: bool = False
    devices: bool = False

    @property
    def free_bytes(self) -> int:
        return self.bound_bytes - self.held_bytes

    @property
    def order(self) -> tuple[int, int, int]:
        """Return its place among nodes of its shape: the least memory held, the fewest holders, the first to come."""
        return self.held_bytes, len(self.holders), self.number

    def is_right_for(self, placement: NodeChoice) -> bool:
        """Return whether an action of this placement may be placed here now."""
        return self.closed is None and self.spec.suits(placement)

    def keeps(self, placement: NodeChoice) -> bool:
        """Return whether an action of this placement that belongs here may start now."""
        return (self.closed is None or self.finishing) and self.spec.suits(placement)

    def admits(self, memory_bytes: int) -> bool:
        """Whether a new trajectory may hold so much: the reserve is left, unless it is larger and the first here."""
        if not memory_bytes:
            return True
        pinned_bytes = self.pinned_bytes + memory_bytes
        within = not self.pinned_bytes or pinned_bytes <= self.bound_bytes - self.reserve_bytes
        return within and memory_bytes <= self.bound_bytes - self.held_bytes

    def kept_bytes(self, wanted_bytes: int) -> int:
        """What all actions of no trajectory may hold together while a trajectory waits for ``wanted_bytes``.

        It is what the trajectory could not use: the reserve, or less if the trajectory needs some of that.
        """
        beside_bytes = self.bound_bytes - wanted_bytes
        return self.reserve_bytes if beside_bytes < 0 else min(self.reserve_bytes, beside_bytes)

    def hold(self, holder: str, memory_bytes: int, *, trajectory: bool = False) -> None:
        assert holder not in self.holders, f"{self.spec.name}: {holder} holds memory already"
        held_bytes = self.held_bytes + memory_bytes
        assert held_bytes <= self.bound_bytes, f"{self.spec.name}: {memory_bytes} bytes of {self.free_bytes} wanted"
        before = self.order
        self.holders[holder] = memory_bytes
        self.held_bytes = held_bytes
        self.alike.move(before, self.order)
        if trajectory:
            self.pinned.add(holder)
            self.pinned_bytes += memory_bytes

    def release(self, holder: str) -> None:
        before = self.order
        memory_bytes = self.holders.pop(holder)
        self.held_bytes -= memory_bytes
        self.alike.move(before, self.order)
        if holder in self.pinned:
            self.pinned.remove(holder)
            self.pinned_bytes -= memory_bytes
        self.changed.add(self.spec.name)


class AlikeNodes:
    """Nodes of one shape, the one with the least memory held first: what one could serve, empty, each could."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int, int]] = []
        self._nodes: dict[int, Node] = {}

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, node: Node) -> None:
        insort(self._order, node.order)
        self._nodes[node.number] = node

    def remove(self, node: Node) -> None:
        del self._order[bisect_left(self._order, node.order)], self._nodes[node.number]

    def move(self, before: tuple[int, int, int], now: tuple[int, int, int]) -> None:
        """Give a node the place that it has now."""
        del self._order[bisect_left(self._order, before)]
        insort(self._order, now)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def any(self) -> Node:
        """Return one of them, whichever."""
        return next(iter(self._nodes.values()))

    def least_held(self, memory_bytes: int) -> Node | None:
        """Return the first that admits a trajectory of so many bytes."""
        for _, _, number in self._order:
            node = self._nodes[number]
            if node.admits(memory_bytes):
                return node
            if node.free_bytes < memory_bytes:
                return None  # and those behind it have less
        return None

    def check(self) -> None:
        assert self._order == sorted(node.order for node in self._nodes.values()), f"out of order: {self._order}"


class Nodes:
    """All living nodes by name."""

    def __init__(self, specs: Iterable[NodeSpec], resources: Resources, *, reserve: float = 0.0) -> None:
        """``reserve`` is the fraction of each node's memory that trajectories leave to actions of none."""
        self._changed: set[str] = set()
        self._reserve = reserve
        self._count = 0
        self._shapes: dict[_Shape, AlikeNodes] = {}
        self._nodes = {spec.name: self._node(spec) for spec in specs}
        self._resources = resources
        #: Nodes that could serve a demand, were they empty, and the demand that was asked for last: bursts are alike.
        self._able: dict[tuple[Demand, NodeChoice], list[AlikeNodes]] = {}
        self._asked: tuple[Demand, NodeChoice, list[AlikeNodes]] | None = None

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def get(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def join(self, spec: NodeSpec) -> None:
        assert spec.name not in self._nodes, f"node {spec.name} is there already"
        self._nodes[spec.name] = self._node(spec)
        self._changed.add(spec.name)
        self._forget_able()

    def leave(self, name: str) -> None:
        self._set_apart(self._nodes.pop(name))

    def close(self, name: str, why: str, *, finishing: bool, devices: bool) -> None:
        """Place nothing on a node any more."""
        node = self._nodes[name]
        if node.closed is None:
            self._set_apart(node)
            node.alike = AlikeNodes()
            node.alike.add(node)
        node.closed, node.finishing, node.devices = why, finishing, devices
        self._changed.add(name)

    def open(self, name: str) -> None:
        """Place on a closed node again."""
        node = self._nodes[name]
        if node.closed is not None:
            node.closed, node.finishing, node.devices = None, False, False
            self._set_among_alike(node)

    def describe(self, spec: NodeSpec) -> None:
        """Take up what a node is able to run by now, its labels and its devices; its cores and memory stay."""
        node = self._nodes[spec.name]
        described = replace(spec, numa=node.spec.numa, memory_bytes=node.spec.memory_bytes)
        if node.closed is not None:
            node.spec = described
            return
        self._set_apart(node)
        node.spec = described
        self._set_among_alike(node)

    def may_start(self, placement: NodeChoice, name: str) -> bool:
        """Return whether an action of this placement may start on a node: on one that is there, open, and right."""
        node = self._nodes.get(name)
        return node is not None and node.is_right_for(placement)

    def may_go_on(self, placement: NodeChoice, name: str) -> bool:
        """Return whether an action that is bound to a node by its trajectory may start there."""
        node = self._nodes.get(name)
        return node is not None and node.keeps(placement)

    def right_for(self, placement: NodeChoice) -> frozenset[str]:
        """Return the nodes on which an action of this placement may start."""
        return frozenset(node.spec.name for node in self if node.is_right_for(placement))

    def with_devices_for(self, placement: NodeChoice) -> frozenset[str]:
        """Return the nodes on whose devices an action of this placement, which needs nothing else there, may start."""
        return frozenset(
            node.spec.name for node in self if (node.closed is None or node.devices) and node.spec.suits(placement)
        )

    def _set_apart(self, node: Node) -> None:
        """Take a node from those of its shape."""
        node.alike.remove(node)
        if node.closed is None and not node.alike:
            del self._shapes[_shape(node.spec)]
        self._forget_able()

    def _set_among_alike(self, node: Node) -> None:
        node.alike = self._shapes.setdefault(_shape(node.spec), AlikeNodes())
        node.alike.add(node)
        self._forget_able()
        self._changed.add(node.spec.name)

    def take_changed(self) -> set[str]:
        """Return the names of the nodes that came, or on which memory returned, since the last call."""
        if not self._changed:
            return set()
        changed = self._changed & self._nodes.keys()
        self._changed.clear()
        return changed

    def choose(self, demand: Demand, memory_bytes: int, placement: NodeChoice = ANYWHERE) -> Node | None:
        """The node for a new trajectory: enough units in all, enough memory now, memory left most balanced.

        Of the demand only what is bound to nodes counts. Equal memory is broken by the fewest trajectories. None where
        no node has the memory now.
        """
        hosts = self._hosts(demand, placement)
        if len(hosts) == 1:
            return hosts[0].least_held(memory_bytes)
        best: Node | None = None
        least = (inf, 0, 0)
        for alike in hosts:
            node = alike.least_held(memory_bytes)
            if node is None:
                continue
            held_bytes = node.held_bytes + memory_bytes
            place = (held_bytes / node.bound_bytes if held_bytes else 0.0, *node.order[1:])
            if best is None or place < least:
                best, least = node, place
        return best

    def ever(self, demand: Demand, memory_bytes: int, placement: NodeChoice = ANYWHERE) -> bool:
        """Whether some open node, empty, could take it."""
        return any(memory_bytes <= alike.any().spec.memory_bytes for alike in self._hosts(demand, placement))

    def hosts_of(self, memory_bytes: int, placement: NodeChoice = ANYWHERE) -> list[str]:
        """Return the nodes, open or closed, that could hold so much for a trajectory, were nothing held."""
        return [
            node.spec.name for node in self if memory_bytes <= node.spec.memory_bytes and node.spec.suits(placement)
        ]

    def check(self) -> None:
        for alike in self._shapes.values():
            alike.check()
            assert all(each.closed is None for each in alike), "a closed node is offered"
        for node in self._nodes.values():
            held = sum(node.holders.values())
            assert held == node.held_bytes <= node.spec.memory_bytes, f"{node.spec.name}: {node.holders}"
            pinned = sum(node.holders[name] for name in node.pinned)
            assert pinned == node.pinned_bytes, f"{node.spec.name}: {pinned} bytes of {node.pinned_bytes}"

    def _node(self, spec: NodeSpec) -> Node:
        alike = self._shapes.setdefault(_shape(spec), AlikeNodes())
        self._count += 1
        node = Node(spec, spec.memory_bytes, self._changed, alike, self._count, int(spec.memory_bytes * self._reserve))
        alike.add(node)
        return node

    def _hosts(self, demand: Demand, placement: NodeChoice) -> list[AlikeNodes]:
        """The open nodes that could serve what a demand takes of nodes, were nothing held."""
        cached = self._asked
        if cached is not None and cached[0] == demand and cached[1] == placement:
            return cached[2]
        hosts = self._able.get((demand, placement))
        if hosts is None:
            if len(self._able) >= _DEMANDS_MAX:
                self._able.clear()
            hosts = self._able[demand, placement] = [
                alike
                for alike in self._shapes.values()
                if alike.any().spec.suits(placement) and self._could_serve(alike.any().spec.name, demand)
            ]
        self._asked = demand, placement, hosts
        return hosts

    def _forget_able(self) -> None:
        """Nodes came, went, or are able to do something else."""
        self._able.clear()
        self._asked = None

    def _could_serve(self, name: str, demand: Demand) -> bool:
        for kind, units in demand:
            if self._resources.on_nodes(kind):
                pool = self._resources.find(kind, name)
                if pool is None or not pool.admits(units):
                    return False
        return True


def _shape(spec: NodeSpec) -> _Shape:
    return spec.cores, spec.devices, spec.memory_bytes, frozenset(spec.labels.items()), spec.able
