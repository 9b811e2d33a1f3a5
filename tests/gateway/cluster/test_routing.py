"""Each action runs on the node of its lease, each trajectory lives at one place, and each loss is told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sandbox import DiscardedOutput
from gateway.cluster.cluster import Cluster, ClusterNode
from gateway.cluster.store import NodeRecords, NodeSnapshots
from gateway.config.schema import ClusterConfig
from gateway.invocations import restart
from gateway.invocations.invocations import LiveInvocation
from gateway.invocations.record import Mode, Record
from gateway.invocations.restart import Reattachment, TrajectoryRecovery
from gateway.store.store import Store, StoreSpec
from manager.action import Action, Chunk, Lease, Outcome, State
from manager.clock import VirtualClock
from manager.config import NodeSpec
from manager.errors import FILES_LOST, Reason
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.snapshots import NodeSnapshotSettings
from tests.runtimes.node.handlers.test_store import function as handler
from tests.runtimes.node.machine import Machine, MachineEnvironments

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


@pytest.mark.parametrize("runtime", ["exec", "handler", "model"])
async def test_commands_and_handlers_go_on_at_a_node_without_a_gateway_and_models_do_not(runtime: str) -> None:
    function = handler(Path("/f")) if runtime == "handler" else FunctionSpec(name="f", runtime=runtime)
    record = Record(
        seq=1,
        id="a",
        function=function.name,
        task="default",
        trajectory="t",
        parent=None,
        mode=Mode.ASYNC,
        accepted_s=1.0,
        input=b"{}",
        detached=True,
        state=State.RUNNING,
        node="n1",
    )
    node = RemoteNode("n1")
    attempts = Reattachment(MachineEnvironments(Machine()), lambda: {"n1": node})
    assert attempts.may_hold(LiveInvocation(record=record, function=function)) is (runtime != "model")
