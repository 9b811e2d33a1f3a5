"""The connection to ``GET /v1/watch``: events as they come, and again after a cut, from where it was cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import msgspec

from tangram.cli.top.watched import EventReader, StreamEvent
from tangram.client.aio.connections import AsyncConnectionPool
from tangram.client.answers import connection_lost, error_of
from tangram.client.credentials import Bearer
from tangram.errors import ForbiddenError, TangramError, UnauthorizedError, UnreadableAnswerError

#: Seconds before the next try after a cut; the last one stays. Nothing comes for `SILENT_S`: the stream is dead.
RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0)
SILENT_S = 20.0


async def events(server: str, token: str | None, last: Callable[[], str | None]) -> AsyncIterator[StreamEvent]:
    """Yield what one connection brings, from ``last`` on. Raises TangramError, also when it ends."""
    transport = AsyncConnectionPool(httpx.URL(server), 1)
    timeout = httpx.Timeout(SILENT_S)
    async with httpx.AsyncClient(base_url=server, auth=Bearer(token), timeout=timeout, transport=transport) as http:
        since = last()
        params = {"bars": "true"} | ({} if since is None else {"since": since})
        try:
            async with http.stream("GET", "/v1/watch", params=params) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                reader = EventReader()
                async for line in response.aiter_lines():
                    if (event := reader.feed(line)) is not None:
                        yield event
        except httpx.TransportError as error:
            raise connection_lost(server, error) from error
        except msgspec.DecodeError as error:
            raise UnreadableAnswerError(f"{server} sent what is no event of /v1/watch: {error}") from error


async def follow(
    server: str,
    token: str | None,
    take: Callable[[StreamEvent], None],
    lost: Callable[[str, float], None],
    last: Callable[[], str | None],
) -> None:
    """Hand on every event for ever, over cuts; ``lost`` is told why and the seconds until the next try.

    Raises UnauthorizedError and ForbiddenError: no further try would end otherwise.
    """
    tries = 0
    while True:
        try:
            async for event in events(server, token, last):
                tries = 0
                take(event)
            told = "the gateway ended the stream"
        except (UnauthorizedError, ForbiddenError):
            raise
        except TangramError as error:
            told = error.message
        wait_s = RETRY_S[min(tries, len(RETRY_S) - 1)]
        tries += 1
        lost(told, wait_s)
        await asyncio.sleep(wait_s)
