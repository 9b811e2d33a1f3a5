"""Leases: a trajectory whose client said that it lives ends when neither it nor any action was heard of for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import structlog

#: Seconds between two looks for leases that have run out.
LOOK_S = 1.0
#: Seconds for which what was opened is held for a client that went away before it was told so, and may ask again.
ABANDONED_S = 10.0

#: For how many seconds nothing of a trajectory has waited or run (0 while something does); None if it does not live.
IdleTime = Callable[[str], float | None]


class TrajectoryLease(NamedTuple):
    """For how long, and until when on the clock, in seconds."""

    lease_s: float
    until_s: float


class Leases:
    """Until when each leased trajectory is held for its client. Use from one event loop.

    There is none of what was opened without one before its first renewal, and none of an earlier gateway: ``idle_ttl``
    alone bounds those. At most one is kept for each trajectory that lives or is being opened.
    """

    def __init__(self, now: Callable[[], float], idle_s: IdleTime, end: Callable[[str], Awaitable[bool]]) -> None:
        self._now = now
        self._idle_s = idle_s
        self._end = end
        self._leases: dict[str, TrajectoryLease] = {}
        self._log = structlog.get_logger("gateway.leases")

    def hold(self, trajectory: str, lease_s: float) -> TrajectoryLease:
        """Hold one that is being opened, or lives, for so long from now on."""
        lease = self._leases[trajectory] = TrajectoryLease(lease_s, self._now() + lease_s)
        return lease

    def let_go(self, trajectory: str, lease: TrajectoryLease) -> None:
        """It could not be opened; nothing is done if somebody else holds it by now."""
        if self._leases.get(trajectory) is lease:
            del self._leases[trajectory]

    def abandon(self, trajectory: str, lease: TrajectoryLease) -> None:
        """Who opened it has gone before it was told so; nothing is done if somebody else holds it by now."""
        if self._leases.get(trajectory) is lease:
            self.hold(trajectory, min(lease.lease_s, ABANDONED_S))

    def renew(self, trajectories: Iterable[str], lease_s: float) -> list[str]:
        """Hold those that live for so long from now on; returns the others, which nobody holds any more."""
        gone = []
        for trajectory in trajectories:
            if self._idle_s(trajectory) is None:
                self._leases.pop(trajectory, None)
                gone.append(trajectory)
            else:
                self._leases[trajectory] = TrajectoryLease(lease_s, self._now() + lease_s)
        return gone

    def left_s(self, trajectory: str) -> float | None:
        """Seconds for which it is held yet; None if it has no lease."""
        lease = self._leases.get(trajectory)
        return None if lease is None else max(0.0, lease.until_s - self._now())

    async def end_lapsed_for_ever(self) -> None:
        """End what nobody holds any more, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.end_lapsed()

    async def end_lapsed(self) -> None:
        """End what its client holds no more, if no action of anybody used it for as long either."""
        for trajectory in [name for name, lease in self._leases.items() if lease.until_s <= self._now()]:
            lease, idle_s = self._leases.get(trajectory), self._idle_s(trajectory)
            if lease is None or lease.until_s > self._now():  # renewed while another was ended
                continue
            if idle_s is None:
                del self._leases[trajectory]
            elif idle_s >= lease.lease_s:
                del self._leases[trajectory]
                self._log.warning("a trajectory ended: its client has fallen silent", trajectory=trajectory)
                await self._end(trajectory)
