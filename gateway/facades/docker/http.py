"""HTTP/1.1 for the Docker API, with connections that are taken over."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import socket
import stat
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qsl, unquote

import h11
import structlog
from starlette.requests import ClientDisconnect

from gateway import serialization
from gateway.api import JSON, bounded_chunks
from gateway.config.schema import DockerFacade, ServerConfig
from gateway.errors import FaultKind
from gateway.facades.facade import STATUSES, fault_of
from gateway.http.messages import PHRASES
from gateway.tls import Connections
from manager.errors import CodedError, Conflict, InvalidConfig, InvalidInput, StorageUnavailable, exhaustion
from runtimes.chores import end_chores

READ_BYTES = 64 * 1024
#: Of a request's line and headers together.
HEADERS_BYTES = 64 * 1024
#: Bytes of a body that nobody wanted which are still read, so that its client finds the answer.
UNREAD_MAX_BYTES = 2**20
#: Seconds between two looks at whether a client that ended its input is still there.
LOOK_S = 0.5
#: Looks at whether a client has read the head of its stream: the first between two turns of the loop, as it comes at
#: once where a core is free for it, and seconds between two of the others.
TAKEN_TURNS, TAKEN_LOOKS, TAKEN_EVERY_S = 20, 500, 0.002
#: Query parameters of one request at most.
QUERY_MAX = 64
#: The versions of the engine's API that are spoken.
API_VERSION, API_VERSION_MIN = (1, 44), (1, 24)
#: What every answer says of the engine.
_ENGINE = {
    "Api-Version": ".".join(map(str, API_VERSION)),
    "Docker-Experimental": "false",
    "Ostype": "linux",
}


class DockerConnection:
    """One connection: HTTP until it is upgraded, then bytes both ways; each write within its bound."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bounds: ServerConfig) -> None:
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADERS_BYTES)
        self.bounds = bounds
        self._reader = reader
        self._writer = writer
        #: What was read with the request that upgraded it.
        self.unread = b""

    async def read(self) -> bytes:
        """Return what comes next; empty at the end of its input."""
        if self.unread:
            data, self.unread = self.unread, b""
            return data
        try:
            return await self._reader.read(READ_BYTES)
        except OSError:
            return b""

    async def write(self, data: bytes) -> None:
        """Send; raises ClientDisconnect if it is gone or takes nothing for a while."""
        if self._writer.is_closing():  # which a write to it would take for a mistake of ours
            raise ClientDisconnect()
        try:
            self._writer.write(data)
            if self._writer.transport.get_write_buffer_size():
                async with asyncio.timeout(self.bounds.stall_s):
                    await self._writer.drain()
        except (OSError, TimeoutError):
            raise ClientDisconnect() from None

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        """Return the next event of the HTTP conversation; raises h11.RemoteProtocolError."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type) or event is h11.PAUSED
                return event
            if self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
            self.http.receive_data(await self.read())

    async def send(self, *events: h11.Event) -> None:
        """Send events with one write, which wakes the client once; raises ClientDisconnect."""
        data = b"".join([self.http.send(event) or b"" for event in events])
        if data:
            await self.write(data)

    async def taken(self) -> None:
        """Return when the client has read what was sent, or a moment later.

        docker-py reads an answer's headers through a buffer, and loses what else is in it.
        """
        descriptor = self._writer.get_extra_info("socket").fileno()
        for look in range(TAKEN_LOOKS):
            try:
                if not int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
                    return
            except OSError:
                raise ClientDisconnect() from None
            await asyncio.sleep(0 if look < TAKEN_TURNS else TAKEN_EVERY_S)

    async def next_cycle(self) -> bool:
        """Read what is left of a request that was answered; return whether another may come."""
        try:
            if self.http.their_state is h11.SEND_BODY:
                async with asyncio.timeout(self.bounds.stall_s):
                    await self._pass_over()
        except TimeoutError:
            return False
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True

    async def _pass_over(self) -> None:
        left_bytes = UNREAD_MAX_BYTES
        while self.http.their_state is h11.SEND_BODY and left_bytes > 0:
            event = await self.event()
            left_bytes -= len(event.data) if isinstance(event, h11.Data) else 0

    def hung_up(self) -> bool:
        """Return whether the client closed both directions, which a half-closed one has not."""
        poll = select.poll()
        try:
            poll.register(self._writer.get_extra_info("socket").fileno(), 0)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    async def gone(self) -> None:
        """Return when the client has closed its connection."""
        # Of a connection whose input has ended nothing tells more.
        while not self._writer.is_closing() and not self.hung_up():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


class DockerExchange:
    """One request, and its answer."""

    def __init__(self, peer: DockerConnection, request: h11.Request) -> None:
        self.peer = peer
        self.method = request.method.decode("ascii")
        path, _, query = request.target.decode("latin-1").partition("?")
        self.path = unquote(path, errors="replace")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_MAX, errors="replace")
        except ValueError:
            raise InvalidInput(f"the query has more than {QUERY_MAX} parameters", component="docker") from None
        self.query = dict(pairs)
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        #: Whether an answer has begun.
        self.started = False

    def chunks(self, limit_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; raises TooLarge, TooSlow, ClientDisconnect."""

        async def pieces() -> AsyncIterator[bytes]:
            while not isinstance(event := await self.peer.event(), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    raise ClientDisconnect()
                yield bytes(event.data)

        return bounded_chunks(pieces(), limit_bytes, "server.body_limit", self.peer.bounds.body_timeout_s, "docker")

    async def read_object(self, limit_bytes: int) -> dict[str, object]:
        """Return the body, a JSON object or nothing; raises InvalidInput and as `chunks`."""
        body = b"".join([chunk async for chunk in self.chunks(limit_bytes)])
        return serialization.loads_object(body) if body.strip() else {}

    async def answer(self, status: int, value: object = None, headers: Mapping[str, str] | None = None) -> None:
        """Answer with a JSON value, or with nothing at all for None."""
        body = b"" if value is None else serialization.dumps(value)
        shown = dict(headers or {})
        if status not in (204, 304):
            shown["Content-Length"] = str(len(body))
            if body:
                shown.setdefault("Content-Type", JSON)
        await self._send_whole(status, shown, body)

    async def answer_text(self, text: str, headers: Mapping[str, str]) -> None:
        """Answer 200 with plain text."""
        kind = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(text))}
        await self._send_whole(200, {**headers, **kind}, text.encode())

    @asynccontextmanager
    async def streamed(self, media_type: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[None]:
        """Answer 200 with what is sent within the block by `send`, as it is sent."""
        await self.peer.send(self._head(200, {**(headers or {}), "Content-Type": media_type}))
        yield
        await self.peer.send(h11.EndOfMessage())

    async def send(self, data: bytes) -> None:
        """Send a piece of what is streamed; raises ClientDisconnect."""
        await self.peer.send(h11.Data(data=data))

    async def upgraded(self, media_type: str) -> DockerConnection:
        """Answer, and return the stream that the connection is from now on; it ends with the connection."""
        self.started = True
        words = [word.strip().lower() for word in self.headers.get("connection", "").split(",")]
        if "upgrade" in words and "upgrade" in self.headers:  # without the second there is nothing to switch to
            headers = [("Content-Type", media_type), ("Connection", "Upgrade"), ("Upgrade", "tcp"), *_ENGINE.items()]
            await self.peer.send(h11.InformationalResponse(status_code=101, headers=headers, reason=b"UPGRADED"))
        else:
            text = "".join(f"{name}: {value}\r\n" for name, value in {"Content-Type": media_type, **_ENGINE}.items())
            await self.peer.write(f"HTTP/1.1 200 OK\r\n{text}\r\n".encode())
        await self.peer.taken()
        self.peer.unread = self.peer.http.trailing_data[0]
        return self.peer

    async def _send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        pieces = (h11.Data(data=body),) if body and self.method != "HEAD" else ()
        await self.peer.send(self._head(status, headers), *pieces, h11.EndOfMessage())

    def _head(self, status: int, headers: Mapping[str, str]) -> h11.Response:
        self.started = True
        shown = list((_ENGINE | dict(headers)).items())
        return h11.Response(status_code=status, headers=shown, reason=PHRASES.get(status, b"Unknown"))


COMPONENT = "docker"
#: Seconds for which an idle connection stays open, and for a request's headers to arrive.
KEEP_ALIVE_S = 75.0
#: Its clients try nothing again; the CLI pulls an image and creates once more after a 404.
REFUSED = STATUSES | {FaultKind.INPUT: 400, FaultKind.LOST: 500}
#: Seconds that open requests have to end when it closes.
CLOSE_GRACE_S = 5.0
BACKLOG = 1024
#: The kernel bounds the path of a unix socket, its NUL included.
PATH_MAX_BYTES = 107
#: Most connections of the socket at once, within those of the gateway: each `docker exec` holds one.
CONNECTIONS_MAX = 1024

Serve = Callable[[DockerExchange], Awaitable[None]]
logger = structlog.get_logger("gateway.facades")


class DockerListener:
    """The listener: bound at the start, answering 503 until `open`, gone with its socket at `close`."""

    def __init__(
        self, settings: DockerFacade, server: ServerConfig, connections_max: int, closers: AsyncExitStack
    ) -> None:
        """Bind it; raises Conflict where something answers at the path already, InvalidConfig."""
        self.path = Path(settings.socket)
        self.connections = Connections(limit=min(CONNECTIONS_MAX, connections_max))
        self._bounds = server
        self._serve: Serve | None = None
        #: Awaited when it closes, after the last request.
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        listener = bound(self.path)
        identity = _identity(self.path)
        closers.callback(_unlink, self.path, identity)
        closers.enter_context(listener)
        self.serving = asyncio.get_running_loop().create_task(self._accept(listener))

    def open(self, serve: Serve) -> None:
        """From now on ``serve`` answers."""
        self._serve = serve

    async def close(self) -> None:
        """Let open requests end, and stop; idempotent."""
        self._closing.set()
        await asyncio.gather(self.serving, return_exceptions=True)
        if self.on_close is not None:
            done, self.on_close = self.on_close, None
            await done()

    async def _accept(self, listener: socket.socket) -> None:
        server = await asyncio.start_unix_server(self._connected, sock=listener, backlog=BACKLOG)
        try:
            await self._closing.wait()
        finally:
            server.close()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CLOSE_GRACE_S)
            await end_chores(*self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer, refusal = DockerConnection(reader, writer, self._bounds), self.connections.enter("docker")
        try:
            while await self._answered(peer, refusal):
                pass
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            writer.transport.abort()  # the grace is over; to end as cancelled would be logged as an error of ours
        finally:
            if refusal is None:
                self.connections.leave()
            self._tasks.discard(task)
            writer.close()

    async def _answered(self, peer: DockerConnection, refusal: CodedError | None) -> bool:
        """Answer the next request; return whether another may come."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                request = await peer.event()
        except TimeoutError:
            return False
        except h11.RemoteProtocolError as error:
            return await _refuse_unread(peer, InvalidInput(f"this is no HTTP/1.1: {error}", component=COMPONENT))
        if not isinstance(request, h11.Request):
            return False
        try:
            exchange = DockerExchange(peer, request)
            try:
                await self._served(exchange, refusal)
            except Exception as error:
                if isinstance(error, ClientDisconnect) or exchange.started:
                    raise
                await _refuse(exchange, _coded(error, exchange))
        except h11.ProtocolError as error:
            raise ClientDisconnect() from error
        except InvalidInput as error:
            return await _refuse_unread(peer, error)
        try:
            return await peer.next_cycle() and refusal is None and not self._closing.is_set()
        except h11.ProtocolError:
            return False

    async def _served(self, exchange: DockerExchange, refusal: CodedError | None) -> None:
        if refusal is not None:
            raise refusal
        if self._serve is None:
            message = "the gateway starts: it has not taken up its record yet"
            raise StorageUnavailable(message, component=COMPONENT, retry_after_s=1.0)
        await self._serve(exchange)


def bound(path: Path) -> socket.socket:
    """Return a listening socket at the path, which nobody but our own user can open.

    A socket at which nothing listens any more is replaced. Raises Conflict, InvalidConfig.
    """
    left = require_place(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        if left:
            path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        listener.close()
        raise _no_place(path, error.strerror or "it cannot be bound") from None


def require_place(path: Path) -> bool:
    """Return whether an ended gateway left its socket at the path; raises Conflict, InvalidConfig, changes nothing."""
    if len(os.fsencode(path)) > PATH_MAX_BYTES:
        message = f"{path} is longer than {PATH_MAX_BYTES} bytes, which a unix socket's path can have at most"
        raise InvalidConfig(message, component=COMPONENT)
    if os.environ.get("DOCKER_HOST", "") == f"unix://{path}":
        message = f"DOCKER_HOST of the gateway itself is its own socket ({path}): unset it where the gateway is started"
        raise InvalidConfig(message, component=COMPONENT)
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise _no_place(path, f"there is no directory {path.parent}") from None
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise _no_place(path, f"{path.parent} cannot be written to") from None
        return False
    except OSError as error:
        raise _no_place(path, error.strerror or "it cannot be looked at") from None
    if not stat.S_ISSOCK(kind):
        raise Conflict(f"{path} is there and no socket; choose server.facades.docker.socket", component=COMPONENT)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError as error:
            raise _no_place(path, error.strerror or "who listens there does not answer") from None
    raise Conflict(f"something listens at {path} already; choose server.facades.docker.socket", component=COMPONENT)


def _no_place(path: Path, why: str) -> InvalidConfig:
    message = f"cannot listen at {path}: {why}; choose server.facades.docker.socket"
    return InvalidConfig(message, component=COMPONENT)


def _identity(path: Path) -> tuple[int, int]:
    result = path.lstat()
    return result.st_dev, result.st_ino


def _unlink(path: Path, identity: tuple[int, int]) -> None:
    """Take our socket away, unless another gateway has put its own there."""
    with suppress(OSError):
        if _identity(path) == identity:
            path.unlink()


def _coded(error: Exception, exchange: DockerExchange) -> CodedError:
    result = exhaustion(error, COMPONENT) or error
    if isinstance(result, CodedError):
        return result
    if isinstance(result, h11.RemoteProtocolError):
        return InvalidInput(f"this is no HTTP/1.1: {result}", component=COMPONENT)
    logger.exception("a request failed", facade=COMPONENT, path=exchange.path[:200], error=str(error))
    return CodedError("a fault of the gateway: its log tells more", component=COMPONENT)


async def _refuse(exchange: DockerExchange, error: CodedError) -> None:
    """Answer in the engine's own shape."""
    headers = {} if error.invocation_id is None else {"X-Invocation-Id": error.invocation_id}
    await exchange.answer(REFUSED[fault_of(error).kind], {"message": error.message}, headers)


async def _refuse_unread(peer: DockerConnection, error: CodedError) -> bool:
    """Answer what is no request, and let the connection go."""
    if peer.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
        body = serialization.dumps({"message": error.message})
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        await peer.send(head, h11.Data(data=body), h11.EndOfMessage())
    return False
