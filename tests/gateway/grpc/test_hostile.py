"""Peers of the gRPC door that are odd, greedy, slow or gone: each is answered or dropped, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from gateway.grpc import server
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from gateway.tls import STRETCH_BYTES
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving, until
from tests.gateway.grpc.peer import INVOKE, PING, Peer, PeerAnswer, ReadingMeter, echo, framed, head, peer, random_frame
from tests.gateway.grpc.test_service import channel

OK, INVALID, DEADLINE, UNIMPLEMENTED, UNAVAILABLE = "0", "3", "4", "12", "14"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.fixture
async def stranger(gateway: RunningGateway) -> AsyncIterator[Peer]:
    async with peer(gateway) as opened:
        yield opened


async def lives(gateway: RunningGateway) -> None:
    """Others are served as if nothing had happened, and nothing is left of what had."""
    await until(lambda: gateway.app.connections["grpc"].open == 0)
    async with peer(gateway) as other:
        assert (await other.ask(head(), echo())).status == OK
    await until(lambda: gateway.app.connections["grpc"].open == 0)
    assert gateway.app.invocations.living == ()
    assert gateway.app.held.bytes == 0


async def test_odd_headers_are_answered_on_a_connection_that_goes_on(gateway: RunningGateway, stranger: Peer) -> None:
    cases: tuple[tuple[dict[str, str | None], str, str | None], ...] = (
        ({":path": "/nowhere"}, "200", UNIMPLEMENTED),
        ({":path": "/tangram.v1.Gateway/Nothing"}, "200", UNIMPLEMENTED),
        ({":path": ""}, "200", UNIMPLEMENTED),
        ({":path": "\xff\x00" * 50}, "200", UNIMPLEMENTED),
        ({":method": "GET"}, "405", None),
        ({":method": "\x01"}, "405", None),
        ({"content-type": "text/html"}, "415", "2"),
        ({"content-type": None}, "415", "2"),
        ({"te": None}, "400", "2"),
        ({"grpc-timeout": "soon"}, "200", "2"),
        ({"grpc-encoding": "gzip"}, "200", OK),
        ({"x-odd": "\xe4\xf6\x01"}, "200", OK),
        ({"": "nameless"}, "200", OK),
        ({"X-UPPER": "x"}, "200", OK),
        ({"authorization": "\xff" * 100}, "200", OK),
        ({f"x-{n}": "y" * 100 for n in range(100)}, "200", OK),
        ({"x-long": "y" * 8192}, "200", OK),
    )
    for changes, status, grpc in cases:
        answer = await stranger.ask(head(changes), echo())
        assert (answer.headers.get(":status"), answer.status) == (status, grpc), answer
        assert (await stranger.ask(head(), echo())).status == OK, changes
    stranger.send_raw(b"\x00\x00\x02\xfa\x00\x00\x00\x00\x00hi")  # a frame of a kind that nobody knows
    assert (await stranger.ask(head(), echo())).status == OK


async def test_headers_that_cannot_be_read_end_their_call_at_once_and_no_other(
    gateway: RunningGateway, stranger: Peer
) -> None:
    cases: tuple[dict[str, str | None], ...] = ({":path": None}, {":method": None}, {"x-bin": "x"}, {"x-bin": "\xff"})
    for changes in cases:
        assert (await stranger.ask(head(changes), echo())).reset is not None
        assert (await stranger.ask(head(), echo())).status == OK, changes


async def test_metadata_without_end_closes_its_connection(gateway: RunningGateway, stranger: Peer) -> None:
    answer = await stranger.ask(head({f"x-{n}": "y" * 1000 for n in range(200)}), None)
    assert answer.closed
    await lives(gateway)


async def test_a_message_that_is_none_is_the_senders_fault(gateway: RunningGateway, stranger: Peer) -> None:
    for body, grpc in (
        (framed(b"\xff" * 64), INVALID),
        (framed(bytes(range(256))), INVALID),
        (framed(b"\x0a\xff\xff\xff\xff\x0f"), INVALID),
        (framed(b"", flag=1), UNIMPLEMENTED),
        (framed(b"abc", flag=1), UNIMPLEMENTED),
        (framed(b"abc")[:-1], INVALID),
        (b"\x00\x00", INVALID),
        (b"", INVALID),
        (struct.pack(">BI", 0, 2**32 - 1), "8"),
    ):
        answer = await stranger.ask(head(), body)
        assert answer.status == grpc, answer
        assert answer.headers["tangram-code"] in ("invalid_input", "unsupported", "too_large")
        assert (await stranger.ask(head(), echo())).status == OK, body
    stranger.writer.transport.abort()
    await lives(gateway)


@pytest.mark.promise("Connections, bodies, frames and slow readers are bounded, and others go on.")
async def test_random_frames_close_their_own_connection_at_most(gateway: RunningGateway) -> None:
    for sent in (
        b"\x00\xff" * 400,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 16,
        PREFACE[:24] + b"\x00" * 9,
        PREFACE[:24] + b"\xff" * 9,
        PREFACE[:24] + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\xff\xff\xff\xff",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.grpc_port)
        writer.write(sent)
        writer.write_eof()
        await asyncio.wait_for(reader.read(-1), DEADLINE_S)
        writer.transport.abort()
    chance = random.Random(6)
    for _ in range(60):
        async with peer(gateway) as opened:
            for _ in range(chance.randint(1, 6)):
                opened.send_raw(random_frame(chance))
            opened.writer.write_eof()
            await asyncio.wait_for(opened.reader.read(-1), DEADLINE_S)
    await lives(gateway)


async def test_who_does_not_greet_is_cut(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GREETING_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.grpc_port)
    writer.write(PREFACE[:10])
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await asyncio.wait_for(reader.readexactly(2**20), DEADLINE_S)
    writer.transport.abort()
    await lives(gateway)


async def test_a_message_that_does_not_come_is_answered_in_time(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, bounds={"body_timeout_s": 0.05})) as gateway:
        async with peer(gateway) as slow:
            answer = await slow.answer(slow.send(head(), echo()[:-1], end=False))
        assert (answer.status, answer.headers["tangram-code"]) == (DEADLINE, "too_slow")
        await lives(gateway)


async def test_a_connection_too_many_is_told_so_until_another_closes(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"connections_max": 1})) as gateway:
        async with peer(gateway) as first:
            assert (await first.ask(head(), echo())).status == OK
            async with peer(gateway) as second:
                refused = await second.ask(head(), echo())
            assert (refused.status, refused.headers["tangram-code"]) == (UNAVAILABLE, "capacity_exceeded")
            assert refused.headers["retry-after-s"] == "1"
            assert (await first.ask(head(), echo())).status == OK
            assert gateway.app.connections["grpc"].refused == 1
        await lives(gateway)


@pytest.mark.slow
async def test_calls_of_one_connection_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAMS_MAX", 2)
    async with serving(GatewayBench(tmp_path)) as gateway:
        async with channel(gateway) as opened:
            stub = GatewayStub(opened)
            assert (await stub.Invoke(pb.InvokeRequest(function="echo", input_json=b"{}"))).state == "succeeded"
            held = pb.InvokeRequest(function="echo", input_json=b'{"held": true}')
            calls = [asyncio.create_task(stub.Invoke(held)) for _ in range(3)]
            await until(lambda: len(gateway.app.invocations.living) == 2)
            assert (await gateway.http.get("/healthz")).status_code == 200
            assert len(gateway.app.invocations.living) == 2, "a client that keeps to the bound waits"
            for ended in range(1, 4):
                await until(lambda: bool(gateway.runtime.running))
                gateway.runtime.finish(next(iter(gateway.runtime.running)))
                await until(lambda ended=ended: sum(call.done() for call in calls) == ended)  # type: ignore[misc]
        async with peer(gateway) as greedy:
            await greedy.ask(head(), echo())
            streams = [greedy.send(head(), None, end=False) for _ in range(3)]
            assert (await greedy.answer(streams[-1])).closed
        await lives(gateway)


async def begun(gateway: RunningGateway, opened: Peer, method: str = INVOKE) -> str:
    """A call whose invocation runs by now."""
    request = pb.InvokeRequest(function="echo", input_json=orjson.dumps({"hangs": True}))
    opened.send(head({":path": method}), framed(request.SerializeToString()))
    await until(lambda: bool(gateway.runtime.running))
    return next(iter(gateway.runtime.running))


async def test_calls_that_are_made_and_dropped_without_end_close_their_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESETS_MAX", 20)
    held = framed(pb.InvokeRequest(function="echo", input_json=b'{"held": true}').SerializeToString())
    async with serving(GatewayBench(tmp_path)) as gateway:
        async with peer(gateway) as patient:
            for _ in range(20):
                patient.drop(patient.send(head(), held))
            assert (await patient.ask(head(), echo())).status == "0"
        async with peer(gateway) as rapid:
            for _ in range(200):
                rapid.drop(rapid.send(head(), held))
            assert (await rapid.answer(rapid.send(head(), echo()))).closed
        async with peer(gateway) as other:
            assert (await other.ask(head(), echo())).status == "0"
        await until(lambda: gateway.app.invocations.living == ())


async def test_a_burst_of_frames_is_read_in_turn_with_what_others_want(
    gateway: RunningGateway, stranger: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await stranger.ask(head(), echo())).status == "0"
    meter = ReadingMeter(monkeypatch)
    stranger.send_raw(PING * 12_000)
    assert (await stranger.ask(head(), echo())).status == "0"
    assert 0 < meter.most_bytes <= 2 * STRETCH_BYTES


@pytest.mark.parametrize("method", [INVOKE, "/tangram.v1.Gateway/InvokeStream"])
async def test_a_caller_whose_connection_breaks_takes_its_invocation_with_it(
    gateway: RunningGateway, method: str
) -> None:
    async with peer(gateway) as opened:
        invocation_id = await begun(gateway, opened, method)
    await until(lambda: not gateway.runtime.running)
    record = (await gateway.http.get(f"/v1/invocations/{invocation_id}?wait=5s")).json()
    assert (record["state"], record["message"]) == ("cancelled", "its caller went away")
    await lives(gateway)
    assert gateway.app.logs.followers == 0


async def test_a_caller_whose_deadline_passes_takes_its_invocation_with_it(
    gateway: RunningGateway, stranger: Peer
) -> None:
    request = pb.InvokeRequest(function="echo", input_json=orjson.dumps({"hangs": True}))
    answer: PeerAnswer = await stranger.ask(head({"grpc-timeout": "100m"}), framed(request.SerializeToString()))
    assert answer.status == DEADLINE
    await until(lambda: gateway.app.invocations.living == ())


@pytest.mark.slow
async def test_who_asks_and_does_not_read_is_told_so_and_waited_for_no_longer(tmp_path: Path) -> None:
    loud = {"loud": function("loud", log_limit_bytes=2**24)}
    bench = GatewayBench(tmp_path, functions=loud, bounds={"stall_s": 0.2})
    async with serving(bench) as gateway:
        for dropped, method in enumerate(("Invoke", "InvokeStream", "TailLogs"), start=1):
            # More than the 64 KiB that a peer takes before it says that it has read any of it.
            given = {"log": "x" * 200_000, "held": method == "InvokeStream"}
            headers = head({":path": f"/tangram.v1.Gateway/{method}"})
            async with peer(gateway) as lazy:
                if method == "TailLogs":
                    said = (await gateway.invoke(given, function="loud")).json()["id"]
                    asked = framed(pb.TailLogsRequest(id=said).SerializeToString())
                    answer = await lazy.answer(lazy.send(headers, asked))
                else:
                    small = framed(pb.InvokeRequest(function="loud", input_json=b"{}").SerializeToString())
                    assert (await lazy.ask(head(), small)).status == OK
                    stream = lazy.send(headers, None, end=False)
                    request = pb.InvokeRequest(function="loud", input_json=orjson.dumps(given))
                    await lazy.pour(stream, framed(request.SerializeToString()))
                    answer = await lazy.answer(stream)
            assert (answer.status, answer.headers["tangram-code"]) == (DEADLINE, "too_slow"), method
            assert "resumed" in answer.headers["grpc-message"]
            assert (gateway.app.logs.followers, gateway.app.logs.followers_dropped) == (0, dropped)
            await until(lambda: gateway.app.invocations.living == ())


async def test_a_follower_that_vanishes_follows_no_more(gateway: RunningGateway) -> None:
    accepted = (await gateway.invoke({"held": True, "log": "x"}, mode="async")).json()["id"]
    async with peer(gateway) as opened:
        request = pb.TailLogsRequest(id=accepted, follow=True)
        opened.send(head({":path": "/tangram.v1.Gateway/TailLogs"}), framed(request.SerializeToString()))
        await until(lambda: gateway.app.logs.followers == 1)
    await until(lambda: gateway.app.logs.followers == 0)
    gateway.runtime.finish(accepted)
