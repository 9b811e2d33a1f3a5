"""Restores as measured: what one of each service and DoP takes, for the scheduler's estimate."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import fmean

#: Measurements kept of each kind: the estimate follows a machine that has become slower or faster.
KEPT = 32
#: An estimate is worth telling once it has moved by this part of itself.
WORTH_TELLING = 0.1


class Restores:
    """Seconds by service, DoP and bytes; the node's own rate stands in for what was never measured."""

    def __init__(self, bytes_per_s: float) -> None:
        """``bytes_per_s`` is assumed until anything is measured."""
        self._assumed = bytes_per_s
        self._seconds: dict[tuple[str, int, int], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._rates: deque[float] = deque(maxlen=KEPT)

    def add(self, service: str, dop: int, size_bytes: int, seconds: float) -> None:
        """Note one restore of ``size_bytes`` on each device, until the slowest had all of it."""
        self._seconds[service, dop, size_bytes].append(seconds)
        if size_bytes and seconds > 0:
            self._rates.append(size_bytes / seconds)

    def estimate(self, service: str, bytes_by_dop: Mapping[int, int]) -> dict[int, float]:
        """Seconds to restore the service at each DoP."""
        rate = middle(self._rates) if self._rates else self._assumed
        found = {}
        for dop, size in bytes_by_dop.items():
            measured = self._seconds.get((service, dop, size))
            found[dop] = middle(measured) if measured else size / rate
        return found


def middle(values: Iterable[float]) -> float:
    """The mean of the middle third: one slow restore among many changes nothing."""
    ordered = sorted(values)
    cut = len(ordered) // 3
    return fmean(ordered[cut : len(ordered) - cut])


def has_moved(told: Mapping[int, float], now: Mapping[int, float]) -> bool:
    """Return whether an estimate differs enough from the one last reported to report it again."""
    return any(abs(seconds - told.get(dop, 0.0)) > WORTH_TELLING * told.get(dop, 0.0) for dop, seconds in now.items())
