"""A session under faults: the link cut, the daemon or the gateway killed, at every frame and at seeded pairs of them.

What must hold: each action begins once and ends once, with its own result and its whole log, and nothing is left.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from manager.action import State
from runtimes.node.protocol import AttemptPermit, AttemptReady
from tests.runtimes.node.machine import Machine
from tests.runtimes.node.session import WORDS, Session, kept_in, said, settled

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
