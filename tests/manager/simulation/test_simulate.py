"""The simulator: complete, deterministic, and honest about what it is asked; its workloads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from manager.action import Grant, Lease, Settlement, UnitSet
from manager.config import ServiceSpec
from manager.errors import InvalidInput
from manager.simulation.baselines import BASELINES, POD_START_S, PODS_PER_NODE_S
from manager.simulation.simulate import Size, preset, run, simulate
from manager.simulation.simulator import Learning, LeaseAudit, Oracle, Physics, SimulationRun
from manager.simulation.workloads import (
    BATCH_TOKENS,
    PRESETS,
    Coding,
    Teachers,
    TracedTrajectory,
    TraceStep,
    Workload,
    coding,
    mopd,
    service,
)

POLICIES = ("adaptive", "price", "paper", "fixed:4")
SMALL = Size(nodes=2, cores=64, gpus=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ai-coding", "ai-coding-burst", "mopd", "deepsearch", "mopd+search", "mixed"])
def test_every_preset_completes_under_every_policy(name: str) -> None:
    workload = preset(name, 24, 1)
    result = run(workload, [*POLICIES, *BASELINES], SMALL)
    assert [row.policy for row in result.rows] == [*POLICIES, *BASELINES]
    assert all(row.failures == 0 for row in result.rows[: len(POLICIES)])
    for row in result.rows:
        assert (row.act_s > 0) == (row.actions > 0) and row.actions <= workload.actions
        assert min(row.queue_s, row.overhead_s, row.execution_s) >= -1e-9
        assert row.act_s == pytest.approx(row.queue_s + row.overhead_s + row.execution_s)
        assert all(0 <= share <= 1 + 1e-9 for share in row.utilisation.values())


def test_a_baseline_says_where_its_time_and_its_units_went() -> None:
    k8s = run(preset("ai-coding-burst", 24, 1), ["k8s"], SMALL).rows[0]
    # Each trajectory's pod starts once, and it has thought for a part of that.
    assert k8s.queue_s > 0 and 2.0 < k8s.overhead_s <= 3.0
    assert 0 < k8s.utilisation["cpu"] < 1
    loading = run(preset("mopd", 24, 1), ["serverless-llm"], SMALL).rows[0]
    assert loading.overhead_s > 0 and loading.restores > 0 and 0 < loading.utilisation["gpu"] <= 1


def test_a_pod_is_there_when_its_trajectory_has_thought_long_enough() -> None:
    step = TraceStep(think_s=9.0, function="shell", cost={"cpu": UnitSet.fixed(1)}, t_ori_s=1.0)
    work = Workload(name="one", trajectories=(TracedTrajectory(id="a", arrival_s=2.0, steps=(step,)),))
    run_ = simulate(work, "k8s", SMALL)
    assert [(one.queue_s, one.overhead_s, one.execution_s) for one in run_.records] == [pytest.approx((0.0, 0.0, 1.0))]


def test_sandboxes_are_charged_as_pods_are() -> None:
    step = TraceStep(think_s=0.0, function="shell", cost={"cpu": UnitSet.fixed(1)}, t_ori_s=1.0)
    work = Workload(
        name="many", trajectories=tuple(TracedTrajectory(id=f"t{n}", steps=(step, step)) for n in range(20))
    )
    physics = Physics(sandbox_start_s=POD_START_S, sandboxes_per_node_s=PODS_PER_NODE_S)
    ours, pods = simulate(work, "fixed", SMALL, physics=physics), simulate(work, "k8s", SMALL)
    assert sum(one.overhead_s for one in ours.records) == pytest.approx(
        sum(one.overhead_s + one.queue_s for one in pods.records)
    )
    assert sum(one.overhead_s for one in simulate(work, "fixed", SMALL).records) == 0.0


def test_baselines_of_several_kinds_are_shown_by_their_own_actions() -> None:
    result = run(preset("mixed", 24, 1), ["price", "k8s", "static-gpu", "uncontrolled", "k8s/static-gpu"], SMALL)
    actions = {row.policy: row.actions for row in result.rows}
    assert actions["k8s"] + actions["static-gpu"] + actions["uncontrolled"] == actions["price"] == result.actions
    assert actions["k8s/static-gpu"] == actions["k8s"] + actions["static-gpu"]
    same = json.loads(result.to_json())["same_actions"]
    assert [one["policy"] for one in same] == ["k8s", "static-gpu", "uncontrolled", "k8s/static-gpu"]
    assert all(one["than_act_s"] > 0 and one["than"] == "price" for one in same)
    assert "k8s is shown by its own" in result.table()


def test_static_services_batch_as_ours_do() -> None:
    several = mopd(40, 1, Teachers(services=1, rollout_median_s=1.0, request_tokens=1000))
    one = Size(nodes=1, cores=0, gpus=1)
    alone, together = (
        sum(record.act_s for record in simulate(several, "static-gpu", one, physics=physics).records)
        for physics in (Physics(batch_marginal=1.0), Physics(batch_marginal=0.1))
    )
    assert together < 0.5 * alone


def test_the_best_constant_width_is_a_row_of_its_own() -> None:
    result = run(preset("ai-coding", 12, 1), ["adaptive"], Size(nodes=1, cores=16, gpus=0), with_best_fixed=True)
    assert result.best_fixed is not None and f"best fixed ({result.best_fixed.policy})" in result.table()
    assert json.loads(result.to_json())["best_fixed"]["act_s"] == pytest.approx(result.best_fixed.act_s, abs=1e-5)
    constant = run(preset("ai-coding", 12, 1), ["fixed:1", "fixed:8"], Size(nodes=1, cores=16, gpus=0))
    assert result.best_fixed.act_s <= min(row.act_s for row in constant.rows)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes() -> None:
    def once(seed: int) -> str:
        return run(preset("mixed", 24, seed), POLICIES, SMALL, with_bound=True).to_json()

    assert once(3) == once(3)
    assert once(3) != once(4)


@pytest.mark.slow
def test_the_answer_is_json_and_a_table_with_the_bound() -> None:
    result = run(preset("ai-coding", 24, 1), ["adaptive"], SMALL, with_bound=True)
    value = json.loads(result.to_json())
    assert value["policies"][0]["over_bound"] >= 1.0
    assert value["bound"]["act_s"] == pytest.approx(result.bound_s, abs=1e-5)
    assert "over bound" in result.table() and "adaptive" in result.table()


@pytest.mark.slow
def test_the_fewest_cores_for_a_target_reach_it_and_fewer_do_not() -> None:
    workload = preset("ai-coding", 24, 1)
    relaxed = run(workload, ["adaptive"], SMALL)
    target_s = 1.3 * relaxed.rows[0].act_s
    found = run(workload, ["adaptive"], SMALL, find="cores", target_act_s=target_s).found
    assert found is not None
    kind, cores, act_s = found
    assert kind == "cores" and act_s <= target_s and cores < SMALL.cores


def test_a_target_that_no_size_reaches_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no size reaches"):
        run(preset("ai-coding", 4, 1), ["price"], Size(nodes=1, cores=8), find="cores", target_act_s=0.001)


@pytest.mark.slow
def test_resizes_and_workers_are_charged() -> None:
    workload = coding(48, 1)
    cheap = simulate(workload, "adaptive", SMALL, physics=Physics(worker_cost_s=0.0, resize_cost_s=0.0))
    dear = simulate(workload, "adaptive", SMALL, physics=Physics(worker_cost_s=1.0, resize_cost_s=0.1))
    assert cheap.resizes > 0
    assert sum(record.act_s for record in dear.records) > sum(record.act_s for record in cheap.records)
    assert sum(record.overhead_s for record in dear.records) > 0


@pytest.mark.slow
def test_learning_comes_close_to_exact_profiles_after_one_step() -> None:
    workload = coding(64, 2, Coding(suites=8))
    learning = Learning()
    simulate(workload, "adaptive", SMALL, knowledge=learning)
    learned = simulate(workload, "adaptive", SMALL, knowledge=learning)
    oracle = simulate(workload, "adaptive", SMALL)
    assert sum(r.act_s for r in learned.records) <= 1.1 * sum(r.act_s for r in oracle.records)


def followed(service: str | None, *, restore_s: float, after_s: float) -> Workload:
    """A request of four seconds to a model, and another one ``after_s`` later, to ``service`` or to none."""
    step = TraceStep(think_s=0.0, function="judge", cost={"gpu": UnitSet.fixed(1)}, t_ori_s=4.0, service="judge")
    first = TracedTrajectory(id="first", steps=(step,))
    second = TracedTrajectory(id="second", arrival_s=after_s, steps=(replace(step, service=service),))
    judge = ServiceSpec(name="judge", bytes_by_dop={1: 30 * 10**9}, restore_s_by_dop={1: restore_s})
    return Workload(name="followed", trajectories=(first, second), services={"judge": judge})


TWO = Size(nodes=1, cores=0, gpus=2)


def second(run_: SimulationRun) -> tuple[float, float]:
    """Return the overhead and the execution of the later request."""
    return next((one.overhead_s, one.execution_s) for one in run_.records if one.trajectory == "second")


def test_a_copy_in_free_memory_spares_the_next_request_its_restore() -> None:
    workload = followed("judge", restore_s=1.0, after_s=2.0)
    without, copied = (simulate(workload, "price", replace(TWO, replicate=each)) for each in (False, True))
    assert second(without) == pytest.approx((1.0, 4.0))
    assert second(copied) == pytest.approx((0.0, 4.0))
    assert (without.restores, without.replicas) == (2, 0)
    assert (copied.restores, copied.replicas, copied.replica_hits) == (1, 1, 1)


@pytest.mark.parametrize(("slowdown", "execution_s"), [(1.0, 4.0), (2.0, 5.5)])
def test_what_starts_where_a_copy_is_arriving_is_slowed_but_keeps_its_units(
    slowdown: float, execution_s: float
) -> None:
    class Watching(Oracle):
        def __init__(self) -> None:
            super().__init__(1.0)
            self.units: list[float] = []

        def observe(self, settlement: Settlement) -> None:
            self.units.append(settlement.outcome.usage["mean_units"])

    watching = Watching()
    workload = followed(None, restore_s=4.0, after_s=1.0)
    run_ = simulate(workload, "price", TWO, physics=Physics(replica_slowdown=slowdown), knowledge=watching)
    assert second(run_) == pytest.approx((0.0, execution_s)), "each second of a copy costs half a second of work"
    assert watching.units == pytest.approx([1.0] * 2)


def test_a_request_waits_for_the_rest_of_a_copy_that_is_on_its_way() -> None:
    run_ = simulate(followed("judge", restore_s=6.0, after_s=2.0), "price", TWO)
    assert run_.restores == 1
    assert second(run_) == pytest.approx((4.0, 4.0)), "four of the six seconds are left"


def judged(works_s: Sequence[float], *, tokens: int) -> Workload:
    """Requests to one model on one device: the first alone, the others behind it."""
    services = {"judge": service("judge", 64 * 10**9), "other": service("other", 64 * 10**9)}
    trajectories = [
        TracedTrajectory(
            id=f"t{index}",
            arrival_s=min(index, 1) * 0.5,
            steps=(
                TraceStep(
                    think_s=0.0,
                    function="judge",
                    cost={"gpu": UnitSet.fixed(1)},
                    t_ori_s=work_s,
                    service="judge" if index else "other",
                    batch_tokens=tokens,
                ),
            ),
        )
        for index, work_s in enumerate(works_s)
    ]
    return Workload(name="judged", trajectories=tuple(trajectories), services=services)


@pytest.mark.parametrize(("marginal", "batch_s"), [(1.0, 6.0), (0.5, 4.5), (0.0, 3.0)])
def test_the_members_of_a_batch_end_together_after_what_each_adds(marginal: float, batch_s: float) -> None:
    workload = judged([4.0, 1.0, 2.0, 3.0], tokens=1000)
    run_ = simulate(workload, "price", Size(nodes=1, cores=0, gpus=1), physics=Physics(batch_marginal=marginal))
    records = {record.trajectory: record for record in run_.records}
    first, *batch = (records[f"t{index}"] for index in range(4))
    assert {(round(one.ended_s, 9), round(one.execution_s, 9)) for one in batch} == {
        (round(first.ended_s + 1.28 + batch_s, 9), batch_s)
    }
    assert all(one.overhead_s == pytest.approx(1.28) for one in batch), "all wait for the restore"


@pytest.mark.parametrize("marginal", [0.2, 1.0])
def test_what_a_further_member_adds_is_learned_in_a_simulation(marginal: float) -> None:
    learning = Learning()
    workload = mopd(384, 3, Teachers(rollout_median_s=20.0, request_sigma=0.2, request_tokens=1024))
    one = Size(nodes=1, cores=0, gpus=2)
    simulate(workload, "price", one, knowledge=learning, physics=Physics(batch_marginal=marginal))
    learned = learning.history.learned("teacher")
    assert abs(learned.batch_marginal - marginal) <= 0.1
    assert learned.t_ori_s == pytest.approx(0.8, rel=0.3)


def test_requests_without_tokens_or_beyond_the_pass_run_alone() -> None:
    for tokens in (0, BATCH_TOKENS):
        run_ = simulate(judged([4.0, 1.0, 2.0, 3.0], tokens=tokens), "price", Size(nodes=1, cores=0, gpus=1))
        assert sorted(record.execution_s for record in run_.records) == pytest.approx([1.0, 2.0, 3.0, 4.0])


def test_a_service_that_no_device_holds_is_told_by_name() -> None:
    workload = mopd(4, 1, Teachers(bytes_per_service=150 * 10**9))
    with pytest.raises(InvalidInput, match="on 1 devices takes 150000000000 bytes of each, which has 80000000000"):
        run(workload, ["price"], Size(nodes=1, cores=0, gpus=8))


def test_what_nothing_provides_is_said_before_anything_runs() -> None:
    with pytest.raises(InvalidInput, match="nothing provides gpu"):
        run(preset("mopd", 4, 1), ["price"], Size(nodes=1, cores=8))
    with pytest.raises(InvalidInput, match="no preset"):
        preset("coding", 4, 1)
    with pytest.raises(InvalidInput, match="empty"):
        preset("mopd", 0, 1)


def test_the_ledger_catches_a_core_that_is_leased_twice() -> None:
    ledger = LeaseAudit()
    grant = Grant(pool="cpu:n", units=1, cores=(3,))
    ledger.grant(Lease(action_id="a", node="n", grants={"cpu": grant}), 0.0)
    with pytest.raises(AssertionError, match="leased to a and to b"):
        ledger.grant(Lease(action_id="b", node="n", grants={"cpu": grant}), 1.0)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_seed_is_a_workload(preset: str) -> None:
    make = PRESETS[preset]
    assert make(20, 5) == make(20, 5)
    assert make(20, 5).trajectories != make(20, 6).trajectories
    assert len(make(20, 5).trajectories) == 20


def test_every_teacher_that_is_asked_exists() -> None:
    workload = mopd(200, 1)
    assert {step.service for trajectory in workload.trajectories for step in trajectory.steps} <= set(workload.services)
