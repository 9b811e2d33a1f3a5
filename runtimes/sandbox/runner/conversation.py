"""Conversations: the numbered exchanges on one connection to a runner."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Protocol

from manager.errors import ActionFailed
from runtimes.sandbox.command import Command, CommandResult, OnOutput
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.protocol import RunnerEnd, SessionStanding, lost
from runtimes.sandbox.session import InteractiveSession

#: Bytes of a long-lived process's output kept for a slow reader before the connection is paused.
UNREAD_MAX_BYTES = 1 * 2**20
#: Bytes of a file that a runner may send before the reader has taken them.
WINDOW_BYTES = 1 * 2**20
#: What stands between the beginning and the end of a stream of which not all was kept.
MARKER = b"\n[... %d bytes are missing here ...]\n"
STREAM_NAMES = {wire.STDOUT: "stdout", wire.STDERR: "stderr"}


class Carrier(Protocol):
    """What an exchange needs of the connection that carries it."""

    async def send(self, frame: bytes) -> None:
        """Send one frame, and wait while too much is under way."""
        ...

    async def kill(self, number: int, end: asyncio.Future[RunnerEnd]) -> None:
        """SIGKILL a command's tree and wait until it is gone; hang up on a runner that cannot."""
        ...

    def cancel(self, number: int) -> None:
        """Want no more of an exchange that is no command."""
        ...

    def steer(self, number: int, request: Mapping[str, object]) -> None:
        """Do to a session what is asked."""
        ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Stdin:
    """Standard input under the runner's window."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._window = wire.WINDOW_BYTES
        self._opened = asyncio.Event()
        self._opened.set()
        self.refused = False

    async def feed(self, number: int, data: bytes) -> None:
        view = memoryview(data)
        while view and (room := await self.room()):
            piece, view = bytes(view[:room]), view[room:]
            await self.send(number, piece)

    async def room(self) -> int:
        """Return how many bytes may be sent now, waiting for some; 0 if the command reads no more."""
        await self._opened.wait()
        return 0 if self.refused else min(self._window, wire.CHUNK_BYTES)

    async def send(self, number: int, piece: bytes) -> None:
        """Send what there is room for; it is on its way before the first wait."""
        self._window -= len(piece)
        if self._window <= 0:
            self._opened.clear()
        await self._carrier.send(wire.encode(wire.STDIN, number, piece))

    def narrow(self, count: int) -> None:
        """Leave out of the window what an earlier connection sent, and the command has not taken."""
        self._window -= count
        if self._window <= 0:
            self._opened.clear()

    async def end(self, number: int) -> None:
        await self._carrier.send(wire.encode(wire.STDIN, number))

    def taken(self, count: int | None) -> None:
        """Widen the window by what the runner passed on; None: the command reads no more."""
        if count is None:
            self.refused = True
        else:
            self._window += count
        self._opened.set()


class Exchange:
    """A request and its one end."""

    def __init__(self) -> None:
        self.end: asyncio.Future[RunnerEnd] = asyncio.get_running_loop().create_future()

    def data(self, stream: int, data: bytes) -> None:
        raise wire.ProtocolError("data that nobody asked for")

    def taken(self, count: int | None) -> None:
        raise wire.ProtocolError("an acknowledgement of nothing")

    def sized(self, size_bytes: int) -> None:
        raise wire.ProtocolError("the size of nothing")

    def stands(self, standing: SessionStanding) -> None:
        raise wire.ProtocolError("the standing of no session")

    def ended(self, end: RunnerEnd | Exception) -> None:
        if self.end.done():
            return
        if isinstance(end, Exception):
            self.end.set_exception(end)
            self.end.exception()  # seen: a caller that was cancelled does not come back for it
        else:
            self.end.set_result(end)


class FileDownload(Exchange):
    """`runtimes.sandbox.command.FileStream` from a runner, which sends no further ahead than its reader has room."""

    def __init__(self, carrier: Carrier, patience_s: float) -> None:
        super().__init__()
        self.number = 0
        #: Known once it has begun.
        self.size_bytes = 0
        self._carrier = carrier
        self._patience_s = patience_s
        self._room = 0
        self._unread: deque[bytes] = deque()
        self._arrived = asyncio.Event()

    def sized(self, size_bytes: int) -> None:
        self.size_bytes, self._room = size_bytes, min(size_bytes, WINDOW_BYTES)
        self._arrived.set()

    def data(self, stream: int, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise wire.ProtocolError("more than was asked for")
        self._unread.append(data)
        self._arrived.set()

    def ended(self, end: RunnerEnd | Exception) -> None:
        super().ended(end)
        self._arrived.set()

    async def begun(self) -> None:
        """Return when there is something to read; raises NotFound, TooLarge, InvalidInput."""
        async with asyncio.timeout(self._patience_s):
            await self._arrived.wait()
        if self.end.done():
            self.end.result()

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            while self._unread:
                data = self._unread.popleft()
                yield data
                if not self.end.done():
                    self._room += len(data)
                    await self._carrier.send(wire.encode(wire.STDIN, self.number, str(len(data)).encode()))
            if self.end.done():
                self.end.result()
                return
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._arrived.wait()
            except TimeoutError:
                raise lost("the runner has fallen silent") from None

    def close(self) -> None:
        if not self.end.done():
            self._carrier.cancel(self.number)


class RunnerAnswer(Exchange):
    """A request that is answered without data before the end."""


class KeptStream:
    """The beginning and the end of what a command says on one stream, and how much is missing in between."""

    def __init__(self, command: Command) -> None:
        self._head_bytes = command.output_limit_bytes - command.tail_bytes
        self._tail_bytes = command.tail_bytes
        self._room = command.shown_bytes
        self._head, self._tail = bytearray(), bytearray()
        self._said = 0
        self.unshown = 0

    @property
    def truncated(self) -> bool:
        return self._said > self._head_bytes + self._tail_bytes

    def add(self, data: bytes) -> bytes:
        """Keep the next piece; return what of it is to be shown."""
        self._said += len(data)
        rest = max(0, self._head_bytes - len(self._head))
        self._head += data[:rest]
        self._tail += data[rest:]
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: len(self._tail) - self._tail_bytes]
        shown, self._room = data[: self._room], self._room - min(self._room, len(data))
        self.unshown += len(data) - len(shown)
        return shown

    def miss(self, count: int) -> None:
        """Count bytes that were dropped before the end that is kept."""
        self._said += count
        self.unshown += count

    def joined(self) -> bytes:
        """Return what is kept, cut between characters, with a line that counts what is missing."""
        head, tail = bytes(self._head), bytes(self._tail[max(0, len(self._tail) - self._tail_bytes) :])
        if not self.truncated:
            return head + tail
        head, tail = _without_half(head), tail[_leading_half(tail) :]
        return head + MARKER % (self._said - len(head) - len(tail)) + tail


def _leading_half(data: bytes) -> int:
    """Return how many bytes at the start continue a UTF-8 character whose first byte is not there."""
    return next((at for at, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)


def _without_half(data: bytes) -> bytes:
    """Return it without a UTF-8 character of which only the first bytes are there."""
    for at in range(len(data) - 1, max(-1, len(data) - 4), -1):
        if data[at] & 0xC0 != 0x80:
            wanted = 4 if data[at] >= 0xF0 else 3 if data[at] >= 0xE0 else 2 if data[at] >= 0xC0 else 1
            return data if len(data) - at >= wanted else data[:at]
    return data


class KeptOutput:
    """What a command says, its beginning and its end kept up to a bound, and shown as it comes."""

    def __init__(self, command: Command, on_output: OnOutput | None) -> None:
        self._on_output = on_output
        self.streams = {"stdout": KeptStream(command), "stderr": KeptStream(command)}

    def add(self, stream: str, data: bytes) -> None:
        shown = self.streams[stream].add(data)
        if shown and self._on_output is not None:
            self._on_output(stream, shown)

    def text(self) -> dict[str, str]:
        """Return its output so far."""
        return {name: kept.joined().decode("utf-8", "replace") for name, kept in self.streams.items()}

    def completed(self, result: CommandResult) -> CommandResult:
        """Return the result with the output that is kept."""
        out, err = self.streams["stdout"], self.streams["stderr"]
        return replace(
            result,
            stdout=out.joined(),
            stderr=err.joined(),
            stdout_truncated=result.stdout_truncated or out.truncated,
            stderr_truncated=result.stderr_truncated or err.truncated,
            unshown={name: kept.unshown for name, kept in self.streams.items()},
        )


class CommandExchange(Exchange):
    """A command under way whose output is kept, and shown as it comes."""

    def __init__(self, carrier: Carrier, command: Command, on_output: OnOutput | None) -> None:
        super().__init__()
        self.stdin = Stdin(carrier)
        #: Bounded here too: the runner is not trusted to keep the bound.
        self.output = KeptOutput(command, on_output)

    def data(self, stream: int, data: bytes) -> None:
        self.output.add(STREAM_NAMES[stream], data)

    def taken(self, count: int | None) -> None:
        self.stdin.taken(count)

    def ended(self, end: RunnerEnd | Exception) -> None:
        self.stdin.taken(None)
        if isinstance(end, ActionFailed):
            end = ActionFailed(end.reason, end.message, component=end.component, result=self.said(), detail=end.detail)
        super().ended(end)

    def said(self) -> dict[str, str]:
        """Return its output so far."""
        return self.output.text()

    async def result(self) -> CommandResult:
        end = await asyncio.shield(self.end)
        for kept, dropped in zip(self.output.streams.values(), end.dropped, strict=True):
            kept.miss(dropped)
        return self.output.completed(end.result())


class SessionExchange(Exchange):
    """A command under way whose output and input are a session's."""

    def __init__(self, carrier: Carrier, session: InteractiveSession) -> None:
        super().__init__()
        self.number = 0
        self.stdin = Stdin(carrier)
        self._carrier = carrier
        self._session = session
        #: Whether it is yet to tell how it stands.
        self._awaited = False

    def begun(self, number: int, *, claimed: bool) -> None:
        """Its request is sent; one of an earlier gateway is open once it has told how it stands."""
        self.number, self._awaited = number, claimed
        if not claimed:
            self._session.open(self)

    def stands(self, standing: SessionStanding) -> None:
        if not self._awaited:
            raise wire.ProtocolError("the standing of a session that is known")
        self._awaited = False
        self.stdin.narrow(standing.waiting)
        self._session.open(self, start=standing.start, input_offset=standing.input)

    def data(self, stream: int, data: bytes) -> None:
        self._session.said(STREAM_NAMES[stream], data)

    def taken(self, count: int | None) -> None:
        self.stdin.taken(count)

    def ended(self, end: RunnerEnd | Exception) -> None:
        self.stdin.taken(None)
        super().ended(end)

    def said(self) -> dict[str, str]:
        """Return nothing: what it said went to the session."""
        return {}

    async def result(self) -> CommandResult:
        return (await asyncio.shield(self.end)).result()

    def require_reached(self) -> None:
        """It is here."""

    def attend(self, *, attended: bool) -> None:
        """Who reads is known here already: the session holds it back itself."""

    async def settle(self) -> None:
        """What was passed on is told at once."""

    async def input_room(self) -> int:
        return await self.stdin.room()

    async def feed(self, data: bytes) -> None:
        self._session.passed(self._session.input_offset + len(data))  # it is on its way before the first wait
        await self.stdin.send(self.number, data)

    async def end_input(self) -> None:
        await self.stdin.end(self.number)

    def steer(self, request: Mapping[str, object]) -> None:
        self._carrier.steer(self.number, request)


class SandboxProcess(Exchange):
    """A long-lived command with open pipes, made by `Sandbox.spawn`; ended by `kill`, or with its sandbox.

    Nothing of it is kept: every chunk goes to its reader, and a reader that stops reading stops the command
    (backpressure through the runner), so one slow process cannot fill the gateway's memory.
    """

    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self.number = 0
        self._carrier = carrier
        self._stdin = Stdin(carrier)
        self._unread: deque[tuple[str, bytes]] = deque()
        self._unread_bytes = 0
        self._arrived = asyncio.Event()
        self._reading = False
        self._dropping = False

    def data(self, stream: int, data: bytes) -> None:
        if self._dropping:
            return
        self._unread.append((STREAM_NAMES[stream], data))
        self._unread_bytes += len(data)
        self._arrived.set()
        if self._unread_bytes > UNREAD_MAX_BYTES:
            self._carrier.pause_reading()

    def taken(self, count: int | None) -> None:
        self._stdin.taken(count)

    def ended(self, end: RunnerEnd | Exception) -> None:
        self._stdin.taken(None)
        super().ended(end)
        self._arrived.set()

    async def write_stdin(self, data: bytes) -> None:
        """Append to its standard input; raises ActionFailed(environment_lost) if sandbox or process is gone."""
        await self._stdin.feed(self.number, data)
        if self._stdin.refused:
            raise lost("the process reads no more")

    async def close_stdin(self) -> None:
        """End its standard input; idempotent."""
        await self._stdin.end(self.number)

    async def chunks(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (``stdout`` | ``stderr``, bytes) in order until it has ended. One reader at a time."""
        self._reading = True
        while True:
            while self._unread:
                name, data = self._unread.popleft()
                self._unread_bytes -= len(data)
                if self._unread_bytes <= UNREAD_MAX_BYTES // 2:
                    self._carrier.resume_reading()
                yield name, data
            if self.end.done():
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def wait(self) -> CommandResult:
        """Return how it ended; stdout and stderr are empty. Chunks that nobody reads meanwhile are dropped."""
        if not self._reading:
            self._drop()
        return (await asyncio.shield(self.end)).result()

    async def kill(self) -> None:
        """SIGKILL its whole process tree, setsid children included, and return when it is gone; idempotent."""
        self._drop()
        await self._carrier.kill(self.number, self.end)

    def _drop(self) -> None:
        """Drop what nobody reads any more: the connection must go on for the others."""
        self._dropping = True
        self._unread.clear()
        self._unread_bytes = 0
        self._carrier.resume_reading()
