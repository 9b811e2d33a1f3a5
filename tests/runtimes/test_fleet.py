"""The fleet: each action on the node of its lease, each trajectory at home, and each loss told once."""

from __future__ import annotations

from collections.abc import Collection

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.errors import Reason
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.executor import FleetExecutor

SHELL, API = FunctionSpec(name="shell", runtime="exec"), FunctionSpec(name="call", runtime="api")


class Unheard:
    """A log that nobody reads."""

    def write(self, stream: str, data: str) -> None: ...
    def omit(self, size_bytes: int) -> None: ...


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

    def mark_lost(self, trajectories: Collection[str]) -> None:
        self.asked += [("mark_lost", each) for each in trajectories]


class Estate:
    """A fleet of this machine and another one."""

    def __init__(self) -> None:
        self.here, self.there = Notebook("here"), Notebook("there")
        self.members = {"n1": self.there}
        self.fleet = FleetExecutor(self.here, "local", self.members.get, mark_lost=self.here.mark_lost, lost_max=2)

    async def run(self, node: str, trajectory: str | None = None, function: FunctionSpec = SHELL) -> Outcome:
        action = Action(id="a", function=function.name, trajectory=trajectory)
        call = Call(function=function, input={}, log=Unheard())
        return await self.fleet.execute(action, Lease(action_id="a", node=node), call)


async def test_an_action_runs_on_the_node_of_its_lease_and_one_without_a_node_here() -> None:
    estate = Estate()
    assert [(await estate.run(node)).result for node in ("", "local", "n1")] == ["here", "here", "there"]
    gone = await estate.run("n9")
    assert (gone.state, gone.reason) == (State.LOST, Reason.NODE_LOST)


async def test_a_trajectory_is_ended_where_it_lives_and_what_is_kept_for_it_here_goes_too() -> None:
    estate = Estate()
    await estate.run("n1", "t")
    assert estate.fleet.home("t") == "n1"
    await estate.run("", "t", API)
    await estate.fleet.end_trajectory("t")
    assert estate.there.asked[-1] == estate.here.asked[-1] == ("end", "t")
    assert estate.fleet.home("t") == ""


async def test_a_trajectory_is_opened_where_the_core_has_placed_it() -> None:
    estate = Estate()
    estate.fleet.place_of = {"t": "n1", "u": "local"}.__getitem__
    for name in ("t", "u"):
        await estate.fleet.open_trajectory(name, "task", SHELL)
    assert (estate.there.asked, estate.here.asked) == ([("open", "t")], [("open", "u")])
    assert (estate.fleet.home("t"), estate.fleet.home("u")) == ("n1", "")


async def test_a_loss_is_told_to_the_first_action_that_comes_wherever_it_runs_and_only_to_one_with_a_sandbox() -> None:
    estate, told = Estate(), list[str]()
    estate.fleet.on_told = told.append
    await estate.run("n1", "t")
    estate.fleet.lose(["t", "u"])
    await estate.run("", "t", API)
    assert told == []
    await estate.run("local", "t")
    assert (estate.here.asked[-2:], told) == ([("mark_lost", "t"), ("execute", "a")], ["t"])
    await estate.run("n1", "u")
    await estate.run("n1", "u")
    assert estate.there.asked.count(("mark_lost", "u")) == 1


async def test_losses_that_nobody_comes_for_are_forgotten_beyond_a_bound() -> None:
    estate = Estate()
    estate.fleet.lose(["t", "u", "v"])
    await estate.run("local", "t")
    assert ("mark_lost", "t") not in estate.here.asked
