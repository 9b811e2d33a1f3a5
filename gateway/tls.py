"""TLS contexts, the renewal of their files, and the count of open connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from gateway.config.schema import TlsSection
from gateway.metrics import Metrics
from manager.config import share_of
from manager.errors import CapacityExceeded, InvalidConfig

#: Seconds in which a peer must have shaken hands.
HANDSHAKE_S = 20.0


def server_context(tls: TlsSection, protocols: Sequence[str]) -> ssl.SSLContext:
    """Return the context of a server that offers these protocols (ALPN); raises InvalidConfig for odd files."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(protocols)
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"server.tls: {tls.cert} and {tls.key} cannot be used: {error}", component="tls") from None
    if why := _refused_now(context, tls.cert):
        raise InvalidConfig(f"server.tls: every client refuses {tls.cert}: {why}; renew it", component="tls")
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(
                f"server.tls.client_ca: {tls.client_ca} cannot be used: {error}", component="tls"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _refused_now(context: ssl.SSLContext, cert: Path) -> str:
    """Return why a client that trusts a certificate itself refuses it now, as it has expired; empty if it does not."""
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname = False
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
    return ""


#: Seconds between two looks at whether the files were renewed.
LOOK_S = 15.0


class RenewedContext:
    """The context of one server, which takes its files again when they were renewed, until `close`.

    Connections that begin from then on are shown the new certificate; the others go on.

    Of ``client_ca`` what is new is added; who is no longer in it is refused from the next start on.
    """

    def __init__(self, tls: TlsSection, protocols: Sequence[str], server: str) -> None:
        self._tls, self._server = tls, server
        self._taken = self._refused = self._identity()
        self.context = server_context(tls, protocols)
        self._log = structlog.get_logger("gateway.tls")
        self._looking = asyncio.get_running_loop().create_task(self._look_for_ever())

    def close(self) -> None:
        """Look no more."""
        self._looking.cancel()

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take the files if they are others than before, and can be used; else go on with those of before."""
        result = self._identity()
        if result == self._taken:
            return
        tls = self._tls
        try:
            server_context(tls, ())  # half of a renewal must not get into the context that serves
            self.context.load_cert_chain(tls.cert, tls.key)
            if tls.client_ca is not None:
                self.context.load_verify_locations(tls.client_ca)
        except (InvalidConfig, OSError) as error:
            if result != self._refused:
                self._refused = result
                self._log.error("renewed files are not taken", server=self._server, why=str(error))
            return
        self._taken = self._refused = result
        self._log.info("a renewed certificate is served", server=self._server, file=str(tls.cert))

    def _identity(self) -> tuple[tuple[int, ...] | None, ...]:
        files = (self._tls.cert, self._tls.key, self._tls.client_ca)
        return tuple(None if file is None else _identity_of(file) for file in files)


def _identity_of(file: Path) -> tuple[int, ...] | None:
    try:
        result = file.stat()
    except OSError:
        return None
    return result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns


#: Seconds that a refused connection may take to read its refusal.
LINGER_S = 1.0
RETRY_AFTER_S = 1.0
#: Refused connections that may linger at a time: they too take descriptors.
LEAVING_MAX = 64
#: Seconds after which one without a request makes room for a new one, and the part of all that is the admin's alone.
IDLE_S, ADMINS_PART = 2.0, 16
#: Most open calls of one connection (HTTP/2 and gRPC): a client opens a second connection for more.
STREAMS_MAX = 1000
#: Most calls of one HTTP/2 connection that may be reset in so many seconds; beyond it, it is closed.
RESETS_MAX, RESETS_S = 4096, 60.0


@dataclass(slots=True)
class Resets:
    """How many calls of one connection were reset lately: making and dropping them costs its peer nothing."""

    limit: int
    #: Seconds on the caller's clock at which the present minute ends.
    until_s: float = 0.0
    count: int = 0

    def exceeded(self, now_s: float, more: int = 1) -> bool:
        """Count ``more`` of them; whether they are too many for this minute."""
        if now_s >= self.until_s:
            self.until_s, self.count = now_s + RESETS_S, 0
        self.count += more
        return self.count > self.limit


#: Bytes that are read between two looks at the clock: thousands of small frames fit into one read of a socket.
STRETCH_BYTES = 512
#: Seconds for which one connection is read at a stretch, and for which one such piece is read if its frames are few.
STRETCH_S, PIECE_S = 0.005, 0.001


class Turns:
    """Divides what peers send, so that reading it keeps nobody waiting."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()

    async def pieces(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield the bytes piece by piece. Whoever reads for long lets others go first; one goes on in each turn.

        A piece of many frames may have begun many calls: these go first too.
        """
        now_s = time.monotonic()
        until_s = now_s + STRETCH_S
        for start in range(0, len(data), STRETCH_BYTES):
            began_s = now_s
            yield data[start : start + STRETCH_BYTES]
            now_s = time.monotonic()
            if now_s >= until_s or now_s - began_s >= PIECE_S:
                async with self._gate:
                    await asyncio.sleep(0)
                now_s = time.monotonic()
                until_s = now_s + STRETCH_S


@dataclass(slots=True, eq=False)
class OpenConnection:
    """One that has entered, and what it is held for."""

    #: Closes it at once.
    cut: Callable[[], None]
    #: When its last request ended, or it was opened.
    idle_since_s: float
    #: Requests under way, and the task of the first of them.
    requests: int = 0
    task: str = ""
    is_gone: bool = False


@dataclass(slots=True)
class Connections:
    """How many are open, how many may be, and how many were refused.

    Requests of one task hold at most its share, and the admin's some that no others get. One that nobody asks anything
    by makes room for a new one.
    """

    limit: int = 8192
    open: int = 0
    refused: int = 0
    #: Refused ones that are still there.
    leaving: int = 0
    #: Without a request, the longest so first; and how many requests hold, in all and by task.
    _idle: dict[OpenConnection, None] = field(default_factory=dict)
    _asking: Counter[str] = field(default_factory=Counter)
    _asking_all: int = 0
    turns: Turns = field(default_factory=Turns)

    def measured_by(self, metrics: Metrics, server: str) -> None:
        """Show how many are open at a server, and how many it refused."""
        metrics.watch(f"tangram_{server}_connections", f"Connections open at the server {server}", lambda: self.open)
        full = f"Connections refused by the server {server} because too many were open"
        metrics.watch(f"tangram_{server}_connections_refused", full, lambda: self.refused, counter=True)

    def enter(self, component: str) -> CapacityExceeded | None:
        """One more is open from now on, until `leave`; or why it may not be."""
        oldest = next(iter(self._idle), None) if self.open >= self.limit else None
        if oldest is not None and time.monotonic() - oldest.idle_since_s >= IDLE_S:
            self.leave(oldest)
            oldest.cut()
        if self.open < self.limit:
            self.open += 1
            return None
        self.refused += 1
        message = f"{self.limit} connections are open already (server.connections_max, and the machine's open files)"
        return CapacityExceeded(message, component=component, retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def refusing(self) -> Iterator[bool]:
        """Hold a refused connection within the block; yield whether it may stay until it has read its refusal."""
        self.leaving += 1
        try:
            yield self.leaving <= LEAVING_MAX
        finally:
            self.leaving -= 1

    def hold(self, cut: Callable[[], None]) -> OpenConnection:
        """Return one that has entered, and that ``cut`` closes when others need its room; `leave` names it then."""
        held = OpenConnection(cut, time.monotonic())
        self._idle[held] = None
        return held

    @property
    def holding(self) -> int:
        """How many are held by requests."""
        return self._asking_all

    @contextmanager
    def asked(self, held: OpenConnection, task: str, *, is_admin: bool) -> Iterator[None]:
        """Have a request hold a connection within the block; raises CapacityExceeded beyond the task's share."""
        if not held.requests:
            own, limit = self._asking[task], self.limit - (0 if is_admin else self.limit // ADMINS_PART)
            if self._asking_all >= limit or (own >= share_of(self.limit) and not is_admin):
                message = (
                    f"{self._asking_all} connections of {self.limit} are held by requests, {own} of task {task!r}, "
                    "as many as may be (server.connections_max)"
                )
                raise CapacityExceeded(message, component="connections", retry_after_s=RETRY_AFTER_S)
            self._idle.pop(held, None)
            held.task = task
            self._asking[task] += 1
            self._asking_all += 1
        held.requests += 1
        try:
            yield
        finally:
            held.requests -= 1
            if not held.requests:
                self._asking_all -= 1
                self._asking[held.task] -= 1
                if not self._asking[held.task]:
                    del self._asking[held.task]
                held.idle_since_s = time.monotonic()
                if not held.is_gone:
                    self._idle[held] = None

    def leave(self, held: OpenConnection | None = None) -> None:
        """One that had entered is closed; of one that `hold` returned it may be said twice."""
        if held is not None:
            if held.is_gone:
                return
            held.is_gone = True
            self._idle.pop(held, None)
        self.open -= 1


def address_of(listener: socket.socket) -> str:
    """Return where a socket listens, as people write it."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
