"""The protocol between gateway and node: messages, frames, the connection."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import struct
import tarfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, cast

import msgspec

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.clock import Clock, MonotonicClock
from manager.config import NodeSpec, ServiceSpec
from manager.errors import ActionFailed, CodedError, InvalidConfig, Reason, Unsupported, exhaustion
from manager.function import FunctionSpec, Setting
from runtimes.sandbox.handler.sources import (
    SOURCES_LIMIT_BYTES,
    SOURCES_MAX,
    HandlerCopies,
    handler_files,
    too_much,
)
from runtimes.sandbox.runner.runner import FrameDecoder, ProtocolError
from runtimes.sandbox.session import Window
from runtimes.sandbox.snapshots import SnapshotRecord
from tangram.frames import HEADER, FrameCodec, FrameError


class Facts(msgspec.Struct, array_like=True, gc=False):
    """A part of what a frame says."""


class Message(Facts):
    """What one frame says."""


class ErrorFacts(Facts, kw_only=True):
    """A `CodedError`."""

    code: str
    message: str
    component: str
    reason: Reason | None
    retry_after_s: float | None
    #: `runtimes.node.protocol.pack`ed.
    detail: bytes
    result: bytes


# What travels of a file: a question, its bytes in pieces both ways as far as the other side has room, one end.
#
# A transfer lives as long as the link on which it was asked for; neither side goes on with one over another link.


class TransferVerb(StrEnum):
    """What is done with the files of a sandbox, or that those of a handler are kept (``path``: their digest)."""

    WRITE = "write"
    READ = "read"
    LIST = "list"
    UNPACK = "unpack"
    PACK = "pack"
    HANDLER = "handler"


class TransferRequest(Message, kw_only=True):
    """Begin a transfer; to the node."""

    #: Its number, which whoever sends it chooses.
    transfer: int = 0
    verb: TransferVerb
    path: str
    #: Empty for a handler's files.
    trajectory: str = ""
    #: Empty: the sandbox's own.
    user: str = ""
    #: Of a file that is written; None keeps what is there.
    mode: int | None = None
    #: Most bytes of what is read, packed or unpacked.
    limit_bytes: int = 0
    #: Whether names in an archive begin at the directory's own.
    base: bool = False


class TransferOpened(Message):
    """What is read is there, and its pieces follow; from the node."""

    transfer: int
    #: None if only the end tells.
    size_bytes: int | None


class TransferPiece(Message):
    """The next bytes, either way; an empty piece is the last one."""

    transfer: int
    data: bytes


class TransferCredit(Message):
    """So many bytes were taken, and there is room for as many more; either way."""

    transfer: int
    size_bytes: int


class TransferEnded(Message):
    """It is done, or failed, and the transfer is over; from the node."""

    transfer: int
    error: ErrorFacts | None
    #: Bytes that were written.
    size_bytes: int
    #: A directory's entries, msgpack of `runtimes.sandbox.command.FileStat`s.
    entries: bytes


class TransferStopped(Message):
    """Nobody wants more of it, or there is no more to give; to the node, which says nothing of it any more."""

    transfer: int


class FitnessChanged(Message):
    """Why nothing, or nothing new, can begin on the node; empty if anything can."""

    why: str
    #: Whether the trajectories that live there go on, as only no sandbox can be made.
    finishing: bool


class ModelsChanged(Message, kw_only=True):
    """All that there is of model services on a node now; what was said before counts no more."""

    #: Those that were prepared, with their costs as measured there.
    services: list[ServiceSpec]
    #: Service -> chunks on which it is resident, counted on the node.
    resident: dict[str, list[Chunk]]


# What travels of a session: its output from a byte on as far as there is room, its input, and what steers it.
#
# The node keeps the end of the output and numbers both byte by byte, so that after a cut either side sends again what
# the other has not received. A session is named by the claim of its attempt. Input and controls are requests, which are
# answered once.


class AttachSession(Message, kw_only=True):
    """Tell of this session on this link; to the node."""

    claim: str
    #: New for each side that steers it: its numbers are counted anew.
    life: str
    #: The first byte of output that is wanted, and how many may be under way.
    offset: int
    window_bytes: int
    #: Whether somebody reads it. If not, nothing is sent before its end, and its command waits for nobody.
    attended: bool
    #: Whether who reads it is slow: nothing is sent before there is room again.
    held: bool
    #: Seconds without a reader after which it is ended.
    unattended_s: float


class SessionCredit(Message):
    """Its output was taken up to here, and whether somebody reads it; to the node."""

    claim: str
    taken: int
    attended: bool


class SessionOpened(Message, kw_only=True):
    """Its command runs; from the node, on each link."""

    claim: str
    #: Where the output that is kept begins.
    start: int
    #: Bytes of input that it was passed.
    input_offset: int
    reads: bool
    #: How many bytes the node sends ahead of what was taken.
    window_bytes: int


class SessionWritten(Message):
    """A piece of its output; from the node."""

    claim: str
    offset: int
    stream: str
    data: bytes


class TerminalInput(msgspec.Struct, array_like=True):
    """The body of a request ``input``; that of ``withdraw`` is the number and offset of one that nobody waits for.

    Both are answered by a `TerminalInputState`. What was passed on is passed over, so that input may come again.
    """

    offset: int
    data: bytes
    #: Whether there is no more.
    end: bool = False


class TerminalInputState(msgspec.Struct, array_like=True):
    """How far the input of a session came, and whether its command reads on."""

    input_offset: int
    reads: bool


class SessionControl(msgspec.Struct, array_like=True):
    """The body of a request ``control``: resize its terminal (rows, columns), signal its foreground, or end it."""

    size: tuple[int, int] | None = None
    signal: int | None = None
    end: bool = False


class SnapshotsKept(Message):
    """All the snapshots that a node keeps now, their files apart; from the node, once it was asked for them."""

    records: list[SnapshotRecord]


class SnapshotOrder(msgspec.Struct, frozen=True):
    """What a request to take a snapshot says beside its trajectory."""

    #: Its name from the first: a request that is asked again, as its answer was lost, takes no second one.
    id: str
    #: Those that are not to be removed to make room: something is about to begin with them.
    spared: tuple[str, ...] = ()


# The channel between gateway and node: its frames, and what each of them says.
#
# Its frames are those of `tangram.frames`. There are no sequence numbers: a link only ever ends as a whole, and after
# each beginning both sides compare what they have (`Inventory`). An attempt of an action is named by its claim,
# `runtimes.sandbox.command.claims_of`. Only durations cross the wire.

PROTOCOL = 1
#: Bytes of the largest frame of somebody who has not shown who he is.
HANDSHAKE_BYTES = 64 * 2**10
COMPONENT = "node.channel"
#: An empty object, `pack`ed.
NOTHING = b"m\x80"


class ChannelError(CodedError):
    """The other side broke the protocol, or speaks another one; the link is cut."""

    code = "invalid_input"

    def __init__(self, message: str) -> None:
        super().__init__(message, component=COMPONENT)


# --- handshake


class NodeHello(Message, kw_only=True):
    """The node's first word."""

    protocol: int
    version: str
    name: str
    #: Which life of which state directory: while it stays the same, what an inventory does not list has never begun.
    epoch: str
    #: New for each process of the daemon.
    instance: str
    #: Admits a node once; empty if it has a key.
    ticket: str
    #: What an earlier welcome gave it; empty for a first time.
    key: str
    spec: NodeSpec
    labels: dict[str, str]
    #: What its sandboxes are, in a sentence (`runtimes.sandbox.spec.ProviderInfo`).
    isolation: str
    #: Whether it takes no new work.
    draining: bool = False
    #: As in `FitnessChanged`.
    unfit: str = ""
    finishing: bool = False


class NodeWelcome(Message, kw_only=True):
    """The gateway's answer."""

    #: How often the gateway was started.
    generation: int
    #: What the node shows from now on in place of a ticket.
    key: str
    #: Seconds between two beats, and of silence after which the other side is taken for gone.
    beat_s: float
    silent_s: float
    #: Whether the node was given up: it ends and removes all that it has before it says what that is.
    fence: bool = False


class NodeRefused(Message, kw_only=True):
    """The gateway's answer to a node that may not join."""

    code: str
    message: str
    #: Seconds after which it may try again.
    retry_after_s: float


class AttemptFacts(Facts, kw_only=True):
    """One attempt that a node knows of."""

    claim: str
    #: Whether the caller's own work may have begun.
    begun: bool
    ended: bool


class TrajectoryFacts(Facts, kw_only=True):
    """One trajectory's sandbox on a node."""

    trajectory: str
    #: Empty if it has none (any more), and so is what follows.
    sandbox: str = ""
    image: str = ""
    workdir: str = ""
    user: str = ""
    network: str = ""
    memory_bytes: int = 0
    alive: bool = False


class Inventory(Message, kw_only=True):
    """All that a node has, told at the beginning of each link."""

    epoch: str
    attempts: list[AttemptFacts]
    trajectories: list[TrajectoryFacts]


class Beat(Message):
    """It lives."""


# --- actions, to the node


class ExecuteAttempt(Message):
    """Begin an attempt; one that is known is only attached."""

    claim: str
    action: Action
    lease: Lease
    #: `function_bytes` of its function.
    function: bytes
    #: `pack`ed.
    input: bytes
    traceparent: str | None
    tracestate: str | None
    invocation_id: str


class AttachAttempt(Message):
    """Tell of this attempt again: its log from an offset, whether it asks to begin, its end."""

    claim: str
    log_offset: int


class AttemptPermit(Message):
    """The answer to `AttemptReady`: it may begin (``refusal`` is None), and whether it outlives its caller."""

    claim: str
    lasting: bool
    refusal: ErrorFacts | None


class CancelAttempt(Message):
    """Kill it. ``disowned``: nobody waits for its end."""

    claim: str
    disowned: bool


class AcknowledgeEnd(Message):
    """Its end is on record: forget it."""

    claim: str


class ResizeAttempt(Message):
    """It has another lease."""

    claim: str
    lease: Lease


# --- actions, from the node


class AttemptReady(Message):
    """It is ready, and asks whether it may begin."""

    claim: str


class AttemptStarted(Message):
    """The caller's own work runs."""

    claim: str


class AttemptLog(Message):
    """A piece of its log: records as `runtimes.node.protocol` writes them, from ``offset`` on."""

    claim: str
    offset: int
    records: bytes


class AttemptEnd(Message):
    """Its one end."""

    claim: str
    #: Without result and detail, which are `pack`ed.
    outcome: Outcome
    result: bytes
    detail: bytes
    #: Bytes of its log that were beyond its limit, and that the node's disk refused.
    omitted_bytes: int
    unkept_bytes: int = 0


# --- the rest


class NodeRequest(Message):
    """Something that is answered once; it may be asked again by the same number after a cut."""

    number: int
    #: ``open``, ``end``, ``choose`` (trajectories); ``prepare``, ``has_handler`` (whether the files of
    #: this digest are there: answered by ``done``), ``replicate``; ``snapshot``, ``snapshots`` (have all reported that
    #: there are, now and whenever that changes on this link), ``drop_snapshot``; ``input``, ``withdraw``, ``control``
    #: (sessions).
    verb: str
    name: str = ""
    task: str = ""
    #: `function_bytes`, if it is about one.
    function: bytes = b""
    body: bytes = b""
    chunk: Chunk | None = None


class NodeAnswer(Message):
    """The answer to a request."""

    number: int
    error: ErrorFacts | None
    done: bool = True
    body: bytes = b""


class SandboxChanged(Message):
    """A trajectory has a sandbox, or another one, or none any more."""

    facts: TrajectoryFacts


class NodeDraining(Message):
    """The node takes no new work, and leaves when nothing is left: an order to it, or its own word."""

    why: str


class NodeGoodbye(Message):
    """The daemon ends. ``killed``: nothing of what it had is left."""

    why: str
    killed: bool


#: Each kind is the place of its message among those above.
_FRAMES = FrameCodec(Message)
KINDS, encode = _FRAMES.kinds, _FRAMES.encode


def messages(frames: FrameDecoder, data: bytes) -> Iterator[Message]:
    """Yield the messages that are whole now; raises ChannelError, after which nothing more is read."""
    try:
        for (_, kind), body in frames.feed(data):
            yield decode(kind, body)
    except ProtocolError as error:
        raise ChannelError(f"{error}, more than {frames.limit}") from None


def decode(kind: int, body: bytes) -> Message:
    """Return the message in a frame's body; raises ChannelError."""
    try:
        return _FRAMES.decode(kind, body)
    except FrameError as error:
        raise ChannelError(str(error)) from None


# --- nouns


def pack(value: object) -> bytes:
    """Return plain JSON values as bytes.

    They are msgpack, and JSON where that is too narrow: for lone surrogates and integers beyond 64 bits.
    """
    try:
        return b"m" + msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return b"j" + json.dumps(value).encode("ascii")


def unicode(text: str) -> str:
    """Return a text without lone surrogates, which travel nowhere."""
    return text.encode("utf-8", "replace").decode("utf-8")


def unpack(packed: bytes) -> object:
    """Return what `pack` was given, tuples as lists; raises ChannelError."""
    try:
        return msgspec.msgpack.decode(packed[1:]) if packed[:1] == b"m" else json.loads(packed[1:])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ChannelError(f"a value that does not fit: {error}") from None


def unpack_object(packed: bytes) -> dict[str, object]:
    """Return an object that was packed; raises ChannelError."""
    if packed == NOTHING:
        return {}
    value = unpack(packed)
    if not isinstance(value, dict):
        raise ChannelError(f"an object was expected, not {type(value).__name__}")
    return value


def function_bytes(function: FunctionSpec) -> bytes:
    """Return a function as it travels; what only the scheduler reads of it stays."""
    return msgspec.json.encode(replace(function, elasticity=None), enc_hook=_encode_path)


def _encode_path(value: object) -> str:
    """Return a path as it travels; raises TypeError for what does not."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not travel")


def _decode_path(type_: type, value: object) -> object:
    """Return a path that travelled, or what a schema says; raises TypeError for what does not travel."""
    if type_ is object:
        return value
    if type_ is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{type_.__name__} does not travel")


_F = TypeVar("_F", bound=FunctionSpec)


def read_function(data: bytes, type_: type[_F]) -> _F:
    """Return a function that travelled; raises ChannelError."""
    try:
        return msgspec.json.decode(data, type=type_, dec_hook=_decode_path)
    except (msgspec.MsgspecError, ValueError, TypeError, AssertionError) as error:
        raise ChannelError(f"a function that does not fit: {error}") from None


def end_of(claim: str, outcome: Outcome, omitted_bytes: int) -> AttemptEnd:
    """Return an outcome as the end of an attempt."""
    bare = replace(outcome, result=None, detail={}, message=unicode(outcome.message), usage=dict(outcome.usage))
    detail = pack(dict(outcome.detail)) if outcome.detail else NOTHING
    return AttemptEnd(claim, bare, pack(outcome.result), detail, omitted_bytes)


def outcome_of(end: AttemptEnd) -> Outcome:
    """Return the outcome that an end tells of, without figures that cannot be; raises ChannelError."""
    outcome = end.outcome
    return replace(
        outcome,
        result=unpack(end.result),
        execution_s=outcome.execution_s if _can_be(outcome.execution_s) else 0.0,
        retry_after_s=outcome.retry_after_s if _can_be(outcome.retry_after_s or 0.0) else None,
        usage={name: value for name, value in outcome.usage.items() if _can_be(value)},
        detail=unpack_object(end.detail),
    )


def _can_be(figure: float) -> bool:
    return 0.0 <= figure <= 1e18  # nan is not; squares and sums of what is are finite


#: Bytes that are kept for who reads a handshake; beyond these nothing more is taken from the peer meanwhile.
READ_BYTES = 128 * 2**10
#: Bytes that are handed to the transport ahead of the peer. More waits here, frame by frame: a transport keeps all in
#: one piece, which it moves as a whole whenever that grows.
HANDED_BYTES = 2**20
#: Seconds for the last bytes and TLS's own farewell.
FAREWELL_S = 0.5
#: Seconds for which what is in no hurry waits for something to travel with.
PATIENCE_S = 0.02
#: Moments in the time of a beat at which links tick.
_MOMENTS = 16
_BEAT = encode(Beat())
_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """The bounds of a link."""

    beat_s: Annotated[float, Setting("seconds between two signs of life", gt=0)] = 1.0
    silent_s: Annotated[float, Setting("seconds of silence after which the other side is gone", gt=0)] = 3.0
    #: Largest frame: what a message may take of the memory of either side.
    frame_max_bytes: int = 64 * 2**20
    #: Most that the other side may leave unread: two frames.
    unsent_max_bytes: int = 128 * 2**20
    #: Most transfers of files at once: each holds its window of bytes on either side.
    transfers_max: int = 64


class LinkClosed(CodedError):
    """The link is gone."""

    code = "capacity_exceeded"


class Pulse:
    """When links tick: those of many meet at few moments, and the loop wakes up once for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        #: By moment, who ticks then.
        self._meeting: dict[float, list[Callable[[], None]]] = {}

    def call_at(self, moment_s: float, tick: Callable[[], None]) -> None:
        """Call ``tick`` at an instant of the loop's clock; it is not taken back."""
        meeting = self._meeting.get(moment_s)
        if meeting is None:
            meeting = self._meeting[moment_s] = []
            self._loop.call_at(moment_s, self._tick, moment_s)
        meeting.append(tick)

    def _tick(self, moment_s: float) -> None:
        for tick in self._meeting.pop(moment_s):
            tick()


class NodeLink(asyncio.Protocol):
    """Frames over a connection. What is sent in one turn of the loop travels together; nothing here waits for the peer.

    What comes is kept, as bytes, for who asks for it, until the link runs.
    """

    def __init__(
        self,
        settings: LinkSettings | None = None,
        *,
        clock: Clock | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """``pulse``: that of all the links of this side, if it has many."""
        self.settings = settings or LinkSettings()
        self._transport: asyncio.Transport
        self._clock = clock or MonotonicClock()
        self._loop = asyncio.get_running_loop()
        self._frames = FrameDecoder(HEADER, limit=self.settings.frame_max_bytes)
        self._kept = bytearray()
        self._received: deque[Message] = deque()
        self._handle: Callable[[Message], None] | None = None
        #: Something has come, or nothing more does.
        self._arrived = asyncio.Event()
        #: Done when there is nothing more to come, with why if that is an error.
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._over.add_done_callback(lambda over: over.cancelled() or over.exception())  # nobody may be waiting
        #: The connection is gone; the transport has room.
        self._lost, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        #: So much may wait here without a look at what the transport has.
        self._watched_bytes = self.settings.unsent_max_bytes - self.settings.frame_max_bytes - HANDED_BYTES
        #: Whether what is unsent is handed over in this turn; when it is if nothing else is sent.
        self._leaving = False
        self._patience: asyncio.TimerHandle | None = None
        #: Hands over what waits for the peer to read.
        self._pumping: asyncio.Task[None] | None = None
        self._pulse = pulse or Pulse()
        #: When something was heard last, but for the time since in which this process slept; when it ticks next.
        self._received_s = self._due_s = self._clock.now()
        #: Whether nothing was heard for too long at the last tick.
        self._in_doubt = False
        self.peer = ""
        self.closed = asyncio.Event()
        #: Why it was closed.
        self.why = ""

    # --- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.peer = str(transport.get_extra_info("peername") or "")

    def data_received(self, data: bytes) -> None:
        if self._over.done():
            return
        if self._handle is not None:
            try:
                self._take(data, self._handle)
            except Exception as error:  # noqa: BLE001  # it is raised where it is waited for
                self._finish(error)
            return
        had_room = len(self._kept) <= READ_BYTES
        self._kept += data
        self._arrived.set()
        if had_room and len(self._kept) > READ_BYTES:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error)
        self._lost.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _finish(self, error: Exception | None) -> None:
        """Nothing more is taken."""
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)
        self._arrived.set()

    # --- out

    def send(self, message: Message, *, in_no_hurry: bool = False) -> None:
        """Send a message soon. Never waits and never raises: who leaves too much unread is cut off.

        ``in_no_hurry``: it leaves with what is said next, or within `PATIENCE_S`.
        """
        if self.closed.is_set():
            return
        frame = encode(message)
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        if in_no_hurry and not self._leaving:
            if self._patience is None:
                self._patience = self._loop.call_later(PATIENCE_S, self._lose_patience)
        elif not self._leaving:
            self._leaving = True
            self._loop.call_soon(self._flush)
        if self._unsent_bytes > self._watched_bytes and self.unsent_bytes > self.settings.unsent_max_bytes:
            self.close(f"the other side left more than {self.settings.unsent_max_bytes} bytes unread")

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the operating system has not taken yet."""
        return self._unsent_bytes + self._transport.get_write_buffer_size()

    async def drained(self) -> None:
        """Wait until there is little unsent, or the link is gone."""
        self._flush()
        if self._pumping is not None:
            await asyncio.wait([self._pumping])
        await self._writable.wait()

    def _lose_patience(self) -> None:
        self._patience = None
        if not self._leaving:
            self._flush()

    def _flush(self) -> None:
        self._leaving = False
        self._hand_over()
        if self._unsent and self._pumping is None and not self.closed.is_set():
            self._pumping = self._loop.create_task(self._pump())

    def _hand_over(self) -> None:
        """Hand frames to the transport as far as it has room, all in one piece."""
        frames, room_bytes = [], HANDED_BYTES - self._transport.get_write_buffer_size()
        while self._unsent and room_bytes > 0:
            frames.append(self._unsent.popleft())
            room_bytes -= len(frames[-1])
        if frames:
            data = frames[0] if len(frames) == 1 else b"".join(frames)
            self._unsent_bytes -= len(data)
            if not self._transport.is_closing():
                self._transport.write(data)

    async def _pump(self) -> None:
        """Hand over the rest as the peer reads."""
        while self._unsent and not self.closed.is_set() and not self._lost.is_set():
            await self._writable.wait()
            self._hand_over()
        self._pumping = None

    # --- in

    async def receive(self, expected: type[_M], within_s: float, *, frame_max_bytes: int = HANDSHAKE_BYTES) -> _M:
        """Return the next message, which must be a ``wanted``: for the handshake.

        Raises LinkClosed if none comes in time, ChannelError for another one, or a `NodeHello` of another protocol,
        which is told so. Afterwards the link is closed.
        """
        self._frames.limit = frame_max_bytes
        try:
            async with asyncio.timeout(within_s):
                while not self._received:
                    self._feed(await self._read())
        except TimeoutError:
            self.close(f"nothing was said within {within_s:g} s")
            raise LinkClosed(self.why, component=COMPONENT) from None
        except (OSError, CodedError) as error:
            if isinstance(error, ChannelError):
                self._refuse(error)
            self.close(str(error) or type(error).__name__)
            raise error if isinstance(error, CodedError) else LinkClosed(self.why, component=COMPONENT) from None
        finally:
            self._frames.limit = self.settings.frame_max_bytes
        message = self._received.popleft()
        if isinstance(message, NodeHello) and message.protocol != PROTOCOL:
            wrong = ChannelError(f"the node speaks protocol {message.protocol}, the gateway {PROTOCOL}: upgrade one")
        elif not isinstance(message, expected):
            wrong = ChannelError(f"a {type(message).__name__} where a {expected.__name__} was expected")
        else:
            return message
        self._refuse(wrong)
        self.close(wrong.message)
        raise wrong

    async def _read(self) -> bytes:
        """Return what has come; raises OSError or LinkClosed if nothing more does."""
        while not self._kept:
            if self._over.done():
                self._over.result()
                raise LinkClosed("the other side hung up", component=COMPONENT)
            self._arrived.clear()
            await self._arrived.wait()
        return self._let_go()

    def _let_go(self) -> bytes:
        data = bytes(self._kept)
        self._kept.clear()
        if len(data) > READ_BYTES:
            self._transport.resume_reading()
        return data

    def _refuse(self, error: ChannelError) -> None:
        self.send(NodeRefused(code=error.code, message=error.message, retry_after_s=60.0))

    async def run(self, handle: Callable[[Message], None]) -> str:
        """Hand over every message until the link is closed; return why it was. Beats go to and fro meanwhile.

        ``handle`` must not wait. It may raise ChannelError, which cuts the link.
        """
        self._received_s = self._due_s = self._clock.now()
        self._arm()
        why = "its reader was stopped"
        try:
            self._take(self._let_go(), handle)
            self._handle = handle
            await asyncio.shield(self._over)
            why = "the other side hung up"
        except ChannelError as error:
            why = error.message
        except OSError as error:
            why = str(error) or type(error).__name__
        finally:
            self.close(why)
        return self.why

    def _take(self, data: bytes, handle: Callable[[Message], None]) -> None:
        if data == _BEAT and not self._frames.incoming:
            self._received_s = self._clock.now()
            return
        self._feed(data)
        while self._received and not self.closed.is_set():
            message = self._received.popleft()
            if type(message) is not Beat:
                handle(message)

    def _feed(self, data: bytes) -> None:
        self._received_s = self._clock.now()
        self._received.extend(messages(self._frames, data))

    # --- life

    def tick(self) -> None:
        """Send a beat; close the link if nothing was heard for too long, at this tick and at the one before.

        Time that this process slept is not the other side's silence, and what came meanwhile is read between two ticks.
        """
        now_s, settings = self._clock.now(), self.settings
        if now_s > self._due_s:
            self._received_s = min(now_s, self._received_s + now_s - self._due_s)
        self._due_s = now_s + settings.beat_s
        silent, doubted = now_s - self._received_s > settings.silent_s, self._in_doubt
        self._in_doubt = silent
        if silent and doubted:
            self.close(f"nothing was heard for {now_s - self._received_s:.1f} s")
        elif not self._unsent and not self._transport.is_closing():  # what waits to leave is a sign of life as well
            self._transport.write(_BEAT)

    def _tick_again(self) -> None:
        self.tick()
        if not self.closed.is_set():
            self._arm()

    def _arm(self) -> None:
        """Come back for the next beat, or when the other side has been silent for too long if that is earlier.

        Either at the next of the moments that links have in common, or if it was just missed, at the last one.
        """
        settings, clock_s, now_s = self.settings, self._clock.now(), self._loop.time()
        wait_s, left_s = settings.beat_s, self._received_s + settings.silent_s - clock_s
        step_s = (wait_s if wait_s < settings.silent_s else settings.silent_s) / _MOMENTS
        if left_s < wait_s:
            wait_s = left_s
        moment_s = int((now_s + wait_s) / step_s + 0.75) * step_s
        if moment_s <= now_s:
            moment_s = (int(now_s / step_s) + 1) * step_s
        self._due_s = clock_s + moment_s - now_s
        self._pulse.call_at(moment_s, self._tick_again)

    def close(self, why: str) -> None:
        """Close it, after what was sent already and the peer has room for; the first reason counts. Idempotent."""
        if self.closed.is_set():
            return
        self.why = why
        self._hand_over()
        self.closed.set()
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._pumping is not None:
            self._pumping.cancel()
        if self._patience is not None:
            self._patience.cancel()
        self._finish(None)
        self._transport.close()
        self._loop.call_later(FAREWELL_S, self._transport.abort)  # a peer that is silent answers no farewell

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        await self.closed.wait()
        await self._lost.wait()


def failed(error: CodedError) -> Outcome:
    """Return an error as the end of an attempt that it kept from running."""
    if isinstance(error, ActionFailed):
        reason = error.reason
    else:
        reason = Reason.INVALID_INPUT if isinstance(error, Unsupported) else Reason.INTERNAL
    return Outcome(
        state=State.FAILED, reason=reason, message=error.message, component=error.component, detail=error.detail
    )


def facts_of(error: CodedError) -> ErrorFacts:
    """Return an error as it travels."""
    reason, result = (error.reason, error.result) if isinstance(error, ActionFailed) else (None, None)
    return ErrorFacts(
        code=error.code,
        message=unicode(error.message),
        component=error.component,
        reason=reason,
        retry_after_s=error.retry_after_s,
        detail=pack(dict(error.detail)),
        result=pack(result),
    )


def error_of(facts: ErrorFacts) -> CodedError:
    """Return the error that travelled; one of a code that is not known here is a plain CodedError."""
    detail = unpack_object(facts.detail)
    if facts.reason is not None:
        return ActionFailed(
            facts.reason,
            facts.message,
            component=facts.component,
            result=unpack(facts.result),
            retry_after_s=facts.retry_after_s,
            detail=detail,
        )
    kinds = {kind.code: kind for kind in CodedError.__subclasses__() if kind.__module__ == CodedError.__module__}
    kind = kinds.get(facts.code, CodedError)
    return kind(facts.message, component=facts.component, retry_after_s=facts.retry_after_s, detail=detail)


def as_failure(error: CodedError) -> ActionFailed:
    """Return an error as what ends an action: by its own reason, or as a fault of ours."""
    if isinstance(error, ActionFailed):
        return error
    return ActionFailed(Reason.INTERNAL, error.message, component=error.component, retry_after_s=error.retry_after_s)


def mislaid(message: str) -> Outcome:
    """Return the end of an attempt that its node lost."""
    return Outcome(state=State.LOST, reason=Reason.NODE_LOST, message=message, component=COMPONENT)


def oversized(outcome: Outcome, result_bytes: int) -> Outcome:
    """Return the outcome of an attempt whose result is too large to be told."""
    return Outcome(
        state=State.FAILED,
        reason=Reason.OUTPUT_LIMIT,
        message=f"its result of {result_bytes} bytes is more than a frame of the channel holds",
        component=COMPONENT,
        execution_s=outcome.execution_s,
    )


# A log is a sequence of records: the stream, the bytes of the text, the text.

RECORD = struct.Struct(">BI")
STREAMS = ("stdout", "stderr", "log", "system")
STREAM_CODES = {name: code for code, name in enumerate(STREAMS)}


def records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the records (stream, text) of a piece; raises ChannelError if it holds no whole number of them."""
    place = 0
    while place < len(data):
        if len(data) - place < RECORD.size:
            raise ChannelError("a torn record in a log")
        code, size_bytes = RECORD.unpack_from(data, place)
        place += RECORD.size + size_bytes
        if place > len(data) or code >= len(STREAMS):
            raise ChannelError("a torn record in a log")
        yield STREAMS[code], data[place - size_bytes : place].decode("utf-8", "surrogatepass")


#: Bytes of one piece: others have a turn of both loops between two of them.
PIECE_BYTES = 16 * 2**10
#: Bytes that are sent ahead of the other side's word that it has taken some. An action's frame waits behind what of
#: them is still to be taken, of each transfer: milliseconds.
AHEAD_BYTES = 256 * 2**10
#: Bytes that the other side may send ahead. Gateways and nodes of before sent so much.
WINDOW_BYTES = 2**20


class FileTransfer:
    """The bytes of one transfer on one link, in pieces: those that arrive, for one reader, and those that leave."""

    def __init__(self, request: TransferRequest, link: NodeLink) -> None:
        self.request, self.link = request, link
        self._waiting: deque[bytes] = deque()
        self._inflow, self._outflow = Window(WINDOW_BYTES), Window(AHEAD_BYTES)
        #: Bytes that were taken, which the other side was not told yet.
        self._taken_bytes = 0
        self._piece_bytes = min(PIECE_BYTES, link.settings.frame_max_bytes // 2)
        self._whole = False
        self._error: CodedError | None = None
        self._changed = asyncio.Event()

    def take(self, message: TransferPiece | TransferCredit) -> None:
        """A piece has arrived, or the other side has room again; raises ChannelError for more than there was."""
        if isinstance(message, TransferCredit):
            if not 0 < message.size_bytes <= self._outflow.used_bytes:
                raise ChannelError("more bytes of a file were taken than were sent")
            self._outflow.free(message.size_bytes)
            return
        self._inflow.use(len(message.data))
        if self._inflow.used_bytes > WINDOW_BYTES:
            raise ChannelError(f"more than {WINDOW_BYTES} bytes of a file were sent ahead")
        if message.data:
            self._waiting.append(message.data)
        else:
            self._whole = True
        self._changed.set()

    def fail(self, error: CodedError) -> None:
        """Nothing more comes, and its reader is told why once it has had what came."""
        self._error = self._error or error
        self._changed.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they come, to the last one; raises what `fail` was given if that did not come.

        What was taken is told, a quarter of what is sent ahead at once.
        """
        while True:
            while self._waiting:
                data = self._waiting.popleft()
                self._taken_bytes += len(data)
                due = self._taken_bytes >= AHEAD_BYTES // 4
                if due:
                    self.link.send(TransferCredit(self.request.transfer, self._taken_bytes))
                    self._inflow.free(self._taken_bytes)
                    self._taken_bytes = 0
                yield data
                if due:
                    await asyncio.sleep(0)  # who takes them may not wait: a window of pieces would be one turn
            if self._whole:
                return
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    async def send(self, chunks: AsyncIterator[bytes]) -> None:
        """Send all of it, one piece whenever the link has passed on what it had; raises what ``chunks`` raises."""
        async for chunk in chunks:
            for start in range(0, len(chunk), self._piece_bytes):
                await self._outflow.free_bytes()  # of any size, so that it gets full: some only tell of so much at once
                piece = chunk[start : start + self._piece_bytes]
                self._outflow.use(len(piece))
                self.link.send(TransferPiece(self.request.transfer, piece))
                await self.link.drained()
                await asyncio.sleep(0)  # where there is room, nothing above has waited
        self.link.send(TransferPiece(self.request.transfer, b""))


# The files of a handler as one archive, and the digest of all of them, which is their name on a node.
#
# The digest is that of names, bytes and modes, not of the archive: a node takes it of what it has unpacked, and again
# of what it finds when it was started anew.

ARCHIVE_COMPONENT = "node.handlers"
#: Bytes of the largest archive: its files, and what a tar says of each of them.
ARCHIVE_MAX_BYTES = SOURCES_LIMIT_BYTES + SOURCES_MAX * 8 * tarfile.BLOCKSIZE
#: Bytes of archives that a gateway keeps in mind for the next node.
KEPT_MAX_BYTES = 2 * ARCHIVE_MAX_BYTES


class HandlerArchive(NamedTuple):
    """What travels, and its name."""

    digest: str
    data: bytes


class HandlerArchives:
    """The archives of a gateway's handlers. Use from one event loop."""

    def __init__(self, copies: HandlerCopies | None = None) -> None:
        self._copies = copies or HandlerCopies()
        #: By copy, which never changes, the one used last at the end.
        self._kept: dict[Path, HandlerArchive] = {}
        self._packing = asyncio.Lock()

    async def of(self, function: FunctionSpec) -> HandlerArchive:
        """Return the files that this revision of a handler runs.

        Raises InvalidConfig for more than travels, CapacityExceeded where this machine ran short.
        """
        directory = await self._copies.of(function)
        async with self._packing:
            archive = self._kept.pop(directory, None)
            if archive is None:
                try:
                    archive = await asyncio.to_thread(packed, directory, self._copies.excluded)
                except OSError as error:
                    message = f"the files of {directory} cannot be read: {error}"
                    short = exhaustion(error, ARCHIVE_COMPONENT)
                    raise short or InvalidConfig(message, component=ARCHIVE_COMPONENT) from None
            if directory.parent == self._copies.root:
                self._kept[directory] = archive
            while sum(len(each.data) for each in self._kept.values()) > KEPT_MAX_BYTES:
                del self._kept[next(iter(self._kept))]
        return archive


def packed(directory: Path, excluded: frozenset[Path] = frozenset()) -> HandlerArchive:
    """Return the files in a directory, but for what lies in the excluded ones; raises InvalidConfig and OSError."""
    out, digest, left_bytes = io.BytesIO(), hashlib.sha256(), SOURCES_LIMIT_BYTES
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in handler_files(directory, excluded):
            with each.path.open("rb") as file:
                data = file.read(left_bytes + 1)
            left_bytes -= len(data)
            if left_bytes < 0:
                raise too_much(directory)
            entry = tarfile.TarInfo(each.name)
            entry.size, entry.mode = len(data), each.mode
            tar.addfile(entry, io.BytesIO(data))
            digest.update(os.fsencode(f"{each.name}\0{entry.mode:o}\0{len(data)}\0"))
            digest.update(data)
    return HandlerArchive(digest.hexdigest(), out.getvalue())
