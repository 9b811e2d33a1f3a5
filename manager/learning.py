"""What is learned of durations, sizes and lifetimes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from manager.action import PRIOR_BATCH_MARGINAL, SIZE_MAX, Kin, Settlement, SizeLine, State, Work, noun

# Fits of what a run's shape costs: how much its width saves, and how much each further member of a batch adds.
#
# Each tries a grid of values. Of a batch marginal it takes the one under which the runs agree best on T_ori, of a
# serial fraction the mean of all, weighted by how well the runs agree under each and by a prior that expects little of
# more units: some runs that happened to be short while wide are no proof of a gain. Widths and batch sizes come
# together (an idle machine gives wide chunks to lone requests, a full one narrow chunks to large batches), so the two
# are told apart in one order: the batch marginal from runs at the same width, where the width's factor is a constant
# whatever it is, and then the serial fraction from what the known marginal has taken out.

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
        for at, speed in enumerate(_log_speeds(units)):
            implied = log - speed
            self.sums[at] = self.sums[at] * fade + share * implied
            self.squares[at] = self.squares[at] * fade + share * implied * implied
        self.serial_fraction = self._expected(group)

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
        match = next((width for width in self.widths if width.units == units), None)
        if match is None:
            if len(self.widths) == _WIDTHS_MAX:
                self.widths.remove(min(self.widths, key=lambda width: width.weight))
            match = _Width(units)
            self.widths.append(match)
        return match


#: Halvings of the span in which the end is looked for: to less than a thousandth of the longest lifetime.
HALVINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """What of a batch has not ended; times are seconds."""

    #: For how long each of the living has lived.
    ages_s: Sequence[float]
    #: How many ends of living ones or of those to come the batch needs yet.
    needed: int
    #: How many live at a time.
    at_once: int


class Lifetimes:
    """The distribution of lifetimes (Kaplan and Meier): what ended tells of its length, what lives that it is longer.

    Without the living ones the first ends of a batch, which are its short ones, would speak for all of it.
    """

    def __init__(self, ended: Sequence[tuple[float, float]], ages_s: Sequence[float] = ()) -> None:
        """``ended``: lifetime in seconds and weight of each that is known; ``ages_s``: of those that live."""
        times = np.array([lifetime_s for lifetime_s, _ in ended] + list(ages_s), dtype=float)
        weights = np.array([weight for _, weight in ended] + [1.0] * len(ages_s), dtype=float)
        died = np.arange(times.size) < len(ended)
        order = np.lexsort((~died, times))  # at the same instant an end comes first
        times, weights, died = times[order], weights[order], died[order]
        at_risk = np.cumsum(weights[::-1])[::-1]
        left = np.cumprod(np.where(died, 1.0 - weights / np.maximum(at_risk, 1e-12), 1.0))
        self._times = np.concatenate(([0.0], times))
        self._left = np.concatenate(([1.0], np.where(left < 1e-9, 0.0, left)))
        self._known = len(ended)

    def survival(self, age_s: np.ndarray) -> np.ndarray:
        """Return the share that is expected to live longer than each age."""
        return self._left[np.searchsorted(self._times, age_s, side="right") - 1]

    @property
    def mean_s(self) -> float:
        """Return the mean lifetime, as far as lifetimes were seen."""
        return float(np.sum(self._left[:-1] * np.diff(self._times)))

    def ends_in_s(self, batch: BatchState) -> float | None:
        """Return the seconds until the last end that the batch needs is expected; None if nothing tells.

        At most ``at_once`` live at a time: of those to come so many begin now, the others as earlier ones end. The
        rest is the time after which less than half a one too many is expected to live. Without an end that was seen
        nothing tells it, nor of what has lived for longer than all that have ended.
        """
        if batch.needed <= 0:
            return 0.0
        to_come = max(0, batch.needed - len(batch.ages_s))
        if not self._known or (to_come and not batch.at_once):
            return None
        begun = min(to_come, max(0, batch.at_once - len(batch.ages_s)))
        waves_s = self.mean_s * (to_come - begun) / batch.at_once if to_come > begun else 0.0
        ages = np.array([*batch.ages_s, *([0.0] * begun)], dtype=float)
        tail_s = self._tail_s(ages, min(batch.needed, ages.size))
        return None if tail_s is None else waves_s + tail_s

    def _tail_s(self, ages: np.ndarray, needed: int) -> float | None:
        """Return after how many seconds ``needed`` of what has these ages are expected to have ended."""
        now = self.survival(ages)
        alive = now > 0.0
        spare = ages.size - needed + 0.5

        def going_on(seconds: float) -> float:
            share = np.divide(self.survival(ages + seconds), now, out=np.ones_like(now), where=alive)
            return float(np.sum(share))

        low, high = 0.0, float(self._times[-1])
        if going_on(high) >= spare:
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if going_on(middle) < spare else (middle, high)
        return high


# Fits of how a duration hangs on the size of what an action is given: T(x) = a + b x (docs/SCHEDULING.md 1.6).
#
# Only the ratio of b to a is fitted, as `Fit` does it for widths: of a grid of ratios the one under which the scales
# that the runs imply have the least mean over their geometric mean (the likelihood of a gamma distribution): a long run
# counts no more than a short one, and what follows the size is the mean. The scatter of logarithms would follow the
# median: where short calls scatter more than long ones, it rises with the size though all take as long in the mean. b
# is never negative, and a ratio of 0 is the plain estimate, which stands until another explains the runs clearly
# better.

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
        likeliest = min(range(len(_RATIOS)), key=self._scatter)
        clearly = min(self.runs, _RUNS_MAX) * math.log(self._scatter(0) / self._scatter(likeliest)) > _EVIDENCE
        return likeliest if clearly else None

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


# What was learned of durations and elasticity, per function and per caller's key.
#
# T_ori is estimated in rising precision: the function's declared prior, the function's mean, the key's own mean. Each
# mean is exponentially weighted on log durations and each observation is clipped to a few of the key's own deviations,
# so that an outlier moves little and a drift is followed. The serial fraction s is fitted from the same observations:
# with Amdahl's law duration(m) = T_ori ((1 - s) / m + s), so runs at different widths tell s apart from T_ori. So is a
# function's batch marginal: n alike that run together take 1 + marginal (n - 1) times as long as one. Where calls have
# a size, T_ori(x) = a + b x: the mean is then of what a call of usual size takes.

#: Weight of the newest observation, once there are many.
_HISTORY_NEWEST = 0.1


#: The serial fraction taken while runs at one width tell nothing.
PRIOR_SERIAL_FRACTION = 0.05
#: Units of the first run of a function, and how many times as many as ever before a later one may have.
FIRST_UNITS = 4
WIDENING = 2
#: Keys that are remembered; the least recently used are forgotten.
_KEYS_MAX = 10_000


@dataclass(slots=True)
class Estimate:
    """One function's or key's durations with one unit, on a logarithmic scale."""

    #: Runs; each of n members of a batch counts 1 / n.
    count: float = 0.0
    log_mean: float = 0.0
    log_deviation: float = 0.5
    #: Smoothed |log(observed / predicted)|: 0.1 is an error of about 10 %.
    error: float = 0.0

    @property
    def t_ori_s(self) -> float:
        return math.exp(self.log_mean)

    def observe(self, t_ori_s: float, share: float = 1.0) -> None:
        """Learn from a run of which only ``share`` counts."""
        log = math.log(max(LEAST_S, t_ori_s))
        if self.count == 0:
            self.log_mean = log
        else:
            reach = _CLIP_DEVIATIONS * max(self.log_deviation, _LEAST_DEVIATION)
            miss = log - self.log_mean
            weight = max(_HISTORY_NEWEST * share, share / (self.count + share))
            clipped = max(-reach, min(reach, miss))
            self.log_mean += weight * clipped
            # A drift beyond the reach widens the deviation, so that the next observations are believed sooner.
            self.log_deviation += weight * (min(abs(miss), 2 * reach) - self.log_deviation)
            self.error += weight * (min(abs(miss), 2 * reach) - self.error)
        self.count += share


@dataclass(slots=True)
class Profile:
    """What is known of one function (its key is "") or of one key of it."""

    function: str
    key: str
    estimate: Estimate = field(default_factory=Estimate)
    fit: Fit = field(default_factory=Fit)
    #: Kept for the function as a whole only.
    batches: BatchFit = field(default_factory=BatchFit)
    #: None until a call had a size.
    sizes: SizeFit | None = None


@noun
class Learned:
    """An answer of the history."""

    t_ori_s: float | None
    serial_fraction: float
    #: Units up to which something is known of its elasticity, or may be tried.
    units_max: int = FIRST_UNITS
    #: T_ori by size, or as it is for all; None while nothing was observed.
    line: SizeLine | None = None
    #: Where T_ori comes from: ``prior``, ``function`` or ``key``.
    source: str
    #: Whether nothing was observed of the key, and the function's T_ori stands in.
    borrowed: bool = False
    #: What a further member adds to a batch, as a fraction of what it takes alone.
    batch_marginal: float = PRIOR_BATCH_MARGINAL
    observations: int = 0
    #: Typical relative error of T_ori so far.
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedHistory:
    """All that a history knows, in types that JSON can hold."""

    #: Another number where a field or a grid comes to mean something else.
    version: Literal[1] = 1
    #: By function, the path of its calls' size.
    size_paths: dict[str, str]
    #: The least recently used first.
    profiles: list[Profile]


class History:
    """Learned profiles. Pure but for its own state, which ``saved`` carries across restarts."""

    def __init__(self, saved: SavedHistory | None = None) -> None:
        known = saved or SavedHistory(size_paths={}, profiles=[])
        self._profiles = OrderedDict(((each.function, each.key), each) for each in known.profiles)
        self._size_paths = known.size_paths

    def observe(self, settlement: Settlement) -> None:
        """Learn from an action that succeeded."""
        action = settlement.action
        if settlement.outcome.state is not State.SUCCEEDED or settlement.lease is None:
            return
        units: float = settlement.lease.units(action.key) if action.key is not None else 1
        usage = settlement.outcome.usage
        units = max(1.0, usage.get("mean_units", units))
        if action.key is not None and usage.get("workers", 0) >= 1:
            units = min(units, usage["workers"])  # it could not use more
        members = _ran_with(settlement)
        if members is not None:
            early = bool(settlement.outcome.usage.get("early"))
            self.record(
                action.function,
                action.profile_key,
                units,
                settlement.execution_s,
                members,
                size=action.size,
                early=early,
            )

    def record(
        self,
        function: str,
        key: str,
        units: float,
        duration_s: float,
        members: Mapping[Kin, int] | None = None,
        *,
        size: float | None = None,
        early: bool = False,
    ) -> None:
        """One run of ``duration_s`` seconds on ``units``, a mean over time where they changed, of a call of ``size``.

        ``members`` are those of its batch, itself included, and itself alone where it could have run in one. Each of n
        members counts 1 / n, so that a batch is one observation; were only its leader learned from, a key that never
        leads (shorter ones go first) would never be learned. One that ended ``early``, before its batch did, had the
        others beside it for as long as it ran itself.
        """
        whole = self._profile(function, "")
        profiles = {"": whole, key: self._profile(function, key) if key else whole}
        share, factor = 1.0, 1.0
        if members:
            work, own_s = self._work(members, Kin(function, key, size), early=early)
            share = 1.0 / sum(members.values())
            whole.batches.observe(units, work, own_s, duration_s, share)
            factor = work.seconds(self.batch_marginal(function)) / own_s
        if share == 1.0 or whole.batches.marginal is not None:  # a guessed marginal would pass for a gain of width
            for name, profile in profiles.items():
                usual_s = duration_s / factor / (1.0 if size is None else self._relative(function, name, size))
                group = whole.fit.serial_fraction if name else None
                profile.fit.observe(units, usual_s, share, group or 0.0)
        serial = self.serial_fraction(function, key)
        t_ori_s = duration_s / factor / ((1.0 - serial) / units + serial)
        for name, profile in profiles.items():
            if size is not None:
                self._observe_size(function, name, size, t_ori_s, share)
            profile.estimate.observe(t_ori_s, share)

    def learned(
        self, function: str, key: str = "", size: float | None = None, *, prior_s: float | None = None
    ) -> Learned:
        """The best estimate for one function and key, and for a call of ``size`` where that tells something."""
        serial, marginal = self.serial_fraction(function, key), self.batch_marginal(function)
        units_max = self._units_max(function, key)
        for name, source in ((key, "key"), ("", "function")):
            profile = self._profiles.get((function, name))
            if (name or source == "function") and profile is not None and profile.estimate.count:
                estimate, sizes = profile.estimate, None if size is None else self._sizes(function, name)
                usual_s = estimate.t_ori_s
                return Learned(
                    t_ori_s=usual_s if sizes is None or size is None else sizes.t_ori_s(size),
                    line=SizeLine(usual_s) if sizes is None else sizes.line,
                    serial_fraction=serial,
                    units_max=units_max,
                    source=source,
                    borrowed=name != key,
                    batch_marginal=marginal,
                    observations=round(estimate.count),
                    error=estimate.error if sizes is None else sizes.error,
                )
        return Learned(
            t_ori_s=prior_s, serial_fraction=serial, units_max=units_max, source="prior", batch_marginal=marginal
        )

    def _units_max(self, function: str, key: str) -> int:
        """The most units of a run: the first is narrow, later ones widen by steps, each of which shows what it gains.

        A new key of a known function is trusted half as far, on a logarithmic scale, as the function.
        """
        own, whole = self._profiles.get((function, key)), self._profiles.get((function, ""))
        if own is not None and own.fit.weight:
            return math.ceil(WIDENING * own.fit.widest)
        widest = whole.fit.widest if whole is not None else 0.0
        return max(FIRST_UNITS, math.ceil(math.sqrt(FIRST_UNITS * WIDENING * widest)))

    def serial_fraction(self, function: str, key: str = "") -> float:
        """The key's fitted value, else the function's, else a guess."""
        for name in (key, ""):
            profile = self._profiles.get((function, name))
            fitted = None if profile is None else profile.fit.serial_fraction
            if fitted is not None:
                return fitted
        return PRIOR_SERIAL_FRACTION

    def batch_marginal(self, function: str) -> float:
        """The function's fitted value, else a guess."""
        profile = self._profiles.get((function, ""))
        fitted = None if profile is None else profile.batches.marginal
        return PRIOR_BATCH_MARGINAL if fitted is None else fitted

    def describe(self, function: str) -> dict[str, object]:
        """Estimates and their errors by key, JSON-able; the key "" is the whole function."""
        return {
            key: self._described(function, key, profile)
            for (name, key), profile in self._profiles.items()
            if name == function
        }

    def measured_by(self, function: str, path: str) -> None:
        """Note where a function's calls have their size: what was learned of another place is forgotten."""
        if self._size_paths.get(function, "") != path:
            self._forget_sizes(function)
            self._size_paths[function] = path

    def saved(self) -> SavedHistory:
        """Return all of it, still shared: write it down at once."""
        return SavedHistory(size_paths=self._size_paths, profiles=list(self._profiles.values()))

    def _work(self, members: Mapping[Kin, int], own: Kin, *, early: bool) -> tuple[Work, float]:
        """What members take alone, by what is known of them now, and what one of ``own`` does; equal while unknown."""
        seconds = {kin: self._t_ori_s(*kin) for kin in members}
        known = [one for one in seconds.values() if one is not None]
        guess = sum(known) / len(known) if known else 1.0
        alone_s = {kin: guess if one is None else one for kin, one in seconds.items()}
        if early:
            alone_s = {kin: min(seconds_alone, alone_s[own]) for kin, seconds_alone in alone_s.items()}
        longest_s = max(alone_s.values())
        all_s = sum(count * alone_s[kin] for kin, count in members.items())
        return Work(longest_s, all_s - longest_s), alone_s[own]

    def _t_ori_s(self, function: str, key: str, size: float | None) -> float | None:
        for name in (key, ""):
            profile = self._profiles.get((function, name))
            if profile is not None and profile.estimate.count:
                sizes = None if size is None else self._sizes(function, name)
                return profile.estimate.t_ori_s if sizes is None or size is None else sizes.t_ori_s(size)
        return None

    def _observe_size(self, function: str, key: str, size: float, t_ori_s: float, share: float) -> None:
        """Learn what a call of ``size`` took; a key counts in the unit of size of its function, to borrow its ratio."""
        profile = self._profile(function, key)
        whole, own = self._profile(function, "").sizes, profile.sizes
        strange = own is not None and whole is not None and own.reference != whole.reference and own.best is None
        fit = SizeFit.starting_with(size if whole is None else whole.reference) if own is None or strange else own
        profile.sizes = fit
        fit.observe(size, math.log(max(LEAST_S, t_ori_s)), share)
        if not key and fit.outdated:
            self._forget_sizes(function)

    def _forget_sizes(self, function: str) -> None:
        for (name, _), profile in self._profiles.items():
            if name == function:
                profile.sizes = None

    def _sizes(self, function: str, key: str) -> Sizes | None:
        own, whole = (self._profiles.get((function, name)) for name in (key, ""))
        return None if own is None or whole is None else Sizes.of(own.sizes, whole.sizes)

    def _relative(self, function: str, key: str, size: float) -> float:
        """What a call of ``size`` takes over one of the usual size; 1 while that is not known."""
        sizes = self._sizes(function, key)
        return 1.0 if sizes is None else sizes.relative(size)

    def _described(self, function: str, key: str, profile: Profile) -> dict[str, object]:
        sizes = self._sizes(function, key)
        return {
            "t_ori_s": profile.estimate.t_ori_s,
            "observations": round(profile.estimate.count),
            "error": profile.estimate.error if sizes is None else sizes.error,
            "serial_fraction": profile.fit.serial_fraction,
            "batch_marginal": profile.batches.marginal,
            "size": None if sizes is None else sizes.line._asdict(),
        }

    def _profile(self, function: str, key: str) -> Profile:
        profile = self._profiles.get((function, key))
        if profile is None:
            profile = self._profiles[function, key] = Profile(function, key)
        self._profiles.move_to_end((function, key))
        if len(self._profiles) > _KEYS_MAX:
            self._profiles.popitem(last=False)
        return profile


def _ran_with(settlement: Settlement) -> Mapping[Kin, int] | None:
    """Members of the batch that it ran in, by what its runtime tells; empty where it never runs in one.

    None where some came too late for the batch: it is not known which.
    """
    action = settlement.action
    if not action.batch_tokens:
        return {}
    alone = {Kin.of(action): 1}
    members = settlement.batch or alone
    size = sum(members.values())
    ran = settlement.outcome.usage.get("batch", size)
    if ran == 1:
        return alone
    return members if ran == size else None
