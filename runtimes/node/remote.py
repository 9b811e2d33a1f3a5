"""A node as the gateway sees it."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import structlog

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.config import ServiceSpec
from manager.errors import ActionFailed, CapacityExceeded, CodedError, Conflict, Reason, Unsupported
from manager.executor import Call
from manager.function import FunctionSpec, SandboxSpec
from runtimes.chores import end_chores
from runtimes.kinds import KINDS
from runtimes.node import protocol as wire
from runtimes.node.daemon import SERVED
from runtimes.sandbox.command import FileContent, FileSource, FileStat, claims_of
from runtimes.sandbox.exec import terminal_of
from runtimes.sandbox.files import SandboxFiles
from runtimes.sandbox.runner.client import lost
from runtimes.sandbox.session import InteractiveSession, SessionTable
from runtimes.sandbox.snapshots import SnapshotRecord

logger = structlog.get_logger("node.remote")

#: Seconds after which a caller whose transfer was cut off may try again.
RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class RemoteCall:
    """One execution that waits for its end."""

    execute: wire.ExecuteAttempt
    function: FunctionSpec
    call: Call
    #: Its end, and who waits for that.
    outcome: Outcome | None = None
    waiter: asyncio.Future[None] | None = None
    #: Whether nobody waits any more, as the gateway ends.
    let_go: bool = False
    #: Whether it was ever sent, and whether it may have begun.
    sent: bool = False
    begun: bool = False
    #: Whether a gateway before says so, and the node has not told yet whether it is true.
    unconfirmed: bool = False
    #: The answer to its question whether it may begin, and who finds that out.
    go: wire.AttemptPermit | None = None
    asking: asyncio.Task[None] | None = None
    started: bool = False
    cancelled: bool = False
    log_bytes: int = 0
    tries: int = 1
    #: Its lease, once that is another one.
    resized: Lease | None = None
    #: Whether somebody types to it: then it is never begun again.
    session: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether it may be begun once more where it was lost; a gateway before did so on record, as its next try."""
        return self.function.idempotent and not self.session and not self.unconfirmed

    @property
    def inside(self) -> bool:
        """Whether it is done in a sandbox."""
        kind = KINDS.get(self.function.runtime)
        return kind is not None and kind.works_in_sandbox

    def join(self, facts: wire.AttemptFacts) -> None:
        """The node has it."""
        self.sent = True
        self.begun = facts.begun or (self.begun and not self.unconfirmed)
        self.unconfirmed = False

    async def ended(self) -> None:
        """Wait for its end; a cancellation takes nothing from who waits next."""
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter

    def end(self, outcome: Outcome) -> None:
        """It has ended so."""
        self.outcome = outcome
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def abandon(self) -> None:
        """Let who waits be cancelled: no end comes any more."""
        self.let_go = True
        if self.waiter is not None:
            self.waiter.cancel()

    def take_log(self, piece: wire.AttemptLog) -> None:
        """Write what of a piece is not known yet."""
        known_bytes = max(0, self.log_bytes - piece.offset)
        write = self.call.log.write
        for stream, text in wire.records(piece.records[known_bytes:]):
            write(stream, text)
        self.log_bytes = max(self.log_bytes, piece.offset + len(piece.records))


class _Transfer(wire.FileTransfer):
    """One transfer that waits for its end."""

    def __init__(self, request: wire.TransferRequest, link: wire.NodeLink) -> None:
        super().__init__(request, link)
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[int | None] = loop.create_future()
        self.ended: asyncio.Future[wire.TransferEnded] = loop.create_future()

    def receive(
        self, message: wire.TransferOpened | wire.TransferPiece | wire.TransferCredit | wire.TransferEnded
    ) -> None:
        """Take what the node says of it; raises ChannelError."""
        match message:
            case wire.TransferOpened():
                if not self.opened.done():
                    self.opened.set_result(message.size_bytes)
            case wire.TransferPiece() | wire.TransferCredit():
                self.take(message)
            case wire.TransferEnded(error=None):
                if not self.ended.done():
                    self.ended.set_result(message)
            case wire.TransferEnded(error=wire.ErrorFacts() as error):
                self.fail(wire.error_of(error))

    def fail(self, error: CodedError) -> None:
        super().fail(error)
        for future in (self.opened, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits is told; nobody may be waiting for the other one


@dataclass(frozen=True, slots=True)
class _RemoteStream:
    """A file of a node that is read piece by piece."""

    size_bytes: int | None
    transfer: _Transfer

    def chunks(self) -> AsyncIterator[bytes]:
        return self.transfer.chunks()

    def close(self) -> None:
        """Its block ends the transfer."""


class RemoteFiles:
    """`runtimes.sandbox.files.SandboxFiles` of a sandbox on a node.

    Besides what those raise: CapacityExceeded while the node is not reached, and for what its link cut off.
    """

    def __init__(self, node: RemoteNode, trajectory: str, workdir: str) -> None:
        self._node = node
        self._trajectory = trajectory
        self._workdir = workdir

    @property
    def workdir(self) -> str:
        return self._workdir

    async def write(self, path: str, data: FileSource, *, mode: int | None = None, user: str = "") -> int:
        request = self._request(wire.TransferVerb.WRITE, path=path, user=user, mode=mode)
        return await self._node.upload(request, FileContent(data).pieces())

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, limit_bytes: int, user: str = "") -> int:
        request = self._request(wire.TransferVerb.UNPACK, path=path, user=user, limit_bytes=limit_bytes)
        return await self._node.upload(request, chunks)

    async def list(self, path: str, *, user: str = "") -> list[FileStat]:
        async with self._node.transfer(self._request(wire.TransferVerb.LIST, path=path, user=user)) as transfer:
            ended = await transfer.ended
        try:
            return msgspec.msgpack.decode(ended.entries, type=list[FileStat])
        except msgspec.MsgspecError as error:
            raise wire.ChannelError(f"entries that do not fit: {error}") from None

    @asynccontextmanager
    async def open(self, path: str, *, limit_bytes: int, user: str = "") -> AsyncIterator[_RemoteStream]:
        request = self._request(wire.TransferVerb.READ, path=path, user=user, limit_bytes=limit_bytes)
        async with self._node.transfer(request) as transfer:
            yield _RemoteStream(await transfer.opened, transfer)

    @asynccontextmanager
    async def pack(
        self, path: str, *, limit_bytes: int, user: str = "", base: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        request = self._request(wire.TransferVerb.PACK, path=path, user=user, limit_bytes=limit_bytes, base=base)
        async with self._node.transfer(request) as transfer:
            await transfer.opened
            yield transfer.chunks()

    def _request(self, verb: wire.TransferVerb, **what: Any) -> wire.TransferRequest:
        return wire.TransferRequest(verb=verb, trajectory=self._trajectory, **what)


#: Seconds in which what a node says of its models is taken up at most once: it may say it as often as it likes.
EVERY_S = 0.1
_NOTHING = wire.ModelsChanged(services=[], resident={})


class RemoteModels:
    """What one node's devices hold, as far as it has said so on its present link."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._present = _NOTHING
        #: What came since, of which only the last counts, and the end of the time in which it waits.
        self._next: wire.ModelsChanged | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Called whenever the node has reported something new.
        self.on_change: Callable[[], None] = lambda: None

    def attach(self) -> None:
        """There is another link, maybe to another daemon: nothing is known of it."""
        self._present, self._next = _NOTHING, None

    def take(self, message: wire.ModelsChanged) -> None:
        """Take what the node reports, at once or when the time for it has come."""
        self._next = message
        if self._timer is None:
            self._take_up()

    def close(self) -> None:
        """Take up nothing more."""
        self._next = None
        if self._timer is not None:
            self._timer.cancel()

    def _take_up(self) -> None:
        self._timer = None
        if self._next is not None:
            self._present, self._next = self._next, None
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._take_up)
            self.on_change()

    @property
    def services(self) -> Sequence[ServiceSpec]:
        """The services that the node has prepared, and what each costs there."""
        return self._present.services

    @property
    def resident(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Chunks on which each service is resident, counted on the node."""
        return {service: tuple(chunks) for service, chunks in self._present.resident.items()}


#: Bytes of input in one request, and of output that may be under way.
PIECE_BYTES = 64 * 2**10
WINDOW_BYTES = 256 * 2**10
#: Controls of a session that were not answered yet; the oldest is dropped for more.
CONTROLS_MAX = 64


class SessionClient:
    """A `runtimes.sandbox.session.SessionGrip` on a session of a node, over all of its links.

    Input and controls are requests, so that each is done once whatever is cut. Output comes as messages by offset.
    """

    def __init__(self, node: RemoteNode, claim: str, id: str, session: InteractiveSession) -> None:
        self._node = node
        self._claim = claim
        #: Of its invocation.
        self.id = id
        self._session = session
        self._life = secrets.token_hex(8)
        self._window_bytes = min(WINDOW_BYTES, session.settings.output_bytes // 4)
        self._open = self._held = self._attended = self._refused = False
        #: Up to where the node was told that its output was taken.
        self._taken = 0
        #: Inputs, and withdrawals of inputs, that the node has not answered yet.
        self._inputs: set[asyncio.Future[wire.NodeAnswer]] = set()
        self._settled = asyncio.Event()
        self._settled.set()
        self._controls: deque[asyncio.Future[wire.NodeAnswer]] = deque()

    # --- the node's side

    def attach(self) -> None:
        """Go on over a new link: say what the node may not know. Open requests follow this."""
        session = self._session
        self._taken = session.end
        self._node.send(
            wire.AttachSession(
                claim=self._claim,
                life=self._life,
                offset=session.end,
                window_bytes=self._window_bytes,
                attended=self._attended,
                held=self._held,
                unattended_s=session.settings.unattended_s,
            )
        )

    def close(self) -> None:
        """It has ended: nobody waits any more."""
        for answer in list(self._inputs):
            answer.set_result(wire.NodeAnswer(0, None))
        for answer in self._controls:
            answer.cancel()

    def take(self, message: wire.SessionOpened | wire.SessionWritten) -> None:
        """Take the news of its command: it runs, or runs still; or a piece of its output, of which some is known."""
        session = self._session
        if isinstance(message, wire.SessionWritten):
            session.add_output(message.stream, message.data, message.offset)
            self._credit()
            return
        self._refused = not message.reads
        self._window_bytes = max(1, min(self._window_bytes, message.window_bytes))
        if not self._open:
            self._open, self._taken = True, message.start
            session.open(self, start=message.start, input_offset=message.input_offset)
        else:
            session.skip(message.start)
            session.passed(message.input_offset)

    # --- SessionGrip

    def require_reached(self) -> None:
        if not self._node.attached:
            message = f"node {self._node.name}, on which the session lives, is not reached now"
            raise CapacityExceeded(message, component=wire.COMPONENT, retry_after_s=RETRY_AFTER_S)

    def attend(self, *, attended: bool) -> None:
        self._attended = attended
        self._taken = self._session.end
        self._node.send(wire.SessionCredit(self._claim, self._taken, attended))

    async def settle(self) -> None:
        await self._settled.wait()

    async def input_room(self) -> int:
        return 0 if self._refused else PIECE_BYTES

    async def feed(self, data: bytes) -> None:
        await self._input(wire.TerminalInput(self._session.input_offset, data))

    async def end_input(self) -> None:
        await self._input(wire.TerminalInput(self._session.input_offset, b"", end=True))

    async def _input(self, input: wire.TerminalInput) -> None:
        """Pass it on; return when the node has done so. Raises what the node says.

        Who is cancelled withdraws it: the node passes no more of it on, and says how far it came.
        """
        open_request = self._post("input", input)
        answer = open_request.answer
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            if not answer.done():
                self._post("withdraw", (open_request.request.number, input.offset))
                answer.cancel()
            raise
        answer.result()

    def _post(self, verb: str, value: object) -> OpenRequest:
        posted = self._node.post(verb, self._claim, body=msgspec.msgpack.encode(value))
        self._inputs.add(posted.answer)
        self._settled.clear()
        posted.answer.add_done_callback(self._answered)
        return posted

    def _answered(self, answer: asyncio.Future[wire.NodeAnswer]) -> None:
        """The node has said how far its input came, if the session has not ended meanwhile."""
        self._inputs.discard(answer)
        if not answer.cancelled() and answer.exception() is None and (body := answer.result().body):
            state = msgspec.msgpack.decode(body, type=wire.TerminalInputState)
            self._refused = not state.reads
            self._session.passed(state.input_offset)
        if not self._inputs:
            self._settled.set()

    def steer(self, request: Mapping[str, object]) -> None:
        if "held" in request:
            self._held = bool(request["held"])
            if not self._held:
                self.attend(attended=self._attended)
            return
        control = wire.SessionControl()
        match request:
            case {"size": [int(rows), int(columns)]}:
                control.size = (rows, columns)
            case {"signal": int(number)}:
                control.signal = number
            case _:
                control.end = True
        self._controls.append(self._node.note("control", self._claim, body=msgspec.msgpack.encode(control)))
        while self._controls[0].done() or len(self._controls) > CONTROLS_MAX:
            self._controls.popleft().cancel()

    def _credit(self) -> None:
        """Say what was taken, a quarter of the window at once; nothing while its reader is slow."""
        if self._attended and not self._held and self._session.end - self._taken >= max(1, self._window_bytes // 4):
            self._taken = self._session.end
            self._node.send(wire.SessionCredit(self._claim, self._taken, True))


#: Times that files are sent whose way was cut off, or had no room.
TRIES_MAX = 5
#: Handlers of which is known what they are called on the node; one that was forgotten is prepared anew.
NAMED_MAX = 4096


class RemoteHandlers:
    """The handlers of one node. Use from one event loop."""

    def __init__(self, node: RemoteNode, archives: wire.HandlerArchives) -> None:
        self._node, self._archives = node, archives
        #: By name and revision, how a function travels that the node has prepared.
        self._named: dict[tuple[str, str], FunctionSpec] = {}
        self._sending = asyncio.Lock()

    def named(self, function: FunctionSpec) -> FunctionSpec:
        """Return a function as it travels: its handler's directory is the digest of its files.

        Raises ActionFailed for a handler that the node has not prepared.
        """
        if function.handler is None:
            return function
        named = self._named.get((function.name, function.revision))
        if named is None:
            message = f"node {self._node.name} has not prepared function {function.name}"
            raise ActionFailed(
                Reason.ENVIRONMENT_LOST, message, component=wire.ARCHIVE_COMPONENT, retry_after_s=RETRY_AFTER_S
            )
        return named

    async def prepare(self, function: FunctionSpec) -> None:
        """Send the node what it has not of the handler's files, and let it prepare the function.

        Raises what the node says, InvalidConfig for files that do not travel, CapacityExceeded where they do not
        arrive, and ActionFailed(node_lost) if it is given up.
        """
        assert function.handler is not None, f"{function.name} has no handler"
        self._node.check(function)
        archive = await self._archives.of(function)
        async with self._sending:  # one at a time, as those of one directory have the same files
            await self._send(archive)
        named = replace(function, handler=replace(function.handler, directory=Path(archive.digest)))
        await self._node.request("prepare", function.name, function=named)
        key = (function.name, function.revision)
        self._named.pop(key, None)
        self._named[key] = named
        while len(self._named) > NAMED_MAX:
            del self._named[next(iter(self._named))]

    async def _send(self, archive: wire.HandlerArchive) -> None:
        """Send the files, unless they are there; a link that is cut off in the middle is waited for."""
        for tries in count(1):
            if (await self._node.request("has_handler", archive.digest)).done:
                return
            request = wire.TransferRequest(verb=wire.TransferVerb.HANDLER, path=archive.digest)
            try:
                await self._node.upload(request, _whole(archive.data))
                return
            except CapacityExceeded as error:
                if tries >= TRIES_MAX or error.retry_after_s is None:
                    raise
                await asyncio.sleep(error.retry_after_s)


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data


#: Times that an idempotent attempt is begun on the same node, if the daemon loses it each time.
CALL_TRIES_MAX = 3
#: Functions whose bytes are kept.
FUNCTIONS_MAX = 1024
#: Of one node: as many as a gateway has in all by default (``scheduler.trajectories_max``), more than a machine runs.
TRAJECTORIES_MAX = 65536
#: Of one node; its own bound (``sandbox.snapshots.count_max``) is far below.
SNAPSHOTS_MAX = 16384


@dataclass(frozen=True, slots=True, eq=False)
class OpenRequest:
    """One request that waits for its answer."""

    request: wire.NodeRequest
    answer: asyncio.Future[wire.NodeAnswer]


class RemoteNode:
    """A `manager.executor.Executor` for one node, which outlives its links. Use from one event loop.

    While there is no link, what runs there runs on, and whoever waits here waits: until `connect` finds it again or
    `lost` gives it up. An attempt that the node's inventory lists is attached. One that it does not list has never
    begun there as long as the node's epoch is the same, and is sent again. A request is sent on every new link until it
    is answered: all are idempotent. Transfers of files end with their link.
    """

    def __init__(
        self,
        name: str,
        *,
        archives: wire.HandlerArchives | None = None,
        sessions: SessionTable | None = None,
        epoch: str = "",
    ) -> None:
        """``archives`` and ``sessions`` are the gateway's, ``epoch`` the node's life that the one before knew."""
        self.name = name
        #: Called with what the node says of itself.
        self.on_message: Callable[[wire.NodeDraining | wire.NodeGoodbye | wire.FitnessChanged], None] = lambda said: (
            None
        )
        #: Called with trajectories whose sandboxes the node has lost.
        self.on_lost: Callable[[Collection[str]], None] = lambda trajectories: None
        #: Called with the snapshots that the node keeps, by id, whenever it has said which they are.
        self.on_snapshots: Callable[[Mapping[str, SnapshotRecord]], None] = lambda known: None
        self.models = RemoteModels()
        self._loop = asyncio.get_running_loop()
        self._link: wire.NodeLink | None = None
        #: What the last inventory, and what came since, tell of the node.
        self._epoch = epoch
        self._attempts: dict[str, wire.AttemptFacts] = {}
        self._trajectories: dict[str, wire.TrajectoryFacts] = {}
        self._snapshots: Mapping[str, SnapshotRecord] = {}
        self._recovering = False
        self._calls: dict[str, RemoteCall] = {}
        #: Ended here; the end is not on record yet.
        self._unrecorded: set[str] = set()
        #: Claims that nobody wants any more, to be told when there is a link.
        self._unwanted: dict[str, None] = {}
        #: How functions travel, by identity (never changed in place).
        self._functions: dict[int, tuple[FunctionSpec, bytes]] = {}
        #: Of requests and transfers: random at first, so that no number is one of a gateway before.
        self._number = secrets.randbits(48)
        self._requests: dict[int, OpenRequest] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._handlers = RemoteHandlers(self, archives or wire.HandlerArchives())
        self._table = sessions or SessionTable()
        #: The sessions there, by claim.
        self._sessions: dict[str, SessionClient] = {}

    # --- the link

    @property
    def attached(self) -> bool:
        """Whether there is a link."""
        return self._link is not None

    def connect(self, link: wire.NodeLink, inventory: wire.Inventory, *, recovering: bool = False) -> None:
        """Go on over this link: compare what both sides have, and send what the other has not received.

        ``recovering``: what this side does not know is of a gateway before, and waits for `end_unclaimed`.
        Raises ChannelError for an inventory beyond all bounds.
        """
        trajectories = {facts.trajectory: facts for facts in inventory.trajectories}
        _check_count(trajectories, TRAJECTORIES_MAX, "trajectories")
        missing, same = self._trajectories.keys() - trajectories.keys(), inventory.epoch == self._epoch
        if self._link is not None:
            self._link.close("another link took its place")
        self._detach()
        self._link = link
        self._recovering = self._recovering or recovering
        self._epoch, self._trajectories = inventory.epoch, trajectories
        self._attempts = {facts.claim: facts for facts in inventory.attempts}
        self.models.attach()
        for session in self._sessions.values():
            session.attach()
        for each in list(self._requests.values()):
            self._send_request(each)
        for claim, remote in list(self._calls.items()):
            if remote.outcome is not None:
                continue
            if claim in self._attempts:
                remote.join(self._attempts[claim])
                self._attach_call(claim, remote)
            elif same or not remote.begun or remote.repeatable:
                trajectory = remote.execute.action.trajectory
                if trajectory in missing and remote.inside:  # it would find a new, empty one
                    missing.discard(trajectory)
                    self._end(
                        remote, wire.failed(lost(f"the sandbox of trajectory {trajectory!r} died with its daemon"))
                    )
                    continue
                remote.begun, remote.unconfirmed = remote.begun and not remote.unconfirmed, False
                self._send_call(remote)
            else:
                self._end_lost(remote, "the node came back without what had begun on it")
        if missing:
            self.on_lost(missing)
        for claim in self._attempts.keys() - self._calls.keys() - self._unrecorded:
            if not self._recovering or claim in self._unwanted:
                self._unwant(claim)
        for claim in list(self._unwanted):
            if claim not in self._attempts:
                del self._unwanted[claim]

    async def serve(self, link: wire.NodeLink) -> str:
        """Take what the node says until the link is gone; return why it is."""
        try:
            return await link.run(self._handle)
        finally:
            if self._link is link:
                self._detach()

    def _detach(self) -> None:
        """There is no link: everything waits, but for transfers, whose callers may try again."""
        self._link = None
        message = f"node {self.name} was cut off in the middle of it"
        for transfer in list(self._transfers.values()):
            transfer.fail(CapacityExceeded(message, component=wire.COMPONENT, retry_after_s=RETRY_AFTER_S))

    def lost(self, why: str) -> None:
        """Give up all that is there: what runs ends ``lost``, what was requested raises ActionFailed(node_lost)."""
        self._detach()
        for remote in list(self._calls.values()):
            self._end_lost(remote, why)
        for session in self._sessions.values():
            session.close()
        for each in self._requests.values():
            if not each.answer.done():
                message = f"node {self.name}: {why}"
                each.answer.set_exception(ActionFailed(Reason.NODE_LOST, message, component=wire.COMPONENT))
        self._epoch = ""
        self._attempts, self._trajectories = {}, {}
        self._unrecorded.clear()
        self._unwanted.clear()

    async def close(self) -> None:
        """Let go: what runs there runs on, for the next gateway."""
        if self._link is not None:
            self._link.close("the gateway ends")
        self._detach()
        asking = [remote.asking for remote in self._calls.values() if remote.asking is not None]
        for task in asking:
            task.cancel()
        for remote in self._calls.values():
            remote.abandon()
        for each in self._requests.values():
            each.answer.cancel()
        self.models.close()
        await asyncio.gather(*asking, return_exceptions=True)

    def send(self, message: wire.Message, *, in_no_hurry: bool = False) -> None:
        """Send a message if there is a link."""
        if self._link is not None:
            self._link.send(message, in_no_hurry=in_no_hurry)

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.AttemptLog():
                self._take_log(message)
            case wire.AttemptEnd():
                self._take_end(message)
            case wire.AttemptReady():
                self._take_ready(message)
            case wire.AttemptStarted():
                self._take_start(message)
            case wire.NodeAnswer():
                self._take_answer(message)
            case wire.SandboxChanged():
                self._take_sandbox(message.facts)
            case wire.NodeDraining() | wire.NodeGoodbye() | wire.FitnessChanged():
                self.on_message(message)
            case wire.TransferOpened() | wire.TransferPiece() | wire.TransferCredit() | wire.TransferEnded():
                if (transfer := self._transfers.get(message.transfer)) is not None:
                    transfer.receive(message)
            case wire.SessionOpened() | wire.SessionWritten():
                if (session := self._sessions.get(message.claim)) is not None:
                    session.take(message)
            case wire.ModelsChanged():
                self.models.take(message)
            case wire.SnapshotsKept():
                _check_count(message.records, SNAPSHOTS_MAX, "snapshots")
                self._snapshots = {record.id: record for record in message.records}
                self.on_snapshots(self._snapshots)
            case _:
                raise wire.ChannelError(f"a {type(message).__name__} from a node")

    # --- requests

    def post(
        self,
        verb: str,
        name: str,
        *,
        task: str = "",
        function: FunctionSpec | None = None,
        body: bytes = b"",
        chunk: Chunk | None = None,
    ) -> OpenRequest:
        """Request something now, or as soon as there is a link; who cancels the answer wants none.

        The answer raises what the node says, ActionFailed(node_lost) if it is given up.
        """
        self._number += 1
        number = self._number
        answer: asyncio.Future[wire.NodeAnswer] = self._loop.create_future()
        data = b"" if function is None else self._function_bytes(function)
        request = wire.NodeRequest(number, verb, name, task, data, body, chunk)
        self._requests[number] = each = OpenRequest(request, answer)
        answer.add_done_callback(lambda _: self._requests.pop(number, None))
        self._send_request(each)
        return each

    async def request(self, verb: str, name: str, **more: Any) -> wire.NodeAnswer:
        """Return the answer to a request, with arguments as for `post`; raises what that says."""
        return await self.post(verb, name, **more).answer

    def note(self, verb: str, name: str, *, body: bytes = b"") -> asyncio.Future[wire.NodeAnswer]:
        """Request what nobody may wait for: a failure is logged."""
        answer = self.post(verb, name, body=body).answer
        answer.add_done_callback(lambda _: self._log_failure(verb, answer))
        return answer

    def _log_failure(self, verb: str, answer: asyncio.Future[wire.NodeAnswer]) -> None:
        if not answer.cancelled() and (error := answer.exception()) is not None:
            logger.warning("a request failed", node=self.name, verb=verb, why=str(error))

    def _send_request(self, each: OpenRequest) -> None:
        if self._link is not None and not each.answer.done():
            self._link.send(each.request)

    def _take_answer(self, message: wire.NodeAnswer) -> None:
        each = self._requests.get(message.number)
        if each is None or each.answer.done():
            return
        if message.error is None:
            each.answer.set_result(message)
        else:
            each.answer.set_exception(wire.error_of(message.error))

    # --- functions

    def check(self, function: FunctionSpec) -> None:
        """Raise Unsupported for a function of a kind that nodes do not execute."""
        if function.runtime not in SERVED:
            message = f"function {function.name!r}: {function.runtime} functions run on the gateway's own machine alone"
            raise Unsupported(message, component=wire.COMPONENT)

    async def prepare(self, function: FunctionSpec) -> None:
        """Let the node check that it can run the function; raises what it says: Unsupported, InvalidConfig."""
        if function.handler is not None:
            await self._handlers.prepare(function)
        else:
            await self.request("prepare", function.name, function=function)

    def _function_bytes(self, function: FunctionSpec) -> bytes:
        """Return a function as it travels; raises Unsupported for one of a kind that cannot."""
        known = self._functions.get(id(function))
        if known is not None and known[0] is function:
            return known[1]
        self.check(function)
        data = wire.function_bytes(function)
        while len(self._functions) >= FUNCTIONS_MAX:
            del self._functions[next(iter(self._functions))]
        self._functions[id(function)] = (function, data)
        return data

    # --- files

    def files(self, trajectory: str) -> SandboxFiles | None:
        """Return the files of a trajectory's sandbox there, if it is known to have one."""
        facts = self._trajectories.get(trajectory)
        return None if facts is None else RemoteFiles(self, trajectory, facts.workdir)

    @asynccontextmanager
    async def transfer(self, request: wire.TransferRequest) -> AsyncIterator[_Transfer]:
        """Yield a transfer that is requested, and is stopped at the block's end if it has not ended.

        Raises CapacityExceeded if there is no link, or no room on it.
        """
        link = self._link
        if link is None:
            raise CapacityExceeded(f"node {self.name} is not reached now", component=wire.COMPONENT, retry_after_s=1.0)
        if len(self._transfers) >= link.settings.transfers_max:
            message = f"{len(self._transfers)} transfers with node {self.name} are under way (cluster.transfers_max)"
            raise CapacityExceeded(message, component=wire.COMPONENT, retry_after_s=RETRY_AFTER_S)
        self._number += 1
        request.transfer = self._number
        transfer = self._transfers[request.transfer] = _Transfer(request, link)
        link.send(request)
        try:
            yield transfer
        finally:
            del self._transfers[request.transfer]
            if not transfer.ended.done():
                link.send(wire.TransferStopped(request.transfer))

    async def upload(self, request: wire.TransferRequest, chunks: AsyncIterator[bytes]) -> int:
        """Send the bytes until there are no more, or the node has ended it; the end that comes first counts.

        Return the bytes that were written. Raises what the node says, and what `transfer` raises.
        """
        async with self.transfer(request) as transfer:
            sending = asyncio.create_task(transfer.send(chunks))
            try:
                either: tuple[asyncio.Future[Any], ...] = (sending, transfer.ended)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and not transfer.ended.done():
                    sending.result()
                return (await transfer.ended).size_bytes
            finally:
                await end_chores(sending)

    # --- sessions

    def begin_session(self, claim: str, action: Action, call: Call) -> bool:
        """An attempt is about to be executed, or taken over; return whether it is a session.

        Raises CapacityExceeded if there may be no more sessions, ActionFailed if its input is not as declared. A later
        try than the first is none: a session is not begun again.
        """
        if "session" not in call.input or action.attempt > 1:
            return False
        id = call.invocation_id or action.id
        session = self._table.living(id, terminal_of(call.input))
        self._sessions[claim] = SessionClient(self, claim, id, session)
        self._sessions[claim].attach()
        return True

    def end_session(self, claim: str) -> None:
        """The attempt has ended; idempotent."""
        session = self._sessions.pop(claim, None)
        if session is not None:
            self._table.close(session.id)
            session.close()

    # --- snapshots

    async def compare_snapshots(self) -> None:
        """Have the node say which snapshots it keeps, and whenever that changes on this link.

        Raises ActionFailed(node_lost) if it is given up.
        """
        await self.request("snapshots", "")

    async def take_snapshot(self, trajectory: str, id: str, spared: Collection[str]) -> SnapshotRecord:
        """Have a snapshot taken of a trajectory that lives there, in spite of cuts.

        Raises ActionFailed(node_lost), and what the node says.
        """
        await self.request("snapshot", trajectory, body=msgspec.json.encode(wire.SnapshotOrder(id, tuple(spared))))
        record = self._snapshots.get(id)
        if record is None:
            message = f"snapshot {id!r} was removed on node {self.name} as soon as it was taken"
            raise Conflict(message, component=wire.COMPONENT)
        return record

    def drop_snapshot(self, id: str) -> asyncio.Future[wire.NodeAnswer]:
        """Have one removed as soon as nothing there needs it; return what is done once that is known there."""
        return self.note("drop_snapshot", id)

    # --- Executor

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        """Run the action on the node to its end, or take over what runs of it there."""
        claim = claims_of(action.id, action.attempt)
        try:
            self.check(call.function)
            session = self.begin_session(claim, action, call)
        except CodedError as error:
            return wire.failed(error)
        remote = RemoteCall(
            wire.ExecuteAttempt(
                claim,
                action if action.elasticity is None else replace(action, elasticity=None),
                lease,
                b"",
                wire.pack(call.input),
                call.traceparent,
                call.tracestate,
                call.invocation_id,
            ),
            call.function,
            call,
            resized=lease if call.resumed else None,  # the one before, which it runs on, was another gateway's
            session=session,
        )
        assert claim not in self._calls, f"{claim} is executed twice at once"
        self._calls[claim] = remote
        try:
            self._begin(claim, remote)
            while remote.outcome is None:
                try:
                    await remote.ended()
                except asyncio.CancelledError:
                    if remote.let_go:
                        raise
                    self._kill(claim, remote)
            return remote.outcome
        finally:
            del self._calls[claim]
            self.end_session(claim)
            if remote.asking is not None:
                remote.asking.cancel()

    def _begin(self, claim: str, remote: RemoteCall) -> None:
        facts = self._attempts.get(claim)
        if facts is not None and claim not in self._unwanted:
            remote.join(facts)
            if self._link is not None:
                self._attach_call(claim, remote)
        elif remote.call.resumed and self._link is None:
            remote.sent = remote.begun = remote.unconfirmed = True  # the node says at its return what became of it
        elif remote.call.resumed and not remote.repeatable:
            self._end_lost(remote, "the node came back without what had begun on it")
        elif self._link is not None:
            self._send_call(remote)

    def _send_call(self, remote: RemoteCall) -> None:
        """Send it for the first time, or because it never arrived."""
        if remote.cancelled:
            self._end(remote, Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message="cancelled"))
            return
        largest_bytes = self._link.settings.frame_max_bytes if self._link is not None else 0
        if len(remote.execute.input) > largest_bytes - wire.HANDSHAKE_BYTES:
            message = f"an input of {len(remote.execute.input)} bytes is more than a frame of the channel holds"
            self._end(remote, wire.failed(Unsupported(message, component=wire.COMPONENT)))
            return
        try:
            remote.execute.function = self._function_bytes(self._handlers.named(remote.function))
        except (Unsupported, ActionFailed) as error:
            self._end(remote, wire.failed(error))
            return
        remote.sent, remote.log_bytes = True, 0
        if remote.go is None and (not remote.inside or self._lives_here(remote.execute.action.trajectory)):
            self._find_out(remote)  # nothing is made ready first: told before it is asked, a way to and fro is spared
        self.send(remote.execute)
        if remote.session:
            self._sessions[remote.execute.claim].attach()
        if remote.go is not None:
            self.send(remote.go)
        remote.begun = remote.begun or not remote.inside

    def _attach_call(self, claim: str, remote: RemoteCall) -> None:
        self.send(wire.AttachAttempt(claim, remote.log_bytes))
        if remote.go is not None:
            self.send(remote.go)
        if remote.resized is not None:
            self.send(wire.ResizeAttempt(claim, remote.resized))
        if remote.cancelled:
            self.send(wire.CancelAttempt(claim, False))

    def _kill(self, claim: str, remote: RemoteCall) -> None:
        """Its end comes as always; nothing that was never sent is waited for."""
        if remote.asking is not None:
            remote.asking.cancel()
        remote.cancelled = True
        if not remote.sent:
            cancelled = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message="cancelled")
            self._end(remote, cancelled)
        else:
            self.send(wire.CancelAttempt(claim, False))

    def _end_lost(self, remote: RemoteCall, why: str) -> None:
        """It is certain that nothing of it is left."""
        state, reason = (State.LOST, Reason.NODE_LOST)
        if remote.cancelled:
            state, reason = State.CANCELLED, Reason.CANCELLED
        message = f"node {self.name}: {why}"
        self._end(remote, Outcome(state=state, reason=reason, message=message, component=wire.COMPONENT))

    def _end(self, remote: RemoteCall, outcome: Outcome) -> None:
        if remote.outcome is None:
            remote.end(outcome)

    async def resize(self, action: Action, lease: Lease) -> None:
        """Pass the new lease on; a no-op once the action has ended."""
        claim = claims_of(action.id, action.attempt)
        remote = self._calls.get(claim)
        if remote is not None:
            remote.resized = lease
            self.send(wire.ResizeAttempt(claim, lease))

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        """Copy a service on the node's devices; return False where it cannot be, or the node was given up."""
        try:
            return (await self.request("replicate", service, function=function, chunk=chunk)).done
        except CodedError as error:
            logger.warning("a service was not copied", node=self.name, service=service, why=error.message)
            return False

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Make the trajectory's environment there; raises CodedError."""
        await self.request("open", trajectory, task=task, function=function)

    async def end_trajectory(self, trajectory: str) -> None:
        """Remove the trajectory's environment; one on a node without a link is removed when that is back."""
        self._trajectories.pop(trajectory, None)
        answer = self.note("end", trajectory)
        if self._link is not None:
            await asyncio.wait([answer])

    # --- sandboxes

    def trajectories(self) -> Mapping[str, wire.TrajectoryFacts]:
        """Return the trajectories that have a sandbox there, as far as is known."""
        return self._trajectories

    def choose(self, trajectory: str, spec: SandboxSpec) -> None:
        """A trajectory's sandbox is made so whenever it is made anew."""
        self.note("choose", trajectory, body=msgspec.json.encode(spec))

    def drain(self, why: str) -> None:
        """Ask the node to take no new work and to leave when nothing is left."""
        self.send(wire.NodeDraining(why))

    # --- what outlasts a gateway

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        """End the attempts of a gateway before but these: nobody comes for them any more."""
        self._recovering = False
        for claim in self._attempts.keys() - self._calls.keys() - self._unrecorded - set(taken):
            self._unwant(claim)

    async def leave(self, claims: str) -> bool:
        """Return whether an attempt is left to the next gateway: it has begun there, or its end is on no record yet."""
        remote = self._calls.get(claims)
        if remote is None:
            return claims in self._unrecorded
        return remote.begun and (remote.go is None or remote.go.lasting)

    def detach(self, claims: str) -> None:
        """It outlives its caller from now on."""
        remote = self._calls.get(claims)
        if remote is not None and remote.go is not None and remote.go.refusal is None:
            remote.go = wire.AttemptPermit(claims, True, None)
            self.send(remote.go)

    def acknowledge(self, claims: str) -> None:
        """Its end is on record: the node may forget it."""
        if claims in self._unrecorded:
            self._unrecorded.discard(claims)
            self._attempts.pop(claims, None)
            if self._link is None:
                self._unwanted[claims] = None
            self.send(wire.AcknowledgeEnd(claims), in_no_hurry=True)

    def _unwant(self, claim: str) -> None:
        """Nobody waits for it: it is killed, and its end forgotten."""
        self._unwanted[claim] = None
        if self._link is not None:
            self.send(wire.CancelAttempt(claim, True))
            self._unwanted.pop(claim, None)
            self._attempts.pop(claim, None)

    # --- what the node says

    def _take_start(self, message: wire.AttemptStarted) -> None:
        remote = self._calls.get(message.claim)
        if remote is not None and not remote.started:
            remote.started = True
            remote.call.hooks.begun()

    def _take_ready(self, message: wire.AttemptReady) -> None:
        remote = self._calls.get(message.claim)
        if remote is None or remote.cancelled:
            return
        if remote.go is not None:
            self.send(remote.go)
        else:
            self._find_out(remote)

    def _take_sandbox(self, facts: wire.TrajectoryFacts) -> None:
        """Note that a trajectory has a sandbox, or none any more."""
        if not facts.sandbox:
            self._trajectories.pop(facts.trajectory, None)
            return
        self._trajectories[facts.trajectory] = facts
        _check_count(self._trajectories, TRAJECTORIES_MAX, "trajectories")

    def _lives_here(self, trajectory: str | None) -> bool:
        """Return whether a trajectory has a sandbox there that stands ready, as far as is known."""
        facts = None if trajectory is None else self._trajectories.get(trajectory)
        return facts is not None and facts.alive

    def _find_out(self, remote: RemoteCall) -> None:
        if remote.asking is None:
            remote.asking = self._loop.create_task(self._decide(remote.execute.claim, remote))

    async def _decide(self, claim: str, remote: RemoteCall) -> None:
        """Find out whether it may begin; from the moment that it may, it has begun as far as anybody knows."""
        lasting, refusal = True, None
        try:
            lasting = await remote.call.hooks.commit_begin()
        except CodedError as error:
            refusal = wire.facts_of(error)
        remote.go = wire.AttemptPermit(claim, lasting, refusal)
        remote.begun = refusal is None
        self.send(remote.go)

    def _take_log(self, piece: wire.AttemptLog) -> None:
        remote = self._calls.get(piece.claim)
        if remote is None:
            return
        if piece.offset > remote.log_bytes:
            logger.warning("a log has a hole", node=self.name, claim=piece.claim, at=remote.log_bytes)
        remote.take_log(piece)

    def _take_end(self, end: wire.AttemptEnd) -> None:
        remote = self._calls.get(end.claim)
        if remote is None or remote.outcome is not None:
            return
        outcome = wire.outcome_of(end)
        if self._again(remote, outcome):
            return
        if end.omitted_bytes:
            remote.call.log.omit(end.omitted_bytes)
        if end.unkept_bytes:
            remote.call.log.write("system", f"{end.unkept_bytes} bytes are missing: the node's disk refused them\n")
        self._unrecorded.add(end.claim)
        self._end(remote, outcome)

    def _again(self, remote: RemoteCall, outcome: Outcome) -> bool:
        """Begin an idempotent attempt once more that a daemon lost; return whether it was."""
        mislaid = outcome.reason is Reason.NODE_LOST and outcome.component == wire.COMPONENT
        if not mislaid or not remote.repeatable or remote.cancelled or remote.tries >= CALL_TRIES_MAX:
            return False
        trajectory = remote.execute.action.trajectory
        if remote.inside and trajectory is not None and not self._lives_here(trajectory):
            return False  # it would find a new, empty sandbox
        remote.tries += 1
        self.send(wire.AcknowledgeEnd(remote.execute.claim))
        self._send_call(remote)
        return True


def _check_count(known: Collection[object], most: int, what: str) -> None:
    """Raise ChannelError for more than a node may have."""
    if len(known) > most:
        raise wire.ChannelError(f"a node that tells of more than {most} {what}")
