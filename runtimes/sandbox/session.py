"""Interactive sessions: a command that somebody types to and watches, from this connection or the next.

Its output is numbered byte by byte over both streams, and so is its input: who attaches again says what they have,
and nothing is shown or typed twice.
"""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Protocol

from manager.errors import CapacityExceeded, Conflict, InvalidInput
from manager.function import Setting
from runtimes.sandbox.output_tail import OutputTail, SessionPiece

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

    output_bytes: Annotated[
        int, Setting("bytes of each session's output kept for whoever attaches again", ge=4096, le=64 * 2**20)
    ] = 2**20
    unattended_s: Annotated[float, Setting("a session to which nobody is attached for so long is ended", gt=0)] = 300.0
    living_max: Annotated[int, Setting("most sessions that live at once; beyond it 503", ge=1)] = 256
    ended_max: Annotated[int, Setting("ended sessions whose last output is still kept", ge=0)] = 16


class TerminalSize(NamedTuple):
    """How large a terminal is."""

    rows: int = 24
    columns: int = 80


class SessionGrip(Protocol):
    """The grip on a session's command: `runtimes.sandbox.runner.conversation.SessionExchange`, or on one elsewhere."""

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
        self._output = OutputTail(settings.output_bytes)
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
        self._output = OutputTail(self.settings.output_bytes, start)
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

    def said(self, stream: str, data: bytes) -> None:
        """Keep what its command said."""
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

    async def write(self, data: bytes, offset: int | None = None, *, end: bool = False, patient: bool = False) -> int:
        """Pass on input that begins at ``offset`` (by default where it stands); return where it stands then.

        What it has already is passed over, so that input may be sent again. It stands earlier than the end of the data
        if the command did not read for a while, and ``end`` is then left out; who is ``patient`` waits for as long as
        the command lives. Raises Conflict if input before it is missing, CapacityExceeded if the machine on which it
        runs is not reached for so long. What comes after the end of the input, or of the command, is dropped.
        """
        its_turn = False
        try:
            async with asyncio.timeout(None if patient else INPUT_PATIENCE_S), self._typing:
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
                told = "the session is not reached (yet): send the same again"
                raise CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0) from None
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
            room = await self._grip.input_room()
            if room == 0 or self._grip is None:
                self._input_ended = True
                return
            place = self._place_in(offset)
            await self._grip.feed(data[place : place + room])
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
            told = "the machine of the session does not say how far the input came: send the same again"
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0) from None

    def _place_in(self, offset: int) -> int:
        """Return how much of the input from an offset on was passed on already; raises Conflict if some is missing."""
        if offset > self.input_offset:
            told = f"input from {offset} on came before that from {self.input_offset} on: send that first"
            raise Conflict(told, component=COMPONENT, detail={"input_offset": self.input_offset})
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
            told = f"{len(self._living)} sessions live (server.sessions.living_max)"
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0)

    def get(self, id: str) -> InteractiveSession | None:
        return self._living.get(id) or self._ended.get(id)

    def living(self, id: str, terminal: TerminalSize | None) -> InteractiveSession:
        """Return the session of an invocation that has not ended, made if nobody has asked for it yet.

        Raises CapacityExceeded if there may be no more.
        """
        found = self.get(id)
        if found is None:
            self.check()
            found = self._living[id] = InteractiveSession(self.settings, terminal)
        return found

    def close(self, id: str) -> None:
        """It has ended; its last output is kept for a while. Idempotent."""
        session = self._living.pop(id, None)
        if session is None:
            return
        session.close()
        self._ended[id] = session
        while len(self._ended) > self.settings.ended_max:
            self._ended.popitem(last=False)
