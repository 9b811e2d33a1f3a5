"""The door's own listener: a unix socket that only the gateway's user can open, and HTTP/1.1 on it."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import h11
import structlog

from gateway import wire
from gateway.access.connections import Connections
from gateway.config.facades import DockerFacade
from gateway.config.sections import ServerConfig
from gateway.facades.docker.exchange import ClientGone, EngineExchange, EnginePeer
from gateway.facades.faults import Dialect, fault_of
from manager.errors import CodedError, Conflict, InvalidConfig, InvalidInput, StorageUnavailable, exhaustion

COMPONENT = "docker"
#: Seconds for which an idle connection stays open, and for a request's headers to arrive.
KEEP_ALIVE_S = 75.0
#: Seconds that open requests have to end when it closes.
CLOSE_GRACE_S = 5.0
BACKLOG = 1024
#: The kernel bounds the path of a unix socket, its NUL included.
PATH_MAX_BYTES = 107

Serve = Callable[[EngineExchange], Awaitable[None]]
logger = structlog.get_logger("gateway.facades")


class DockerDoor:
    """The listener: bound at the start, answering 503 until `open`, gone with its socket at `close`."""

    def __init__(
        self, settings: DockerFacade, server: ServerConfig, connections_max: int, closers: AsyncExitStack
    ) -> None:
        """Bind it; raises Conflict where something answers at the path already, InvalidConfig."""
        self.path = Path(settings.socket)
        self.connections = Connections(limit=min(settings.connections_max, connections_max))
        self.body_timeout_s, self.stall_s = server.body_timeout_s, server.logs.stall_s
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
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer, refusal = EnginePeer(reader, writer, self), self.connections.enter("docker")
        try:
            while await self._answered(peer, refusal):
                pass
        except ClientGone:
            pass
        except asyncio.CancelledError:
            writer.transport.abort()  # the grace is over; to end as cancelled would be logged as an error of ours
        finally:
            if refusal is None:
                self.connections.leave()
            self._tasks.discard(task)
            writer.close()

    async def _answered(self, peer: EnginePeer, refusal: CodedError | None) -> bool:
        """Answer the next request; return whether another may come."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                request = await peer.event()
        except TimeoutError:
            return False
        except h11.RemoteProtocolError as error:
            return await _told(peer, InvalidInput(f"this is no HTTP/1.1: {error}", component=COMPONENT))
        if not isinstance(request, h11.Request):
            return False
        try:
            exchange = EngineExchange(peer, request)
            try:
                await self._served(exchange, refusal)
            except Exception as error:
                if isinstance(error, ClientGone) or exchange.started:
                    raise
                await _refuse(exchange, _coded(error, exchange))
        except h11.ProtocolError as error:
            raise ClientGone from error
        except InvalidInput as error:
            return await _told(peer, error)
        try:
            return await peer.next_cycle() and refusal is None and not self._closing.is_set()
        except h11.ProtocolError:
            return False

    async def _served(self, exchange: EngineExchange, refusal: CodedError | None) -> None:
        if refusal is not None:
            raise refusal
        if self._serve is None:
            told = "the gateway starts: it has not taken up its record yet"
            raise StorageUnavailable(told, component=COMPONENT, retry_after_s=1.0)
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
        told = f"{path} is longer than {PATH_MAX_BYTES} bytes, which a unix socket's path can have at most"
        raise InvalidConfig(told, component=COMPONENT)
    if os.environ.get("DOCKER_HOST", "") == f"unix://{path}":
        told = f"DOCKER_HOST of the gateway itself is its own door ({path}): unset it where the gateway is started"
        raise InvalidConfig(told, component=COMPONENT)
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
    told = f"cannot listen at {path}: {why}; choose server.facades.docker.socket"
    return InvalidConfig(told, component=COMPONENT)


def _identity(path: Path) -> tuple[int, int]:
    told = path.lstat()
    return told.st_dev, told.st_ino


def _unlink(path: Path, identity: tuple[int, int]) -> None:
    """Take our socket away, unless another gateway has put its own there."""
    with suppress(OSError):
        if _identity(path) == identity:
            path.unlink()


def _coded(error: Exception, exchange: EngineExchange) -> CodedError:
    told = exhaustion(error, COMPONENT) or error
    if isinstance(told, CodedError):
        return told
    if isinstance(told, h11.RemoteProtocolError):
        return InvalidInput(f"this is no HTTP/1.1: {told}", component=COMPONENT)
    logger.exception("a request failed", door=COMPONENT, path=exchange.path[:200], error=str(error))
    return CodedError("a fault of the gateway: its log tells more", component=COMPONENT)


async def _refuse(exchange: EngineExchange, error: CodedError) -> None:
    """Answer in the engine's own shape."""
    fault = fault_of(error)
    headers = {} if error.invocation_id is None else {"X-Invocation-Id": error.invocation_id}
    await exchange.answer(fault.said(Dialect.DOCKER).status, {"message": error.message}, headers)


async def _told(peer: EnginePeer, error: CodedError) -> bool:
    """Answer what is no request, and let the connection go."""
    if peer.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
        body = wire.dumps({"message": error.message})
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        await peer.send(h11.Response(status_code=400, headers=headers, reason=b"Bad Request"))
        await peer.send(h11.Data(data=body))
        await peer.send(h11.EndOfMessage())
    return False
