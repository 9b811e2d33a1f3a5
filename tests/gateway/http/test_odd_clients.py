"""Clients that are slow, huge, half-closed or do not read: each is bounded, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.http import server, streaming
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
FOLLOW = "GET /v1/invocations/{id}/logs?follow=true&offset={offset} HTTP/1.1\r\nhost: localhost\r\n\r\n"


@asynccontextmanager
async def connected(gateway: RunningGateway, text: str = "", *, reads_slowly: bool = False) -> AsyncIterator[Streams]:
    """A raw connection on which ``text`` was sent."""
    raw = socket.socket()
    if reads_slowly:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", gateway.app.http_port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=4096 if reads_slowly else 2**16)
    try:
        writer.write(text.encode("latin-1"))
        yield reader, writer
    finally:
        writer.transport.abort()


async def rest(reader: asyncio.StreamReader) -> str:
    """Everything up to the server's end of the connection."""
    return (await asyncio.wait_for(reader.read(-1), DEADLINE_S)).decode("latin-1")


def post(body: str, length: int | None = None) -> str:
    size = len(body) if length is None else length
    about = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}"
    return f"POST /v1/functions/echo/invocations HTTP/1.1\r\n{about}\r\n\r\n{body}"


async def test_a_connection_too_many_is_refused_until_another_closes(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"connections_max": 1})) as gateway:
        async with connected(
            gateway, "GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\r\n"
        ) as (reader, _):
            assert b"200" in await reader.readline()
            async with connected(
                gateway, "GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\r\n"
            ) as (other, _):
                answer = await rest(other)
            assert answer.startswith("HTTP/1.1 503") and "retry-after: 1" in answer
            assert json.loads(answer.partition("\r\n\r\n")[2])["code"] == "capacity_exceeded"
        await until(lambda: gateway.app.connections["http"].open == 0)
        assert (await gateway.http.get("/healthz")).status_code == 200


@pytest.mark.slow
async def test_a_connection_that_outlasts_the_grace_is_cut_without_a_word_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(GatewayBench(tmp_path, server={"drain_grace": "50ms"})) as gateway,
        connected(gateway, post("{", length=10)) as (reader, _),
    ):
        await until(lambda: gateway.app.connections["http"].open == 1)
        gateway.app.stop()
        await gateway.serving
        await rest(reader)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_body_that_does_not_come_is_answered_in_time(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"body_timeout": "50ms"})) as gateway:
        async with connected(gateway, post('{"n"', length=100)) as (reader, _):
            answer = await rest(reader)
        assert answer.startswith("HTTP/1.1 408") and '"too_slow"' in answer
        assert gateway.app.invocations.living == ()


async def test_headers_that_do_not_come_or_do_not_end_close_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.1)
    async with serving(GatewayBench(tmp_path)) as gateway:
        async with connected(gateway, "GET /healthz HT") as (reader, _):
            await rest(reader)
        async with connected(gateway, "GET /healthz HTTP/1.1\r\nx: " + "a" * 200_000) as (reader, _):
            assert "HTTP/1.1 4" in await rest(reader)
        for nonsense in (
            "\x00\xff" * 100,
            "GET  /healthz HTTP/9.9\r\n\r\n",
            "\x16\x03\x01\x02\x00",
            post("", length=-1),
        ):
            async with connected(gateway, nonsense) as (reader, _):
                assert "200 " not in (await rest(reader))[:20]
        assert (await gateway.http.get("/healthz")).status_code == 200


async def test_a_client_that_closes_its_half_is_gone_and_its_work_with_it(gateway: RunningGateway) -> None:
    async with connected(gateway, post('{"held": true}')) as (_, writer):
        await until(lambda: len(gateway.runtime.running) == 1)
        writer.write_eof()
        await until(lambda: gateway.app.invocations.living == ())
    records = (await gateway.http.get("/v1/invocations")).json()["invocations"]
    assert [each["state"] for each in records] == ["cancelled"]


async def long_log(gateway: RunningGateway) -> str:
    """An invocation that runs on after it has written more than the sockets between us can hold."""
    answer = await gateway.invoke({"held": True, "log": "x" * 16_000_000}, function="loud", mode="async")
    id = str(answer.json()["id"])
    await gateway.executing(id)
    return id


LOUD = {"loud": function("loud", log_limit_bytes=2**30)}


@pytest.mark.slow
async def test_a_follower_that_does_not_read_is_dropped_with_a_record_that_says_so(tmp_path: Path) -> None:
    logs = {"stall": "1s"}
    async with serving(GatewayBench(tmp_path, functions=LOUD, server={"logs": logs, "body_limit": "32Mi"})) as gateway:
        id = await long_log(gateway)
        async with connected(gateway, FOLLOW.format(id=id, offset=0), reads_slowly=True) as (reader, _):
            await until(lambda: gateway.app.logs.followers == 1)
            other = await gateway.invoke({"n": 1})
            assert other.status_code == 200, "it blocks nobody"
            began_s = asyncio.get_running_loop().time()
            await until(lambda: asyncio.get_running_loop().time() > began_s + 1.2)
            *_, last = [line for line in (await rest_of_chunks(reader)).splitlines() if line.startswith('{"stream"')]
        dropped = json.loads(last)
        assert dropped["stream"] == "dropped" and "resume at next_offset" in dropped["data"]
        assert gateway.app.logs.followers == 0 and gateway.app.logs.followers_dropped == 1
        page = (await gateway.http.get(f"/v1/invocations/{id}/logs", params={"offset": dropped["next_offset"]})).text
        assert json.loads(page.splitlines()[0])["offset"] == dropped["next_offset"]


async def rest_of_chunks(reader: asyncio.StreamReader) -> str:
    """A chunked answer up to its last chunk."""
    text = b""
    async with asyncio.timeout(DEADLINE_S):
        while not text.endswith(b"\r\n0\r\n\r\n"):
            text += await reader.read(2**20)
    return text.decode("latin-1")


@pytest.mark.slow
async def test_a_follower_that_never_reads_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "GIVE_UP_STALLS", 1)
    logs = {"stall": "300ms"}
    async with serving(GatewayBench(tmp_path, functions=LOUD, server={"logs": logs, "body_limit": "32Mi"})) as gateway:
        id = await long_log(gateway)
        async with connected(gateway, FOLLOW.format(id=id, offset=0), reads_slowly=True):
            await until(lambda: gateway.app.logs.followers == 1)
            await until(lambda: gateway.app.logs.followers == 0)
            await until(lambda: gateway.app.connections["http"].open <= 1)
        assert gateway.app.logs.followers_dropped == 1
