"""What was learned of durations and elasticity, per function and per caller's key.

T_ori is estimated in rising precision: the function's declared prior, the function's mean, the key's own mean. Each
mean is exponentially weighted on log durations and each observation is clipped to a few of the key's own deviations,
so that an outlier moves little and a drift is followed. The serial fraction s is fitted from the same observations:
with Amdahl's law duration(m) = T_ori ((1 - s) / m + s), so runs at different widths tell s apart from T_ori.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache

from manager.outcome import Settlement, State

#: Weight of the newest observation, once there are many.
_NEWEST = 0.1
#: Observations are clipped to this many deviations of the logarithm, and the deviation is at least the floor.
_CLIP_DEVIATIONS = 3.0
_LEAST_DEVIATION = 0.2
#: Serial fractions that are tried, and how fast old evidence fades.
_GRID = tuple(step / 20 for step in range(21))
_FADE = 0.98
#: The serial fraction taken while runs at one width tell nothing.
PRIOR_SERIAL_FRACTION = 0.05
#: Keys that are remembered; the least recently used are forgotten.
_KEYS_MAX = 10_000
_LEAST_S = 1e-4


@dataclass(slots=True)
class Estimate:
    """One function's or key's durations with one unit, on a logarithmic scale."""

    count: int = 0
    log_mean: float = 0.0
    log_deviation: float = 0.5
    #: Smoothed |log(observed / predicted)|: 0.1 is an error of about 10 %.
    error: float = 0.0

    @property
    def t_ori_s(self) -> float:
        return math.exp(self.log_mean)

    def observe(self, t_ori_s: float) -> None:
        log = math.log(max(_LEAST_S, t_ori_s))
        if self.count == 0:
            self.log_mean = log
        else:
            reach = _CLIP_DEVIATIONS * max(self.log_deviation, _LEAST_DEVIATION)
            miss = log - self.log_mean
            weight = max(_NEWEST, 1.0 / (self.count + 1))
            clipped = max(-reach, min(reach, miss))
            self.log_mean += weight * clipped
            # A drift beyond the reach widens the deviation, so that the next observations are believed sooner.
            self.log_deviation += weight * (min(abs(miss), 2 * reach) - self.log_deviation)
            self.error += weight * (min(abs(miss), 2 * reach) - self.error)
        self.count += 1


@dataclass(slots=True)
class Fit:
    """The serial fraction: for each value of a grid, how much the implied T_ori scatters over the widths seen."""

    #: Sums over faded observations, by grid value: of log T_ori and of its square; and of the weights.
    sums: list[float] = field(default_factory=lambda: [0.0] * len(_GRID))
    squares: list[float] = field(default_factory=lambda: [0.0] * len(_GRID))
    weight: float = 0.0
    #: The same for log(units): without a spread of widths nothing can be told.
    widths: float = 0.0
    width_squares: float = 0.0

    def observe(self, units: float, duration_s: float) -> None:
        log = math.log(max(_LEAST_S, duration_s))
        width = math.log(units)
        self.weight = self.weight * _FADE + 1.0
        self.widths = self.widths * _FADE + width
        self.width_squares = self.width_squares * _FADE + width * width
        implied = [log - speed for speed in _log_speeds(units)]
        self.sums = [total * _FADE + one for total, one in zip(self.sums, implied, strict=True)]
        self.squares = [total * _FADE + one * one for total, one in zip(self.squares, implied, strict=True)]

    @property
    def serial_fraction(self) -> float | None:
        """The value under which all widths agree best on T_ori; None while the widths hardly differ."""
        if self.weight < 2.0 or self._variance(self.widths, self.width_squares) < 0.05:
            return None
        scatter = [self._variance(total, square) for total, square in zip(self.sums, self.squares, strict=True)]
        return _GRID[min(range(len(_GRID)), key=lambda index: (scatter[index], index))]

    def _variance(self, total: float, square: float) -> float:
        mean = total / self.weight
        return max(0.0, square / self.weight - mean * mean)


@lru_cache(maxsize=1024)
def _log_speeds(units: float) -> tuple[float, ...]:
    """The logarithm of duration(units) / T_ori for each serial fraction of the grid."""
    return tuple(math.log((1.0 - serial) / units + serial) for serial in _GRID)


@dataclass(slots=True)
class Profile:
    """What is known of one function or key."""

    estimate: Estimate = field(default_factory=Estimate)
    fit: Fit = field(default_factory=Fit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """An answer of the history."""

    t_ori_s: float | None
    serial_fraction: float
    #: Where T_ori comes from: ``prior``, ``function`` or ``key``.
    source: str
    observations: int = 0
    #: Typical relative error of T_ori so far.
    error: float = 0.0


class History:
    """Learned profiles. Pure but for its own state; ``to_json`` and ``from_json`` carry it across restarts."""

    def __init__(self) -> None:
        self._profiles: OrderedDict[tuple[str, str], Profile] = OrderedDict()

    def observe(self, settlement: Settlement) -> None:
        """Learn from an action that succeeded."""
        action = settlement.action
        if settlement.outcome.state is not State.SUCCEEDED or settlement.lease is None:
            return
        units: float = settlement.lease.units(action.key) if action.key is not None else 1
        units = max(1.0, settlement.outcome.usage.get("mean_units", units))
        self.record(action.function, action.profile_key, units, settlement.execution_s)

    def record(self, function: str, key: str, units: float, duration_s: float) -> None:
        """One run of ``duration_s`` seconds on ``units``, a mean over time where they changed."""
        for name in dict.fromkeys(("", key)):
            profile = self._profile(function, name)
            profile.fit.observe(units, duration_s)
        serial = self.serial_fraction(function, key)
        t_ori_s = duration_s / ((1.0 - serial) / units + serial)
        for name in dict.fromkeys(("", key)):
            self._profile(function, name).estimate.observe(t_ori_s)

    def learned(self, function: str, key: str = "", *, prior_s: float | None = None) -> Learned:
        """The best estimate for one function and key."""
        serial = self.serial_fraction(function, key)
        for name, source in ((key, "key"), ("", "function")):
            profile = self._profiles.get((function, name))
            if (name or source == "function") and profile is not None and profile.estimate.count:
                estimate = profile.estimate
                return Learned(
                    t_ori_s=estimate.t_ori_s,
                    serial_fraction=serial,
                    source=source,
                    observations=estimate.count,
                    error=estimate.error,
                )
        return Learned(t_ori_s=prior_s, serial_fraction=serial, source="prior")

    def serial_fraction(self, function: str, key: str = "") -> float:
        """The key's fitted value, else the function's, else a guess."""
        for name in (key, ""):
            profile = self._profiles.get((function, name))
            fitted = None if profile is None else profile.fit.serial_fraction
            if fitted is not None:
                return fitted
        return PRIOR_SERIAL_FRACTION

    def describe(self, function: str) -> dict[str, object]:
        """Estimates and their errors by key, JSON-able; the key "" is the whole function."""
        return {
            key: {
                "t_ori_s": profile.estimate.t_ori_s,
                "observations": profile.estimate.count,
                "error": profile.estimate.error,
                "serial_fraction": profile.fit.serial_fraction,
            }
            for (name, key), profile in self._profiles.items()
            if name == function
        }

    def to_json(self) -> dict[str, object]:
        return {
            "version": 1,
            "profiles": [
                {"function": function, "key": key, "estimate": asdict(profile.estimate), "fit": asdict(profile.fit)}
                for (function, key), profile in self._profiles.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> History:
        """The history of an earlier run; what another version wrote is forgotten."""
        history = cls()
        profiles = data.get("profiles")
        if data.get("version") != 1 or not isinstance(profiles, list):
            return history
        for item in profiles:
            fit = Fit(**item["fit"])
            if len(fit.sums) == len(_GRID):
                history._profiles[item["function"], item["key"]] = Profile(Estimate(**item["estimate"]), fit)
        return history

    def _profile(self, function: str, key: str) -> Profile:
        profile = self._profiles.get((function, key))
        if profile is None:
            profile = self._profiles[function, key] = Profile()
        self._profiles.move_to_end((function, key))
        if len(self._profiles) > _KEYS_MAX:
            self._profiles.popitem(last=False)
        return profile
