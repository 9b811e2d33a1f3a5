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
from runtimes.node.daemon import HandlerStore, NodeDaemon
from runtimes.node.journal import AttemptJournal
from tests.runtimes.node.machine import Machine, daemon_on
from tests.runtimes.node.memory_stream import pair
from tests.runtimes.node.session import STUCK_S
from tests.runtimes.node.test_handlers import function
from tests.runtimes.node.test_protocol import ACTION, LEASE

HANDLER = protocol.function_bytes(function("0" * 64))
COMMAND = protocol.function_bytes(FunctionSpec(name="f", runtime="exec"))
EXECUTE = protocol.ExecuteAttempt("a.1/", ACTION, LEASE, HANDLER, protocol.pack({}), None, None, {})


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[NodeDaemon]:
    daemon = daemon_on(Machine(), tmp_path)
    await daemon.start()
    yield daemon
    await daemon.close()


async def end_of(daemon: NodeDaemon, *messages: protocol.CancelAttempt) -> Outcome | None:
    """Have an attempt executed, and told more in the same turn; return how it has ended once its task is over."""
    link, _ = pair()
    for message in (EXECUTE, *messages):
        daemon._handle(link, message)
    attempt = daemon._attempts[EXECUTE.claim]
    assert attempt.task is not None
    await asyncio.wait([attempt.task], timeout=STUCK_S)
    return None if attempt.end is None else protocol.outcome_of(attempt.end)


async def test_a_cancel_in_the_turn_of_its_beginning_is_its_end(daemon: NodeDaemon) -> None:
    end = await end_of(daemon, protocol.CancelAttempt(EXECUTE.claim, False))
    assert end is not None
    assert (end.state, end.reason) == (State.CANCELLED, Reason.CANCELLED)


async def test_one_that_nobody_wants_any_more_in_that_turn_is_forgotten(daemon: NodeDaemon) -> None:
    await end_of(daemon, protocol.CancelAttempt(EXECUTE.claim, True))
    assert not daemon.busy


async def test_ends_on_record_are_forgotten_together_and_one_that_begins_again_at_once(daemon: NodeDaemon) -> None:
    link, _ = pair()
    assert await end_of(daemon) is not None
    first = daemon._attempts[EXECUTE.claim]
    daemon._handle(link, protocol.AcknowledgeEnd(EXECUTE.claim))
    assert daemon.busy, "it waits a moment for others"
    daemon._handle(link, EXECUTE)
    assert daemon._attempts[EXECUTE.claim] is not first, "its record is no end of the next one's"
    assert await end_of(daemon) is not None
    daemon._handle(link, protocol.AcknowledgeEnd(EXECUTE.claim))
    assert daemon.inventory().attempts == []
    assert not daemon.busy


async def test_a_disk_that_fails_under_it_is_its_end(daemon: NodeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(store: HandlerStore, digest: str) -> bool:
        raise OSError("the disk is gone")

    monkeypatch.setattr(HandlerStore, "has", refused)
    end = await end_of(daemon)
    assert end is not None
    assert (end.state, end.reason) == (State.FAILED, Reason.INTERNAL)
    assert "the disk is gone" in end.message


async def test_ends_are_written_down_behind_their_telling_and_before_they_are_forgotten(tmp_path: Path) -> None:
    daemon = daemon_on(Machine(), tmp_path)
    await daemon.start()
    link, _ = pair()
    for claim in ("kept.1/", "told.1/"):
        daemon._handle(
            link, replace(EXECUTE, claim=claim, function=COMMAND, action=dataclasses.replace(ACTION, id=claim[:4]))
        )
        daemon._handle(link, protocol.AttemptPermit(claim, False, None))
    attempts = dict(daemon._attempts)
    await asyncio.wait([attempt.task for attempt in attempts.values() if attempt.task is not None], timeout=STUCK_S)
    daemon._handle(link, protocol.AcknowledgeEnd("told.1/"))
    await daemon.close()
    entries = AttemptJournal(tmp_path).entries
    assert {entry.execute.claim: entry.end for entry in entries} == {"kept.1/": attempts["kept.1/"].end}


async def test_a_function_that_it_cannot_read_is_refused_and_nothing_else(daemon: NodeDaemon) -> None:
    link, _ = pair()
    unread = HANDLER.replace(b'"name"', b'"mane"')
    daemon._handle(link, replace(EXECUTE, claim="b.1/", function=unread))
    assert not daemon.busy, "it has ended, and the link lives"
    with pytest.raises(InvalidConfig, match="upgrade the node"):
        daemon._function(unread)
    assert await end_of(daemon) is not None


@pytest.mark.promise("A command that a node recorded and did not start is started by the next daemon, not lost.")
@pytest.mark.parametrize("trajectory", ["t1", None])
@pytest.mark.parametrize("started", [False, True])
async def test_what_a_daemon_wrote_that_it_begins_and_never_began_is_begun_by_the_next_one(
    tmp_path: Path, trajectory: str | None, started: bool
) -> None:
    machine = Machine()
    machine.open("t1")
    if started:
        machine.begun["a.1/"] = 1
    journal = AttemptJournal(tmp_path)
    execute = replace(EXECUTE, function=COMMAND, action=dataclasses.replace(ACTION, id="a", trajectory=trajectory))
    journal.begin(execute, lasting=True)
    journal.close()
    daemon = daemon_on(machine, tmp_path)
    await daemon.start()
    attempt = daemon._attempts["a.1/"]
    if attempt.task is not None:
        await asyncio.wait([attempt.task], timeout=STUCK_S)
    assert attempt.end is not None
    certain = trajectory is not None and not started
    assert machine.begun["a.1/"] == (1 if certain or started else 0)
    assert protocol.outcome_of(attempt.end).state is (State.SUCCEEDED if certain else State.LOST)
    await daemon.close()
