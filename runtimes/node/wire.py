"""The channel between gateway and node: its frames, and what each of them says.

A frame is its body's length (4 bytes, big-endian), its kind (1 byte) and its body in msgpack. There are no sequence
numbers: a link only ever ends as a whole, and after each beginning both sides compare what they have (`Inventory`). An
attempt of an action is named by its claim, `runtimes.sandbox.command.claims_of`. Only durations cross the wire.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from manager.action import Action, Chunk, Lease, Outcome
from manager.config import NodeSpec
from manager.errors import CodedError
from manager.function import FunctionSpec
from runtimes.node.files.messages import FILES_MESSAGES
from runtimes.node.fitness.messages import FitnessChanged
from runtimes.node.message import ErrorFacts, Message, ToldOutcome
from runtimes.node.models.messages import ModelsChanged
from runtimes.node.sessions.messages import SESSION_MESSAGES
from runtimes.node.snapshots.messages import SnapshotsKept

PROTOCOL = 1
HEADER = struct.Struct(">IB")
#: Bytes of the largest frame of somebody who has not shown who he is.
GREETING_BYTES = 64 * 2**10
COMPONENT = "node.channel"
#: An empty object, `pack`ed.
NOTHING = b"m\x80"


class ChannelError(CodedError):
    """The other side broke the protocol, or speaks another one; the link is cut."""

    code = "invalid_input"

    def __init__(self, message: str) -> None:
        super().__init__(message, component=COMPONENT)


# --- greeting


class NodeHello(Message, kw_only=True):
    """The node's first word."""

    protocol: int
    version: str
    name: str
    #: The kernel's boot id.
    boot: str
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
    #: What its sandboxes are, in a sentence, and their kind (`runtimes.sandbox.promises.ProviderInfo`).
    isolation: str
    sandboxes: str
    #: Whether it takes no new work.
    draining: bool = False
    #: Why nothing can begin there now; empty if anything can.
    unfit: str = ""
    #: Why no sandbox can be made there, though what lives there goes on; empty if one can.
    newcomers: str = ""


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


class AttemptFacts(Message, kw_only=True):
    """One attempt that a node knows of."""

    claim: str
    action_id: str
    attempt: int
    trajectory: str | None
    #: Whether the caller's own work may have begun.
    begun: bool
    ended: bool
    #: Seconds that the work has run.
    ran_s: float


class TrajectoryFacts(Message, kw_only=True):
    """One trajectory's sandbox on a node."""

    trajectory: str
    task: str
    #: Empty if it has none (any more).
    sandbox: str
    image: str
    workdir: str
    user: str
    network: str
    memory_bytes: int
    idle_ttl_s: float
    alive: bool


class Inventory(Message, kw_only=True):
    """All that a node has, told at the beginning of each link."""

    epoch: str
    attempts: list[AttemptFacts]
    trajectories: list[TrajectoryFacts]


class Beat(Message):
    """It lives."""


# --- actions, to the node


class DefineFunction(Message):
    """What a digest stands for from now on."""

    digest: str
    function: bytes


class ExecuteAttempt(Message):
    """Begin an attempt; one that is known is only attached."""

    claim: str
    action: Action
    lease: Lease
    #: Digest of its function.
    function: str
    #: `pack`ed.
    input: bytes
    traceparent: str | None
    tracestate: str | None
    context: dict[str, str]


class AttachAttempt(Message):
    """Tell of this attempt again: its log from an offset, whether it asks to begin, its end."""

    claim: str
    log_offset: int


class AttemptGo(Message):
    """The answer to `AttemptBegins`: it may begin (``refusal`` is None), and whether it outlives its caller."""

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


class AttemptBegins(Message):
    """It is ready, and asks whether it may begin."""

    claim: str


class AttemptStarted(Message):
    """The caller's own work runs."""

    claim: str


class AttemptLog(Message):
    """A piece of its log: records as `runtimes.node.spool` writes them, from ``offset`` on."""

    claim: str
    offset: int
    records: bytes


class AttemptEnd(Message):
    """Its one end."""

    claim: str
    #: Without result and detail, which are `pack`ed.
    outcome: ToldOutcome
    result: bytes
    detail: bytes
    #: Bytes of its log that were said and not kept.
    omitted_bytes: int


# --- the rest


class NodeRequest(Message):
    """Something that is answered once; it may be asked again by the same number after a cut."""

    number: int
    #: ``open``, ``end``, ``prepare``, ``replicate``, ``mark_lost``, ``choose``, ``has_handler`` (whether the files of
    #: this digest are there: answered by ``done``), all in `runtimes.node.requests`, and those of
    #: `runtimes.node.snapshots.messages`.
    verb: str
    name: str = ""
    task: str = ""
    #: Digest of a function.
    function: str = ""
    body: bytes = b""
    chunk: Chunk | None = None


class NodeAnswer(Message):
    """The answer to a request."""

    number: int
    error: ErrorFacts | None
    done: bool = True


class SandboxChanged(Message):
    """A trajectory has a sandbox, or another one, or none any more."""

    facts: TrajectoryFacts


class DrainNode(Message):
    """Take no new work, and leave when nothing is left."""

    why: str


class NodeDraining(Message):
    """The node takes no new work."""

    why: str


class NodeGoodbye(Message):
    """The daemon ends. ``killed``: nothing of what it had is left."""

    why: str
    killed: bool


#: Every message by the kind that stands in its frame. What was released keeps its number.
KINDS: Mapping[int, type[Message]] = dict(
    enumerate(
        (
            NodeHello,
            NodeWelcome,
            NodeRefused,
            Inventory,
            Beat,
            DefineFunction,
            ExecuteAttempt,
            AttachAttempt,
            AttemptGo,
            CancelAttempt,
            AcknowledgeEnd,
            ResizeAttempt,
            AttemptBegins,
            AttemptStarted,
            AttemptLog,
            AttemptEnd,
            NodeRequest,
            NodeAnswer,
            SandboxChanged,
            DrainNode,
            NodeDraining,
            NodeGoodbye,
            *FILES_MESSAGES,
            ModelsChanged,
            *SESSION_MESSAGES,
            SnapshotsKept,
            FitnessChanged,
        ),
        1,
    )
)
_NUMBERS = {message: kind for kind, message in KINDS.items()}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Message]] = {
    kind: msgspec.msgpack.Decoder(message) for kind, message in KINDS.items()
}
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return a message as a frame."""
    body = _ENCODER.encode(message)
    return HEADER.pack(len(body), _NUMBERS[type(message)]) + body


class FrameReader:
    """Bytes in, messages out, whatever the pieces in which the bytes come."""

    def __init__(self, frame_max_bytes: int) -> None:
        self.frame_max_bytes = frame_max_bytes
        #: The beginning of a frame, and the bytes that are needed to go on with it.
        self._unread = bytearray()
        self._wanted_bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether no frame has begun and not ended."""
        return not self._unread

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are whole now; raises ChannelError, after which nothing more is read."""
        if self._unread:
            self._unread += data
            if len(self._unread) < self._wanted_bytes:
                return
            data = bytes(self._unread)
            self._unread.clear()
        place, held, view = 0, len(data), memoryview(data)
        self._wanted_bytes = HEADER.size
        try:
            while held - place >= HEADER.size:
                size_bytes, kind = HEADER.unpack_from(data, place)
                if size_bytes > self.frame_max_bytes:
                    raise ChannelError(f"a frame of {size_bytes} bytes, more than {self.frame_max_bytes}")
                begin = place + HEADER.size
                if held - begin < size_bytes:
                    self._wanted_bytes = HEADER.size + size_bytes
                    break
                place = begin + size_bytes
                yield decode(kind, view[begin:place])
        finally:
            self._unread += view[place:]


def decode(kind: int, body: bytes | memoryview) -> Message:
    """Return the message in a frame's body; raises ChannelError."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ChannelError(f"a frame of unknown kind {kind}")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, AssertionError) as error:
        raise ChannelError(f"a {KINDS[kind].__name__} that does not fit: {error}") from None


# --- nouns


def pack(value: object) -> bytes:
    """Return plain JSON values as bytes.

    They are msgpack, and JSON where that is too narrow: for lone surrogates and integers beyond 64 bits.
    """
    try:
        return b"m" + _ENCODER.encode(value)
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
    return msgspec.json.encode(replace(function, elasticity=None), enc_hook=_told)


def _told(value: object) -> str:
    """Return a path as it travels; raises TypeError for what does not."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not travel")


def _heard(wanted: type, value: object) -> object:
    """Return a path that travelled, or what a schema says; raises TypeError for what does not travel."""
    if wanted is object:
        return value
    if wanted is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{wanted.__name__} does not travel")


_F = TypeVar("_F", bound=FunctionSpec)


def read_function(data: bytes, wanted: type[_F]) -> _F:
    """Return a function that travelled; raises ChannelError."""
    try:
        return msgspec.json.decode(data, type=wanted, dec_hook=_heard)
    except (msgspec.MsgspecError, ValueError, TypeError, AssertionError) as error:
        raise ChannelError(f"a function that does not fit: {error}") from None


def end_of(claim: str, outcome: Outcome, omitted_bytes: int) -> AttemptEnd:
    """Return an outcome as the end of an attempt."""
    told = ToldOutcome(
        state=outcome.state,
        reason=outcome.reason,
        message=unicode(outcome.message) if outcome.message else "",
        component=outcome.component,
        execution_s=outcome.execution_s,
        retry_after_s=outcome.retry_after_s,
        usage=dict(outcome.usage),
    )
    detail = pack(dict(outcome.detail)) if outcome.detail else NOTHING
    return AttemptEnd(claim, told, pack(outcome.result), detail, omitted_bytes)


def outcome_of(end: AttemptEnd) -> Outcome:
    """Return the outcome that an end tells of, without figures that cannot be; raises ChannelError."""
    told = end.outcome
    return Outcome(
        state=told.state,
        result=unpack(end.result),
        reason=told.reason,
        message=told.message,
        component=told.component,
        execution_s=told.execution_s if _can_be(told.execution_s) else 0.0,
        retry_after_s=told.retry_after_s if _can_be(told.retry_after_s or 0.0) else None,
        usage={name: value for name, value in told.usage.items() if _can_be(value)} if told.usage else {},
        detail=unpack_object(end.detail),
    )


def _can_be(figure: float) -> bool:
    return 0.0 <= figure <= 1e18  # nan is not; squares and sums of what is are finite
