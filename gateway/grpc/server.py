"""The server: the service on grpclib, with health, reflection, the token, and the bounds that grpclib does not have.

What one peer sends harms no other: a connection or a message beyond its bound is answered or cut alone.
"""

from __future__ import annotations

import asyncio
import binascii
import socket
from asyncio import BaseTransport
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from traceback import clear_frames
from typing import Any, cast

import structlog
from grpclib._typing import IServable
from grpclib.const import Status
from grpclib.events import RecvRequest, listen
from grpclib.exceptions import GRPCError
from grpclib.health.check import ServiceCheck
from grpclib.health.service import Health
from grpclib.metadata import decode_metadata
from grpclib.metadata import encode_grpc_message as encoded
from grpclib.protocol import AbstractHandler, H2Protocol
from grpclib.protocol import Stream as H2Stream
from grpclib.reflection.service import ServerReflection
from grpclib.server import Handler, Server, Stream
from h2.errors import ErrorCodes
from h2.events import RemoteSettingsChanged, StreamReset, UnknownFrameReceived
from h2.settings import SettingCodes

from gateway.api import Api
from gateway.errors import TooSlow
from gateway.grpc.messages import status_error, trailers
from gateway.grpc.service import GatewayService
from gateway.tls import (
    LINGER_S,
    RESETS_MAX,
    STREAMS_MAX,
    STRETCH_BYTES,
    Connections,
    RenewedContext,
    Resets,
    Turns,
)
from manager.errors import CodedError, InvalidInput, TooLarge, Unsupported, exhaustion

SERVICE = "/tangram.v1.Gateway/"
#: What is served without a token.
HEALTH = "/grpc.health.v1.Health/"
#: Seconds for which an answer about the health holds, and between two looks while anybody watches it.
LOOK_S = 1.0
#: Seconds in which a new connection must say that it speaks HTTP/2.
GREETING_S = 20.0
#: What a message may hold beside the body of an invocation, or the piece of a file.
ENVELOPE_BYTES = 64 * 1024
#: Largest piece of a file in one message of an upload.
PIECE_MAX_BYTES = 2**20
#: The first byte of what precedes a compressed message.
COMPRESSED = b"\x01"
#: The method whose messages are pieces of a file: many that are small, and none of them an input that is held.
UPLOAD = "WriteFile"
#: Methods of which a reader who was given up finds the rest in a log.
LOGS = frozenset({"Invoke", "InvokeStream", "TailLogs"})

Headers = list[tuple[str, str]]
logger = structlog.get_logger("gateway.grpc")


class GrpcServer:
    """The gRPC server; `open` binds, `close` waits for open calls within a grace."""

    def __init__(self, api: Api, connections: Connections) -> None:
        self._api = api
        self._tls: RenewedContext | None = None
        service = GatewayService(api)
        readiness = ServiceCheck(self._is_ready, check_ttl=LOOK_S)
        served: list[IServable] = [service, Health({service: [readiness]})]
        self._server = BoundedServer(ServerReflection.extend(served), connections)
        listen(self._server, RecvRequest, self._let_in)

    async def open(self, listener: socket.socket) -> None:
        tls = self._api.server.tls
        self._tls = None if tls is None else RenewedContext(tls, ("h2",), "grpc")
        await self._server.start(sock=listener, ssl=None if self._tls is None else self._tls.context)

    async def close(self) -> None:
        """Stop, and wait until open calls have ended."""
        if self._tls is not None:
            self._tls.close()
        self._server.close()
        await self._server.wait_closed()

    async def _is_ready(self) -> bool:
        """Return what ``/readyz`` tells on HTTP."""
        return self._api.unready() is None

    async def _let_in(self, event: RecvRequest) -> None:
        """Refuse who has no token, and serve the others within the bounds."""
        if not event.method_name.startswith(HEALTH):
            value = event.metadata.get("authorization")
            try:
                self._api.guard.role(str(value).encode() if value is not None else None)
            except CodedError as error:
                self._api.metrics.refused("grpc", error.code)
                raise status_error(error) from None
        event.method_func = partial(self._serve, event.method_func, event.method_name.removeprefix(SERVICE))

    async def _serve(self, method: Any, name: str, stream: Stream[Any, Any]) -> None:
        """Run a call within its bounds, and turn what fails into a status with its code in the trailers.

        Any: whatever grpclib calls, of whatever messages. It reads five bytes that tell a message's form and length,
        and then so many through ``recv_data``: the one place where a message can be refused early is there, on the
        stream that it keeps in ``_stream``.
        """
        raw = stream._stream
        bounds = CallBounds(self._api, name, raw.recv_data, raw.send_data)
        raw.recv_data, raw.send_data = bounds.recv_data, bounds.send_data  # type: ignore[method-assign]
        try:
            await method(stream)
        except CodedError as error:
            self._api.metrics.refused("grpc", error.code)
            clear_frames(error.__traceback__)  # they hold the request
            status = status_error(error)
            await stream.send_trailing_metadata(
                status=status.status, status_message=status.message, metadata=trailers(error)
            )
        except (GRPCError, TimeoutError):
            raise
        except Exception as error:
            if short := exhaustion(error, "grpc"):
                raise status_error(short) from error
            logger.exception("a call failed", error=str(error))
            self._api.metrics.refused("grpc", "internal")
            raise GRPCError(Status.INTERNAL, "internal: a fault of the gateway: its log tells more") from error


class CallBounds:
    """Stands before the two ways of one call's bytes.

    Refuses a message that is too large before any of it is read, that comes too slowly, or that nobody can read; and
    gives up a peer that asks and does not read.
    """

    def __init__(
        self,
        api: Api,
        name: str,
        receive: Callable[[int], Awaitable[bytes]],
        send: Callable[[bytes, bool], Awaitable[None]],
    ) -> None:
        self._api = api
        self._receive = receive
        self._send = send
        self._follows_log = name in LOGS
        self._holds = name != UPLOAD
        self._message_max = api.server.body_limit_bytes if self._holds else PIECE_MAX_BYTES
        self._stall_s = api.server.stall_s
        self._reads = 0

    async def recv_data(self, size: int) -> bytes:
        """Return so many bytes of a message, or of what precedes it, and none after the last one."""
        self._reads += 1
        if size > self._message_max + ENVELOPE_BYTES:
            remedy = " (server.body_limit)" if self._holds else ": send the file in smaller pieces"
            raise TooLarge(f"the message is larger than {self._message_max} bytes{remedy}", component="grpc")
        held, timeout_s = self._api.held, self._api.server.body_timeout_s
        if self._holds:
            held.check(size)
            held.take(size)
        try:
            async with asyncio.timeout(timeout_s):
                data = await self._receive(size)
        except TimeoutError:
            raise TooSlow(f"the message took longer than {timeout_s:g} s", component="grpc") from None
        except AssertionError:  # grpclib's word for a client that stopped in the middle
            raise InvalidInput("the message broke off", component="grpc") from None
        finally:
            if self._holds:
                held.give(size)
        if self._reads % 2 and data[:1] == COMPRESSED:
            raise Unsupported("compressed messages are not read here: send them as they are", component="grpc")
        return data

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send; raises TooSlow if it is not read in time."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(data, end_stream)
        except TimeoutError:
            message = f"what was sent was not read within {self._stall_s:g} s"
            if self._follows_log:
                self._api.logs.followers_dropped += 1
                message += ": a log can be resumed after its last offset"
            raise TooSlow(message, component="grpc") from None


class BoundedServer(Server):
    """grpclib's server, whose connections are counted and have bounds."""

    def __init__(self, services: Sequence[IServable], connections: Connections) -> None:
        super().__init__(services)
        self._connections = connections
        # Bytes beyond ASCII are odd, not a reason to drop every call of their connection.
        self._h2_config.header_encoding = "latin-1"

    def _protocol_factory(self) -> H2Protocol:
        """As grpclib makes it, of our own parts."""
        self.__gc_step__()
        refusal = self._connections.enter("grpc")
        if refusal is not None:
            refusing = RefusingHandler(refusal)
            return GrpcConnection(
                refusing, self._config, self._h2_config, lambda: None, LINGER_S, self._connections.turns
            )
        handler = ReadableHeaders(self._mapping, self._codec, self._status_details_codec, self.__dispatch__)
        self._handlers.add(handler)
        connections = self._connections
        return GrpcConnection(handler, self._config, self._h2_config, connections.leave, None, connections.turns)


class GrpcConnection(H2Protocol):
    """One peer. What cannot be read closes it, quietly: anybody can send anything."""

    def __init__(
        self,
        handler: AbstractHandler,
        config: Any,
        h2_config: Any,
        closed: Callable[[], None],
        life_s: float | None,
        turns: Turns,
    ) -> None:
        """``closed`` is told its end; it is cut after ``life_s``, and where that is None if it does not greet in time.

        Any: the configurations of grpclib and h2, passed through.
        """
        super().__init__(handler, config, h2_config)
        self._resets = Resets(RESETS_MAX)
        self._closed = closed
        self._life_s = life_s
        self._cut: asyncio.TimerHandle | None = None
        self._turns = turns
        #: What has come and was not read yet, and who reads it.
        self._unread = bytearray()
        self._reading: asyncio.Task[None] | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = cast(asyncio.Transport, transport)
        h2 = self.connection._connection
        h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX})
        self.connection.flush()
        processors = self.processor.processors
        processors[UnknownFrameReceived] = lambda event: None  # RFC 9113, 4.1: to be ignored
        processors[RemoteSettingsChanged] = self._greeted
        processors[StreamReset] = self._reset
        wait_s = GREETING_S if self._life_s is None else self._life_s
        self._cut = asyncio.get_running_loop().call_later(wait_s, transport.abort)  # type: ignore[attr-defined]

    def _greeted(self, event: RemoteSettingsChanged) -> None:
        if self._life_s is None and self._cut is not None:
            self._cut.cancel()
        self.processor.process_remote_settings_changed(event)

    def _reset(self, event: StreamReset) -> None:
        """A call that is dropped as soon as it is made escapes every other bound."""
        if not self._resets.exceeded(asyncio.get_running_loop().time()):
            self.processor.process_stream_reset(event)
            return
        logger.warning("a gRPC connection was closed: too many calls were reset", count=self._resets.count)
        self.connection._connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
        self.connection.flush()
        self.processor.close("too many calls were reset")

    def data_received(self, data: bytes) -> None:
        """Read what has come, at once if it is little."""
        if self._reading is None and len(data) <= STRETCH_BYTES:
            self._read(data)
            return
        self._unread += data
        if self._reading is None:
            self._transport.pause_reading()
            self._reading = asyncio.get_running_loop().create_task(self._read_on())

    async def _read_on(self) -> None:
        """Read piece by piece what is much, while nothing more comes."""
        while self._unread and not self._transport.is_closing():
            data, self._unread = bytes(self._unread), bytearray()
            async for piece in self._turns.pieces(data):
                if self._transport.is_closing():
                    return
                self._read(piece)
        self._reading = None
        self._transport.resume_reading()

    def _read(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception as error:
            logger.exception("a gRPC connection was closed: what it sent cannot be read", why=str(error))
            self.processor.close("unreadable")

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)
        self._closed()


class ReadableHeaders(Handler):
    """Hands on only calls whose headers can be read; grpclib would leave the others without an answer."""

    def accept(self, stream: H2Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        if _readable(headers):
            super().accept(stream, headers, release_stream)
            return
        stream.reset_nowait(ErrorCodes.PROTOCOL_ERROR)
        release_stream()


class RefusingHandler(AbstractHandler):
    """Answers every call of a connection too many with the same status."""

    def __init__(self, error: CodedError) -> None:
        self._status: GRPCError = status_error(error)
        self._about = trailers(error)
        self._answers: dict[H2Stream, asyncio.Task[None]] = {}

    def accept(self, stream: H2Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        self._answers[stream] = asyncio.get_running_loop().create_task(self._answer(stream, release_stream))

    async def _answer(self, stream: H2Stream, release_stream: Callable[[], Any]) -> None:
        head = [(":status", "200"), ("content-type", "application/grpc+proto")]
        status = [
            ("grpc-status", str(self._status.status.value)),
            ("grpc-message", encoded(self._status.message or "")),
        ]
        await stream.send_headers([*head, *status, *self._about.items()], end_stream=True)
        release_stream()

    def cancel(self, stream: H2Stream) -> None:
        task = self._answers.pop(stream, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for stream in list(self._answers):
            self.cancel(stream)


def _readable(headers: Headers) -> bool:
    """Whether grpclib can read them: the pseudo-headers are there, and what calls itself base64 is."""
    names = {name for name, _ in headers}
    try:
        decode_metadata(headers)
    except (ValueError, binascii.Error):
        return False
    return {":method", ":path"} <= names
