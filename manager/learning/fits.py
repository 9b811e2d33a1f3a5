"""Fits of what a run's shape costs: how much its width saves, and how much each further member of a batch adds.

Each tries a grid of values and takes the one under which the runs agree best on T_ori. Widths and batch sizes come
together (an idle machine gives wide chunks to lone requests, a full one narrow chunks to large batches), so the two
are told apart in one order: the batch marginal from runs at the same width, where the width's factor is a constant
whatever it is, and then the serial fraction from what the known marginal has taken out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from manager.batch import Work

#: Values that are tried, and how fast old evidence fades. A serial fraction above 1 says that more units are slower.
_GRID = tuple(step / 20 for step in range(21))
_SERIALS = (*_GRID, 1.1, 1.25, 1.5, 2.0)
_FADE = 0.98
#: What a further member of a batch costs hangs on the model and the device, which change rarely.
_BATCH_FADE = 0.995
#: Batch sizes tell something once the squared deviations of their logarithms sum up to this (faded).
_LEAST_SPREAD = 2.0
#: Widths that are told apart, and the weight below which one is forgotten.
_WIDTHS_MAX = 16
_LEAST_WEIGHT = 1e-3
LEAST_S = 1e-4


@dataclass(slots=True)
class Fit:
    """The serial fraction: for each value of a grid, how much the implied T_ori scatters over the widths seen."""

    #: Sums over faded observations, by grid value: of log T_ori and of its square; and of the weights.
    sums: list[float] = field(default_factory=lambda: [0.0] * len(_SERIALS))
    squares: list[float] = field(default_factory=lambda: [0.0] * len(_SERIALS))
    weight: float = 0.0
    #: The same for log(units): without a spread of widths nothing can be told.
    widths: float = 0.0
    width_squares: float = 0.0
    #: The most units that a run had.
    widest: float = 0.0

    def observe(self, units: float, duration_s: float, share: float = 1.0) -> None:
        """A run of which only ``share`` counts."""
        log = math.log(max(LEAST_S, duration_s))
        width = math.log(units)
        fade = _FADE**share
        self.widest = max(self.widest, units)
        self.weight = self.weight * fade + share
        self.widths = self.widths * fade + share * width
        self.width_squares = self.width_squares * fade + share * width * width
        implied = [log - speed for speed in _log_speeds(units)]
        self.sums = [total * fade + share * one for total, one in zip(self.sums, implied, strict=True)]
        self.squares = [total * fade + share * one * one for total, one in zip(self.squares, implied, strict=True)]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fit:
        """What an earlier run knew; nothing where it was made with another grid."""
        made = cls(**data)
        return made if len(made.sums) == len(made.squares) == len(_SERIALS) else cls()

    @property
    def serial_fraction(self) -> float | None:
        """The value under which all widths agree best on T_ori; None while the widths hardly differ."""
        if self.weight < 1.9 or self._variance(self.widths, self.width_squares) < 0.05:
            return None
        scatter = [self._variance(total, square) for total, square in zip(self.sums, self.squares, strict=True)]
        return _SERIALS[min(range(len(_SERIALS)), key=lambda index: (scatter[index], index))]

    def _variance(self, total: float, square: float) -> float:
        mean = total / self.weight
        return max(0.0, square / self.weight - mean * mean)


@lru_cache(maxsize=1024)
def _log_speeds(units: float) -> tuple[float, ...]:
    """The logarithm of duration(units) / T_ori for each serial fraction of the grid."""
    return tuple(math.log((1.0 - serial) / units + serial) for serial in _SERIALS)


@dataclass(slots=True)
class _Width:
    """Faded sums over the runs at one width."""

    units: int
    weight: float = 0.0
    #: Of log(size) and its square; a batch's size is what all would take in turn over what its longest takes.
    sizes: float = 0.0
    size_squares: float = 0.0
    #: By grid value: of log T_ori and its square.
    sums: list[float] = field(default_factory=lambda: [0.0] * len(_GRID))
    squares: list[float] = field(default_factory=lambda: [0.0] * len(_GRID))

    def fade(self, by: float) -> None:
        self.weight *= by
        self.sizes *= by
        self.size_squares *= by
        self.sums = [total * by for total in self.sums]
        self.squares = [total * by for total in self.squares]

    def add(self, size: float, implied: Sequence[float], share: float) -> None:
        self.weight += share
        self.sizes += share * size
        self.size_squares += share * size * size
        self.sums = [total + share * one for total, one in zip(self.sums, implied, strict=True)]
        self.squares = [total + share * one * one for total, one in zip(self.squares, implied, strict=True)]

    def deviations(self, total: float, square: float) -> float:
        """The sum of squared deviations from the width's own mean."""
        return max(0.0, square - total * total / self.weight)


@dataclass(slots=True)
class BatchFit:
    """The batch marginal: for each value of a grid, how much the implied T_ori scatters over the batch sizes seen."""

    widths: list[_Width] = field(default_factory=list)
    #: What was found last: it stands while batch sizes hardly differ for a while. None until they did.
    marginal: float | None = None
    #: Members seen since it was found, each by its share.
    pending: float = 0.0

    def observe(self, units: float, work: Work, own_s: float, duration_s: float, share: float) -> None:
        """A run of which ``share`` counts: a batch, of which one member would take ``own_s`` alone."""
        log = math.log(max(LEAST_S, duration_s) * own_s)
        implied = [log - math.log(work.seconds(marginal)) for marginal in _GRID]
        self._width(round(units)).add(math.log(work.size), implied, share)
        self.pending += share
        if self.pending >= 1.0 - 1e-9:
            self._conclude()

    def _conclude(self) -> None:
        """Once a batch, after its last member: what it changes, and the fading of what was before."""
        self.pending = 0.0
        if sum(width.deviations(width.sizes, width.size_squares) for width in self.widths) >= _LEAST_SPREAD:
            self.marginal = self._best()
        for width in self.widths:
            width.fade(_BATCH_FADE)
        self.widths = [width for width in self.widths if width.weight >= _LEAST_WEIGHT]

    def _best(self) -> float:
        scatter = [
            sum(width.deviations(width.sums[index], width.squares[index]) for width in self.widths)
            for index in range(len(_GRID))
        ]
        return _GRID[min(range(len(_GRID)), key=lambda index: (scatter[index], index))]

    def _width(self, units: int) -> _Width:
        found = next((width for width in self.widths if width.units == units), None)
        if found is None:
            if len(self.widths) == _WIDTHS_MAX:
                self.widths.remove(min(self.widths, key=lambda width: width.weight))
            found = _Width(units)
            self.widths.append(found)
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> BatchFit:
        """What an earlier run knew: nothing where it did not fit batches, or with another grid."""
        if data is None:
            return cls()
        widths = [_Width(**width) for width in data["widths"]]
        if any(len(width.sums) != len(_GRID) for width in widths):
            return cls()
        return cls(widths, data["marginal"], data["pending"])
