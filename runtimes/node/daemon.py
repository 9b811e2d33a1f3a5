"""The daemon of a node: attempts, their journal and logs, files, sessions, snapshots, models."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import re
import secrets
import shutil
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import structlog
from msgspec import convert

from manager.action import Action, Outcome, State
from manager.clock import Clock, MonotonicClock
from manager.config import NodeSpec, ServiceSpec
from manager.errors import (
    NOT_BEGUN,
    ActionFailed,
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidConfig,
    InvalidInput,
    NotFound,
    Reason,
    StorageUnavailable,
    TooLarge,
    Unauthorized,
    Unsupported,
    exhaustion,
)
from manager.executor import Call, CallHooks, Executor
from manager.function import FunctionSpec, SandboxSpec
from runtimes.chores import Chores, end_chores
from runtimes.kinds import KINDS
from runtimes.model.runtime import ModelRuntime
from runtimes.node import protocol as wire
from runtimes.node.certificate import node_side, shows
from runtimes.node.journal import AttemptJournal, LogSpool
from runtimes.sandbox.disk import REMEDY, shortage_of
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import terminal_of
from runtimes.sandbox.files import LocalFiles, SandboxFiles, TreeStore, unpack_tree
from runtimes.sandbox.handler.sources import SOURCES_LIMIT_BYTES
from runtimes.sandbox.sandbox import Sandbox, to_its_end
from runtimes.sandbox.session import InteractiveSession, SessionPiece, SessionTable, TerminalSize
from runtimes.sandbox.snapshots import SnapshotStore
from tangram.archive import Refused
from tangram.types import SnapshotId

logger = structlog.get_logger("node")


@dataclass(slots=True, kw_only=True, eq=False)
class NodeAttempt:
    """What a daemon keeps of an attempt, from its arrival until its end is acknowledged."""

    execute: wire.ExecuteAttempt
    function: FunctionSpec
    log: LogSpool
    task: asyncio.Task[None] | None = None
    #: Done once the gateway has said whether it may begin.
    go: asyncio.Future[wire.AttemptPermit] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    #: Whether it stands ready and asks; whether it may have begun; whether its work runs.
    asking: bool = False
    begun: bool = False
    running: bool = False
    lasting: bool = False
    end: wire.AttemptEnd | None = None
    #: Whether the gateway listens on the present link; what it was sent on it: that the work runs, how much of the log,
    #: the end.
    attached: bool = False
    start_sent: bool = False
    sent_bytes: int = 0
    #: Bytes of its log that the disk refused.
    unkept_bytes: int = 0
    end_sent: bool = False
    #: Whether nobody waits for its end.
    disowned: bool = False
    #: What is to be begun in its place, once it is gone.
    successor: wire.ExecuteAttempt | None = None

    @property
    def claim(self) -> str:
        return self.execute.claim


def is_session(execute: wire.ExecuteAttempt) -> bool:
    """Return whether its output is a session's, which no spool holds."""
    return "session" in wire.unpack_object(execute.input)


#: Seconds for which a log waits for more before it is sent.
LOG_WAIT_S = 0.02
#: Bytes of a log that are sent at once; so much does not wait.
LOG_PIECE_BYTES = 16 * 2**10
#: Unsent bytes of the link beyond which logs wait.
LOG_UNSENT_BYTES = 2**20


class LogShipper:
    """Sends a gateway what attempts have to report: that each runs, their logs in turn, and each end last.

    Nothing is sent faster than the gateway takes it. What is not urgent waits a moment: of a short attempt all is sent
    with its end, and its gateway wakes up once.
    """

    def __init__(self, owes: Callable[[str], bool]) -> None:
        """``owes``: whether more than a log is to be sent before the end of a claim's attempt."""
        self._owes = owes
        self._loop = asyncio.get_running_loop()
        #: Where it is sent; None while there is no gateway.
        self.link: wire.NodeLink | None = None
        self._due: dict[str, NodeAttempt] = {}
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def more(self, attempt: NodeAttempt, *, at_once: bool = False) -> None:
        """Send what is new of an attempt, ``at_once`` or with what comes within a moment."""
        if not attempt.attached:
            return
        link = self.link
        if at_once and link is not None and self._has_room(link):
            self._due.pop(attempt.claim, None)
            if not self._send(attempt, link):
                return
        self._due[attempt.claim] = attempt
        if at_once or attempt.log.end - attempt.sent_bytes >= LOG_PIECE_BYTES:
            self._wake.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(LOG_WAIT_S, self._now)

    def forget(self, attempt: NodeAttempt) -> None:
        """Send nothing more of it."""
        self._due.pop(attempt.claim, None)

    def _now(self) -> None:
        self._timer = None
        if self._due:
            self._wake.set()

    def _has_room(self, link: wire.NodeLink) -> bool:
        return not link.closed.is_set() and link.unsent_bytes <= LOG_UNSENT_BYTES

    async def run(self) -> None:
        """Send until it is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._due and (link := self.link) is not None and not link.closed.is_set():
                claim = next(iter(self._due))
                attempt = self._due.pop(claim)
                if attempt.attached and self._send(attempt, link):
                    self._due[claim] = attempt  # its next piece comes after those of the others
                if not self._has_room(link):
                    await link.drained()

    def _piece(self, attempt: NodeAttempt) -> bytes:
        """Return what of a log is sent next; an end waits for no disk, and says what is left out."""
        try:
            return attempt.log.read(attempt.sent_bytes, LOG_PIECE_BYTES)
        except OSError as error:
            if attempt.end is not None:
                logger.error("a log cannot be kept", claim=attempt.claim, why=str(error))
                attempt.unkept_bytes += attempt.log.end - attempt.sent_bytes
                attempt.sent_bytes = attempt.log.end
            return b""

    def _send(self, attempt: NodeAttempt, link: wire.NodeLink) -> bool:
        """Send that it runs, a piece of its log, or its end behind the last one; return whether there is more."""
        if attempt.running and not attempt.start_sent:
            attempt.start_sent = True
            link.send(wire.AttemptStarted(attempt.claim))
        if attempt.sent_bytes < attempt.log.end:
            piece = self._piece(attempt)
            if piece:
                link.send(wire.AttemptLog(attempt.claim, attempt.sent_bytes, piece))
                attempt.sent_bytes += len(piece)
            if attempt.sent_bytes < attempt.log.end:
                return bool(piece)
        if attempt.end is not None and not attempt.end_sent and not self._owes(attempt.claim):
            attempt.end_sent = True
            link.send(msgspec.structs.replace(attempt.end, unkept_bytes=attempt.unkept_bytes))
        return False


class _ServedTransfer(wire.FileTransfer):
    """One transfer that is under way."""

    task: asyncio.Task[None] | None = None


class TransferServer:
    """The transfers of one node; each ends with the link on which it was requested."""

    def __init__(
        self,
        files: Callable[[str], SandboxFiles | None],
        take_handler: Callable[[str, AsyncIterator[bytes]], Awaitable[int]],
    ) -> None:
        """``files``: those of a trajectory's sandbox here; ``take_handler`` keeps a handler's by their digest."""
        self._files = files
        self._take_handler = take_handler
        self._transfers: dict[int, _ServedTransfer] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def take(self, message: wire.TransferPiece | wire.TransferCredit | wire.TransferStopped) -> None:
        """Take what the gateway says of a transfer, unless that has ended; raises ChannelError."""
        transfer = self._transfers.get(message.transfer)
        if transfer is not None:
            if isinstance(message, wire.TransferStopped):
                self._stop(transfer)
            else:
                transfer.take(message)

    def detach(self, link: wire.NodeLink | None = None) -> None:
        """End the transfers of a link that is gone; None: of every link."""
        for transfer in list(self._transfers.values()):
            if link is None or transfer.link is link:
                self._stop(transfer)

    async def close(self) -> None:
        """End them all, and wait until they have."""
        self.detach()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def begin(self, link: wire.NodeLink, request: wire.TransferRequest) -> None:
        """Begin a transfer, or refuse it; raises ChannelError for one that is under way."""
        if request.transfer in self._transfers:
            raise wire.ChannelError(f"transfer {request.transfer} was asked for twice")
        if len(self._transfers) >= link.settings.transfers_max:
            message = f"the node has {len(self._transfers)} transfers of files under way (cluster.transfers_max)"
            refusal = wire.facts_of(CapacityExceeded(message, component=wire.COMPONENT, retry_after_s=1.0))
            link.send(wire.TransferEnded(request.transfer, refusal, 0, b""))
            return
        transfer = self._transfers[request.transfer] = _ServedTransfer(request, link)
        transfer.task = asyncio.create_task(
            self._serve(transfer), name=f"{request.verb} {request.trajectory}:{request.path}"
        )
        self._ending.add(transfer.task)
        transfer.task.add_done_callback(self._ending.discard)

    def _stop(self, transfer: _ServedTransfer) -> None:
        self._transfers.pop(transfer.request.transfer, None)
        if transfer.task is not None:
            transfer.task.cancel()

    async def _serve(self, transfer: _ServedTransfer) -> None:
        request, failure, size_bytes, entries = transfer.request, None, 0, b""
        try:
            size_bytes, entries = await self._carried_out(transfer)
        except Exception as error:  # noqa: BLE001  # a bug here ends no daemon
            failure = _failure_facts(
                error, "transfer", verb=request.verb, trajectory=request.trajectory, path=request.path
            )
        self._transfers.pop(request.transfer, None)
        transfer.link.send(wire.TransferEnded(request.transfer, failure, size_bytes, entries))

    async def _carried_out(self, transfer: _ServedTransfer) -> tuple[int, bytes]:
        """Do what is asked; return the bytes that were written, and the entries of a directory."""
        request = transfer.request
        if request.verb is wire.TransferVerb.HANDLER:
            return await self._take_handler(request.path, transfer.chunks()), b""
        files = self._files(request.trajectory)
        if files is None:
            raise NotFound(f"trajectory {request.trajectory!r} has no sandbox", component=wire.COMPONENT)
        match request.verb:
            case wire.TransferVerb.LIST:
                entries = msgspec.msgpack.encode(await files.list(request.path, user=request.user))
                if len(entries) > transfer.link.settings.frame_max_bytes - wire.HANDSHAKE_BYTES:
                    message = f"the entries of {request.path!r} are more than a frame of the channel holds"
                    raise TooLarge(message, component=wire.COMPONENT)
                return 0, entries
            case wire.TransferVerb.WRITE:
                return await files.write(request.path, transfer.chunks(), mode=request.mode, user=request.user), b""
            case wire.TransferVerb.UNPACK:
                chunks = transfer.chunks()
                return await files.unpack(request.path, chunks, limit_bytes=request.limit_bytes, user=request.user), b""
            case wire.TransferVerb.READ:
                async with files.open(request.path, limit_bytes=request.limit_bytes, user=request.user) as file:
                    transfer.link.send(wire.TransferOpened(request.transfer, file.size_bytes))
                    await transfer.send(file.chunks())
            case _:
                archive = files.pack(
                    request.path, limit_bytes=request.limit_bytes, user=request.user, base=request.base
                )
                async with archive as chunks:
                    transfer.link.send(wire.TransferOpened(request.transfer, None))
                    await transfer.send(chunks)
        return 0, b""


def _failure_facts(error: Exception, what: str, **context: object) -> wire.ErrorFacts:
    """Return an error as it travels; one that is no `CodedError` is a fault of the node, and is logged."""
    if isinstance(error, CodedError):
        return wire.facts_of(error)
    logger.error(f"a {what} failed", exc_info=error, **context)
    return wire.facts_of(CodedError(f"the node failed: {error!r}", component=wire.COMPONENT))


# Fitness: a node looks at its disk and its sandboxes, and reports when nothing can begin there and when it can again.
#
# An attempt is written down before it begins: on a disk that takes nothing none can. A disk is found short by what is
# free of it, before anything fails, and by a write that it refused, until it takes one. Where no sandbox can be made,
# as the Docker engine is gone, nothing new can begin, and what lives there goes on: without a report such a node looks
# the emptiest of all, and draws what comes.

#: Seconds between two looks.
FITNESS_LOOK_S = 1.0
#: Beyond its bound so much more must be free before a node is fit again: what is at the bound would come and go.
AGAIN = 1.25
#: A disk that has refused is tried with so many bytes, more than a beginning writes.
TRIAL_BYTES = 64 * 2**10
TRIAL = "trial"

#: Returns why no sandbox can be made now, and what mends that; empty if one can.
Trouble = Callable[[], Awaitable[str]]


class NodeFitness:
    """Whether anything can begin on this node. Use from one event loop."""

    def __init__(
        self,
        directory: Path,
        free_min_bytes: int,
        *,
        trouble: Trouble | None = None,
        on_change: Callable[[wire.FitnessChanged], None] = lambda changed: None,
    ) -> None:
        """With fewer than ``free_min_bytes`` free in the directory nothing begins; ``on_change`` is called at turns."""
        self._directory = directory
        self._free_min_bytes = free_min_bytes
        #: Why nothing can begin, as the disk is short; and why no sandbox can be made, as far as is known.
        self._short = self._without_sandboxes = ""
        self._trouble = trouble
        #: The last refusal of a write, until the disk takes one.
        self._refusal = ""
        self._on_change = on_change
        self.look()

    @property
    def report(self) -> wire.FitnessChanged:
        """What the gateway is to know."""
        return wire.FitnessChanged(
            self._short or self._without_sandboxes, bool(not self._short and self._without_sandboxes)
        )

    async def watch_for_ever(self) -> None:
        """Look again and again: an engine that hangs holds up no look at the disk."""
        async with asyncio.TaskGroup() as looks:
            looks.create_task(self._watch_disk())
            if self._trouble is not None:
                looks.create_task(self._watch_sandboxes(self._trouble))

    def refused(self, error: OSError) -> None:
        """The disk refused a write."""
        self._refusal = str(error)
        self.look()

    def look(self) -> None:
        """See how it is now, and report it if it has turned."""
        self._turn(self._shortage(), self._without_sandboxes)

    async def _watch_disk(self) -> None:
        while True:
            await asyncio.sleep(FITNESS_LOOK_S)
            self.look()

    async def _watch_sandboxes(self, trouble: Trouble) -> None:
        while True:
            await asyncio.sleep(FITNESS_LOOK_S)
            self._turn(self._short, await trouble())

    def _turn(self, short: str, without_sandboxes: str) -> None:
        before = self.report
        self._short, self._without_sandboxes = short, without_sandboxes
        report = self.report
        if (bool(before.why), before.finishing) == (bool(report.why), report.finishing):
            return
        if report.why:
            what = "nothing new" if report.finishing else "nothing"
            logger.error(f"{what} can begin on this node", why=report.why)
        else:
            logger.info("this node is fit again")
        self._on_change(report)

    def _shortage(self) -> str:
        if self._refusal:
            self._refusal = self._tried()
        if self._refusal:
            return f"its disk refuses what is written: {self._refusal} ({self._directory}): {REMEDY}"
        return shortage_of(self._directory, int(self._free_min_bytes * AGAIN) if self._short else self._free_min_bytes)

    def _tried(self) -> str:
        """Return why the disk takes nothing; empty if it does."""
        trial = self._directory / TRIAL
        try:
            trial.write_bytes(bytes(TRIAL_BYTES))
        except OSError as error:
            return str(error)
        finally:
            with suppress(OSError):
                trial.unlink()
        return ""


class NodeModels:
    """The model services of one node. Use from one event loop."""

    def __init__(self, models: ModelRuntime, devices: int) -> None:
        """``devices`` is how many the node has."""
        self._models = models
        self._devices = devices
        self._services: dict[str, ServiceSpec] = {}
        #: Called with all that there is, whenever some of it has changed.
        self.on_change: Callable[[wire.ModelsChanged], None] = lambda facts: None
        models.on_footprint = self._learn
        models.on_residency = lambda resident: self.on_change(self.facts())

    def check(self, function: FunctionSpec) -> None:
        """Raise Unsupported for a model function that no device of this node could ever run."""
        if function.model is not None and not self._devices:
            message = f"function {function.name!r}: this node has no model devices (tangram node join --devices)"
            raise Unsupported(message, component=wire.COMPONENT)

    async def prepared(self, function: FunctionSpec) -> None:
        """Tell what the service of a function costs here, now that it was prepared; nothing for other functions."""
        if function.model is not None:
            self._learn(await self._models.footprint(function))

    def facts(self) -> wire.ModelsChanged:
        """Return what services there are, and what is resident."""
        resident = {service: list(chunks) for service, chunks in self._models.residency().items()}
        return wire.ModelsChanged(services=list(self._services.values()), resident=resident)

    def _learn(self, service: ServiceSpec) -> None:
        if self._services.get(service.name) != service:
            self._services[service.name] = service
            self.on_change(self.facts())


#: Seconds for which a command waits for a gateway that was read from it when the link went.
LINK_PATIENCE_S = 20.0
#: Inputs of one session that are passed on at once; the gateway sends the next when it has the answer.
INPUTS_MAX = 4
#: Bytes of output in one frame.
PIECE_BYTES = 64 * 2**10
#: Nothing is said meanwhile, and a reader looks whether it is still wanted.
LOOK_S = 30.0


@dataclass(slots=True, eq=False)
class ServedSession:
    """One session of an attempt, and what of it the gateway was sent."""

    claim: str
    id: str
    session: InteractiveSession
    #: The gateway's present attachment; None on no link.
    link: wire.NodeLink | None = None
    life: str = ""
    window_bytes: int = 0
    #: Up to where it was taken, and was sent.
    taken: int = 0
    sent: int = 0
    attended: bool = False
    #: Whether all of it was sent on this link.
    is_sent: bool = False
    #: The number of the last control that was done for the present side.
    controlled: int = 0
    #: The requests whose input is being passed on.
    inputs: set[asyncio.Task[Any]] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    sending: asyncio.Task[None] | None = None

    @property
    def owed(self) -> bool:
        """Whether the gateway is attached, and has not received all."""
        return self.link is not None and not self.is_sent

    @property
    def room_bytes(self) -> int:
        """How much may be sent now; its end is sent whether there is room or not."""
        if self.session.ended:
            return PIECE_BYTES
        return min(PIECE_BYTES, self.taken + self.window_bytes - self.sent) if self.attended else 0


class SessionServer:
    """The sessions of one node. Use from one event loop."""

    def __init__(self, table: SessionTable, on_sent: Callable[[str], None]) -> None:
        """``on_sent`` is called with the claim of a session all of which was sent."""
        self._table = table
        self._on_sent = on_sent
        self._sessions: dict[str, ServedSession] = {}
        self._chores = Chores(lambda error: logger.error("the output of a session is not sent", error=repr(error)))

    # --- attempts

    def begin(self, claim: str, action: Action, invocation_id: str, value: Mapping[str, object]) -> None:
        """An attempt is about to run; its output is kept until `forget` if it is a session's first try."""
        if "session" not in value or action.attempt > 1 or claim in self._sessions:
            return
        id = invocation_id or action.id
        try:
            session = self._table.living(id, terminal_of(value))
        except CodedError:
            return  # its runtime refuses it in the same way
        self._sessions[claim] = ServedSession(claim, id, session)

    def ended(self, claim: str) -> None:
        """The attempt has ended; the rest of its output is sent whether somebody reads it or not."""
        served = self._sessions.get(claim)
        if served is not None:
            self._table.close(served.id)
            served.changed.set()

    def owes(self, claim: str) -> bool:
        """Return whether there is output that the gateway must have before the end."""
        served = self._sessions.get(claim)
        return served is not None and served.owed

    def forget(self, claim: str) -> None:
        """The gateway has its end on record; idempotent."""
        served = self._sessions.pop(claim, None)
        if served is not None:
            self._table.close(served.id)
            self._stop(served)

    # --- the link

    def take(self, link: wire.NodeLink, message: wire.AttachSession | wire.SessionCredit) -> None:
        """Take what the gateway says of a session, unless that is forgotten."""
        served = self._sessions.get(message.claim)
        if served is None:
            return
        if isinstance(message, wire.AttachSession):
            self._attach(served, link, message)
        else:
            served.taken, served.attended = message.taken, message.attended
            served.changed.set()

    def detach(self, link: wire.NodeLink) -> None:
        """The link is gone: sessions go on, and those that were read wait a moment for the next link."""
        for served in self._sessions.values():
            if served.link is link:
                if served.attended and not served.session.ended:
                    reader = served.session.attend(served.sent)
                    asyncio.get_running_loop().call_later(LINK_PATIENCE_S, served.session.leave, reader)
                self._stop(served)

    async def close(self) -> None:
        """End what sends their output; the sessions themselves go on."""
        await end_chores(*self._chores.tasks)

    # --- requests

    async def input(self, claim: str, body: bytes) -> bytes:
        """Pass input on, and return how far it came; raises Conflict or CapacityExceeded."""
        served, input = self._sessions.get(claim), msgspec.msgpack.decode(body, type=wire.TerminalInput)
        if served is None:
            return self.input_state(claim, input.offset)
        if len(served.inputs) >= INPUTS_MAX:
            message = f"{INPUTS_MAX} inputs of the session wait for its command to read"
            raise CapacityExceeded(message, component=wire.COMPONENT, retry_after_s=1.0)
        task = asyncio.current_task()
        assert task is not None
        served.inputs.add(task)
        try:
            await served.session.write(input.data, input.offset, end=input.end)
        finally:
            served.inputs.discard(task)
        return self.input_state(claim, input.offset)

    def input_state(self, claim: str, offset: int) -> bytes:
        """Return how far the input of a session came; one that is forgotten takes nothing from ``offset`` on."""
        served = self._sessions.get(claim)
        if served is None:
            state = wire.TerminalInputState(offset, reads=False)
        else:
            state = wire.TerminalInputState(served.session.input_offset, served.session.reads)
        return msgspec.msgpack.encode(state)

    async def control(self, claim: str, number: int, body: bytes) -> None:
        """Do what a request of this number says as soon as the session runs, unless it was done on an earlier link."""
        served = self._sessions.get(claim)
        if served is None:
            return
        control = msgspec.msgpack.decode(body, type=wire.SessionControl)
        await served.session.opened(None)
        if number > served.controlled:
            served.controlled = number
            size = None if control.size is None else TerminalSize(*control.size)
            served.session.relay(size=size, signal=control.signal, end=control.end)

    # --- inside

    def _attach(self, served: ServedSession, link: wire.NodeLink, request: wire.AttachSession) -> None:
        ending: list[asyncio.Task[Any]] = []
        if served.life != request.life:
            served.life, served.controlled = request.life, 0
            ending = list(served.inputs)  # another side than the present one has sent them
            for task in ending:
                task.cancel()
        own_bytes = served.session.settings.output_bytes // 4
        served.window_bytes = max(1, min(request.window_bytes, own_bytes))
        served.sent = request.offset
        served.taken = request.offset - (served.window_bytes if request.held else 0)
        served.attended, served.is_sent = request.attended, False
        served.session.wait_for_somebody(request.unattended_s)
        reader = served.session.attend(served.sent)  # before the one whose place it takes lets go
        if not request.attended:
            served.session.leave(reader)
        self._stop(served)
        served.link = link
        served.sending = self._chores.begin(self._send_output(served, link, ending))

    def _stop(self, served: ServedSession) -> None:
        """Send no more of it on its link."""
        if served.sending is not None:
            served.sending.cancel()
        served.link = served.sending = None

    async def _send_output(
        self, served: ServedSession, link: wire.NodeLink, ending: Collection[asyncio.Task[Any]]
    ) -> None:
        """Send that it runs, then its output while there is room, and the rest at its end.

        Where its input stands is sent once what is ``ending`` has ended.
        """
        session = served.session
        await session.opened(None)
        await asyncio.gather(*ending, return_exceptions=True)
        if session.end or not session.ended:  # else it has never begun
            message = wire.SessionOpened(
                claim=served.claim,
                start=session.start,
                input_offset=session.input_offset,
                reads=session.reads,
                window_bytes=served.window_bytes,
            )
            link.send(message)
        while not (session.ended and served.sent >= session.end):
            if served.attended or session.ended:
                before = served.sent
                await self._send_pages(served, link)
                if session.ended and served.sent == before:
                    served.sent = session.end  # nothing of the rest is kept
            else:
                served.changed.clear()
                await served.changed.wait()
        served.is_sent = True
        self._on_sent(served.claim)

    async def _send_pages(self, served: ServedSession, link: wire.NodeLink) -> None:
        """Send its output until nobody reads it any more, or it has ended and all is sent."""
        session = served.session
        async with aclosing(session.read(served.sent, LOOK_S)) as pages:
            async for page in pages:
                for piece in page:
                    await self._send_piece(served, link, piece)
                if not served.attended and not session.ended:
                    return

    async def _send_piece(self, served: ServedSession, link: wire.NodeLink, piece: SessionPiece) -> None:
        """Send a piece as there is room, unless nobody reads it any more."""
        data = piece.data
        while data and (served.attended or served.session.ended):
            room_bytes = served.room_bytes
            if room_bytes <= 0 or link.closed.is_set():
                served.changed.clear()
                await served.changed.wait()
                continue
            part, data = data[:room_bytes], data[room_bytes:]
            offset = piece.offset + len(piece.data) - len(data) - len(part)
            served.sent = offset + len(part)
            link.send(wire.SessionWritten(served.claim, offset, piece.stream, part))
            await link.drained()


_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Most bytes of handlers' files; beyond it those used least recently go, never one in use.
HANDLERS_MAX_BYTES = 2 * 2**30


class HandlerStore:
    """The handlers' files in one directory. Use from one event loop."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int = HANDLERS_MAX_BYTES,
        in_use: Callable[[], Collection[Path]] = lambda: (),
    ) -> None:
        """Directories ``in_use``, which instances have mounted, are never removed."""
        directory.mkdir(parents=True, exist_ok=True)
        self._trees, self._max_bytes, self._in_use = TreeStore(directory, max_bytes), max_bytes, in_use
        #: What was seen to be whole since the start.
        self._whole: set[str] = set()
        self._held: Counter[str] = Counter()
        self._receiving = asyncio.Lock()
        self._changing = asyncio.Lock()

    def placed(self, function: FunctionSpec) -> FunctionSpec:
        """Return a function that travelled as it is here: its handler's directory is that of its digest.

        Its revision names that too, as a handler's files may change beside its code. Raises ChannelError.
        """
        if function.handler is None:
            return function
        digest = str(function.handler.directory)
        if not _DIGEST.fullmatch(digest):
            raise wire.ChannelError(f"function {function.name}: its files are not named by a digest")
        handler = replace(function.handler, directory=self._trees.files(digest))
        return replace(function, revision=f"{function.revision}+{digest[:12]}", handler=handler)

    async def has(self, digest: str) -> bool:
        """Return whether these files are here, and whole."""
        self._check(digest)
        async with self._changing:
            if digest not in self._whole and await asyncio.to_thread(self._is_whole, digest):
                self._whole.add(digest)
            if not self._trees.use(digest):
                self._whole.discard(digest)
        return digest in self._whole

    async def take(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Keep the files of an archive that arrives; return its bytes.

        Raises TooLarge, InvalidInput for files of another digest, and CapacityExceeded where there is no room.
        """
        self._check(digest)
        async with self._receiving:
            part: list[Path] = []
            try:
                await to_its_end(lambda: part.append(self._trees.new()))
                size_bytes = await _received(part[0], chunks)
                async with self._changing:
                    in_use = {path.parent.name for path in self._in_use()} | set(self._held)
                    await to_its_end(partial(self._keep, part[0], digest, in_use))
                    self._whole.add(digest)
            except Refused as error:
                raise InvalidInput(f"what was sent is no handler: {error}", component=wire.ARCHIVE_COMPONENT) from None
            except OSError as error:
                message = f"the node cannot keep a handler's files: {error}"
                raise exhaustion(error, wire.ARCHIVE_COMPONENT) or CodedError(
                    message, component=wire.ARCHIVE_COMPONENT
                ) from None
            finally:
                for each in part:
                    await asyncio.to_thread(shutil.rmtree, each, ignore_errors=True)
        return size_bytes

    @asynccontextmanager
    async def held(self, function: FunctionSpec) -> AsyncIterator[None]:
        """Keep a function's files here for the block; raises ActionFailed if they are not."""
        if function.handler is None:
            yield
            return
        digest = function.handler.directory.parent.name
        self._held[digest] += 1
        try:
            if not await self.has(digest):
                message = f"the files of {function.name} are not on the node: they come when it is prepared anew"
                raise ActionFailed(
                    Reason.ENVIRONMENT_LOST, message, component=wire.ARCHIVE_COMPONENT, retry_after_s=1.0
                )
            yield
        finally:
            self._held[digest] -= 1
            self._held += Counter()  # which drops what nobody holds

    def _check(self, digest: str) -> None:
        if not _DIGEST.fullmatch(digest):
            raise InvalidInput(f"{digest[:80]!r} is no digest", component=wire.ARCHIVE_COMPONENT)

    def _keep(self, part: Path, digest: str, in_use: Collection[str]) -> None:
        """Unpack what has arrived, and let it be found by its name once it is whole."""
        size_bytes = unpack_tree(part / "archive", part / TreeStore.FILES, SOURCES_LIMIT_BYTES)
        if wire.packed(part / TreeStore.FILES).digest != digest:
            raise InvalidInput("what was sent are not the files that were promised", component=wire.ARCHIVE_COMPONENT)
        if self._trees.use(digest):
            return  # it was sent twice
        if not self._trees.make_room(size_bytes, in_use):
            message = f"the handlers that the node serves have {self._max_bytes} bytes of files already"
            raise CapacityExceeded(message, component=wire.ARCHIVE_COMPONENT)
        self._trees.keep(part, digest, size_bytes)

    def _is_whole(self, digest: str) -> bool:
        """See whether a tree is what its name says, and remove it if not."""
        files = self._trees.files(digest)
        if not files.parent.is_dir():
            return False
        try:
            if wire.packed(files).digest == digest:
                return True
        except (OSError, CodedError):
            pass
        logger.warning("a handler's files were damaged, and are asked for anew", digest=digest)
        self._trees.remove(digest)
        return False


async def _received(part: Path, chunks: AsyncIterator[bytes]) -> int:
    size_bytes = 0
    with (part / "archive").open("wb") as file:
        async for chunk in chunks:
            size_bytes += len(chunk)
            if size_bytes > wire.ARCHIVE_MAX_BYTES:
                message = f"the files of a handler are more than {wire.ARCHIVE_MAX_BYTES} bytes"
                raise TooLarge(message, component=wire.ARCHIVE_COMPONENT)
            file.write(chunk)
    return size_bytes


#: The kinds whose functions a node executes for a gateway. The others need what only the gateway has: its own address
#: towards the world.
SERVED: tuple[str, ...] = ("exec", "pytest", "handler", "model")
#: Most attempts that run, or whose end is not acknowledged, and most functions that are kept read.
ATTEMPTS_MAX, FUNCTIONS_MAX = 16384, 4096
DAEMON_COMPONENT = "node.daemon"
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()
#: In the state directory.
LOCK, PID, KEY, HANDLERS = "lock", "pid", "key", "handlers"
#: Seconds between two looks whether a draining node is empty.
DRAIN_LOOK_S = 0.2
#: Seconds for a connection and its handshake; until the next try, doubled each time, half of it by chance; and at most.
HANDSHAKE_S, REDIAL_S, REDIAL_MAX_S = 10.0, 0.5, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRuntimes:
    """What a daemon executes with."""

    executor: Executor
    environments: Environments
    #: Checks that a function can run here; raises CodedError.
    prepare: Callable[[FunctionSpec], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    #: Returns the directories that instances of handlers have mounted, or may.
    handlers_in_use: Callable[[], Collection[Path]] = lambda: ()
    #: The model services and the snapshots of this machine, if it has any.
    models: NodeModels | None = None
    snapshots: SnapshotStore | None = None
    #: None where nothing could say why no sandbox can be made.
    trouble: Trouble | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Where a daemon joins, as what, and how patient it is."""

    host: str
    port: int
    #: SHA-256 of the gateway's certificate, hexadecimal.
    fingerprint: str
    #: Admits it once; empty if the state directory holds a key.
    ticket: str
    state_dir: Path
    #: This machine, with its name and labels.
    spec: NodeSpec
    #: What its sandboxes are (`runtimes.sandbox.spec.ProviderInfo`).
    isolation: str = ""
    #: Seconds without a gateway after which all is ended.
    unattended_s: float = 600.0
    #: Seconds that a drain waits for what runs.
    drain_grace_s: float = 600.0
    #: Free bytes of the state directory below which nothing begins.
    free_min_bytes: int = 32 * 2**20


class _AttemptHooks(CallHooks):
    """Has a daemon answer what the runtime of an attempt asks."""

    __slots__ = ("_attempt", "_daemon")

    def __init__(self, daemon: NodeDaemon, attempt: NodeAttempt) -> None:
        self._daemon, self._attempt = daemon, attempt

    async def commit_begin(self) -> bool:
        return await self._daemon.commit_begin(self._attempt)

    def begun(self) -> None:
        self._daemon.started(self._attempt)


class _FunctionKind(msgspec.Struct):
    """Of a function that travels, what tells its class."""

    runtime: str


class NodeDaemon:
    """Dials its gateway for ever, and executes what that asks for, each attempt at most once. Use from one event loop.

    It is a process of its own, under systemd, Slurm or whatever starts it. Nothing depends on a link: attempts run on
    while there is none, their ends and logs lie in the journal, and a gateway that comes back asks for what it has not
    received. What runs in sandboxes outlives the daemon: the next one of the same state directory adopts that. Only one
    that meets no gateway for ``unattended_s`` ends all.

    `run` it to its end; `drain`, `leave` and `stop` may be called from anywhere on its loop.
    """

    def __init__(self, settings: DaemonSettings, runtimes: NodeRuntimes, *, clock: Clock | None = None) -> None:
        self._settings, self._runtimes = settings, runtimes
        self._environments = runtimes.environments
        self._clock = clock or MonotonicClock()
        self._loop = asyncio.get_running_loop()
        self._instance = secrets.token_hex(8)
        self._attempts: dict[str, NodeAttempt] = {}
        #: Ends that were sent, and are written down in the same turn of the loop.
        self._ends: list[wire.AttemptEnd] = []
        #: Attempts whose end is on record: forgotten soon, many at once, and not between two that begin.
        self._settled: dict[str, NodeAttempt] = {}
        self._settling: asyncio.TimerHandle | None = None
        #: Functions as they are here, by their bytes.
        self._functions: dict[bytes, FunctionSpec] = {}
        #: Requests that are under way, by number.
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._transfers = TransferServer(self._files, lambda digest, chunks: self._handlers.take(digest, chunks))
        self._sessions = SessionServer(self._environments.sessions, self._session_ended)
        self._shipper = LogShipper(self._sessions.owes)
        #: The sandboxes that the gateway knows of.
        self._reported: dict[str, wire.TrajectoryFacts] = {}
        #: Whether the gateway of this link has asked which snapshots there are.
        self._reports_snapshots = False
        self._link: wire.NodeLink | None = None
        self._contact_s = self._clock.now()
        #: Why it drains; whether what runs is left to the next daemon. Empty and False before.
        self._draining = ""
        self._leaving = self._closing = False
        self._stopping = asyncio.Event()
        self._drainer: asyncio.Future[None] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Set once it has joined a gateway.
        self.joined = asyncio.Event()

    # --- from outside

    def drain(self, why: str) -> None:
        """Take no new work, and end when nothing is left or the grace is over; a second time changes nothing.

        A machine's own shutdown, its orchestrator and an operator may each ask for it: `stop` ends at once.
        """
        if self._draining:
            logger.info("it drains already", why=why)
            return
        self._draining = why
        logger.info("draining", why=why)
        self._send(wire.NodeDraining(why))
        self._drainer = asyncio.ensure_future(self._drain())

    def leave(self) -> None:
        """End now, and leave all that runs to the next daemon of this state directory."""
        self._leaving = True
        self.stop()

    def stop(self) -> None:
        """End now, with all that runs."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """Kill what is not left to the next daemon, and report that; then end."""
        try:
            if not self._leaving:
                await self.end_all()
            if self._link is not None:
                self._link.send(wire.NodeGoodbye(self._draining or "the daemon ends", not self._leaving))
                self._link.close("the daemon ends")
        finally:
            self._stopping.set()

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_grace_s):
                while self._attempts or self._environments.list():  # noqa: ASYNC110  # it ends in many places
                    await asyncio.sleep(DRAIN_LOOK_S)
        self.stop()

    # --- life

    async def run(self) -> None:
        """Join, and join again, until it is told to end or is unattended for too long.

        Raises Conflict if another daemon has the state directory, Unauthorized if the gateway takes neither its ticket
        nor its key at the first try, InvalidConfig if it is not the gateway that it was told of.
        """
        with _held(self._settings.state_dir):
            self._open()
            try:
                await self._adopt()
                await self._dial_for_ever()
            finally:
                for ending in (self._drainer, self._ending):
                    if ending is not None:
                        ending.cancel()
                if not self._leaving:
                    await self.end_all()
                await self.close()
                await self._runtimes.close()

    async def start(self) -> None:
        """Begin without dialling: links are brought to `serve`."""
        self._open()
        await self._adopt()

    def _open(self) -> None:
        directory, runtimes = self._settings.state_dir, self._runtimes
        self._journal = AttemptJournal(directory)
        self._handlers = HandlerStore(directory / HANDLERS, in_use=runtimes.handlers_in_use)
        self.fitness = NodeFitness(
            directory, self._settings.free_min_bytes, trouble=runtimes.trouble, on_change=self._send
        )
        if runtimes.models is not None:
            runtimes.models.on_change = self._send
        if runtimes.snapshots is not None:
            runtimes.snapshots.on_change = self._report_snapshots

    async def _adopt(self) -> None:
        """Adopt what a daemon before left: sandboxes and their commands; what it left and no sandbox holds, is lost."""
        await self._environments.start()
        self._reported = {facts.trajectory: facts for facts in self._trajectories()}
        resumable = self._environments.resumable()
        for entry in self._journal.entries:
            attempt = self._enter(entry.execute, resumed=True)
            if attempt is None:
                continue
            attempt.begun, attempt.lasting = True, entry.lasting
            is_held = any(each.startswith(attempt.claim) for each in resumable)
            if entry.end is not None and not (is_held and is_session(entry.execute)):
                attempt.end = entry.end
            elif is_held or self._never_started(attempt):
                self._run(attempt)
            else:
                self._conclude(
                    attempt, wire.mislaid("the node's daemon ended while it ran, and with it what it had begun")
                )
        await self._environments.end_unclaimed(self._attempts)
        self._spawn(self._shipper.run())
        self._spawn(self.fitness.watch_for_ever())

    def _never_started(self, attempt: NodeAttempt) -> bool:
        """Return whether a daemon before died after it had written that it begins, and before its first command."""
        kind, trajectory = KINDS.get(attempt.function.runtime), attempt.execute.action.trajectory
        inside = kind is not None and kind.works_in_sandbox and trajectory is not None
        return inside and self._environments.never_started(str(trajectory), attempt.claim)

    @property
    def busy(self) -> bool:
        """Whether anything runs, or has to be reported yet."""
        return bool(self._attempts)

    async def end_all(self) -> None:
        """Kill every attempt and remove every trajectory, and forget both."""
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
        for attempt in self._attempts.values():
            attempt.disowned, attempt.successor = True, None
        await end_chores(*tasks)
        self._forget(*self._attempts.values())
        for facts in self._trajectories():
            await self._runtimes.executor.end_trajectory(facts.trajectory)
        self._reported.clear()

    async def close(self) -> None:
        """Stop. What runs in a sandbox is left as it is, for the next daemon of this directory; idempotent."""
        self._forget_settled()
        self._closing = True
        self._detach()
        for attempt in self._attempts.values():
            attempt.log.paused = True  # what its command says from now on is the next daemon's
        self._environments.keep()
        for attempt in self._attempts.values():
            if attempt.end is None:
                await self._environments.leave(attempt.claim)
        await end_chores(*self._tasks, *self._requests.values())
        await self._transfers.close()
        await self._sessions.close()
        for attempt in self._attempts.values():
            self._to_disk(attempt.log.flush)
        self._write_ends()
        self._journal.close()

    # --- the link

    async def _dial_for_ever(self) -> None:
        wait_s = REDIAL_S
        while not self._stopping.is_set():
            try:
                await self._join()
                wait_s = REDIAL_S
            except (InvalidConfig, Unauthorized):
                if not self.joined.is_set():
                    self._leaving = True  # what an earlier daemon left waits for one that is let in
                    raise
                logger.exception("the gateway refuses this node")
            except (OSError, CodedError, TimeoutError) as error:
                logger.info("the gateway is not to be had", why=str(error) or type(error).__name__)
            if self._clock.now() - self._contact_s > self._settings.unattended_s:
                logger.error("no gateway came: all is ended", seconds=self._settings.unattended_s)
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s * CHANCE.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, REDIAL_MAX_S)

    async def _join(self) -> None:
        """One connection, from its dialling to its end."""
        async with asyncio.timeout(HANDSHAKE_S):
            link = await self._dial()
        try:
            link.send(self._hello())
            welcome = await self._welcomed(link)
            if welcome.key:
                _keep_key(self._settings.state_dir, welcome.key)
            if welcome.fence:
                logger.warning("the gateway had given this node up: all that it has is ended")
                await self.end_all()
            link.settings = replace(link.settings, beat_s=welcome.beat_s, silent_s=welcome.silent_s)
            self.joined.set()
            logger.info("joined", gateway=link.peer, generation=welcome.generation)
            if self._draining:
                link.send(wire.NodeDraining(self._draining))
            why = await self.serve(link)
            logger.info("the link is gone", why=why)
            self._contact_s = self._clock.now()
        finally:
            link.close("the daemon is done with it")

    async def _dial(self) -> wire.NodeLink:
        settings = self._settings
        transport, link = await self._loop.create_connection(
            lambda: wire.NodeLink(clock=self._clock), settings.host, settings.port, ssl=node_side(), server_hostname=""
        )
        peer = transport.get_extra_info("ssl_object")
        if not isinstance(peer, ssl.SSLObject | ssl.SSLSocket) or not shows(peer, settings.fingerprint):
            transport.abort()
            message = f"{settings.host}:{settings.port} shows another certificate than {settings.fingerprint}"
            raise InvalidConfig(
                f"{message}: it is not the gateway, or has a new state directory", component=DAEMON_COMPONENT
            )
        return link

    def _hello(self) -> wire.NodeHello:
        settings = self._settings
        return wire.NodeHello(
            protocol=wire.PROTOCOL,
            version=_version(),
            name=settings.spec.name,
            epoch=self._journal.epoch,
            instance=self._instance,
            ticket=settings.ticket,
            key=_kept_key(settings.state_dir),
            spec=settings.spec,
            labels=dict(settings.spec.labels),
            isolation=settings.isolation,
            draining=bool(self._draining),
            unfit=self.fitness.report.why,
            finishing=self.fitness.report.finishing,
        )

    async def _welcomed(self, link: wire.NodeLink) -> wire.NodeWelcome:
        answer = await link.receive(wire.Message, HANDSHAKE_S)
        match answer:
            case wire.NodeWelcome():
                return answer
            case wire.NodeRefused(code=Unauthorized.code):
                raise Unauthorized(f"the gateway refuses the node: {answer.message}", component=DAEMON_COMPONENT)
            case wire.NodeRefused():
                raise wire.LinkClosed(f"the gateway refuses the node: {answer.message}", component=DAEMON_COMPONENT)
        raise wire.ChannelError(f"a {type(answer).__name__} where a welcome was expected")

    def inventory(self) -> wire.Inventory:
        """Return all that is here."""
        self._forget_settled()
        return wire.Inventory(
            epoch=self._journal.epoch,
            attempts=[
                wire.AttemptFacts(claim=each.claim, begun=each.begun, ended=each.end is not None)
                for each in self._attempts.values()
                if not each.disowned
            ],
            trajectories=self._trajectories(),
        )

    async def serve(self, link: wire.NodeLink) -> str:
        """Send what is here, then do what the gateway asks until the link is gone; return why it is."""
        link.send(self.inventory())
        link.send(self.fitness.report)
        if self._runtimes.models is not None and (models := self._runtimes.models.facts()).services:
            link.send(models)
        self._link = self._shipper.link = link
        try:
            return await link.run(partial(self._handle, link))
        finally:
            self._transfers.detach(link)
            self._sessions.detach(link)
            if self._link is link:
                self._detach()

    def _detach(self) -> None:
        """There is no gateway; everything goes on."""
        self._link = self._shipper.link = None
        self._reports_snapshots = False
        for attempt in self._attempts.values():
            attempt.attached = attempt.end_sent = False
            if not attempt.begun and attempt.go.done():
                attempt.go = self._loop.create_future()  # the next inventory says that it has not begun: it asks again

    def _send(self, message: wire.Message) -> None:
        """Send a message to the gateway, if there is one."""
        if self._link is not None:
            self._link.send(message)

    def _handle(self, link: wire.NodeLink, message: wire.Message) -> None:
        match message:
            case wire.ExecuteAttempt():
                self._execute(message)
            case wire.AttemptPermit():
                self._permit(message)
            case wire.AcknowledgeEnd():
                self._acknowledged(message.claim)
            case wire.AttachAttempt():
                self._attach(message)
            case wire.CancelAttempt():
                self._cancel(message)
            case wire.ResizeAttempt():
                self._resize(message)
            case wire.NodeRequest():
                self._begin_request(message)
            case wire.NodeDraining():
                self.drain(message.why)
            case wire.TransferRequest():
                self._transfers.begin(link, message)
            case wire.TransferPiece() | wire.TransferCredit() | wire.TransferStopped():
                self._transfers.take(message)
            case wire.AttachSession() | wire.SessionCredit():
                self._sessions.take(link, message)
            case _:
                raise wire.ChannelError(f"a {type(message).__name__} to a node")

    # --- requests

    def _begin_request(self, request: wire.NodeRequest) -> None:
        """Do what is asked, once: while it is under way it may be asked again after a cut."""
        if request.number not in self._requests:
            task = asyncio.create_task(self._answer(request), name=f"request {request.verb} {request.name}")
            self._requests[request.number] = task
            task.add_done_callback(lambda _: self._requests.pop(request.number, None))

    async def _answer(self, request: wire.NodeRequest) -> None:
        """Answer on the link that is there at its end."""
        done, body, failure = True, b"", None
        try:
            result = await self._carry_out(request)
            done, body = (result, b"") if isinstance(result, bool) else (True, result)
        except Exception as error:  # noqa: BLE001  # a bug here ends no daemon
            failure = _failure_facts(error, "request", verb=request.verb, name=request.name)
        self._send(wire.NodeAnswer(request.number, failure, done, body))

    async def _carry_out(self, request: wire.NodeRequest) -> bool | bytes:
        """Do what is asked; return whether it is so now, or the body of the answer."""
        name, executor, snapshots = request.name, self._runtimes.executor, self._runtimes.snapshots
        match request.verb:
            case "open":
                await executor.open_trajectory(name, request.task, self._function(request.function))
                self._report_sandbox(name)
            case "end":
                await executor.end_trajectory(name)
                self._report_sandbox(name)
            case "prepare":
                await self._prepare(self._function(request.function))
            case "replicate":
                function, chunk = self._function(request.function), request.chunk
                return chunk is not None and await executor.replicate(function, name, "", chunk)
            case "choose":
                self._environments.choose(name, msgspec.json.decode(request.body, type=SandboxSpec))
            case "has_handler":
                return await self._handlers.has(name)
            case "input":
                return await self._sessions.input(name, request.body)
            case "withdraw":
                number, offset = msgspec.msgpack.decode(request.body, type=tuple[int, int])
                if (task := self._requests.get(number)) is not None:
                    task.cancel()
                    await asyncio.wait([task])
                return self._sessions.input_state(name, offset)
            case "control":
                await self._sessions.control(name, request.number, request.body)
            case "snapshot" if snapshots is not None:
                await self._take_snapshot(name, request.body)
            case "snapshots" if snapshots is not None:
                self._reports_snapshots = True
                self._report_snapshots()
            case "drop_snapshot" if snapshots is not None:
                await snapshots.give_up(name)
            case _:
                raise Unsupported(f"this node knows no request {request.verb!r}", component=wire.COMPONENT)
        return True

    async def _prepare(self, function: FunctionSpec) -> None:
        models = self._runtimes.models
        if models is not None:
            models.check(function)
        async with self._handlers.held(function):
            await self._runtimes.prepare(function)
        if models is not None:
            await models.prepared(function)

    async def _take_snapshot(self, trajectory: str, body: bytes) -> None:
        try:
            order = msgspec.json.decode(body, type=wire.SnapshotOrder)
            id = convert(order.id, SnapshotId)
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"no order of a snapshot: {error}", component=wire.COMPONENT) from None
        await self._environments.snapshot(trajectory, id=id, spared=order.spared)
        self._reports_snapshots = True
        self._report_snapshots()  # before the answer, whatever was sent on an earlier link

    def _report_snapshots(self) -> None:
        if self._reports_snapshots and self._runtimes.snapshots is not None:
            self._send(wire.SnapshotsKept(self._runtimes.snapshots.all()))

    # --- functions

    def _function(self, data: bytes) -> FunctionSpec:
        """Return a function that travelled as it is here; raises InvalidConfig for one of another version."""
        known = self._functions.get(data)
        if known is None:
            try:
                kind = KINDS.get(msgspec.json.decode(data, type=_FunctionKind).runtime)
                known = self._handlers.placed(wire.read_function(data, FunctionSpec if kind is None else kind.function))
            except (wire.ChannelError, msgspec.MsgspecError) as error:
                raise InvalidConfig(f"{error}; upgrade the node", component=wire.COMPONENT) from None
            while len(self._functions) >= FUNCTIONS_MAX:
                del self._functions[next(iter(self._functions))]
            self._functions[data] = known
        return known

    # --- attempts

    def _execute(self, execute: wire.ExecuteAttempt) -> None:
        if execute.claim in self._settled:
            self._forget_settled()
        known = self._attempts.get(execute.claim)
        if known is not None and not known.disowned:
            known.attached = True
            self._report_again(known, 0)
        elif known is not None:
            known.successor = execute
        elif (attempt := self._enter(execute)) is not None:
            attempt.attached = True
            self._run(attempt)

    def _enter(self, execute: wire.ExecuteAttempt, *, resumed: bool = False) -> NodeAttempt | None:
        """Make room for an attempt; one that cannot be had ends at once."""
        claim = execute.claim
        try:
            function = self._function(execute.function)
            if len(self._attempts) >= ATTEMPTS_MAX:
                raise StorageUnavailable(f"the node has {ATTEMPTS_MAX} attempts", component=wire.COMPONENT)
            more = partial(self._log_grew, claim)
            log = LogSpool(self._journal, claim, function.log_limit_bytes, more, resumed=resumed)
        except (OSError, StorageUnavailable, InvalidConfig) as error:
            if isinstance(error, OSError):
                self.fitness.refused(error)
            refused = Outcome(
                state=State.FAILED,
                reason=Reason.ENVIRONMENT_LOST,
                message=f"the node cannot take it: {error}",
                component=wire.COMPONENT,
                detail={} if isinstance(error, InvalidConfig) else {NOT_BEGUN: True},
            )
            self._send(wire.end_of(claim, refused, 0))
            return None
        attempt = NodeAttempt(execute=execute, function=function, log=log)
        self._attempts[claim] = attempt
        return attempt

    def _run(self, attempt: NodeAttempt) -> None:
        input = wire.unpack_object(attempt.execute.input)
        self._sessions.begin(attempt.claim, attempt.execute.action, attempt.execute.invocation_id, input)
        attempt.task = self._loop.create_task(self._work_on(attempt, input))
        self._tasks.add(attempt.task)
        attempt.task.add_done_callback(partial(self._worked, attempt))

    async def _work_on(self, attempt: NodeAttempt, input: Mapping[str, object]) -> None:
        execute, function = attempt.execute, attempt.function
        call = Call(
            function=function,
            input=input,
            log=attempt.log,
            traceparent=execute.traceparent,
            tracestate=execute.tracestate,
            invocation_id=execute.invocation_id,
            hooks=_AttemptHooks(self, attempt),
        )
        try:
            kind = KINDS.get(function.runtime)
            async with nullcontext() if function.handler is None else self._handlers.held(function):
                if not attempt.begun and (kind is None or not kind.works_in_sandbox):
                    await self.commit_begin(attempt)  # its runtime does not ask
                outcome = await self._runtimes.executor.execute(execute.action, execute.lease, call)
        except CodedError as error:
            outcome = wire.failed(error)
        except asyncio.CancelledError:
            outcome = Outcome(
                state=State.CANCELLED, reason=Reason.CANCELLED, message="cancelled", component=wire.COMPONENT
            )
        if not self._closing:
            self._conclude(attempt, outcome)

    def _worked(self, attempt: NodeAttempt, task: asyncio.Task[None]) -> None:
        """Its task is over: it has an end, even if it was cancelled before its first step or met a bug."""
        self._tasks.discard(task)
        state, reason, message = State.CANCELLED, Reason.CANCELLED, "cancelled"
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an attempt failed on the node", claim=attempt.claim, exc_info=error)
            state, reason, message = State.FAILED, Reason.INTERNAL, f"the node failed: {error!r}"
        if attempt.end is None and not self._closing:
            self._conclude(attempt, Outcome(state=state, reason=reason, message=message, component=wire.COMPONENT))

    async def commit_begin(self, attempt: NodeAttempt) -> bool:
        """Ask whether it may begin, and write down that it does; every command outlives the daemon.

        Raises ActionFailed if it may not.
        """
        if attempt.begun:
            return True  # by its first command, or under a daemon before
        attempt.asking = True
        if attempt.attached and not attempt.go.done():
            self._send(wire.AttemptReady(attempt.claim))
        while not attempt.go.done():  # another one takes its place if the link goes
            await attempt.go
        go = attempt.go.result()
        attempt.asking = False
        if go.refusal is not None:
            raise wire.as_failure(wire.error_of(go.refusal))
        try:
            self._journal.begin(attempt.execute, lasting=go.lasting)
        except OSError as error:
            self.fitness.refused(error)
            message = f"the node cannot write down that it begins: {error}"
            raise ActionFailed(
                Reason.ENVIRONMENT_LOST,
                message,
                component=wire.COMPONENT,
                retry_after_s=5.0,
                detail={NOT_BEGUN: True},
            ) from error
        attempt.begun, attempt.lasting = True, go.lasting
        self._report_sandbox(attempt.execute.action.trajectory)
        return True

    def _permit(self, go: wire.AttemptPermit) -> None:
        """It may begin, perhaps before it asks; or its caller has gone, and it outlives him."""
        attempt = self._attempts.get(go.claim)
        if attempt is None:
            return
        if not attempt.begun:
            if attempt.go.done():
                attempt.go = self._loop.create_future()
            attempt.go.set_result(go)
        elif attempt.end is None and go.refusal is None and attempt.lasting != go.lasting:
            attempt.lasting = go.lasting
            self._to_disk(partial(self._journal.set_lasting, go.claim, go.lasting))

    def started(self, attempt: NodeAttempt) -> None:
        """Report that the attempt's work begins."""
        attempt.running = True
        self._shipper.more(attempt)

    def _conclude(self, attempt: NodeAttempt, outcome: Outcome) -> None:
        """It has ended, once and for all."""
        attempt.asking = False
        most_bytes = wire.LinkSettings().frame_max_bytes if self._link is None else self._link.settings.frame_max_bytes
        end = wire.end_of(attempt.claim, outcome, attempt.log.omitted_bytes)
        if len(end.result) + len(end.detail) > most_bytes - wire.HANDSHAKE_BYTES:
            end = wire.end_of(attempt.claim, wire.oversized(outcome, len(end.result)), attempt.log.omitted_bytes)
        attempt.end = end
        self._sessions.ended(attempt.claim)
        self._report_sandbox(attempt.execute.action.trajectory)
        self._to_disk(attempt.log.flush)
        if not attempt.disowned:
            self._shipper.more(attempt, at_once=True)
        if attempt.begun:  # behind the sending: nobody waits for the disk, and ends of one turn are one write
            if not self._ends:
                self._loop.call_soon(self._write_ends)
            self._ends.append(end)
        if attempt.disowned:
            self._forget(attempt)

    def _session_ended(self, claim: str) -> None:
        """All of a session's output is sent: its end may follow."""
        attempt = self._attempts.get(claim)
        if attempt is not None:
            self._shipper.more(attempt, at_once=True)

    def _log_grew(self, claim: str) -> None:
        attempt = self._attempts.get(claim)
        if attempt is not None:
            self._shipper.more(attempt)

    def _attach(self, message: wire.AttachAttempt) -> None:
        attempt = self._attempts.get(message.claim)
        if attempt is not None:
            attempt.attached = True
            self._report_again(attempt, message.log_offset)

    def _report_again(self, attempt: NodeAttempt, log_offset: int) -> None:
        """Send the gateway what it has not received."""
        attempt.sent_bytes, attempt.start_sent, attempt.end_sent = min(log_offset, attempt.log.end), False, False
        if attempt.asking and not attempt.go.done():
            self._send(wire.AttemptReady(attempt.claim))
        self._shipper.more(attempt, at_once=True)

    def _cancel(self, message: wire.CancelAttempt) -> None:
        attempt = self._attempts.get(message.claim)
        if attempt is None:
            return
        attempt.successor = None
        attempt.disowned = attempt.disowned or message.disowned
        if attempt.end is not None:
            if attempt.disowned:
                self._forget(attempt)
        elif attempt.task is not None:
            attempt.task.cancel()

    def _resize(self, message: wire.ResizeAttempt) -> None:
        attempt = self._attempts.get(message.claim)
        if attempt is not None and attempt.end is None:
            self._spawn(self._runtimes.executor.resize(attempt.execute.action, message.lease))

    def _acknowledged(self, claim: str) -> None:
        attempt = self._attempts.get(claim)
        if attempt is not None and attempt.end is not None:
            self._settled[claim] = attempt
            if self._settling is None:
                self._settling = self._loop.call_later(wire.PATIENCE_S, self._forget_settled)

    def _forget_settled(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        if not self._closing:
            self._forget(*self._settled.values())

    def _forget(self, *attempts: NodeAttempt) -> None:
        """Keep nothing of them: here, in the journal, and then in their sandboxes.

        What a disk that refuses still has in the journal is tried again: were it forgotten in its sandbox alone, the
        next daemon would take it for one that never started.
        """
        self._write_ends()
        if attempts and not self._to_disk(partial(self._journal.forget, [attempt.claim for attempt in attempts])):
            self._settled |= {attempt.claim: attempt for attempt in attempts}
            if self._settling is None:
                self._settling = self._loop.call_later(FITNESS_LOOK_S, self._forget_settled)
            return
        for attempt in attempts:
            del self._attempts[attempt.claim]
            self._settled.pop(attempt.claim, None)
            self._sessions.forget(attempt.claim)
            self._shipper.forget(attempt)
            attempt.log.paused = True
            self._environments.acknowledge(attempt.execute.action.trajectory, attempt.claim)
            if attempt.successor is not None:
                self._execute(attempt.successor)

    def _write_ends(self) -> None:
        ends, self._ends = self._ends, []
        if ends:
            self._to_disk(partial(self._journal.end, ends))

    def _to_disk(self, write: Callable[[], None]) -> bool:
        """Write; return False where the disk refuses, which costs what a crash would cost, and nothing else."""
        try:
            write()
        except OSError as error:
            logger.error("the node's disk refuses", why=str(error))
            self.fitness.refused(error)
            return False
        return True

    # --- sandboxes

    def _trajectories(self) -> list[wire.TrajectoryFacts]:
        """Return every trajectory that has a sandbox."""
        names = [str(each["trajectory"]) for each in self._environments.list()]
        return [
            _sandbox_facts(name, sandbox) for name in names if (sandbox := self._environments.get(name)) is not None
        ]

    def _files(self, trajectory: str) -> SandboxFiles | None:
        sandbox = self._environments.get(trajectory)
        return None if sandbox is None else LocalFiles(sandbox)

    def _report_sandbox(self, trajectory: str | None) -> None:
        """Report a trajectory's sandbox, if it is another one than was reported, or none any more."""
        if trajectory is None:
            return
        reported, sandbox = self._reported.get(trajectory), self._environments.get(trajectory)
        if sandbox is None:
            if self._reported.pop(trajectory, None) is not None:
                self._send(wire.SandboxChanged(wire.TrajectoryFacts(trajectory=trajectory)))
        elif reported is None or (reported.sandbox, reported.alive) != (sandbox.id, sandbox.alive):
            facts = self._reported[trajectory] = _sandbox_facts(trajectory, sandbox)
            self._send(wire.SandboxChanged(facts))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _sandbox_facts(trajectory: str, sandbox: Sandbox) -> wire.TrajectoryFacts:
    spec = sandbox.spec
    return wire.TrajectoryFacts(
        trajectory=trajectory,
        sandbox=sandbox.id,
        image=spec.image,
        workdir=spec.workdir,
        user=spec.user,
        network=spec.network.value,
        memory_bytes=spec.memory_bytes,
        alive=sandbox.alive,
    )


@contextmanager
def _held(state_dir: Path) -> Iterator[None]:
    """Hold a state directory for one daemon, and write down whose process that is."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageUnavailable(f"{state_dir} cannot be used: {error}", component=DAEMON_COMPONENT) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"another daemon has the state directory {state_dir}; give each its own --state-dir"
            raise Conflict(message, component=DAEMON_COMPONENT) from None
        (state_dir / PID).write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        os.close(descriptor)


def _keep_key(state_dir: Path, key: str) -> None:
    """Write down what admits this node from now on; only its owner can read it."""
    part = state_dir / f"{KEY}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    part.replace(state_dir / KEY)


def _kept_key(state_dir: Path) -> str:
    try:
        return (state_dir / KEY).read_text(encoding="ascii")
    except OSError:
        return ""


def _version() -> str:
    try:
        return version("tangram-gateway")
    except PackageNotFoundError:
        return "unknown"
