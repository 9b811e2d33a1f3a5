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
import struct
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import structlog
from msgspec import convert

from manager.action import Action, Outcome, State
from manager.clock import Clock, MonotonicClock
from manager.config import NodeSpec, ServiceSpec
from manager.errors import (
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
from manager.function import FunctionSpec, SandboxSpec, Setting
from runtimes.kinds import KINDS
from runtimes.model.runtime import ModelRuntime
from runtimes.node.certificate import node_side, shows
from runtimes.node.protocol import (
    ARCHIVE_COMPONENT,
    ARCHIVE_MAX_BYTES,
    COMPONENT,
    GREETING_BYTES,
    HEADER,
    PATIENCE_S,
    PROTOCOL,
    AcknowledgeEnd,
    AttachAttempt,
    AttachSession,
    AttemptBegins,
    AttemptEnd,
    AttemptFacts,
    AttemptGo,
    AttemptLog,
    AttemptStarted,
    CancelAttempt,
    ChannelError,
    DefineFunction,
    ErrorFacts,
    ExecuteAttempt,
    FilesAsk,
    FilesEnded,
    FilesOpened,
    FilesPiece,
    FilesStop,
    FilesTaken,
    FilesVerb,
    FileTransfer,
    FitnessChanged,
    Inventory,
    LinkClosed,
    LinkSettings,
    LinkStream,
    Message,
    ModelsChanged,
    NodeAnswer,
    NodeDraining,
    NodeGoodbye,
    NodeHello,
    NodeLink,
    NodeRefused,
    NodeRequest,
    NodeWelcome,
    ResizeAttempt,
    SandboxChanged,
    SessionOpened,
    SessionRoom,
    SessionSaid,
    SessionSteered,
    SessionTold,
    SessionTyped,
    SnapshotOrder,
    SnapshotsKept,
    Spool,
    SteerSession,
    TrajectoryFacts,
    TypeToSession,
    as_failure,
    decode,
    digest_of,
    encode,
    end_of,
    error_of,
    facts_of,
    failed,
    mislaid,
    oversized,
    read_function,
    unpack_object,
)
from runtimes.sandbox.archiver import Refused
from runtimes.sandbox.disk import REMEDY, shortage_of
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import terminal_of
from runtimes.sandbox.files import LocalFiles, SandboxFiles, unpack_tree
from runtimes.sandbox.handler.sources import SOURCES_LIMIT_BYTES
from runtimes.sandbox.session import InteractiveSession, SessionPiece, SessionTable, TerminalSize
from tangram.types import SnapshotId


@dataclass(slots=True, kw_only=True, eq=False)
class NodeAttempt:
    """What an agent keeps of an attempt, from its arrival until its end is acknowledged."""

    execute: ExecuteAttempt
    function: FunctionSpec
    #: The same as it travelled.
    function_bytes: bytes
    spool: Spool
    task: asyncio.Task[None] | None = None
    #: Done once the gateway has said whether it may begin.
    go: asyncio.Future[AttemptGo] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    #: Whether it stands ready and asks; whether it may have begun; whether its work runs, since when.
    asking: bool = False
    begun: bool = False
    began_s: float | None = None
    lasting: bool = False
    end: AttemptEnd | None = None
    #: Whether the gateway listens on the present link; what it has heard on it: that the work runs, how much of the
    #: log, the end.
    attached: bool = False
    began_told: bool = False
    told_bytes: int = 0
    end_told: bool = False
    #: Whether nobody waits for its end.
    disowned: bool = False
    #: What is to be begun in its place, once it is gone.
    successor: ExecuteAttempt | None = None

    @property
    def claim(self) -> str:
        return self.execute.claim


def spool_name(claim: str) -> str:
    """Return the name of the file that keeps its log."""
    return quote(claim.rstrip("/"), safe="")


def is_session(execute: ExecuteAttempt) -> bool:
    """Return whether its output is a session's, which no spool holds."""
    return "session" in unpack_object(execute.input)


# The journal: which attempts have begun on this node and how they ended, until the gateway has that on record.
#
# An attempt is written down before it begins and when it has ended; so no daemon of this state directory begins it
# again, and its end is told by the next one if this one is killed. Each record has its length and a checksum: one that
# was torn by a kill ends the reading. What a kill of the daemon leaves is in the kernel's hands; what a crash of the
# machine leaves is not trusted (`epoch`).

SUM = struct.Struct(">I")
NAME = "journal"
#: Beside it: the life of the state directory.
EPOCH = "epoch"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """The bounds of a journal."""

    #: Bytes from which on it is written anew with what still counts, and again at each doubling.
    compact_bytes: Annotated[int, Setting(ge=2**10)] = 16 * 2**20


@dataclass(slots=True)
class JournalEntry:
    """What is known of one attempt."""

    execute: ExecuteAttempt
    lasting: bool
    end: AttemptEnd | None = None


class AttemptJournal:
    """Appends to the file in a directory; read once, at the beginning. Raises OSError where the disk refuses."""

    def __init__(self, directory: Path, settings: JournalSettings | None = None) -> None:
        self._path = directory / NAME
        self._settings = settings or JournalSettings()
        #: What is known: functions by digest as they travelled, attempts by claim.
        self.functions: dict[str, bytes] = {}
        self.attempts: dict[str, JournalEntry] = {}
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size_bytes = self._read()
        self._compact_at = self._settings.compact_bytes

    def begun(self, execute: ExecuteAttempt, function: bytes, *, lasting: bool) -> None:
        """An attempt is about to begin: whatever happens, it does not begin again."""
        if execute.function not in self.functions:
            self._append(DefineFunction(execute.function, function))
        self._write(_record(execute) + _record(AttemptGo(execute.claim, lasting, None)))
        self.attempts.setdefault(execute.claim, JournalEntry(execute, lasting=False)).lasting = lasting
        self._keep_short()

    def lasting(self, claim: str, lasting: bool) -> None:
        """It outlives its caller, or does not."""
        self._append(AttemptGo(claim, lasting, None))

    def ended(self, *ends: AttemptEnd) -> None:
        """Attempts have ended."""
        self._append(*ends)

    def acknowledged(self, *claims: str) -> None:
        """Their ends are on record elsewhere."""
        self._append(*map(AcknowledgeEnd, claims))

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, *messages: Message) -> None:
        self._write(b"".join(map(_record, messages)))
        for message in messages:
            self._note(message)
        self._keep_short()

    def _write(self, data: bytes) -> None:
        place = self._size_bytes
        while data:  # at its own place: what a full disk took of it is written over by the next
            written = os.pwrite(self._fd, data, place)
            place, data = place + written, data[written:]
        self._size_bytes = place

    def _keep_short(self) -> None:
        if self._size_bytes > self._compact_at:
            self._compact()

    def _note(self, message: Message) -> None:
        attempts = self.attempts
        match message:
            case DefineFunction():
                self.functions[message.digest] = message.function
            case ExecuteAttempt():
                attempts.setdefault(message.claim, JournalEntry(message, lasting=False))
            case AttemptGo() if message.claim in attempts:
                attempts[message.claim].lasting = message.lasting
            case AttemptEnd() if message.claim in attempts:
                attempts[message.claim].end = message
            case AcknowledgeEnd():
                attempts.pop(message.claim, None)

    def _read(self) -> int:
        """Read what is whole, and cut off the rest."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        place = 0
        while len(data) - place >= SUM.size + HEADER.size:
            (wanted,) = SUM.unpack_from(data, place)
            size_bytes, kind = HEADER.unpack_from(data, place + SUM.size)
            begin = place + SUM.size + HEADER.size
            frame = data[place + SUM.size : begin + size_bytes]
            if begin + size_bytes > len(data) or zlib.crc32(frame) != wanted:
                break
            try:
                self._note(decode(kind, data[begin : begin + size_bytes]))
            except ChannelError:
                break
            place = begin + size_bytes
        os.ftruncate(self._fd, place)
        return place

    def _compact(self) -> None:
        """Write a new file with what still counts, and take it in place of the old one."""
        used = {entry.execute.function for entry in self.attempts.values()}
        self.functions = {digest: data for digest, data in self.functions.items() if digest in used}
        messages: list[Message] = [DefineFunction(digest, data) for digest, data in self.functions.items()]
        for entry in self.attempts.values():
            messages += [entry.execute, AttemptGo(entry.execute.claim, entry.lasting, None)]
            messages += [] if entry.end is None else [entry.end]
        data = b"".join(_record(message) for message in messages)
        part = self._path.with_suffix(".part")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            part.replace(self._path)
        except OSError:
            os.close(fd)
            self._compact_at = 2 * self._size_bytes  # the old one goes on
            return
        os.close(self._fd)
        self._fd, self._size_bytes = fd, len(data)
        self._compact_at = max(self._settings.compact_bytes, 2 * len(data))


def epoch(directory: Path, boot_id: Path = BOOT_ID) -> str:
    """Return which life of a state directory this is: the same until the machine starts anew, or the directory does."""
    place = directory / EPOCH
    try:
        born = place.read_text(encoding="ascii")
    except FileNotFoundError:
        born = secrets.token_hex(8)
        place.write_text(born, encoding="ascii")
    return f"{boot_id.read_text(encoding='ascii').strip()}/{born}"


def _record(message: Message) -> bytes:
    frame = encode(message)
    return SUM.pack(zlib.crc32(frame)) + frame


# The log shipper tells a gateway of attempts: that each runs, their logs in turn, no faster than it takes them, and
# each end last.
#
# What is not urgent waits a moment: of a short attempt all is told at once, with its end, and its gateway wakes up
# once.

logger = structlog.get_logger("node")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogShipperSettings:
    """How logs travel."""

    wait_s: Annotated[float, Setting("seconds for which a log waits for more before it is sent", ge=0)] = 0.02
    piece_bytes: Annotated[int, Setting("of a log, sent at once; so much does not wait", ge=1)] = 16 * 2**10
    unsent_bytes: Annotated[int, Setting("unsent bytes of the link beyond which logs wait", ge=1)] = 2**20


class LogShipper:
    """Which attempts have something to say, in the order in which it is said."""

    def __init__(self, settings: LogShipperSettings, owes: Callable[[str], bool]) -> None:
        """``owes``: whether there is more than a log to be told before the end of a claim's attempt."""
        self._settings = settings
        self._owes = owes
        self._loop = asyncio.get_running_loop()
        #: Where it is said; None while there is nobody.
        self.link: NodeLink | None = None
        self._talking: dict[str, NodeAttempt] = {}
        self._talk = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def more(self, attempt: NodeAttempt, *, at_once: bool = False) -> None:
        """There is something to tell, which waits a moment for more of it."""
        if not attempt.attached:
            return
        link = self.link
        if at_once and link is not None and self._has_room(link):
            self._talking.pop(attempt.claim, None)
            if not self._tell(attempt, link):
                return
        self._talking[attempt.claim] = attempt
        if at_once or attempt.spool.end - attempt.told_bytes >= self._settings.piece_bytes:
            self._talk.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._settings.wait_s, self._now)

    def forget(self, attempt: NodeAttempt) -> None:
        """Nothing more is told of it."""
        self._talking.pop(attempt.claim, None)

    def _now(self) -> None:
        self._timer = None
        if self._talking:
            self._talk.set()

    def _has_room(self, link: NodeLink) -> bool:
        return not link.closed.is_set() and link.unsent_bytes <= self._settings.unsent_bytes

    async def run(self) -> None:
        """Tell until it is cancelled."""
        while True:
            await self._talk.wait()
            self._talk.clear()
            while self._talking and (link := self.link) is not None and not link.closed.is_set():
                claim = next(iter(self._talking))
                attempt = self._talking.pop(claim)
                if attempt.attached and self._tell(attempt, link):
                    self._talking[claim] = attempt  # its next piece comes after those of the others
                if not self._has_room(link):
                    await link.drained()

    def _piece(self, attempt: NodeAttempt, spool: Spool) -> bytes:
        """Return what of a log is told next; one that cannot be read is left out."""
        try:
            spool.flush()  # a place that was told must mean the same to the next daemon, which reads it from the file
            return spool.read(attempt.told_bytes, self._settings.piece_bytes)
        except OSError as error:
            logger.error("a spool cannot be read", claim=attempt.claim, why=str(error))
            spool.omit(spool.end - attempt.told_bytes)
            attempt.told_bytes = spool.end
            return b""

    def _tell(self, attempt: NodeAttempt, link: NodeLink) -> bool:
        """Send that it runs, a piece of its log, or its end behind the last one; return whether there is more."""
        spool = attempt.spool
        if attempt.began_s is not None and not attempt.began_told:
            attempt.began_told = True
            link.send(AttemptStarted(attempt.claim))
        if attempt.told_bytes < spool.end:
            piece = self._piece(attempt, spool)
            if piece:
                link.send(AttemptLog(attempt.claim, attempt.told_bytes, piece))
                attempt.told_bytes += len(piece)
            if attempt.told_bytes < spool.end:
                return bool(piece)
        if attempt.end is not None and not attempt.end_told and not self._owes(attempt.claim):
            attempt.end_told = True
            spool.sent(attempt.told_bytes)
            link.send(attempt.end)
        return False


class NodeSandboxes:
    """The sandboxes of this machine, and what of them the gateway was told."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        #: The sessions in them.
        self.sessions = environments.sessions
        self._told: dict[str, TrajectoryFacts] = {}
        #: Called with what has changed of a trajectory's sandbox.
        self.on_change: Callable[[TrajectoryFacts], None] = lambda facts: None

    async def start(self) -> None:
        """Adopt what a daemon before left."""
        await self._environments.start()
        self._told = {facts.trajectory: facts for facts in self.facts()}

    def resumable(self) -> Collection[str]:
        """Return the claims of the commands that can be taken over."""
        return self._environments.resumable().keys()

    def never_started(self, trajectory: str, claims: str) -> bool:
        """Return whether it is certain that no command of an attempt was started in a trajectory's sandbox."""
        return self._environments.never_started(trajectory, claims)

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        """End the commands whose claims begin with none of these."""
        await self._environments.end_unclaimed(taken)

    def facts(self) -> list[TrajectoryFacts]:
        """Return every trajectory that has a sandbox."""
        names = [str(each["trajectory"]) for each in self._environments.list()]
        return [self._facts(name) for name in names]

    def _facts(self, trajectory: str) -> TrajectoryFacts:
        sandbox = self._environments.get(trajectory)
        if sandbox is None:
            return TrajectoryFacts(trajectory=trajectory)
        spec = sandbox.spec
        return TrajectoryFacts(
            trajectory=trajectory,
            sandbox=sandbox.id,
            image=spec.image,
            workdir=spec.workdir,
            user=spec.user,
            network=spec.network.value,
            memory_bytes=spec.memory_bytes,
            alive=sandbox.alive,
        )

    def files(self, trajectory: str) -> SandboxFiles | None:
        """Return the files of a trajectory's sandbox, if it has one."""
        sandbox = self._environments.get(trajectory)
        return None if sandbox is None else LocalFiles(sandbox)

    def look(self, trajectory: str) -> None:
        """See whether a trajectory's sandbox is another one than was told, and tell it."""
        told, sandbox = self._told.get(trajectory), self._environments.get(trajectory)
        if told is not None and sandbox is not None and (told.sandbox, told.alive) == (sandbox.id, sandbox.alive):
            return  # one and the same sandbox stays as it was made
        facts = self._facts(trajectory)
        if self._told.get(trajectory) == facts or (not facts.sandbox and trajectory not in self._told):
            return
        if facts.sandbox:
            self._told[trajectory] = facts
        else:
            del self._told[trajectory]
        self.on_change(facts)

    def acknowledge(self, trajectory: str | None, claim: str) -> None:
        """The end of an attempt is on record."""
        self._environments.acknowledge(trajectory, claim)

    def mark_lost(self, trajectories: Collection[str]) -> None:
        """The next action of each is told that its sandbox was lost."""
        self._environments.mark_lost(trajectories)

    def choose(self, trajectory: str, spec: SandboxSpec) -> None:
        """A trajectory's sandbox is made so whenever it is made anew."""
        self._environments.choose(trajectory, spec)

    async def leave(self, claims: Iterable[str]) -> None:
        """Leave the sandboxes, and the attempts that run in them, to the next daemon."""
        self._environments.keep()
        for claim in claims:
            await self._environments.leave(claim)


class _ServedTransfer(FileTransfer):
    """One transfer that is under way."""

    task: asyncio.Task[None] | None = None


class ServedTransfers:
    """The transfers of one node; each ends with the link on which it was asked for."""

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

    def take(self, message: FilesPiece | FilesTaken | FilesStop) -> None:
        """Take what the gateway says of a transfer, unless that has ended; raises ChannelError."""
        transfer = self._transfers.get(message.transfer)
        if transfer is not None:
            if isinstance(message, FilesStop):
                self._stop(transfer)
            else:
                transfer.take(message)

    def detach(self, link: NodeLink) -> None:
        """The link is gone: its transfers end."""
        for transfer in list(self._transfers.values()):
            if transfer.link is link:
                self._stop(transfer)

    async def close(self) -> None:
        """End them all, and wait until they have."""
        for transfer in list(self._transfers.values()):
            self._stop(transfer)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def begin(self, link: NodeLink, ask: FilesAsk) -> None:
        """Begin a transfer, or refuse it; raises ChannelError for one that is under way."""
        if ask.transfer in self._transfers:
            raise ChannelError(f"transfer {ask.transfer} was asked for twice")
        if len(self._transfers) >= link.settings.transfers_max:
            told = f"the node has {len(self._transfers)} transfers of files under way (cluster.transfers_max)"
            refusal = facts_of(CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0))
            link.send(FilesEnded(ask.transfer, refusal, 0, b""))
            return
        transfer = self._transfers[ask.transfer] = _ServedTransfer(ask, link)
        transfer.task = asyncio.create_task(self._serve(transfer), name=f"{ask.verb} {ask.trajectory}:{ask.path}")
        self._ending.add(transfer.task)
        transfer.task.add_done_callback(self._ending.discard)

    def _stop(self, transfer: _ServedTransfer) -> None:
        self._transfers.pop(transfer.ask.transfer, None)
        if transfer.task is not None:
            transfer.task.cancel()

    async def _serve(self, transfer: _ServedTransfer) -> None:
        ask, failure, size_bytes, entries = transfer.ask, None, 0, b""
        try:
            if ask.verb is FilesVerb.HANDLER:
                size_bytes = await self._take_handler(ask.path, transfer.chunks())
            else:
                size_bytes, entries = await self._with_sandbox(transfer)
        except CodedError as error:
            failure = facts_of(error)
        except Exception as error:  # told to the gateway: a bug here ends no daemon
            logger.exception("a transfer failed", verb=ask.verb, trajectory=ask.trajectory, path=ask.path)
            failure = facts_of(CodedError(f"the node failed: {error!r}", component=COMPONENT))
        self._transfers.pop(ask.transfer, None)
        transfer.link.send(FilesEnded(ask.transfer, failure, size_bytes, entries))

    async def _with_sandbox(self, transfer: _ServedTransfer) -> tuple[int, bytes]:
        """Do what is asked with the files of a sandbox; return the bytes that were written, and its entries."""
        ask = transfer.ask
        files = self._files(ask.trajectory)
        if files is None:
            raise NotFound(f"trajectory {ask.trajectory!r} has no sandbox", component=COMPONENT)
        if ask.verb is FilesVerb.LIST:
            entries = msgspec.msgpack.encode(await files.list(ask.path, user=ask.user))
            if len(entries) > transfer.link.settings.frame_max_bytes - GREETING_BYTES:
                told = f"the entries of {ask.path!r} are more than a frame of the channel holds"
                raise TooLarge(told, component=COMPONENT)
            return 0, entries
        if ask.verb.inward:
            return await self._put(files, transfer), b""
        await self._get(files, transfer)
        return 0, b""

    async def _put(self, files: SandboxFiles, transfer: _ServedTransfer) -> int:
        ask, chunks = transfer.ask, transfer.chunks()
        if ask.verb is FilesVerb.WRITE:
            return await files.write(ask.path, chunks, mode=ask.mode, user=ask.user)
        return await files.unpack(ask.path, chunks, limit_bytes=ask.limit_bytes, user=ask.user)

    async def _get(self, files: SandboxFiles, transfer: _ServedTransfer) -> None:
        ask = transfer.ask
        if ask.verb is FilesVerb.READ:
            async with files.open(ask.path, limit_bytes=ask.limit_bytes, user=ask.user) as file:
                transfer.link.send(FilesOpened(ask.transfer, file.size_bytes))
                await transfer.send(file.chunks())
        else:
            archive = files.pack(ask.path, limit_bytes=ask.limit_bytes, user=ask.user, base=ask.base)
            async with archive as chunks:
                transfer.link.send(FilesOpened(ask.transfer, None))
                await transfer.send(chunks)


# A node's side: it looks at its disk and its sandboxes, and says when nothing can begin there and when it can again.
#
# An attempt is written down before it begins: on a disk that takes nothing none can. A disk is found short by what is
# free of it, before anything fails, and by a write that it refused, until it takes one. Where no sandbox can be made,
# as the Docker engine is gone, nothing new can begin, and what lives there goes on: without a word of it such a node
# looks the emptiest of all, and draws what comes.

#: Beyond its bound so much more must be free before a node is fit again: what is at the bound would come and go.
AGAIN = 1.25
#: A disk that has refused is tried with so many bytes, more than a beginning writes.
TRIAL_BYTES = 64 * 2**10
TRIAL = "trial"

#: Says why no sandbox can be made now, and what mends that; empty if one can.
Trouble = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitnessSettings:
    """What a node needs of its disk, and how often it looks at that and at its sandboxes."""

    look_s: Annotated[float, Setting("seconds between two looks", gt=0)] = 1.0
    free_min_bytes: Annotated[int, Setting("free bytes of the state directory below which nothing begins", ge=0)] = (
        32 * 2**20
    )


class NodeFitness:
    """Whether anything can begin on this node. Use from one event loop."""

    def __init__(
        self, directory: Path, settings: FitnessSettings | None = None, *, trouble: Trouble | None = None
    ) -> None:
        self._directory = directory
        self._settings = settings or FitnessSettings()
        #: Why nothing can begin; empty if anything can.
        self.why = ""
        #: Why no sandbox can be made; empty if one can, as far as is known.
        self.newcomers = ""
        self._trouble = trouble
        #: The last refusal of a write, until the disk takes one.
        self._refusal = ""
        #: Called when it turns.
        self.on_change: Callable[[FitnessChanged], None] = lambda changed: None
        self.look()

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
        """See how it is now, and tell it if it has turned."""
        self._turn(self._found(), self.newcomers)

    async def _watch_disk(self) -> None:
        while True:
            await asyncio.sleep(self._settings.look_s)
            self.look()

    async def _watch_sandboxes(self, trouble: Trouble) -> None:
        while True:
            await asyncio.sleep(self._settings.look_s)
            self._turn(self.why, await trouble())

    def _turn(self, why: str, newcomers: str) -> None:
        was = bool(self.why), bool(self.newcomers)
        self.why, self.newcomers = why, newcomers
        if was == (bool(why), bool(newcomers)):
            return
        if why:
            logger.error("nothing can begin on this node", why=why)
        elif newcomers:
            logger.error("nothing new can begin on this node", why=newcomers)
        else:
            logger.info("this node is fit again")
        self.on_change(FitnessChanged(why, newcomers))

    def _found(self) -> str:
        if self._refusal:
            self._refusal = self._tried()
        if self._refusal:
            return f"its disk refuses what is written: {self._refusal} ({self._directory}): {REMEDY}"
        needed_bytes = self._settings.free_min_bytes
        return shortage_of(self._directory, int(needed_bytes * AGAIN) if self.why else needed_bytes)

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
        self.on_change: Callable[[ModelsChanged], None] = lambda facts: None
        models.on_footprint = self._learn
        models.on_residency = lambda resident: self.on_change(self.facts())

    def check(self, function: FunctionSpec) -> None:
        """Raise Unsupported for a model function that no device of this node could ever run."""
        if function.model is not None and not self._devices:
            told = f"function {function.name!r}: this node has no model devices (tangram node join --devices)"
            raise Unsupported(told, component=COMPONENT)

    async def prepared(self, function: FunctionSpec) -> None:
        """Tell what the service of a function costs here, now that it was prepared; nothing for other functions."""
        if function.model is not None:
            self._learn(await self._models.footprint(function))

    def facts(self) -> ModelsChanged:
        """Return what services there are, and what is resident."""
        resident = {service: list(chunks) for service, chunks in self._models.residency().items()}
        return ModelsChanged(services=list(self._services.values()), resident=resident)

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
class ServedInput:
    """Input that is being passed on, and where that is answered."""

    link: NodeLink
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class ServedSession:
    """One session of an attempt, and what of it the gateway has heard."""

    claim: str
    id: str
    session: InteractiveSession
    #: The gateway's present attachment; None on no link.
    link: NodeLink | None = None
    life: str = ""
    window_bytes: int = 0
    #: Up to where it was taken, and was sent.
    taken: int = 0
    sent: int = 0
    attended: bool = False
    #: Whether all of it was told on this link.
    told: bool = False
    steered: int = 0
    #: What is being passed on, by who sent it and its number.
    inputs: dict[tuple[str, int], ServedInput] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    telling: asyncio.Task[None] | None = None

    @property
    def owed(self) -> bool:
        """Whether the gateway listens, and has not heard all."""
        return self.link is not None and not self.told

    @property
    def room_bytes(self) -> int:
        """How much may be sent now; its end is told whether there is room or not."""
        if self.session.ended:
            return PIECE_BYTES
        return min(PIECE_BYTES, self.taken + self.window_bytes - self.sent) if self.attended else 0


class ServedSessions:
    """The sessions of one node. Use from one event loop."""

    def __init__(self, table: SessionTable, on_told: Callable[[str], None]) -> None:
        """``on_told`` is called with the claim of a session all of which was told."""
        self._table = table
        self._on_told = on_told
        self._sessions: dict[str, ServedSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- attempts

    def begin(self, claim: str, action: Action, context: Mapping[str, str], given: Mapping[str, object]) -> None:
        """An attempt is about to run; its output is kept until `forget` if it is a session's first try."""
        if "session" not in given or action.attempt > 1 or claim in self._sessions:
            return
        id = context.get("invocation_id", action.id)
        try:
            session = self._table.living(id, terminal_of(given))
        except CodedError:
            return  # its runtime refuses it in the same way
        self._sessions[claim] = ServedSession(claim, id, session)

    def ended(self, claim: str) -> None:
        """The attempt has ended; the rest of its output is told whether somebody reads it or not."""
        served = self._sessions.get(claim)
        if served is not None:
            self._table.close(served.id)
            served.changed.set()

    def owes(self, claim: str) -> bool:
        """Return whether there is output that the gateway must hear before the end."""
        served = self._sessions.get(claim)
        return served is not None and served.owed

    def forget(self, claim: str) -> None:
        """The gateway has its end on record; idempotent."""
        served = self._sessions.pop(claim, None)
        if served is not None:
            self._table.close(served.id)
            self._stop(served)

    # --- the link

    def take(self, link: NodeLink, message: AttachSession | SessionRoom | TypeToSession | SteerSession) -> None:
        """Take what the gateway says of a session, unless that is forgotten."""
        served = self._sessions.get(message.claim)
        match message:
            case AttachSession():
                if served is None:
                    link.send(SessionTold(message.claim))
                else:
                    self._attach(served, link, message)
            case SessionRoom() if served is not None:
                served.taken, served.attended = message.taken, message.attended
                served.changed.set()
            case TypeToSession():
                self._type(served, link, message)
            case SteerSession() if served is not None:
                self._spawn(self._steer(served, link, message))
            case _:
                pass

    def detach(self, link: NodeLink) -> None:
        """The link is gone: sessions go on, and those that were read wait a moment for the next link."""
        for served in self._sessions.values():
            if served.link is link:
                if served.attended and not served.session.ended:
                    reader = served.session.attend(served.sent)
                    asyncio.get_running_loop().call_later(LINK_PATIENCE_S, served.session.leave, reader)
                self._stop(served)

    async def close(self) -> None:
        """End what tells of them; the sessions themselves go on."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- inside

    def _attach(self, served: ServedSession, link: NodeLink, asked: AttachSession) -> None:
        if served.life != asked.life:
            served.life, served.steered = asked.life, 0
        own_bytes = served.session.settings.output_bytes // 4
        served.window_bytes = max(1, min(asked.window_bytes, own_bytes))
        served.sent = asked.offset
        served.taken = asked.offset - (served.window_bytes if asked.held else 0)
        served.attended, served.told = asked.attended, False
        served.session.wait_for_somebody(asked.unattended_s)
        reader = served.session.attend(served.sent)  # before the one whose place it takes lets go
        if not asked.attended:
            served.session.leave(reader)
        self._stop(served)
        served.link = link
        served.telling = self._spawn(self._tell(served, link, self._withdraw_of_others(served)))

    def _stop(self, served: ServedSession) -> None:
        """Tell no more of it on its link."""
        if served.telling is not None:
            served.telling.cancel()
        served.link = served.telling = None

    def _withdraw_of_others(self, served: ServedSession) -> list[asyncio.Task[None]]:
        """Pass no more on of what another side than the present one has typed; return what still ends of that."""
        others = [given for (life, _), given in served.inputs.items() if life != served.life]
        tasks = [given.task for given in others if given.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _tell(self, served: ServedSession, link: NodeLink, ending: Collection[asyncio.Task[None]]) -> None:
        """Say that it runs, then what it says while there is room, and at its end the rest and that this was all.

        Where its input stands is told once what is ``ending`` has ended.
        """
        session = served.session
        await session.opened(None)
        await asyncio.gather(*ending, return_exceptions=True)
        if session.end or not session.ended:  # else it has never begun
            told = SessionOpened(
                claim=served.claim,
                start=session.start,
                input_offset=session.input_offset,
                reads=session.reads,
                window_bytes=served.window_bytes,
            )
            link.send(told)
        while not (session.ended and served.sent >= session.end):
            if served.attended or session.ended:
                before = served.sent
                await self._tell_some(served, link)
                if session.ended and served.sent == before:
                    served.sent = session.end  # nothing of the rest is kept
            else:
                served.changed.clear()
                await served.changed.wait()
        served.told = True
        link.send(SessionTold(served.claim))
        self._on_told(served.claim)

    async def _tell_some(self, served: ServedSession, link: NodeLink) -> None:
        """Tell what it says until nobody reads it any more, or it has ended and all is told."""
        session = served.session
        async with aclosing(session.read(served.sent, LOOK_S)) as pages:
            async for page in pages:
                for piece in page:
                    await self._tell_piece(served, link, piece)
                if not served.attended and not session.ended:
                    return

    async def _tell_piece(self, served: ServedSession, link: NodeLink, piece: SessionPiece) -> None:
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
            link.send(SessionSaid(served.claim, offset, piece.stream, part))
            await link.drained()

    def _type(self, served: ServedSession | None, link: NodeLink, typed: TypeToSession) -> None:
        if served is None:
            link.send(
                SessionTyped(claim=typed.claim, number=typed.number, input_offset=typed.offset, reads=False, error=None)
            )
            return
        key = (served.life, typed.number)
        given = served.inputs.get(key)
        if given is not None:
            given.link = link  # one that was sent again after a cut is answered on the new link
            if typed.withdrawn and given.task is not None:
                given.task.cancel()
        else:
            given = served.inputs[key] = ServedInput(link)
            given.task = self._spawn(self._pass_on(served, key, typed))
            given.task.add_done_callback(lambda _: self._answer_typed(served, key, typed.number, None))

    async def _pass_on(self, served: ServedSession, key: tuple[str, int], typed: TypeToSession) -> None:
        """Pass input on once its turn has come, and answer how far it came."""
        failure = None
        try:
            if len(served.inputs) > INPUTS_MAX:
                told = f"{INPUTS_MAX} inputs of the session wait for its command to read"
                raise CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0)
            if not typed.withdrawn:
                await served.session.write(typed.data, typed.offset, end=typed.end)
        except CodedError as error:
            failure = facts_of(error)
        self._answer_typed(served, key, typed.number, failure)

    def _answer_typed(
        self, served: ServedSession, key: tuple[str, int], number: int, failure: ErrorFacts | None
    ) -> None:
        """Say how far an input came, once: it is over, or was withdrawn before its first step."""
        given = served.inputs.pop(key, None)
        if given is not None:
            session = served.session
            given.link.send(
                SessionTyped(
                    claim=served.claim,
                    number=number,
                    input_offset=session.input_offset,
                    reads=session.reads,
                    error=failure,
                )
            )

    async def _steer(self, served: ServedSession, link: NodeLink, steer: SteerSession) -> None:
        """Do it as soon as it runs, unless it was done on an earlier link."""
        await served.session.opened(None)
        if steer.number > served.steered:
            served.steered = steer.number
            size = None if steer.size is None else TerminalSize(*steer.size)
            served.session.relay(size=size, signal=steer.signal, end=steer.end)
        link.send(SessionSteered(served.claim, steer.number))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a session is not told of", error=repr(error))


class ServedSnapshots:
    """The snapshots of one node. Use from one event loop."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._store = environments.provider.snapshots
        self._store.on_change = self._changed
        #: Called with all that are kept, whenever that changes and the gateway of this link has asked for it.
        self.on_change: Callable[[Message], None] = lambda told: None
        self._asked = False

    async def take(self, trajectory: str, order: bytes) -> None:
        """Take a snapshot of a trajectory, once; raises as `Environments.snapshot`."""
        try:
            wanted = msgspec.json.decode(order, type=SnapshotOrder)
            id = convert(wanted.id, SnapshotId)
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"no order of a snapshot: {error}", component=COMPONENT) from None
        await self._environments.snapshot(trajectory, id=id, spared=wanted.spared)
        self.tell()  # before the answer, whatever was told under an earlier link

    async def drop(self, id: str) -> None:
        """Remove one as soon as nothing needs it."""
        await self._store.give_up(id)

    def tell(self) -> None:
        """Tell of all that are kept, from now on whenever that changes."""
        self._asked = True
        self._changed()

    def detach(self) -> None:
        """There is no link: the next gateway asks anew."""
        self._asked = False

    def _changed(self) -> None:
        if self._asked:
            self.on_change(SnapshotsKept(self._store.all()))


#: In a directory of the store: the files themselves, and their bytes.
_FILES, _SIZE = "files", "size"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerStoreSettings:
    """The bounds of the store."""

    max_bytes: Annotated[
        int, Setting("most bytes of handlers' files; beyond it those used least recently go, never one in use", ge=1)
    ] = 2 * 2**30


class HandlerStore:
    """The handlers' files in one directory. Use from one event loop."""

    def __init__(
        self, directory: Path, settings: HandlerStoreSettings, in_use: Callable[[], Collection[Path]] = lambda: ()
    ) -> None:
        """Directories ``in_use``, which instances have mounted, are never removed."""
        self._directory, self._settings, self._in_use = directory.absolute(), settings, in_use
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)  # half of what a daemon before was sent
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
            raise ChannelError(f"function {function.name}: its files are not named by a digest")
        handler = replace(function.handler, directory=self._directory / digest / _FILES)
        return replace(function, revision=f"{function.revision}+{digest[:12]}", handler=handler)

    async def has(self, digest: str) -> bool:
        """Return whether these files are here, and whole."""
        place = self._place(digest)
        async with self._changing:
            if digest not in self._whole and await asyncio.to_thread(_is_whole, place, digest):
                self._whole.add(digest)
            try:
                _touch(place)
            except OSError:
                self._whole.discard(digest)
        return digest in self._whole

    async def take(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Keep the files of an archive that arrives; return its bytes.

        Raises TooLarge, InvalidInput for files of another digest, and CapacityExceeded where there is no room.
        """
        place, part = self._place(digest), self._directory / f".{secrets.token_hex(8)}"
        async with self._receiving:
            try:
                await _to_its_end(asyncio.to_thread(part.mkdir, mode=0o755))
                size_bytes = await _received(part, chunks)
                async with self._changing:
                    in_use = {path.parent.name for path in self._in_use()} | set(self._held)
                    await _to_its_end(asyncio.to_thread(self._keep, part, place, in_use))
                    self._whole.add(digest)
            except (Refused, tarfile.TarError) as error:
                raise InvalidInput(f"what was sent is no handler: {error}", component=ARCHIVE_COMPONENT) from None
            except OSError as error:
                told = f"the node cannot keep a handler's files: {error}"
                raise exhaustion(error, ARCHIVE_COMPONENT) or CodedError(told, component=ARCHIVE_COMPONENT) from None
            finally:
                await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
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
                told = f"the files of function {function.name} are not on the node: they come when it is prepared anew"
                raise ActionFailed(Reason.ENVIRONMENT_LOST, told, component=ARCHIVE_COMPONENT, retry_after_s=1.0)
            yield
        finally:
            self._held[digest] -= 1
            self._held += Counter()  # which drops what nobody holds

    def _place(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidInput(f"{digest[:80]!r} is no digest", component=ARCHIVE_COMPONENT)
        return self._directory / digest

    def _keep(self, part: Path, place: Path, in_use: Collection[str]) -> None:
        """Unpack what has arrived, and let it be found by its name once it is whole."""
        size_bytes = unpack_tree(part / "archive", part / _FILES, SOURCES_LIMIT_BYTES)
        if digest_of(part / _FILES) != place.name:
            raise InvalidInput("what was sent are not the files that were promised", component=ARCHIVE_COMPONENT)
        if place.is_dir():
            return  # it was sent twice
        self._make_room(size_bytes, in_use)
        (part / _SIZE).write_text(str(size_bytes), encoding="ascii")
        part.rename(place)
        _touch(place)

    def _make_room(self, size_bytes: int, in_use: Collection[str]) -> None:
        """Remove what was used least recently until so many bytes have room; raises CapacityExceeded."""
        kept = sorted((each.stat().st_mtime_ns, _size_of(each), each) for each in self._directory.glob("[!.]*"))
        total_bytes = size_bytes + sum(size for _, size, _ in kept)
        for _, size, place in kept:
            if total_bytes <= self._settings.max_bytes:
                return
            if place.name not in in_use:
                self._whole.discard(place.name)
                _remove(place)
                total_bytes -= size
                logger.info("a handler's files were removed to make room", digest=place.name, size_bytes=size)
        if total_bytes > self._settings.max_bytes:
            told = f"the handlers that the node serves have {self._settings.max_bytes} bytes of files already"
            raise CapacityExceeded(told, component=ARCHIVE_COMPONENT)


async def _received(part: Path, chunks: AsyncIterator[bytes]) -> int:
    size_bytes = 0
    with (part / "archive").open("wb") as file:
        async for chunk in chunks:
            size_bytes += len(chunk)
            if size_bytes > ARCHIVE_MAX_BYTES:
                told = f"the files of a handler are more than {ARCHIVE_MAX_BYTES} bytes"
                raise TooLarge(told, component=ARCHIVE_COMPONENT)
            file.write(chunk)
    return size_bytes


async def _to_its_end(work: Coroutine[None, None, None]) -> None:
    """Do it; who is cancelled goes once it is done, as a thread is not stopped with who waits for it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen: nobody comes back for it
        raise


def _is_whole(place: Path, digest: str) -> bool:
    """See whether a directory holds what its name says, and remove it if not."""
    if not place.is_dir():
        return False
    try:
        if digest_of(place / _FILES) == digest:
            return True
    except (OSError, CodedError):
        pass
    logger.warning("a handler's files were damaged, and are asked for anew", digest=digest)
    _remove(place)
    return False


def _touch(place: Path) -> None:
    """Make it the one used last, by a finer clock than the kernel's own."""
    now_ns = time.time_ns()
    os.utime(place, ns=(now_ns, now_ns))


def _remove(place: Path) -> None:
    """Remove a directory such that no half of it is ever found by its name."""
    away = place.with_name(f".{secrets.token_hex(8)}")
    place.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def _size_of(place: Path) -> int:
    try:
        return int((place / _SIZE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0  # it is found damaged when it is asked for


#: The kinds whose functions a node executes for a gateway. The others need what only the gateway has: its own address
#: towards the world.
SERVED: tuple[str, ...] = ("exec", "pytest", "handler", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """What a daemon works with, and how that is let go."""

    executor: Executor
    sandboxes: NodeSandboxes
    #: Checks that a function can run here; raises CodedError.
    prepare: Callable[[FunctionSpec], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    #: Returns the directories that instances of handlers have mounted, or may.
    handlers_in_use: Callable[[], Collection[Path]] = lambda: ()
    #: The model services and the snapshots of this machine, if it has any.
    models: NodeModels | None = None
    snapshots: ServedSnapshots | None = None
    #: Says why no sandbox can be made; None where nothing could tell.
    trouble: Trouble | None = None


class DefinedFunctions:
    """What gateways have defined, by digest; what a link has defined lately is never dropped."""

    def __init__(self, most: int, handlers: HandlerStore) -> None:
        self._most = most
        self._handlers = handlers
        self._known: dict[str, tuple[bytes, FunctionSpec | CodedError]] = {}

    def define(self, digest: str, data: bytes) -> None:
        """Keep a function as it travelled, as the youngest; one of another version too, which `get` refuses."""
        self._known.pop(digest, None)
        while len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        kind = KINDS.get(msgspec.json.decode(data, type=_Kind).runtime)
        try:
            function = read_function(data, FunctionSpec if kind is None else kind.function)
            self._known[digest] = (data, self._handlers.placed(function))
        except ChannelError as error:  # the others run here all the same
            self._known[digest] = (data, InvalidConfig(f"{error.message}; upgrade the node", component=COMPONENT))

    def get(self, digest: str) -> tuple[bytes, FunctionSpec]:
        """Return a function, as it travelled too; raises ChannelError if it was never defined, or InvalidConfig."""
        known = self._known.get(digest)
        if known is None:
            raise ChannelError(f"function {digest} was never defined")
        data, function = known
        if isinstance(function, CodedError):
            raise function
        return data, function


class _Kind(msgspec.Struct):
    runtime: str


# The agent: a node's side of the channel. It turns frames into calls of an executor, and ends into frames.
#
# Nothing here depends on a link: attempts run on while there is none, their ends lie in the journal and their logs in
# spools, and a gateway that comes back asks for what it has not heard.

#: In a state directory: a spool for each attempt, and the files of handlers.
SPOOLS, HANDLERS = "spool", "handlers"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The bounds of an agent."""

    attempts_max: Annotated[int, Setting("most attempts that run, or whose end is not acknowledged", ge=1)] = 16384
    functions_max: Annotated[int, Setting("most functions that are known at once", ge=1)] = 4096
    logs: LogShipperSettings = field(default_factory=LogShipperSettings)
    journal: JournalSettings = field(default_factory=JournalSettings)
    handlers: HandlerStoreSettings = field(default_factory=HandlerStoreSettings)
    fitness: FitnessSettings = field(default_factory=FitnessSettings)


class _AttemptHooks(CallHooks):
    """Has an agent answer what the runtime of an attempt asks."""

    __slots__ = ("_agent", "_attempt")

    def __init__(self, agent: Agent, attempt: NodeAttempt) -> None:
        self._agent, self._attempt = agent, attempt

    async def announce(self) -> bool:
        return await self._agent.announce(self._attempt)

    def begun(self) -> None:
        self._agent.started(self._attempt)


class Agent:
    """Executes what gateways ask for, each attempt at most once. Use from one event loop."""

    def __init__(
        self,
        directory: Path,
        work: NodeWork,
        settings: AgentSettings | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings or AgentSettings()
        spools = directory / SPOOLS
        spools.mkdir(parents=True, exist_ok=True)
        #: What daemons before left there, and the directory's name.
        self._left, self._spools = list(spools.iterdir()), str(spools)
        self.epoch = epoch(directory)
        self._journal = AttemptJournal(directory, self.settings.journal)
        self.fitness = NodeFitness(directory, self.settings.fitness, trouble=work.trouble)
        self._work = work
        self._clock = clock or MonotonicClock()
        self._loop = asyncio.get_running_loop()
        self._attempts: dict[str, NodeAttempt] = {}
        #: Ends that were told, and are written down in the same turn of the loop.
        self._ends: list[AttemptEnd] = []
        #: Attempts whose end is on record: forgotten soon, many at once, and not between two that begin.
        self._settled: dict[str, NodeAttempt] = {}
        self._settling: asyncio.TimerHandle | None = None
        self._link: NodeLink | None = None
        self._handlers = HandlerStore(directory / HANDLERS, self.settings.handlers, work.handlers_in_use)
        self._functions = DefinedFunctions(self.settings.functions_max, self._handlers)
        #: Requests that are under way, by number.
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._transfers = ServedTransfers(work.sandboxes.files, self._handlers.take)
        self._sessions = ServedSessions(work.sandboxes.sessions, self._session_told)
        self._shipper = LogShipper(self.settings.logs, self._sessions.owes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._handle_by: Mapping[type[Message], Callable[[NodeLink, Any], None]] = {
            ExecuteAttempt: lambda _, message: self._execute(message),
            AttemptGo: lambda _, message: self._told_to_go(message),
            AcknowledgeEnd: lambda _, message: self._acknowledged(message.claim),
            DefineFunction: lambda _, message: self._functions.define(message.digest, message.function),
            AttachAttempt: lambda _, message: self._attach(message),
            CancelAttempt: lambda _, message: self._cancel(message),
            ResizeAttempt: lambda _, message: self._resize(message),
            NodeRequest: lambda _, message: self._begin_request(message),
            NodeDraining: lambda _, message: self.on_drain(message.why),
            FilesAsk: self._transfers.begin,
            **dict.fromkeys((FilesPiece, FilesTaken, FilesStop), lambda _, message: self._transfers.take(message)),
            **dict.fromkeys((AttachSession, SessionRoom, TypeToSession, SteerSession), self._sessions.take),
        }
        #: Called when the gateway asks the node to drain, with why.
        self.on_drain: Callable[[str], None] = lambda why: None
        work.sandboxes.on_change = lambda facts: self.say(SandboxChanged(facts))
        self.fitness.on_change = self.say
        if work.models is not None:
            work.models.on_change = self.say
        if work.snapshots is not None:
            work.snapshots.on_change = self.say

    # --- beginning and end

    async def start(self) -> None:
        """Adopt what a daemon before left: sandboxes and their commands; what it left and no sandbox holds, is lost."""
        await self._work.sandboxes.start()
        held = self._work.sandboxes.resumable()
        for digest, data in self._journal.functions.items():
            self._functions.define(digest, data)
        for claim, entry in list(self._journal.attempts.items()):
            attempt = self._enter(entry.execute, fresh=False)
            if attempt is None:
                continue
            attempt.begun, attempt.lasting = True, entry.lasting
            holds = any(each.startswith(claim) for each in held)
            if entry.end is not None and not (holds and is_session(entry.execute)):
                attempt.end = entry.end
            elif holds or self._never_started(attempt):
                self._run(attempt)
            else:
                self._conclude(attempt, mislaid("the node's daemon ended while it ran, and with it what it had begun"))
        await self._work.sandboxes.end_unclaimed(self._attempts)
        known = {spool_name(claim) for claim in self._attempts}
        for stale in self._left:
            if stale.name not in known:
                stale.unlink(missing_ok=True)
        self._left.clear()
        self._spawn(self._shipper.run())
        self._spawn(self.fitness.watch_for_ever())

    def _never_started(self, attempt: NodeAttempt) -> bool:
        """Return whether a daemon before died after it had written that it begins, and before its first command."""
        kind, trajectory = KINDS.get(attempt.function.runtime), attempt.execute.action.trajectory
        inside = kind is not None and kind.works_in_sandbox and trajectory is not None
        return inside and self._work.sandboxes.never_started(str(trajectory), attempt.claim)

    @property
    def busy(self) -> bool:
        """Whether anything runs, or has to be told yet."""
        return bool(self._attempts)

    @property
    def idle(self) -> bool:
        """Whether it has nothing: no attempt and no trajectory."""
        return not self._attempts and not self._work.sandboxes.facts()

    async def end_all(self) -> None:
        """Kill every attempt and remove every trajectory, and forget both."""
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
        for attempt in self._attempts.values():
            attempt.disowned, attempt.successor = True, None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._forget(*self._attempts.values())
        for facts in self._work.sandboxes.facts():
            await self._work.executor.end_trajectory(facts.trajectory)

    async def end_idle(self) -> None:
        """Remove every trajectory in which nothing runs, whether the gateway has recorded what ended there or not.

        The end of an attempt is in the journal; only the output of a session is still in its sandbox.
        """
        self._forget_settled()
        left = [each for each in self._attempts.values() if each.end is None or is_session(each.execute)]
        busy = {attempt.execute.action.trajectory for attempt in left}
        idle = [facts.trajectory for facts in self._work.sandboxes.facts() if facts.trajectory not in busy]
        await asyncio.gather(*map(self._work.executor.end_trajectory, idle))

    async def close(self) -> None:
        """Stop. What runs in a sandbox is left as it is, for the next daemon of this directory; idempotent."""
        self._forget_settled()
        self._closing = True
        self.detach()
        for attempt in self._attempts.values():
            attempt.spool.paused = True  # what its command says from now on is the next daemon's
        await self._work.sandboxes.leave(claim for claim, attempt in self._attempts.items() if attempt.end is None)
        tasks = [*self._tasks, *self._requests.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transfers.close()
        await self._sessions.close()
        for attempt in self._attempts.values():
            attempt.spool.close()
        self._write_ends()
        self._journal.close()

    # --- the link

    def inventory(self) -> Inventory:
        """Return all that is here."""
        self._forget_settled()
        return Inventory(
            epoch=self.epoch,
            attempts=[
                AttemptFacts(claim=each.claim, begun=each.begun, ended=each.end is not None)
                for each in self._attempts.values()
                if not each.disowned
            ],
            trajectories=self._work.sandboxes.facts(),
        )

    async def serve(self, link: NodeLink) -> str:
        """Say what is here, then do what the gateway asks until the link is gone; return why it is."""
        link.send(self.inventory())
        link.send(FitnessChanged(self.fitness.why, self.fitness.newcomers))
        if self._work.models is not None and (models := self._work.models.facts()).services:
            link.send(models)
        self._link = self._shipper.link = link
        try:
            return await link.run(partial(self._handle, link))
        finally:
            self._transfers.detach(link)
            self._sessions.detach(link)
            if self._link is link:
                self.detach()

    def detach(self) -> None:
        """There is no gateway; everything goes on."""
        self._link = self._shipper.link = None
        if self._work.snapshots is not None:
            self._work.snapshots.detach()
        for attempt in self._attempts.values():
            attempt.attached = attempt.end_told = False
            if not attempt.begun and attempt.go.done():
                attempt.go = self._loop.create_future()  # the next inventory says that it has not begun: it asks again

    def say(self, message: Message) -> None:
        """Tell the gateway, if there is one."""
        if self._link is not None:
            self._link.send(message)

    def _handle(self, link: NodeLink, message: Message) -> None:
        handle = self._handle_by.get(type(message))
        if handle is None:
            raise ChannelError(f"a {type(message).__name__} to a node")
        handle(link, message)

    # --- requests

    def _begin_request(self, request: NodeRequest) -> None:
        """Do what is asked, once: while it is under way it may be asked again after a cut."""
        if request.number not in self._requests:
            task = asyncio.create_task(self._answer(request), name=f"request {request.verb} {request.name}")
            self._requests[request.number] = task
            task.add_done_callback(lambda _: self._requests.pop(request.number, None))

    async def _answer(self, request: NodeRequest) -> None:
        """Answer on the link that is there at its end."""
        done, failure = True, None
        try:
            done = await self._do(request)
        except CodedError as error:
            failure = facts_of(error)
        except Exception as error:  # told to the gateway: a bug here ends no daemon
            logger.exception("a request failed", verb=request.verb, name=request.name)
            failure = facts_of(CodedError(f"the node failed: {error!r}", component=COMPONENT))
        self.say(NodeAnswer(request.number, failure, done))

    async def _do(self, request: NodeRequest) -> bool:
        name, sandboxes, snapshots = request.name, self._work.sandboxes, self._work.snapshots
        match request.verb:
            case "open":
                await self._work.executor.open_trajectory(name, request.task, self._function(request))
                sandboxes.look(name)
            case "end":
                await self._work.executor.end_trajectory(name)
                sandboxes.look(name)
            case "prepare":
                await self._prepare(self._function(request))
            case "replicate":
                chunk = request.chunk
                replicate = self._work.executor.replicate
                return chunk is not None and await replicate(self._function(request), name, "", chunk)
            case "mark_lost":
                sandboxes.mark_lost([name])
            case "choose":
                sandboxes.choose(name, msgspec.json.decode(request.body, type=SandboxSpec))
            case "has_handler":
                return await self._handlers.has(name)
            case "snapshot" if snapshots is not None:
                await snapshots.take(name, request.body)
            case "snapshots" if snapshots is not None:
                snapshots.tell()
            case "drop_snapshot" if snapshots is not None:
                await snapshots.drop(name)
            case _:
                raise Unsupported(f"this node knows no request {request.verb!r}", component=COMPONENT)
        return True

    async def _prepare(self, function: FunctionSpec) -> None:
        models = self._work.models
        if models is not None:
            models.check(function)
        async with self._handlers.held(function):
            await self._work.prepare(function)
        if models is not None:
            await models.prepared(function)

    def _function(self, request: NodeRequest) -> FunctionSpec:
        return self._functions.get(request.function)[1]

    # --- attempts

    def _execute(self, execute: ExecuteAttempt) -> None:
        if execute.claim in self._settled:
            self._forget_settled()
        known = self._attempts.get(execute.claim)
        if known is not None and not known.disowned:
            known.attached = True
            self._retell(known, 0)
        elif known is not None:
            known.successor = execute
        elif (attempt := self._enter(execute)) is not None:
            attempt.attached = True
            self._run(attempt)

    def _enter(self, execute: ExecuteAttempt, *, fresh: bool = True) -> NodeAttempt | None:
        """Make room for an attempt; one that cannot be had ends at once."""
        try:
            data, function = self._functions.get(execute.function)
            if len(self._attempts) >= self.settings.attempts_max:
                raise StorageUnavailable(f"the node has {self.settings.attempts_max} attempts", component=COMPONENT)
            place = f"{self._spools}/{spool_name(execute.claim)}"
            spool = Spool(place, function.log_limit_bytes, partial(self._said, execute.claim), fresh=fresh)
        except (OSError, StorageUnavailable, InvalidConfig) as error:
            if isinstance(error, OSError):
                self.fitness.refused(error)
            message = f"the node cannot take it: {error}"
            refused = Outcome(state=State.FAILED, reason=Reason.ENVIRONMENT_LOST, message=message, component=COMPONENT)
            self.say(end_of(execute.claim, refused, 0))
            return None
        attempt = NodeAttempt(execute=execute, function=function, function_bytes=data, spool=spool)
        self._attempts[execute.claim] = attempt
        return attempt

    def _run(self, attempt: NodeAttempt) -> None:
        given = unpack_object(attempt.execute.input)
        self._sessions.begin(attempt.claim, attempt.execute.action, attempt.execute.context, given)
        work = self._work_on(attempt, given)
        attempt.task = self._loop.create_task(work)
        self._tasks.add(attempt.task)
        attempt.task.add_done_callback(partial(self._worked, attempt))

    async def _work_on(self, attempt: NodeAttempt, given: Mapping[str, object]) -> None:
        execute, function = attempt.execute, attempt.function
        call = Call(
            function=function,
            input=given,
            log=attempt.spool,
            traceparent=execute.traceparent,
            tracestate=execute.tracestate,
            context=execute.context,
            hooks=_AttemptHooks(self, attempt),
        )
        try:
            kind = KINDS.get(function.runtime)
            async with nullcontext() if function.handler is None else self._handlers.held(function):
                if not attempt.begun and (kind is None or not kind.works_in_sandbox):
                    await self.announce(attempt)  # its runtime does not ask
                outcome = await self._work.executor.execute(execute.action, execute.lease, call)
        except CodedError as error:
            outcome = failed(error)
        except asyncio.CancelledError:
            outcome = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message="cancelled", component=COMPONENT)
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
            self._conclude(attempt, Outcome(state=state, reason=reason, message=message, component=COMPONENT))

    async def announce(self, attempt: NodeAttempt) -> bool:
        """Ask whether it may begin, and write down that it does; every command outlives the daemon.

        Raises ActionFailed if it may not.
        """
        if attempt.begun:
            return True  # by its first command, or under a daemon before
        attempt.asking = True
        if attempt.attached and not attempt.go.done():
            self.say(AttemptBegins(attempt.claim))
        while not attempt.go.done():  # another one takes its place if the link goes
            await attempt.go
        go = attempt.go.result()
        attempt.asking = False
        if go.refusal is not None:
            raise as_failure(error_of(go.refusal))
        try:
            self._journal.begun(attempt.execute, attempt.function_bytes, lasting=go.lasting)
        except OSError as error:
            self.fitness.refused(error)
            message = f"the node cannot write down that it begins: {error}"
            raise ActionFailed(Reason.ENVIRONMENT_LOST, message, component=COMPONENT, retry_after_s=5.0) from error
        attempt.begun, attempt.lasting = True, go.lasting
        self._look(attempt)
        return True

    def _told_to_go(self, go: AttemptGo) -> None:
        """It may begin, perhaps before it asks, or its caller has gone, and it outlives him."""
        attempt = self._attempts.get(go.claim)
        if attempt is None:
            return
        if not attempt.begun:
            if attempt.go.done():
                attempt.go = self._loop.create_future()
            attempt.go.set_result(go)
        elif attempt.begun and attempt.end is None and go.refusal is None and attempt.lasting != go.lasting:
            attempt.lasting = go.lasting
            self._written(partial(self._journal.lasting, go.claim, go.lasting))

    def started(self, attempt: NodeAttempt) -> None:
        """Note that the attempt's work begins, and say so."""
        attempt.began_s = self._clock.now()
        self._shipper.more(attempt)

    def _conclude(self, attempt: NodeAttempt, outcome: Outcome) -> None:
        """It has ended, once and for all."""
        attempt.asking = False
        end = end_of(attempt.claim, outcome, attempt.spool.omitted_bytes)
        if len(end.result) + len(end.detail) > self._frame_bytes:
            large = oversized(outcome, len(end.result))
            end = end_of(attempt.claim, large, attempt.spool.omitted_bytes)
        attempt.end = end
        self._sessions.ended(attempt.claim)
        self._look(attempt)
        self._written(attempt.spool.flush)
        if not attempt.disowned:
            self._shipper.more(attempt, at_once=True)
        if attempt.begun:  # behind the telling: nobody waits for the disk, and ends of one turn are one write
            if not self._ends:
                self._loop.call_soon(self._write_ends)
            self._ends.append(end)
        if attempt.disowned:
            self._forget(attempt)

    def _session_told(self, claim: str) -> None:
        """All of a session's output is told: its end may follow."""
        attempt = self._attempts.get(claim)
        if attempt is not None:
            self._shipper.more(attempt, at_once=True)

    def _said(self, claim: str) -> None:
        attempt = self._attempts.get(claim)
        if attempt is not None:
            self._shipper.more(attempt)

    @property
    def _frame_bytes(self) -> int:
        most_bytes = 64 * 2**20 if self._link is None else self._link.settings.frame_max_bytes
        return most_bytes - 64 * 2**10

    def _cancel(self, asked: CancelAttempt) -> None:
        attempt = self._attempts.get(asked.claim)
        if attempt is None:
            return
        attempt.successor = None
        attempt.disowned = attempt.disowned or asked.disowned
        if attempt.end is not None:
            if attempt.disowned:
                self._forget(attempt)
        elif attempt.task is not None:
            attempt.task.cancel()

    def _resize(self, asked: ResizeAttempt) -> None:
        attempt = self._attempts.get(asked.claim)
        if attempt is not None and attempt.end is None:
            self._spawn(self._work.executor.resize(attempt.execute.action, asked.lease))

    def _acknowledged(self, claim: str) -> None:
        attempt = self._attempts.get(claim)
        if attempt is not None and attempt.end is not None:
            self._settled[claim] = attempt
            if self._settling is None:
                self._settling = self._loop.call_later(PATIENCE_S, self._forget_settled)

    def _forget_settled(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        if not self._closing:
            self._forget(*self._settled.values())

    def _write_ends(self) -> None:
        ends, self._ends = self._ends, []
        if ends:
            self._written(partial(self._journal.ended, *ends))

    def _forget(self, *attempts: NodeAttempt) -> None:
        self._write_ends()
        if begun := [attempt.claim for attempt in attempts if attempt.begun]:
            self._written(partial(self._journal.acknowledged, *begun))
        for attempt in attempts:
            self._forget_one(attempt)

    def _forget_one(self, attempt: NodeAttempt) -> None:
        del self._attempts[attempt.claim]
        self._settled.pop(attempt.claim, None)
        self._sessions.forget(attempt.claim)
        self._shipper.forget(attempt)
        attempt.spool.remove()
        self._work.sandboxes.acknowledge(attempt.execute.action.trajectory, attempt.claim)
        if attempt.successor is not None:
            self._execute(attempt.successor)

    def _written(self, write: Callable[[], None]) -> None:
        """Write; a disk that refuses costs what a crash would cost, and nothing else."""
        try:
            write()
        except OSError as error:
            logger.error("the node's disk refuses", why=str(error))
            self.fitness.refused(error)

    # --- telling

    def _attach(self, asked: AttachAttempt) -> None:
        attempt = self._attempts.get(asked.claim)
        if attempt is not None:
            attempt.attached = True
            self._retell(attempt, asked.log_offset)

    def _retell(self, attempt: NodeAttempt, log_offset: int) -> None:
        """Tell the gateway what it has not heard."""
        attempt.told_bytes, attempt.began_told, attempt.end_told = min(log_offset, attempt.spool.end), False, False
        if attempt.asking and not attempt.go.done():
            self.say(AttemptBegins(attempt.claim))
        self._shipper.more(attempt, at_once=True)

    def _look(self, attempt: NodeAttempt) -> None:
        """See whether its trajectory has another sandbox by now."""
        if attempt.execute.action.trajectory is not None:
            self._work.sandboxes.look(attempt.execute.action.trajectory)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# The daemon of a node: dials the gateway for ever, and lets the agent do what it asks.
#
# It is a process of its own, under systemd, Slurm or whatever starts it. What runs in its sandboxes outlives it: the
# next daemon of the same state directory adopts that. Only one that hears no gateway for ``unattended_s`` ends all.

DAEMON_COMPONENT = "node.daemon"
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()
LOCK, PID, KEY = "lock", "pid", "key"
#: Seconds between two looks whether a draining node is empty.
DAEMON_LOOK_S = 0.2


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
    greeting_s: Annotated[float, Setting("seconds for a connection and its greeting", gt=0)] = 10.0
    redial_s: Annotated[float, Setting("seconds until the next try, doubled each time, half of it by chance", gt=0)] = (
        0.5
    )
    redial_max_s: Annotated[float, Setting("longest wait between two tries", gt=0)] = 10.0
    unattended_s: Annotated[float, Setting("seconds without a gateway after which all is ended", gt=0)] = 600.0
    drain_grace_s: Annotated[float, Setting("seconds that a drain waits for what runs", ge=0)] = 600.0
    link: LinkSettings = field(default_factory=LinkSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)


class Daemon:
    """One daemon: `run` it to its end; `drain`, `leave` and `stop` may be called from anywhere on its loop."""

    def __init__(self, settings: DaemonSettings, work: NodeWork, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._work = work
        self._clock = clock or MonotonicClock()
        self._instance = secrets.token_hex(8)
        self._agent: Agent | None = None
        self._link: NodeLink | None = None
        self._stopping = asyncio.Event()
        self._heard_s = self._clock.now()
        #: Why it drains; whether what runs is left to the next daemon, and nothing else. Empty and False before.
        self._draining = ""
        self._leaving = self._tidy = False
        self._drainer: asyncio.Future[None] | None = None
        self._ending: asyncio.Future[None] | None = None
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
        if self._agent is not None:
            self._agent.say(NodeDraining(why))
        self._drainer = asyncio.ensure_future(self._drain())

    def leave(self, *, tidy: bool = False) -> None:
        """End now, and leave all that runs to the next daemon of this state directory; ``tidy``: and nothing else."""
        self._leaving, self._tidy = True, tidy
        self.stop()

    def stop(self) -> None:
        """End now, with all that runs."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """Kill what is not left to the next daemon, and say so; then end."""
        try:
            if self._agent is not None and not self._leaving:
                await self._agent.end_all()
            elif self._agent is not None and self._tidy:
                await self._agent.end_idle()
            if self._link is not None:
                self._link.send(NodeGoodbye(self._draining or "the daemon ends", not self._leaving))
                self._link.close("the daemon ends")
        finally:
            self._stopping.set()

    async def _drain(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_grace_s):
                while self._agent is not None and not self._agent.idle:  # noqa: ASYNC110  # it ends in many places
                    await asyncio.sleep(DAEMON_LOOK_S)
        self.stop()

    # --- life

    async def run(self) -> None:
        """Join, and join again, until it is told to end or is unattended for too long.

        Raises Conflict if another daemon has the state directory, Unauthorized if the gateway takes neither its ticket
        nor its key at the first try, InvalidConfig if it is not the gateway that it was told of.
        """
        settings = self._settings
        with _held(settings.state_dir):
            self._agent = Agent(settings.state_dir, self._work, settings.agent, clock=self._clock)
            self._agent.on_drain = self.drain
            try:
                await self._agent.start()
                await self._dial_for_ever(self._agent)
            finally:
                for ending in (self._drainer, self._ending):
                    if ending is not None:
                        ending.cancel()
                if not self._leaving:
                    await self._agent.end_all()
                await self._agent.close()
                await self._work.close()

    async def _dial_for_ever(self, agent: Agent) -> None:
        wait_s = self._settings.redial_s
        while not self._stopping.is_set():
            try:
                await self._join(agent)
                wait_s = self._settings.redial_s
            except (InvalidConfig, Unauthorized):
                if not self.joined.is_set():
                    self._leaving = True  # what an earlier daemon left waits for one that is let in
                    raise
                logger.exception("the gateway refuses this node")
            except (OSError, CodedError, TimeoutError) as error:
                logger.info("the gateway is not to be had", why=str(error) or type(error).__name__)
            if self._clock.now() - self._heard_s > self._settings.unattended_s:
                logger.error("no gateway came: all is ended", seconds=self._settings.unattended_s)
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s * CHANCE.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, self._settings.redial_max_s)

    async def _join(self, agent: Agent) -> None:
        """One connection, from its dialling to its end."""
        async with asyncio.timeout(self._settings.greeting_s):
            link = await self._dial()
        try:
            link.send(self._hello(agent))
            welcome = await self._welcomed(link)
            if welcome.key:
                _keep_key(self._settings.state_dir, welcome.key)
            if welcome.fence:
                logger.warning("the gateway had given this node up: all that it has is ended")
                await agent.end_all()
            link.settings = replace(link.settings, beat_s=welcome.beat_s, silent_s=welcome.silent_s)
            self._link = link
            self.joined.set()
            logger.info("joined", gateway=link.peer, generation=welcome.generation)
            if self._draining:
                link.send(NodeDraining(self._draining))
            why = await agent.serve(link)
            logger.info("the link is gone", why=why)
        finally:
            if self._link is link:
                self._link, self._heard_s = None, self._clock.now()
            link.close("the daemon is done with it")

    async def _dial(self) -> NodeLink:
        settings = self._settings
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(
            LinkStream, settings.host, settings.port, ssl=node_side(), server_hostname=""
        )
        peer = transport.get_extra_info("ssl_object")
        if not isinstance(peer, ssl.SSLObject | ssl.SSLSocket) or not shows(peer, settings.fingerprint):
            transport.abort()
            told = f"{settings.host}:{settings.port} shows another certificate than {settings.fingerprint}"
            raise InvalidConfig(
                f"{told}: it is not the gateway, or has a new state directory", component=DAEMON_COMPONENT
            )
        return NodeLink(stream, settings.link, clock=self._clock)

    def _hello(self, agent: Agent) -> NodeHello:
        settings = self._settings
        return NodeHello(
            protocol=PROTOCOL,
            version=_version(),
            name=settings.spec.name,
            epoch=agent.epoch,
            instance=self._instance,
            ticket=settings.ticket,
            key=_kept_key(settings.state_dir),
            spec=settings.spec,
            labels=dict(settings.spec.labels),
            isolation=settings.isolation,
            draining=bool(self._draining),
            unfit=agent.fitness.why,
            newcomers=agent.fitness.newcomers,
        )

    async def _welcomed(self, link: NodeLink) -> NodeWelcome:
        answer = await link.receive(Message, self._settings.greeting_s)
        match answer:
            case NodeWelcome():
                return answer
            case NodeRefused(code=Unauthorized.code):
                raise Unauthorized(f"the gateway refuses the node: {answer.message}", component=DAEMON_COMPONENT)
            case NodeRefused():
                raise LinkClosed(f"the gateway refuses the node: {answer.message}", component=DAEMON_COMPONENT)
        raise ChannelError(f"a {type(answer).__name__} where a welcome was expected")


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
            told = f"another daemon has the state directory {state_dir}; give each its own --state-dir"
            raise Conflict(told, component=DAEMON_COMPONENT) from None
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
