"""What was learned of durations and elasticity, per function and per caller's key.

T_ori is estimated in rising precision: the function's declared prior, the function's mean, the key's own mean. Each
mean is exponentially weighted on log durations and each observation is clipped to a few of the key's own deviations,
so that an outlier moves little and a drift is followed. The serial fraction s is fitted from the same observations:
with Amdahl's law duration(m) = T_ori ((1 - s) / m + s), so runs at different widths tell s apart from T_ori. So is a
function's batch marginal: n alike that run together take 1 + marginal (n - 1) times as long as one. Where calls have
a size, T_ori(x) = a + b x: the mean is then of what a call of usual size takes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from manager.action import PRIOR_BATCH_MARGINAL
from manager.batch import Kin, Work
from manager.input_size import SizeLine
from manager.learning.fits import LEAST_S, BatchFit, Fit
from manager.learning.sizes import SizeFit, Sizes
from manager.outcome import Settlement, State

#: Weight of the newest observation, once there are many.
_NEWEST = 0.1
#: Observations are clipped to this many deviations of the logarithm, and the deviation is at least the floor.
_CLIP_DEVIATIONS = 3.0
_LEAST_DEVIATION = 0.2
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
            weight = max(_NEWEST * share, share / (self.count + share))
            clipped = max(-reach, min(reach, miss))
            self.log_mean += weight * clipped
            # A drift beyond the reach widens the deviation, so that the next observations are believed sooner.
            self.log_deviation += weight * (min(abs(miss), 2 * reach) - self.log_deviation)
            self.error += weight * (min(abs(miss), 2 * reach) - self.error)
        self.count += share


@dataclass(slots=True)
class Profile:
    """What is known of one function or key."""

    estimate: Estimate = field(default_factory=Estimate)
    fit: Fit = field(default_factory=Fit)
    #: Kept for the function as a whole only.
    batches: BatchFit = field(default_factory=BatchFit)
    #: None until a call had a size.
    sizes: SizeFit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
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


class History:
    """Learned profiles. Pure but for its own state; ``to_json`` and ``from_json`` carry it across restarts."""

    def __init__(self) -> None:
        self._profiles: OrderedDict[tuple[str, str], Profile] = OrderedDict()
        #: By function, the path of its calls' size.
        self._size_paths: dict[str, str] = {}

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
        names = dict.fromkeys(("", key))
        share, factor, fit = 1.0, 1.0, self._profile(function, "").batches
        if members:
            work, own_s = self._work(members, Kin(function, key, size), early=early)
            share = 1.0 / sum(members.values())
            fit.observe(units, work, own_s, duration_s, share)
            factor = work.seconds(self.batch_marginal(function)) / own_s
        if share == 1.0 or fit.marginal is not None:  # a guessed marginal would pass for a gain of width
            for name in names:
                usual_s = duration_s / factor / self._relative(function, name, size)
                group = self._profile(function, "").fit.serial_fraction if name else None
                self._profile(function, name).fit.observe(units, usual_s, share, group or 0.0)
        serial = self.serial_fraction(function, key)
        t_ori_s = duration_s / factor / ((1.0 - serial) / units + serial)
        for name in names:
            if size is not None:
                self._observe_size(function, name, size, t_ori_s, share)
            self._profile(function, name).estimate.observe(t_ori_s, share)

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
                return Learned(
                    t_ori_s=estimate.t_ori_s if sizes is None or size is None else sizes.t_ori_s(size),
                    line=SizeLine(estimate.t_ori_s) if sizes is None else sizes.line,
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
        own, whole = (self._profiles.get((function, name)) for name in (key, ""))
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

    def to_json(self) -> dict[str, object]:
        """Return all of it as JSON, of which lists are its own: write it down at once."""
        return {
            "version": 1,
            "size_paths": dict(self._size_paths),
            "profiles": [
                {
                    "function": function,
                    "key": key,
                    "estimate": _shallow(profile.estimate),
                    "fit": _shallow(profile.fit),
                    **({} if key else {"batches": asdict(profile.batches)}),
                    **({} if profile.sizes is None else {"sizes": _shallow(profile.sizes)}),
                }
                for (function, key), profile in self._profiles.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> History:
        """The history of an earlier run; what another version wrote is forgotten, what it did not know yet is new."""
        history = cls()
        profiles = data.get("profiles")
        if data.get("version") != 1 or not isinstance(profiles, list):
            return history
        paths = data.get("size_paths")
        history._size_paths = {**paths} if isinstance(paths, dict) else {}
        for item in profiles:
            history._profiles[item["function"], item["key"]] = Profile(
                Estimate(**item["estimate"]),
                Fit.from_json(item["fit"]),
                BatchFit.from_json(item.get("batches")),
                SizeFit.from_json(item.get("sizes")),
            )
        return history

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

    def _relative(self, function: str, key: str, size: float | None) -> float:
        """What a call of ``size`` takes over one of the usual size; 1 while that is not known."""
        sizes = None if size is None else self._sizes(function, key)
        return 1.0 if sizes is None or size is None else sizes.relative(size)

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
            profile = self._profiles[function, key] = Profile()
        self._profiles.move_to_end((function, key))
        if len(self._profiles) > _KEYS_MAX:
            self._profiles.popitem(last=False)
        return profile


def _shallow(value: Estimate | Fit | SizeFit) -> dict[str, object]:
    """Return the fields of something flat, which `asdict` would copy number by number."""
    return {each.name: getattr(value, each.name) for each in fields(value)}


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
