"""The engine over scripted runtimes: nothing is lost, whatever the executor does; and its clocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from manager.action import Action, Lease, Settlement, State, UnitSet
from manager.assembly import build_core
from manager.clock import WallClock
from manager.config import ServiceSpec
from manager.engine import Engine, Submission
from manager.errors import CapacityExceeded, CodedError, Conflict, Draining, Reason, Unsatisfiable
from manager.events import Command
from manager.executor import Call
from manager.function import FunctionSpec, SandboxSpec
from manager.learning import History
from manager.resources.pools import QuotaSpec
from runtimes.executor import Deadlines, LocalExecutor
from runtimes.runtime import Execution
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.manager.conftest import action, node, spec
from tests.runtimes.recorder import RecordingLog
from tests.virtual_clock import VirtualClock

DAY_S = 86400.0

FUNCTION = FunctionSpec(name="f", runtime="exec", cost={"cpu": UnitSet.fixed(1)}, sandbox=SandboxSpec(memory_bytes=400))


@dataclass
class Ear:
    """A listener that remembers."""

    started_ids: list[str] = field(default_factory=list)
    settled_ids: list[str] = field(default_factory=list)
    begun: dict[str, asyncio.Event] = field(default_factory=dict)

    def started(self, action: Action, lease: Lease, queue_s: float) -> None:
        self.started_ids.append(action.id)
        self.begun.setdefault(action.id, asyncio.Event()).set()

    def settled(self, settlement: Settlement) -> None:
        self.settled_ids.append(settlement.action.id)

    async def until_started(self, action_id: str) -> None:
        async with asyncio.timeout(60):
            await self.begun.setdefault(action_id, asyncio.Event()).wait()


@dataclass
class EngineRig:
    engine: Engine
    runtime: ScriptedRuntime
    ear: Ear
    steps: dict[str, ScriptStep]
    history: History

    def submit(self, *actions: Action) -> list[asyncio.Future[Settlement]]:
        call = Call(function=FUNCTION, input={}, log=RecordingLog())
        return self.engine.submit([Submission(action=action, call=call) for action in actions])

    def living(self) -> list[dict[str, object]]:
        page = self.engine.trajectories()["trajectories"]
        assert isinstance(page, list)
        return page

    def waiting(self) -> list[dict[str, object]]:
        queue = self.engine.queue()["queue"]
        assert isinstance(queue, list)
        return queue

    async def end(self, future: asyncio.Future[Settlement]) -> Settlement:
        async with asyncio.timeout(60):
            return await future


@pytest.fixture
async def rig() -> AsyncIterator[EngineRig]:
    steps: dict[str, ScriptStep] = {}

    def script(execution: Execution) -> ScriptStep:
        return steps.get(execution.action.id, ScriptStep())

    runtime = ScriptedRuntime(script)
    ear, history = Ear(), History()
    executor = LocalExecutor({"exec": runtime}, deadlines=Deadlines(kill_s=0.05))
    engine = Engine(build_core(spec(node(cores=2))), executor, history=history, listeners=[ear])
    await engine.start()
    yield EngineRig(engine, runtime, ear, steps, history)
    await engine.close()
    engine.check()
    await executor.close()


async def test_submissions_of_one_turn_settle_and_are_heard(rig: EngineRig) -> None:
    futures = rig.submit(*(action(f"a{index}") for index in range(5)))
    settled = [await rig.end(future) for future in futures]
    assert [settlement.outcome.state for settlement in settled] == [State.SUCCEEDED] * 5
    assert sorted(rig.ear.started_ids) == sorted(rig.ear.settled_ids) == [f"a{index}" for index in range(5)]
    assert rig.history.learned("f").observations == 5


async def test_an_end_of_which_nothing_can_be_learned_settles_as_any(
    rig: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(settlement: Settlement) -> None:
        raise ValueError("math domain error")

    monkeypatch.setattr(rig.history, "observe", fails)
    for name in ("a", "b"):
        settlement = await rig.end(rig.submit(action(name))[0])
        assert settlement.outcome.state is State.SUCCEEDED
    assert rig.ear.settled_ids == ["a", "b"]


async def test_an_executor_that_raises_ends_the_action_as_internal(rig: EngineRig) -> None:
    rig.steps["a"] = ScriptStep(error=RuntimeError("a bug"))
    settlement = await rig.end(rig.submit(action("a"))[0])
    assert settlement.outcome.reason is Reason.INTERNAL
    assert "a bug" in settlement.outcome.message


async def test_cancelling_a_running_action_kills_it(rig: EngineRig) -> None:
    rig.steps["a"] = ScriptStep(hangs=True)
    (future,) = rig.submit(action("a"))
    await rig.ear.until_started("a")
    assert rig.engine.cancel("a", "enough")
    settlement = await rig.end(future)
    assert (settlement.outcome.state, settlement.outcome.message) == (State.CANCELLED, "enough")
    assert not rig.engine.cancel("a")


async def test_cancelling_in_the_turn_of_its_start_still_ends_it(rig: EngineRig) -> None:
    (future,) = rig.submit(action("a"))
    await rig.ear.until_started("a")
    rig.engine.cancel("a")
    assert (await rig.end(future)).outcome.state.terminal


async def test_a_runtime_that_ignores_its_kill_holds_nobody_up(rig: EngineRig) -> None:
    rig.steps["a"] = ScriptStep(hangs=True, ignores_kill=True)
    (future,) = rig.submit(action("a", timeout_s=0.02))
    settlement = await rig.end(future)
    assert settlement.outcome.reason is Reason.TIMEOUT


async def test_the_same_id_twice_is_a_conflict_and_the_first_goes_on(rig: EngineRig) -> None:
    first, second = rig.submit(action("a"), action("a"))
    with pytest.raises(Conflict):
        await second
    assert (await rig.end(first)).outcome.state is State.SUCCEEDED


async def test_a_waiting_action_times_out_by_the_timer(rig: EngineRig) -> None:
    for name in ("a", "b"):
        rig.steps[name] = ScriptStep(held=True)
    rig.submit(action("a"), action("b"))
    (waiting,) = rig.submit(replace(action("c"), queue_timeout_s=0.01))
    assert (await rig.end(waiting)).outcome.reason is Reason.QUEUE_TIMEOUT


async def test_a_trajectory_is_opened_ended_and_its_memory_returns(rig: EngineRig) -> None:
    await rig.engine.open_trajectory("t", "default", FUNCTION)
    await rig.engine.open_trajectory("t", "default", FUNCTION)
    (view,) = rig.living()
    assert (view["trajectory"], view["state"], view["memory_bytes"]) == ("t", "idle", 400)
    rig.steps["a"] = ScriptStep(hangs=True)
    (future,) = rig.submit(action("a", trajectory="t"))
    await rig.ear.until_started("a")
    assert await rig.engine.end_trajectory("t")
    assert (await rig.end(future)).outcome.state is State.CANCELLED
    assert rig.living() == []
    assert ("end_trajectory", "t") in rig.runtime.seen
    assert not await rig.engine.end_trajectory("t")


async def test_memory_that_never_comes_is_a_typed_error(rig: EngineRig) -> None:
    large = replace(FUNCTION, sandbox=SandboxSpec(memory_bytes=900), queue_timeout_s=0.01)
    await rig.engine.open_trajectory("t", "default", FUNCTION)
    with pytest.raises(CapacityExceeded):
        await rig.engine.open_trajectory("u", "default", large)
    with pytest.raises(Unsatisfiable):
        await rig.engine.open_trajectory("v", "default", replace(large, sandbox=SandboxSpec(memory_bytes=10**9)))


async def test_who_ends_a_trajectory_that_is_being_removed_waits_until_it_is_gone(
    rig: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what its sandbox uses, such as the snapshot that it began with, is used still when it is said to be gone."""
    removed, end = asyncio.Event(), rig.runtime.end_trajectory

    async def slow(trajectory: str) -> None:
        await removed.wait()
        await end(trajectory)

    monkeypatch.setattr(rig.runtime, "end_trajectory", slow)
    await rig.engine.open_trajectory("t", "default", FUNCTION)
    ends = [asyncio.create_task(rig.engine.end_trajectory("t")) for _ in range(2)]
    await asyncio.sleep(0)
    late = asyncio.create_task(rig.engine.end_trajectory("t"))
    await asyncio.sleep(0)
    early = [each.done() for each in (*ends, late)]
    removed.set()
    assert not await late and await ends[0]
    assert not any(early)


async def test_who_opens_stands_in_the_queue_with_task_cause_and_turn(rig: EngineRig) -> None:
    large = replace(FUNCTION, sandbox=SandboxSpec(memory_bytes=900))
    await rig.engine.open_trajectory("t", "default", FUNCTION)
    opening = [asyncio.create_task(rig.engine.open_trajectory(name, "late", large)) for name in ("u", "v")]
    await asyncio.sleep(0)
    first, second = rig.waiting()
    for entry, name in ((first, "u"), (second, "v")):
        assert (entry["function"], entry["task"], entry["trajectory"]) == ("(opening)", "late", name)
        assert "bytes of memory" in str(entry["waits_for"])
    assert [task["queued"] for task in rig.engine.tasks() if task["task"] == "late"] == [2]
    await rig.engine.end_trajectory("t")
    await opening[0]
    assert [entry["trajectory"] for entry in rig.waiting()] == ["v"]
    await rig.engine.end_trajectory("u")
    await opening[1]
    assert rig.waiting() == []


async def test_one_of_two_who_open_the_same_may_go_and_the_last_takes_it_along(rig: EngineRig) -> None:
    large = replace(FUNCTION, sandbox=SandboxSpec(memory_bytes=900))
    await rig.engine.open_trajectory("t", "default", FUNCTION)
    for goes, stays in ((0, 1), (1, 0)):
        both = [asyncio.create_task(rig.engine.open_trajectory("u", "default", large)) for _ in range(2)]
        await asyncio.sleep(0)
        both[goes].cancel()
        await asyncio.gather(both[goes], return_exceptions=True)
        assert rig.engine.trajectory("u") is not None
        await rig.engine.end_trajectory("t")
        await both[stays]
        await rig.engine.open_trajectory("u", "default", large)
        await rig.engine.end_trajectory("u")
        await rig.engine.open_trajectory("t", "default", FUNCTION)
    both = [asyncio.create_task(rig.engine.open_trajectory("u", "default", large)) for _ in range(2)]
    await asyncio.sleep(0)
    for each in both:
        each.cancel()
    await asyncio.gather(*both, return_exceptions=True)
    assert rig.engine.trajectory("u") is None


async def test_who_waits_to_open_is_sent_to_the_next_gateway(rig: EngineRig) -> None:
    large = replace(FUNCTION, sandbox=SandboxSpec(memory_bytes=900))
    await rig.engine.open_trajectory("t", "default", FUNCTION)
    waits = asyncio.create_task(rig.engine.open_trajectory("u", "default", large))
    await asyncio.sleep(0)
    assert await rig.engine.drain(5.0) == 0
    with pytest.raises(Draining, match="the gateway is shutting down"):
        await waits
    assert rig.engine.trajectory("u") is None


async def test_draining_lets_running_work_end_and_starts_nothing_more(rig: EngineRig) -> None:
    rig.steps["a"] = ScriptStep(held=True)
    (running,) = rig.submit(action("a"))
    await rig.ear.until_started("a")
    drained = asyncio.create_task(rig.engine.drain(5.0))
    (late,) = rig.submit(action("b"))
    rig.runtime.finish("a")
    assert await drained == 0
    assert (await rig.end(running)).outcome.state is State.SUCCEEDED
    assert not late.done()
    assert [entry["id"] for entry in rig.waiting()] == ["b"]


async def test_the_queue_says_what_each_action_waits_for(rig: EngineRig) -> None:
    for name in ("a", "b"):
        rig.steps[name] = ScriptStep(held=True)
    rig.submit(action("a", trajectory="t"), action("b"), action("c"), action("d", trajectory="t"))
    await rig.ear.until_started("a")
    waits = {entry["id"]: entry["waits_for"] for entry in rig.waiting()}
    assert waits == {"c": "1 of cpu", "d": "the earlier actions of trajectory t"}
    assert rig.engine.tasks()[0]["queued"] == 2
    pools = rig.engine.resources()["pools"]
    assert isinstance(pools, dict)
    assert pools["cpu:n0"]["free"] == 0


class SlowClock:
    """Half as fast as the loop's timers, which therefore ring too early."""

    def now(self) -> float:
        return asyncio.get_running_loop().time() / 2


async def test_times_go_on_between_two_events() -> None:
    clock = VirtualClock(50.0)
    executor = LocalExecutor({"exec": ScriptedRuntime()})
    engine = Engine(build_core(spec(node(cores=2))), executor, clock=clock)
    await engine.start()
    await engine.open_trajectory("t", "default", FUNCTION)
    clock.now_s = 57.0
    found = engine.trajectory("t")
    assert found is not None and found["idle_s"] == 7.0
    await engine.close()
    await executor.close()


async def test_a_timer_that_rings_early_loses_no_wake_up(rig: EngineRig) -> None:
    core = build_core(replace(spec(), resources={"search": QuotaSpec(limit=1, period_s=0.02)}))
    engine = Engine(core, LocalExecutor({"exec": ScriptedRuntime()}), clock=SlowClock())
    await engine.start()
    waiting = [replace(action(name), cost={"search": UnitSet.fixed(1)}) for name in ("a", "b", "c")]
    call = Call(function=FUNCTION, input={}, log=RecordingLog())
    async with asyncio.timeout(60):
        settled = await asyncio.gather(*engine.submit([Submission(action=one, call=call) for one in waiting]))
    assert [one.outcome.state for one in settled] == [State.SUCCEEDED] * 3
    await engine.close()


def on_two_devices(executor: LocalExecutor) -> Engine:
    """An engine with two devices of 100 bytes and a service of 40."""
    services = {"judge": ServiceSpec(name="judge", bytes_by_dop={1: 40}, restore_s_by_dop={1: 1.0})}
    return Engine(build_core(replace(spec(node(devices=2)), services=services)), executor)


async def test_a_service_in_use_is_copied_to_the_idle_device_and_its_next_action_finds_it_there() -> None:
    runtime = ScriptedRuntime(lambda execution: ScriptStep(held=execution.action.id == "a"))
    executor = LocalExecutor({"exec": runtime})
    engine = on_two_devices(executor)
    await engine.start()
    call = Call(function=FUNCTION, input={}, log=RecordingLog())
    first, second = (Submission(action=action(name, {"gpu": 1}, service="judge"), call=call) for name in ("a", "b"))
    async with asyncio.timeout(60):
        futures = engine.submit([first])
        await runtime.asked_for_copy("judge")
        futures += engine.submit([second])
        await asyncio.gather(futures[1])
        runtime.finish("a")
        await asyncio.gather(*futures)
    leases = {name: lease for name, (lease, *_) in runtime.leases.items()}
    assert [leases[name].grants["gpu"].restore for name in ("a", "b")] == [True, False]
    assert engine.replicas()["hits"] == 1
    await engine.close()


async def test_a_bug_in_a_pass_is_told_to_everybody_who_waits_and_nothing_is_scheduled_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = list[str]()
    runtime = ScriptedRuntime(lambda _: ScriptStep(hangs=True))
    executor = LocalExecutor({"exec": runtime}, deadlines=Deadlines(kill_s=0.05))
    core = build_core(spec(node(cores=2)))
    ear = Ear()
    engine = Engine(core, executor, listeners=[ear], on_fault=lambda: faults.append("told"))
    await engine.start()
    call = Call(function=FUNCTION, input={}, log=RecordingLog())

    def submit(name: str) -> asyncio.Future[Settlement]:
        return engine.submit([Submission(action=action(name), call=call)])[0]

    running = submit("running")
    await ear.until_started("running")

    def bug(now_s: float) -> list[Command]:
        raise AssertionError("a bug")

    monkeypatch.setattr(core, "schedule", bug)
    waiting = submit("waiting")
    for future in (running, waiting):
        async with asyncio.timeout(60):
            with pytest.raises(CodedError, match=r"the scheduler failed: AssertionError.*a bug"):
                await future
    assert faults == ["told"] and engine.fault is not None
    with pytest.raises(Draining, match="the scheduler failed"):
        await submit("late")
    async with asyncio.timeout(60):
        await engine.close()
    assert faults == ["told"]
    await executor.close()


class TwoClocks:
    """Both clocks of a machine, moved by hand."""

    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1e9, 5.0

    def pass_s(self, passed_s: float) -> None:
        self.wall_s += passed_s
        self.monotonic_s += passed_s

    def clock(self) -> WallClock:
        return WallClock(lambda: self.wall_s, lambda: self.monotonic_s)


def test_it_tells_the_machine_s_time_while_nobody_sets_it() -> None:
    machine = TwoClocks()
    clock = machine.clock()
    for _ in range(100):
        machine.pass_s(0.1)
        assert clock() == pytest.approx(machine.wall_s)


@pytest.mark.promise("The time of day never jumps: ages, keys and retention pass with time.")
@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_jump_of_the_machine_s_clock_is_followed_slowly_and_never_backwards(jump_s: float) -> None:
    machine = TwoClocks()
    clock = machine.clock()
    before_s = clock()
    machine.wall_s += jump_s
    assert clock() == before_s
    machine.pass_s(10.0)
    assert 9.0 <= clock() - before_s <= 11.0


def test_it_is_right_again_in_the_end() -> None:
    machine = TwoClocks()
    clock = machine.clock()
    machine.wall_s += 30.0
    for _ in range(700):
        machine.pass_s(1.0)
        clock()
    assert clock() == pytest.approx(machine.wall_s)
