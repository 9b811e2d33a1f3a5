"""When a batch ends, from how long its like took: what is estimated of lifetimes, with those that still go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
        told = now > 0.0
        spare = ages.size - needed + 0.5

        def going_on(seconds: float) -> float:
            share = np.divide(self.survival(ages + seconds), now, out=np.ones_like(now), where=told)
            return float(np.sum(share))

        low, high = 0.0, float(self._times[-1])
        if going_on(high) >= spare:
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if going_on(middle) < spare else (middle, high)
        return high
