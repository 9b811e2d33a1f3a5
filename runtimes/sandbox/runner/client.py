"""The client of the resident runner."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import py_compile
import secrets
import socket
import struct
import tempfile
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Protocol, TypeVar, cast

import msgspec

from manager.errors import (
    FILES_LOST,
    NOT_BEGUN,
    ActionFailed,
    CapacityExceeded,
    CodedError,
    InvalidConfig,
    InvalidInput,
    NotFound,
    Reason,
    StorageUnavailable,
    TooLarge,
    Unsupported,
)
from runtimes.sandbox.command import (
    Command,
    CommandResult,
    FileContent,
    FileStat,
    FileStream,
    OnOutput,
    ResumableCommand,
)
from runtimes.sandbox.runner import runner
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.runner import ProtocolError, encode
from runtimes.sandbox.session import InteractiveSession, Window
from runtimes.sandbox.spec import OtherSandbox

COMPONENT = "sandbox"
COMMAND_FORM = "give exactly one of argv and shell"
#: The runner, and where it and its socket lie inside a sandbox.
RUNNER = Path(runner.__file__)
INSIDE = "/.tangram"
ISOLATED = ("-I", "-S")
#: In the detail of an error: what is wrong with a file.
FILE_ERROR = "file_error"
T = TypeVar("T")


def encode_json(kind: int, number: int, value: Mapping[str, object]) -> bytes:
    return encode(kind, number, json.dumps(value, separators=(",", ":")).encode("ascii"))


def run_request(command: Command, *, marker: str, interactive: bool) -> dict[str, object]:
    """Return a command as the runner wants it; raises InvalidInput unless it has one of argv and shell."""
    if bool(command.argv) == bool(command.shell):
        raise InvalidInput(COMMAND_FORM, component=COMPONENT)
    session = command.session
    attended = {} if session is None else {"keep": session.settings.output_bytes, "terminal": session.terminal}
    return {
        "marker": marker,
        "argv": list(command.argv),
        "shell": command.shell,
        "cwd": command.cwd,
        "env": dict(command.env),
        "user": command.user,
        "stdin": interactive or bool(command.stdin) or session is not None,
        "merge": command.merge,
        "python": command.python,
        **({"hide": list(command.hide)} if command.hide else {}),
        "timeout_s": command.timeout_s if math.isfinite(command.timeout_s) else None,
        "grace_s": command.kill_grace_s,
        "limit": None if interactive or session is not None else command.shown_bytes,
        "tail": command.tail_bytes,
        "still_s": command.still_s or None,
        **({"claim": command.claim, "lasting": command.detached} if command.claim else {}),
        **({"session": attended} if attended else {}),
    }


class RunnerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a greeting; its fields bear the names of protocol 1."""

    protocol: int = 0
    #: Whether the runner knew the token already (it is no new one).
    known: bool = False
    #: Commands of an earlier gateway that can be claimed.
    held: dict[str, ResumableCommand] = {}
    #: Claims of detached commands that were started and whose end may not be on record; None if unknown.
    begun: frozenset[str] | None = None
    #: The last command of this gateway, if any, that the runner took over an earlier connection.
    taken: int | None = None


class RunnerEntry(msgspec.Struct, frozen=True):
    """One entry of a listing."""

    name: str
    size: int
    directory: bool
    mode: int


class RunnerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an exchange: of a command (EXIT), or of another request (DONE)."""

    code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    #: Whether it was ended as a process of it was stopped and none made progress.
    stopped: bool = False
    #: Whether its end was asked for.
    killed: bool = False
    out_of_memory: bool = False
    truncated: tuple[bool, bool] = (False, False)
    #: Bytes of standard output and error that were dropped before their ends.
    dropped: tuple[int, int] = (0, 0)
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    entries: list[RunnerEntry] = []
    #: Whether a file that was written is out of its user's hands.
    locked: bool = False
    #: Processes that a sweep has ended.
    swept: int = 0

    def result(
        self,
        *,
        stdout: bytes = b"",
        stderr: bytes = b"",
        truncated: tuple[bool, bool] = (False, False),
        unshown: Mapping[str, int] | None = None,
    ) -> CommandResult:
        """Return it as a result, with what was kept of the output, if anything was."""
        return CommandResult(
            exit_code=self.code,
            signal=self.signal,
            stdout=stdout,
            stderr=stderr,
            stdout_truncated=self.truncated[0] or truncated[0],
            stderr_truncated=self.truncated[1] or truncated[1],
            unshown=unshown or {},
            timed_out=self.timed_out,
            stopped=self.stopped,
            killed=self.killed,
            out_of_memory=self.out_of_memory,
            duration_s=self.duration_s,
            cpu_s=self.cpu_s,
            peak_memory_bytes=self.peak_bytes,
        )

    def files(self, directory: str) -> list[FileStat]:
        prefix = f"{directory.rstrip('/')}/" if directory else ""
        return [
            FileStat(path=prefix + entry.name, size_bytes=entry.size, directory=entry.directory, mode=entry.mode)
            for entry in self.entries
        ]


#: What a runner counts; it is not trusted to count right.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class SessionStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How a session of an earlier gateway stands, before its output is repeated (STANDING)."""

    #: Where the output that is kept begins.
    start: _Count
    #: Bytes of input that it was sent, and how many of them its command has not taken.
    input: _Count
    waiting: _Count


class RunnerRefusal(msgspec.Struct, frozen=True):
    """Why a request was not carried out (ERROR)."""

    code: str = ""
    message: str = "refused"
    #: What is wrong with a file, for programs; empty for what is no file's fault.
    file_error: str = ""

    def error(self) -> CodedError:
        kinds: dict[str, type[CodedError]] = {
            "not_found": NotFound,
            "too_large": TooLarge,
            "capacity_exceeded": CapacityExceeded,
        }
        if self.code == "internal":
            return ActionFailed(Reason.INTERNAL, self.message[:1000], component=COMPONENT)
        detail = {FILE_ERROR: self.file_error[:100]} if self.file_error else None
        return kinds.get(self.code, InvalidInput)(self.message[:1000], component=COMPONENT, detail=detail)


def decode(payload: bytes, wanted: type[T]) -> T:
    """Return what the runner sent; raises ProtocolError if it does not fit."""
    try:
        # Not msgspec's own parser: names of files may hold lone surrogates.
        return msgspec.convert(json.loads(payload), wanted)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"an answer that does not fit: {error}") from None


def unmade(error: CodedError) -> ActionFailed:
    """Return the end of an action whose sandbox could not be made: its function's fault, or the engine's."""
    if isinstance(error, ActionFailed):
        return error
    if isinstance(error, OtherSandbox):
        return ActionFailed(Reason.INVALID_INPUT, error.message, component=error.component)
    theirs = isinstance(error, InvalidConfig | InvalidInput | Unsupported)
    short = isinstance(error, CapacityExceeded | StorageUnavailable)
    return ActionFailed(
        Reason.INVALID_INPUT if theirs else Reason.ENVIRONMENT_LOST,
        f"no sandbox could be made: {error.message}",
        component=error.component,
        retry_after_s=error.retry_after_s,
        detail={NOT_BEGUN: True} if short else None,
    )


def lost(message: str, *, result: object = None) -> ActionFailed:
    """Return the end of an action whose sandbox died under it."""
    detail = {FILES_LOST: True}
    return ActionFailed(Reason.ENVIRONMENT_LOST, message, component=COMPONENT, result=result, detail=detail)


def cut_off(message: str, *, result: object = None) -> ActionFailed:
    """Return the end of an action whose sandbox is out of reach and perhaps lives on."""
    message = f"{message}; the sandbox may live on"
    return ActionFailed(Reason.NODE_LOST, message, component=COMPONENT, result=result)


def out_of_memory(result: CommandResult, peak_memory_bytes: int) -> CommandResult:
    """Return the same result with what the kernel knows about its end."""
    return replace(result, out_of_memory=True, peak_memory_bytes=max(peak_memory_bytes, result.peak_memory_bytes))


CONNECT_STEP_S = 0.002


class ByteStream(Protocol):
    """A way to one runner."""

    async def join(self, end: asyncio.BufferedProtocol, *, deadline_s: float) -> int:
        """Connect ``end`` with the runner, which may be starting up; both begin at the start of a frame.

        Return the runner's process id as this side sees it, 0 if it cannot. Raises ActionFailed(environment_lost)
        if the runner is not there by ``deadline_s`` of the monotonic clock.
        """
        ...


class SocketStream:
    """The runner's Unix socket, in a directory that both sides see."""

    def __init__(self, directory: Path, *, peer_pid: int = 0) -> None:
        self._directory = directory
        #: The process that must be listening, if known: a socket planted by another is not spoken to.
        self._peer_pid = peer_pid

    async def join(self, end: asyncio.BufferedProtocol, *, deadline_s: float) -> int:
        sock = await self._reach(deadline_s)
        seen_pid: int
        seen_pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if self._peer_pid and seen_pid and seen_pid != self._peer_pid:
            sock.close()
            raise lost(f"another process ({seen_pid}) than the runner ({self._peer_pid}) listens on its socket")
        await asyncio.get_running_loop().create_unix_connection(lambda: end, sock=sock)
        return seen_pid

    async def _reach(self, deadline_s: float) -> socket.socket:
        """Return a connected socket, tried until the deadline or the runner's end."""
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                _connect(sock, self._directory)
                return sock
            except OSError as error:
                sock.close()
                if _ended(self._peer_pid) or time.monotonic() >= deadline_s:
                    raise lost(f"the sandbox's runner cannot be reached: {error}") from None
            await asyncio.sleep(CONNECT_STEP_S)


def _ended(pid: int) -> bool:
    return pid != 0 and not Path(f"/proc/{pid}").exists()


def _connect(sock: socket.socket, directory: Path) -> None:
    """Connect through the directory's descriptor: a socket's path may have 107 bytes, a state directory's more."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        sock.connect(f"/proc/self/fd/{fd}/s")
    finally:
        os.close(fd)


#: Bytes of a long-lived process's output kept for a slow reader before the connection is paused.
UNREAD_MAX_BYTES = 1 * 2**20
#: Bytes of a file that a runner may send before the reader has taken them.
WINDOW_BYTES = 1 * 2**20
#: What stands between the beginning and the end of a stream of which not all was kept.
MARKER = b"\n[... %d bytes are missing here ...]\n"
STREAM_NAMES = {wire.STDOUT: "stdout", wire.STDERR: "stderr"}


class Exchange:
    """A request and its one end."""

    def __init__(self) -> None:
        #: Known once it has begun.
        self.number = 0
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


class RunningExchange(Exchange):
    """A command under way, and its standard input under the runner's window."""

    def __init__(self, client: StreamClient) -> None:
        super().__init__()
        self._client = client
        self._input = Window(wire.WINDOW_BYTES)

    async def write(self, data: bytes) -> None:
        """Append to its standard input until it reads no more."""
        view = memoryview(data)
        while view and (free_bytes := await self.input_room()):
            piece, view = bytes(view[:free_bytes]), view[free_bytes:]
            await self.send_input(piece)

    async def input_room(self) -> int:
        """Return how many bytes may be sent now, waiting for some; 0 if the command reads no more."""
        return min(await self._input.free_bytes(), wire.CHUNK_BYTES)

    async def send_input(self, piece: bytes) -> None:
        """Send what there is room for; it is on its way before the first wait."""
        self._input.use(len(piece))
        await self._client.send(wire.encode(wire.STDIN, self.number, piece))

    async def end_input(self) -> None:
        """End its standard input; idempotent."""
        await self._client.send(wire.encode(wire.STDIN, self.number))

    def taken(self, count: int | None) -> None:
        """Widen the window by what the runner passed on; None: the command reads no more."""
        if count is None:
            self._input.shut()
        else:
            self._input.free(count)

    def ended(self, end: RunnerEnd | Exception) -> None:
        self._input.shut()
        super().ended(end)


class FileDownload(Exchange):
    """`runtimes.sandbox.command.FileStream` from a runner, which sends no further ahead than its reader has room."""

    def __init__(self, client: StreamClient, patience_s: float) -> None:
        super().__init__()
        #: Known once it has begun.
        self.size_bytes = 0
        self._client = client
        self._patience_s = patience_s
        self._window = Window(0)
        self._unread: deque[bytes] = deque()
        self._arrived = asyncio.Event()

    def sized(self, size_bytes: int) -> None:
        self.size_bytes, self._window = size_bytes, Window(min(size_bytes, WINDOW_BYTES))
        self._arrived.set()

    def data(self, stream: int, data: bytes) -> None:
        self._window.use(len(data))
        if self._window.used_bytes > self._window.size_bytes:
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
                    self._window.free(len(data))
                    await self._client.send(wire.encode(wire.STDIN, self.number, str(len(data)).encode()))
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
            self._client.cancel(self.number)


class KeptStream:
    """The beginning and the end of what a command says on one stream, and how much is missing in between."""

    def __init__(self, head_bytes: int, tail_bytes: int, shown_bytes: int) -> None:
        self._head_bytes, self._tail_bytes = head_bytes, tail_bytes
        self._shown_left = shown_bytes
        self._head, self._tail = bytearray(), bytearray()
        self._received_bytes = 0
        self.unshown = 0

    @property
    def truncated(self) -> bool:
        return self._received_bytes > self._head_bytes + self._tail_bytes

    def add(self, data: bytes) -> bytes:
        """Keep the next piece; return what of it is to be shown."""
        self._received_bytes += len(data)
        rest = max(0, self._head_bytes - len(self._head))
        self._head += data[:rest]
        self._tail += data[rest:]
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: len(self._tail) - self._tail_bytes]
        shown, self._shown_left = data[: self._shown_left], self._shown_left - min(self._shown_left, len(data))
        self.unshown += len(data) - len(shown)
        return shown

    def miss(self, count: int) -> None:
        """Count bytes that were dropped before the end that is kept."""
        self._received_bytes += count
        self.unshown += count

    def joined(self) -> bytes:
        """Return what is kept, cut between characters, with a line that counts what is missing."""
        head, tail = bytes(self._head), bytes(self._tail[max(0, len(self._tail) - self._tail_bytes) :])
        if self._received_bytes <= self._head_bytes + self._tail_bytes:
            return head + tail
        head, tail = _without_half(head), tail[_leading_half(tail) :]
        return head + MARKER % (self._received_bytes - len(head) - len(tail)) + tail


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
        tail_bytes = command.tail_bytes
        bounds = command.output_limit_bytes - tail_bytes, tail_bytes, command.shown_bytes
        self.streams = {"stdout": KeptStream(*bounds), "stderr": KeptStream(*bounds)}

    def add(self, stream: str, data: bytes) -> None:
        shown = self.streams[stream].add(data)
        if shown and self._on_output is not None:
            self._on_output(stream, shown)

    def text(self) -> dict[str, str]:
        """Return its output so far."""
        return {name: kept.joined().decode("utf-8", "replace") for name, kept in self.streams.items()}

    def result(self, end: RunnerEnd) -> CommandResult:
        """Return how the command ended, with the output that is kept."""
        out, err = self.streams["stdout"], self.streams["stderr"]
        if end.dropped != (0, 0):
            out.miss(end.dropped[0])
            err.miss(end.dropped[1])
        return end.result(
            stdout=out.joined(),
            stderr=err.joined(),
            truncated=(out.truncated, err.truncated),
            unshown={"stdout": out.unshown, "stderr": err.unshown},
        )


class CommandExchange(RunningExchange):
    """A command under way whose output is kept, and shown as it comes."""

    def __init__(self, client: StreamClient, command: Command, on_output: OnOutput | None) -> None:
        super().__init__(client)
        #: Bounded here too: the runner is not trusted to keep the bound.
        self.output = KeptOutput(command, on_output)

    def data(self, stream: int, data: bytes) -> None:
        self.output.add(STREAM_NAMES[stream], data)

    def output_so_far(self) -> dict[str, str]:
        """Return its output so far."""
        return self.output.text()

    async def result(self) -> CommandResult:
        return self.output.result(await asyncio.shield(self.end))


class SessionExchange(RunningExchange):
    """A command under way whose output and input are a session's."""

    def __init__(self, client: StreamClient, session: InteractiveSession) -> None:
        super().__init__(client)
        self._session = session
        #: Whether it is yet to tell how it stands.
        self._awaited = False

    def begun(self, *, claimed: bool) -> None:
        """Its request is sent; one of an earlier gateway is open once it has told how it stands."""
        self._awaited = claimed
        if not claimed:
            self._session.open(self)

    def stands(self, standing: SessionStanding) -> None:
        if not self._awaited:
            raise wire.ProtocolError("the standing of a session that is known")
        self._awaited = False
        self._input.use(standing.waiting)  # what an earlier connection sent, and the command has not taken
        self._session.open(self, start=standing.start, input_offset=standing.input)

    def data(self, stream: int, data: bytes) -> None:
        self._session.add_output(STREAM_NAMES[stream], data)

    def output_so_far(self) -> None:
        """Return nothing: what it said went to the session."""

    async def result(self) -> CommandResult:
        return (await asyncio.shield(self.end)).result()

    def require_reached(self) -> None:
        """It is here."""

    def attend(self, *, attended: bool) -> None:
        """Who reads is known here already: the session holds it back itself."""

    async def settle(self) -> None:
        """What was passed on is told at once."""

    async def feed(self, data: bytes) -> None:
        self._session.passed(self._session.input_offset + len(data))  # it is on its way before the first wait
        await self.send_input(data)

    def steer(self, request: Mapping[str, object]) -> None:
        self._client.steer(self.number, request)


class SandboxProcess(RunningExchange):
    """A long-lived command with open pipes, made by `Sandbox.spawn`; ended by `kill`, or with its sandbox.

    Nothing of it is kept: every chunk goes to its reader, and a reader that stops reading stops the command
    (backpressure through the runner), so one slow process cannot fill the gateway's memory.
    """

    def __init__(self, client: StreamClient) -> None:
        super().__init__(client)
        self._unread: deque[tuple[str, bytes]] = deque()
        self._unread_bytes = 0
        self._arrived = asyncio.Event()
        self._reading = False
        self._dropping = False

    @property
    def has_unread(self) -> bool:
        """Whether there are chunks that nobody has taken."""
        return bool(self._unread)

    def data(self, stream: int, data: bytes) -> None:
        if self._dropping:
            return
        self._unread.append((STREAM_NAMES[stream], data))
        self._unread_bytes += len(data)
        self._arrived.set()
        if self._unread_bytes > UNREAD_MAX_BYTES:
            self._client.pause_reading()

    def ended(self, end: RunnerEnd | Exception) -> None:
        super().ended(end)
        self._arrived.set()

    async def write_stdin(self, data: bytes) -> None:
        """Append to its standard input; raises ActionFailed(environment_lost) if sandbox or process is gone."""
        await self.write(data)
        if self._input.is_shut:
            raise lost("the process reads no more")

    async def chunks(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (``stdout`` | ``stderr``, bytes) in order until it has ended. One reader at a time."""
        self._reading = True
        while True:
            while self._unread:
                name, data = self._unread.popleft()
                self._unread_bytes -= len(data)
                if self._unread_bytes <= UNREAD_MAX_BYTES // 2:
                    self._client.resume_reading()
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
        await self._client.kill(self.number, self.end)

    def _drop(self) -> None:
        """Drop what nobody reads any more: the connection must go on for the others."""
        self._dropping = True
        self._unread.clear()
        self._unread_bytes = 0
        self._client.resume_reading()


#: Seconds beyond a command's own bounds after which a silent runner is taken for dead.
SILENCE_S = 5.0
#: Seconds for an answer that needs no waiting.
ANSWER_S = 30.0


class StreamClient(asyncio.BufferedProtocol):
    """Requests to a runner, each with its own number; every one of them ends, if only with the connection."""

    #: A runner hides variables (`Command.hide`).
    hides = True

    def __init__(self, first: int | None = None) -> None:
        self._decoder = wire.FrameDecoder()
        self._buffer = memoryview(bytearray(wire.CHUNK_BYTES))
        self._exchanges: dict[int, Exchange] = {}
        self._transport: asyncio.Transport | None = None
        #: The last number that was given.
        self.number = secrets.randbits(31) if first is None else first
        self._writable = asyncio.Event()
        self._writable.set()
        self._ready: asyncio.Future[RunnerReady] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        #: The runner's process id as this side sees it; 0 if it cannot.
        self.peer_pid = 0
        #: The runner's answer to the greeting.
        self.greeted = RunnerReady()
        #: The commands of an earlier gateway that nobody has claimed yet.
        self.resumable: dict[str, ResumableCommand] = {}
        #: Whether the runner broke the protocol.
        self.distrusted = False

    @property
    def started(self) -> frozenset[str] | None:
        """The claims of detached commands started earlier, of whose end there may be no record; None if unknown."""
        return self.greeted.begun

    @classmethod
    async def open(
        cls, stream: ByteStream, hello: Mapping[str, object], *, within_s: float, first: int | None = None
    ) -> StreamClient:
        """Greet the runner at the other end of a stream, which may be starting up.

        Numbers go on from ``first`` if this connection takes the place of another. Raises
        ActionFailed(environment_lost), or what the runner says: InvalidInput if there is no such user.
        """
        deadline_s = time.monotonic() + within_s
        client = cls(first)
        client.peer_pid = await stream.join(client, deadline_s=deadline_s)
        client._write(encode_json(wire.HELLO, 0, hello))
        try:
            async with asyncio.timeout(max(0.1, deadline_s - time.monotonic())):
                client.greeted = await client._ready
            if client.greeted.protocol != wire.PROTOCOL:
                raise lost(f"the runner speaks protocol {client.greeted.protocol}, not {wire.PROTOCOL}")
        except BaseException as error:
            client.close()
            if isinstance(error, TimeoutError):
                raise lost("the runner does not answer") from None
            raise
        return client

    # --- requests

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult:
        """Execute to the end, or claim it if it is resumable. Cancelling kills its processes before it lets go."""
        session = command.session
        exchange = CommandExchange(self, command, on_output) if session is None else SessionExchange(self, session)
        claimed = self.resumable.pop(command.claim, None) is not None
        if claimed:
            self._begin(wire.CLAIM, {"claim": command.claim}, exchange)
        else:
            request = run_request(command, marker=secrets.token_hex(8), interactive=False)
            self._begin(wire.RUN, request, exchange)
        if isinstance(exchange, SessionExchange):
            exchange.begun(claimed=claimed)
        patience_s = command.timeout_s + command.kill_grace_s + wire.UNKILLABLE_S + SILENCE_S
        try:
            async with asyncio.timeout(patience_s if math.isfinite(patience_s) else None):
                if command.stdin and not claimed:
                    await exchange.write(command.stdin)
                    await exchange.end_input()
                return await exchange.result()
        except TimeoutError:
            self.close()
            raise lost("the runner has fallen silent", result=exchange.output_so_far()) from None
        except ActionFailed as error:
            output = exchange.output_so_far()
            raise ActionFailed(
                error.reason, error.message, component=error.component, result=output, detail=error.detail
            ) from None
        except asyncio.CancelledError:
            await self.kill(exchange.number, exchange.end)
            raise
        finally:
            self._exchanges.pop(exchange.number, None)

    async def spawn(self, command: Command) -> SandboxProcess:
        """Start a long-lived process; its input and output flow under back-pressure."""
        process = SandboxProcess(self)
        request = run_request(command, marker=secrets.token_hex(8), interactive=True)
        self._begin(wire.RUN, request, process)
        if command.stdin:
            await process.write_stdin(command.stdin)
        return process

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes:
        """Raises NotFound, TooLarge, InvalidInput."""
        file = await self.open_file(path, limit_bytes=limit_bytes)
        try:
            return b"".join([chunk async for chunk in file.chunks()])
        finally:
            file.close()

    async def open_file(self, path: str, *, limit_bytes: int, user: str = "") -> FileStream:
        """Raises NotFound, TooLarge, InvalidInput."""
        download = FileDownload(self, ANSWER_S)
        request = {"path": path, "limit": limit_bytes, "window": WINDOW_BYTES, "user": user}
        self._begin(wire.READ, request, download)
        try:
            await download.begun()
        except TimeoutError:
            self.close()
            raise lost("the runner has fallen silent") from None
        except BaseException:
            download.close()
            raise
        return download

    async def write_file(
        self, path: str, content: FileContent, *, mode: int | None, locked: bool = False, user: str = ""
    ) -> bool:
        """Raises NotFound, TooLarge, InvalidInput, and what the content raises: then nothing of it stays."""
        answer = Exchange()
        self._begin(wire.WRITE, {"path": path, "mode": mode, "locked": locked, "user": user}, answer)
        try:
            async for piece in content.pieces():
                if answer.end.done():
                    break
                await self.send(wire.encode(wire.STDIN, answer.number, piece))
            await self.send(wire.encode(wire.STDIN, answer.number))
        except BaseException:
            self.cancel(answer.number)
            raise
        return (await self._await_answer(answer)).locked

    async def list_files(self, path: str, *, user: str = "") -> list[FileStat]:
        """Raises NotFound, InvalidInput."""
        return (await self._ask(wire.LIST, {"path": path, "user": user})).files(path)

    def keep(self, claims: str, *, detached: bool) -> None:
        """Say whether commands whose claims begin so are kept for the next gateway; there is no answer."""
        if not detached:
            self.resumable = {claim: one for claim, one in self.resumable.items() if not claim.startswith(claims)}
        self._write(encode_json(wire.KEEP, 0, {"claim": claims, "lasting": detached}))

    async def rest(self, *, resting: bool, still: bool = False) -> None:
        """Stop every process in the sandbox but the runner, or let them run again.

        What does not stand ``still`` then is ended.
        """
        await self._ask(wire.REST, {"resting": resting, "still": still})

    def lend(self, fd: int) -> bool:
        """Lend the runner a descriptor, which it thaws its sandbox with at its end; return False if none can pass."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if self._transport is None or sock is None or sock.family != socket.AF_UNIX:
            return False
        if self.lost.is_set() or self._transport.get_write_buffer_size():
            return False
        with socket.socket(fileno=os.dup(sock.fileno())) as own:
            try:
                return socket.send_fds(own, [wire.encode(wire.LEND, 0)], [fd]) == wire.HEADER.size
            except OSError:
                return False

    async def sweep(self, clear_bytes: int | None = None) -> int:
        """Kill every process in the sandbox but the runner; return how many there were.

        With ``clear_bytes`` what they left in memory goes as well (`runtimes.sandbox.runner.runner.clear_shared`).
        """
        request = {} if clear_bytes is None else {"clear_bytes": clear_bytes}
        return (await self._ask(wire.SWEEP, request)).swept

    def steer(self, number: int, request: Mapping[str, object]) -> None:
        """Do to a session what is asked; there is no answer."""
        self._write(encode_json(wire.STEER, number, request))

    def cancel(self, number: int) -> None:
        """Want no more of a file that is on its way, in or out."""
        if self._exchanges.pop(number, None) is not None:
            self._write(encode_json(wire.KILL, number, {"grace_s": 0.0}))

    def close(self) -> None:
        """Hang up. The runner then ends what this side had running and is not detached."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    # --- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream's is one; uvloop's does not inherit from it

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for (_, kind, number), payload in self._decoder.feed(self._buffer[:nbytes]):
                self._receive(kind, number, payload)
        except wire.ProtocolError as error:
            self.distrusted = True
            if self._transport is not None:
                self._transport.abort()
            self._fail(lost(f"the sandbox's runner does not keep the protocol: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(lost("the sandbox's runner is gone"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def pause_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()

    # --- inside

    def _receive(self, kind: int, number: int, payload: bytes) -> None:
        if kind == wire.READY:
            if not self._ready.done():
                ready = decode(payload, RunnerReady)
                now_s = time.monotonic()
                self.resumable = {claim: one._replace(told_s=now_s) for claim, one in ready.held.items()}
                self._ready.set_result(ready)
            return
        if kind == wire.ERROR and not self._ready.done():
            self._ready.set_exception(decode(payload, RunnerRefusal).error())
            return
        exchange = self._exchanges.get(number)
        if exchange is None:
            return
        if kind in STREAM_NAMES:
            exchange.data(kind, payload)
        elif kind == wire.SIZE and payload.isdigit():
            exchange.sized(int(payload))
        elif kind == wire.STANDING:
            exchange.stands(decode(payload, SessionStanding))
        elif kind == wire.ACK:
            exchange.taken(wire.HEADER.unpack(payload)[0] if len(payload) == wire.HEADER.size else None)
        elif kind in (wire.EXIT, wire.DONE, wire.ERROR):
            refused = kind == wire.ERROR
            end = decode(payload, RunnerRefusal).error() if refused else decode(payload, RunnerEnd)
            del self._exchanges[number]
            exchange.ended(end)
        else:
            raise wire.ProtocolError(f"a frame of kind {kind}")

    def _fail(self, error: ActionFailed) -> None:
        self.lost.set()
        self._writable.set()
        if not self._ready.done():
            self._ready.set_exception(error)
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.ended(error)

    def _begin(self, kind: int, request: Mapping[str, object], exchange: Exchange) -> None:
        if self.lost.is_set():
            raise lost("the sandbox's runner is gone")
        self.number = number = exchange.number = (self.number + 1) % 2**31
        frame = encode_json(kind, number, request)
        if len(frame) > wire.FRAME_MAX_BYTES:
            message = f"the command takes {len(frame)} bytes, more than {wire.FRAME_MAX_BYTES}"
            raise TooLarge(message, component="sandbox")
        self._exchanges[number] = exchange
        self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self.lost.is_set():
            self._transport.write(frame)

    async def send(self, frame: bytes) -> None:
        self._write(frame)
        if not self._writable.is_set():
            await self._writable.wait()

    async def _ask(self, kind: int, request: Mapping[str, object]) -> RunnerEnd:
        answer = Exchange()
        self._begin(kind, request, answer)
        return await self._await_answer(answer)

    async def _await_answer(self, answer: Exchange) -> RunnerEnd:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer.end
        except TimeoutError:
            self.close()
            raise lost("the runner has fallen silent") from None
        finally:
            self._exchanges.pop(answer.number, None)

    async def kill(self, number: int, end: asyncio.Future[RunnerEnd]) -> None:
        """SIGKILL its tree and wait until it is gone; hang up on a runner that cannot."""
        if end.done():
            return
        self._write(encode_json(wire.KILL, number, {"grace_s": 0.0}))
        done, _ = await asyncio.wait([end], timeout=wire.UNKILLABLE_S + SILENCE_S)
        if not done:
            self.close()


# Sources of ours as Python starts them fastest: compiled here, for those Pythons in sandboxes that read this bytecode.
#
# Every sandbox would compile them anew. Each travels with its source, for Pythons of other versions.

#: A program whose last two lines hold its bytecode, and its source for a Python that does not read that. The comments
#: that they are cost it next to nothing; what ``__main__`` keeps of itself is the few lines before.
LOADER = """import binascii, marshal
from _frozen_importlib_external import MAGIC_NUMBER
def _code():
    with open(__file__, "rb") as file:
        _, compiled, source = file.read().rsplit(b"\\n#", 2)
    compiled = binascii.a2b_base64(compiled)
    if compiled.startswith(MAGIC_NUMBER):
        return marshal.loads(memoryview(compiled)[16:])
    import zlib
    return compile(zlib.decompress(binascii.a2b_base64(source)), "runner.py", "exec")
exec(_code())
"""


@cache
def compiled(source: str, name: str) -> bytes:
    """Return a source as a file of bytecode that Python takes without a look at the source's time."""
    with tempfile.TemporaryDirectory() as directory:
        written, created = Path(directory, f"{name}.py"), Path(directory, "made")
        written.write_text(source, encoding="utf-8")
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(
            str(written), str(created), dfile=written.name, doraise=True, optimize=0, invalidation_mode=unchecked
        )
        return created.read_bytes()


def packed_runner() -> bytes:
    """Return the runner as one file that starts fast."""
    source = RUNNER.read_bytes()
    parts = (compiled(source.decode("utf-8"), RUNNER.stem), zlib.compress(source, 9))
    return b"\n#".join([LOADER.encode("ascii"), *map(base64.b64encode, parts)])


def packed_beside(directory: Path) -> Path:
    """Return the packed runner as a file of a directory, written if it is not there as it must be."""
    place, packed = directory / RUNNER.name, packed_runner()
    with suppress(OSError):
        if place.read_bytes() == packed:
            return place
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{RUNNER.name}.{os.getpid()}.part"
    part.write_bytes(packed)
    part.chmod(0o644)
    part.replace(place)  # a sandbox that runs keeps the file that it has mounted
    return place
