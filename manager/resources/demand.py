"""Demand: how often each service was used of late, which says how likely a resident copy is needed again."""

from __future__ import annotations

import math

#: Seconds in which a use counts for ever less.
REUSE_S = 5.0


class Demand:
    """Uses by service, each fading over `REUSE_S`."""

    def __init__(self) -> None:
        #: Service -> (faded uses, when they were counted last).
        self._uses: dict[str, tuple[float, float]] = {}

    def use(self, service: str, now_s: float) -> None:
        self._uses[service] = (self.recent(service, now_s) + 1.0, now_s)

    def recent(self, service: str, now_s: float) -> float:
        """Uses in about the last `REUSE_S` seconds: with even arrivals, the rate times that."""
        uses, at_s = self._uses.get(service, (0.0, now_s))
        return uses * math.exp(min(0.0, at_s - now_s) / REUSE_S)
