"""A scheduling pass: what could start is looked at, starts in order, and a policy that fails hurts one pool."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from manager.action import ANYWHERE, Amdahl, Chunk, NodeChoice, Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, SchedulerSpec, ServiceSpec, TaskSpec
from manager.core.core import Core
from manager.core.scheduling_pass import RoomiestFirst, SchedulingPass, Selector, StartOption, _Contender
from manager.events import (
    Command,
    Event,
    Execute,
    Finished,
    NodeJoined,
    NodeLost,
    Reconfigured,
    ReplicaEnded,
    Replicate,
    Submitted,
    Tick,
    TrajectoryEnded,
    TrajectoryOpened,
)
from manager.resources.pools import Headroom
from manager.scheduler.fixed import FixedPolicy
from manager.scheduler.policy import Decision, Policy, PolicySpec, PoolView, PromptPolicy, ResizeChoice, Start
from manager.scheduler.registry import make_policy
from tests.manager.conftest import DONE, CoreDriver, Drive, action, finish, node, spec, submit

NODES = (node("n0", cores=2), node("n1", cores=4), node("n2", cores=3))


class AlwaysAsked:
    """Decides as another policy does, and does not say that it is prompt."""

    name = "always asked"

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, view: PoolView) -> Decision:
        return self._policy.decide(view)


class CountsTurns(PromptPolicy):
    """Starts every candidate at its minimum and counts how often it was asked."""

    name = "counts turns"

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, view: PoolView) -> Decision:
        self.asked += 1
        starts = [(one.action.id, one.action.cost["cpu"].minimum) for one in view.candidates]
        return Decision(starts=[Start(action_id=id, units=units) for id, units in starts])

    def starts_in_order(self, longest_s: float) -> bool:
        return longest_s <= 5.0


def counted() -> tuple[CountsTurns, CoreDriver]:
    policy = CountsTurns()
    return policy, CoreDriver(build_core(spec(node(cores=4)), policies={"cpu": policy}))


def test_one_that_waits_alone_starts_without_a_turn_of_its_pool() -> None:
    policy, driver = counted()
    driver.step(0, submit("a", {"cpu": 2}, trajectory="t"))
    driver.step(1, submit("b", {"cpu": 1}, trajectory="u"))
    driver.step(2, submit("c", {"cpu": 1}, memory_bytes=8))
    assert driver.running() == {"a", "b", "c"} and policy.asked == 0
    driver.core.check()


@pytest.mark.parametrize("seconds, turns", [(5.0, 0), (5.1, 2)])
def test_a_line_of_short_ones_starts_in_order_without_a_turn(seconds: float, turns: int) -> None:
    policy, driver = counted()
    driver.step(0, *(submit(f"a{number}", {"cpu": 1}, t_ori_s=seconds) for number in range(9)))
    assert driver.running() == {"a0", "a1", "a2", "a3"}
    driver.step(1, finish("a1"), finish("a2"))
    assert driver.running() == {"a0", "a3", "a4", "a5"} and policy.asked == turns
    driver.core.check()


def test_memory_that_is_missing_holds_for_one_that_waits_alone() -> None:
    _, driver = counted()
    memory_bytes = driver.core.state.nodes["n0"].free_bytes
    driver.step(0, submit("a", memory_bytes=memory_bytes))
    driver.step(1, submit("b", memory_bytes=1))
    assert driver.running() == {"a"}


def test_a_cap_holds_for_one_that_waits_alone() -> None:
    config = replace(spec(node(cores=4)), tasks={"default": TaskSpec(caps={"cpu": 1})})
    driver = CoreDriver(build_core(config))
    driver.step(0, submit("a", trajectory="t"))
    driver.step(1, submit("b", trajectory="u"))
    assert driver.running() == {"a"}


@pytest.mark.parametrize("name", ["adaptive", "price", "paper", "fixed"])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_can_tell_whether_the_policy_was_asked(name: str, seed: int) -> None:
    policy = make_policy(PolicySpec(name=name))
    asked = {"cpu": policy} if seed % 2 else {"cpu": policy, "default": policy}
    kept = {kind: AlwaysAsked(one) for kind, one in asked.items()}
    played = [play(build_core(spec(*NODES), policies=policies), seed) for policies in (asked, kept)]
    assert played[0] == played[1] and any(isinstance(command, Execute) for command in played[0])


def play(core: Core, seed: int) -> list[Command]:
    """Return the commands of some hundred steps under a load that comes and goes; from seed 2 on of lines."""
    rng, is_mixed = random.Random(seed), seed < 2
    seconds = (1.5,) if seed < 3 else (1.5, 1.5, 1.5, 9.0)
    said: list[Command] = []
    running: list[Execute] = []
    for number in range(300):
        events: list[Event] = [Tick()]
        for other in range(rng.choice((0, 0, 1, 1, 1, 4) if number < 250 else (0,))):
            choices = UnitSet.fixed(1), UnitSet.fixed(1), UnitSet.fixed(2), UnitSet.span(1, 2)
            units = rng.choice(choices if is_mixed else choices[:3])
            key = "cpu" if units.elastic else None
            name = f"a{number}.{other}"
            malleable = key is not None and rng.random() < 0.5
            trajectory = f"t{rng.randrange(9)}" if rng.random() < (0.8 if is_mixed else 0.1) else None
            t_ori_s = rng.choice(seconds)
            events.append(
                submit(name, {"cpu": units}, key=key, malleable=malleable, trajectory=trajectory, t_ori_s=t_ori_s)
            )
        for one in [one for one in running if rng.random() < 0.5]:
            running.remove(one)
            done = Outcome(state=State.SUCCEEDED, execution_s=0.5)
            events.append(Finished(action_id=one.action.id, outcome=done))
        commands = core.step(events, float(number))
        running += [command for command in commands if isinstance(command, Execute)]
        said += commands
        core.check()
    return said


@pytest.mark.parametrize("seed", range(20))
def test_the_roomiest_option_that_fits_and_is_allowed_comes_first(seed: int) -> None:
    chance = random.Random(seed)
    rooms = [(Headroom(chance.randint(0, 5)), Headroom(chance.randint(0, 20))) for _ in range(8)]
    options = [
        StartOption(f"n{number}", (), 4, ((units, 1), (memory, 4))) for number, (units, memory) in enumerate(rooms)
    ]
    roomiest = RoomiestFirst(options)
    found = 0
    for _ in range(60):
        barred = chance.choice(options) if chance.random() < 0.5 else None
        fitting = [option for option in options if option.fits() and option is not barred]
        best = min(fitting, key=lambda option: option.shortage, default=None)
        assert roomiest.first(lambda option, barred=barred: option is not barred) is best  # type: ignore[misc]
        found += best is not None
        if best is not None and chance.random() < 0.7:
            best.take()
        else:
            chance.choice(options).reserve()
    assert 0 < found < 60


@pytest.mark.parametrize("seed", range(12))
def test_a_group_without_rivals_gets_what_a_walk_among_others_would_give_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    core = build_core(spec(*(node(f"n{number}", cores=chance.randint(1, 6)) for number in range(3))))
    core.pause()
    alike = seed % 2 == 0
    for number in range(60):
        submitted = action(
            f"a{number}",
            {"cpu": 1 if alike else chance.choice((1, 2))},
            trajectory=f"t{number}",
            memory_bytes=1,
            task="a" if alike else chance.choice("ab"),
        )
        core.step([Submitted(action=submitted)], 0.0)

    def found() -> tuple[dict[str, list[str]], dict[str, tuple[int, int]]]:
        selection = SchedulingPass(core.state).select(core.state.queue.groups())
        of: dict[str, list[str]] = {}
        for candidate in selection.candidates:
            of.setdefault(candidate.pool, []).append(candidate.waiting.id)
        return of, {name: (room.free, room.awaited) for name, room in selection.headrooms.items()}

    taken: list[str] = []
    take_all = Selector._take_all

    def noted(self: Selector, contender: _Contender) -> None:
        taken.append(contender.group.signature.node)
        take_all(self, contender)

    monkeypatch.setattr(Selector, "_take_all", noted)
    quickly = found()
    assert taken or not alike, "no group was without rivals"
    monkeypatch.setattr(Selector, "_is_unrivalled", lambda self, contender: False)
    assert quickly == found()


def test_an_action_that_needs_memory_alone_starts_when_memory_returns(drive: Drive) -> None:
    driver = drive(spec(node(memory_bytes=100)))
    driver.step(0, submit("a", {}, memory_bytes=80), submit("b", {}, memory_bytes=80))
    assert driver.running() == {"a"}
    driver.step(1, finish("a"))
    assert driver.running() == {"b"}


def test_an_action_that_needs_memory_alone_starts_on_a_node_that_joins(drive: Drive) -> None:
    driver = drive(spec(node(memory_bytes=100)))
    driver.step(0, submit("a", {}, memory_bytes=80), submit("b", {}, memory_bytes=80))
    driver.step(1, NodeJoined(node=node("n1", memory_bytes=100)))
    assert driver.started["b"].lease.node == "n1"


def test_units_that_a_resize_gives_back_to_a_cap_start_an_action_of_the_task_on_another_node() -> None:
    class ShrinksLater:
        """Starts everything as wide as it may; from second five on, everything runs on one unit."""

        name = "shrinks later"

        def decide(self, view: PoolView) -> Decision:
            starts = [Start(action_id=one.action.id, units=one.limit) for one in view.candidates]
            wide = [one.action.id for one in view.running if one.units > 1 and one.action.malleable]
            if view.now_s < 5.0:
                return Decision(starts=starts, wake_s=5.0 if starts else None)
            return Decision(starts=starts, resizes=[ResizeChoice(action_id=id, units=1) for id in wide])

    config = replace(
        spec(node("n0", memory_bytes=10), node("n1", memory_bytes=100)), tasks={"default": TaskSpec(caps={"cpu": 4})}
    )
    driver = CoreDriver(build_core(config, policies={"cpu": ShrinksLater()}))
    driver.step(0, submit("elastic", {"cpu": UnitSet.span(1, 3)}, key="cpu", malleable=True))
    driver.step(1, submit("beside", {"cpu": 2}, trajectory="t", memory_bytes=100))
    assert driver.started["elastic"].lease.node == "n0" and driver.running() == {"elastic"}
    driver.step(5, Tick())
    assert driver.started["beside"].lease.node == "n1"


def test_a_cap_that_is_raised_or_lifted_starts_what_it_held_back(drive: Drive) -> None:
    driver = drive(replace(spec(), tasks={"default": TaskSpec(caps={"cpu": 1})}))
    driver.step(0, *(submit(f"a{index}") for index in range(3)))
    assert driver.running() == {"a0"}
    driver.step(1, Reconfigured(tasks={"default": TaskSpec(caps={"cpu": 2})}))
    assert driver.running() == {"a0", "a1"}
    driver.step(2, Reconfigured(tasks={}))
    assert driver.running() == {"a0", "a1", "a2"}


def crowded(*, cores: int = 4, tasks: dict[str, TaskSpec] | None = None, window: int = 2048) -> ManagerSpec:
    scheduler = SchedulerSpec(policies={"default": PolicySpec(name="adaptive")}, queue_window=window)
    return replace(spec(node(cores=cores)), scheduler=scheduler, tasks=tasks or {})


def suite(name: str, t_ori_s: float, **fields: object) -> Submitted:
    cost = {"cpu": UnitSet.span(1, 8)}
    return Submitted(
        action=action(name, cost, key="cpu", t_ori_s=t_ori_s, elasticity=Amdahl(0.05), malleable=True, **fields)
    )


def fill(driver: CoreDriver) -> None:
    """Take every core for as long as the test likes."""
    cores = driver.core.state.resources.of_kind("cpu")[0].total
    driver.step(0, *(Submitted(action=action(f"busy{index}", t_ori_s=900.0)) for index in range(cores)))


def test_the_shortest_is_found_beyond_the_window_of_what_a_policy_is_shown_in_order(drive: Drive) -> None:
    driver = drive(crowded(window=2))
    fill(driver)
    driver.step(1, *(suite(f"long{index}", 90.0) for index in range(6)), suite("short", 10.0))
    driver.step(2, Finished(action_id="busy0", outcome=DONE))
    assert driver.running() >= {"short"}


def test_wide_commands_of_a_crowd_wait_for_cores_that_are_free(drive: Drive) -> None:
    driver = drive(crowded())
    fill(driver)
    wide = [Submitted(action=action(f"wide{index}", {"cpu": 3}, t_ori_s=1.0)) for index in range(3)]
    driver.step(1, *(suite(f"a{index}", 20.0) for index in range(4)), *wide)
    for now_s in range(2, 40):
        for name in sorted(driver.running()):
            driver.step(now_s, Finished(action_id=name, outcome=DONE))
    assert len(driver.settled) == 11


def test_a_crowd_passes_no_wide_action_that_is_the_oldest_and_waits_for_its_cores(drive: Drive) -> None:
    driver = drive(crowded())
    fill(driver)
    driver.step(1, Submitted(action=action("wide", {"cpu": 3}, t_ori_s=60.0)))
    driver.step(2, *(suite(f"a{index}", 5000.0) for index in range(3)))
    for index in range(3):
        driver.step(3 + index, Finished(action_id=f"busy{index}", outcome=DONE))
        assert not driver.running() & {"a0", "a1", "a2"}, "a suite that outlives the wait of the wide one was started"
    assert "wide" in driver.running()


def test_a_task_with_a_cap_keeps_it_in_a_crowd(drive: Drive) -> None:
    driver = drive(crowded(cores=8, tasks={"red": TaskSpec(caps={"cpu": 3})}))
    driver.step(1, *(suite(f"a{index}", 10.0 + index, task="red") for index in range(5)))
    held = sum(one.lease.units("cpu") for one in driver.started.values())
    assert 1 <= held <= 3 and driver.running()


@pytest.fixture
def driver(drive: Drive) -> CoreDriver:
    """One node of 100 bytes, of which trajectories leave a tenth."""
    return drive(spec(node(cores=8, memory_bytes=100)))


def opened(name: str, memory_bytes: int) -> TrajectoryOpened:
    return TrajectoryOpened(trajectory=name, memory_bytes=memory_bytes)


def reward(id: str, memory_bytes: int, **fields: object) -> Submitted:
    return Submitted(action=action(id, None, memory_bytes=memory_bytes, **fields))


def test_a_reward_starts_in_what_trajectories_leave_while_more_of_them_wait(driver: CoreDriver) -> None:
    driver.step(0, *(opened(f"t{n}", 30) for n in range(5)))
    assert driver.homes().keys() == {"t0", "t1", "t2"}, "the fourth would reach into the reserve"
    driver.step(1, reward("r", 10), reward("more", 10))
    assert driver.running() == {"r"}
    driver.step(2, Finished(action_id="r", outcome=DONE))
    assert driver.running() == {"more"}
    driver.step(3, TrajectoryEnded(trajectory="t1"))
    assert driver.homes().keys() == {"t0", "t2", "t3"}, "what the reward holds is not the trajectories'"


def test_a_fresh_grade_of_an_action_in_a_trajectory_starts_while_trajectories_wait(driver: CoreDriver) -> None:
    driver.step(0, *(reward(f"a{n}", 45, trajectory=f"t{n}") for n in range(3)))
    driver.step(1, reward("grade", 10, parent="a0"))
    assert driver.running() == {"a0", "a1", "grade"}


def test_rewards_keep_their_order_in_the_reserve_and_one_that_is_too_large_for_it_holds_none_up(
    driver: CoreDriver,
) -> None:
    driver.step(0, *(opened(f"t{n}", 45) for n in range(3)))
    driver.step(1, reward("first", 6), reward("large", 30), reward("second", 5), reward("third", 4))
    assert driver.running() == {"first"}, "the third would pass the second"
    driver.step(2, Finished(action_id="first", outcome=DONE))
    assert driver.running() == {"second", "third"}
    driver.step(3, TrajectoryEnded(trajectory="t0"), TrajectoryEnded(trajectory="t2"))
    assert driver.running() == {"large", "second", "third"}


def test_a_trajectory_larger_than_the_rest_is_the_first_of_its_node_and_rewards_do_not_starve_it(
    driver: CoreDriver,
) -> None:
    driver.step(0, opened("t", 40), opened("huge", 97), opened("late", 10))
    assert driver.homes().keys() == {"t"}
    driver.step(1, reward("r", 10), reward("little", 3))
    assert driver.running() == {"little"}, "no more than what the huge one leaves"
    driver.step(2, TrajectoryEnded(trajectory="t"))
    assert driver.homes().keys() == {"huge"}
    driver.step(3, TrajectoryEnded(trajectory="huge"))
    assert driver.homes().keys() == {"late"} and driver.running() == {"little", "r"}


def test_without_a_reserve_a_reward_waits_behind_the_trajectory_that_came_first(drive: Drive) -> None:
    whole = spec(node(memory_bytes=100))
    driver = drive(replace(whole, scheduler=replace(whole.scheduler, memory_reserve=0.0)))
    driver.step(0, opened("t", 60), opened("u", 60))
    driver.step(1, reward("r", 10))
    assert not driver.running()
    driver.step(2, TrajectoryEnded(trajectory="u"))
    assert driver.running() == {"r"}


@dataclass(frozen=True)
class Failing:
    """Decides what it is told to, whatever the view."""

    how: Callable[[PoolView], Decision]
    name: str = "failing"

    def decide(self, view: PoolView) -> Decision:
        return self.how(view)


def crash(view: PoolView) -> Decision:
    raise ZeroDivisionError("no queue is that long")


FAULTS = {
    "raises": (crash, "it raised ZeroDivisionError"),
    "starts a stranger": (
        lambda view: Decision(starts=[Start(action_id="nobody", units=1)]),
        "names neither a candidate",
    ),
    "starts too wide": (lambda view: Decision(starts=[Start(action_id="a0", units=64)]), "is not in the unit set"),
    "resizes a stranger": (
        lambda view: Decision(resizes=[ResizeChoice(action_id="nobody", units=1)]),
        "names no running action",
    ),
    "breaks off halfway": (
        lambda view: Decision(starts=[Start(action_id="a0", units=1), Start(action_id="nobody", units=1)]),
        "names neither a candidate",
    ),
}


@pytest.mark.promise("A bug in a policy costs its pool that policy, and no action.")
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(("how", "story"), FAULTS.values(), ids=FAULTS)
def test_a_policy_that_fails_is_replaced_on_its_pool_and_everything_runs(
    kind: str, how: Callable[[PoolView], Decision], story: str
) -> None:
    core = build_core(spec(node(cores=2, devices=2)), policies={"default": FixedPolicy(), kind: Failing(how)})
    driver = CoreDriver(core, checked=False)
    other = "gpu" if kind == "cpu" else "cpu"
    events = [Submitted(action=action(f"a{index}", {kind: 1})) for index in range(4)]
    driver.step(0, *events, Submitted(action=action("other", {other: 1})))
    assert driver.running() == {"a0", "a1", "other"}, "units stay idle"
    for instant, ended in enumerate(["a0", "a1"], start=1):
        driver.step(instant, Finished(action_id=ended, outcome=DONE))
    assert driver.running() == {"a2", "a3", "other"}
    (pool,) = core.state.faults
    assert pool.startswith(kind)
    assert story in core.state.faults[pool]
    assert "policy failing" in core.state.faults[pool]
    core.state.faults.clear()
    core.check()


class StartsOldestHere:
    """Starts the oldest on one node, whoever's candidate it is; elsewhere every candidate."""

    name = "starts oldest here"

    def decide(self, view: PoolView) -> Decision:
        if view.name == "cpu:n0":
            return Decision(starts=[Start(action_id=min(one.id for one in view.eligible), units=1)])
        return Decision(starts=[Start(action_id=one.action.id, units=1) for one in view.candidates])


def test_one_that_has_started_elsewhere_keeps_none_of_those_alike_from_starting() -> None:
    driver = CoreDriver(
        build_core(spec(node("n0", cores=1), node("n1", cores=4)), policies={"cpu": StartsOldestHere()})
    )
    driver.step(0, *(Submitted(action=action(f"a{number}")) for number in range(5)))
    started = {name: execute.lease.node for name, execute in driver.started.items()}
    assert started == {"a0": "n0", "a1": "n1", "a2": "n1", "a4": "n1"}


def test_alike_actions_are_leased_what_they_would_be_leased_one_by_one() -> None:
    """Where they may run sets every other one apart: it is the only node that there is."""
    leases = []
    for apart in (ANYWHERE, NodeChoice(node="n0")):
        core = build_core(spec(node("n0", cores=6)))
        placements = (ANYWHERE, apart)
        events = [Submitted(action=action(f"a{n}", placement=placements[n % 2])) for n in range(9)]
        commands = core.step([*events], 0.0)
        leases.append([command.lease for command in commands if isinstance(command, Execute)])
        core.check()
    assert leases[0] == leases[1] and len(leases[0]) == 6


def world(*, policy: str = "price", replicate: bool = True, strict: bool = False) -> ManagerSpec:
    """Two devices of 100 bytes, and two services of 40 bytes that take a second to restore."""
    services = {
        name: ServiceSpec(name=name, bytes_by_dop={1: 40, 2: 20}, restore_s_by_dop={1: 1.0, 2: 0.5})
        for name in ("a", "b")
    }
    return ManagerSpec(
        nodes=(node(devices=2),),
        services=services,
        scheduler=SchedulerSpec(
            policies={"default": PolicySpec(name=policy, options={})}, replicate=replicate, strict=strict
        ),
    )


def ask(id: str, service: str) -> Submitted:
    """An action of ten seconds on one device."""
    return Submitted(action=action(id, {"gpu": 1}, service=service, t_ori_s=10.0))


def copies(driver: CoreDriver) -> list[tuple[str, Chunk]]:
    return [(command.service, command.chunk) for command in driver.commands if isinstance(command, Replicate)]


@pytest.mark.parametrize("policy", ["price", "adaptive", "paper", "fixed"])
def test_what_computes_is_copied_to_the_idle_device_and_its_next_action_starts_warm_there(
    drive: Drive, policy: str
) -> None:
    driver = drive(world(policy=policy))
    driver.step(0, ask("x", "a"))
    where = driver.started["x"].lease.grants["gpu"].chunk
    other = (1, 1) if where == (0, 1) else (0, 1)
    assert copies(driver) == [("a", other)]
    driver.step(1, ReplicaEnded(number=1, done=True))
    driver.step(2, ask("y", "a"))
    grant = driver.started["y"].lease.grants["gpu"]
    assert (grant.chunk, grant.restore) == (other, False)


@pytest.mark.parametrize("reason", ["switched off", "strict", "draining"])
def test_nothing_is_copied_if_that_is_switched_off_or_the_gateway_drains(drive: Drive, reason: str) -> None:
    driver = drive(world(replicate=reason != "switched off", strict=reason == "strict"))
    if reason == "draining":
        driver.core.apply([ask("x", "a")], 0)
        driver.core.pause()
    driver.step(0, *([] if reason == "draining" else [ask("x", "a")]))
    assert copies(driver) == []


def test_a_failed_copy_is_not_repeated_and_the_next_action_starts_cold(drive: Drive) -> None:
    driver = drive(world())
    driver.step(0, ask("x", "a"))
    driver.step(1, ReplicaEnded(number=1, done=False))
    assert len(copies(driver)) == 1
    driver.step(2, ask("y", "a"))
    assert driver.started["y"].lease.grants["gpu"].restore


def test_an_answer_that_comes_twice_or_after_the_node_was_lost_changes_nothing(drive: Drive) -> None:
    driver = drive(world())
    driver.step(0, ask("x", "a"))
    driver.step(1, NodeLost(node="n0"))
    driver.step(2, NodeJoined(node=node(devices=2)))
    driver.step(3, ReplicaEnded(number=1, done=True), ReplicaEnded(number=1, done=False))
    assert driver.core.state.resources.placed[0].replicas["under_way"] == 0
    driver.step(4, ask("y", "a"))
    assert driver.started["y"].lease.grants["gpu"].restore, "the copy is gone with its node"
