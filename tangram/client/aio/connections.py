"""The connections of one client: as many as are needed at once, up to a bound, each used again and again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.request import getproxies, proxy_bypass

import httpx

from tangram.client.address import trust_of
from tangram.client.aio.running import AsyncCallSlots

#: Seconds after which a connection that nobody uses is closed.
IDLE_S = 30.0


class AsyncConnectionPool(httpx.AsyncBaseTransport):
    """A pool that finds a free connection at once, however many there are.

    httpx's own pool looks at all of its connections for each request (at 500 of them, 5 to 8 times the processor
    time of a request). Here each connection is an httpx transport with one connection, and the free ones are a stack.
    Whoever finds none free and the bound reached waits, in order of arrival, without a bound in time.
    """

    def __init__(self, server: httpx.URL, connections: int, ca: str | None = None, cert: str | None = None) -> None:
        self._server = server
        self._slots = AsyncCallSlots(connections)
        self._trust = trust_of(server.scheme == "https", ca, cert)
        self._proxy = _proxy(server)
        #: Free connections and when each became free (on the monotonic clock), the latest last.
        self._free: deque[tuple[float, httpx.AsyncBaseTransport]] = deque()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over a free connection, or a new one; it is free again once the answer is closed."""
        await self._slots.acquire()
        connection = None
        try:
            connection = self._take()
            answer = await connection.handle_async_request(request)
        except BaseException:
            self._slots.release()
            if connection is not None:
                await _close(connection)
            raise
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        return httpx.Response(
            answer.status_code,
            headers=answer.headers,
            stream=AsyncAnswerStream(self, connection, answer.stream),
            extensions=answer.extensions,
        )

    async def aclose(self) -> None:
        """Close the free connections."""
        while self._free:
            await self._free.pop()[1].aclose()

    async def give_back(self, connection: httpx.AsyncBaseTransport) -> None:
        """Let the next request use it, and close those that were free for too long."""
        now_s = time.monotonic()
        self._free.append((now_s, connection))
        self._slots.release()
        while (eldest := self._eldest(now_s - IDLE_S)) is not None:
            await _close(eldest)

    def _take(self) -> httpx.AsyncBaseTransport:
        with suppress(IndexError):
            return self._free.pop()[1]
        return httpx.AsyncHTTPTransport(
            verify=self._trust,
            proxy=self._proxy,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S),
        )

    def _eldest(self, before_s: float) -> httpx.AsyncBaseTransport | None:
        """The connection that has been free for longest, if it became so before that instant; it is taken out."""
        with suppress(IndexError):
            free_s, connection = self._free.popleft()
            if free_s < before_s:
                return connection
            self._free.appendleft((free_s, connection))
        return None


class AsyncLink:
    """What a client has open in one process and event loop."""

    def __init__(self, http: httpx.AsyncClient, lasting: int) -> None:
        self.http = http
        #: For calls that last, so that those which do not always find a connection.
        self.lasting = AsyncCallSlots(lasting)


class AsyncAnswerStream(httpx.AsyncByteStream):
    """The body of an answer; closing it frees its connection."""

    def __init__(
        self, pool: AsyncConnectionPool, connection: httpx.AsyncBaseTransport, body: httpx.AsyncByteStream
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._body = body
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        """Close the body, once."""
        if not self._open:
            return
        self._open = False
        try:
            await self._body.aclose()
        finally:
            await self._pool.give_back(self._connection)


async def _close(connection: httpx.AsyncBaseTransport) -> None:
    # What failed may fail once more while it is closed; the first failure is the one to be told.
    with suppress(Exception):
        await connection.aclose()


def _proxy(server: httpx.URL) -> httpx.Proxy | None:
    """The proxy that the environment names for this server (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY)."""
    if proxy_bypass(server.netloc.decode("ascii")):
        return None
    proxies = getproxies()
    address = proxies.get(server.scheme) or proxies.get("all")
    if not address:
        return None
    return httpx.Proxy(address if "://" in address else f"http://{address}")
