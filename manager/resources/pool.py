"""The pool: one kind of unit in one place, what of it is held, and by whom."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manager.chunk import Chunk
from manager.lease import Grant


class Headroom:
    """What of a pool is neither held nor promised, during one scheduling pass.

    Candidates `take` in order; an action that cannot start reserves, so that no later one starts in its place.
    """

    __slots__ = ("awaited", "free", "kept", "rivals")

    def __init__(self, free: int) -> None:
        self.free = free
        #: What is reserved for actions that wait for more of this pool and nothing else.
        self.awaited = 0
        #: Free places that are reserved; none where units are interchangeable.
        self.kept: list[Chunk] = []
        #: Groups of waiting actions that may still take of it.
        self.rivals = 0

    def fits(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> bool:
        """Whether ``units`` can be taken together, on ``node`` if one is named, else on one ``among`` those named."""
        return units <= self.free

    def take(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> None:
        """Promise units that fit."""
        self.free -= units

    def reserve(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> None:
        """Hold back up to ``units``, whatever there is of them."""
        self.free = max(0, self.free - units)


class PoolRequest(NamedTuple):
    """What an action wants of a pool at its start; those that are alike want the same."""

    units: int
    service: str | None = None
    #: The chunk that the policy chose, in the pool's indices.
    chunk: Chunk | None = None
    #: The node it must be on, for actions that also hold something else of a node.
    node: str = ""
    #: Places that it leaves to others, unless it names its chunk.
    kept: Sequence[Chunk] = ()
    #: The nodes whose places are right for it, if it holds nothing else of one; empty for all.
    among: frozenset[str] = frozenset()


class Pool(ABC):
    """One pool. ``acquire`` and ``release`` come in pairs, by the id of the holder."""

    #: Whether a waiting parent's units may serve its children meanwhile.
    lendable = False
    #: What the account of its use counts, with its unit.
    measure: str

    def __init__(self, name: str, kind: str, node: str = "") -> None:
        self.name = name
        self.kind = kind
        #: The node whose units these are; empty where the pool belongs to none, or spans several.
        self.node = node
        #: Whether its node is closed: what is free of it cannot be acquired.
        self.closed = False
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

    @property
    def idle(self) -> int:
        """Units that nobody holds: those that are free, and those of closed nodes."""
        return self.free

    @abstractmethod
    def acquire(self, holder: str, ask: PoolRequest, now_s: float) -> Grant:
        """Give ``ask.units`` to a new holder; they must fit."""

    def acquire_each(self, holders: Sequence[str], ask: PoolRequest, now_s: float) -> list[Grant]:
        """Give ``ask.units`` to each of some new holders, in order; they must fit together."""
        return [self.acquire(holder, ask, now_s) for holder in holders]

    def resume(self, holder: str, ask: PoolRequest, started_s: float, now_s: float) -> Grant:
        """Give ``ask.units`` to a holder that was started earlier, under another core; they must fit."""
        return self.acquire(holder, ask, now_s)

    @abstractmethod
    def release(self, holder: str, now_s: float) -> None:
        """Take back all that ``holder`` holds."""

    def headroom(self) -> Headroom:
        return Headroom(self.free)

    def accepts(self, ask: PoolRequest) -> bool:
        """Whether `acquire` would succeed now."""
        return ask.units <= self.free

    def resize(self, holder: str, units: int) -> Grant:
        """Change what a holder holds, keeping as much of it as possible."""
        raise AssertionError(f"{self.name}: units of a running action cannot change")

    def bequeath(self, holder: str, heir: str, grant: Grant) -> None:
        """End a loan whose lender ended first: the heir keeps ``grant``, the rest is released."""
        raise AssertionError(f"{self.name}: units cannot be lent")

    def admits(self, units: int) -> bool:
        """Whether ``units`` could ever be granted, were nothing else held."""
        return units <= self.total

    def chunk_of(self, holder: str) -> Chunk | None:
        """Return the place of a holder's units, in the pool's indices; None where units have no places."""
        return None

    @property
    def held(self) -> Mapping[str, int]:
        """Units by holder."""
        return self._held

    def check(self) -> None:
        """Assert what always holds."""
        held = sum(self._held.values())
        assert held == self.total - self.idle, f"{self.name}: {held} held, {self.idle} idle of {self.total}"

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


class TimedPool(Pool):
    """Units return with time, not with the end of their action."""

    @abstractmethod
    def advance(self, now_s: float) -> None:
        """Let what returns with time return."""

    @abstractmethod
    def next_return_s(self) -> float | None:
        """Return the instant at which the next unit returns by itself; None if none is due."""

    @abstractmethod
    def restore(self, ended: Sequence[tuple[float, int]], running: int, now_s: float) -> None:
        """Go on where the pool of another core was: (instant, units) of ended actions, and units of running ones."""

    @abstractmethod
    def want_again(self, holder: str, units: int) -> None:
        """Note that a holder wants as many units once more: before anybody who has not begun."""

    @abstractmethod
    def grant_again(self) -> list[str]:
        """Give what was wanted again, in order, as far as there are units; return the holders that have theirs."""

    @abstractmethod
    def wants_again(self, holder: str = "") -> bool:
        """Return whether a holder (anybody by default) still waits for units that it wants again."""
