"""Replication: the core asks for copies of what is in use on idle devices, and survives every answer to that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from manager.action import Chunk
from manager.config import ManagerSpec, SchedulerSpec, ServiceSpec
from manager.events import NodeJoined, NodeLost, ReplicaEnded, Replicate, Submitted
from manager.scheduler.policy import PolicySpec
from tests.manager.conftest import CoreDriver, action, node

Drive = Callable[[ManagerSpec], CoreDriver]


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
