"""Runners over an attached stream, for gVisor and Kata."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Self, TypeVar, cast

import structlog

from manager.errors import ActionFailed, CodedError
from runtimes.sandbox.command import (
    Command,
    CommandResult,
    FileContent,
    FileStat,
    FileStream,
    OnOutput,
    ResumableCommand,
)
from runtimes.sandbox.docker.engine import STDOUT, DockerEngine, chunk_decoder, repeatable
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.client import SandboxProcess, StreamClient, cut_off, lost

# The attach stream: the byte stream to the first process of a container, where no socket joins it to us.
#
# The engine carries the bytes: what is written goes to standard input as it is, what comes is cut into chunks that name
# their stream. It has no beginning that both sides see, so the two agree on one
# (`runtimes.sandbox.runner.runner.Attachment`).

#: Bytes of an answer's head, and of what the runner complained of, that are kept.
HEAD_MAX_BYTES, COMPLAINT_MAX_BYTES = 16 * 2**10, 2 * 2**10
#: A frame that says nothing but that the gateway lives: standard input for a number that is never given.
SIGN_OF_LIFE = wire.encode(wire.STDIN, 2**32 - 1)


class AttachByteStream:
    """The standard streams of a container's first process (`runtimes.sandbox.runner.client.ByteStream`)."""

    def __init__(self, engine: DockerEngine, container: str, *, token: str, life_s: float) -> None:
        self._engine = engine
        self._container = container
        #: Known to whoever knows the token, and never part of what is spoken.
        self._mark = hashlib.sha256(b"attach " + token.encode()).digest()
        #: Seconds between two signs of life.
        self._life_s = life_s

    async def join(self, end: asyncio.BufferedProtocol, *, deadline_s: float) -> int:
        stream: AttachStream | None = None
        try:
            async with asyncio.timeout(max(0.1, deadline_s - time.monotonic())):
                loop = asyncio.get_running_loop()
                _, stream = await loop.create_unix_connection(
                    lambda: AttachStream(end, self._life_s), self._engine.socket
                )
                stream.request(self._engine.attach_path(self._container))
                await stream.answered
                if not await self._engine.running(self._container):  # it can be attached to, and says nothing
                    raise lost("the container has ended")
                await stream.agree(self._mark)
                return 0
        except BaseException as error:
            if stream is not None:
                stream.abort()
            if isinstance(error, TimeoutError):
                raise lost("the runner does not answer") from None
            if isinstance(error, OSError):
                raise lost(f"the engine cannot be reached: {error}") from None
            raise


class AttachStream(asyncio.Protocol):
    """One connection to the engine, from its HTTP request to its end; then ``end`` speaks over its transport."""

    def __init__(self, end: asyncio.BufferedProtocol, life_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._end = end
        self._life_s = life_s
        self._life: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self._chunks = chunk_decoder()
        #: Set when the engine has agreed to carry bytes.
        self.answered: asyncio.Future[None] = loop.create_future()
        self._agreed: asyncio.Future[None] = loop.create_future()
        self._answer = b""
        self._received = bytearray()
        self._complaint = bytearray()

    def request(self, path: str) -> None:
        assert self._transport is not None
        head = ("Host: docker", "Connection: Upgrade", "Upgrade: tcp", "Content-Length: 0")
        self._transport.write("\r\n".join((f"POST {path} HTTP/1.1", *head, "", "")).encode())

    async def agree(self, mark: bytes) -> None:
        """Let both sides begin anew; from then on the bytes are ``end``'s."""
        assert self._transport is not None
        self._answer = secrets.token_bytes(wire.ANSWER_BYTES)
        self._transport.write(mark + self._answer)
        await self._agreed

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        for future in (self.answered, self._agreed):
            future.cancel()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream's is one; uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self._head += data
            data = self._read_head()
        try:
            for (stream, _), chunk in self._chunks.feed(data):
                self._take(stream, chunk)
        except wire.ProtocolError as error:
            self._fail(f"the engine sends {error}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._life is not None:
            self._life.cancel()
        if self._agreed.done() and not self._agreed.cancelled() and self._agreed.exception() is None:
            self._end.connection_lost(exc)
            return
        complaint = self._complaint.decode("utf-8", "replace").strip()
        self._fail(f"the runner has ended: {complaint}" if complaint else "the runner has ended")

    def pause_writing(self) -> None:
        self._end.pause_writing()

    def resume_writing(self) -> None:
        self._end.resume_writing()

    # --- inside

    def _fail(self, message: str) -> None:
        for future in (self.answered, self._agreed):
            if not future.done():
                future.set_exception(lost(message))
                future.exception()  # seen: of the two only one is waited for

    def _read_head(self) -> bytes:
        """Return what follows the head of the engine's answer, once that has come."""
        head, separator, rest = bytes(self._head).partition(b"\r\n\r\n")
        if not separator and len(head) <= HEAD_MAX_BYTES:
            return b""
        if head.split(b" ", 2)[1:2] not in ([b"101"], [b"200"]):
            output = (head.partition(b"\r\n")[0] + b" " + rest)[:COMPLAINT_MAX_BYTES].decode("utf-8", "replace")
            self._fail(f"the engine does not attach: {output}")
            return b""
        self.answered.set_result(None)
        return rest

    def _take(self, stream: int, data: bytes) -> None:
        if stream != STDOUT:
            self._complaint += data
            del self._complaint[:-COMPLAINT_MAX_BYTES]
        elif self._agreed.done():
            self._pass_on(data)
        elif self._answer:
            self._received += data
            before, answer, rest = bytes(self._received).partition(self._answer)
            self._received = bytearray(before[-wire.ANSWER_BYTES :])  # an answer may have begun to arrive
            if answer:
                self._begin()
                self._pass_on(rest)

    def _begin(self) -> None:
        assert self._transport is not None
        self._agreed.set_result(None)
        self._end.connection_made(self._transport)
        self._life = asyncio.get_running_loop().call_later(self._life_s, self._live)

    def _pass_on(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = memoryview(self._end.get_buffer(len(view)))
            taken = min(len(room), len(view))
            room[:taken] = view[:taken]
            view = view[taken:]
            self._end.buffer_updated(taken)

    def _live(self) -> None:
        """Tell the runner that its gateway lives: it would see no end of the stream if it died."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(SIGN_OF_LIFE)
            self._life = asyncio.get_running_loop().call_later(self._life_s, self._live)


logger = structlog.get_logger("sandbox.attach")

T = TypeVar("T")

#: Seconds that an engine may be away (it restarts), and between two looks for it.
AWAY_S, LOOK_S = 30.0, 0.25
#: How many numbers there are for requests; they are given in a circle.
NUMBERS = 2**31


class AttachClient:
    """`runtimes.sandbox.sandbox.RunnerClient`: attaches again if a connection was cut and the container lives.

    Every command can be claimed over the next connection, so that a cut costs time and nothing else.
    """

    hides = True

    def __init__(
        self,
        attach: Callable[[int], Awaitable[StreamClient]],
        running: Callable[[], Awaitable[bool]],
        *,
        detachable: bool,
    ) -> None:
        #: Whether commands may outlast this gateway.
        self._detachable = detachable
        #: Opens a connection whose numbers go on from the last one's.
        self._attach = attach
        #: Asks the engine whether the container lives.
        self._running = running
        self._client: StreamClient | None = None
        self._attaching = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()

    async def attach(self) -> Self:
        """Attach for the first time; raises ActionFailed(environment_lost)."""
        await self._attached()
        return self

    @property
    def resumable(self) -> Mapping[str, ResumableCommand]:
        return {} if self._client is None else self._client.resumable

    @property
    def started(self) -> frozenset[str] | None:
        return None if self._client is None else self._client.started

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult:
        claim = command.claim or f"attached/{secrets.token_hex(8)}"
        request = replace(command, claim=claim, detached=command.detached and self._detachable)
        shown = Shown(on_output)
        client, number = await self._attached(), None
        try:
            while True:
                if claim not in client.resumable:
                    number = (client.number + 1) % NUMBERS  # it is given before anything else can happen
                try:
                    return await client.run(request, shown.again())
                except ActionFailed as failure:
                    client = await self._after(client, failure, number, claim)
        finally:
            if not request.detached and not client.lost.is_set():
                client.keep(claim, detached=False)

    def keep(self, claims: str, *, detached: bool) -> None:
        if self._client is not None:
            self._client.keep(claims, detached=detached and self._detachable)

    async def spawn(self, command: Command) -> SandboxProcess:
        return await (await self._attached()).spawn(command)

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes:
        return await self._again(lambda client: client.read_file(path, limit_bytes=limit_bytes))

    async def open_file(self, path: str, *, limit_bytes: int, user: str = "") -> FileStream:
        return await self._again(lambda client: client.open_file(path, limit_bytes=limit_bytes, user=user))

    async def write_file(
        self, path: str, content: FileContent, *, mode: int | None, locked: bool = False, user: str = ""
    ) -> bool:
        """What cannot be had again is kept on this machine's disk until it has arrived."""
        async with repeatable(content) as kept:
            return await self._again(lambda client: client.write_file(path, kept, mode=mode, locked=locked, user=user))

    async def list_files(self, path: str, *, user: str = "") -> list[FileStat]:
        return await self._again(lambda client: client.list_files(path, user=user))

    async def rest(self, *, resting: bool, still: bool = False) -> None:
        """Stop its processes, or let them run again. What has just been cut off is not waited for to be stopped."""
        client = self._client
        if not resting:
            await self._again(lambda client: client.rest(resting=False))
        elif client is not None and not client.lost.is_set():
            await client.rest(resting=True, still=still)

    def lend(self, fd: int) -> bool:
        """Return False: a descriptor does not pass through an engine."""
        return False

    async def sweep(self, clear_bytes: int | None = None) -> int:
        return await self._again(lambda client: client.sweep(clear_bytes))

    def close(self) -> None:
        self.lost.set()
        if self._watch is not None:
            self._watch.cancel()
        if self._client is not None:
            self._client.close()

    # --- inside

    async def _again(self, work: Callable[[StreamClient], Awaitable[T]]) -> T:
        """Repeat what can be done twice until it was done over one connection."""
        while True:
            client = await self._attached()
            try:
                return await work(client)
            except ActionFailed as failure:
                await self._reattached(client, failure)

    async def _after(self, client: StreamClient, failure: ActionFailed, number: int | None, claim: str) -> StreamClient:
        """Return a new connection, over which a command goes on, or is run if the runner never saw it."""
        created = await self._reattached(client, failure)
        if claim not in created.resumable and not _is_ahead(number, created.greeted.taken):
            message = "the connection was cut while the command was given its input, or it was forgotten"
            raise cut_off(message, result=failure.result)
        return created

    async def _reattached(self, client: StreamClient, failure: ActionFailed) -> StreamClient:
        """Return the next connection if the ``failure`` was that this one was cut, else raise it."""
        if not client.lost.is_set() or self.lost.is_set() or await self._ended(client):
            raise failure
        try:
            return await self._attached()
        except ActionFailed as another:
            raise ActionFailed(
                another.reason, another.message, component=another.component, result=failure.result
            ) from None

    async def _attached(self) -> StreamClient:
        """Return the connection, opened again if it was cut; raises ActionFailed."""
        async with self._attaching:
            client = self._client
            if client is not None and not client.lost.is_set():
                return client
            if client is None:
                created = await self._attach(secrets.randbits(31))
            else:
                created = await self._attach_again(client)
            if self.lost.is_set():  # it was closed meanwhile
                created.close()
                raise lost("the sandbox's runner is gone")
            self._client = created
            self._watch = asyncio.create_task(self._await_loss(created))
            return created

    async def _attach_again(self, client: StreamClient) -> StreamClient:
        """Open a connection in place of one that was cut, as soon as the engine is there again."""
        away_until_s = time.monotonic() + AWAY_S
        while True:
            if self.lost.is_set() or await self._ended(client):
                raise lost("the sandbox's runner is gone")
            try:
                await self._running()  # an engine that does not answer is not waited for any longer than need be
                created = await self._attach(client.number)
            except CodedError as error:
                if time.monotonic() >= away_until_s:
                    raise self._given_up(error) from None
                await asyncio.sleep(LOOK_S)
            else:
                logger.info("attached again")
                return created

    def _given_up(self, error: CodedError) -> ActionFailed:
        """Return why it was given up: a runner that does not answer while its engine does is gone."""
        if not isinstance(error, ActionFailed):
            return cut_off(error.message)
        self.lost.set()
        return error

    async def _await_loss(self, client: StreamClient) -> None:
        """Learn that the container has ended at once, not with the next action."""
        await client.lost.wait()
        await self._ended(client)

    async def _ended(self, client: StreamClient) -> bool:
        """Return whether the sandbox is gone, and not just the connection; False if the engine cannot tell."""
        try:
            over = client.distrusted or not await self._running()
        except CodedError:
            over = False
        if over:
            self.lost.set()
        return over


def _is_ahead(number: int | None, taken: int | None) -> bool:
    """Return whether a command's number comes after the last one that the runner took, if it took any."""
    if number is None or taken is None:
        return number is not None
    return 0 < (number - taken) % NUMBERS < NUMBERS // 2


class Shown:
    """Shows output once, though a claimed command repeats it from its beginning."""

    def __init__(self, on_output: OnOutput | None) -> None:
        self._on_output = on_output
        self._shown_bytes = {"stdout": 0, "stderr": 0}

    def again(self) -> OnOutput | None:
        """Return the callback for one telling."""
        on_output = self._on_output
        if on_output is None:
            return None
        shown_bytes = {"stdout": 0, "stderr": 0}

        def show(stream: str, data: bytes) -> None:
            fresh = data[max(0, self._shown_bytes[stream] - shown_bytes[stream]) :]
            shown_bytes[stream] += len(data)
            if fresh:
                self._shown_bytes[stream] = shown_bytes[stream]
                on_output(stream, fresh)

        return show
