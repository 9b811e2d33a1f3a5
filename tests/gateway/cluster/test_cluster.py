"""Machines of a cluster: who can run what, what lives where, and a machine whose engine is gone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.sandbox import DiscardedOutput
from gateway.cluster import cluster
from gateway.cluster.cluster import (
    CORES_MAX,
    DEVICE_COPIES_MAX,
    DEVICES_MAX,
    NODE_COPIES_MAX,
    Abilities,
    Cluster,
    ClusterNode,
    DeclaredServices,
    described,
    is_changed,
)
from gateway.cluster.store import NodeRecords, NodeSnapshots
from gateway.config.schema import ClusterConfig
from gateway.invocations import restart
from gateway.invocations.restart import TrajectoryRecovery
from gateway.store.store import Store, StoreSpec
from manager.action import Action, Chunk, Lease, Outcome, State
from manager.config import NodeSpec, ServiceSpec
from manager.errors import FILES_LOST, CapacityExceeded, InvalidConfig, Reason, Unsupported
from manager.executor import Call
from manager.function import EngineSpec, FunctionSpec, ModelAction, ModelSpec
from runtimes.node.protocol import NodeHello
from runtimes.sandbox.process import ProcessProvider
from runtimes.sandbox.snapshots import NodeSnapshotSettings
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving, until
from tests.runtimes.node.machine import Machine, MachineEnvironments
from tests.runtimes.node.session import hello
from tests.virtual_clock import VirtualClock

F, G = FunctionSpec(name="f", runtime="exec"), FunctionSpec(name="g", runtime="exec")


class Workshop:
    """A machine that can run some functions."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    async def prepare(self, function: FunctionSpec) -> None:
        if function.name not in self.names:
            raise Unsupported(f"no {function.name} here")


async def test_a_function_holds_when_one_machine_can_run_it_and_the_others_are_told_apart() -> None:
    changed: list[str] = []
    abilities = Abilities(changed.append)
    abilities.join("a", Workshop("f").prepare)
    abilities.join("b", Workshop("f", "g").prepare)
    await abilities.prepare(F)
    await abilities.prepare(G)
    assert (set(abilities.able("a")), set(abilities.able("b"))) == ({"f"}, {"f", "g"})
    assert abilities.unable("a") == {"g": "no g here"}
    assert changed == ["a", "b", "b"]


async def test_a_function_that_no_machine_can_run_is_refused_as_the_first_one_says() -> None:
    abilities = Abilities(lambda machine: None)
    with pytest.raises(CapacityExceeded, match="no node has joined"):
        await abilities.prepare(F)
    abilities.join("a", Workshop().prepare)
    with pytest.raises(Unsupported, match="no f here"):
        await abilities.prepare(F)


async def test_what_a_machine_has_said_is_known_without_asking_any() -> None:
    abilities = Abilities(lambda machine: None)
    for name, knows in (("a", Workshop()), ("b", Workshop("f"))):
        abilities.join(name, knows.prepare)
        await abilities.prepare_all(name, (F, G))
    abilities.require_on("b", F)
    with pytest.raises(Unsupported, match="no f here"):
        abilities.require_on("a", F)
    with pytest.raises(CapacityExceeded, match="has not said yet"):
        abilities.require_on("c", F)


async def test_a_fault_while_one_function_is_prepared_costs_that_function_alone() -> None:
    class Broken(Workshop):
        async def prepare(self, function: FunctionSpec) -> None:
            if function is G:
                raise TypeError("Encoding objects of type PosixPath is unsupported")
            await super().prepare(function)

    abilities = Abilities(lambda machine: None)
    abilities.join("a", Broken("f").prepare)
    await abilities.prepare_all("a", (F, G))
    assert (set(abilities.able("a")), set(abilities.unable("a"))) == ({"f"}, {"g"})


async def test_a_machine_that_learns_is_believed_and_one_that_forgets_too() -> None:
    changed: list[str] = []
    abilities = Abilities(changed.append)
    workshop = Workshop("f")
    abilities.join("a", workshop.prepare)
    await abilities.prepare_all("a", (F, G))
    workshop.names = {"g"}
    await abilities.prepare_all("a", (F, G))
    assert (set(abilities.able("a")), dict(abilities.unable("a"))) == ({"g"}, {"f": "no f here"})
    abilities.forget("a")
    assert abilities.able("a") == frozenset()


async def test_what_a_machine_says_after_it_has_gone_counts_for_nothing() -> None:
    abilities = Abilities(lambda machine: None)

    async def goes_meanwhile(function: FunctionSpec) -> None:
        abilities.leave("a")

    abilities.join("a", goes_meanwhile)
    await abilities.prepare_on("a", F)
    assert abilities.able("a") == frozenset()


def greeting(**fields: Any) -> NodeHello:
    spec = NodeSpec(name="it says so", numa=((0, 2), (1, 3)), memory_bytes=4, devices=2, device_bytes=8)
    return msgspec.structs.replace(hello(), spec=replace(spec, **fields), labels={"pool": "a"})


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": -1},
        {"devices": DEVICES_MAX + 1},
        {"device_bytes": -1},
        {"memory_bytes": -1},
        {"numa": ((0, 1), (1,))},
        {"numa": ((-1,),)},
        {"numa": ((CORES_MAX,),)},
        {"numa": ((0,), ())},
    ],
)
def test_a_machine_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="n1 describes a machine that cannot be"):
        described(greeting(**fields))


@pytest.mark.parametrize(
    ("before", "awaited", "changed"),
    [
        ({}, False, False),
        ({"devices": 1}, False, True),
        ({"device_bytes": 7}, False, True),
        ({"devices": 0, "device_bytes": 0}, False, False),
        ({"devices": 0, "device_bytes": 0}, True, False),
        ({"devices": 1}, True, False),
        ({"memory_bytes": 5}, True, True),
        ({"numa": ((0, 1), (2, 3))}, True, True),
    ],
)
def test_a_node_keeps_what_may_be_leased_of_it(before: dict[str, Any], awaited: bool, changed: bool) -> None:
    assert is_changed(described(greeting()), described(greeting(**before)), awaited=awaited) is changed


MODEL = ModelSpec(path=Path("/models/judge"), action=ModelAction.SCORE, batch_tokens=100)

SERVICE = MODEL.service

TOLD = ServiceSpec(name=SERVICE, bytes_by_dop={1: 40, 2: 20}, restore_s_by_dop={1: 1.0, 2: 0.5}, batch_tokens=100)


def declared(*models: ModelSpec) -> DeclaredServices:
    services = DeclaredServices()
    services.declare(FunctionSpec(name="shell", runtime="exec"))
    services.declare(
        *(FunctionSpec(name=f"f{number}", runtime="model", model=model) for number, model in enumerate(models))
    )
    return services


def test_services_of_no_declared_function_are_not_kept() -> None:
    services = declared(MODEL)
    assert services.services([TOLD, replace(TOLD, name="another")]) == [TOLD]
    assert services.resident({SERVICE: [Chunk(0, 2)], "another": [Chunk(0, 1)]}, 2) == {SERVICE: (Chunk(0, 2),)}
    assert declared().services([TOLD]) == []


def test_whether_it_is_batched_and_copied_is_as_declared() -> None:
    told = replace(TOLD, batch_tokens=10**9, replicable=False, restore_s_by_node={"n2": {1: 9.0}})
    assert declared(MODEL, replace(MODEL, batch_tokens=70)).services([told]) == [replace(TOLD, batch_tokens=70)]
    engine = replace(MODEL, engine=EngineSpec(url="http://engine"))
    (service,) = declared(engine).services([replace(TOLD, name=engine.service)])
    assert (service.batch_tokens, service.replicable) == (0, False)


@pytest.mark.parametrize(
    "costs",
    [
        {"restore_s_by_dop": {1: math.inf}},
        {"restore_s_by_dop": {1: math.nan}},
        {"restore_s_by_dop": {1: -1.0}},
        {"bytes_by_dop": {1: -1}},
        {"bytes_by_dop": {1: 2**62}},
        {"bytes_by_dop": {0: 1}},
    ],
)
def test_costs_that_cannot_be_are_not_believed(costs: dict[str, Any]) -> None:
    assert declared(MODEL).services([replace(TOLD, **costs)]) == []


def test_copies_lie_on_the_nodes_own_devices_and_each_counts_once() -> None:
    fits = [Chunk(0, 2), Chunk(2, 1), Chunk(0, 4)]
    beyond = [Chunk(4, 2), Chunk(-1, 1), Chunk(1, 2), Chunk(0, 3), Chunk(0, 0), Chunk(0, -1), Chunk(0, 2**40)]
    assert declared(MODEL).resident({SERVICE: [*fits, *beyond, *fits]}, 5) == {SERVICE: tuple(fits)}


def test_what_a_node_tells_of_copies_is_bounded() -> None:
    models = [replace(MODEL, path=Path(f"/models/{number}")) for number in range(DEVICE_COPIES_MAX + 1)]
    services = declared(*models)
    on_one = services.resident({model.service: [Chunk(0, 1)] for model in models}, 1)
    assert sum(map(len, on_one.values())) == DEVICE_COPIES_MAX
    on_many = services.resident({models[0].service: [Chunk(number, 1) for number in range(4096)]}, 4096)
    assert sum(map(len, on_many.values())) == NODE_COPIES_MAX


SHELL, API = FunctionSpec(name="shell", runtime="exec"), FunctionSpec(name="call", runtime="api")


class Notebook:
    """A machine that writes down what it is asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[tuple[str, str]] = []

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        self.asked.append(("execute", action.id))
        return Outcome(state=State.SUCCEEDED, result=self.name)

    async def resize(self, action: Action, lease: Lease) -> None:
        self.asked.append(("resize", action.id))

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        return True

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        self.asked.append(("open", trajectory))

    async def end_trajectory(self, trajectory: str) -> None:
        self.asked.append(("end", trajectory))


class Machines:
    """This machine and another one."""

    def __init__(self, directory: Path) -> None:
        self.here, self.there = Notebook("here"), Notebook("there")
        store, spec = (
            Store(StoreSpec(path=directory / "db.sqlite")),
            NodeSpec(name="local", numa=((0,),), memory_bytes=1),
        )
        self.cluster = Cluster(
            ClusterConfig(),
            spec,
            records=NodeRecords(store),
            snapshots=NodeSnapshots(store, NodeSnapshotSettings(), age_s=1.0),
            admission=None,
            clock=VirtualClock(),
        )
        environments = MachineEnvironments(Machine())
        self.trajectories = TrajectoryRecovery(store, environments)
        self.executor = self.cluster
        self.cluster.executor(self.here, self.trajectories)
        self.cluster._machines["n1"] = ClusterNode(spec, self.there)  # type: ignore[arg-type]

    async def run(self, node: str, trajectory: str | None = None, function: FunctionSpec = SHELL) -> Outcome:
        action = Action(id="a", function=function.name, trajectory=trajectory)
        call = Call(function=function, input={}, log=DiscardedOutput())
        return await self.executor.execute(action, Lease(action_id="a", node=node), call)


@pytest.fixture
async def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


async def test_an_action_runs_on_the_node_of_its_lease_and_one_without_a_node_here(machines: Machines) -> None:
    assert [(await machines.run(node)).result for node in ("", "local", "n1")] == ["here", "here", "there"]
    gone = await machines.run("n9")
    assert (gone.state, gone.reason) == (State.LOST, Reason.NODE_LOST)


async def test_a_trajectory_is_ended_where_it_lives_and_what_is_kept_for_it_here_goes_too(machines: Machines) -> None:
    await machines.run("n1", "t")
    assert machines.cluster.home("t") == "n1"
    await machines.run("", "t", API)
    await machines.executor.end_trajectory("t")
    assert machines.there.asked[-1] == machines.here.asked[-1] == ("end", "t")
    assert machines.cluster.home("t") == ""


async def test_a_trajectory_is_opened_where_the_core_has_placed_it(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines.cluster, "_place_of", {"t": "n1", "u": "local"}.__getitem__)
    for name in ("t", "u"):
        await machines.executor.open_trajectory(name, "task", SHELL)
    assert (machines.there.asked, machines.here.asked) == ([("open", "t")], [("open", "u")])
    assert (machines.cluster.home("t"), machines.cluster.home("u")) == ("n1", "")


async def test_a_loss_is_told_once_and_one_that_nobody_comes_for_is_forgotten_beyond_a_bound(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "LOST_MAX", 2)
    register = machines.trajectories
    register.lose(["t", "u", "v"])
    assert register.take_loss("t") is None and register.take_loss(None) is None
    loss = register.take_loss("u")
    assert loss is not None
    assert (loss.reason, loss.detail) == (Reason.ENVIRONMENT_LOST, {FILES_LOST: True})
    assert register.take_loss("u") is None
    register.ended("v")
    assert register.take_loss("v") is not None, "it has ended with its node, and nobody was told"


@dataclass
class EngineWords:
    """What a provider's engine is said to suffer from."""

    trouble: str = ""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EngineWords:
    made = EngineWords("its engine is gone: start it")

    async def found(provider: ProcessProvider) -> str:
        return made.trouble

    monkeypatch.setattr(ProcessProvider, "trouble", found)
    monkeypatch.setattr(cluster, "LOOK_S", 0.001)
    return made


@pytest.fixture
async def gateway(tmp_path: Path, engine: EngineWords) -> AsyncIterator[RunningGateway]:
    """A gateway whose machine is closed; ``free`` needs nothing of it."""
    async with serving(GatewayBench(tmp_path, functions={"free": function("free", cost={})})) as made:
        await until(lambda: bool(made.app.machines.warnings()))
        yield made


async def test_a_machine_whose_engine_is_gone_says_so_with_the_remedy_until_it_is_back(
    gateway: RunningGateway, engine: EngineWords
) -> None:
    (node,) = (await gateway.http.get("/v1/nodes")).json()["nodes"]
    assert (node["state"], node["why"], node["since_s"] >= 0) == ("unfit", engine.trouble, True)
    ready = await gateway.http.get("/readyz")
    assert ready.status_code == 200, "what needs no sandbox goes on"
    assert ready.json()["warnings"] == [f"nothing new can begin on this machine: {engine.trouble}"]
    engine.trouble = ""
    await until(lambda: not gateway.app.machines.warnings())
    (node,) = (await gateway.http.get("/v1/nodes")).json()["nodes"]
    assert (node["state"], node["why"], node["since_s"]) == ("ready", "", 0.0)


@pytest.mark.promise("Work that has not begun waits for an engine that is away, and then goes on by itself.")
async def test_what_has_not_begun_waits_for_the_engine_and_says_so_and_what_needs_none_goes_on(
    gateway: RunningGateway, engine: EngineWords
) -> None:
    submitted = await gateway.invoke({}, mode="async")
    calls = [
        asyncio.create_task(gateway.invoke({})),
        asyncio.create_task(gateway.invoke({}, headers={"X-Trajectory-Id": "t"})),
    ]
    await until(lambda: gateway.app.engine.queue()["waiting"] == 3)
    assert (await gateway.invoke({}, function="free")).status_code == 200
    late = await gateway.invoke({}, function="impatient")
    assert (late.status_code, late.json()["code"]) == (408, "queue_timeout")
    queue = (await gateway.http.get("/v1/queue")).json()
    closed = f"an open node: local is closed: unfit: {engine.trouble}"
    causes = [each["cause"] for each in queue["causes"]]
    assert {(cause["kind"], cause["text"], cause["pool"]) for cause in causes} == {("node", closed, "node:local")}
    assert not any(call.done() for call in calls)
    engine.trouble = ""
    assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200, 200]
    ended = await gateway.http.get(f"/v1/invocations/{submitted.json()['id']}", params={"wait": "10s"})
    assert ended.json()["state"] == "succeeded"
