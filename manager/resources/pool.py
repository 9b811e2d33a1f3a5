"""The pool: one kind of unit in one place, what of it is held, and by whom; and R, the vector of all pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from manager.config import NodeSpec
from manager.lease import Grant
from manager.scheduler.policy import ChunkView


class Headroom:
    """What of a pool is neither held nor promised, during one scheduling pass.

    Candidates `take` in order; an action that cannot start reserves, so that no later one starts in its place.
    """

    __slots__ = ("free", "rivals")

    def __init__(self, free: int) -> None:
        self.free = free
        #: Groups of waiting actions that may still take of it.
        self.rivals = 0

    def fits(self, units: int, node: str = "") -> bool:
        """Whether ``units`` can be taken together, on ``node`` where one is named."""
        return units <= self.free

    def take(self, units: int, node: str = "") -> None:
        """Promise units that fit."""
        self.free -= units

    def reserve(self, units: int, node: str = "") -> None:
        """Hold back up to ``units``, whatever there is of them."""
        self.free = max(0, self.free - units)


class PoolRequest(NamedTuple):
    """What an action wants of a pool at its start."""

    holder: str
    units: int
    service: str | None = None
    #: The chunk that the policy chose, in the pool's indices.
    chunk: tuple[int, int] | None = None
    #: The node it must be on, for actions that also hold something else of a node.
    node: str = ""


class Replica(NamedTuple):
    """A copy of a service in use that is to be made in free memory of idle places."""

    service: str
    node: str
    #: (start, size), counted on the node.
    chunk: tuple[int, int]
    #: The same in the pool's indices.
    place: tuple[int, int]


class Pool(ABC):
    """One pool. ``acquire`` and ``release`` come in pairs, by the id of the holder."""

    #: Whether a waiting parent's units may serve its children meanwhile.
    lendable = False
    #: Whether units are consumed at the start and return with time, not with their action.
    timed = False
    #: Whether units are not interchangeable: chunks of devices.
    has_places = False
    #: What the account of its use counts, with its unit.
    measure = "slot_s"

    def __init__(self, name: str, kind: str, node: str = "") -> None:
        self.name = name
        self.kind = kind
        #: The node whose units these are; empty where the pool belongs to none, or spans several.
        self.node = node
        self._held: dict[str, int] = {}
        self._changed: set[str] = set()

    def announce_to(self, changed: set[str]) -> None:
        """Add the pool's name to ``changed`` from now on whenever more of it may start than before."""
        self._changed = changed

    def _note_change(self) -> None:
        self._changed.add(self.name)

    @property
    @abstractmethod
    def total(self) -> int:
        """Units when nothing is held."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Units that can be acquired now."""

    @abstractmethod
    def acquire(self, ask: PoolRequest, now_s: float) -> Grant:
        """Give ``ask.units`` to a new holder; they must fit."""

    def resume(self, ask: PoolRequest, started_s: float, now_s: float) -> Grant:
        """Give ``ask.units`` to a holder that was started earlier, under another core; they must fit."""
        return self.acquire(ask, now_s)

    @abstractmethod
    def release(self, holder: str, now_s: float) -> None:
        """Take back all that ``holder`` holds."""

    def headroom(self) -> Headroom:
        return Headroom(self.free)

    def accepts(self, ask: PoolRequest) -> bool:
        """Whether `acquire` would succeed now."""
        return ask.units <= self.free

    def advance(self, now_s: float) -> None:  # noqa: B027 - only timed pools have something to do
        """Let what returns with time return."""

    def next_return_s(self) -> float | None:
        """The instant at which a unit returns by itself; None where units return with their action only."""
        return None

    def resize(self, holder: str, units: int) -> Grant:
        """Change what a holder holds, keeping as much of it as possible."""
        raise AssertionError(f"{self.name}: units of a running action cannot change")

    def bequeath(self, holder: str, heir: str, grant: Grant) -> None:
        """End a loan whose lender ended first: the heir keeps ``grant``, the rest is released."""
        raise AssertionError(f"{self.name}: units cannot be lent")

    def admits(self, units: int) -> bool:
        """Whether ``units`` could ever be granted, were nothing else held."""
        return units <= self.total

    def join(self, node: NodeSpec) -> None:  # noqa: B027 - only pools that span nodes
        """A node has come; pools that span nodes take its units in."""

    def leave(self, node: str) -> None:  # noqa: B027 - only pools that span nodes
        """A node is gone, and nothing of it is held any more."""

    def report(self, node: str, copies: Iterable[tuple[str, int, int]]) -> None:  # noqa: B027 - only pools that span nodes
        """What a node's devices hold, as (service, start, size)."""

    def restore_s(self, service: str, units: int) -> float:
        """Seconds to make a service resident on ``units``."""
        return 0.0

    @property
    def replicas(self) -> Mapping[str, int]:
        """How copies of services have fared, where the pool has places."""
        return {}

    def replicate(self, now_s: float) -> Iterable[Replica]:
        """Count on copies of services in use in free memory of idle places; nothing goes for them."""
        return ()

    def replicated(self, replica: Replica, done: bool) -> None:
        """What `replicate` promised has arrived, or never will."""
        raise AssertionError(f"{self.name}: nothing is replicated")

    def chunk_of(self, holder: str) -> tuple[int, int] | None:
        """The place of a holder's units, where the pool has places."""
        return None

    def chunk_view(self, now_s: float) -> ChunkView | None:
        """The places of the pool, where its units are not interchangeable."""
        return None

    @property
    def held(self) -> Mapping[str, int]:
        """Units by holder."""
        return self._held

    @property
    def used(self) -> int:
        return self.total - self.free

    def check(self) -> None:
        """Assert what always holds."""
        held = sum(self._held.values())
        assert held == self.total - self.free, f"{self.name}: {held} held, {self.free} free of {self.total}"

    def describe(self) -> dict[str, object]:
        """A JSON-able view for people."""
        return {"kind": self.kind, "node": self.node, "total": self.total, "free": self.free, "held": dict(self._held)}

    def _enter(self, holder: str, units: int) -> None:
        assert holder not in self._held, f"{self.name}: {holder} holds {self._held[holder]} units already"
        self._held[holder] = units

    def _leave(self, holder: str) -> int:
        assert holder in self._held, f"{self.name}: {holder} holds nothing"
        self._note_change()
        return self._held.pop(holder)


class Resources:
    """R: every pool by name, by kind and by node."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools: dict[str, Pool] = {}
        #: Kinds of which an action takes all units on one node.
        self._node_kinds: dict[str, dict[str, Pool]] = {}
        #: Pools whose units return with time.
        self.timed: tuple[Pool, ...] = ()
        self._changed: set[str] = set()
        #: Counts the pools that came and went: what was derived from an earlier version is out of date.
        self.version = 0
        for pool in pools:
            self.add(pool)

    def add(self, pool: Pool) -> None:
        assert pool.name not in self._pools, f"two pools are named {pool.name}"
        self._pools[pool.name] = pool
        pool.announce_to(self._changed)
        if pool.timed:
            self.timed += (pool,)
        if pool.node:
            self._node_kinds.setdefault(pool.kind, {})[pool.node] = pool
        self._note_membership()

    def remove(self, name: str) -> None:
        pool = self._pools.pop(name)
        self.timed = tuple(one for one in self.timed if one is not pool)
        if pool.node:
            del self._node_kinds[pool.kind][pool.node]
        self._note_membership()

    def take_changed(self) -> set[str]:
        """Return the names of the pools that announced a change since the last call."""
        changed = self._changed & self._pools.keys()
        self._changed.clear()
        return changed

    def _note_membership(self) -> None:
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

    def find(self, kind: str, node: str) -> Pool | None:
        """The pool that serves ``kind`` for an action placed on ``node``; None where there is none (any more)."""
        by_node = self._node_kinds.get(kind)
        return self._pools.get(kind) if by_node is None else by_node.get(node)

    def of_kind(self, kind: str) -> tuple[Pool, ...]:
        by_node = self._node_kinds.get(kind)
        if by_node is not None:
            return tuple(by_node.values())
        return (self._pools[kind],) if kind in self._pools else ()

    def check(self) -> None:
        for pool in self:
            pool.check()
