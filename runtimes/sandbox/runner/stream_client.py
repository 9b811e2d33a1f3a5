"""The client of a resident runner: the gateway's end of one connection to it."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import cast

from manager.errors import ActionFailed, TooLarge
from runtimes.sandbox.command import (
    Command,
    CommandResult,
    FileContent,
    FileStat,
    FileStream,
    OnOutput,
    ResumableCommand,
)
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.byte_stream import ByteStream
from runtimes.sandbox.runner.conversation import (
    STREAM_NAMES,
    WINDOW_BYTES,
    CommandExchange,
    Exchange,
    FileDownload,
    RunnerAnswer,
    SandboxProcess,
    SessionExchange,
)
from runtimes.sandbox.runner.protocol import (
    RunnerEnd,
    RunnerReady,
    RunnerRefusal,
    SessionStanding,
    decode,
    encode_json,
    lost,
    run_request,
)

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
        except TimeoutError:
            client.close()
            raise lost("the runner does not answer") from None
        if client.greeted.protocol != wire.PROTOCOL:
            client.close()
            raise lost(f"the runner speaks protocol {client.greeted.protocol}, not {wire.PROTOCOL}")
        return client

    # --- requests

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult:
        """Execute to the end, or claim it if it is resumable. Cancelling kills its processes before it lets go."""
        session = command.session
        exchange = CommandExchange(self, command, on_output) if session is None else SessionExchange(self, session)
        claimed = self.resumable.pop(command.claim, None) is not None
        if claimed:
            number = self._begin(wire.CLAIM, {"claim": command.claim}, exchange)
        else:
            request = run_request(command, marker=secrets.token_hex(8), interactive=False)
            number = self._begin(wire.RUN, request, exchange)
        if isinstance(exchange, SessionExchange):
            exchange.begun(number, claimed=claimed)
        patience_s = command.timeout_s + command.kill_grace_s + wire.UNKILLABLE_S + SILENCE_S
        try:
            async with asyncio.timeout(patience_s if math.isfinite(patience_s) else None):
                if command.stdin and not claimed:
                    await exchange.stdin.feed(number, command.stdin)
                    await exchange.stdin.end(number)
                return await exchange.result()
        except TimeoutError:
            self.close()
            raise lost("the runner has fallen silent", result=exchange.said()) from None
        except asyncio.CancelledError:
            await self.kill(number, exchange.end)
            raise
        finally:
            self._exchanges.pop(number, None)

    async def spawn(self, command: Command) -> SandboxProcess:
        """Start a long-lived process; its input and output flow under back-pressure."""
        process = SandboxProcess(self)
        request = run_request(command, marker=secrets.token_hex(8), interactive=True)
        process.number = self._begin(wire.RUN, request, process)
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
        download.number = self._begin(wire.READ, request, download)
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
        answer = RunnerAnswer()
        number = self._begin(wire.WRITE, {"path": path, "mode": mode, "locked": locked, "user": user}, answer)
        try:
            async for piece in content.pieces():
                if answer.end.done():
                    break
                await self.send(wire.encode(wire.STDIN, number, piece))
            await self.send(wire.encode(wire.STDIN, number))
        except BaseException:
            self.cancel(number)
            raise
        return (await self._await_answer(number, answer)).locked

    async def list_files(self, path: str, *, user: str = "") -> list[FileStat]:
        """Raises NotFound, InvalidInput."""
        return (await self._ask(wire.LIST, {"path": path, "user": user}, RunnerAnswer())).files(path)

    def keep(self, claims: str, *, detached: bool) -> None:
        """Say whether commands whose claims begin so are kept for the next gateway; there is no answer."""
        if not detached:
            self.resumable = {claim: one for claim, one in self.resumable.items() if not claim.startswith(claims)}
        self._write(encode_json(wire.KEEP, 0, {"claim": claims, "lasting": detached}))

    async def rest(self, *, resting: bool) -> None:
        """Stop every process in the sandbox but the runner, or let them run again."""
        await self._ask(wire.REST, {"resting": resting}, RunnerAnswer())

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

    async def sweep(self) -> int:
        """Kill every process in the sandbox but the runner; return how many there were."""
        return (await self._ask(wire.SWEEP, {}, RunnerAnswer())).swept

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

    def _begin(self, kind: int, request: Mapping[str, object], exchange: Exchange) -> int:
        if self.lost.is_set():
            raise lost("the sandbox's runner is gone")
        self.number = number = (self.number + 1) % 2**31
        frame = encode_json(kind, number, request)
        if len(frame) > wire.FRAME_MAX_BYTES:
            message = f"the command takes {len(frame)} bytes, more than {wire.FRAME_MAX_BYTES}"
            raise TooLarge(message, component="sandbox")
        self._exchanges[number] = exchange
        self._write(frame)
        return number

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self.lost.is_set():
            self._transport.write(frame)

    async def send(self, frame: bytes) -> None:
        self._write(frame)
        if not self._writable.is_set():
            await self._writable.wait()

    async def _ask(self, kind: int, request: Mapping[str, object], answer: RunnerAnswer) -> RunnerEnd:
        return await self._await_answer(self._begin(kind, request, answer), answer)

    async def _await_answer(self, number: int, answer: RunnerAnswer) -> RunnerEnd:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer.end
        except TimeoutError:
            self.close()
            raise lost("the runner has fallen silent") from None
        finally:
            self._exchanges.pop(number, None)

    async def kill(self, number: int, end: asyncio.Future[RunnerEnd]) -> None:
        """SIGKILL its tree and wait until it is gone; hang up on a runner that cannot."""
        if end.done():
            return
        self._write(encode_json(wire.KILL, number, {"grace_s": 0.0}))
        done, _ = await asyncio.wait([end], timeout=wire.UNKILLABLE_S + SILENCE_S)
        if not done:
            self.close()
