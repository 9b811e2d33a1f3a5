"""The server on Hypercorn, with a bound on connections and on peers that neither read nor answer."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import cast

import h11
import hypercorn.protocol
import structlog
from h2.errors import ErrorCodes
from h2.events import Event, StreamReset
from h2.exceptions import StreamClosedError
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.events import Event as WireEvent
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Request, StreamClosed
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import FrameTooLargeError, WSStream
from hypercorn.typing import ASGIFramework, H11SendableEvent, LifespanState
from hypercorn.utils import wrap_app
from msgspec.structs import replace
from starlette.types import ASGIApp
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping

from gateway import serialization
from gateway.config.schema import ServerConfig
from gateway.errors import problem, retry_after
from gateway.http.messages import HELD, PEER, PHRASES
from gateway.tls import (
    HANDSHAKE_S,
    LINGER_S,
    RESETS_MAX,
    STREAMS_MAX,
    STRETCH_S,
    Connections,
    RenewedContext,
    Resets,
    Turns,
)
from gateway.trajectory_records import ConnectionPeer
from manager.errors import CodedError, Conflict, InvalidConfig

#: Seconds in which a new request's headers must arrive, and for which an idle connection stays open.
KEEP_ALIVE_S = 75
HEADERS_BYTES = 64 * 1024
BACKLOG = 4096
#: Seconds without a sign of life after which a peer is asked for one, and between two such questions.
PROBE_AFTER_S, PROBE_EVERY_S = 60, 15
#: In the state of a connection: what divides its bytes.
TURNS = "tangram.turns"
logger = structlog.get_logger("gateway.http")


class NamedStatuses(H11Protocol):
    """HTTP/1.1 whose status lines carry a reason phrase: there are clients that read no other.

    An answer that comes before its request has ended closes the connection, and says so: else the client sends its
    next request into the close.
    """

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        if isinstance(event, h11.Response | h11.InformationalResponse) and not event.reason:
            phrase, headers = PHRASES.get(event.status_code, b"Unknown"), list(event.headers.raw_items())
            if isinstance(event, h11.Response) and self.connection.their_state is h11.SEND_BODY:
                headers.append((b"connection", b"close"))
            event = type(event)(status_code=event.status_code, headers=headers, reason=phrase)
        await super()._send_h11_event(event)


class BoundedResets(H2Protocol):
    """HTTP/2 whose peer may not ask and take back for ever: calls that are dropped at once escape every other bound."""

    #: Made with the first reset.
    _resets: Resets | None = None

    async def handle(self, event: WireEvent) -> None:
        """Read what has come piece by piece: each may hold dozens of frames."""
        if not isinstance(event, RawData):
            await super().handle(event)
            for buffer in [*self.stream_buffers.values()]:  # nothing is sent any more: an answer must not wait for it
                await buffer.close()
            return
        turns: Turns = self.connection_state[TURNS]
        try:
            async for piece in turns.pieces(event.data):
                await super().handle(RawData(piece))
        except StreamClosedError:  # Hypercorn refuses a call whose peer has reset it already
            await self.send(Closed())

    async def stream_send(self, event: StreamEvent) -> None:
        """Drop what an answer sends after its connection is closed."""
        if not self.closed:
            await super().stream_send(event)

    async def _handle_events(self, events: list[Event]) -> None:
        resets = sum(isinstance(event, StreamReset) for event in events)
        if resets:
            self._resets = self._resets or Resets(RESETS_MAX)
            if self._resets.exceeded(asyncio.get_running_loop().time(), resets):
                logger.warning("an HTTP/2 connection was closed: too many calls were reset", count=self._resets.count)
                self.connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
                await self._flush()
                await self.send(Closed())
                return
        await super()._handle_events(events)


class BoundedMessages(WSStream):
    """A WebSocket whose messages come whole in time and within their bound. They are not compressed.

    A few bytes that unpack to a great many are read before anybody can look at how many they are.
    """

    _late: asyncio.TimerHandle | None = None

    async def handle(self, event: StreamEvent) -> None:
        if isinstance(event, Request):
            headers = [header for header in event.headers if header[0].lower() != b"sec-websocket-extensions"]
            event = dataclasses.replace(event, headers=headers)
        await super().handle(event)
        if isinstance(event, StreamClosed):
            self._rest()

    async def _handle_events(self) -> None:
        """As Hypercorn does, but let others go first meanwhile, and read nothing beyond a bound."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + STRETCH_S
        for event in self.connection.events():
            if isinstance(event, Message):
                try:
                    self.buffer.extend(event)
                except (FrameTooLargeError, TypeError) as error:
                    large = isinstance(error, FrameTooLargeError)
                    await self._end(1009 if large else 1007, f"a message of more than {self.buffer.max_length} bytes")
                    return
                if event.message_finished:
                    self._rest()
                    message = self.buffer.to_message()
                    self.buffer.clear()
                    assert self.app_put is not None, "it was accepted by the application"
                    await self.app_put(message)
            elif isinstance(event, Ping):
                await self._send_wsproto_event(event.response())
            elif isinstance(event, CloseConnection):
                await self._end(event.code, None)
                return
            if loop.time() > until_s:
                await asyncio.sleep(0)
                until_s = loop.time() + STRETCH_S
        if self.buffer.value is not None and self._late is None:
            assert isinstance(self.config, BoundedConfig)
            why = f"a message that took longer than {self.config.message_timeout_s:g} s"
            late = partial(self.task_group.spawn, self._end, 1008, why)
            self._late = loop.call_later(self.config.message_timeout_s, late)

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    async def _end(self, code: int, reason: str | None) -> None:
        """Say farewell, and read no more."""
        if self.connection.state is not ConnectionState.CLOSED:
            await self._send_wsproto_event(CloseConnection(code=code, reason=reason))
        await self.send(StreamClosed(stream_id=self.stream_id))


class BoundedConfig(Config):
    """Hypercorn's configuration, and what it has no name for."""

    #: Seconds in which a message of a WebSocket that has begun must have come.
    message_timeout_s = 300.0


# Hypercorn makes its protocols by these names, and takes no others.
setattr(hypercorn.protocol, H11Protocol.__name__, NamedStatuses)
setattr(hypercorn.protocol, H2Protocol.__name__, BoundedResets)
for _module in (hypercorn.protocol.h11, hypercorn.protocol.h2):
    setattr(_module, WSStream.__name__, BoundedMessages)


class HttpConnection(TCPServer):
    """Hypercorn's connection, let go of the moment its peer has closed it, not when its keep-alive would have ended."""

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
        finally:
            self.state[PEER].close()
        await self.idle_task.stop()


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    stop: Callable[[], Awaitable[object]],
    grace_s: float,
    connections: Connections | None = None,
    bounds: ServerConfig | None = None,
) -> None:
    """Serve until ``stop`` returns; then open requests have ``grace_s`` to end, and break off where they have not.

    ``bounds`` are those of one HTTP/2 connection, and the certificates to speak TLS with.
    """
    counted, bounds = connections or Connections(), bounds or ServerConfig()
    loop = asyncio.get_running_loop()
    framework = cast(ASGIFramework, app)  # the same protocol: Hypercorn types its messages, Starlette does not
    wrapped, config, context = wrap_app(framework, 0, "asgi"), _config(bounds), WorkerContext(None)
    tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        tasks[task] = writer
        try:
            refusal = counted.enter("http")
            if refusal is not None:
                with counted.refusing() as lingering:
                    await _refuse(reader, writer, refusal, lingering)
                return
            held = counted.hold(writer.transport.abort)
            try:
                await HttpConnection(
                    wrapped,
                    loop,
                    config,
                    context,
                    LifespanState({TURNS: counted.turns, PEER: ConnectionPeer(), HELD: partial(counted.asked, held)}),
                    reader,
                    writer,
                )
            except* OSError:
                pass  # the peer is gone; Hypercorn handles it everywhere but while it waits for the end
            finally:
                counted.leave(held)
        except asyncio.CancelledError:  # the grace is over; to end as cancelled would be logged as an error of ours
            return
        finally:
            del tasks[task]

    renewed = None if bounds.tls is None else RenewedContext(bounds.tls, ("h2", "http/1.1"), "http")
    server = await asyncio.start_server(
        connected,
        sock=listener,
        backlog=BACKLOG,
        ssl=None if renewed is None else renewed.context,
        ssl_handshake_timeout=None if renewed is None else HANDSHAKE_S,
    )
    try:
        await stop()
    finally:
        await context.terminated.set()
        server.close()
        if renewed is not None:
            renewed.close()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task, writer in tasks.items():
            writer.transport.abort()  # else Hypercorn answers 500, which says that nothing is to be tried again
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _refuse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    error: CodedError,
    lingering: bool,
) -> None:
    """Answer 503 to whatever is asked, and close; without ``lingering`` as soon as the answer is on its way."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    body = serialization.encode(replace(problem(error), status=status.value))
    again = "" if error.retry_after_s is None else f"retry-after: {retry_after(error.retry_after_s)}\r\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/problem+json\r\n{again}"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    try:
        async with asyncio.timeout(LINGER_S):
            writer.write(head.encode() + body)
            if writer.can_write_eof():
                writer.write_eof()
            if lingering:
                await reader.read(HEADERS_BYTES)  # closing on unread bytes would take the answer back
            else:
                await writer.drain()
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


def _config(bounds: ServerConfig) -> Config:
    config = BoundedConfig()
    config.message_timeout_s = bounds.body_timeout_s
    config.websocket_max_message_size = bounds.stream_message_bytes
    config.errorlog = None
    config.accesslog = None
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 2**31
    config.h11_max_incomplete_size = HEADERS_BYTES
    config.h2_max_concurrent_streams = STREAMS_MAX
    config.include_server_header = False
    return config


def _unbound(host: str, port: int, error: OSError | OverflowError) -> CodedError:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        message = f"port {port} of {host} is in use; stop what listens there, or choose another in the section server"
        return Conflict(message, component="http")
    message = f"cannot listen on port {port} of {host}: {error}; choose server.host and the ports of the section server"
    return InvalidConfig(message, component="http")


def listen(host: str, port: int, silent_s: float = 120.0) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises Conflict for one that is taken, InvalidConfig, OSError.

    The kernel cuts a connection whose peer has taken nothing of what was sent to it for ``silent_s``, and finds
    peers that vanished without a word.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise _unbound(host, port, error) from None
    listener.setblocking(False)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(silent_s * 1000)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    return listener
