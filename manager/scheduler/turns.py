"""Turns in a crowd: who starts, and how wide, while more waits than can run (docs/decisions/overload.md).

Where one task waits, the shortest goes first, by its expected work. It starts at a width that pays for the many behind
it, on free units. What has waited as long as the pool takes to work off all that waits goes before everything else, at
its minimum: first come first served would not have started it sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from manager.action import Action, UnitSet
from manager.scheduler.durations import is_malleable, shape_of
from manager.scheduler.policy import CrowdView, Decision, PoolView, ResizeChoice, Start
from manager.scheduler.price import cheapest
from manager.scheduler.rank import is_short
from manager.scheduler.running import RunningSet


class CrowdPass:
    """One decision in a crowd. Units come from the free ones, and for some from those above running ones' minima."""

    def __init__(
        self,
        view: PoolView,
        crowd: CrowdView,
        kind: str,
        running: RunningSet,
        *,
        short_s: float,
        workers: Callable[[Action, int], int],
    ) -> None:
        """``workers`` says how many to start for an action that begins with so many units and may grow later."""
        self._view = view
        self._crowd = crowd
        self._kind = kind
        self._short_s = short_s
        self._workers = workers
        self._running = running
        self._free = view.free + view.reserved
        #: Units that shrinking can still give, and what it was decided to leave each that is shrunk.
        self._slack = running.slack
        self._shrunk: dict[str, int] = {}
        self._starts: dict[str, Start] = {}
        self._limits: dict[str, int] | None = None

    def lead(self, head: Action) -> bool:
        """Start an action before all others; return whether there was room."""
        return self._start_least(head)

    def run(self, *, age: float, price: float) -> Decision:
        """Start the aged ones, then the others in turn.

        ``age``: times the seconds in which the pool works off all that waits. ``price``: of a unit, as in
        ``price.cheapest``, times the elastic actions that wait for each unit of the pool.
        """
        if self._free + self._slack > 0:
            self._start_aged(age * self._crowd.work_s() / self._view.total)
            self._take_turns(price * self._crowd.elastic / self._view.total)
        shrinks = [ResizeChoice(action_id=holder, units=units) for holder, units in self._shrunk.items()]
        return Decision(starts=list(self._starts.values()), resizes=shrinks)

    def _start_aged(self, aged_s: float) -> None:
        """Start those that have waited for so long, in order of service."""
        for action in self._view.eligible:
            if self._view.now_s - action.submitted_s < aged_s:
                return
            if not self._started(action) and not self._start_least(action):
                return

    def _take_turns(self, unit_price: float) -> None:
        """Start the shortest while there is room; nothing overtakes the first that has to wait."""
        promised = (candidate.action for candidate in self._view.candidates)  # some may wait for other things as well
        for action in chain(self._crowd.shortest(), promised):
            if self._started(action):
                continue
            if is_short(action, self._kind, self._short_s):
                done = self._start_least(action)
            else:
                done = self._start_wide(action, unit_price)
            if not done or self._free + self._slack == 0:
                return

    def _started(self, action: Action) -> bool:
        return action.id in self._starts

    def _start_least(self, action: Action) -> bool:
        """Start at the minimum, shrinking running ones if need be; return whether there was room."""
        least = action.cost[self._kind].minimum
        if least > self._free + self._slack:
            return False
        self._shrink(least - self._free)
        grows = is_malleable(action, self._kind)
        self._add(action, least, self._workers(action, least) if grows else 0)
        return True

    def _start_wide(self, action: Action, unit_price: float) -> bool:
        """Start on free units alone, as wide as pays; return whether there was room."""
        units = action.cost[self._kind]
        if units.minimum > self._free:
            return False
        wide = units.minimum
        if action.key == self._kind and action.elasticity is not None:
            wide, _ = cheapest(shape_of(units, action.elasticity), 1.0, unit_price, self._most(action))
        self._add(action, wide, wide if is_malleable(action, self._kind) else 0)
        return True

    def _most(self, action: Action) -> int:
        """Return the most units it may take now: a candidate may be kept to less by its task's cap."""
        if self._limits is None:
            self._limits = {candidate.action.id: candidate.limit for candidate in self._view.candidates}
        return min(self._free, self._limits.get(action.id, self._free))

    def _add(self, action: Action, units: int, workers: int) -> None:
        self._free -= units
        self._starts[action.id] = Start(action_id=action.id, units=units, workers=workers)

    def _shrink(self, missing: int) -> None:
        """Free ``missing`` units or more, from those that hold most above their minimum."""
        if missing <= 0:
            return
        for holder, units, unit_set in self._widest():
            # Where not every count is admissible, the minimum is.
            taken = units - unit_set.minimum if unit_set.choices else min(missing, units - unit_set.minimum)
            self._shrunk[holder] = units - taken
            self._free += taken
            self._slack -= taken
            missing -= taken
            if missing <= 0:
                return
        raise AssertionError(f"{missing} units were counted as slack that nobody holds")

    def _widest(self) -> list[tuple[str, int, UnitSet]]:
        """Return the running ones that can be shrunk with their units, those with most above the minimum first."""
        found = []
        for one in self._running.malleable:
            units, unit_set = self._shrunk.get(one.action.id, one.units), one.action.cost[self._kind]
            if units > unit_set.minimum:
                found.append((one.action.id, units, unit_set))
        found.sort(key=lambda each: each[2].minimum - each[1])
        return found
