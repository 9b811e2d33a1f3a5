"""Durations: an action's expected seconds at every admissible unit count, as arrays that are made once a shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from manager.action import Action, Elasticity, UnitSet

Floats = NDArray[np.float64]

#: Seconds taken for an action of which nothing is known: it only has to be positive.
UNKNOWN_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """How durations scale with units for one unit set and elasticity, relative to one unit."""

    #: Admissible counts, ascending.
    counts: Floats
    #: duration(count) / T_ori = 1 / (E(count) * count).
    factors: Floats
    #: factors * counts: the unit-seconds of one second of T_ori.
    areas: Floats
    #: Seconds of T_ori done a second, count / (count * factor).
    speeds: Floats
    #: Speed gained by each count over the one before it, made falling (a share never skips a unit).
    gains: Floats
    #: Whether each further unit saves no more than the one before it (and the counts are consecutive).
    convex: bool
    #: The counts once more, as integers to answer with.
    units: tuple[int, ...]


@lru_cache(maxsize=8192)
def shape_of(unit_set: UnitSet, elasticity: Elasticity | None) -> Shape:
    """The shape of a unit set under an elasticity (values, compared as such); rigid where there is none."""
    units = tuple(unit_set)
    counts = np.array(units, dtype=np.float64)
    if elasticity is None:
        factors = np.ones(len(units))
    else:
        factors = np.array([1.0 / (elasticity.efficiency(count) * count) for count in units])
    return Shape(
        counts=counts,
        factors=factors,
        areas=factors * counts,
        speeds=1.0 / factors,
        gains=np.minimum.accumulate(np.diff(1.0 / factors)),
        convex=_convex(units, factors),
        units=units,
    )


def key_units(action: Action, kind: str) -> UnitSet | None:
    """The units of pool kind ``kind`` that are a choice: the key's unit set; another resource counts at its minimum."""
    cost = action.cost.get(kind)
    if cost is None or action.key == kind:
        return cost
    return UnitSet.fixed(cost.minimum)


def is_elastic(action: Action, kind: str) -> bool:
    """Whether more units of ``kind`` make the action faster, as far as is known."""
    return (
        action.key == kind
        and action.elasticity is not None
        and action.t_ori_s is not None
        and action.cost[kind].elastic
    )


def is_malleable(action: Action, kind: str) -> bool:
    """Whether its units of ``kind`` can be changed one by one while it runs."""
    return action.malleable and action.key == kind and action.cost[kind].choices is None


def kind_of(pool: str) -> str:
    """The resource kind of a pool: ``cpu:node0`` is ``cpu``, ``google_search`` is itself."""
    return pool.partition(":")[0]


def _convex(units: tuple[int, ...], factors: Floats) -> bool:
    if units[-1] - units[0] + 1 != len(units):
        return False
    gains = factors[:-1] - factors[1:]
    return bool(np.all(gains[:-1] - gains[1:] >= -1e-12))
