"""Cells: one cluster shared out to several gateways, each with its own nodes, queue and part of every limit.

A trajectory belongs to a cell by the hash of its id, as clients would choose one without asking anybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from manager.config import ManagerSpec
from manager.errors import InvalidInput
from manager.resources.concurrency import ConcurrencySpec
from manager.resources.quota import QuotaSpec
from manager.simulation.faults import FaultTally
from manager.simulation.lease_audit import LeaseAudit
from manager.simulation.simulator import SimulationRun
from manager.simulation.trace import TracedTrajectory

#: Resources with a limit that cells share out.
Bounded = QuotaSpec | ConcurrencySpec


def cell_of(trajectory: str, cells: int) -> int:
    """Return a trajectory's cell, by rendezvous: with one cell more only those that move there move."""
    return max(range(cells), key=lambda cell: hashlib.blake2b(f"{cell}/{trajectory}".encode(), digest_size=8).digest())


def shared_out(spec: ManagerSpec, cells: int) -> list[ManagerSpec]:
    """Return each cell's part of a cluster; raises InvalidInput where there is too little for so many."""
    if not 1 <= cells <= len(spec.nodes):
        raise InvalidInput(f"{cells} cells of {len(spec.nodes)} nodes", component="simulate")
    parts = []
    for cell in range(cells):
        resources = {
            name: replace(one, limit=_part(name, one.limit, cell, cells)) if isinstance(one, Bounded) else one
            for name, one in spec.resources.items()
        }
        parts.append(replace(spec, nodes=spec.nodes[cell::cells], resources=resources))
    return parts


def play_cells(
    spec: ManagerSpec,
    trajectories: Sequence[TracedTrajectory],
    cells: int,
    play: Callable[[ManagerSpec, Sequence[TracedTrajectory]], SimulationRun],
) -> SimulationRun:
    """Return the run of all cells together; ``play`` runs one. Raises InvalidInput and Unsatisfiable."""
    runs = []
    for cell, part in enumerate(shared_out(spec, cells)):
        mine = [each for each in trajectories if cell_of(each.id, cells) == cell]
        runs.append(play(part, mine))
    return _merged(runs)


def _part(name: str, limit: int, cell: int, cells: int) -> int:
    if limit < cells:
        raise InvalidInput(f"{name}: {limit} units for {cells} cells", component="simulate")
    return limit // cells + (cell < limit % cells)


def _merged(runs: Sequence[SimulationRun]) -> SimulationRun:
    ledger, tally = LeaseAudit(), FaultTally()
    for run in runs:
        ledger.granted += run.ledger.granted
        for kind, used in run.ledger.used.items():
            ledger.used[kind] += used
        tally.add(run.faults)
    return SimulationRun(
        records=[record for run in runs for record in run.records],
        trajectories=sum(run.trajectories for run in runs),
        makespan_s=max(run.makespan_s for run in runs),
        ledger=ledger,
        resizes=sum(run.resizes for run in runs),
        restores=sum(run.restores for run in runs),
        replicas=sum(run.replicas for run in runs),
        replica_hits=sum(run.replica_hits for run in runs),
        faults=tally,
    )
