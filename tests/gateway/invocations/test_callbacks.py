"""Callbacks: signed, tried again, and only to where the configuration allows."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import orjson
import pytest

from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until
from tests.listening import listening


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


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver(refusals=2)
    async with listening(made.serve) as made.port:
        yield made


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.invocations.callbacks.BACKOFF_S", 0.001)
    monkeypatch.setattr("gateway.invocations.callbacks.LOOK_S", 0.05)


@pytest.mark.promise(
    "Callbacks are signed, sent once the end is durable, and at least once; tries are counted over restarts."
)
async def test_an_ended_record_is_posted_signed_and_again_until_it_is_taken(tmp_path: Path, receiver: Receiver) -> None:
    callbacks = {"allow": ["127.0.0.0/8"], "secret": "key"}
    async with serving(GatewayBench(tmp_path, server={"callbacks": callbacks})) as gateway:
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


@pytest.mark.promise("A callback goes only to addresses that the configuration allows.")
async def test_a_target_that_is_not_allowed_is_refused_before_any_work(tmp_path: Path) -> None:
    callbacks = {"allow": ["example.org", "example.net:8443"]}
    async with serving(GatewayBench(tmp_path, server={"callbacks": callbacks})) as gateway:
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


class Rebinding:
    """A resolver whose answers for ``rebind.test`` follow one another; every other name is left alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        self._real = loop.getaddrinfo
        self._answers = list(answers)
        self.asked = 0
        monkeypatch.setattr(loop, "getaddrinfo", self.getaddrinfo)

    async def getaddrinfo(self, host: str, port: int, **given: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host != "rebind.test":
            return await self._real(host, port, **given)  # type: ignore[return-value]
        self.asked += 1
        addresses = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [(2, 1, 6, "", (address, port)) for address in addresses]


async def given_up(gateway: RunningGateway, url: str) -> None:
    """Submit with a callback to ``url``, and see it given up."""
    accepted = await gateway.invoke({"n": 1}, mode="async", headers={"X-Callback-Url": url})
    assert accepted.status_code == 202, accepted.text
    await until(lambda: gateway.app.callbacks.failed == 1)
    record = (await gateway.http.get(f"/v1/invocations/{accepted.json()['id']}")).json()
    assert (record["state"], record["callback"]) == ("succeeded", "failed")


LOCAL = {"allow": ["127.0.0.0/8"], "max_attempts": 2}


async def test_a_name_is_resolved_once_for_a_try_and_what_it_means_later_is_not_called(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.refusals = 0
    async with serving(GatewayBench(tmp_path, server={"callbacks": LOCAL})) as gateway:
        rebinding = Rebinding(monkeypatch, ["127.0.0.1"], ["169.254.169.254"])
        url = {"X-Callback-Url": f"http://rebind.test:{receiver.port}/"}
        await gateway.invoke({"n": 1}, mode="async", headers=url)
        await until(lambda: gateway.app.callbacks.delivered == 1)
        assert rebinding.asked == 1
        assert receiver.heads[0]["host"] == f"rebind.test:{receiver.port}"
        await given_up(gateway, url["X-Callback-Url"])
        assert rebinding.asked == 3 and len(receiver.bodies) == 1


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1", "10.0.0.1"], ["::ffff:127.0.0.1"], ["::1"], ["0.0.0.0"], ["169.254.169.254"]],
)
async def test_one_address_outside_the_allowed_blocks_is_one_too_many(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    receiver.refusals = 0
    async with serving(GatewayBench(tmp_path, server={"callbacks": LOCAL})) as gateway:
        Rebinding(monkeypatch, addresses)
        await given_up(gateway, f"http://rebind.test:{receiver.port}/")
        assert receiver.bodies == []


async def test_a_redirect_is_not_followed(tmp_path: Path, receiver: Receiver) -> None:
    receiver.refusals = 0
    asked = 0

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        target = f"http://127.0.0.1:{receiver.port}/inside"
        writer.write(f"HTTP/1.1 307 Elsewhere\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())

    bench = GatewayBench(tmp_path, server={"callbacks": LOCAL})
    async with listening(elsewhere) as port, serving(bench) as gateway:
        await given_up(gateway, f"http://127.0.0.1:{port}/")
    assert (asked, receiver.bodies) == (2, [])


@pytest.mark.slow
async def test_a_receiver_that_trickles_is_given_up_and_one_that_talks_for_ever_is_not_listened_to(
    tmp_path: Path,
) -> None:
    gone = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
        writer.write(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if path == b"/endless" else b"X-Slow: "))
        try:
            while True:
                writer.write(b"x" * (2**16 if path == b"/endless" else 1))
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), 0.01)
        except OSError:
            gone.set()

    bench = GatewayBench(tmp_path, server={"callbacks": LOCAL | {"timeout": "300ms"}})
    async with listening(speak) as port, serving(bench) as gateway:
        url = f"http://127.0.0.1:{port}"
        await gateway.invoke({}, mode="async", headers={"X-Callback-Url": f"{url}/endless"})
        await until(lambda: gateway.app.callbacks.delivered == 1)
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
        await given_up(gateway, f"{url}/slow")


async def test_nothing_is_told_that_a_restart_could_take_back(tmp_path: Path, receiver: Receiver) -> None:
    receiver.refusals = 0
    async with serving(GatewayBench(tmp_path, server={"callbacks": LOCAL})) as gateway:
        url = {"X-Callback-Url": f"http://127.0.0.1:{receiver.port}/"}
        accepted = (await gateway.invoke({"held": True}, mode="async", headers=url)).json()["id"]
        await gateway.executing(accepted)
        assert gateway.app.store._connection is not None
        gateway.app.store._connection.execute("PRAGMA busy_timeout = 1")
        with closing(sqlite3.connect(tmp_path / "state" / "tangram.sqlite", isolation_level=None)) as full:
            full.execute("BEGIN IMMEDIATE")  # nobody else can write
            gateway.runtime.finish(accepted)
            await until(lambda: gateway.app.store.failure is not None)
            assert receiver.bodies == []
            full.execute("ROLLBACK")
        await until(lambda: gateway.app.callbacks.delivered == 1)
        assert [orjson.loads(body)["state"] for body in receiver.bodies] == ["succeeded"]


@pytest.mark.promise("A dead receiver holds up no other.")
async def test_a_receiver_that_is_dead_holds_up_no_other(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.invocations.callbacks.AT_ONCE", 3)
    monkeypatch.setattr("gateway.invocations.callbacks.PER_HOST", 2)
    receiver.refusals, tried = 0, 0

    async def dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tried
        tried += 1
        await reader.read()

    bench = GatewayBench(tmp_path, server={"callbacks": LOCAL | {"timeout": "30s"}})
    async with listening(dead) as silent, serving(bench) as gateway:
        for port, count in ((silent, 12), (receiver.port, 5)):
            url = {"X-Callback-Url": f"http://127.0.0.1:{port}/"}
            for n in range(count):
                await gateway.invoke({"n": n}, mode="async", headers=url)
        await until(lambda: gateway.app.callbacks.delivered == 5)
        assert [orjson.loads(body)["result"]["n"] for body in receiver.bodies] == [0, 1, 2, 3, 4], "in order"
        assert tried == 2


async def test_a_try_that_ends_while_the_store_is_read_waits_for_its_time_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.invocations.callbacks.BACKOFF_S", 3600.0)
    asked, answer, stale = 0, asyncio.Event(), asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await answer.wait()
        await Receiver(refusals=1).serve(reader, writer)

    async with listening(refuse) as port, serving(GatewayBench(tmp_path, server={"callbacks": LOCAL})) as gateway:
        sender, read = gateway.app.callbacks, gateway.app.store.read

        async def slow_read(query: str, values: tuple[object, ...]) -> Sequence[sqlite3.Row]:
            rows = await read(query, values)
            if query == "deliveries" and rows and sender._held and not stale.is_set():
                answer.set()
                await until(lambda: not sender._held)
                stale.set()
            return rows

        monkeypatch.setattr(gateway.app.store, "read", slow_read)
        await gateway.invoke({}, mode="async", headers={"X-Callback-Url": f"http://127.0.0.1:{port}/"})
        await asyncio.wait_for(stale.wait(), DEADLINE_S)
        await asyncio.sleep(0.3)  # time for a second try
        assert asked == 1


async def test_a_restart_goes_on_where_the_tries_were(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.invocations.callbacks.BACKOFF_S", 3600.0)
    receiver.refusals = 1000
    bench = GatewayBench(tmp_path, server={"callbacks": LOCAL | {"max_attempts": 3}})
    url = {"X-Callback-Url": f"http://127.0.0.1:{receiver.port}/"}
    async with serving(bench) as gateway:
        accepted = (await gateway.invoke({}, mode="async", headers=url)).json()["id"]
        await until(lambda: receiver.refusals == 999)
    with closing(sqlite3.connect(tmp_path / "state" / "tangram.sqlite", isolation_level=None)) as database:
        ((host, tries),) = database.execute("SELECT host, tries FROM deliveries").fetchall()
        assert (host, tries) == (f"127.0.0.1:{receiver.port}", 1)
        database.execute("UPDATE deliveries SET due_s = 0")  # as if it had been down for so long
    monkeypatch.setattr("gateway.invocations.callbacks.BACKOFF_S", 0.001)
    async with serving(bench) as gateway:
        await until(lambda: gateway.app.callbacks.failed == 1)
        assert receiver.refusals == 997
        assert (await gateway.http.get(f"/v1/invocations/{accepted}")).json()["callback"] == "failed"
