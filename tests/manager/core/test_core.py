"""The core: order, reservation, trajectories, nesting, ends and bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from manager.action import Kin, State, UnitSet
from manager.assembly import build_core
from manager.config import ServiceSpec, TaskSpec
from manager.core.state import IDLE_MIN_S
from manager.errors import CANCEL_ASKED, CapacityExceeded, QuotaExceeded, Reason
from manager.events import (
    Abort,
    CancelRequested,
    EndTrajectory,
    Finished,
    NodeLost,
    Reconfigured,
    Refuse,
    Tick,
    TrajectoryEnded,
    TrajectoryOpened,
    TryAgain,
    TryGranted,
    WakeAt,
)
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from manager.scheduler.policy import Decision, PoolView, Start
from manager.scheduler.policy import ResizeChoice as Widen
from manager.scheduler.price import PricePolicy
from tests.manager.conftest import DONE, CoreDriver, Drive, action, finish, node, spec, submit, submits


@pytest.mark.promise("ACT is queue + overhead + execution, from acceptance to the end, over all tries and restarts.")
def test_the_three_times_make_the_act(drive: Drive) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0, submit("first"), submit("second"))
    driver.step(5, finish("first"))
    driver.step(9, finish("second", execution_s=3))
    settlement = driver.settled["second"]
    assert (settlement.queue_s, settlement.overhead_s, settlement.execution_s) == (5, 1, 3)


def test_a_large_waiting_action_keeps_what_it_waits_for(drive: Drive) -> None:
    driver = drive(spec(node(cores=4)))
    driver.step(0, submit("a", {"cpu": 2}), submit("large", {"cpu": 4}), submit("small"))
    assert driver.running() == {"a"}
    driver.step(1, finish("a"))
    assert driver.running() == {"large"}


@pytest.mark.promise("A blocked call never holds a core back.")
def test_a_blocked_call_never_holds_a_core_back(drive: Drive) -> None:
    config = replace(spec(), resources={"search": QuotaSpec(limit=1, period_s=10)})
    driver = drive(config)
    driver.step(0, submit("q1", {"search": 1}), submit("q2", {"search": 1}), submit("c"))
    assert driver.running() == {"q1", "c"}


def test_strict_order_blocks_everything_behind_the_first_that_cannot_start(drive: Drive) -> None:
    config = replace(spec(strict=True), resources={"search": QuotaSpec(limit=1, period_s=10)})
    driver = drive(config)
    driver.step(0, submit("q1", {"search": 1}), submit("q2", {"search": 1}), submit("c"))
    assert driver.running() == {"q1"}


def test_an_action_that_needs_two_resources_reserves_both(drive: Drive) -> None:
    config = replace(spec(node(cores=1)), resources={"search": QuotaSpec(limit=1, period_s=10)})
    driver = drive(config)
    driver.step(0, submit("q", {"search": 1}), submit("both", {"search": 1, "cpu": 1}), submit("c"))
    assert driver.running() == {"q"}
    driver.step(1, finish("q"))
    assert driver.running() == set(), "the core is reserved"
    driver.step(11, Tick())
    assert driver.running() == {"both"}


def test_a_wake_up_is_asked_for_the_instant_quota_returns(drive: Drive) -> None:
    config = replace(spec(), resources={"search": QuotaSpec(limit=1, period_s=2.5)})
    driver = drive(config)
    driver.step(0, submit("q1", {"search": 1}), submit("q2", {"search": 1}))
    driver.step(1, finish("q1"))
    assert WakeAt(instant_s=3.5) in driver.commands
    driver.step(3.5, Tick())
    assert "q2" in driver.started


@pytest.mark.promise(
    "Each try within one call takes its units of the quota, and goes before calls that have not begun."
)
def test_a_further_try_waits_for_its_quota_and_goes_before_who_has_not_begun(drive: Drive) -> None:
    driver = drive(replace(spec(), resources={"search": QuotaSpec(limit=1, period_s=2.5)}))
    driver.step(0, submit("q1", {"search": 1}), submit("q2", {"search": 1}))
    driver.step(1, TryAgain(action_id="q1"))
    assert WakeAt(instant_s=3.5) in driver.commands
    assert TryGranted(action_id="q1") not in driver.commands
    driver.step(3.5, Tick())
    assert TryGranted(action_id="q1") in driver.commands
    assert "q2" not in driver.started
    driver.step(4, finish("q1"))
    driver.step(6.5, Tick())
    assert "q2" in driver.started


def test_a_further_try_of_what_has_no_quota_needs_no_leave(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, submit("a1"))
    driver.step(1, TryAgain(action_id="a1"), TryAgain(action_id="gone"))
    assert [each for each in driver.commands if isinstance(each, TryGranted)] == [TryGranted(action_id="a1")]


def test_trajectories_are_spread_by_memory_and_hold_it_between_actions(drive: Drive) -> None:
    driver = drive(spec(node("n0", memory_bytes=100), node("n1", memory_bytes=100)))
    driver.step(0, *(submit(f"a{index}", trajectory=f"t{index}", memory_bytes=60) for index in range(3)))
    assert {driver.started[f"a{index}"].lease.node for index in range(2)} == {"n0", "n1"}
    driver.step(1, finish("a0"), finish("a1"))
    assert "a2" not in driver.started, "memory is held for the trajectory's life"
    driver.step(2, TrajectoryEnded(trajectory="t0"))
    assert "a2" in driver.started


def test_an_idle_trajectory_ends_after_its_ttl(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, submit("a", trajectory="t", memory_bytes=10, trajectory_ttl_s=5.0))
    driver.step(1, finish("a"))
    assert WakeAt(instant_s=6.0) in driver.commands
    assert EndTrajectory(trajectory="t") in driver.step(6, Tick())


def test_an_opened_trajectory_is_placed_and_its_end_cancels_what_it_has(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, TrajectoryOpened(trajectory="t", memory_bytes=10))
    assert driver.homes() == {"t": "n0"}
    driver.step(1, submit("a", trajectory="t"), submit("b", trajectory="t"))
    commands = driver.step(2, TrajectoryEnded(trajectory="t"))
    assert driver.settled["b"].outcome.state is State.CANCELLED
    assert any(isinstance(command, Abort) and command.action_id == "a" for command in commands)
    assert EndTrajectory(trajectory="t") not in commands, "the environment goes when nothing runs in it"
    assert EndTrajectory(trajectory="t") in driver.step(3, finish("a"))


def test_a_trajectory_that_is_opened_while_its_first_action_waits_gets_its_place_without_the_action(
    drive: Drive,
) -> None:
    driver = drive(spec(node(memory_bytes=100)))
    driver.step(0, submit("a", trajectory="t", memory_bytes=60), submit("b", trajectory="u", memory_bytes=60))
    driver.step(1, TrajectoryOpened(trajectory="u", memory_bytes=60), CancelRequested(action_id="b"))
    driver.step(2, TrajectoryEnded(trajectory="t"), finish("a"))
    assert driver.homes() == {"u": "n0"}


@pytest.mark.promise("`queue_timeout` bounds the wait, and names what was waited for.")
def test_a_waiting_action_ends_at_its_queue_timeout(drive: Drive) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0, submit("a"), submit("b", queue_timeout_s=3.0))
    driver.step(3, Tick())
    outcome = driver.settled["b"].outcome
    assert (outcome.state, outcome.reason) == (State.TIMED_OUT, Reason.QUEUE_TIMEOUT)
    assert outcome.message == "waited longer than queue_timeout, 3 s, for 1 of cpu"


def test_bounds_refuse_before_any_work(drive: Drive) -> None:
    base = spec(node(cores=1))
    config = replace(
        base,
        tasks={"red": TaskSpec(max_queued=1)},
        scheduler=replace(base.scheduler, max_queued=2),
    )
    driver = drive(config)
    driver.step(0, submit("run", task="blue"))
    commands = driver.step(
        0, submit("r1", task="red"), submit("r2", task="red"), submit("b1", task="blue"), submit("b2", task="blue")
    )
    refused = {command.action_id: command.error for command in commands if isinstance(command, Refuse)}
    assert isinstance(refused.pop("r2"), QuotaExceeded)
    assert isinstance(refused["b2"], CapacityExceeded)
    assert refused["b2"].retry_after_s is not None
    assert list(refused) == ["b2"]


@pytest.mark.promise("A task's cap bounds it, and its children still run.")
def test_a_cap_bounds_a_task_and_leaves_the_rest_to_others(drive: Drive) -> None:
    driver = drive(replace(spec(), tasks={"red": TaskSpec(caps={"cpu": 1}), "blue": TaskSpec()}))
    driver.step(0, submit("r1", task="red"), submit("r2", task="red"), submit("b1", task="blue"))
    assert driver.running() == {"r1", "b1"}
    driver.step(1, finish("r1"))
    assert driver.running() == {"r2", "b1"}


def test_nested_actions_run_on_their_waiting_parents_units_when_all_is_full(drive: Drive) -> None:
    driver = drive(replace(spec(node(cores=2)), tasks={"default": TaskSpec(caps={"cpu": 2})}))
    driver.step(0, submit("p0"), submit("p1"), submit("other"))
    driver.step(1, submit("c0", parent="p0"), submit("c1", parent="p1"), submit("c2", parent="p0"))
    assert driver.running() == {"p0", "p1", "c0", "c1"}
    assert driver.started["c0"].lease.cores == driver.started["p0"].lease.cores
    driver.step(2, submit("grandchild", parent="c0"))
    assert "grandchild" in driver.running()
    for instant, done in enumerate(("grandchild", "c0", "c2", "c1", "p0", "p1", "other")):
        driver.step(3 + instant, finish(done))
    assert not driver.running()


def test_a_child_keeps_its_cores_when_its_parent_ends_first(drive: Drive) -> None:
    driver = drive(spec(node(cores=2)))
    driver.step(0, submit("parent", {"cpu": 2}), submit("next", {"cpu": 2}))
    driver.step(1, submit("child", parent="parent"))
    driver.step(2, finish("parent"))
    assert driver.running() == {"child"}
    assert driver.core.state.resources["cpu:n0"].free == 1
    driver.step(3, finish("child"))
    assert driver.running() == {"next"}


def test_a_child_may_act_in_its_parents_trajectory(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, submit("parent", trajectory="t", memory_bytes=10), submit("later", trajectory="t", memory_bytes=10))
    driver.step(1, submit("child", trajectory="t", parent="parent", memory_bytes=10))
    assert driver.running() == {"parent", "child"}


def test_a_lost_node_loses_what_ran_on_it_whatever_comes_of_it_later(drive: Drive) -> None:
    driver = drive(spec(node("n0", cores=1), node("n1", cores=1)))
    driver.step(0, submit("lost"), submit("other"))
    driver.step(1, NodeLost(node=driver.started["lost"].lease.node))
    assert driver.settled["lost"].outcome.reason is Reason.NODE_LOST
    driver.step(2, finish("lost"))
    assert driver.settled["lost"].outcome.reason is Reason.NODE_LOST
    assert driver.running() == {"other"}


def test_what_was_to_end_on_a_node_that_is_lost_is_not_told_as_cancelled(drive: Drive) -> None:
    driver = drive(spec(node("n0", cores=1), node("n1", cores=1)))
    driver.step(0, submit("again"))
    driver.step(1, CancelRequested(action_id="again", message="cancelled by request"))
    driver.step(2, NodeLost(node=driver.started["again"].lease.node))
    outcome = driver.settled["again"].outcome
    assert (outcome.state, outcome.reason) == (State.LOST, Reason.NODE_LOST), "nobody knows whether it has ended"
    assert outcome.detail == {CANCEL_ASKED: True} and "cancelled by request" in outcome.message


def test_a_higher_limit_starts_what_waits_for_it(drive: Drive) -> None:
    driver = drive(replace(spec(), resources={"parser": ConcurrencySpec(limit=1)}))
    driver.step(0, *(submit(f"a{index}", {"parser": 1}) for index in range(3)))
    assert len(driver.running()) == 1
    driver.step(1, Reconfigured(resources={"parser": ConcurrencySpec(limit=3)}))
    assert len(driver.running()) == 3


@pytest.mark.parametrize("marginal", [0.0, 0.5, 1.0])
def test_a_batch_is_expected_to_end_when_all_its_members_are_done(drive: Drive, marginal: float) -> None:
    service = ServiceSpec(name="s", bytes_by_dop={1: 10}, restore_s_by_dop={1: 0.0}, batch_tokens=10)
    driver = drive(replace(spec(node(devices=1)), services={"s": service}))
    driver.step(0, submit("first", {"gpu": 1}, service="s", batch_tokens=4))
    fields = {"service": "s", "batch_tokens": 3, "batch_marginal": marginal}
    driver.step(1, *(submit(f"b{n}", {"gpu": 1}, t_ori_s=t_s, **fields) for n, t_s in enumerate((5.0, None, 30.0))))
    driver.step(2, finish("first"))
    assert driver.started["b0"].lease.batch == ("b0", "b1", "b2")
    executing, pool = driver.core.state.executing, driver.core.state.resources["gpu"]
    # b1, of which nothing is known, counts as the mean of the others would: 17.5 s.
    expected_s = 30.0 + marginal * (5.0 + 17.5)
    (running,) = executing.view(pool, 12.0)
    assert running.ends_in_s == pytest.approx(expected_s - 10.0)
    driver.step(13, finish("b0"))
    (running,) = executing.view(pool, 13.0)
    assert running.ends_in_s == pytest.approx(expected_s - 11.0), "who leaves early ends nothing"
    driver.step(14, finish("b1"), finish("b2"))
    assert driver.core.accounts.of("default").used["gpu"] == pytest.approx(2 + 12), "whoever of them leaves first"
    kin = Counter({Kin("f"): 3})
    assert [driver.settled[id].batch for id in ("first", "b0", "b2")] == [{}, kin, kin]


def test_a_paused_core_starts_nothing_but_children(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, submit("parent"))
    driver.core.pause()
    driver.step(1, submit("new"), submit("child", parent="parent"))
    assert driver.running() == {"parent", "child"}


def test_the_act_of_a_task_is_of_what_was_completed(drive: Drive) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0, submit("runs"), submit("withdrawn"))
    driver.step(3, CancelRequested(action_id="withdrawn"))
    driver.step(4, finish("runs", execution_s=4))
    told = driver.core.accounts["default"].describe()
    assert told["settled"] == {"succeeded": 1, "cancelled": 1}
    assert (told["completed"], told["act_s"], told["queue_s"]) == (1, 4.0, 0.0)


def test_a_child_that_waits_for_what_its_parent_cannot_lend_ends_with_its_story(drive: Drive) -> None:
    driver = drive(spec(node(cores=2, memory_bytes=100)))
    driver.step(0.0, *submits(action("p", {"cpu": 2}, memory_bytes=80)))
    driver.step(1.0, *submits(action("c", {"cpu": 1}, memory_bytes=30, parent="p", queue_timeout_s=5.0)))
    assert driver.running() == {"p"}
    driver.step(6.0, Tick())
    outcome = driver.settled["c"].outcome
    assert outcome.reason is Reason.QUEUE_TIMEOUT
    assert outcome.message.endswith("for 1 of cpu and 30 bytes of memory on a node")


def test_a_loan_holds_the_childs_own_memory(drive: Drive) -> None:
    driver = drive(spec(node(cores=2, memory_bytes=100)))
    driver.step(0.0, *submits(action("p", {"cpu": 2}, memory_bytes=60)))
    driver.step(1.0, *submits(action("c", {"cpu": 1}, memory_bytes=30, parent="p")))
    assert driver.started["c"].lease.memory_bytes == 30
    assert driver.core.state.nodes["n0"].held_bytes == 90
    driver.step(2.0, Finished(action_id="p", outcome=DONE), Finished(action_id="c", outcome=DONE))
    assert driver.core.state.nodes["n0"].held_bytes == 0


def test_an_action_that_was_resized_tells_its_mean_width() -> None:
    class Widens:
        """One unit at the start, three as soon as it is asked again."""

        name = "widens"

        def decide(self, view: PoolView) -> Decision:
            starts = [Start(action_id=waiting.action.id, units=1, workers=3) for waiting in view.candidates]
            resizes = [Widen(action_id=running.action.id, units=3) for running in view.running if running.units == 1]
            return Decision(starts=starts, resizes=resizes, wake_s=5.0 if starts else None)

    driver = CoreDriver(build_core(spec(node(cores=4)), policies={"cpu": Widens()}))
    driver.step(0.0, *submits(action("a", {"cpu": UnitSet.span(1, 4)}, key="cpu", malleable=True)))
    driver.step(5.0, Tick())
    driver.step(10.0, Finished(action_id="a", outcome=DONE))
    assert driver.settled["a"].outcome.usage["mean_units"] == 2.0


def test_two_that_are_promised_units_that_one_takes_do_not_idle_others(drive: Drive) -> None:
    driver = drive(replace(spec(node(cores=2), dop=2), resources={"parser": ConcurrencySpec(limit=1)}))
    wide = action("wide", {"cpu": UnitSet.span(1, 2)}, key="cpu")
    driver.step(0.0, *submits(wide, action("both", {"cpu": 1, "parser": 1}), action("parse", {"parser": 1})))
    assert driver.running() == {"wide"}, "both is earlier: the parser is reserved for it"
    driver.step(1.0, Finished(action_id="wide", outcome=DONE))
    assert driver.running() == {"both"}


def test_children_that_are_lent_cores_let_strict_order_move_on(drive: Drive) -> None:
    driver = drive(spec(node(cores=1), node("n1", cores=1), strict=True))
    driver.step(0.0, *submits(action("p", {"cpu": 1}), action("q", {"cpu": 1})))
    ends = Finished(action_id="q", outcome=DONE)
    driver.step(1.0, ends, *submits(action("next", {}), action("c", {"cpu": 1}, parent="p")))
    assert driver.running() == {"p", "c", "next"}


def test_memory_kept_for_a_trajectory_that_gave_up_serves_others(drive: Drive) -> None:
    driver = drive(spec(node(cores=4, memory_bytes=100)))
    driver.step(0.0, submit("a", trajectory="t", memory_bytes=60))
    driver.step(1.0, submit("big", trajectory="u", memory_bytes=60, queue_timeout_s=5.0))
    driver.step(2.0, submit("small", memory_bytes=30))
    assert driver.running() == {"a"}, "the memory is kept for the trajectory that came first"
    driver.step(6.0, Tick())
    assert driver.running() == {"a", "small"}


#: Trajectories may hold 100 bytes of it.
FOUR = node(cores=4, memory_bytes=112)


def opens(name: str, task: str) -> TrajectoryOpened:
    return TrajectoryOpened(trajectory=name, task=task, memory_bytes=25, ttl_s=1e9)


def homes(driver: CoreDriver, task: str) -> set[str]:
    """The trajectories of a task that hold their memory."""
    return {each.name for each in driver.core.state.trajectories if each.task == task and each.node}


def test_memory_of_idle_trajectories_goes_to_a_task_that_holds_less_than_its_share(drive: Drive) -> None:
    driver = drive(spec(FOUR))
    for second, name in enumerate("abcd"):
        driver.step(second, opens(name, "many"))
    driver.step(4.0, submit("busy", trajectory="a", memory_bytes=25))
    driver.step(10.0, *(opens(name, "few") for name in "xyz"))
    driver.step(IDLE_MIN_S, Tick())
    assert homes(driver, "few") == set()
    driver.step(1.0 + IDLE_MIN_S, Tick())
    (end,) = [each for each in driver.commands if isinstance(each, EndTrajectory)]
    assert (end.trajectory, homes(driver, "few")) == ("b", {"x"}), "used least recently, and not the one at work"
    assert "idle" in end.why and "task few" in end.why
    driver.step(300.0, Tick())
    assert (homes(driver, "many"), homes(driver, "few")) == ({"a", "d"}, {"x", "y"}), "each has its share"


@pytest.mark.parametrize("kept", [{"keep_idle": True}, {"weight": 3.0}])
def test_a_task_keeps_what_it_was_promised(kept: dict[str, Any]) -> None:
    one = spec(FOUR)
    driver = CoreDriver(build_core(replace(one, tasks={"many": TaskSpec(**kept)})))
    for name in "abcd":
        driver.step(0.0, opens(name, "many"))
    driver.step(1.0, opens("x", "few"), opens("y", "few"))
    for second in (100.0, 200.0, 300.0):
        driver.step(second, Tick())
    assert homes(driver, "few") == (set() if "keep_idle" in kept else {"x"})


def test_memory_goes_first_to_the_task_that_holds_least_of_it(drive: Drive) -> None:
    driver = drive(spec(FOUR))
    driver.step(0.0, *(opens(name, "many") for name in "abcdef"))
    driver.step(1.0, opens("x", "few"))
    driver.step(2.0, TrajectoryEnded(trajectory="a"))
    assert (homes(driver, "many"), homes(driver, "few")) == ({"b", "c", "d"}, {"x"})
    driver.step(3.0, TrajectoryEnded(trajectory="b"))
    assert homes(driver, "many") == {"c", "d", "e"}


def test_one_that_waits_for_the_second_time_gets_its_memory_once(drive: Drive) -> None:
    driver = drive(spec(FOUR))
    driver.step(0.0, *(opens(name, "many") for name in "abcd"))
    waits: dict[str, Any] = {"memory_bytes": 25, "task": "few", "trajectory": "x"}
    driver.step(1.0, submit("first", **waits), submit("other", memory_bytes=25, task="many", trajectory="y"))
    driver.step(2.0, CancelRequested(action_id="first"), submit("again", **waits))
    driver.step(3.0, *(TrajectoryEnded(trajectory=name) for name in "abc"))
    assert homes(driver, "few") == {"x"} and homes(driver, "many") == {"d", "y"}


def test_devices_do_not_start_what_the_policy_of_the_cores_holds_back() -> None:
    class Holds:
        """Starts nothing for now."""

        name = "holds"

        def decide(self, view: PoolView) -> Decision:
            return Decision(wake_s=view.now_s + 1.0)

    driver = CoreDriver(build_core(spec(node(devices=1)), policies={"cpu": Holds(), "gpu": PricePolicy()}))
    driver.step(0, submit("a", {"cpu": UnitSet.span(2, 4), "gpu": 1}, key="cpu"))
    assert not driver.started
