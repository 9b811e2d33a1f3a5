"""The ledger of a simulation: what is leased now, that nothing is leased twice, and how much was used over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from manager.lease import Grant, Lease

#: Seconds of one cell of the utilisation over time.
CELL_S = 1.0


class LeaseAudit:
    """Leases by action. Cores and devices are told apart one by one; other units are summed."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._owner: dict[tuple[str, int], str] = {}
        self._units: defaultdict[str, int] = defaultdict(int)
        self._since_s = 0.0
        #: Unit-seconds by kind.
        self.used: defaultdict[str, float] = defaultdict(float)
        self._cells: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self.granted = 0

    def grant(self, lease: Lease, now_s: float) -> None:
        """Enter a new lease; a unit that somebody holds is an error of the core."""
        assert lease.action_id not in self._leases, f"{lease.action_id} is leased twice"
        self._flow(now_s)
        self._leases[lease.action_id] = lease
        self.granted += 1
        for kind, grant in lease.grants.items():
            if self._shares(lease):
                continue
            self._units[kind] += grant.units
            for place in _places(kind, lease.node, grant):
                holder = self._owner.setdefault(place, lease.action_id)
                assert holder == lease.action_id, f"{place} is leased to {holder} and to {lease.action_id}"

    def settle(self, action_id: str, now_s: float) -> None:
        """Take a lease back; nothing for an action that never started."""
        lease = self._leases.pop(action_id, None)
        if lease is None:
            return
        self._flow(now_s)
        if self._shares(lease):
            return
        for kind, grant in lease.grants.items():
            self._units[kind] -= grant.units
            for place in _places(kind, lease.node, grant):
                assert self._owner.pop(place) == action_id

    def change(self, lease: Lease, now_s: float) -> None:
        """Replace a lease by its resized one."""
        self.settle(lease.action_id, now_s)
        self.grant(lease, now_s)
        self.granted -= 1

    def occupy(self, kind: str, units: int, now_s: float) -> None:
        """Count ``units`` more (or, negative, fewer) as in use: for baselines, which lease nothing."""
        self._flow(now_s)
        self._units[kind] += units
        assert self._units[kind] >= 0, f"more of {kind} was given back than was taken"

    @property
    def empty(self) -> bool:
        return not self._leases and not self._owner

    def series(self, kind: str) -> list[float]:
        """Mean units in use in each `CELL_S`."""
        cells = self._cells[kind]
        return [cells.get(cell, 0.0) / CELL_S for cell in range(max(cells, default=-1) + 1)]

    def _shares(self, lease: Lease) -> bool:
        """Whether it runs on the units of its batch's leader."""
        return bool(lease.batch) and lease.batch[0] != lease.action_id

    def _flow(self, now_s: float) -> None:
        """Account what was in use since the last change."""
        start_s, self._since_s = self._since_s, now_s
        if now_s <= start_s:
            return
        for kind, units in self._units.items():
            if units:
                self.used[kind] += units * (now_s - start_s)
                cells = self._cells[kind]
                for cell, span_s in _cells(start_s, now_s):
                    cells[cell] = cells.get(cell, 0.0) + units * span_s


def _places(kind: str, node: str, grant: Grant) -> Iterator[tuple[str, int]]:
    where = f"{kind}:{node}"
    if grant.chunk is not None:
        where = grant.pool
        for device in grant.chunk.devices:
            yield where, device
    for core in grant.cores:
        yield where, core


def _cells(start_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    while start_s < end_s:
        cell = int(start_s / CELL_S)
        until_s = min(end_s, (cell + 1) * CELL_S)
        if until_s <= start_s:  # a rounding at the edge of a cell
            until_s = min(end_s, (cell + 2) * CELL_S)
        yield cell, until_s - start_s
        start_s = until_s
