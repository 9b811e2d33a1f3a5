"""The connection: grpclib's, with bounds, and deaf to what is no gRPC. What one peer sends harms no other."""

from __future__ import annotations

import asyncio
import binascii
from asyncio import BaseTransport
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from grpclib._typing import IServable
from grpclib.exceptions import GRPCError
from grpclib.metadata import decode_metadata
from grpclib.metadata import encode_grpc_message as encoded
from grpclib.protocol import AbstractHandler, H2Protocol, Stream
from grpclib.server import Handler, Server
from h2.errors import ErrorCodes
from h2.events import RemoteSettingsChanged, StreamReset, UnknownFrameReceived
from h2.settings import SettingCodes

from gateway.access.connections import LINGER_S, Connections, Resets
from gateway.config.sections import ServerConfig
from gateway.grpc.messages import status_error, trailers
from manager.errors import CodedError

#: Seconds in which a new connection must say that it speaks HTTP/2.
GREETING_S = 20.0

Headers = list[tuple[str, str]]
logger = structlog.get_logger("gateway.grpc")


class BoundedServer(Server):
    """grpclib's server, whose connections are counted and have bounds."""

    def __init__(self, services: Sequence[IServable], connections: Connections, bounds: ServerConfig) -> None:
        super().__init__(services)
        self._connections = connections
        self._bounds = bounds
        # Bytes beyond ASCII are odd, not a reason to drop every call of their connection.
        self._h2_config.header_encoding = "latin-1"

    def _protocol_factory(self) -> H2Protocol:
        """As grpclib makes it, of our own parts."""
        self.__gc_step__()
        refusal = self._connections.enter("grpc")
        if refusal is not None:
            return GrpcConnection(
                Refusing(refusal), self._config, self._h2_config, self._bounds, lambda: None, LINGER_S
            )
        handler = Careful(self._mapping, self._codec, self._status_details_codec, self.__dispatch__)
        self._handlers.add(handler)
        return GrpcConnection(handler, self._config, self._h2_config, self._bounds, self._connections.leave, None)


class GrpcConnection(H2Protocol):
    """One peer. What cannot be read closes it, quietly: anybody can send anything."""

    def __init__(
        self,
        handler: AbstractHandler,
        config: Any,
        h2_config: Any,
        bounds: ServerConfig,
        closed: Callable[[], None],
        life_s: float | None,
    ) -> None:
        """``closed`` is told its end; it is cut after ``life_s``, and where that is None if it does not greet in time.

        Any: the configurations of grpclib and h2, passed through.
        """
        super().__init__(handler, config, h2_config)
        self._streams_max = bounds.streams_max
        self._resets = Resets(bounds.resets_max)
        self._closed = closed
        self._life_s = life_s
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        h2 = self.connection._connection
        h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: self._streams_max})
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
        try:
            super().data_received(data)
        except Exception as error:
            logger.exception("a gRPC connection was closed: what it sent cannot be read", why=str(error))
            self.processor.close("unreadable")

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)
        self._closed()


class Careful(Handler):
    """Hands on only calls whose headers can be read; grpclib would leave the others without an answer."""

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        if _readable(headers):
            super().accept(stream, headers, release_stream)
            return
        stream.reset_nowait(ErrorCodes.PROTOCOL_ERROR)
        release_stream()


class Refusing(AbstractHandler):
    """Answers every call of a connection too many with the same status."""

    def __init__(self, error: CodedError) -> None:
        self._status: GRPCError = status_error(error)
        self._about = trailers(error)
        self._answers: dict[Stream, asyncio.Task[None]] = {}

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        self._answers[stream] = asyncio.get_running_loop().create_task(self._answer(stream, release_stream))

    async def _answer(self, stream: Stream, release_stream: Callable[[], Any]) -> None:
        head = [(":status", "200"), ("content-type", "application/grpc+proto")]
        status = [
            ("grpc-status", str(self._status.status.value)),
            ("grpc-message", encoded(self._status.message or "")),
        ]
        await stream.send_headers([*head, *status, *self._about.items()], end_stream=True)
        release_stream()

    def cancel(self, stream: Stream) -> None:
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
