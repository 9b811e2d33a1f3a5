"""The running actions of one pool, with what policies ask of all of them, kept as they come and go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

from manager.scheduler.policy import RunningView


class RunningSet(Sequence[RunningView]):
    """Views by holder, in the order of their starts: an event changes few of them, and a decision looks at few."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._views: dict[str, RunningView] = {}
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

    def add(self, holder: str, view: RunningView) -> None:
        self._views[holder] = view
        if view.action.key != self._kind:
            self.rigid += 1
        elif view.action.malleable:
            self._malleable[holder] = view
            self.note_units(holder, view.units)

    def remove(self, holder: str) -> None:
        view = self._views.pop(holder)
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

    def __len__(self) -> int:
        return len(self._views)

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
