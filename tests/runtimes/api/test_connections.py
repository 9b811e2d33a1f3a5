"""Connections of api functions: bounded, used again, given back whatever happens, through a proxy where one is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from runtimes import api
from runtimes.api import OriginConnections

DEADLINE_S = 60.0
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"


class CountingServer:
    """Answers once it is let to, and counts its connections and what was asked."""

    def __init__(self) -> None:
        self.open = self.made = 0
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.made += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.asked.append(head.split(b" ", 2)[1].decode())
                await self.may_answer.wait()
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def counting() -> AsyncIterator[CountingServer]:
    made = CountingServer()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield made


@asynccontextmanager
async def client_with(bound: int) -> AsyncIterator[httpx.AsyncClient]:
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(transport=OriginConnections(bound), timeout=None) as made:
        yield made


async def until(server: CountingServer, asked: int) -> None:
    while len(server.asked) < asked:  # noqa: ASYNC110  # the server has no other word for it
        await asyncio.sleep(0.002)


async def test_calls_at_once_have_a_connection_each_up_to_the_bound_and_use_it_again() -> None:
    async with counting() as server, client_with(5) as client:
        calls = [asyncio.create_task(client.get(server.url)) for _ in range(12)]
        await until(server, 5)
        assert server.open == 5
        server.may_answer.set()
        assert {(await call).text for call in calls} == {"ok"}
        await asyncio.gather(*(client.get(server.url) for _ in range(5)))
        assert (server.made, len(server.asked)) == (5, 17)


async def test_what_is_given_up_gives_its_place_back() -> None:
    async with counting() as server, client_with(1) as client:
        for number in range(1, 4):
            call = asyncio.create_task(client.get(server.url))
            await until(server, number)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        server.may_answer.set()
        with pytest.raises(httpx.ConnectError):
            await client.get("http://127.0.0.1:1")
        assert (await client.get(server.url)).text == "ok"


async def test_what_is_free_for_too_long_or_too_many_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counting() as one, counting() as other, client_with(3) as client:
        for server in (one, other):
            server.may_answer.set()
        await asyncio.gather(*(client.get(one.url) for _ in range(3)))
        await asyncio.gather(*(client.get(other.url) for _ in range(2)))
        while one.open + other.open > 3:  # noqa: ASYNC110  # a close takes its way to the server
            await asyncio.sleep(0.002)
        monkeypatch.setattr(api, "IDLE_S", -1.0)
        await client.get(other.url)
        while one.open + other.open:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.002)


async def test_a_proxy_of_the_environment_is_used_and_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counting() as proxy, counting() as near:
        for server in (proxy, near):
            server.may_answer.set()
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with client_with(3) as client:
            assert (await client.get("http://rewards.example/x")).text == "ok"
            await client.get(near.url)
        assert (proxy.asked, near.asked) == (["http://rewards.example/x"], ["/"])
