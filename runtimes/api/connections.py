"""The connections of api functions: as many as are needed at once, up to a bound, each used again and again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.request import getproxies, proxy_bypass

import httpx

#: Seconds after which a connection that nobody uses is closed.
IDLE_S = 30.0


class OriginConnections(httpx.AsyncBaseTransport):
    """Finds a free connection to an origin at once, however many there are.

    httpx's own pool looks at all of its connections for each request: with 100 of them a call took six times the
    processor time. Here each connection is an httpx transport with one connection, and the free ones of an origin are
    a stack. Whoever finds none free and the bound reached waits, in order of arrival.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._slots = asyncio.Semaphore(bound)
        self._trust = httpx.create_ssl_context()
        #: Of each origin those that are free, and when each became so (on the monotonic clock), the latest last.
        self._free: dict[str, deque[tuple[float, httpx.AsyncHTTPTransport]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over a free connection, or a new one; it is free again once the answer is closed."""
        origin = f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"
        await self._slots.acquire()
        connection = None
        try:
            connection = self._take(origin, request.url)
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
            stream=_Body(self, origin, connection, answer.stream),
            extensions=answer.extensions,
        )

    async def aclose(self) -> None:
        """Close those that are free."""
        free, self._free = self._free, {}
        for stack in free.values():
            for _, connection in stack:
                await _close(connection)

    async def give_back(self, origin: str, connection: httpx.AsyncHTTPTransport) -> None:
        """Let the next call use it, and close those that were free for too long, or are too many."""
        now_s = time.monotonic()
        self._free.setdefault(origin, deque()).append((now_s, connection))
        self._slots.release()
        while (eldest := self._superfluous(now_s)) is not None:
            await _close(eldest)

    def _take(self, origin: str, url: httpx.URL) -> httpx.AsyncHTTPTransport:
        if stack := self._free.get(origin):
            return stack.pop()[1]
        return httpx.AsyncHTTPTransport(
            verify=self._trust,
            proxy=_proxy_of(url),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S),
        )

    def _superfluous(self, now_s: float) -> httpx.AsyncHTTPTransport | None:
        """Take out the one that has been free for longest, if that is too long or more are free than may be open."""
        free = [(stack[0][0], origin) for origin, stack in self._free.items() if stack]
        if not free:
            return None
        since_s, origin = min(free)
        if since_s >= now_s - IDLE_S and sum(map(len, self._free.values())) <= self._bound:
            return None
        stack = self._free[origin]
        connection = stack.popleft()[1]
        if not stack:
            del self._free[origin]
        return connection


class _Body(httpx.AsyncByteStream):
    """The body of an answer; closing it frees its connection."""

    def __init__(
        self, pool: OriginConnections, origin: str, connection: httpx.AsyncHTTPTransport, body: httpx.AsyncByteStream
    ) -> None:
        self._pool, self._origin, self._connection, self._body = pool, origin, connection, body
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
            await self._pool.give_back(self._origin, self._connection)


def _proxy_of(url: httpx.URL) -> httpx.Proxy | None:
    """Return the proxy that the environment names for an address, as httpx's own client would."""
    proxies = getproxies()
    found = proxies.get(url.scheme) or proxies.get("all")
    if found is None or proxy_bypass(url.host):
        return None
    return httpx.Proxy(found if "://" in found else f"http://{found}")


async def _close(connection: httpx.AsyncHTTPTransport) -> None:
    with suppress(httpx.HTTPError, OSError):
        await connection.aclose()
