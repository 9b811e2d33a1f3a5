"""The driver against a cluster that does what a test says: commands, answers, failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from runtimes.node.ray.driver import RayCluster, RayDriver, RayMembers, RayNode, Reservation


@dataclass(eq=False)
class Answer:
    """A reference to what an actor will have answered."""

    value: object = None
    error: Exception | None = None
    there: bool = False


@dataclass
class Method:
    """A method of an actor's: each call makes an answer that the test gives."""

    calls: list[tuple[tuple[object, ...], Answer]] = field(default_factory=list)

    def remote(self, *given: object) -> Answer:
        answer = Answer()
        self.calls.append((given, answer))
        return answer


@dataclass(eq=False)
class ScriptedActor:
    """An actor whose answers the test gives."""

    facts: Method = field(default_factory=Method)
    start: Method = field(default_factory=Method)
    stop: Method = field(default_factory=Method)


class ScriptedRay:
    """`ray` as far as the driver calls it."""

    def __init__(self) -> None:
        self.killed: list[object] = []

    def get(self, reference: Answer, timeout: float) -> object:
        if reference.error is not None:
            raise reference.error
        return reference.value

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


class ScriptedCluster:
    """A cluster of the test's own."""

    def __init__(self) -> None:
        self.ray = ScriptedRay()
        self.listed = [RayNode(id="n1", alive=True, resources={"CPU": 4.0})]
        self.made: list[tuple[str, float, float, ScriptedActor]] = []
        self.refuses: Exception | None = None
        self.free: Mapping[str, Mapping[str, float]] = {}

    def nodes(self) -> list[RayNode]:
        return self.listed

    def draining(self) -> dict[str, float]:
        return {}

    def available(self) -> Mapping[str, Mapping[str, float]]:
        return self.free

    def actor(self, node: str, cpus: float, gpus: float) -> ScriptedActor:
        if self.refuses is not None:
            raise self.refuses
        self.made.append((node, cpus, gpus, ScriptedActor()))
        return self.made[-1][3]

    def ready(self, references: list[Answer]) -> list[Answer]:
        return [each for each in references if each.there]


@dataclass
class DriverBench:
    """A driver, its cluster, and what it has said."""

    cluster: ScriptedCluster
    driver: RayDriver
    said: list[Mapping[str, Any]]

    def kinds(self) -> list[str]:
        kinds = [str(message["kind"]) for message in self.said]
        self.said.clear()
        return kinds


@pytest.fixture
def bench() -> DriverBench:
    cluster, said = ScriptedCluster(), list[Mapping[str, Any]]()
    members = RayMembers({}, head=False, reservation=Reservation(cpus=None))
    return DriverBench(cluster, RayDriver(cast(RayCluster, cluster), members, said.append), said)


def give(method: Method, value: object = None, error: Exception | None = None) -> None:
    """Answer the last call."""
    answer = method.calls[-1][1]
    answer.value, answer.error, answer.there = value, error, True


def ready(bench: DriverBench) -> ScriptedActor:
    """An actor that holds its reservation."""
    bench.driver.look()
    actor = bench.cluster.made[-1][3]
    give(actor.facts, {"gpu_ids": [], "daemon": 0, "deaths": 0, "pid": 7})
    bench.driver.look()
    return actor


def test_an_answer_for_a_machine_that_has_gone_is_dropped(bench: DriverBench) -> None:
    bench.driver.look()
    actor = bench.cluster.made[0][3]
    bench.cluster.listed = [RayNode(id="n1", alive=False, why="received SIGTERM")]
    bench.driver.look()
    give(actor.facts, {"gpu_ids": [], "daemon": 0, "deaths": 0, "pid": 7})
    bench.driver.look()
    assert bench.kinds() == ["alive", "dead"]


def test_an_actor_holds_the_reservation_starts_the_daemon_and_gives_both_back(bench: DriverBench) -> None:
    bench.cluster.refuses = ValueError("ActorUnschedulableError: the node is gone")
    bench.driver.look()
    assert bench.said[-1]["why"] == "ValueError: ActorUnschedulableError: the node is gone"
    bench.cluster.refuses = None
    bench.driver._members.known["n1"].again_s = 0.0
    actor = ready(bench)
    assert bench.cluster.made[0][:3] == ("n1", 4.0, 0.0)
    assert bench.said[-1] == {"kind": "actor", "node": "n1", "gpu_ids": [], "daemon": 0, "deaths": 0, "pid": 7}
    start = {"kind": "start", "node": "n1", "command": ["tangram"], "environment": {"A": "b"}, "state_dir": "/s"}
    bench.driver.command(start)
    assert actor.start.calls[0][0] == (["tangram"], {"A": "b"}, "/s")
    give(actor.start, {"gpu_ids": [], "daemon": 99, "deaths": 0, "pid": 7})
    bench.driver.look()
    assert bench.said[-1] == {"kind": "started", "node": "n1", "gpu_ids": [], "daemon": 99, "deaths": 0, "pid": 7}
    bench.driver.command({"kind": "release", "node": "n1", "kill": True})
    assert actor.stop.calls[0][0] == (True,)
    give(actor.stop, True)
    for _ in range(3):
        bench.driver.look()
    assert bench.said[-1] == {"kind": "released", "node": "n1", "gone": True}
    assert bench.cluster.ray.killed == [actor]
    assert len(bench.cluster.made) == 1 and "n1" not in bench.driver.actors, "it is left alone"
