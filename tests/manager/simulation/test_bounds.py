"""Lower bounds lie below everything that can be done, and touch it where that is known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manager.action import Amdahl, UnitSet
from manager.resources.pools import QuotaSpec
from manager.simulation.bounds import LowerBound, lower_bound, shortest_remaining
from manager.simulation.simulator import Physics, Simulation, cluster
from manager.simulation.workloads import Search, Teachers, TracedTrajectory, TraceStep, coding, deepsearch, mopd

CORES = 4

FREE = Physics(worker_cost_s=0.0, resize_cost_s=0.0)


def one(name: str, arrival_s: float, t_ori_s: float, serial: float, most: int) -> TracedTrajectory:
    step = TraceStep(
        think_s=0.0,
        function="f",
        cost={"cpu": UnitSet.span(1, most)},
        key="cpu",
        t_ori_s=t_ori_s,
        elasticity=Amdahl(serial),
        malleable=True,
    )
    return TracedTrajectory(id=name, arrival_s=arrival_s, steps=(step,))


def total_act_s(trajectories: list[TracedTrajectory], cores: int, policy: str, physics: Physics = FREE) -> float:
    run = Simulation(cluster(cores=cores, nodes=1, policy=policy), trajectories, physics=physics).run()
    return sum(record.act_s for record in run.records)


jobs = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.floats(0.5, 60.0), st.floats(0.0, 0.5), st.integers(1, 8)),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(jobs, st.integers(1, 8))
def test_no_policy_beats_the_bound(drawn: list[tuple[float, float, float, int]], cores: int) -> None:
    trajectories = [one(f"t{i}", *job[:3], min(job[3], cores)) for i, job in enumerate(drawn)]
    bound = lower_bound(trajectories, {"cpu": cores}, rounds=8)
    for policy in ("paper", "adaptive", "price", "fixed:2"):
        assert bound.best_s <= total_act_s(trajectories, cores, policy) * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=15)
@given(jobs, st.integers(1, 8), st.floats(0.1, 3.0))
def test_no_policy_beats_the_bound_that_charges_workers(
    drawn: list[tuple[float, float, float, int]], cores: int, worker_cost_s: float
) -> None:
    trajectories = [one(f"t{i}", *job[:3], min(job[3], cores)) for i, job in enumerate(drawn)]
    bound = lower_bound(trajectories, {"cpu": cores}, worker_cost_s=worker_cost_s, rounds=8)
    physics = Physics(worker_cost_s=worker_cost_s, resize_cost_s=0.0)
    for policy in ("paper", "adaptive", "fixed:1", "fixed:3,wait_s=9"):
        assert bound.best_s <= total_act_s(trajectories, cores, policy, physics) * (1 + 1e-9)


def test_alone_nothing_is_lost_to_the_bound() -> None:
    trajectories = [one("t", 0.0, 80.0, 0.05, 32)]
    bound = lower_bound(trajectories, {"cpu": 64})
    assert bound.best_s == pytest.approx(total_act_s(trajectories, 64, "paper"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_presets_stay_above_their_bounds(seed: int) -> None:
    for workload, cores, gpus in [(coding(48, seed), 64, 0), (mopd(60, seed), 0, 8)]:
        capacity = {"cpu": cores} if cores else {"gpu": gpus}
        spec = cluster(cores=cores, nodes=1, devices=gpus, services=workload.services, policy="adaptive")
        run = Simulation(spec, workload.trajectories, physics=FREE).run()
        bound = lower_bound(workload.trajectories, capacity, rounds=8)
        assert bound.best_s <= sum(record.act_s for record in run.records)


@pytest.mark.parametrize("marginal", [0.0, 0.2, 1.0])
def test_batches_do_not_beat_the_bound_that_knows_of_them(marginal: float) -> None:
    workload = mopd(80, 1, Teachers(services=1, rollout_median_s=1.0, request_tokens=1000))
    spec = cluster(cores=0, nodes=1, devices=2, services=workload.services)
    run = Simulation(spec, workload.trajectories, physics=Physics(batch_marginal=marginal)).run()
    act_s = sum(record.act_s for record in run.records)
    bound = lower_bound(workload.trajectories, {"gpu": 2}, batch_marginal=marginal, rounds=8)
    assert bound.best_s <= act_s
    if marginal == 0.0:
        assert lower_bound(workload.trajectories, {"gpu": 2}, rounds=8).best_s > act_s, "each alone would take longer"


@pytest.mark.slow
def test_a_tight_quota_leaves_the_bound_valid() -> None:
    workload = deepsearch(60, 1, Search(quota=2, spread_s=1.0))
    capacity = {"cpu": 64, "gpu": 8}
    bound = lower_bound(workload.trajectories, capacity, workload.quotas)
    spec = cluster(cores=64, nodes=1, devices=8, services=workload.services, resources=workload.quotas)
    run = Simulation(spec, workload.trajectories, physics=FREE).run()
    assert 0 < bound.infinite_s <= bound.best_s <= sum(record.act_s for record in run.records)


#: (kind of step, seconds of thought before it, seconds, units)
drawn_steps = st.lists(
    st.tuples(
        st.sampled_from(["shell", "suite", "search", "parse"]),
        st.floats(0.0, 5.0),
        st.floats(0.1, 20.0),
        st.integers(1, CORES),
    ),
    min_size=1,
    max_size=4,
)

worlds = st.lists(st.tuples(st.floats(0.0, 10.0), drawn_steps), min_size=1, max_size=6)


def step_of(kind: str, think_s: float, seconds: float, units: int) -> TraceStep:
    if kind == "suite":
        return TraceStep(
            think_s=think_s,
            function=kind,
            cost={"cpu": UnitSet.span(1, units)},
            key="cpu",
            t_ori_s=seconds,
            elasticity=Amdahl(0.1),
            malleable=True,
        )
    cost = {"search": UnitSet.fixed(1)} if kind in ("search", "parse") else {}
    cost |= {"cpu": UnitSet.fixed(units)} if kind != "search" else {}
    return TraceStep(think_s=think_s, function=kind, cost=cost, t_ori_s=seconds)


def quota_act_s(
    trajectories: list[TracedTrajectory], quotas: dict[str, QuotaSpec], policy: str, physics: Physics
) -> float:
    spec = cluster(cores=CORES, nodes=1, resources=quotas, policy=policy)
    return sum(record.act_s for record in Simulation(spec, trajectories, physics=physics).run().records)


def bound_of(trajectories: list[TracedTrajectory], quotas: dict[str, QuotaSpec], worker_cost_s: float) -> LowerBound:
    return lower_bound(trajectories, {"cpu": CORES}, quotas, worker_cost_s=worker_cost_s, rounds=2)


@pytest.mark.slow
@settings(max_examples=12)
@given(worlds, st.integers(1, 3), st.sampled_from([0.5, 3.0, 60.0]), st.sampled_from([0.0, 0.3]))
def test_no_policy_beats_any_part_of_the_bound(
    world: list[tuple[float, list[tuple[str, float, float, int]]]], limit: int, period_s: float, worker_cost_s: float
) -> None:
    trajectories = [
        TracedTrajectory(id=f"t{n}", arrival_s=at_s, steps=tuple(step_of(*one) for one in steps))
        for n, (at_s, steps) in enumerate(world)
    ]
    quotas = {"search": QuotaSpec(limit=limit, period_s=period_s)}
    bound = bound_of(trajectories, quotas, worker_cost_s)
    physics = Physics(worker_cost_s=worker_cost_s, resize_cost_s=0.0)
    for policy in ("paper", "adaptive", "fixed:1"):
        best_s = quota_act_s(trajectories, quotas, policy, physics) * (1 + 1e-9)
        assert max(bound.infinite_s, bound.area_s, bound.price_s) <= best_s


def test_where_a_quota_of_a_long_period_binds_the_bound_is_near_what_can_be_done() -> None:
    call = TraceStep(think_s=0.0, function="search", cost={"search": UnitSet.fixed(1)}, t_ori_s=0.5)
    trajectories = [TracedTrajectory(id=f"t{n}", steps=(call,)) for n in range(24)]
    quotas = {"search": QuotaSpec(limit=2, period_s=100.0)}
    done_s = quota_act_s(trajectories, quotas, "fixed", Physics())
    bound = bound_of(trajectories, quotas, 0.0)
    assert 0.8 * done_s < bound.best_s <= done_s


def test_in_overload_the_work_before_the_last_action_counts() -> None:
    shell = TraceStep(think_s=0.0, function="shell", cost={"cpu": UnitSet.fixed(1)}, t_ori_s=10.0)
    trajectories = [TracedTrajectory(id=f"t{n}", steps=(shell,) * 4) for n in range(24)]
    done_s = quota_act_s(trajectories, {}, "fixed", Physics())
    bound = bound_of(trajectories, {}, 0.0)
    assert bound.area_s > 0.55 * done_s and bound.best_s <= done_s


def test_shortest_remaining_work_is_the_optimum_of_a_small_case() -> None:
    # The long one starts, is interrupted by the short one at 1, and ends at 5.
    assert shortest_remaining([(0.0, 4.0), (1.0, 1.0)]) == pytest.approx(1.0 + 5.0)
