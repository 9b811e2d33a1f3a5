"""A wide rigid action among narrow ones waits for its age bound and the longest that runs, under every policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from manager.action import Amdahl, UnitSet
from manager.simulation.simulator import Simulation, cluster
from manager.simulation.workloads import TracedTrajectory, TraceStep

UNITS = 16
SPAN_S = 60.0
WIDE_S = 2.0
#: What may wait before it at that load.
BACKLOG_S = 1.0
#: Five mean durations of what runs, the longer ones of which are more of it; the others overtake no more than they say.
AGE_S = {"price": 5.0 * 1.35, "fixed": 0.0, "paper": 0.0}


def once(name: str, arrival_s: float, kind: str, units: int, seconds: float) -> TracedTrajectory:
    step = TraceStep(think_s=0.0, function="f", cost={kind: UnitSet.fixed(units)}, t_ori_s=seconds)
    return TracedTrajectory(id=name, arrival_s=arrival_s, steps=(step,))


def elastic(one: TracedTrajectory) -> TracedTrajectory:
    """The same work, of up to four cores that may change while it runs."""
    step = replace(
        one.steps[0], cost={"cpu": UnitSet.span(1, 4)}, key="cpu", elasticity=Amdahl(0.05), malleable=True, think_s=0.0
    )
    return replace(one, steps=(step,))


def narrow_ones(kind: str, load: float, seed: int) -> tuple[list[TracedTrajectory], float]:
    """Actions of one unit that ask for ``load`` of all units, and the longest in seconds."""
    chance = random.Random(seed)
    narrow: list[TracedTrajectory] = []
    at_s = longest_s = 0.0
    while at_s < SPAN_S:
        at_s += chance.expovariate(load * UNITS)
        seconds = chance.gammavariate(4.0, 0.25)
        longest_s = max(longest_s, seconds)
        narrow.append(once(f"n{len(narrow)}", at_s, kind, 1, seconds))
    return narrow, longest_s


def waits(trajectories: list[TracedTrajectory], kind: str, policy: str) -> dict[str, float]:
    on_cores = kind == "cpu"
    spec = cluster(nodes=1, cores=UNITS if on_cores else 1, devices=0 if on_cores else UNITS, policy=policy)
    return {record.trajectory: record.queue_s for record in Simulation(spec, trajectories).run().records}


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.7, 0.85])
@pytest.mark.parametrize("policy", sorted(AGE_S))
@pytest.mark.parametrize("seed", [1, 2])
def test_narrow_actions_do_not_keep_a_wide_one_from_its_devices(policy: str, load: float, seed: int) -> None:
    narrow, longest_s = narrow_ones("gpu", load, seed)
    wide = [once(f"wide{index}", 10.0 + 15.0 * index, "gpu", 8, WIDE_S) for index in range(3)]
    waited = waits([*narrow, *wide], "gpu", policy)
    bound_s = AGE_S[policy] + longest_s + BACKLOG_S
    assert max(waited[one.id] for one in wide) <= bound_s, {one.id: waited[one.id] for one in wide}
    # What the reservation costs the others is what their devices do not do meanwhile.
    assert max(waited.values()) <= bound_s + longest_s + WIDE_S


@pytest.mark.slow
@pytest.mark.parametrize("width", [6, 16])
@pytest.mark.parametrize("policy", ["adaptive", "price", "fixed", "paper"])
@pytest.mark.parametrize("seed", [1, 2])
def test_narrow_actions_do_not_keep_a_wide_one_from_its_cores(policy: str, width: int, seed: int) -> None:
    """On cores nothing that would make the oldest wait longer starts before it: the age bound is not used up."""
    narrow, longest_s = narrow_ones("cpu", 0.7, seed)
    narrow = [elastic(one) if index % 4 == 0 else one for index, one in enumerate(narrow)]
    wide = [once(f"wide{index}", 10.0 + 15.0 * index, "cpu", width, WIDE_S) for index in range(3)]
    waited = waits([*narrow, *wide], "cpu", policy)
    # An elastic one that starts with few cores and workers takes longer than with one, by what the workers cost.
    bound_s = longest_s + 2.0
    assert max(waited[one.id] for one in wide) <= bound_s, {one.id: waited[one.id] for one in wide}
    # While all sixteen cores are one's, the others queue up; they are worked off at three tenths of the speed.
    assert max(waited.values()) <= bound_s + 2 * (longest_s + WIDE_S)


@pytest.mark.slow
def test_what_a_wide_action_waits_for_is_not_left_idle() -> None:
    """Short actions go on beside the long ones that it waits for: they would end before these anyway."""
    long = [once(f"long{index}", 0.0, "cpu", 1, 30.0) for index in range(4)]
    short = [once(f"s{index}", 1.0 + 0.1 * index, "cpu", 1, 1.0) for index in range(200)]
    wide = once("wide", 0.5, "cpu", UNITS, 1.0)
    for policy in ("adaptive", "price"):
        waited = waits([*long, *short, wide], "cpu", policy)
        assert waited["wide"] <= 30.0, policy
        assert max(waited[one.id] for one in short) < 1.0, policy
    assert max(waits([*long, *short, wide], "cpu", "fixed").values()) > 20.0, "there was nothing to backfill"
