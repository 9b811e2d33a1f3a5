"""Headers, ids, names and keys of odd characters: each is refused by its own problem, or it means nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving

LONG = 8 * 1024
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


async def post(gateway: RunningGateway, header: str, value: bytes) -> OddAnswer:
    head = b"POST /v1/functions/echo/invocations HTTP/1.1\r\n" + header.encode() + b": " + value + b"\r\n"
    return await ask(gateway, head, b"{}")


@pytest.mark.parametrize("odd", ODD_VALUES)
async def test_an_odd_header_is_refused_before_any_work_or_means_nothing(gateway: RunningGateway, odd: str) -> None:
    for header, good in STRICT.items():
        answer = await post(gateway, header, ODD_VALUES[odd])
        if odd in good:
            assert answer.status == 200, (header, answer)
        elif answer.status != 400:  # what is no HTTP at all is refused by the server itself
            assert (answer.status, answer.code) == (422, "invalid_input"), (header, answer)
    executed = len(gateway.runtime.leases)
    for header in LENIENT:
        answer = await post(gateway, header, ODD_VALUES[odd])
        assert answer.status in (200, 400), (header, answer)
        executed += answer.status == 200
    assert len(gateway.runtime.leases) == executed
    assert gateway.app.invocations.living == ()
    assert (await gateway.http.get("/v1/trajectories")).json()["trajectories"] == []


async def test_a_token_of_odd_characters_is_a_wrong_one(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"auth": "token", "token": "s3cret"})) as gateway:
        for value in ODD_VALUES.values():
            for header in (b"Authorization: Bearer " + value, b"Authorization: " + value):
                answer = await ask(gateway, b"GET /v1/functions HTTP/1.1\r\n" + header + b"\r\n")
                assert answer.status in (400, 401)


@pytest.mark.parametrize(
    "odd", ["%00", "%ff", "%F0%9F%92%A5", "..", "%2e%2e", "a%0ab", "a%20b", "x" * LONG, "-", "%25", "\u202e", "é"]
)
async def test_an_odd_id_is_no_id_on_every_path(gateway: RunningGateway, odd: str) -> None:
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


@pytest.mark.parametrize("odd", ["", "é", "a\nb", "\x00", "x" * LONG, "a b", "\ud83d\ude00", "\x7f"])
async def test_odd_fields_of_a_batch_have_a_verdict_of_their_own(gateway: RunningGateway, odd: str) -> None:
    fields = ("task", "trajectory", "key", "timeout", "max_age", "function", odd or "unheard of")
    calls = [{"function": "echo", "input": {}, field: odd} for field in fields]
    answer = await gateway.http.post(
        "/v1/invocations:batch", content=json.dumps({"calls": [*calls, {"function": "echo"}]})
    )
    statuses = [each["status"] for each in answer.json()["results"]]
    # An empty task is the default one.
    assert statuses == [202 if field == "task" and not odd else 422 for field in fields] + [202]
