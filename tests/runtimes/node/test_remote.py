"""What a gateway may rely on of one node, also when links are cut and daemons and gateways killed at every frame."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.sandbox import DiscardedOutput
from manager.action import Lease, Outcome, State
from manager.errors import FILES_LOST, ActionFailed, Reason
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.node import protocol, remote
from runtimes.node.protocol import AttemptPermit, AttemptReady
from runtimes.node.remote import RemoteNode
from tests.runtimes.node.machine import Machine
from tests.runtimes.node.memory_stream import close_all, pair
from tests.runtimes.node.session import FUNCTION, STUCK_S, WORDS, Session, kept_in, said, settled
from tests.runtimes.node.test_protocol import ACTION, LEASE

IDEMPOTENT = replace(FUNCTION, name="again", idempotent=True)


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Session]:
    session = Session(tmp_path / "node", Machine(WORDS))
    yield session
    await session.close()


async def runs(session: Session, claim: str) -> None:
    """Play until a command runs, and its node has told of it."""
    await session.play(lambda: claim in session.machine.commands)


async def test_a_cancel_of_what_was_never_sent_waits_for_no_node(session: Session) -> None:
    kept = session.start("a")
    await asyncio.sleep(0)
    assert kept.task is not None
    kept.task.cancel()
    async with asyncio.timeout(STUCK_S):
        await kept.task
    assert kept.ends[0].reason is Reason.CANCELLED


async def test_a_cancel_during_a_cut_arrives_with_the_next_link(session: Session) -> None:
    session.machine.long.add("a.1/")
    kept = session.start("a")
    await runs(session, "a.1/")
    assert not session.node.attached
    assert kept.task is not None
    kept.task.cancel()
    await asyncio.sleep(0)
    assert not kept.ends
    await session.play(lambda: settled(session))
    assert (kept.ends[0].state, session.machine.killed) == (State.CANCELLED, ["a.1/"])


async def test_a_lost_node_ends_what_runs_there_and_what_was_asked(session: Session) -> None:
    session.machine.long.add("a.1/")
    kept = session.start("a")
    await runs(session, "a.1/")
    asked = asyncio.create_task(session.node.open_trajectory("t", "task", FUNCTION))
    await asyncio.sleep(0)
    session.node.lost("silent for 60 s")
    with pytest.raises(ActionFailed, match="silent for 60 s") as failure:
        await asked
    assert failure.value.reason is Reason.NODE_LOST
    assert kept.task is not None
    await kept.task
    assert (kept.ends[0].state, kept.ends[0].reason) == (State.LOST, Reason.NODE_LOST)


@pytest.mark.parametrize("new_disk", [True, False], ids=["another life", "dead sandboxes"])
async def test_what_a_daemon_finds_dead_is_lost_and_an_idempotent_attempt_begins_again(
    session: Session, new_disk: bool
) -> None:
    session.machine.long.update(("a.1/", "i.1/"))
    kept, again = session.start("a"), session.start("i", IDEMPOTENT)
    await session.play(lambda: {"a.1/", "i.1/"} <= session.machine.commands.keys())
    assert session.daemon is not None
    await session.daemon.close()
    session.daemon = None
    session.machine.commands.clear()  # their sandboxes died while there was no daemon
    if new_disk:
        session.directory = session.directory / "reborn"
        session.directory.mkdir()
    session.machine.long.clear()
    await session.play(lambda: settled(session))
    assert (kept.ends[0].state, kept.ends[0].reason) == (State.LOST, Reason.NODE_LOST)
    assert again.ends[0].state is State.SUCCEEDED
    assert session.machine.begun == {"a.1/": 1, "i.1/": 2}


async def test_a_lease_that_changes_during_a_cut_is_the_last_one_there(session: Session) -> None:
    session.machine.long.add("a.1/")
    kept = session.start("a")
    await runs(session, "a.1/")
    for memory_bytes in (1, 2):
        await session.node.resize(kept.action, Lease(action_id="a", node="n1", memory_bytes=memory_bytes))
    await session.play(lambda: bool(session.machine.resized))
    assert [lease.memory_bytes for _, lease in session.machine.resized] == [2]


async def test_requests_are_answered_over_a_cut_and_ends_of_trajectories_are_remembered(session: Session) -> None:
    opened = asyncio.create_task(session.node.open_trajectory("t", "task", FUNCTION))
    await asyncio.sleep(0)
    session.faults = {2: "cut", 5: "daemon"}
    await session.play(opened.done)
    assert opened.exception() is None
    await session.play(lambda: "t" in session.node.trajectories())
    async with asyncio.timeout(STUCK_S):
        await session.node.end_trajectory("t")  # there is no link: it does not wait
    assert "t" not in session.node.trajectories()
    await session.play(lambda: "t" not in session.machine.trajectories)


async def test_a_trajectory_that_died_with_a_daemon_is_reported_before_its_next_action(session: Session) -> None:
    session.machine.open("t")
    await session.play(lambda: "t" in session.node.trajectories())
    session.machine.trajectories.clear()
    reported: list[str] = []
    session.node.on_lost = reported.extend
    await session.play(lambda: bool(reported))
    assert reported == ["t"]


async def test_what_was_sent_to_a_sandbox_that_died_with_its_daemon_is_told_so_and_begins_in_no_new_one(
    session: Session,
) -> None:
    session.machine.open("t")
    await session.play(lambda: "t" in session.node.trajectories())
    reported: list[str] = []
    session.node.on_lost = reported.extend
    session.faults_of = {protocol.ExecuteAttempt: "daemon"}
    kept = session.start("a", trajectory="t")
    await session.play(lambda: not session.faults_of)
    session.machine.trajectories.clear()
    await session.play(lambda: settled(session))
    assert (kept.ends[0].reason, kept.ends[0].detail) == (Reason.ENVIRONMENT_LOST, {FILES_LOST: True})
    assert (session.machine.begun, reported) == ({}, [])


async def test_what_is_beyond_a_logs_bound_is_counted(session: Session) -> None:
    kept = session.start("a", replace(FUNCTION, log_limit_bytes=100))
    await session.play(lambda: settled(session))
    all_bytes = sum(len(text.encode()) for _, text in WORDS["a.1/"])
    held_bytes = sum(len(text.encode()) for text in kept.log.said.values())
    assert held_bytes <= 100
    assert kept.log.omitted_bytes == all_bytes - held_bytes


async def test_a_new_gateway_ends_what_it_does_not_take(session: Session) -> None:
    session.machine.long.add("a.1/")
    session.start("a")
    await runs(session, "a.1/")
    session.actions.clear()  # the next gateway has no record of it
    session.faults = {session.frames + 1: "gateway"}
    await session.play(lambda: session.daemon is not None and not session.daemon.busy)
    assert session.machine.killed == ["a.1/"]


def inventory(*attempts: protocol.AttemptFacts) -> protocol.Inventory:
    return protocol.Inventory(epoch="this", attempts=list(attempts), trajectories=[])


def facts(*, begun: bool) -> protocol.AttemptFacts:
    return protocol.AttemptFacts(claim="a.1/", begun=begun, ended=False)


def resumed(node: RemoteNode, function: FunctionSpec = FUNCTION) -> asyncio.Task[Outcome]:
    """Have a node asked for what a gateway before has begun there."""
    call = Call(function=function, input={}, log=DiscardedOutput(), resumed=True)
    return asyncio.create_task(node.execute(replace(ACTION, id="a"), LEASE, call))


@pytest.mark.parametrize("function", [FUNCTION, IDEMPOTENT], ids=lambda function: function.name)
@pytest.mark.parametrize(("life", "sent"), [("", False), ("this", True), ("another", False)])
async def test_what_a_gateway_before_began_is_begun_anew_only_in_a_life_in_which_it_never_was(
    life: str, sent: bool, function: FunctionSpec
) -> None:
    node, (near, far) = RemoteNode("n1", epoch=life), pair()
    waiting = resumed(node, function)
    await asyncio.sleep(0)
    node.connect(near, inventory(), recovering=True)
    await node.end_unclaimed({"a.1/"})
    if sent:
        await far.receive(protocol.ExecuteAttempt, STUCK_S)
    else:
        assert (await waiting).reason is Reason.NODE_LOST
    waiting.cancel()
    await node.close()
    await asyncio.gather(waiting, return_exceptions=True)
    await close_all()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_what_a_gateway_before_began_is_joined_where_it_runs_and_never_ended(late: bool, begun: bool) -> None:
    node, (near, far) = RemoteNode("n1", epoch="another"), pair()
    waiting = None if late else resumed(node)
    await asyncio.sleep(0)
    node.connect(near, inventory(facts(begun=begun)), recovering=True)
    await node.end_unclaimed({"a.1/"})
    waiting = waiting or resumed(node)
    assert (await far.receive(protocol.AttachAttempt, STUCK_S)).claim == "a.1/"
    assert await node.leave("a.1/") is begun
    await node.close()
    await asyncio.gather(waiting, return_exceptions=True)
    await close_all()


async def test_a_cancel_before_its_node_is_back_is_told_only_when_the_node_has_killed_it() -> None:
    node, (near, far) = RemoteNode("n1", epoch="this"), pair()
    waiting = resumed(node)
    await asyncio.sleep(0)
    waiting.cancel()
    node.connect(near, inventory(facts(begun=True)), recovering=True)
    await node.end_unclaimed({"a.1/"})
    await far.receive(protocol.AttachAttempt, STUCK_S)
    await far.receive(protocol.ResizeAttempt, STUCK_S)
    assert not (await far.receive(protocol.CancelAttempt, STUCK_S)).disowned
    assert not waiting.done(), "its command may run"
    node.lost("it is gone")
    assert (await waiting).reason is Reason.CANCELLED
    await node.close()
    await close_all()


async def test_a_node_that_tells_of_too_many_trajectories_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TRAJECTORIES_MAX", 2)
    facts = [protocol.TrajectoryFacts(trajectory=f"t{number}", sandbox="box", alive=True) for number in range(3)]
    node, (near, far) = RemoteNode("n1"), pair()
    with pytest.raises(protocol.ChannelError, match="more than 2 trajectories"):
        node.connect(near, protocol.Inventory(epoch="e", attempts=[], trajectories=facts))
    assert (node.attached, node.trajectories()) == (False, {})
    node.connect(near, protocol.Inventory(epoch="e", attempts=[], trajectories=facts[:2]))
    for each in (facts[1], msgspec.structs.replace(facts[0], sandbox=""), facts[2], facts[0]):
        far.send(protocol.SandboxChanged(each))
    async with asyncio.timeout(STUCK_S):
        assert "more than 2 trajectories" in await node.serve(near)
    assert not node.attached
    await node.close()


async def test_a_frame_of_the_wrong_side_cuts_the_link(session: Session) -> None:
    await session.begin_daemon()
    assert session.daemon is not None
    link, _ = pair()
    with pytest.raises(protocol.ChannelError):
        session.daemon._handle(link, protocol.AttemptReady("a.1/"))


FAULTS = ("cut", "daemon", "gateway")
#: Frames of a session without faults, at least; asserted, so that the tests below cut it all over.
FRAMES_MIN = 19
PAIRS = 40


async def play(directory: Path, faults: dict[int, str], *, ready: bool = False) -> Session:
    """Play a session of two actions and a trajectory, under these faults.

    ``ready``: the trajectory has its sandbox already, so that its action is let go before it asks.
    """
    machine = Machine(WORDS)
    if ready:
        machine.open("t1")
    session = Session(directory, machine)
    session.faults = faults
    try:
        session.start("a")
        session.start("b", trajectory="t1")
        await session.play(lambda: settled(session))
        assert machine.begun == {"a.1/": 1, "b.1/": 1}
        for name, kept in session.actions.items():
            (end,) = kept.ends
            words = WORDS[f"{name}.1/"]
            assert (end.state, end.result) == (State.SUCCEEDED, {"said": len(words), "echo": {"of": name}})
            assert kept.log.said == said(words)
        assert machine.killed == [] and machine.commands == {} and kept_in(directory, "attempts", "logs") == []
    finally:
        await session.close()
    return session


async def test_a_session_without_faults_has_one_link(tmp_path: Path) -> None:
    session = await play(tmp_path / "calm", {})
    assert session.links == 1
    assert session.frames >= FRAMES_MIN
    assert session.actions["a"].asked == 1


async def test_what_needs_no_preparation_is_let_go_before_it_asks(tmp_path: Path) -> None:
    for ready, asks in ((False, 2), (True, 1)):
        session = await play(tmp_path / str(ready), {}, ready=ready)
        assert session.heard[AttemptReady] == asks and session.heard[AttemptPermit] == 2
        assert session.actions["b"].asked == 1


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_any_frame_begins_and_ends_nothing_twice_and_loses_nothing(
    tmp_path: Path, fault: str, ready: bool
) -> None:
    frames = (await play(tmp_path / "calm", {}, ready=ready)).frames
    for place in range(1, frames + 1):
        session = await play(tmp_path / str(place), {place: fault}, ready=ready)
        assert session.links == 2, place


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("seed", range(PAIRS))
async def test_two_faults_in_one_session_are_no_worse(tmp_path: Path, seed: int, ready: bool) -> None:
    chance = random.Random(seed)
    first = chance.randrange(1, FRAMES_MIN)
    second = first + chance.randrange(1, FRAMES_MIN)
    await play(tmp_path / "pair", {first: chance.choice(FAULTS), second: chance.choice(FAULTS)}, ready=ready)
