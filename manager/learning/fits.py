"""Fits of what a run's shape costs: how much its width saves, and how much each further member of a batch adds.

Each tries a grid of values. Of a batch marginal it takes the one under which the runs agree best on T_ori, of a serial
fraction the mean of all, weighted by how well the runs agree under each and by a prior that expects little of more
units: some runs that happened to be short while wide are no proof of a gain. Widths and batch sizes come
together (an idle machine gives wide chunks to lone requests, a full one narrow chunks to large batches), so the two
are told apart in one order: the batch marginal from runs at the same width, where the width's factor is a constant
whatever it is, and then the serial fraction from what the known marginal has taken out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

from manager.batch import Work

#: Values that are tried, and how fast old evidence fades. A serial fraction above 1 says that more units are slower.
_GRID = tuple(step / 20 for step in range(21))
_SERIALS = (0.0, 0.01, 0.02, 0.035, 0.05, 0.075, *_GRID[2:], 1.1, 1.25, 1.5, 2.0)
_FADE = 0.98
#: Before any run half of all functions are taken to have a serial fraction below this, and few a large one.
_MEDIAN_SERIAL = 0.05
#: What is known of scatter before any run: squared deviation of one run's logarithm, 10 %. Two runs always agree.
_FIRST_SQUARE = 0.01
#: Equal elasticities share their tables, so what is found is rounded to so many places.
_PLACES = 2
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
    #: What is expected by now; None while the widths hardly differ.
    serial_fraction: float | None = None

    def observe(self, units: float, duration_s: float, share: float = 1.0, group: float = 0.0) -> None:
        """A run of which only ``share`` counts.

        ``group``: the serial fraction of the function as a whole, which a key is expected to be near; 0 where the fit
        is of the function itself.
        """
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
        self.serial_fraction = self._expected(group)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fit:
        """What an earlier run knew; nothing where it was made with another grid."""
        made = cls(**data)
        return made if len(made.sums) == len(made.squares) == len(_SERIALS) else cls()

    def _expected(self, group: float) -> float | None:
        """The mean of all values, each weighted by its prior and by how well the runs agree on T_ori under it.

        A duration is linear in the serial fraction, so the mean gives the expected duration at every width, and what
        is not sure counts as far as it is.
        """
        if self.weight < 1.9 or self._variance(self.widths, self.width_squares) < 0.05:
            return None
        logs = [
            math.log(prior) - 0.5 * self.weight * math.log(_FIRST_SQUARE + self.weight * self._variance(total, square))
            for prior, total, square in zip(_priors(group), self.sums, self.squares, strict=True)
        ]
        most = max(logs)
        chances = [math.exp(log - most) for log in logs]
        mean = sum(chance * serial for chance, serial in zip(chances, _SERIALS, strict=True)) / sum(chances)
        return round(mean, _PLACES)

    def _variance(self, total: float, square: float) -> float:
        mean = total / self.weight
        return max(0.0, square / self.weight - mean * mean)


@lru_cache(maxsize=1024)
def _priors(group: float) -> tuple[float, ...]:
    """How likely each value of the grid is before any run: alike up to that of its group, above it ever less.

    The density falls with the square, so half lie within the median of the group's, and a large one is soon believed.
    """
    between = [(one + next_) / 2 for one, next_ in pairwise(_SERIALS)]
    lengths = [end - start for start, end in pairwise((0.0, *between, _SERIALS[-1]))]
    return tuple(
        length / (max(serial, group) + _MEDIAN_SERIAL) ** 2 for serial, length in zip(_SERIALS, lengths, strict=True)
    )


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
