"""Terminal sessions and the tail of their output."""

from __future__ import annotations

import asyncio
import signal
from array import array
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, NamedTuple, Protocol

from manager.errors import CapacityExceeded, Conflict, InvalidInput
from manager.function import Setting

STREAMS = ("stdout", "stderr")
_CODES = {name: code for code, name in enumerate(STREAMS)}
#: Bytes from which on a block is full.
BLOCK_BYTES = 16 * 2**10
#: Most that is kept beyond what is asked for, of what its reader has not had: more is under way between a command
#: that is told to wait and its reader than some are asked to keep, and sockets to other machines hold megabytes.
UNDER_WAY_BYTES = 8 * 2**20
#: Most pieces that are returned at once, however short they are.
PAGE_PIECES = 1024


class Window:
    """The credit of one direction of a stream: bytes that may be under way until the other side has taken some."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        #: Bytes that are under way; more than the window's where the other side does not keep to it.
        self.used_bytes = 0
        #: Whether nothing more is taken.
        self.is_shut = False
        self._changed = asyncio.Event()
        self._changed.set()

    def use(self, size_bytes: int) -> None:
        """So many bytes are under way."""
        self.used_bytes += size_bytes
        if self.used_bytes >= self.size_bytes and not self.is_shut:
            self._changed.clear()

    def free(self, size_bytes: int) -> None:
        """So many of them were taken."""
        self.used_bytes -= size_bytes
        if self.used_bytes < self.size_bytes:
            self._changed.set()

    def shut(self) -> None:
        """Nothing more is taken."""
        self.is_shut = True
        self._changed.set()

    async def free_bytes(self) -> int:
        """Return how many bytes may be sent now, waiting for some; 0 if nothing more is taken."""
        await self._changed.wait()
        return 0 if self.is_shut else self.size_bytes - self.used_bytes


class SessionPiece(NamedTuple):
    """What a session said, and where it begins."""

    offset: int
    stream: str
    data: bytes


class _Block:
    """Bytes that follow each other, and where among them the stream changes."""

    __slots__ = ("changes", "codes", "data", "offset")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.data = bytearray()
        #: Where each run of one stream begins, and which stream that is.
        self.changes = array("I")
        self.codes = bytearray()

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    def add(self, code: int, data: bytes) -> None:
        if not self.codes or self.codes[-1] != code:
            self.changes.append(len(self.data))
            self.codes.append(code)
        self.data += data

    def pieces(self, offset: int) -> Iterator[SessionPiece]:
        """Yield what it holds from an offset on, each run of one stream as a piece."""
        ends = chain(self.changes[1:], (len(self.data),))
        for begin, end, code in zip(self.changes, ends, self.codes, strict=True):
            first = max(begin, offset - self.offset)
            if first < end:
                yield SessionPiece(self.offset + first, STREAMS[code], bytes(self.data[first:end]))


class ByteLog:
    """The last ``keep_bytes`` of an output by offset, and a block more at most. Use from one thread."""

    def __init__(self, keep_bytes: int, start: int = 0) -> None:
        self._keep_bytes = keep_bytes
        #: Where what is kept begins and ends.
        self.start = self.end = start
        self._blocks: deque[_Block] = deque()

    def add(self, stream: str, data: bytes, unread: int | None = None) -> None:
        """Append what was said; the oldest is forgotten for it, but for what lies behind ``unread`` (see `forget`)."""
        if not data:
            return
        if not self._blocks or len(self._blocks[-1].data) >= BLOCK_BYTES or self._blocks[-1].end != self.end:
            self._blocks.append(_Block(self.end))
        self._blocks[-1].add(_CODES[stream], data)
        self.end += len(data)
        self.forget(unread)

    def forget(self, unread: int | None = None) -> None:
        """Forget what is too much; what lies behind ``unread`` is too much only beyond `UNDER_WAY_BYTES` more."""
        start = self.end - self._keep_bytes
        if unread is not None:
            start = max(min(start, unread), start - UNDER_WAY_BYTES)
        while self._blocks and self._blocks[0].end <= start:
            self._blocks.popleft()
        self.start = max(self.start, start, self._blocks[0].offset if self._blocks else 0)

    def skip(self, end: int) -> None:
        """What comes next begins later: what is between was not heard."""
        self.end = max(self.end, end)

    def pieces(self, offset: int, most_bytes: int) -> list[SessionPiece]:
        """Return about ``most_bytes`` from an offset on, at least one piece if there is any.

        The first begins later than ``offset`` if what is between is not kept.
        """
        pieces: list[SessionPiece] = []
        size_bytes, offset = 0, max(offset, self.start)
        for block in self._blocks:
            if block.end <= offset:
                continue
            for piece in block.pieces(offset):
                if size_bytes >= most_bytes or len(pieces) == PAGE_PIECES:
                    return pieces
                pieces.append(piece)
                size_bytes += len(piece.data)
        return pieces

    def joined(self) -> bytes:
        """Return all that is kept, of every stream; with nothing unheard between."""
        data = b"".join([block.data for block in self._blocks])
        return data[max(0, len(data) - (self.end - self.start)) :]


# Interactive sessions: a command that somebody types to and watches, from this connection or the next.
#
# Its output is numbered byte by byte over both streams, and so is its input: who attaches again says what they have,
# and nothing is shown or typed twice.

COMPONENT = "session"
#: What a session may be sent, by name.
SIGNALS: Mapping[str, int] = {
    name: int(signal.Signals[f"SIG{name}"])
    for name in ("HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "TSTP")
}
#: Seconds for which input waits for a command that does not read it; the caller then sends the rest again.
INPUT_PATIENCE_S = 20.0
#: Seconds in which a machine that is reached says how far input came that nobody waits for any more.
SETTLE_S = 5.0
#: Bytes, about, that a reader is handed at once.
PAGE_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Bounds of interactive sessions."""

    #: Bytes of each session's output kept for whoever attaches again: screens enough, and 256 MiB for `living_max`.
    output_bytes: int = 2**20
    unattended_s: Annotated[float, Setting("a session to which nobody is attached for so long is ended", gt=0)] = 300.0
    living_max: Annotated[int, Setting("most sessions that live at once; beyond it 503", ge=1)] = 256
    #: Ended sessions whose last output is still kept, for who was about to read it.
    ended_max: int = 16


class TerminalSize(NamedTuple):
    """How large a terminal is."""

    rows: int = 24
    columns: int = 80


class SessionGrip(Protocol):
    """The grip on a session's command: `runtimes.sandbox.runner.client.SessionExchange`, or on one elsewhere."""

    def require_reached(self) -> None:
        """Raise CapacityExceeded while the machine on which it runs is not reached."""
        ...

    def attend(self, *, attended: bool) -> None:
        """Somebody reads its output from now on, or nobody does."""
        ...

    async def settle(self) -> None:
        """Return once it is certain how much of the input was passed on, and `InteractiveSession.passed` told."""
        ...

    async def input_room(self) -> int:
        """Return how many bytes it takes now, waiting for some; 0 if it reads no more."""
        ...

    async def feed(self, data: bytes) -> None:
        """Send so many bytes at most, and tell the session by `passed` as soon as they can no more be lost."""
        ...

    async def end_input(self) -> None: ...

    def steer(self, request: Mapping[str, object]) -> None:
        """Hold its output back, resize its terminal, signal or end it."""
        ...


class InteractiveSession:
    """One session: the end of its output that is kept, its input, and who is attached.

    One caller is attached at a time: the last that came. While somebody is, the command waits for them when they are
    slow; while nobody is, it goes on and the oldest output is forgotten.
    """

    def __init__(self, settings: SessionSettings, terminal: TerminalSize | None) -> None:
        self.settings = settings
        self.terminal = terminal
        #: How many bytes of input its command was sent.
        self.input_offset = 0
        #: Whether its command has ended, or will never begin.
        self.ended = False
        #: Whether it was ended because nobody was attached.
        self.abandoned = False
        self._output = ByteLog(settings.output_bytes)
        self._grip: SessionGrip | None = None
        self._opened = asyncio.Event()
        self._changed = asyncio.Event()
        self._typing = asyncio.Lock()
        self._input_ended = self._held = False
        self._readers = self._taken = 0
        self._attached = False
        self._patience: asyncio.TimerHandle | None = None

    @property
    def start(self) -> int:
        """Where the output that is kept begins."""
        return self._output.start

    @property
    def end(self) -> int:
        """Where its output ends so far."""
        return self._output.end

    # --- its command's side

    def open(self, grip: SessionGrip, *, start: int = 0, input_offset: int = 0) -> None:
        """Its command runs; one of an earlier gateway repeats what it has kept from ``start`` on."""
        self._output = ByteLog(self.settings.output_bytes, start)
        self.input_offset = input_offset
        self._grip = grip
        self._opened.set()
        self._changed.set()
        self._await_somebody()
        if self._attached:
            grip.attend(attended=True)

    def skip(self, offset: int) -> None:
        """What it says next begins no earlier: what is between was not heard."""
        self._output.skip(offset)

    def passed(self, input_offset: int) -> None:
        """Its command was sent so much of the input."""
        self.input_offset = input_offset

    def add_output(self, stream: str, data: bytes, offset: int | None = None) -> None:
        """Keep what its command said; with an ``offset`` what of it is new, and what lies before was not heard."""
        if offset is not None:
            self._output.skip(offset)
            data = data[self.end - offset :]
        self._output.add(stream, data, self._unread)
        self._changed.set()
        if self._attached and not self._held and self.end - self._taken > self.settings.output_bytes // 4:
            self._hold(held=True)

    def close(self) -> None:
        """Its command has ended; idempotent."""
        self.ended, self._grip = True, None
        self._opened.set()
        self._changed.set()
        self._be_patient()

    # --- its caller's side

    async def read(self, offset: int, heartbeat_s: float) -> AsyncGenerator[list[SessionPiece], None]:
        """Yield what it says from an offset on until it ends or another caller attaches; nothing after a silence.

        The first piece begins later than ``offset`` if what is between is no longer kept.
        """
        reader = self.attend(offset)
        try:
            while reader == self._readers:
                self._taken = max(self._taken, offset)
                pieces = self._output.pieces(offset, PAGE_BYTES)
                if pieces:
                    yield pieces
                    offset = pieces[-1].offset + len(pieces[-1].data)
                    self._taken = offset
                    self._output.forget(self._unread)
                    if self._held and self.end - offset < self.settings.output_bytes // 8:
                        self._hold(held=False)
                    continue
                if self.ended:
                    return
                self._changed.clear()
                try:
                    async with asyncio.timeout(heartbeat_s):
                        await self._changed.wait()
                except TimeoutError:
                    yield []
            self._changed.set()  # the one who came sees it too
        finally:
            self.leave(reader)

    def attend(self, offset: int) -> int:
        """Attach somebody who has read up to an offset, without reading; return what `leave` takes.

        Whoever was attached is detached.
        """
        self._readers += 1
        self._attached, self._taken = True, offset
        self._be_patient()
        self._changed.set()
        if self._grip is not None:
            self._grip.attend(attended=True)
        return self._readers

    def leave(self, reader: int) -> None:
        """Nobody is attached any more, unless another has attached since; idempotent."""
        if reader != self._readers or not self._attached:
            return
        self._attached = False
        self._output.forget()
        if self._held:
            self._hold(held=False)
        if self._grip is not None:
            self._grip.attend(attended=False)
        self._await_somebody()

    async def opened(self, wait_s: float | None) -> bool:
        """Return whether its command runs or has ended, after ``wait_s`` at the latest; None waits for ever."""
        try:
            async with asyncio.timeout(wait_s):
                await self._opened.wait()
        except TimeoutError:
            return False
        return True

    async def write(self, data: bytes, offset: int | None = None, *, end: bool = False) -> int:
        """Pass on input that begins at ``offset`` (by default where it stands); return where it stands then.

        What it has already is passed over, so that input may be sent again. It stands earlier than the end of the data
        if the command did not read for a while, and ``end`` is then left out. Raises Conflict if input before it is
        missing, CapacityExceeded if the machine on which it runs is not reached for so long. What comes after the end
        of the input, or of the command, is dropped.
        """
        its_turn = False
        try:
            async with asyncio.timeout(INPUT_PATIENCE_S), self._typing:
                its_turn = True
                await self._opened.wait()
                if self._grip is not None:
                    await self._grip.settle()
                await self._feed(data, self.input_offset if offset is None else offset, end=end)
        except TimeoutError:
            if self._grip is not None:
                self._grip.require_reached()
                if its_turn:
                    await self._settle(self._grip)
            elif (offset or 0) > self.input_offset:  # it was typed to: a gateway before had reached it
                message = "the session is not reached (yet): send the same again"
                raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0) from None
        return self.input_offset

    def require_reached(self) -> None:
        """Raise CapacityExceeded while the machine on which its command runs is not reached."""
        if self._grip is not None:
            self._grip.require_reached()

    def relay(self, *, size: TerminalSize | None = None, signal: int | None = None, end: bool = False) -> None:
        """Do what another gateway's session was told; it is dropped if the command does not run."""
        if size is not None and self.terminal is not None:
            self.terminal = size
            self._steer({"size": list(size)})
        if signal is not None:
            self._steer({"signal": signal})
        if end:
            self._abandon()

    def wait_for_somebody(self, unattended_s: float) -> None:
        """Take another bound for the time in which nobody is attached."""
        self.settings = replace(self.settings, unattended_s=unattended_s)
        if not self._attached:
            self._await_somebody()

    @property
    def reads(self) -> bool:
        """Whether input still reaches its command."""
        return not self.ended and not self._input_ended

    async def resize(self, size: TerminalSize) -> None:
        """Tell its terminal how large it is; raises Conflict if it has none, or does not run for a while yet."""
        if self.terminal is None:
            raise Conflict("the session has no terminal to resize", component=COMPONENT)
        await self._require_begun()
        self.terminal = size
        self._steer({"size": list(size)})

    async def signal(self, name: str) -> None:
        """Signal what runs in its foreground; raises InvalidInput for a signal that is not among `SIGNALS`.

        Raises Conflict if it does not run for a while yet.
        """
        if name not in SIGNALS:
            raise InvalidInput(f"no signal {name[:32]!r}; known: {', '.join(SIGNALS)}", component=COMPONENT)
        await self._require_begun()
        self._steer({"signal": SIGNALS[name]})

    # --- inside

    @property
    def _unread(self) -> int | None:
        """Behind which offset somebody waits for its output."""
        return self._taken if self._attached else None

    async def _require_begun(self) -> None:
        if not await self.opened(INPUT_PATIENCE_S):
            raise Conflict("the session waits for its turn, and cannot be steered before", component=COMPONENT)

    async def _feed(self, data: bytes, offset: int, *, end: bool) -> None:
        while self._place_in(offset) < len(data) and self._grip is not None and self.reads:
            free_bytes = await self._grip.input_room()
            if free_bytes == 0 or self._grip is None:
                self._input_ended = True
                return
            place = self._place_in(offset)
            await self._grip.feed(data[place : place + free_bytes])
        if end and self._grip is not None and self.reads:
            await self._grip.end_input()
            self._input_ended = True

    async def _settle(self, grip: SessionGrip) -> None:
        """Find out how far the input came; raises CapacityExceeded if the machine on which it runs is not reached."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await grip.settle()
        except TimeoutError:
            grip.require_reached()
            message = "the machine of the session does not say how far the input came: send the same again"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0) from None

    def _place_in(self, offset: int) -> int:
        """Return how much of the input from an offset on was passed on already; raises Conflict if some is missing."""
        if offset > self.input_offset:
            message = f"input from {offset} on came before that from {self.input_offset} on: send that first"
            raise Conflict(message, component=COMPONENT, detail={"input_offset": self.input_offset})
        return self.input_offset - offset

    def _steer(self, request: Mapping[str, object]) -> None:
        if self._grip is not None:
            self._grip.steer(request)

    def _hold(self, *, held: bool) -> None:
        self._held = held
        self._steer({"held": held})

    def _await_somebody(self) -> None:
        """End it if nobody attaches for a while."""
        self._be_patient()
        if self._grip is not None and not self._attached:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self.settings.unattended_s, self._abandon)

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _abandon(self) -> None:
        self.abandoned = True
        self._steer({"end": 0.0})


class SessionTable:
    """The sessions of this gateway, by the id of their invocation."""

    def __init__(self, settings: SessionSettings | None = None) -> None:
        self.settings = settings or SessionSettings()
        self._living: dict[str, InteractiveSession] = {}
        self._ended: OrderedDict[str, InteractiveSession] = OrderedDict()

    def check(self) -> None:
        """Raise CapacityExceeded if there may be no more."""
        if len(self._living) >= self.settings.living_max:
            message = f"{len(self._living)} sessions live (server.sessions.living_max)"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0)

    def get(self, id: str) -> InteractiveSession | None:
        return self._living.get(id) or self._ended.get(id)

    def living(self, id: str, terminal: TerminalSize | None) -> InteractiveSession:
        """Return the session of an invocation that has not ended, made if nobody has asked for it yet.

        Raises CapacityExceeded if there may be no more.
        """
        session = self.get(id)
        if session is None:
            self.check()
            session = self._living[id] = InteractiveSession(self.settings, terminal)
        return session

    def close(self, id: str) -> None:
        """It has ended; its last output is kept for a while. Idempotent."""
        session = self._living.pop(id, None)
        if session is None:
            return
        session.close()
        self._ended[id] = session
        while len(self._ended) > self.settings.ended_max:
            self._ended.popitem(last=False)
