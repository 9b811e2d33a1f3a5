"""Requests of odd form, names and headers, and clients that are slow, huge or gone: each is answered or bounded."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import orjson
import pytest

from gateway import tls
from gateway.http import server
from gateway.invocations.record import Record, _written
from gateway.serialization import DEPTH_MAX, VALUES_MAX
from gateway.tls import STRETCH_BYTES
from manager.action import Outcome, Settlement, State
from manager.errors import Reason
from runtimes.runtime import Execution
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving, until
from tests.gateway.grpc.peer import PING, Peer, ReadingMeter, random_frame

INVOKE = "/v1/functions/echo/invocations"
CLOSE = b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
JSON = (b"content-type", b"application/json")
LONG = 8 * 1024
#: Headers that an odd value makes 422, and values of theirs that are none the less good.
STRICT = {
    "X-Trajectory-Id": (),
    "X-Task": (),
    "X-Parent-Id": (),
    "X-Timeout": (),
    "X-Max-Age": (),
    "X-On-Disconnect": (),
    "X-Callback-Url": (),
    "Idempotency-Key": ("path",),
}
#: Headers that are passed on or dropped, never refused.
LENIENT = ("traceparent", "tracestate", "User-Agent", "Accept", "X-Unheard-Of")
FOLLOW = "GET /v1/invocations/{id}/logs?follow=true&offset={offset} HTTP/1.1\r\nhost: localhost\r\n\r\n"


def nested(levels: int) -> bytes:
    """An object of so many levels."""
    return b'{"a":' * levels + b"1" + b"}" * levels


async def post(gateway: RunningGateway, body: bytes, query: str = "") -> tuple[int, dict[str, object]]:
    answer = await gateway.http.post(f"{INVOKE}{query}", content=body)
    return answer.status_code, answer.json()


async def test_an_answer_before_the_end_of_its_request_says_that_the_connection_closes(
    gateway: RunningGateway,
) -> None:
    """Else the client sends its next request into the close."""
    for path in ("/no/such", "/v1/functions/nobody/invocations?no=1"):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.http_port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" in head.lower(), head
        writer.close()
        await writer.wait_closed()


async def test_what_is_no_json_object_is_refused_before_any_work(gateway: RunningGateway) -> None:
    for body in [
        b"   ",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"a":NaN}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":"\\ud800"}',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        b'{"a":"\xff"}',
        b"{}" * 2,
        nested(DEPTH_MAX + 1),
        nested(1020),
        nested(100_000),
        b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"a":[' + b"[]," * (VALUES_MAX // 3 + 1) + b"1]}",
    ]:
        for query in ("", "?mode=async", "?mode=stream"):
            status, problem = await post(gateway, body, query)
            assert (status, problem["code"], problem["errors"]) == (422, "invalid_input", {"path": "$"})
        assert gateway.runtime.leases == {}


async def test_separators_within_a_text_are_no_values(gateway: RunningGateway) -> None:
    text = '[,{"\\' * (VALUES_MAX // 4)
    status, invocation = await post(gateway, orjson.dumps({"a": text}))
    assert (status, invocation["result"]) == (200, {"a": text})


async def test_what_is_one_comes_back_as_it_was(gateway: RunningGateway) -> None:
    for body in [
        b"",
        b"{}",
        b'{"a":1,"a":2}',
        b'{"a":"\\u0000"}',
        nested(DEPTH_MAX),
        b'{"a":[' + b"[]," * 500 + b"[]]}",
    ]:
        status, record = await post(gateway, body)
        assert (status, record["result"]) == (200, json.loads(body or b"{}"))
        assert (await gateway.http.get(f"/v1/invocations/{record['id']}")).json()["input"] == record["result"]


class Deep(ScriptedRuntime):
    """Answers with more levels than anything writes."""

    def __init__(self) -> None:
        super().__init__(self._step)

    @staticmethod
    def _step(execution: Execution) -> ScriptStep:
        value: object = 1
        for _ in range(5000):
            value = [value]
        return ScriptStep(result=value, reason=Reason.UPSTREAM if execution.call.input else None)


async def test_a_result_that_cannot_be_written_is_an_end_with_a_reason(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path), runtime=Deep()) as gateway:
        status, record = await post(gateway, b"{}")
        assert (status, record["state"], record["reason"], record["result"]) == (200, "failed", "output_limit", None)
        assert "nested too deeply" in str(record["message"])
        status, problem = await post(gateway, b'{"a":1}')
        assert (status, problem["code"]) == (502, "upstream"), "another reason stays, without the result"
        assert gateway.app.invocations.living == ()
        stored = await gateway.app.store.get(int(str(record["id"])[:11], 16))
        assert stored is not None
        assert stored.reason is Reason.OUTPUT_LIMIT


@pytest.mark.slow
async def test_an_end_that_we_fail_to_record_is_an_end_all_the_same(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(record: Record, settlement: Settlement, now_s: float) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Record, "settle", settle)
    status, problem = await post(gateway, b"{}")
    assert (status, problem["code"]) == (500, "internal")
    assert gateway.app.invocations.living == () and gateway.app.admission.queued == 0


def test_a_detail_that_cannot_be_written_is_left_out() -> None:
    value: object = 1
    for _ in range(5000):
        value = [value]
    outcome = Outcome(state=State.FAILED, reason=Reason.MODEL_ERROR, message="why", detail={"deep": value})
    written, result = _written(outcome)
    assert (written, result) == (replace(outcome, detail={}), None)


async def raw(gateway: RunningGateway, data: bytes) -> bytes:
    """What comes back until the connection is closed or silent after a whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.http_port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(-1), DEADLINE_S)
    finally:
        writer.transport.abort()


POST = f"POST {INVOKE} HTTP/1.1\r\n".encode() + CLOSE


async def test_http_at_its_edges_is_answered(gateway: RunningGateway) -> None:
    for request_, status in [
        (
            b"GET /v1/functions HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            404,
        ),
        (POST + CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (POST + CHUNKED + b"\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET http://elsewhere/healthz HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
        (b"TRACE /healthz HTTP/1.1\r\n" + CLOSE + b"\r\n", 405),
        (b"HEAD /healthz HTTP/1.1\r\n" + CLOSE + b"\r\n", 200),
        (b"CONNECT x:1 HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
        (b"M\xe4TH /healthz HTTP/1.1\r\n" + CLOSE + b"\r\n", 400),
        (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
        (b"GET /v1/functions/\xff\xfe HTTP/1.1\r\n" + CLOSE + b"\r\n", 400),
        (b"GET /v1/invocations?" + b"p=1&" * 10_000 + b" HTTP/1.1\r\n" + CLOSE + b"\r\n", 422),
    ]:
        answer = await raw(gateway, request_)
        assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:200]
        assert (await gateway.http.get("/healthz")).status_code == 200
        assert gateway.app.invocations.living == ()


async def test_a_body_is_asked_for_and_requests_that_come_at_once_are_answered_in_turn(gateway: RunningGateway) -> None:
    asked = await raw(gateway, POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}")
    assert asked.startswith(b"HTTP/1.1 100") and b"HTTP/1.1 200" in asked
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await raw(gateway, get * 30 + get.replace(b"Host: localhost\r\n", CLOSE))).count(b"HTTP/1.1 200") == 31


HEAD = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", INVOKE.encode()), (b":authority", b"localhost"), JSON]


@asynccontextmanager
async def http2(gateway: RunningGateway) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.http_port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


async def test_calls_of_one_http2_connection_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAMS_MAX", 2)
    async with serving(GatewayBench(tmp_path)) as gateway:
        async with http2(gateway) as greedy:
            assert (await greedy.ask(HEAD, b"{}")).headers[":status"] == "200"
            streams = [greedy.send(HEAD, b'{"held": true}') for _ in range(3)]
            assert (await greedy.answer(streams[-1])).closed
        assert (await gateway.http.get("/healthz")).status_code == 200
        await until(lambda: gateway.app.invocations.living == ())


async def test_calls_that_are_made_and_dropped_without_end_close_their_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESETS_MAX", 20)
    async with serving(GatewayBench(tmp_path)) as gateway:
        async with http2(gateway) as patient:
            for _ in range(20):
                patient.drop(patient.send(HEAD, b'{"held": true}'))
            assert (await patient.ask(HEAD, b"{}")).headers[":status"] == "200"
        async with http2(gateway) as rapid:
            for _ in range(200):
                rapid.drop(rapid.send(HEAD, b'{"held": true}'))
            assert (await rapid.answer(rapid.send(HEAD, b"{}"))).closed
        assert (await gateway.invoke({})).status_code == 200
        await until(lambda: gateway.app.invocations.living == ())


async def test_a_burst_of_frames_is_read_in_turn_with_what_others_want(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = ReadingMeter(monkeypatch)
    async with http2(gateway) as burst:
        burst.send_raw(PING * 12_000)
        assert (await burst.ask(HEAD, b"{}")).headers[":status"] == "200"
    assert 0 < meter.most_bytes <= 2 * STRETCH_BYTES


async def test_a_call_that_is_refused_and_reset_at_once_closes_its_connection_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "STREAMS_MAX", 1)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 10 * DEADLINE_S)
    bench = GatewayBench(tmp_path, bounds={"stall_s": 10 * DEADLINE_S})
    async with serving(bench) as gateway, http2(gateway) as rapid:
        for _ in range(50):
            rapid.drop(rapid.send(HEAD, b'{"held": true}'))
        rapid.writer.write_eof()
        await asyncio.wait_for(rapid.reader.read(-1), DEADLINE_S)
    assert not [each for each in caplog.records if each.exc_info]


async def test_a_caller_that_goes_without_reading_its_answer_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 10 * DEADLINE_S)
    body = orjson.dumps({"a": "x" * 200_000})  # its answer is more than a peer takes before it says that it read any
    async with serving(GatewayBench(tmp_path, bounds={"stall_s": 10 * DEADLINE_S})) as gateway:
        async with http2(gateway) as silent:
            await silent.pour(silent.send(HEAD, None, end=False), body)
            await until(lambda: bool(gateway.runtime.leases) and gateway.app.invocations.living == ())
        await until(lambda: gateway.app.connections["http"].open == 0)


async def test_random_frames_close_their_own_connection_at_most(gateway: RunningGateway) -> None:
    chance = random.Random(6)
    for _ in range(60):
        async with http2(gateway) as opened:
            for _ in range(chance.randint(1, 6)):
                opened.send_raw(random_frame(chance))
            opened.writer.write_eof()
            await asyncio.wait_for(opened.reader.read(-1), DEADLINE_S)
    assert (await gateway.http.get("/healthz")).status_code == 200
    await until(lambda: gateway.app.connections["http"].open == 1)
    assert (gateway.app.invocations.living, gateway.app.held.bytes) == ((), 0)


#: Bytes of a header value, as somebody might send them.
ODD_VALUES = {
    "latin-1": b"\xe4\xf6\xfc",
    "utf-8": "名前".encode(),
    "no text": b"\xff\xfe\xc0\x80",
    "control": b"a\x01b",
    "escape": b"\x1b[31mred",
    "delete": b"\x7f",
    "space": b"a b",
    "path": b"../../etc/passwd",
    "quote": b"'; DROP TABLE invocations; --",
    "long": b"x" * LONG,
    "empty": b"",
}


@dataclass(frozen=True, slots=True)
class OddAnswer:
    status: int
    body: bytes

    @property
    def code(self) -> object:
        return json.loads(self.body)["code"] if self.body else None


async def ask(gateway: RunningGateway, head: bytes, body: bytes = b"") -> OddAnswer:
    """One request as it is written, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.http_port)
    writer.write(
        head
        + b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    answer = await asyncio.wait_for(reader.read(-1), DEADLINE_S)
    writer.close()
    first, _, rest = answer.partition(b"\r\n\r\n")
    return OddAnswer(int(first.split(b" ", 2)[1]), rest)


async def post_header(gateway: RunningGateway, header: str, value: bytes) -> OddAnswer:
    head = b"POST /v1/functions/echo/invocations HTTP/1.1\r\n" + header.encode() + b": " + value + b"\r\n"
    return await ask(gateway, head, b"{}")


async def test_an_odd_header_is_refused_before_any_work_or_means_nothing(gateway: RunningGateway) -> None:
    for odd in ODD_VALUES:
        for header, good in STRICT.items():
            answer = await post_header(gateway, header, ODD_VALUES[odd])
            if odd in good:
                assert answer.status == 200, (header, answer)
            elif answer.status != 400:  # what is no HTTP at all is refused by the server itself
                assert (answer.status, answer.code) == (422, "invalid_input"), (header, answer)
        executed = len(gateway.runtime.leases)
        for header in LENIENT:
            answer = await post_header(gateway, header, ODD_VALUES[odd])
            assert answer.status in (200, 400), (header, answer)
            executed += answer.status == 200
        assert len(gateway.runtime.leases) == executed
        assert gateway.app.invocations.living == ()
        assert (await gateway.http.get("/v1/trajectories")).json()["trajectories"] == []


async def test_an_odd_id_is_no_id_on_every_path(gateway: RunningGateway) -> None:
    for odd in ["%00", "%ff", "%F0%9F%92%A5", "..", "%2e%2e", "a%0ab", "a%20b", "x" * LONG, "-", "%25", "\u202e", "é"]:
        id = quote(odd, safe="%")
        body: dict[str, object] = {"function": "shell"}
        for method, path in (
            ("GET", f"/v1/invocations/{id}"),
            ("GET", f"/v1/invocations/{id}/logs"),
            ("POST", f"/v1/invocations/{id}/cancel"),
            ("POST", f"/v1/functions/{id}/invocations"),
            ("GET", f"/v1/functions/{id}"),
            ("GET", f"/v1/trajectories/{id}"),
            ("PUT", f"/v1/trajectories/{id}"),
            ("DELETE", f"/v1/trajectories/{id}"),
            ("GET", f"/v1/trajectories/{id}/files/x"),
            ("POST", f"/v1/dead-letters/{id}/redrive"),
            ("DELETE", f"/v1/dead-letters/{id}"),
        ):
            sent = json.dumps(body).encode() if method == "PUT" else b""
            answer = await ask(gateway, f"{method} {path} HTTP/1.1\r\n".encode(), sent)
            assert (answer.status, answer.code) in ((422, "invalid_input"), (404, "not_found")), (method, path, answer)


async def test_odd_fields_of_a_batch_have_a_verdict_of_their_own(gateway: RunningGateway) -> None:
    for odd in ["", "é", "a\nb", "\x00", "x" * LONG, "a b", "\ud83d\ude00", "\x7f"]:
        fields = ("task", "trajectory", "key", "timeout", "max_age", "function", odd or "unheard of")
        calls = [{"function": "echo", "input": {}, field: odd} for field in fields]
        answer = await gateway.http.post(
            "/v1/invocations:batch", content=json.dumps({"calls": [*calls, {"function": "echo"}]})
        )
        statuses = [each["status"] for each in answer.json()["results"]]
        # An empty task is the default one.
        assert statuses == [202 if field == "task" and not odd else 422 for field in fields] + [202]


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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


def request_text(body: str, length: int | None = None) -> str:
    size = len(body) if length is None else length
    about = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}"
    return f"POST /v1/functions/echo/invocations HTTP/1.1\r\n{about}\r\n\r\n{body}"


@pytest.mark.promise("Connections, bodies, frames and slow readers are bounded, and others go on.")
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


@pytest.mark.promise("Connections, bodies, frames and slow readers are bounded, and others go on.")
async def test_no_task_takes_all_connections_and_some_are_the_admins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "IDLE_S", 0.0)
    admin, bounds = "the-admin-has-this", {"auth": "token", "connections_max": 32}
    async with serving(GatewayBench(tmp_path, server={"token": admin, **bounds})) as gateway, AsyncExitStack() as stack:
        invoke = (tmp_path / "state" / "invoke.token").read_text().strip()

        async def asked(task: str, token: str = invoke, path: str = "/v1/queue") -> asyncio.StreamReader:
            head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\nx-task: {task}\r\n\r\n"
            return (await stack.enter_async_context(connected(gateway, head)))[0]

        counted = gateway.app.connections["http"]
        for task, held in (("thief", 24), ("other", 30)):  # three quarters, and all but a sixteenth
            for _ in range(held - counted.holding):
                await asked(task, path="/v1/watch")
            await until(partial(_holds, counted, held))
            refused = await asked(task)
            head, body = await refused.readuntil(b"\r\n\r\n"), await refused.readuntil(b"}")
            assert head.startswith(b"HTTP/1.1 503") and b"server.connections_max" in body
        assert b"200" in await (await asked("admin", admin)).readline()


def _holds(counted: tls.Connections, number: int) -> bool:
    return counted.holding == number


async def test_a_connection_that_is_idle_makes_room_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "IDLE_S", 0.0)
    async with serving(GatewayBench(tmp_path, server={"connections_max": 1})) as gateway:
        async with connected(gateway) as (idle, _):
            await until(lambda: gateway.app.connections["http"].open == 1)
            async with connected(gateway, "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n") as (reader, _):
                assert b"200" in await reader.readline()
            assert await rest(idle) == ""
        await until(lambda: gateway.app.connections["http"].open == 0)


@pytest.mark.slow
async def test_a_connection_that_outlasts_the_grace_is_cut_without_a_word_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(GatewayBench(tmp_path, server={"drain_grace": "50ms"})) as gateway,
        connected(gateway, request_text("{", length=10)) as (reader, _),
    ):
        await until(lambda: gateway.app.connections["http"].open == 1)
        gateway.app.stop()
        await gateway.serving
        await rest(reader)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_body_that_does_not_come_is_answered_in_time(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, bounds={"body_timeout_s": 0.05})) as gateway:
        async with connected(gateway, request_text('{"n"', length=100)) as (reader, _):
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
            request_text("", length=-1),
        ):
            async with connected(gateway, nonsense) as (reader, _):
                assert "200 " not in (await rest(reader))[:20]
        assert (await gateway.http.get("/healthz")).status_code == 200


async def test_a_client_that_closes_its_half_is_gone_and_its_work_with_it(gateway: RunningGateway) -> None:
    async with connected(gateway, request_text('{"held": true}')) as (_, writer):
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


@pytest.mark.promise("A follower that is too slow receives `dropped`, and where to go on.")
@pytest.mark.slow
async def test_a_follower_that_does_not_read_is_dropped_with_a_record_that_says_so(tmp_path: Path) -> None:
    bounds = {"stall_s": 1.0}
    async with serving(GatewayBench(tmp_path, functions=LOUD, server={"body_limit": "32Mi"}, bounds=bounds)) as gateway:
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
