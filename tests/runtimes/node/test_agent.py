"""An attempt has one end on its node, whatever happens to the task that works on it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from manager.action import Outcome, State
from manager.errors import InvalidConfig, Reason
from manager.function import FunctionSpec
from runtimes.node import protocol
from runtimes.node.daemon import Agent, AttemptJournal, HandlerStore
from tests.runtimes.node.handlers.test_store import function
from tests.runtimes.node.machine import Machine, MachineWork, facts_of_trajectory
from tests.runtimes.node.memory_stream import pair
from tests.runtimes.node.session import STUCK_S
from tests.runtimes.node.test_wire import ACTION, LEASE

EXECUTE = protocol.ExecuteAttempt("a.1/", ACTION, LEASE, "f", protocol.pack({}), None, None, {})
HANDLER = protocol.function_bytes(function("0" * 64))


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    agent = Agent(tmp_path, MachineWork.on(Machine()))
    await agent.start()
    yield agent
    await agent.close()


async def end_of(agent: Agent, *messages: protocol.CancelAttempt) -> Outcome | None:
    """Have an attempt executed, and told more in the same turn; return how it has ended once its task is over."""
    link, _ = pair()
    for message in (protocol.DefineFunction("f", HANDLER), EXECUTE, *messages):
        agent._handle(link, message)
    attempt = agent._attempts[EXECUTE.claim]
    assert attempt.task is not None
    await asyncio.wait([attempt.task], timeout=STUCK_S)
    return None if attempt.end is None else protocol.outcome_of(attempt.end)


async def test_a_cancel_in_the_turn_of_its_beginning_is_its_end(agent: Agent) -> None:
    end = await end_of(agent, protocol.CancelAttempt(EXECUTE.claim, False))
    assert end is not None
    assert (end.state, end.reason) == (State.CANCELLED, Reason.CANCELLED)


async def test_one_that_nobody_wants_any_more_in_that_turn_is_forgotten(agent: Agent) -> None:
    await end_of(agent, protocol.CancelAttempt(EXECUTE.claim, True))
    assert not agent.busy


async def test_ends_on_record_are_forgotten_together_and_one_that_begins_again_at_once(agent: Agent) -> None:
    link, _ = pair()
    assert await end_of(agent) is not None
    first = agent._attempts[EXECUTE.claim]
    agent._handle(link, protocol.AcknowledgeEnd(EXECUTE.claim))
    assert agent.busy, "it waits a moment for others"
    agent._handle(link, EXECUTE)
    assert agent._attempts[EXECUTE.claim] is not first, "its record is no end of the next one's"
    assert await end_of(agent) is not None
    agent._handle(link, protocol.AcknowledgeEnd(EXECUTE.claim))
    assert agent.inventory().attempts == []
    assert not agent.busy


async def test_a_disk_that_fails_under_it_is_its_end(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(store: HandlerStore, digest: str) -> bool:
        raise OSError("the disk is gone")

    monkeypatch.setattr(HandlerStore, "has", refused)
    end = await end_of(agent)
    assert end is not None
    assert (end.state, end.reason) == (State.FAILED, Reason.INTERNAL)
    assert "the disk is gone" in end.message


async def test_ends_are_written_down_behind_their_telling_and_before_they_are_forgotten(tmp_path: Path) -> None:
    agent = Agent(tmp_path, MachineWork.on(Machine()))
    await agent.start()
    link, _ = pair()
    agent._handle(link, protocol.DefineFunction("f", protocol.function_bytes(FunctionSpec(name="f", runtime="exec"))))
    for claim in ("kept.1/", "told.1/"):
        agent._handle(link, replace(EXECUTE, claim=claim, action=dataclasses.replace(ACTION, id=claim[:4])))
        agent._handle(link, protocol.AttemptGo(claim, False, None))
    attempts = dict(agent._attempts)
    await asyncio.wait([attempt.task for attempt in attempts.values() if attempt.task is not None], timeout=STUCK_S)
    agent._handle(link, protocol.AcknowledgeEnd("told.1/"))
    await agent.close()
    known = AttemptJournal(tmp_path).attempts
    assert {claim: entry.end for claim, entry in known.items()} == {"kept.1/": attempts["kept.1/"].end}


async def test_a_function_that_it_cannot_read_is_refused_and_nothing_else(agent: Agent) -> None:
    link, _ = pair()
    unread = HANDLER.replace(b'"name"', b'"mane"')
    for message in (protocol.DefineFunction("other", unread), replace(EXECUTE, claim="b.1/", function="other")):
        agent._handle(link, message)
    assert not agent.busy, "it has ended, and the link lives"
    with pytest.raises(InvalidConfig, match="upgrade the node"):
        agent._functions.get("other")
    assert await end_of(agent) is not None


@pytest.mark.parametrize("trajectory", ["t1", None])
@pytest.mark.parametrize("started", [False, True])
async def test_what_a_daemon_wrote_that_it_begins_and_never_began_is_begun_by_the_next_one(
    tmp_path: Path, trajectory: str | None, started: bool
) -> None:
    machine = Machine()
    machine.trajectories["t1"] = facts_of_trajectory("t1", "")
    if started:
        machine.begun["a.1/"] = 1
    journal = AttemptJournal(tmp_path)
    execute = replace(EXECUTE, action=dataclasses.replace(ACTION, id="a", trajectory=trajectory))
    journal.begun(execute, protocol.function_bytes(FunctionSpec(name="f", runtime="exec")), lasting=True)
    journal.close()
    agent = Agent(tmp_path, MachineWork.on(machine))
    await agent.start()
    attempt = agent._attempts["a.1/"]
    if attempt.task is not None:
        await asyncio.wait([attempt.task], timeout=STUCK_S)
    assert attempt.end is not None
    certain = trajectory is not None and not started
    assert machine.begun["a.1/"] == (1 if certain or started else 0)
    assert protocol.outcome_of(attempt.end).state is (State.SUCCEEDED if certain else State.LOST)
    await agent.close()
