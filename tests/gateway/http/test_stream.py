"""The stream of calls: what holds of a call over HTTP holds over one WebSocket, and no peer harms another."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.invocations.invocations import Invocations
from tangram.frames import HEADER, split
from tangram.stream import (
    STREAM,
    StreamAnswer,
    StreamCall,
    StreamCancel,
    StreamHello,
    StreamLog,
    StreamMessage,
    StreamWait,
)
from tangram.types import CallOptions
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until

EXAMPLE = Path(__file__).parents[3] / "examples" / "stream.py"
HELD = b'{"held": true}'


class StreamPeer:
    """A caller who sends frames, and keeps what comes."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        #: How many frames each message had.
        self.messages: list[int] = []
        self.heard: list[StreamMessage] = []

    async def send(self, *messages: StreamMessage) -> None:
        await self.socket.send(b"".join(map(STREAM.encode, messages)))

    async def hear(self, count: int = 1) -> list[Any]:
        """Return so many frames."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.heard) < count:
                data = await self.socket.recv()
                assert isinstance(data, bytes)
                came = [STREAM.decode(kind, body) for kind, body in split(data)]
                self.messages.append(len(came))
                self.heard += came
        heard, self.heard = self.heard[:count], self.heard[count:]
        return heard

    async def call(self, function: str, input: Mapping[str, object], **options: object) -> tuple[int, dict[str, Any]]:
        """Status and body of one call."""
        await self.send(StreamCall(1, function, json.dumps(input).encode(), CallOptions(**options)))
        (answer,) = await self.hear()
        return answer.status, json.loads(answer.body)

    async def closed(self) -> tuple[int, str]:
        """Return code and reason with which the gateway hangs up."""
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ConnectionClosed) as caught:
                while True:
                    await self.socket.recv()
        assert caught.value.rcvd is not None, caught.value
        return caught.value.rcvd.code, caught.value.rcvd.reason


@asynccontextmanager
async def stream_of(gateway: RunningGateway, **headers: str) -> AsyncIterator[StreamPeer]:
    address = f"ws://127.0.0.1:{gateway.app.http_port}/v1/stream"
    async with connect(address, additional_headers=headers, max_size=None, proxy=None) as socket:
        peer = StreamPeer(socket)
        (hello,) = await peer.hear()
        assert hello == StreamHello(
            gateway.app.config.server.stream_message_bytes, gateway.app.config.server.stream_calls_max
        )
        yield peer


@pytest.fixture
async def peer(gateway: RunningGateway) -> AsyncIterator[StreamPeer]:
    async with stream_of(gateway) as peer:
        yield peer


async def http(gateway: RunningGateway, function: str, input: Mapping[str, object], **options: str) -> httpx.Response:
    names = {
        "task": "X-Task",
        "trajectory": "X-Trajectory-Id",
        "expect": "X-Trajectory-Expect",
        "key": "Idempotency-Key",
    }
    headers = {names.get(name, ""): value for name, value in options.items() if name in names}
    headers |= {"X-Timeout": options["timeout"]} if "timeout" in options else {}
    params = {name: options[name] for name in ("mode", "wait") if name in options}
    return await gateway.invoke(input, function=function, headers=headers, **params)


#: What differs between two calls however alike they are.
TIMES = ("accepted_at", "started_at", "ended_at", "queue_ms", "overhead_ms", "execution_ms", "act_ms")
OWN = ("id", "invocation_id", *TIMES)


def alike(body: Any) -> Any:
    """The body without what is of one call only."""
    if isinstance(body, dict):
        return {name: alike(value) for name, value in body.items() if name not in OWN and value != {"stream"}}
    return [alike(each) for each in body] if isinstance(body, list) else body


@pytest.mark.promise("A call over the stream is answered as over HTTP: status, record and typed problem.")
async def test_a_call_is_answered_as_over_http(gateway: RunningGateway, peer: StreamPeer) -> None:
    for function, input, options in list[tuple[str, dict[str, object], dict[str, str]]](
        [
            ("echo", {"a": [1, "é"]}, {}),
            ("echo", {"reason": "handler_error"}, {"task": "t"}),
            ("echo", {"reason": "upstream"}, {}),
            ("echo", {"reason": "timeout"}, {"timeout": "2s"}),
            ("strict", {"m": 1}, {}),
            ("nobody", {}, {}),
            ("echo", {}, {"trajectory": "t-1", "expect": "living"}),
            ("echo", {}, {"timeout": "soon"}),
            ("echo", {}, {"mode": "async", "wait": "30s"}),
        ]
    ):
        over_http = await http(gateway, function, input, **options)
        status, body = await peer.call(function, input, **options)
        assert (status, alike(body)) == (over_http.status_code, alike(over_http.json())) or (
            status == over_http.status_code == 422 and body["code"] == over_http.json()["code"]
        ), (function, input)


async def test_a_known_key_latches_on_and_says_so(peer: StreamPeer) -> None:
    calls = [StreamCall(number, "echo", b'{"a": 1}', CallOptions(key="k")) for number in (1, 2)]
    await peer.send(*calls)
    first, second = await peer.hear(2)
    assert {first.replayed, second.replayed} == {False, True}
    assert json.loads(first.body)["id"] == json.loads(second.body)["id"]
    await peer.send(StreamCall(3, "echo", b'{"a": 2}', CallOptions(key="k")))
    (answer,) = await peer.hear()
    assert (answer.status, json.loads(answer.body)["code"]) == (422, "idempotency_key_reused")


async def test_a_wait_that_is_over_tells_how_it_stands_and_its_work_goes_on(
    gateway: RunningGateway, peer: StreamPeer
) -> None:
    status, record = await peer.call("echo", {"held": True}, wait="10ms")
    assert (status, record["state"]) == (202, "running")
    await peer.send(StreamWait(5, record["id"], "30s"), StreamWait(6, record["id"]), StreamWait(7, "nobody"))
    standing, unknown = sorted(await peer.hear(2), key=lambda answer: int(answer.id))
    assert (standing.id, standing.status, unknown.id, unknown.status) == (6, 202, 7, 404)
    gateway.runtime.finish(record["id"])
    (end,) = await peer.hear()
    assert (end.id, json.loads(end.body)["state"]) == (5, "succeeded")


async def test_log_lines_come_while_it_runs(gateway: RunningGateway, peer: StreamPeer) -> None:
    await peer.send(StreamCall(1, "echo", b'{"log": "hello", "held": true}', CallOptions(mode="stream")))
    accepted, line = await peer.hear(2)
    assert isinstance(accepted, StreamLog) and isinstance(line, StreamLog)
    id = json.loads(accepted.lines)["invocation"]["id"]
    assert json.loads(line.lines)["data"] == "hello"
    gateway.runtime.finish(id)
    (answer,) = await peer.hear()
    assert isinstance(answer, StreamAnswer) and json.loads(answer.body)["state"] == "succeeded"


@pytest.mark.promise("Calls of a stream that come together are accepted with one commit, and answered in one message.")
async def test_calls_that_come_together_share_a_commit_and_answers_a_message(
    gateway: RunningGateway, peer: StreamPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, invoke_all = list[int](), Invocations.invoke_all

    async def counted(self: Invocations, requests: Any) -> Any:
        batches.append(len(requests))
        return await invoke_all(self, requests)

    monkeypatch.setattr(Invocations, "invoke_all", counted)
    await peer.send(*(StreamCall(number, "echo", HELD, CallOptions(mode="async")) for number in range(50)))
    answers = await peer.hear(50)
    assert sorted(answer.id for answer in answers) == list(range(50))
    assert (batches, peer.messages[1:]) == ([50], [50])


@pytest.mark.promise("A call that waits on a stream has no task of its own in the gateway.")
async def test_a_waiting_call_has_no_task(gateway: RunningGateway, peer: StreamPeer) -> None:
    await peer.send(StreamCall(0, "echo", HELD, CallOptions(mode="async")))
    (held,) = await peer.hear()
    before = len(asyncio.all_tasks())
    await peer.send(*(StreamCall(number, "echo", HELD) for number in range(1, 201)))
    await peer.send(*(StreamWait(number, json.loads(held.body)["id"], "300s") for number in range(201, 401)))
    await until(lambda: len(gateway.app.invocations.living) == 201)
    await peer.send(StreamWait(500, "00000000000-000000000000"))
    await peer.hear()  # after those, as it came after them
    cores = os.cpu_count() or 1
    assert len(asyncio.all_tasks()) - before < 4 * cores + 20


@pytest.mark.promise("A stream that dies takes its synchronous calls with it; durable ones go on and are found by key.")
async def test_what_a_dead_connection_leaves_behind(gateway: RunningGateway) -> None:
    async with stream_of(gateway) as peer:
        await peer.send(
            StreamCall(1, "echo", HELD),
            StreamCall(2, "echo", HELD, CallOptions(key="k")),
            StreamCall(3, "echo", HELD, CallOptions(on_disconnect="continue")),
            StreamCall(4, "echo", HELD, CallOptions(mode="stream")),
        )
        await until(lambda: len(gateway.app.invocations.living) == 4)
        first, keyed, goes_on, streamed = gateway.app.invocations.living
        peer.socket.transport.abort()
        await until(lambda: first.record.terminal and streamed.record.terminal)
    assert (str(first.record.reason), first.record.message) == ("cancelled", "its caller went away")
    assert not keyed.record.terminal and not goes_on.record.terminal
    async with stream_of(gateway) as peer:
        await peer.send(StreamCall(1, "echo", HELD, CallOptions(key="k")))
        await gateway.executing(keyed.record.id)
        gateway.runtime.finish(keyed.record.id)
        (answer,) = await peer.hear()
        assert answer.replayed and json.loads(answer.body)["id"] == keyed.record.id


async def test_a_cancel_is_told_by_the_answer_and_who_leaves_hears_nothing(
    gateway: RunningGateway, peer: StreamPeer
) -> None:
    await peer.send(
        StreamCall(1, "echo", HELD), StreamCancel(1), StreamCall(2, "echo", HELD), StreamCancel(2, leave=True)
    )
    (answer,) = await peer.hear()
    assert (answer.id, answer.status, json.loads(answer.body)["code"]) == (1, 409, "cancelled")
    await peer.send(StreamCall(3, "echo", HELD), StreamCall(4, "echo", HELD, CallOptions(key="k")))
    await until(lambda: len(gateway.app.invocations.living) == 2)
    _, keyed = gateway.app.invocations.living
    await peer.send(StreamCancel(3, leave=True), StreamCancel(4, leave=True), StreamCancel(77), StreamCall(5, "echo"))
    (answer,) = await peer.hear()
    assert answer.id == 5
    await until(lambda: gateway.app.invocations.living == (keyed,))
    await peer.send(StreamCall(4, "echo", HELD, CallOptions(key="k")), StreamCancel(4))
    (answer,) = await peer.hear()
    assert (answer.id, json.loads(answer.body)["code"]) == (4, "cancelled")


async def test_a_call_that_is_refused_leaves_the_others_alone(gateway: RunningGateway, peer: StreamPeer) -> None:
    def bad(*fields: object) -> bytes:
        body = msgspec.msgpack.encode(fields)
        return HEADER.pack(len(body), 2) + body

    for frame, path, told in [
        (bad(1, "echo", b"{}", {"taks": "t"}), "options", "no option is called 'taks'; did you mean 'task'?"),
        (bad(1, "echo", b"{}", {"step": "3"}), "options.step", "got `str`"),
        (bad(1, "echo", 5), "input", "got `int`"),
        (bad(1), "", "at least length 2"),
        (bad(1, "echo", b"[]"), "$", "must be a JSON object"),
        (bad(1, "echo", b"{"), "$", "is not JSON"),
        (bad(1, "e" * 200, b"{}"), None, "no function"),
        (bad(1, "echo", b"{}", {"callback_url": "http://elsewhere/"}), None, "callbacks"),
    ]:
        good = STREAM.encode(StreamCall(2, "echo"))
        await peer.socket.send(frame + good)
        refused, fine = sorted(await peer.hear(2), key=lambda answer: int(answer.id))
        problem = json.loads(refused.body)
        assert (refused.id, refused.status, fine.status) == (1, problem["status"], 200)
        assert told in problem["detail"] and (path is None or problem["errors"]["path"] == path), problem


async def test_what_is_no_frame_closes_its_stream_alone(gateway: RunningGateway, peer: StreamPeer) -> None:
    held = STREAM.encode(StreamCall(1, "echo", HELD))
    for data, told in list[tuple[str | bytes, str]](
        [
            ("text", "a message of text"),
            (b"\0", "half a frame"),
            (HEADER.pack(100, 2) + b"x", "half a frame"),
            (HEADER.pack(2**32 - 1, 2), "half a frame"),
            (HEADER.pack(1, 99) + b"\x90", "unknown kind 99"),
            (HEADER.pack(1, 2) + b"\xc1", "does not fit"),
            (HEADER.pack(1, 2) + b"\x90", "does not fit"),
            (STREAM.encode(StreamAnswer(1, 200, b"")), "the gateway's to send"),
            (held + held, "number 1 is in flight already"),
        ]
    ):
        async with stream_of(gateway) as hostile:
            await hostile.socket.send(data)
            code, reason = await hostile.closed()
            assert code == 1007 and told in reason, (data, reason)
    await until(lambda: gateway.app.invocations.living == ())
    assert (await peer.call("echo", {}))[0] == 200


async def test_bounds_of_a_stream(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, server={"stream_message": "64Ki", "stream_calls_max": 2, "body_limit": "32Ki"})
    async with serving(bench) as gateway, stream_of(gateway) as peer:
        await peer.send(*(StreamCall(number, "echo", HELD) for number in (1, 2, 3)))
        (answer,) = await peer.hear()
        problem = json.loads(answer.body)
        assert (answer.id, answer.status, problem["code"]) == (3, 429, "quota_exceeded")
        assert problem["retry_after_s"] > 0 and "server.stream_calls_max" in problem["detail"]
        await peer.send(StreamCancel(1), StreamCancel(2))
        await peer.hear(2)
        status, problem = await peer.call("echo", {"a": "x" * 33_000})
        assert (status, problem["code"]) == (413, "too_large")
        await peer.socket.send([bytes(1000)] * 100)  # in many pieces
        assert await peer.closed() == (1009, "a message of more than 65536 bytes")
        reader, writer = await raw_stream(gateway)
        writer.write(b"\x82\xff" + struct.pack(">Q", 2**62) + bytes(4) + bytes(80_000))  # one giant
        await reader.read(-1)
        writer.close()


async def raw_stream(gateway: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream whose bytes a test writes itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.http_port)
    key = b64encode(os.urandom(16))
    writer.write(
        b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Extensions: permessage-deflate\r\nSec-WebSocket-Key: %s\r\n\r\n"
        % key
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 101 " in head and b"deflate" not in head, "what unpacks to more than it is cannot be bounded"
    return reader, writer


async def test_half_a_message_is_cut_after_the_time_for_a_body(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, bounds={"body_timeout_s": 0.05})) as gateway, stream_of(gateway) as peer:
        reader, writer = await raw_stream(gateway)
        writer.write(b"\x82\xfe\x10\x00" + bytes(4) + bytes(100))
        assert b"a message that took longer" in await asyncio.wait_for(reader.read(-1), DEADLINE_S)
        writer.close()
        assert (await peer.call("echo", {}))[0] == 200


@pytest.mark.promise("A stream whose caller does not read is cut, and its calls with it; no other waits for it.")
async def test_who_does_not_read_is_cut(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, bounds={"stall_s": 0.05})) as gateway, stream_of(gateway) as other:
        _, writer = await raw_stream(gateway)
        input = json.dumps({"a": "x" * 1_000_000}).encode()
        held = STREAM.encode(StreamCall(0, "echo", json.dumps({"held": True, "a": "x" * 1000}).encode()))
        writer.transport.pause_reading()  # type: ignore[attr-defined]

        async def flood() -> None:
            writer.write(masked(held))
            for number in range(1, 100):
                writer.write(masked(STREAM.encode(StreamCall(number, "echo", input))))
                with suppress(ConnectionError):
                    await writer.drain()

        flooding = asyncio.create_task(flood())
        await until(lambda: bool(gateway.app.invocations.living))
        (call, *_) = gateway.app.invocations.living
        while not call.record.terminal:
            assert (await other.call("echo", {}))[0] == 200
        assert call.record.message == "its caller went away"
        flooding.cancel()
        writer.transport.abort()
        await until(lambda: gateway.app._listener.connections.open == 1)


def masked(data: bytes) -> bytes:
    """A message of at most 64 KiB, or of more, as a client sends it, with a mask that changes nothing."""
    size = struct.pack(">BH", 0xFE, len(data)) if len(data) < 2**16 else struct.pack(">BQ", 0xFF, len(data))
    return b"\x82" + size + bytes(4) + data


async def test_a_storm_of_cancels_and_of_empty_messages_keeps_nobody_waiting(gateway: RunningGateway) -> None:
    async with stream_of(gateway) as peer:
        reader, writer = await raw_stream(gateway)
        storm = b"".join(
            STREAM.encode(each)
            for number in range(2000)
            for each in (StreamCall(number, "echo", HELD), StreamCancel(number, leave=True), StreamCancel(number))
        )
        for data in (masked(storm), b"\x82\x80\0\0\0\0" * 20_000, b"\x89\x80\0\0\0\0" * 2_000):
            writer.write(data)
        reading = asyncio.create_task(reader.read(-1))
        for _ in range(20):
            assert (await peer.call("echo", {}))[0] == 200
        writer.write_eof()
        await asyncio.wait_for(reading, DEADLINE_S)
        await until(lambda: gateway.app.invocations.living == ())
        writer.close()


async def test_who_may_not_come_in_is_told_as_over_http(tmp_path: Path) -> None:
    async def refused(gateway: RunningGateway, path: str = "/v1/stream", **headers: str) -> tuple[int, str]:
        with pytest.raises(InvalidStatus) as caught:
            address = f"ws://127.0.0.1:{gateway.app.http_port}{path}"
            await connect(address, additional_headers=headers, proxy=None)
        return caught.value.response.status_code, json.loads(caught.value.response.body)["code"]

    async with serving(GatewayBench(tmp_path / "a", server={"auth": "token"})) as gateway:
        assert await refused(gateway) == (401, "unauthorized")
        assert await refused(gateway, Authorization="Bearer nobody-nobody-nobody") == (401, "unauthorized")
        tokens = gateway.app.tokens
        assert tokens is not None
        async with stream_of(gateway, Authorization=f"Bearer {tokens.invoke}") as peer:
            assert (await peer.call("echo", {}))[0] == 200
        assert await refused(gateway, "/v1/elsewhere", Authorization=f"Bearer {tokens.admin}") == (404, "not_found")
    async with serving(GatewayBench(tmp_path / "b")) as gateway:
        assert await refused(gateway, Origin="http://stranger.example") == (403, "forbidden")
        own = f"http://127.0.0.1:{gateway.app.http_port}"
        async with stream_of(gateway, Origin=own) as peer:
            assert (await peer.call("echo", {}))[0] == 200


async def test_a_gateway_that_stops_answers_what_it_took_and_then_hangs_up(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, server={"drain_grace": "5s"})
    async with serving(bench) as gateway, stream_of(gateway) as peer, stream_of(gateway) as idle:
        await peer.send(StreamCall(1, "echo", HELD))
        await until(lambda: bool(gateway.runtime.running))
        (running,) = gateway.app.invocations.living
        gateway.app.stop()
        await until(lambda: gateway.app.admission.draining)
        status, problem = await idle.call("echo", {})
        assert (status, problem["code"]) == (503, "draining")
        gateway.runtime.finish(running.record.id)
        (answer,) = await peer.hear()
        assert (answer.id, answer.status) == (1, 200)
        assert [await each.closed() for each in (peer, idle)] == [(1001, "the gateway shuts down")] * 2


async def test_the_example_calls(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"auth": "token"})) as gateway:
        assert gateway.app.tokens is not None
        environment = {
            **os.environ,
            "TANGRAM_SERVER": f"http://127.0.0.1:{gateway.app.http_port}",
            "TANGRAM_TOKEN": gateway.app.tokens.invoke,
        }
        caller = await asyncio.create_subprocess_exec(
            sys.executable, EXAMPLE, env=environment, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await asyncio.wait_for(caller.communicate(), DEADLINE_S)
    assert sorted(said.decode().splitlines()) == [f"{number} 200 {number}" for number in range(10)]
