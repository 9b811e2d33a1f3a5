"""Fits of how a duration hangs on the size of what an action is given: T(x) = a + b x (docs/SCHEDULING.md 1.6).

Only the ratio of b to a is fitted, as `Fit` does it for widths: of a grid of ratios the one under which the scales that
the runs imply have the least mean over their geometric mean (the likelihood of a gamma distribution): a long run counts
no more than a short one, and what follows the size is the mean. The scatter of logarithms would follow the median:
where short calls scatter more than long ones, it rises with the size though all take as long in the mean. b is never
negative, and a ratio of 0 is the plain estimate, which stands until another explains the runs clearly better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from manager.input_size import SIZE_MAX, SizeLine

#: Ratios b / a that are tried, with the size that was seen first as 1: from "it hardly matters" to "nothing else does".
_RATIOS = (0.0, *(2.0**power for power in range(-12, 13)))
#: Weight of the newest run, once there are many, and how many runs that amounts to.
_NEWEST = 0.05
_RUNS_MAX = (2.0 - _NEWEST) / _NEWEST
#: A run moves a mean by so many deviations at most, and counts twice as many at most in the scatter.
_CLIP_DEVIATIONS = 3.0
_LEAST_DEVIATION = 0.2
_FIRST_DEVIATION = 0.5
#: Runs before a ratio is believed, and by how much it must be likelier than the plain estimate (chi-squared, 5 %).
_RUNS_MIN = 4
_EVIDENCE = 4.0
#: What a clock can tell, as a variance of logarithms: a perfect fit is no better than that.
_LEAST_VARIANCE = 1e-4
#: The mean of |x| where x is normal, with a deviation of 1.
_MEAN_OF_NORMAL = math.sqrt(2 / math.pi)
#: A first size below this is no measure of the others.
_LEAST_REFERENCE = 1e-6
#: How far one run moves the largest and the least of the sizes seen.
_REACH = 16.0
#: A reference that far (in logarithms) from what sizes are by now is outside of the grid's best: learning starts anew.
_FAR = 8 * math.log(2)


@dataclass(slots=True)
class SizeFit:
    """What was seen of sizes and durations: for each ratio of the grid, mean and scatter of the implied scale."""

    #: The size that counts as 1: the function's first, while the others are not far from it.
    reference: float
    #: Mean of log(size).
    centre: float = 0.0
    runs: float = 0.0
    least: float = math.inf
    most: float = 0.0
    means: list[float] = field(default_factory=lambda: [0.0] * len(_RATIOS))
    variances: list[float] = field(default_factory=lambda: [0.0] * len(_RATIOS))
    #: The mean of the implied scale, over its geometric mean.
    excesses: list[float] = field(default_factory=lambda: [1.0] * len(_RATIOS))
    #: The place of the ratio that explains the runs best; None while the plain estimate does as well.
    best: int | None = None

    @classmethod
    def starting_with(cls, size: float) -> SizeFit:
        """A fit whose first size this is."""
        reference = size if size >= _LEAST_REFERENCE else 1.0
        return cls(reference=reference, centre=math.log(reference))

    @property
    def outdated(self) -> bool:
        """Whether one odd size was taken for the measure of all others: learning has to start anew."""
        return self.runs >= _RUNS_MIN and abs(self.centre - math.log(self.reference)) > _FAR

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> SizeFit | None:
        """What an earlier run knew; None where it knew nothing of sizes or of means, or had another grid."""
        if data is None:
            return None
        made = cls(**data)
        whole = len(made.means) == len(made.variances) == len(made.excesses) == len(_RATIOS)
        return made if whole and "excesses" in data else None

    def observe(self, size: float, log_s: float, share: float) -> None:
        """Learn from a run, alone and with one unit, of which ``share`` counts; ``log_s`` is log(seconds)."""
        size = min(size, SIZE_MAX)
        weight = max(_NEWEST * share, share / (self.runs + share))
        least = _LEAST_DEVIATION if self.runs >= _RUNS_MIN else _FIRST_DEVIATION
        for index, scale in enumerate(_log_scales(size / self.reference)):
            miss = log_s - scale - self.means[index] if self.runs else 0.0
            reach = _CLIP_DEVIATIONS * max(math.sqrt(self.variances[index]), least)
            if self.runs:
                clipped = max(-reach, min(reach, miss))
                self.means[index] += weight * clipped
                above = self.excesses[index] + weight * (math.exp(clipped) - self.excesses[index])
                self.excesses[index] = above * math.exp(-weight * clipped)
            else:
                self.means[index] = log_s - scale
            self.variances[index] += weight * (min(miss * miss, 4 * reach * reach) - self.variances[index])
        self.centre += weight * (math.log(max(size, _LEAST_REFERENCE)) - self.centre)
        if self.runs:
            self.least = max(min(self.least, size), self.least / _REACH)
            self.most = min(max(self.most, size), max(_REACH * self.most, self.reference))
        else:
            self.least = self.most = size
        self.runs += share
        self.best = self._likeliest()

    def _likeliest(self) -> int | None:
        if self.runs < _RUNS_MIN:
            return None
        found = min(range(len(_RATIOS)), key=self._scatter)
        clearly = min(self.runs, _RUNS_MAX) * math.log(self._scatter(0) / self._scatter(found)) > _EVIDENCE
        return found if clearly else None

    def _scatter(self, index: int) -> float:
        """Return how far the mean of the implied scales is above their geometric mean, as a variance of logarithms."""
        return max(_LEAST_VARIANCE, 2 * math.log(max(1.0, self.excesses[index])))

    def agrees(self, index: int) -> bool:
        """Whether the runs speak against this ratio no more than against the plain estimate."""
        return self.runs < _RUNS_MIN or self._scatter(index) <= self._scatter(0)


@lru_cache(maxsize=1024)
def _log_scales(size: float) -> tuple[float, ...]:
    """The logarithm of T(size) over T(1) for each ratio of the grid."""
    return tuple(math.log((1.0 + ratio * size) / (1.0 + ratio)) for ratio in _RATIOS)


class Sizes(NamedTuple):
    """How one key's duration follows its size: its own runs under a ratio, which may be borrowed."""

    own: SizeFit
    place: int
    #: Whose runs the ratio was fitted to.
    seen: SizeFit

    @classmethod
    def of(cls, own: SizeFit | None, whole: SizeFit | None) -> Sizes | None:
        """The key's own ratio, else that of the function as a whole; None where neither has one."""
        if own is None:
            return None
        if own.best is not None:
            return cls(own, own.best, own)
        if whole is None or whole.best is None or whole.reference != own.reference or not own.agrees(whole.best):
            return None
        return cls(own, whole.best, whole)

    def t_ori_s(self, size: float) -> float:
        """Return the expected seconds; the line is not followed far beyond the sizes seen."""
        within = self.line.within(size)
        return math.exp(self.own.means[self.place] + _log_scales(within / self.own.reference)[self.place])

    def relative(self, size: float) -> float:
        """Return what a call of ``size`` takes over one of the usual size."""
        return self.t_ori_s(size) * math.exp(-self.own.means[0])

    @property
    def error(self) -> float:
        """Return the typical relative error: what a standard deviation of logarithms is in the mean."""
        return _MEAN_OF_NORMAL * math.sqrt(self.own.variances[self.place])

    @property
    def line(self) -> SizeLine:
        ratio = _RATIOS[self.place]
        scale_s = math.exp(self.own.means[self.place]) / (1.0 + ratio)
        return SizeLine(scale_s, scale_s * ratio / self.own.reference, self.seen.least, self.seen.most)
