"""The approximated objective: the sum of ACTs if the first candidates start now and the rest follow (Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

from manager.action import Action, UnitSet
from manager.scheduler.arrange import ArrangeItem, Arrangement
from manager.scheduler.completion import CompletionHeap
from manager.scheduler.durations import UNKNOWN_S, is_elastic, key_units, shape_of
from manager.scheduler.policy import RunningView


def item_of(action: Action, kind: str) -> ArrangeItem:
    """An action for DPArrange; a rigid one is a one-element unit set (docs/SCHEDULING.md R2)."""
    units = key_units(action, kind)
    assert units is not None, f"action {action.id} does not use {kind}"
    elasticity = action.elasticity
    if elasticity is None or not is_elastic(action, kind):
        rigid = shape_of(UnitSet.fixed(units.minimum), None)
        return ArrangeItem(rigid.units, rigid.factors * (action.duration_s(units.minimum) or UNKNOWN_S), convex=True)
    shape = shape_of(units, elasticity)
    return ArrangeItem(shape.units, shape.factors * (action.t_ori_s or UNKNOWN_S), convex=shape.convex)


def ends_in_s(running: Sequence[RunningView]) -> list[float]:
    """When running actions end; one whose end is unknown is taken to need as long again as it has run."""
    known = [action.ends_in_s for action in running if action.ends_in_s is not None]
    guess = sum(known) / len(known) if known else UNKNOWN_S
    return [guess if action.ends_in_s is None else max(0.0, action.ends_in_s) for action in running]


class Objective:
    """getApproximatedObjective for every number of kept candidates; the exact part is a table read."""

    def __init__(
        self,
        arrangement: Arrangement,
        items: Sequence[ArrangeItem],
        waiting: Sequence[ArrangeItem],
        running_s: Sequence[float],
        depth: int,
    ) -> None:
        self._arrangement = arrangement
        self._items = items
        #: The queue behind the candidates.
        self._waiting = waiting
        self._running_s = running_s
        self._depth = depth
        self._minimum_s = [float(item.seconds[0]) for item in (*items, *waiting)]

    def of(self, kept: int) -> float:
        """Sum of ACTs in seconds from now, over the whole queue, with the first ``kept`` candidates started."""
        exact_s = self._arrangement.totals[kept]
        heap = CompletionHeap([*self._running_s, *self._durations_s(kept)])
        return exact_s + heap.estimate(self._first_s(kept), self._minimum_s[kept + 1 :])

    def _durations_s(self, kept: int) -> list[float]:
        chosen = self._arrangement.units(kept)
        return [
            float(item.seconds[item.units.index(units)]) for item, units in zip(self._items[:kept], chosen, strict=True)
        ]

    def _first_s(self, kept: int) -> list[float]:
        """Durations of the first action left behind at its smallest counts, as deep as asked for."""
        if kept == len(self._minimum_s):
            return []
        behind = self._items[kept] if kept < len(self._items) else self._waiting[kept - len(self._items)]
        return [float(seconds) for seconds in behind.seconds[: self._depth]]
