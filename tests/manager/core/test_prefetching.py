"""Prefetching: what each busy device will serve next is brought in beside what computes there, and only that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from manager.action import Action
from manager.config import ManagerSpec, SchedulerSpec, ServiceSpec
from manager.events import Finished, NodeJoined, NodeLost, Prefetch, PrefetchEnded, Submitted
from manager.scheduler.policy import PolicySpec
from tests.manager.conftest import DONE, CoreDriver, action, node

Drive = Callable[[ManagerSpec], CoreDriver]


def world(devices: int = 1, *, policy: str = "price", prefetch: bool = True, batch_tokens: int = 0) -> ManagerSpec:
    """Devices of 100 bytes, and services of 40 bytes that take a second to restore."""
    services = {
        name: ServiceSpec(
            name=name, bytes_by_dop={1: 40, 2: 20}, restore_s_by_dop={1: 1.0, 2: 0.5}, batch_tokens=batch_tokens
        )
        for name in ("a", "b", "c", "d")
    }
    return ManagerSpec(
        nodes=(node(devices=devices),),
        services=services,
        scheduler=SchedulerSpec(policies={"default": PolicySpec(name=policy)}, prefetch=prefetch),
    )


def ask(id: str, service: str, **fields: object) -> Submitted:
    """An action of ten seconds on one device."""
    return Submitted(action=action(id, {"gpu": 1}, service=service, **{"t_ori_s": 10.0, **fields}))


def finish(id: str) -> Finished:
    return Finished(action_id=id, outcome=DONE)


def prefetches(driver: CoreDriver) -> list[tuple[str, tuple[int, int]]]:
    return [(command.service, command.chunk) for command in driver.commands if isinstance(command, Prefetch)]


@pytest.mark.parametrize("policy", ["price", "adaptive", "paper", "fixed"])
def test_the_next_service_in_the_queue_is_brought_in_while_the_current_action_computes(
    drive: Drive, policy: str
) -> None:
    driver = drive(world(policy=policy))
    driver.step(0, ask("x", "a"), ask("y", "b"), ask("z", "c"))
    assert prefetches(driver) == [("b", (0, 1))]
    driver.step(5, PrefetchEnded(number=1, done=True))
    driver.step(10, finish("x"))
    assert not driver.started["y"].lease.grants["gpu"].restore
    assert prefetches(driver) == [("b", (0, 1)), ("c", (0, 1))], "the one after that follows"


def test_it_is_off_where_it_is_switched_off_or_the_gateway_drains(drive: Drive) -> None:
    off, draining = drive(world(prefetch=False)), drive(world())
    off.step(0, ask("x", "a"), ask("y", "b"))
    draining.step(0, ask("x", "a"))
    draining.core.pause()
    draining.step(1, ask("y", "b"))
    assert prefetches(off) == prefetches(draining) == []


def test_what_is_there_is_not_brought_again(drive: Drive) -> None:
    driver = drive(world())
    driver.step(0, ask("w", "b"))
    driver.step(10, finish("w"))
    driver.step(10, ask("x", "a"), ask("y", "b"))
    assert prefetches(driver) == []


def test_each_device_is_told_of_the_action_that_it_will_serve(drive: Drive) -> None:
    driver = drive(world(2))
    driver.step(0, ask("x", "a"), ask("y", "b", t_ori_s=20.0))
    driver.step(0, ask("u", "c"), ask("v", "d"))
    where = {driver.started[id].lease.grants["gpu"].chunk: id for id in "xy"}
    first = next(chunk for chunk, id in where.items() if id == "x")
    assert first is not None
    assert prefetches(driver)[0] == ("c", first), "the device that is free first serves the first in the queue"


def test_a_part_of_a_chunk_that_the_next_action_wants_is_enough(drive: Drive) -> None:
    driver = drive(world(2, policy="fixed"))
    wide = replace(action("x", {"gpu": 2}, service="a"), t_ori_s=10.0)
    driver.step(0, Submitted(action=wide), ask("y", "b"), ask("z", "c"))
    assert prefetches(driver) == [("b", (0, 1))], "one for each running action"


def test_a_failed_prefetch_is_not_repeated_and_the_action_starts_cold(drive: Drive) -> None:
    driver = drive(world())
    driver.step(0, ask("x", "a"), ask("y", "b"))
    driver.step(1, PrefetchEnded(number=1, done=False))
    driver.step(2, ask("z", "c"))
    assert prefetches(driver) == [("b", (0, 1))]
    driver.step(10, finish("x"))
    assert driver.started["y"].lease.grants["gpu"].restore


def test_an_answer_that_comes_twice_or_after_the_node_was_lost_changes_nothing(drive: Drive) -> None:
    driver = drive(world())
    driver.step(0, ask("x", "a"), ask("y", "b"))
    driver.step(1, NodeLost(node="n0"))
    driver.step(2, NodeJoined(node=node(devices=1)))
    assert driver.started["y"].lease.grants["gpu"].restore
    driver.step(3, PrefetchEnded(number=1, done=True), PrefetchEnded(number=1, done=False))
    assert driver.core.state.resources["gpu"].prefetches["under_way"] == 0


def test_the_members_of_a_batch_are_one_start(drive: Drive) -> None:
    driver = drive(world(2, batch_tokens=100))
    tokens = {"batch_tokens": 10}
    driver.step(0, ask("x", "a", **tokens), ask("w", "b", **tokens))
    driver.step(1, ask("y", "c", **tokens), ask("z", "c", **tokens), ask("u", "d", **tokens))
    assert sorted(service for service, _ in prefetches(driver)) == ["c", "d"], "y and z run together"


@pytest.mark.parametrize(("marginal", "expected"), [(1.0, [("c", (0, 1)), ("d", (1, 1))]), (0.0, [("c", (0, 1))])])
def test_the_end_of_a_batch_that_is_yet_to_start_is_foreseen(
    drive: Drive, marginal: float, expected: list[tuple[str, tuple[int, int]]]
) -> None:
    driver = drive(world(2, batch_tokens=100))
    fields = {"batch_tokens": 10, "batch_marginal": marginal}
    driver.step(0, ask("x", "a", t_ori_s=10.0), ask("w", "b", t_ori_s=25.0))
    driver.step(1, ask("y", "c", **fields), ask("z", "c", **fields), ask("u", "d", t_ori_s=20.0))
    assert prefetches(driver) == expected, "u follows w where y and z take longer than that, else y and z"


@pytest.mark.parametrize(("known", "expected"), [(True, [("c", (0, 1))]), (False, [])])
def test_nothing_goes_for_what_follows_an_end_that_nobody_knows(
    drive: Drive, known: bool, expected: list[tuple[str, tuple[int, int]]]
) -> None:
    driver = drive(world())
    driver.step(0, ask("w", "a"))
    driver.step(10, finish("w"))
    driver.step(10, ask("x", "b", t_ori_s=10.0 if known else None))
    driver.step(11, ask("y", "c"))
    assert prefetches(driver) == expected, "a would have to go"


def test_nothing_is_brought_for_an_action_that_waits_for_something_else(drive: Drive) -> None:
    driver = drive(world())
    driver.step(0, Submitted(action=action("c", {"cpu": 4})), ask("x", "a"))
    both: Action = action("y", {"gpu": 1, "cpu": 1}, service="b", t_ori_s=10.0)
    driver.step(1, Submitted(action=both))
    assert prefetches(driver) == []
