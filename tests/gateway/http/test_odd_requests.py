"""Requests of odd form: bodies that are hardly JSON, and HTTP at its edges; each is answered, nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.http import app, server
from gateway.invocations.record import Record, _written
from gateway.serialization import DEPTH_MAX
from manager.action import Outcome, Settlement, State
from manager.errors import Reason
from runtimes.runtime import Execution
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until
from tests.gateway.grpc.peer import Peer, random_frame

INVOKE = "/v1/functions/echo/invocations"


def nested(levels: int) -> bytes:
    """An object of so many levels."""
    return b'{"a":' * levels + b"1" + b"}" * levels


async def post(gateway: RunningGateway, body: bytes, query: str = "") -> tuple[int, dict[str, object]]:
    answer = await gateway.http.post(f"{INVOKE}{query}", content=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    "body",
    [
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
    ],
)
async def test_what_is_no_json_object_is_refused_before_any_work(gateway: RunningGateway, body: bytes) -> None:
    for query in ("", "?mode=async", "?mode=stream"):
        status, problem = await post(gateway, body, query)
        assert (status, problem["code"], problem["errors"]) == (422, "invalid_input", {"path": "$"})
    assert gateway.runtime.leases == {}


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"a":1,"a":2}', b'{"a":"\\u0000"}', nested(DEPTH_MAX), b'{"a":[' + b"[]," * 500 + b"[]]}"]
)
async def test_what_is_one_comes_back_as_it_was(gateway: RunningGateway, body: bytes) -> None:
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


CLOSE = b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
POST = f"POST {INVOKE} HTTP/1.1\r\n".encode() + CLOSE


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /v1/functions HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
         b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n", 403),
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
    ],
)  # fmt: skip
async def test_http_at_its_edges_is_answered(gateway: RunningGateway, request_: bytes, status: int) -> None:
    answer = await raw(gateway, request_)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:200]
    assert (await gateway.http.get("/healthz")).status_code == 200
    assert gateway.app.invocations.living == ()


async def test_a_body_is_asked_for_and_requests_that_come_at_once_are_answered_in_turn(gateway: RunningGateway) -> None:
    asked = await raw(gateway, POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}")
    assert asked.startswith(b"HTTP/1.1 100") and b"HTTP/1.1 200" in asked
    get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await raw(gateway, get * 30 + get.replace(b"Host: localhost\r\n", CLOSE))).count(b"HTTP/1.1 200") == 31


JSON = (b"content-type", b"application/json")
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


async def test_status_lines_carry_a_reason_phrase(gateway: RunningGateway) -> None:
    for path, told in (("/healthz", b"200 OK"), ("/v1/nope", b"404 Not Found"), ("/v1/queue?x=1", b"422 Unproc")):
        answer = await raw(gateway, f"GET {path} HTTP/1.1\r\n".encode() + CLOSE + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 " + told)
    asked = await raw(gateway, POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n{}")
    assert asked.startswith(b"HTTP/1.1 100 Continue\r\n")
    assert (await raw(gateway, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 Bad Request\r\n")


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


@pytest.mark.slow
async def test_who_asks_over_http2_and_does_not_read_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "GIVE_UP_STALLS", 1)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.1)  # its connection is idle then, and closed as any other
    async with serving(GatewayBench(tmp_path, server={"logs": {"stall": "200ms"}})) as gateway:
        said = (await gateway.invoke({"x": "y" * 400_000})).json()["id"]
        async with http2(gateway) as lazy:
            head = [(b":method", b"GET"), *HEAD[1:2], (b":path", f"/v1/invocations/{said}".encode()), *HEAD[3:]]
            answer = await lazy.ask(head, None)
            assert answer.headers[":status"] == "200" and len(answer.data) < 400_000
            assert answer.closed
