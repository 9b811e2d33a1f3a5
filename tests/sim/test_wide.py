"""A wide rigid action among narrow ones is served within its age bound."""

from __future__ import annotations

import random

import pytest

from manager.action import UnitSet
from manager.simulation.cluster import cluster
from manager.simulation.simulator import Simulation
from manager.simulation.trace import TracedTrajectory, TraceStep

DEVICES = 16
SPAN_S = 60.0


def once(name: str, arrival_s: float, units: int, seconds: float) -> TracedTrajectory:
    step = TraceStep(think_s=0.0, function="f", cost={"gpu": UnitSet.fixed(units)}, t_ori_s=seconds)
    return TracedTrajectory(id=name, arrival_s=arrival_s, steps=(step,))


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.7, 0.85])
@pytest.mark.parametrize("policy", ["price"])
@pytest.mark.parametrize("seed", [1, 2])
def test_narrow_actions_do_not_keep_a_wide_one_from_its_devices(policy: str, load: float, seed: int) -> None:
    chance = random.Random(seed)
    narrow: list[TracedTrajectory] = []
    at_s = longest_s = 0.0
    while at_s < SPAN_S:
        at_s += chance.expovariate(load * DEVICES)
        seconds = chance.gammavariate(4.0, 0.25)
        longest_s = max(longest_s, seconds)
        narrow.append(once(f"n{len(narrow)}", at_s, 1, seconds))
    wide = [once(f"wide{index}", 10.0 + 15.0 * index, 8, 2.0) for index in range(3)]
    records = Simulation(cluster(cores=1, nodes=1, devices=DEVICES, policy=policy), [*narrow, *wide]).run().records
    waits = {record.trajectory: record.queue_s for record in records}
    age_s = 5.0 * 1.35  # five mean durations of what runs: the longer ones are more of it
    assert max(waits[one.id] for one in wide) <= age_s + longest_s, {one.id: waits[one.id] for one in wide}
    # What the reservation costs the others is what their devices do not do meanwhile.
    assert max(waits.values()) <= age_s + 2 * longest_s + 2.0
