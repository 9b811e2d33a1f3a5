"""The client's stream of calls: opened when calls are many, done without where it is refused, and opened again."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tangram import AsyncClient, Client, ConnectionFailed, NotFoundError, Retries
from tangram.client import aio_stream
from tangram.client.aio_stream import AsyncCallStream, AsyncStreamConnection
from tangram.client.requests import Bearer
from tangram.client.sync_stream import CallStream
from tangram.stream import StreamHello, StreamWait
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until
from tests.listening import listening, piped


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, the stream opens in time."""
    monkeypatch.setattr(aio_stream, "OPENING_S", DEADLINE_S)


def stream_of(client: AsyncClient) -> AsyncCallStream:
    stream = client._link().stream
    assert stream is not None
    return stream


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"http://127.0.0.1:{port}", retries=Retries(outage_s=30.0)) as client:
        yield client


@pytest.mark.promise("Many calls of one client share one connection; nothing in its user's code says so.")
async def test_calls_that_are_in_flight_together_go_over_one_stream(gateway: RunningGateway) -> None:
    connections = gateway.app._listener.connections
    async with client_of(gateway.app.http_port) as client:
        assert (await client.invoke("echo", {"a": 1})).ok and not stream_of(client).carries()
        results = await client.map("echo", [{"a": index} for index in range(200)], concurrency=50)
        assert [each.result for each in results] == [{"a": index} for index in range(200)]
        assert stream_of(client).carries() and connections.open == 2
        held = await asyncio.gather(*(client.submit("echo", {"held": True}) for _ in range(20)))
        waits = [asyncio.create_task(client.wait(each.id)) for each in held]
        for each in held:
            gateway.runtime.finish(each.id)
        assert all(end.ok for end in await asyncio.gather(*waits)) and connections.open == 2
        errors = await asyncio.gather(*(client.invoke("nobody", {}) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in errors] == [NotFoundError] * 3
        replays = await asyncio.gather(*(client.invoke("echo", {"reason": "upstream"}, key="k") for _ in range(3)))
        assert sorted(each.replayed for each in replays) == [False, True, True]
        assert {each.reason for each in replays} == {"upstream"}
        large = await asyncio.gather(*(client.invoke("echo", {"a": "x" * 9_000_000}) for _ in range(2)))
        assert all(each.ok for each in large)
    await until(lambda: connections.open == 0)


class SendingSocket:
    """A socket of which nothing comes, and whose ``send`` takes until it is closed to let go."""

    close_code, close_reason = None, ""

    def __init__(self) -> None:
        self.sending, self.closed = asyncio.Event(), asyncio.Event()

    async def send(self, data: bytes) -> None:
        self.sending.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self.closed.wait()
            for _ in range(10):
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.closed.set()

    def __aiter__(self) -> SendingSocket:
        return self

    async def __anext__(self) -> bytes:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def test_a_closed_stream_leaves_no_task() -> None:
    """Else the end of the program's loop finds it at work, and prints what cannot be closed."""
    socket = SendingSocket()
    stream = AsyncStreamConnection("http://x", socket, StreamHello(message_max_bytes=1000, calls_max=10))
    call = asyncio.create_task(stream.call(StreamWait(id=0, invocation="i")))
    await socket.sending.wait()
    await stream.close()
    assert stream._writing.done() and stream.reading.done()
    with pytest.raises(ConnectionFailed):
        await call


@pytest.mark.parametrize("idle", [True, False])
async def test_a_call_that_meets_the_end_of_the_stream_goes_over_http(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client learns of the end a turn of the loop later; a call that waited on would never have an answer."""
    monkeypatch.setattr(aio_stream, "IDLE_S", 0.0)
    stream = AsyncStreamConnection("http://x", SendingSocket(), StreamHello(message_max_bytes=1000, calls_max=10))
    stream._look() if idle else stream._end()
    async with asyncio.timeout(DEADLINE_S):
        assert await stream.call(StreamWait(id=0, invocation="i")) is None
    await stream.close()


async def test_who_gives_up_leaves_the_call(gateway: RunningGateway) -> None:
    async with client_of(gateway.app.http_port) as client:
        calls = [asyncio.create_task(client.invoke("echo", {"held": True}, key=key)) for key in (None, None, "k")]
        await until(lambda: len(gateway.app.invocations.living) == 3)
        assert stream_of(client).carries()
        for call in calls:
            call.cancel()
        await until(lambda: len(gateway.app.invocations.living) == 1)
        (keyed,) = gateway.app.invocations.living
        again = asyncio.create_task(client.invoke("echo", {"held": True}, key="k"))
        gateway.runtime.finish(keyed.record.id)
        assert (await again).replayed


async def test_threads_share_the_stream_of_a_synchronous_client(gateway: RunningGateway) -> None:
    def run() -> None:
        with Client(f"http://127.0.0.1:{gateway.app.http_port}") as client:
            results = client.map("echo", [{"a": index} for index in range(60)], concurrency=12)
            assert [each.result for each in results] == [{"a": index} for index in range(60)]
            stream = client._link().stream
            assert stream is not None and stream._loop is not None
            with pytest.raises(NotFoundError):
                client.invoke("nobody", {})
        assert not any(thread.name == "tangram-stream" and thread.is_alive() for thread in threading.enumerate())

    await asyncio.to_thread(run)


async def test_who_calls_while_another_thread_closes_the_client_does_not_wait_for_ever() -> None:
    opened = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.set()
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    stream = CallStream(address, Bearer(None), ssl.create_default_context(), None)
    for _ in range(2):
        stream.enter()
    async with asyncio.timeout(DEADLINE_S):
        calls = [asyncio.create_task(asyncio.to_thread(stream.carry, StreamWait(0, "i"))) for _ in range(4)]
        await opened.wait()
        await asyncio.to_thread(stream.close)
        assert await asyncio.gather(*calls) == [None] * 4
    server.close()


@pytest.mark.promise("Where a proxy forbids the stream, calls go over HTTP.")
async def test_calls_go_over_http_where_the_stream_is_refused(gateway: RunningGateway) -> None:
    for refuse in (
        lambda writer: writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
        lambda writer: writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
        lambda writer: writer.close(),
    ):
        async with proxy_to(gateway.app.http_port, refuse) as port, client_of(port) as client:
            results = await client.map("echo", [{"a": index} for index in range(20)], concurrency=10)
            assert all(each.ok for each in results) and stream_of(client)._connection is None
            assert stream_of(client)._not_before_s > 0


async def test_calls_go_over_http_while_nothing_answers_for_the_stream(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_stream, "OPENING_S", 0.01)
    async with proxy_to(gateway.app.http_port, lambda writer: None) as port, client_of(port) as client:
        results = await client.map("echo", [{"a": index} for index in range(20)], concurrency=10)
        assert all(each.ok for each in results) and stream_of(client)._connection is None


@asynccontextmanager
async def proxy_to(port: int, refuse: Callable[[asyncio.StreamWriter], object]) -> AsyncIterator[int]:
    """A proxy before the gateway that does this to who asks for the stream."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readline()
        if b"/v1/stream" in head:
            refuse(writer)
            await reader.read()
            return
        there = await asyncio.open_connection("127.0.0.1", port)
        there[1].write(head)
        await piped((reader, writer), there)

    async with listening(carry) as proxy:
        yield proxy


@pytest.mark.promise("After a restart durable calls of a stream are answered, and none runs twice.")
async def test_durable_calls_are_answered_after_a_restart(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"drain_grace": "0s"})) as first:
        port = first.app.http_port
        client = AsyncClient(f"http://127.0.0.1:{port}", retries=Retries(outage_s=60.0))
        keyed = [asyncio.create_task(client.invoke("again", {"held": True}, key=f"k-{n}")) for n in range(10)]
        alone = asyncio.create_task(client.invoke("echo", {"held": True}))
        await until(lambda: len(first.app.invocations.living) == 11)
        assert stream_of(client).carries()
        ids = {each.record.id for each in first.app.invocations.living if each.record.function == "again"}
    async with client, serving(GatewayBench(tmp_path, server={"port": port})) as second:

        async def finish() -> None:
            while True:
                for id in list(second.runtime.running):
                    second.runtime.finish(id)
                await asyncio.sleep(0)

        finishing = asyncio.create_task(finish())
        ends = await asyncio.gather(*keyed)
        assert (await alone).ok, "it had not begun, so it was sent again"
        finishing.cancel()
        assert all(end.ok for end in ends) and {end.id for end in ends} == ids


async def test_an_idle_stream_is_closed_and_opened_again(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_stream, "IDLE_S", 0.05)
    async with client_of(gateway.app.http_port) as client:
        for _ in range(2):
            await client.map("echo", [{}] * 20, concurrency=10)
            assert stream_of(client).carries()
            await until(lambda: not stream_of(client).carries())
