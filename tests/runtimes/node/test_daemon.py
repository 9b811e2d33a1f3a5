"""The daemon over real TLS: who is let in, one end for each attempt, and what each of its own ends leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest
from msgspec.structs import replace

from manager.action import Action, Lease, Outcome, State
from manager.errors import CodedError, Conflict, InvalidConfig, Reason, Unauthorized
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.node import daemon as node_daemon
from runtimes.node import protocol
from runtimes.node.certificate import NodeCertificate, ensure_certificate, server_side
from runtimes.node.daemon import HandlerStore, NodeDaemon
from runtimes.node.journal import AttemptJournal
from runtimes.node.protocol import Message, NodeLink
from runtimes.node.remote import RemoteNode
from tests.runtimes.node.machine import Machine, daemon_on
from tests.runtimes.node.memory_stream import pair
from tests.runtimes.node.session import FUNCTION, STUCK_S, KeptLog
from tests.runtimes.node.test_handlers import function
from tests.runtimes.node.test_protocol import ACTION, LEASE


class DialledLink(NodeLink):
    """A connection that somebody else has made."""

    def __init__(self, serve: Callable[[NodeLink], Coroutine[None, None, None]]) -> None:
        super().__init__()
        self._serve = serve
        self.serving: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.serving = asyncio.create_task(self._serve(self))


class StandInDoor:
    """What a gateway has for its nodes, as far as a daemon can tell."""

    def __init__(self, certificate: NodeCertificate) -> None:
        self.certificate = certificate
        self.node = RemoteNode("n1")
        self.node.on_message = self._hear
        self.hellos: list[protocol.NodeHello] = []
        self.drains: list[str] = []
        self.goodbyes: list[tuple[str, bool]] = []
        self.inventories: list[protocol.Inventory] = []
        #: What is said to a hello.
        self.answer: Callable[[protocol.NodeHello], Message] = lambda hello: welcome()
        self.attached = asyncio.Event()
        self.gone = asyncio.Event()
        self.changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    def _hear(self, message: Message) -> None:
        match message:
            case protocol.NodeDraining():
                self.drains.append(message.why)
            case protocol.NodeGoodbye():
                self.goodbyes.append((message.why, message.killed))
        self.changed.set()

    async def open(self) -> int:
        context = server_side(self.certificate)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: DialledLink(self._serve), "127.0.0.1", 0, ssl=context)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, link: NodeLink) -> None:
        try:
            hello = await link.receive(protocol.NodeHello, STUCK_S)
            self.hellos.append(hello)
            answer = self.answer(hello)
            link.send(answer)
            if isinstance(answer, protocol.NodeWelcome):
                inventory = await link.receive(protocol.Inventory, STUCK_S, frame_max_bytes=2**20)
                self.inventories.append(inventory)
                self.gone.clear()
                self.node.connect(link, inventory)
                self.attached.set()
                await self.node.serve(link)
        except CodedError:
            pass
        finally:
            link.close("done")
            await link.wait_closed()
            self.gone.set()

    async def close(self) -> None:
        await self.node.close()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


def welcome(**more: object) -> protocol.NodeWelcome:
    said = {"generation": 1, "key": "k" * 32, "beat_s": 60.0, "silent_s": 180.0, **more}
    return protocol.NodeWelcome(**said)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def redials_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_daemon, "REDIAL_S", 0.001)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> NodeCertificate:
    return ensure_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def door(certificate: NodeCertificate) -> AsyncIterator[StandInDoor]:
    door = StandInDoor(certificate)
    yield door
    await door.close()


async def daemon_of(door: StandInDoor, state_dir: Path, machine: Machine, **more: object) -> NodeDaemon:
    """Return a daemon that is to join there."""
    port = more.pop("port", None) or await door.open()
    return daemon_on(machine, state_dir, **{"fingerprint": door.certificate.fingerprint, "port": port, **more})


async def execute(node: RemoteNode, name: str = "a") -> Outcome:
    """Run an action there to its end, and have that on record."""
    call = Call(function=FUNCTION, input={}, log=KeptLog())
    outcome = await node.execute(Action(id=name, function="shell"), Lease(action_id=name, node="n1"), call)
    node.acknowledge(f"{name}.1/")
    return outcome


async def test_a_daemon_joins_executes_and_keeps_the_key_that_it_was_given(door: StandInDoor, tmp_path: Path) -> None:
    daemon = await daemon_of(door, tmp_path / "n", Machine())
    running = asyncio.create_task(daemon.run())
    async with asyncio.timeout(STUCK_S):
        await door.attached.wait()
        assert (await execute(door.node)).state is State.SUCCEEDED
        daemon.stop()
        await running
    assert (door.hellos[0].ticket, door.hellos[0].key) == ("ticket", "")
    assert door.hellos[0].spec.labels == {"pool": "big"}
    assert (tmp_path / "n" / "key").read_text() == "k" * 32
    assert (tmp_path / "n" / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "n" / "pid").read_text() == f"{os.getpid()}\n"
    assert door.goodbyes == [("the daemon ends", True)]


async def test_a_gateway_with_another_certificate_hears_nothing(door: StandInDoor, tmp_path: Path) -> None:
    daemon = await daemon_of(door, tmp_path / "n", Machine(), fingerprint="00" * 32)
    async with asyncio.timeout(STUCK_S):
        with pytest.raises(InvalidConfig, match="another certificate"):
            await daemon.run()
    assert door.hellos == []


async def test_a_ticket_that_is_not_taken_ends_the_daemon_with_the_reason(door: StandInDoor, tmp_path: Path) -> None:
    door.answer = lambda hello: protocol.NodeRefused(
        code="unauthorized", message="it was used already", retry_after_s=1.0
    )
    daemon = await daemon_of(door, tmp_path / "n", Machine())
    async with asyncio.timeout(STUCK_S):
        with pytest.raises(Unauthorized, match="used already"):
            await daemon.run()


async def test_two_daemons_do_not_share_a_state_directory(door: StandInDoor, tmp_path: Path) -> None:
    first = await daemon_of(door, tmp_path / "n", Machine())
    running = asyncio.create_task(first.run())
    async with asyncio.timeout(STUCK_S):
        await door.attached.wait()
        second = await daemon_of(door, tmp_path / "n", Machine(), port=1)
        with pytest.raises(Conflict, match="its own --state-dir"):
            await second.run()
        first.stop()
        await running


async def test_a_daemon_that_leaves_is_followed_by_one_that_goes_on(door: StandInDoor, tmp_path: Path) -> None:
    machine = Machine()
    machine.long.add("a.1/")
    first = await daemon_of(door, tmp_path / "n", machine)
    running = asyncio.create_task(first.run())
    async with asyncio.timeout(STUCK_S):
        await door.attached.wait()
        end = asyncio.create_task(execute(door.node))
        await machine.runs("a.1/")
        door.attached.clear()
        first.leave()
        await running
        assert (machine.killed, machine.begun) == ([], {"a.1/": 1})
        second = await daemon_of(door, tmp_path / "n", machine, port=first._settings.port, ticket="")
        running = asyncio.create_task(second.run())
        await door.attached.wait()
        machine.finish("a.1/")
        assert (await end).state is State.SUCCEEDED
        assert machine.begun == {"a.1/": 1}
        second.stop()
        await running


async def test_a_node_that_was_given_up_ends_all_before_it_is_welcome(door: StandInDoor, tmp_path: Path) -> None:
    machine = Machine()
    machine.long.add("a.1/")
    machine.open("t")
    daemon = await daemon_of(door, tmp_path / "n", machine)
    running = asyncio.create_task(daemon.run())
    async with asyncio.timeout(STUCK_S):
        await door.attached.wait()
        end = asyncio.create_task(execute(door.node))
        await machine.runs("a.1/")
        link = door.node._link
        assert link is not None
        door.node.lost("given up")
        assert (await end).state is State.LOST
        door.answer = lambda hello: welcome(fence=True)
        door.attached.clear()
        link.close("a cut")
        await door.attached.wait()
        assert (door.inventories[-1].attempts, door.inventories[-1].trajectories) == ([], [])
        assert (machine.killed, machine.trajectories) == (["a.1/"], {})
        daemon.stop()
        await running


async def test_a_drain_waits_for_what_runs_and_says_goodbye_with_nothing_left(
    door: StandInDoor, tmp_path: Path
) -> None:
    machine = Machine()
    machine.long.add("a.1/")
    daemon = await daemon_of(door, tmp_path / "n", machine)
    running = asyncio.create_task(daemon.run())
    async with asyncio.timeout(STUCK_S):
        await door.attached.wait()
        end = asyncio.create_task(execute(door.node))
        await machine.runs("a.1/")
        door.node.drain("maintenance")
        while not door.drains:
            door.changed.clear()
            await door.changed.wait()
        daemon.drain("SIGTERM")  # as its machine's shutdown has it, which ends nothing sooner
        await asyncio.sleep(0)
        assert not running.done()
        machine.finish("a.1/")
        assert (await end).state is State.SUCCEEDED
        await running
    assert (door.drains, door.goodbyes) == (["maintenance"], [("maintenance", True)])


async def test_a_daemon_without_a_gateway_ends_all_when_its_time_is_over(door: StandInDoor, tmp_path: Path) -> None:
    machine = Machine()
    machine.commands.clear()
    daemon = await daemon_of(door, tmp_path / "n", machine, port=1, unattended_s=1e-9)
    async with asyncio.timeout(STUCK_S):
        await daemon.run()
    assert not daemon.joined.is_set()


HANDLER = protocol.function_bytes(function("0" * 64))
COMMAND = protocol.function_bytes(FunctionSpec(name="f", runtime="exec"))
EXECUTE = protocol.ExecuteAttempt("a.1/", ACTION, LEASE, HANDLER, protocol.pack({}), None, None, "")


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
