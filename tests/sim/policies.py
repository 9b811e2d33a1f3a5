"""A policy that does every legal thing at random, so that the core meets what no sensible policy would do."""

from __future__ import annotations

import random

from manager.scheduler.policy import Decision, Hold, PoolView, ResizeChoice, Start


class RandomPolicy:
    """Starts, widens, holds, shrinks and grows by a seed; always within the promises of the protocol."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def decide(self, view: PoolView) -> Decision:
        chance = self._random
        free = view.free
        resizes = []
        for running in view.running:
            kind = view.name.partition(":")[0]
            if not running.action.malleable or running.action.key != kind or chance.random() < 0.5:
                continue
            units = running.action.cost[kind]
            wanted = units.at_most(chance.randint(units.minimum, min(units.maximum, running.units + free)))
            if wanted is not None and wanted != running.units:
                resizes.append(ResizeChoice(action_id=running.action.id, units=wanted))
                free -= max(0, wanted - running.units)
        starts, holds = [], []
        minima = sum(candidate.action.units.minimum for candidate in view.candidates if candidate.action.units)
        for candidate in view.candidates:
            unit_set = candidate.action.units
            assert unit_set is not None
            if minima > free:
                break
            minima -= unit_set.minimum
            if chance.random() < 0.2:
                holds.append(Hold(action_id=candidate.action.id, waits_for="luck"))
                continue
            most = unit_set.at_most(min(candidate.limit, free - minima))
            assert most is not None
            chosen = unit_set.at_most(chance.randint(unit_set.minimum, most))
            assert chosen is not None
            if view.chunks is not None:
                chosen = unit_set.minimum
            starts.append(Start(action_id=candidate.action.id, units=chosen, workers=unit_set.maximum))
            free -= chosen
        wake_s = view.now_s + chance.uniform(0.01, 1.0) if holds and chance.random() < 0.9 else None
        return Decision(starts=starts, resizes=resizes, holds=holds, wake_s=wake_s)
