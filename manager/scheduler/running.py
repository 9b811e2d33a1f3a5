"""The running actions of one pool, with what policies ask of all of them, kept as they come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

from manager.action import Action
from manager.scheduler.policy import RunningView


class RunningSet(Sequence[RunningView]):
    """Views by holder, in the order of their starts: an event changes few of them, and a decision looks at few."""

    def __init__(self, kind: str, look: Callable[[str], RunningView] | None = None) -> None:
        """``look`` makes the views of holders that are entered without one."""
        self._kind = kind
        self._look = look
        #: Views that were made, and behind them the holders of those that were not: these have no choice of units.
        self._made: dict[str, RunningView] = {}
        self._unseen: dict[str, None] = {}
        self._malleable: dict[str, RunningView] = {}
        #: Units above the minimum, of those malleable ones that hold more.
        self._above: dict[str, int] = {}
        #: How many have no choice of units here.
        self.rigid = 0

    @classmethod
    def of(cls, running: Iterable[RunningView], kind: str) -> RunningSet:
        """Return running actions as a set, which they may be already."""
        if isinstance(running, cls):
            return running
        made = cls(kind)
        for view in running:
            made.add(view.action.id, view)
        return made

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
            self._malleable[holder] = view
            self.note_units(holder, view.units)

    def remove(self, holder: str) -> None:
        if holder in self._unseen:
            del self._unseen[holder]
            self.rigid -= 1
            return
        view = self._made.pop(holder)
        self.rigid -= view.action.key != self._kind
        self._malleable.pop(holder, None)
        self._above.pop(holder, None)

    def note_units(self, holder: str, units: int) -> None:
        """Note what a malleable one holds from now on."""
        above = units - self._malleable[holder].action.cost[self._kind].minimum
        if above:
            self._above[holder] = above
        else:
            self._above.pop(holder, None)

    @property
    def malleable(self) -> Collection[RunningView]:
        """Return those whose units may change."""
        return self._malleable.values()

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
