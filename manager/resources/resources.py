"""R: every pool by name, by kind and by node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from manager.config import NodeSpec
from manager.resources.cpu import CpuPool
from manager.resources.declared import DeclaredPool, ResourceSpec
from manager.resources.placed import PlacedPool
from manager.resources.pool import Pool, TimedPool


class Resources:
    """R, the vector of all pools."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools: dict[str, Pool] = {}
        #: Counts the pools as they came.
        self._numbers: dict[str, int] = {}
        self._count = 0
        #: Kinds of which an action takes all units on one node.
        self._node_kinds: dict[str, dict[str, Pool]] = {}
        #: Pools whose units return with time, and pools of chunks.
        self.timed: tuple[TimedPool, ...] = ()
        self.placed: tuple[PlacedPool, ...] = ()
        self._changed: set[str] = set()
        #: Counts the pools that came and went: what was derived from an earlier version is out of date.
        self.version = 0
        for pool in pools:
            self.add(pool)

    def add(self, pool: Pool) -> None:
        assert pool.name not in self._pools, f"two pools are named {pool.name}"
        self._pools[pool.name] = pool
        self._count += 1
        self._numbers[pool.name] = self._count
        pool.announce_to(self._changed)
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

    def close(self, node: str, *, finishing: bool = False) -> None:
        """Give no units of a node any more, or its own only to what is bound to it; those that are held stay so."""
        self._mark(node, closed=not finishing)
        for pool in self.placed:
            pool.close(node)

    def open(self, node: str) -> None:
        """Give a closed node's units again."""
        self._mark(node, closed=False)
        for pool in self.placed:
            pool.open(node)

    def _mark(self, node: str, *, closed: bool) -> None:
        for name in self.names_on(node):
            self._pools[name].closed = closed
        self.note_membership()

    def take_changed(self) -> set[str]:
        """Return the names of the pools that announced a change since the last call."""
        if not self._changed:
            return set()
        changed = self._changed & self._pools.keys()
        self._changed.clear()
        return changed

    def note_membership(self) -> None:
        """Announce every pool: what waits has others to choose from."""
        self.version += 1
        self._changed.update(self._pools)

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
        return sorted(known, key=lambda pool: self._numbers[pool.name])

    def check(self) -> None:
        for pool in self:
            pool.check()
