"""Shares by water-filling on marginal speed: the next unit goes where it adds most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from manager.action import Amdahl, Elasticity, UnitSet
from manager.scheduler.durations import Floats, shape_of

Counts = NDArray[np.int64]

#: Taken for an action whose elasticity is not known: any one concave speed gives equal shares.
ASSUMED: Elasticity = Amdahl(0.05)


@dataclass(frozen=True, slots=True, eq=False)
class ShareMember:
    """One that shares: its least and most units, and the speed gained by each unit between them, falling."""

    least: int
    most: int
    gains: Floats


@lru_cache(maxsize=8192)
def member(unit_set: UnitSet, elasticity: Elasticity | None, most: int, least_gain: float = 0.0) -> ShareMember:
    """The claim of an elastic action that can use at most ``most`` units, each of which adds ``least_gain`` or more."""
    shape = shape_of(unit_set, elasticity or ASSUMED)
    most = max(unit_set.minimum, min(unit_set.maximum, most))
    if least_gain > 0.0 and unit_set.choices is None:
        most = min(most, unit_set.minimum + int((shape.gains >= least_gain).sum()))
    return ShareMember(unit_set.minimum, most, shape.gains[: most - unit_set.minimum])


def water_fill(members: Sequence[ShareMember], units: int, weights: Sequence[float]) -> list[int]:
    """Units for each member, at least its least; the rest goes by the largest weighted gains, earlier ones first.

    The sum is at most ``units`` wherever the least ones fit.
    """
    spare = units - sum(one.least for one in members)
    if spare <= 0 or not members:
        return [one.least for one in members]
    if spare >= sum(one.most - one.least for one in members):
        return [one.most if one.gains.size == 0 or one.gains[-1] > 0.0 else _useful(one) for one in members]
    sizes = np.array([one.most - one.least for one in members])
    gains = np.concatenate([one.gains for one in members]) * np.repeat(weights, sizes)
    ends = np.cumsum(sizes)
    level = float(np.partition(gains, gains.size - spare)[gains.size - spare])
    level = max(level, 0.0)
    given = _counts(gains > level, ends)
    if level > 0.0:
        given += _remainder(_counts(gains == level, ends), spare - int(given.sum()))
    return [one.least + int(more) for one, more in zip(members, given, strict=True)]


def _useful(one: ShareMember) -> int:
    return one.least + int((one.gains > 0.0).sum())


def _counts(mask: NDArray[np.bool_], ends: Counts) -> Counts:
    """How many of each member's gains are marked."""
    sums = np.concatenate(([0], np.cumsum(mask)))[np.concatenate(([0], ends))]
    return np.asarray(np.diff(sums), dtype=np.int64)


def _remainder(ties: Counts, left: int) -> Counts:
    """Units for gains exactly at the water level, in order, as far as they go."""
    before = np.cumsum(ties) - ties
    given: Counts = np.minimum(np.maximum(left - before, 0), ties)
    return given
