"""Actions that were started under an earlier core: they come in with what they hold, past the queue, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from manager.action import Lease, State
from manager.assembly import build_core
from manager.clock import VirtualClock
from manager.config import ManagerSpec
from manager.engine import Engine, Submission
from manager.events import Finished, Refuse, Resumed, Submitted, Tick, TrajectoryOpened
from manager.executor import Call
from manager.function import FunctionSpec
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from runtimes.executor import LocalExecutor
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.manager.conftest import DONE, CoreDriver, action, node, spec
from tests.runtimes.recorder import RecordingLog

Drive = Callable[[ManagerSpec], CoreDriver]


def resumed(id: str, units: Mapping[str, int], started_s: float, **fields: object) -> Resumed:
    return Resumed(action=action(id, dict(units), **fields), units=units, node="n0", started_s=started_s)


def refused(driver: CoreDriver) -> list[str]:
    return [command.action_id for command in driver.commands if isinstance(command, Refuse)]


def test_it_holds_its_cores_before_anything_that_waits_may_take_them(drive: Drive) -> None:
    driver = drive(spec(node(cores=2)))
    driver.step(0, resumed("old", {"cpu": 2}, -30), Submitted(action=action("new")))
    assert driver.running() == {"old"}
    assert driver.started["old"].lease.cores == (0, 1)
    driver.step(5, Finished(action_id="old", outcome=replace(DONE, execution_s=34)))
    assert driver.running() == {"new"}
    assert driver.core.state.resources["cpu:n0"].free == 1


def test_its_three_times_count_from_its_real_start(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(10, resumed("old", {"cpu": 1}, -30, submitted_s=-32))
    assert driver.started["old"].queue_s == 2
    driver.step(20, Finished(action_id="old", outcome=replace(DONE, execution_s=45)))
    settlement = driver.settled["old"]
    assert (settlement.queue_s, settlement.overhead_s, settlement.execution_s) == (2, 5, 45)


def test_two_of_them_never_share_a_core(drive: Drive) -> None:
    driver = drive(spec(node(cores=4)))
    driver.step(0, resumed("a", {"cpu": 2}, -2), resumed("b", {"cpu": 2}, -1), resumed("c", {"cpu": 1}, -1))
    cores = [set(driver.started[name].lease.cores) for name in ("a", "b")]
    assert cores[0].isdisjoint(cores[1])
    assert refused(driver) == ["c"]
    assert driver.core.accepted == 2


def test_memory_is_held_by_one_without_a_trajectory_and_once_by_a_trajectory(drive: Drive) -> None:
    driver = drive(spec(node(memory_bytes=100)))
    opened = TrajectoryOpened(trajectory="t", memory_bytes=60)
    inside = resumed("inside", {"cpu": 1}, -1, trajectory="t", memory_bytes=60)
    alone = resumed("alone", {"cpu": 1}, -1, memory_bytes=40)
    driver.step(0, opened, inside, alone, resumed("large", {"cpu": 1}, -1, memory_bytes=1))
    assert driver.running() == {"inside", "alone"}
    assert driver.core.state.nodes["n0"].free_bytes == 0
    driver.step(1, Finished(action_id="alone", outcome=DONE), Finished(action_id="inside", outcome=DONE))
    assert driver.core.state.nodes["n0"].free_bytes == 40


def test_it_has_the_turn_of_its_trajectory(drive: Drive) -> None:
    driver = drive(spec())
    opened = TrajectoryOpened(trajectory="t", memory_bytes=10, ttl_s=100)
    first = resumed("first", {"cpu": 1}, -1, trajectory="t", memory_bytes=10)
    driver.step(0, opened, first, resumed("beside", {"cpu": 1}, -1, trajectory="t", memory_bytes=10))
    driver.step(1, Submitted(action=action("behind", trajectory="t", memory_bytes=10)))
    assert (driver.running(), refused(driver)) == ({"first"}, ["beside"])
    driver.step(200, Tick())
    assert driver.running() == {"first"}, "a trajectory with a running action is not idle"
    driver.step(201, Finished(action_id="first", outcome=DONE))
    assert driver.running() == {"behind"}


def test_it_begins_a_trajectory_that_holds_nothing_yet(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, resumed("first", {"cpu": 1}, -1, trajectory="t"), Submitted(action=action("next", trajectory="t")))
    assert driver.running() == {"first"}
    driver.step(1, Finished(action_id="first", outcome=DONE))
    assert driver.running() == {"next"}


def test_a_quota_is_not_consumed_twice_and_counts_until_its_window_ends(drive: Drive) -> None:
    driver = drive(replace(spec(), resources={"search": QuotaSpec(limit=2, period_s=10)}))
    recent, old = resumed("recent", {"search": 1}, 94), resumed("old", {"search": 2}, 80)
    driver.step(100, old, recent, *(Submitted(action=action(f"n{n}", {"search": 1})) for n in range(2)))
    assert driver.running() == {"old", "recent"}
    driver.step(101, Finished(action_id="old", outcome=DONE))
    driver.step(110.9, Tick())
    assert driver.running() == {"recent"}
    driver.step(111, Tick())
    assert driver.running() == {"recent", "n0"}


def test_a_limit_counts_it(drive: Drive) -> None:
    driver = drive(replace(spec(), resources={"seats": ConcurrencySpec(limit=1)}))
    driver.step(0, resumed("old", {"seats": 1}, -1), resumed("late", {"seats": 1}, -1))
    assert (driver.running(), refused(driver)) == ({"old"}, ["late"])


@pytest.mark.parametrize("units", [{"cpu": 5}, {"gpu": 1}, {"gone": 1}])
def test_what_is_not_to_be_had_any_more_refuses_it_and_changes_nothing(drive: Drive, units: dict[str, int]) -> None:
    driver = drive(spec(node(cores=4)))
    opened = TrajectoryOpened(trajectory="t", memory_bytes=10)
    driver.step(0, opened, resumed("old", units, -1, trajectory="t", memory_bytes=10))
    assert (refused(driver), driver.core.accepted) == (["old"], 0)
    driver.step(1, Submitted(action=action("next", trajectory="t", memory_bytes=10)))
    assert driver.running() == {"next"}


async def test_the_engine_executes_it_and_tells_its_end() -> None:
    clock = VirtualClock(1000)
    runtime = ScriptedRuntime(ScriptStep(result=7))
    function = FunctionSpec(name="f", runtime="handler")
    engine = Engine(build_core(spec(node(cores=1))), LocalExecutor({"handler": runtime}, clock), clock=clock)
    await engine.start()

    def submission(id: str) -> Submission:
        return Submission(
            action=action(id, submitted_s=400), call=Call(function=function, input={}, log=RecordingLog())
        )

    settled = engine.resume(submission("old"), units={"cpu": 1}, node="n0", started_s=400)
    assert settled is not None
    assert engine.resume(submission("late"), units={"cpu": 1}, node="n0", started_s=400) is None
    (behind,) = engine.submit([submission("behind")])
    settlement = await settled
    assert (settlement.outcome.state, settlement.act_s) == (State.SUCCEEDED, 600)
    assert isinstance(settlement.lease, Lease)
    await asyncio.wait_for(behind, 60)
    engine.check()
    await engine.close()
