"""Callbacks: signed, tried again, and only to where the configuration allows."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from gateway.callbacks import Callbacks, CallbackSpec
from gateway.store import Store, StoreSpec
from manager.errors import InvalidInput
from tests.gateway.conftest import Bench, serving, until


class Receiver:
    """A local server that refuses the first ``refusals`` posts and keeps the rest."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.heads: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(headers["content-length"]))
        refused = self.refusals > 0
        self.refusals -= 1
        if not refused:
            self.heads.append(headers)
            self.bodies.append(body)
        status = "503 Busy" if refused else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver(refusals=2)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()
    await server.wait_closed()


async def test_an_ended_record_is_posted_signed_and_again_until_it_is_taken(tmp_path: Path, receiver: Receiver) -> None:
    callbacks = {"allow": ["127.0.0.0/8"], "secret": "key", "backoff": "1ms"}
    async with serving(Bench(tmp_path, server={"callbacks": callbacks})) as gateway:
        url = {"X-Callback-Url": f"http://localhost:{receiver.port}/done?x=1"}
        accepted = await gateway.invoke({"n": 1}, mode="async", headers=url)
        assert accepted.status_code == 202
        await until(lambda: bool(receiver.bodies))
        head, body = receiver.heads[0], receiver.bodies[0]
        assert orjson.loads(body)["result"] == {"n": 1}
        signed = hmac.new(b"key", head["x-tangram-timestamp"].encode() + b"." + body, hashlib.sha256).hexdigest()
        assert head["x-tangram-signature"] == f"sha256={signed}"
        await until(lambda: gateway.app.callbacks.delivered == 1)
        record = (await gateway.http.get(f"/v1/invocations/{accepted.json()['id']}")).json()
        assert record["callback"] == "delivered"


async def test_a_target_that_is_not_allowed_is_refused_before_any_work(tmp_path: Path) -> None:
    callbacks = {"allow": ["example.org", "example.net:8443"]}
    async with serving(Bench(tmp_path, server={"callbacks": callbacks})) as gateway:
        for url in (
            "http://169.254.169.254/latest",
            "http://127.0.0.1:22/",
            "http://example.org.evil.com/",
            "http://user@example.org/",
            "file:///etc/passwd",
            "https://example.net/",
            "http://[",
            "nonsense",
        ):
            refused = await gateway.invoke({}, mode="async", headers={"X-Callback-Url": url})
            assert (refused.status_code, refused.json()["errors"]["path"]) == (422, "X-Callback-Url")
        assert not [verb for verb, _ in gateway.runtime.seen if verb == "execute"]


async def test_a_name_that_leads_out_of_the_allowed_blocks_is_not_called(tmp_path: Path) -> None:
    store = Store(StoreSpec(path=tmp_path / "db.sqlite"))
    callbacks = Callbacks(CallbackSpec(allow=("10.0.0.0/8",)), store)
    parts = callbacks._parts("http://localhost:1/")
    with pytest.raises(InvalidInput, match="lies in no block"):
        await callbacks._address(parts)
