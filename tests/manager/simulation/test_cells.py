"""Cells: a cluster shared out loses nothing of itself, and a trajectory knows its cell by its id alone."""

from __future__ import annotations

import pytest

from manager.errors import InvalidInput
from manager.resources.quota import QuotaSpec
from manager.simulation.cells import cell_of, shared_out
from manager.simulation.cluster import cluster
from manager.simulation.faults import Scenario, read_fault
from manager.simulation.simulate import Size, preset, simulate


def test_the_parts_are_the_whole() -> None:
    whole = cluster(cores=100, nodes=10, devices=16, resources={"search": QuotaSpec(limit=10, period_s=1.0)})
    parts = shared_out(whole, 3)
    assert sorted(node.name for part in parts for node in part.nodes) == sorted(node.name for node in whole.nodes)
    limits = [part.resources["search"] for part in parts]
    assert [each.limit for each in limits if isinstance(each, QuotaSpec)] == [4, 3, 3]


def test_too_little_for_so_many_cells_is_refused() -> None:
    with pytest.raises(InvalidInput, match="3 cells of 2 nodes"):
        shared_out(cluster(cores=4, nodes=2), 3)
    with pytest.raises(InvalidInput, match="search: 1 units for 2 cells"):
        shared_out(cluster(cores=4, nodes=2, resources={"search": QuotaSpec(limit=1, period_s=1.0)}), 2)


def test_one_cell_more_moves_trajectories_to_it_alone() -> None:
    names = [f"t{number}" for number in range(500)]
    before, after = [cell_of(name, 4) for name in names], [cell_of(name, 5) for name in names]
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {4}
    assert min(after.count(cell) for cell in range(5)) > 60


def test_cells_do_all_of_the_work_also_while_nodes_fail() -> None:
    workload = preset("ai-coding", 24, seed=1)
    size = Size(nodes=6, cores=96)
    scenario = Scenario(cells=3, faults=(read_fault("lose:2@40+60"),), seed=2)
    run = simulate(workload, "adaptive", size, scenario=scenario)
    assert run.trajectories == 24 and run.faults.nodes_lost == 2
    done = {record.trajectory.partition("#")[0] for record in run.records}
    assert done == {each.id for each in workload.trajectories}
    assert run.ledger.used["cpu"] > 0
