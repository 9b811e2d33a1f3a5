"""Conversations: the numbered exchanges on one connection to a runner."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from manager.errors import ActionFailed
from runtimes.sandbox.command import Command, CommandResult, OnOutput
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.protocol import RunnerEnd, lost

#: Bytes of a long-lived process's output kept for a slow reader before the connection is paused.
UNREAD_MAX_BYTES = 1 * 2**20
STREAM_NAMES = {wire.STDOUT: "stdout", wire.STDERR: "stderr"}


class Carrier(Protocol):
    """What an exchange needs of the connection that carries it."""

    async def send(self, frame: bytes) -> None:
        """Send one frame, and wait while too much is under way."""
        ...

    async def kill(self, number: int, end: asyncio.Future[RunnerEnd]) -> None:
        """SIGKILL a command's tree and wait until it is gone; hang up on a runner that cannot."""
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
        while view and not self.refused:
            await self._opened.wait()
            piece = bytes(view[: min(self._window, wire.CHUNK_BYTES)])
            view = view[len(piece) :]
            self._window -= len(piece)
            if self._window <= 0:
                self._opened.clear()
            await self._carrier.send(wire.encode(wire.STDIN, number, piece))

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

    def ended(self, end: RunnerEnd | Exception) -> None:
        if self.end.done():
            return
        if isinstance(end, Exception):
            self.end.set_exception(end)
            self.end.exception()  # seen: a caller that was cancelled does not come back for it
        else:
            self.end.set_result(end)


class RunnerAnswer(Exchange):
    """A request that is answered, perhaps with data before the end."""

    def __init__(self, limit_bytes: int = 0) -> None:
        super().__init__()
        self.chunks: list[bytes] = []
        self._room = limit_bytes

    def data(self, stream: int, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise wire.ProtocolError("more than was asked for")
        self.chunks.append(data)


class KeptOutput:
    """What a command says, kept up to a bound and shown as it comes."""

    def __init__(self, limit_bytes: int, on_output: OnOutput | None) -> None:
        self._limit_bytes = limit_bytes
        self._on_output = on_output
        self.streams = {"stdout": bytearray(), "stderr": bytearray()}
        self.truncated = {"stdout": False, "stderr": False}

    def add(self, stream: str, data: bytes) -> None:
        kept = self.streams[stream]
        room = self._limit_bytes - len(kept)
        if len(data) > room:
            self.truncated[stream] = True
            data = data[:room]
        if data:
            kept += data
            if self._on_output is not None:
                self._on_output(stream, data)

    def text(self) -> dict[str, str]:
        """Return its output so far."""
        return {stream: kept.decode("utf-8", "replace") for stream, kept in self.streams.items()}


class CommandExchange(Exchange):
    """A command under way whose output is kept, and shown as it comes."""

    def __init__(self, carrier: Carrier, command: Command, on_output: OnOutput | None) -> None:
        super().__init__()
        self.stdin = Stdin(carrier)
        #: Bounded here too: the runner is not trusted to keep the bound.
        self.output = KeptOutput(command.output_limit_bytes, on_output)

    def data(self, stream: int, data: bytes) -> None:
        self.output.add(STREAM_NAMES[stream], data)

    def taken(self, count: int | None) -> None:
        self.stdin.taken(count)

    def ended(self, end: RunnerEnd | Exception) -> None:
        self.stdin.taken(None)
        if isinstance(end, ActionFailed):
            end = lost(end.message, result=self.output.text())
        super().ended(end)

    async def result(self) -> CommandResult:
        end = await asyncio.shield(self.end)
        return end.result(**{stream: bytes(kept) for stream, kept in self.output.streams.items()})


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
