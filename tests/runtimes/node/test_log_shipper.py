"""What a gateway is told of an attempt: all in order, and of a short one all at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from manager.action import Outcome, State
from manager.function import FunctionSpec
from runtimes.node import daemon, protocol
from runtimes.node.daemon import LogShipper, NodeAttempt
from runtimes.node.journal import AttemptJournal, LogSpool
from runtimes.node.protocol import Message
from tests.runtimes.node.memory_stream import pair
from tests.runtimes.node.session import STUCK_S
from tests.runtimes.node.test_wire import ACTION, LEASE

SUCCEEDED = Outcome(state=State.SUCCEEDED)


class ShippingNode:
    """The two ends of a link over which attempts are told of."""

    def __init__(self, directory: Path) -> None:
        self._journal = AttemptJournal(directory)
        self.near, self._far = pair()
        self.shipper = LogShipper(lambda claim: False)
        self.shipper.link = self.near
        self.heard: list[Message] = []
        self.changed = asyncio.Event()
        self._running: list[asyncio.Task[Any]] = [asyncio.create_task(self._far.run(self._hear))]
        self._running.append(asyncio.create_task(self.shipper.run()))

    def _hear(self, message: Message) -> None:
        self.heard.append(message)
        self.changed.set()

    def attempt(self, claim: str) -> NodeAttempt:
        execute = protocol.ExecuteAttempt(claim, ACTION, LEASE, "f", protocol.pack({}), None, None, {})
        log = LogSpool(self._journal, claim, 2**20, lambda: None)
        function = FunctionSpec(name="shell", runtime="exec")
        return NodeAttempt(execute=execute, function=function, function_bytes=b"", log=log, attached=True)

    async def until_heard(self, number: int) -> list[type[Message]]:
        async with asyncio.timeout(STUCK_S):
            while len(self.heard) < number:
                self.changed.clear()
                await self.changed.wait()
        return [type(message) for message in self.heard]

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._journal.close()


@pytest.mark.parametrize("said", ["", "a line\n"])
async def test_of_a_short_attempt_all_is_told_in_one_turn_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(daemon, "LOG_WAIT_S", 3600.0)
    told = ShippingNode(tmp_path)
    attempt = told.attempt("a.1/")
    attempt.running = True
    told.shipper.more(attempt)
    if said:
        attempt.log.write("stdout", said)
        told.shipper.more(attempt)
    for _ in range(3):
        await asyncio.sleep(0)
    assert told.near.unsent_bytes == 0 and not told.heard, "that it runs waits for more"
    attempt.end = protocol.end_of(attempt.claim, SUCCEEDED, 0)
    told.shipper.more(attempt, at_once=True)
    assert told.near.unsent_bytes > 0, "no turn of the loop lies between"
    log = [protocol.AttemptLog] if said else []
    wanted = [protocol.AttemptStarted, *log, protocol.AttemptEnd]
    assert await told.until_heard(len(wanted)) == wanted
    await told.close()


async def test_that_a_long_attempt_runs_is_told_soon_and_once(tmp_path: Path) -> None:
    told = ShippingNode(tmp_path)
    attempt = told.attempt("a.1/")
    attempt.running = True
    told.shipper.more(attempt)
    assert await told.until_heard(1) == [protocol.AttemptStarted]
    attempt.log.write("stdout", "a line\n")
    told.shipper.more(attempt)
    assert await told.until_heard(2) == [protocol.AttemptStarted, protocol.AttemptLog]
    await told.close()


async def test_an_end_waits_its_turn_where_the_link_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "LOG_UNSENT_BYTES", 1)
    told = ShippingNode(tmp_path)
    told.near.send(protocol.AttemptReady("b.1/"))
    attempt = told.attempt("a.1/")
    attempt.end = protocol.end_of(attempt.claim, SUCCEEDED, 0)
    before = told.near.unsent_bytes
    told.shipper.more(attempt, at_once=True)
    assert told.near.unsent_bytes == before
    assert await told.until_heard(2) == [protocol.AttemptReady, protocol.AttemptEnd]
    await told.close()
