"""Faults of a simulated cluster: what is lost begins again, what is silent is heard later, and the core stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from manager.action import UnitSet
from manager.config import ManagerSpec
from manager.errors import InvalidInput, Unsatisfiable
from manager.events import NodeClosed, NodeJoined, NodeLost, NodeOpened
from manager.resources.pools import QuotaSpec
from manager.simulation.simulate import Size, preset, simulate
from manager.simulation.simulator import (
    LOST_S,
    NodeFault,
    Scenario,
    Simulation,
    SimulationRun,
    cluster,
    fault_events,
    read_fault,
)
from manager.simulation.workloads import TENSOR_PARALLEL, TracedTrajectory, TraceStep, service

TWO = cluster(cores=4, nodes=2)


def rollout(name: str, *works_s: float, think_s: float = 1.0) -> TracedTrajectory:
    """A rollout of rigid actions of one core."""
    cost = {"cpu": UnitSet(1, 1)}
    steps = tuple(TraceStep(think_s=think_s, function="shell", cost=cost, t_ori_s=each) for each in works_s)
    return TracedTrajectory(id=name, memory_bytes=1, steps=steps)


def play(spec: ManagerSpec, rollouts: Sequence[TracedTrajectory], *texts: str, seed: int = 0) -> SimulationRun:
    faults = fault_events([read_fault(text) for text in texts], spec.nodes, seed)
    return Simulation(spec, rollouts, faults=faults).run()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("lose:3@600", NodeFault(kind="lose", nodes=3, start_s=600.0)),
        ("wave:50@6.5+120", NodeFault(kind="wave", nodes=50, start_s=6.5, for_s=120.0)),
    ],
)
def test_a_fault_is_read_as_it_is_written(text: str, fault: NodeFault) -> None:
    assert read_fault(text) == fault


@pytest.mark.parametrize("text", ["", "lose", "lose:3", "burn:3@1", "lose:0@1", "cut:2@5", "lose:-1@2", "lose:1@2+"])
def test_a_fault_that_cannot_be_read_is_refused_with_how_it_is_written(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"fault .*:"):
        read_fault(text)


def test_a_fault_of_more_nodes_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the cluster has 2"):
        play(TWO, [rollout("a", 1.0)], "lose:3@1")


def test_an_upgrade_meets_every_node_once_and_each_joins_again() -> None:
    nodes = cluster(cores=10, nodes=5).nodes
    events = fault_events([read_fault("upgrade:2@100+30")], nodes, seed=1)
    assert [each.instant_s for each in events if isinstance(each.event, NodeClosed)] == [100, 100, 130, 130, 160]
    for kind in (NodeClosed, NodeLost, NodeJoined):
        assert sorted(each.node for each in events if isinstance(each.event, kind)) == [node.name for node in nodes]


@pytest.mark.parametrize(("for_s", "kinds"), [(2.0, []), (30.0, [NodeClosed, NodeOpened])])
def test_a_short_silence_loses_nothing(for_s: float, kinds: list[type]) -> None:
    events = fault_events([read_fault(f"cut:1@10+{for_s}")], TWO.nodes, seed=0)
    assert [type(each.event) for each in events if each.event is not None] == kinds


def test_a_trajectory_whose_node_is_lost_begins_again() -> None:
    """Both nodes go, one after the other, and come back: whatever stood on them is done anew."""
    run = play(TWO, [rollout("a", 5.0, 5.0)], "lose:2@10+1")
    assert [record.trajectory for record in run.records] == ["a", "a#1", "a#1"]
    assert (run.faults.nodes_lost, run.faults.trajectories, run.faults.actions) == (2, 1, 1)
    assert run.faults.wasted == {"cpu": pytest.approx(3.0)}  # it began at 7 s
    assert run.makespan_s == pytest.approx(10 + 1 + 5 + 1 + 5)


def test_a_trajectory_that_thinks_while_its_node_is_lost_is_told_at_its_next_action() -> None:
    run = play(TWO, [rollout("a", 1.0, 1.0, think_s=10.0)], "lose:2@15+1")
    assert [record.trajectory for record in run.records] == ["a", "a#1", "a#1"]
    assert run.faults.actions == 0 and run.faults.trajectories == 1


def test_ends_on_a_silent_node_are_heard_when_it_is_back() -> None:
    run = play(TWO, [rollout("a", 2.0), rollout("b", 2.0)], "cut:2@2+30")
    assert [record.ended_s for record in run.records] == [pytest.approx(32.0)] * 2
    assert run.faults.nodes_lost == run.faults.trajectories == 0


def test_a_node_that_is_silent_for_too_long_is_lost_and_joins_again() -> None:
    run = play(TWO, [rollout("a", 2.0)], f"cut:2@2+{LOST_S + 40}")
    assert run.faults.nodes_lost == 2
    assert run.makespan_s == pytest.approx(2 + LOST_S + 40 + 2.0)


def test_a_model_call_runs_again_by_itself() -> None:
    workload = preset("mopd", 16, seed=0)
    size = Size(nodes=1, cores=0, gpus=16)
    longest = max(simulate(workload, "price", size).records, key=lambda record: record.execution_s)
    middle_s = longest.ended_s - longest.execution_s / 2
    scenario = Scenario(faults=(read_fault(f"lose:2@{middle_s:.3f}+5"),), seed=0)
    run = simulate(workload, "price", size, scenario=scenario)
    assert run.faults.again == run.faults.actions > 0
    assert run.faults.trajectories == 0 and len(run.records) == workload.actions


@pytest.mark.parametrize("text", ["lose:2@12+5", "lose:2@12"])
def test_a_call_that_runs_elsewhere_is_stopped_with_its_trajectory_and_begins_again_with_it(text: str) -> None:
    """The search holds no node; the sandbox that its trajectory has on one is lost while it runs."""
    search = TraceStep(think_s=1.0, function="search", cost={"search": UnitSet(1, 1)}, t_ori_s=20.0)
    mixed = replace(rollout("a", 5.0), memory_bytes=0, steps=(*rollout("a", 5.0).steps, search))
    spec = cluster(cores=6, nodes=3, resources={"search": QuotaSpec(limit=1, period_s=1.0)})
    run = play(spec, [mixed], text, seed=2)
    assert [(record.trajectory, record.function) for record in run.records] == [
        ("a", "shell"),
        ("a#1", "shell"),
        ("a#1", "search"),
    ]
    assert (run.faults.trajectories, run.faults.actions, run.faults.again) == (1, 1, 0)
    assert run.faults.wasted == {"search": pytest.approx(5.0)}
    assert run.makespan_s == pytest.approx(12 + 1 + 5 + 1 + 20)


def test_a_member_of_a_batch_that_loses_its_trajectory_leaves_the_others_their_devices() -> None:
    """Its sandbox is on a node of cores that is lost, the batch on a node of devices that lives."""
    judge = TraceStep(
        think_s=1.0,
        function="judge",
        cost={"gpu": UnitSet(8, 8)},
        key="gpu",
        t_ori_s=40.0,
        elasticity=TENSOR_PARALLEL,
        service="judge",
        batch_tokens=10,
    )
    shell = rollout("a", 5.0).steps
    both = [replace(rollout(name), steps=(*shell, judge), memory_bytes=0) for name in ("a", "b")]
    spec = cluster(cores=2, nodes=2, devices=8, services={"judge": service("judge", 10**9)})
    run = play(spec, both, "lose:1@9+1", seed=1)
    lost = {record.trajectory for record in run.records} - {"a", "b"}
    assert len(lost) == 1 and run.faults.actions == run.faults.trajectories == 1
    assert sorted(record.function for record in run.records) == ["judge", "judge", "shell", "shell", "shell"]


@pytest.mark.parametrize("text", ["upgrade:1@20+10", "lose:4@60+30", "cut:4@40+90"])
def test_searches_of_lost_trajectories_keep_nobody_from_the_end(text: str) -> None:
    workload = preset("mopd+search", 40, seed=0)
    scenario = Scenario(faults=(read_fault(text),), seed=0)
    run = simulate(workload, "adaptive", Size(nodes=3, cores=48, gpus=16), scenario=scenario)
    assert run.faults.trajectories > 0
    assert {record.trajectory.partition("#")[0] for record in run.records} == {
        each.id for each in workload.trajectories
    }


def test_work_for_which_no_node_is_left_is_said_and_not_waited_for() -> None:
    with pytest.raises(Unsatisfiable, match="waits for ever"):
        play(TWO, [rollout("a", 5.0)], "lose:2@3")


def test_faults_after_the_end_change_nothing() -> None:
    workload = preset("ai-coding", 8, seed=3)
    size = Size(nodes=2, cores=64)
    scenario = Scenario(faults=(read_fault("lose:2@1000000"),))
    assert (
        simulate(workload, "adaptive", size, scenario=scenario).records == simulate(workload, "adaptive", size).records
    )


@pytest.mark.parametrize("policy", ["adaptive", "paper"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_befalls_the_nodes_every_rollout_is_done(policy: str, seed: int) -> None:
    """The core's invariants and the audit of leases are asserted by the simulation itself."""
    workload = preset("mixed", 12, seed)
    texts = ("lose:1@30+60", "wave:2@50+40", "upgrade:2@100+30", "cut:3@200+30", "cut:1@260+90", "lose:2@90+5")
    scenario = Scenario(faults=tuple(read_fault(text) for text in texts), seed=seed)
    run = simulate(workload, policy, replace(Size(nodes=6, cores=48), gpus=16), scenario=scenario)
    done = {record.trajectory.partition("#")[0] for record in run.records}
    assert done == {each.id for each in workload.trajectories}
    assert run.faults.nodes_lost >= 8
    assert len(run.records) >= workload.actions
