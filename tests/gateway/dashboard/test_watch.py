"""The watch over real sockets: small changes, encoded once, resumed, and nothing queued for one that does not read."""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway import serialization
from gateway.dashboard import stream as watching
from gateway.dashboard.stream import GZIP_HEAD, LAG_MAX, VIEWERS_MAX, Troubles, Watch, WatchView, packed
from gateway.stats import Stats
from manager.errors import CapacityExceeded
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until

Event = tuple[str, str, dict[str, Any]]


def parse(text: str) -> Event:
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    return fields.get("id", ""), fields["event"], orjson.loads(fields["data"])


async def events(response: httpx.Response) -> AsyncGenerator[Event, None]:
    rest = ""
    async for piece in response.aiter_text():
        *whole, rest = (rest + piece).split("\n\n")
        for each in whole:
            yield parse(each)


@asynccontextmanager
async def watched(gateway: RunningGateway, **query: str) -> AsyncIterator[AsyncGenerator[Event, None]]:
    async with gateway.http.stream("GET", "/v1/watch", params=query) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream"
        async with aclosing(events(response)) as found:
            yield found


def merged(state: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What the page does with a tick."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(state.get(name), dict):
            state[name] = {key: each for key, each in (state[name] | value).items() if each is not None}
        else:
            state[name] = value
    return state


async def test_a_viewer_is_told_the_state_and_then_what_changes(gateway: RunningGateway) -> None:
    async with asyncio.timeout(DEADLINE_S), watched(gateway, bars="true") as stream:
        _, kind, hello = await anext(stream)
        assert (kind, hello["form"]) == ("hello", 1)
        name, kind, state = await anext(stream)
        assert kind == "state" and name.startswith(hello["epoch"] + ".")
        shown = state["d"]
        assert (shown["run"], shown["wait"], shown["verdict"][0]) == (0, 0, "idle")
        held = (await gateway.invoke({"held": True}, mode="async")).json()["id"]
        names = state["bars"]["names"][1]
        begun: list[Any] = []
        tick: dict[str, Any] = {}
        while not begun:
            _, _, tick = await anext(stream)
            shown = merged(shown, tick.get("d", {}))
            if "bars" in tick:
                names += tick["bars"].get("names", [0, []])[1]
                begun = tick["bars"]["s"]
        assert shown["run"] == 1 and shown["long"][0][0] == held
        number, invocation, function, task, *_, places = begun[0]
        assert (invocation, names[function], names[task]) == (held, "echo", "default")
        ((pool, _first, count),) = places
        assert (names[pool], count) == ("cpu:local", 1)
        assert "verdict" in shown and "fns" not in tick.get("d", {}), "what has not changed is not told again"
        gateway.runtime.finish(held)
        done: list[Any] = []
        while not done:
            _, _, tick = await anext(stream)
            shown = merged(shown, tick.get("d", {}))
            done = tick.get("bars", {}).get("e", [])
        assert done[0][0] == number and done[0][3] == 0
        assert (shown["run"], shown["rate"][1]) == (0, 1)


async def test_who_watches_without_bars_is_not_told_any(gateway: RunningGateway) -> None:
    async with asyncio.timeout(DEADLINE_S), watched(gateway) as stream:
        told = (await anext(stream))[2] | (await anext(stream))[2]
        assert "bars" not in told
        await gateway.invoke({})
        _, kind, tick = await anext(stream)
        assert kind == "tick" and "bars" not in tick
        first, named = tick["names"]
        assert first == len(told["names"][1]) and "echo" in named, "it knows in which order functions came"


async def test_who_comes_back_is_told_the_rest_and_after_a_restart_everything(gateway: RunningGateway) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with watched(gateway) as keeper:  # somebody stays, so that ticks are made meanwhile
            async with watched(gateway) as stream:
                await anext(stream)
                last, kind, _ = await anext(stream)
                assert kind == "state"
            await anext(keeper), await anext(keeper)
            await gateway.invoke({})
            await anext(keeper)
            async with watched(gateway, since=last) as stream:
                assert [(await anext(stream))[1], (await anext(stream))[1]] == ["hello", "tick"]
            async with watched(gateway, since="00000000.1") as stream:
                assert [(await anext(stream))[1], (await anext(stream))[1]] == ["hello", "state"]
        assert (await gateway.http.get("/v1/watch?since=odd")).status_code == 422


async def test_a_gateway_that_drains_says_goodbye(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * DEADLINE_S), serving(GatewayBench(tmp_path)) as gateway, watched(gateway) as stream:
        await anext(stream)
        gateway.app.stop()
        kinds = [(kind, told) async for _, kind, told in stream]
        assert kinds[-1] == ("bye", {"reason": "draining"})


async def test_nothing_is_made_while_nobody_looks(gateway: RunningGateway) -> None:
    app = gateway.app
    await gateway.invoke({})
    assert app.watch._ticking is None and app.watch._number == 0
    async with asyncio.timeout(DEADLINE_S), watched(gateway) as stream:
        await anext(stream), await anext(stream)
        assert app.watch.viewers == 1
    await until(lambda: app.watch.viewers == 0)
    assert app.watch._ticking is None


async def test_one_that_does_not_read_costs_nothing_and_is_told_the_state_when_it_reads_on(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ticks are larger than the sockets hold, so that the gateway finds it silent."""
    watch = gateway.app.watch
    monkeypatch.setattr(watch, "_tick_s", 0.002)
    noise = "x" * 200_000
    counter = iter(range(1_000_000))
    monkeypatch.setattr(watch, "_functions", lambda: {"noise": (str(next(counter)), noise)})
    silent = socket.create_connection(("127.0.0.1", gateway.app.http_port))
    silent.sendall(b"GET /v1/watch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    silent.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await until(lambda: watch.viewers == 1)
        stuck = watch._number + 5 * LAG_MAX + 100
        await until(lambda: watch._number > stuck)
        assert watch._ring_bytes <= watching.RING_BYTES + 2 * len(noise), "what is kept is bounded, and once for all"
        assert watch.gaps == 0, "nothing is made for it before it reads on"
        async with asyncio.timeout(DEADLINE_S):
            read = b""
            while b"event: gap" not in read:
                read = read[-20:] + await loop.sock_recv(silent, 1 << 20)
            while b"event: state" not in read:
                read = read[-20:] + await loop.sock_recv(silent, 1 << 20)
        assert watch.gaps >= 1
    finally:
        silent.close()
    await until(lambda: watch.viewers == 0)


def quiet_watch(**given: Any) -> Watch:
    """A watch of a gateway in which nothing is."""
    glance = {
        "running": 0,
        "waiting": 0,
        "causes": [],
        "causes_left_out": 0,
        "pools": {},
        "nodes": {},
        "tasks": {},
        "longest": [],
        "trajectories": {},
    }
    usual: dict[str, Any] = {
        "glance": lambda: glance,
        "stats": Stats(lambda: 1.0, lambda: 1e9),
        "functions": dict,
        "steps": tuple,
        "troubles": Troubles,
        "wanted": set,
        "wall": lambda: 1e9,
    }
    return Watch(**(usual | given))


async def test_all_viewers_are_sent_the_very_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    encode = serialization.encode

    def noted(value: object) -> bytes:
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr(serialization, "encode", noted)
    status = ["0"]
    watch = quiet_watch(functions=lambda: {"f": (status[0], "")}, tick_s=3600.0)
    viewers = [watch.follow(WatchView(packed=True)) for _ in range(10)]
    for viewer in viewers:
        await anext(viewer), await anext(viewer)
    before = len(encoded)
    status[0] = "1"
    watch._tick()
    told = [await anext(viewer) for viewer in viewers]
    assert len(encoded) == before + 1 and len(set(told)) == 1
    for viewer in viewers:
        await viewer.aclose()


async def test_packed_chunks_are_one_gzip_stream_wherever_a_viewer_comes_in() -> None:
    status = ["0"]
    watch = quiet_watch(functions=lambda: {"f": (status[0], "x" * 500)}, tick_s=3600.0)
    first = watch.follow(WatchView())
    plain = await anext(first) + await anext(first)
    status[0] = "1"
    watch._tick()
    late = watch.follow(WatchView(packed=True))
    unpack = zlib.decompressobj(31)
    data = b"".join([unpack.decompress(await anext(late)), unpack.decompress(await anext(late))])
    status[0] = "2"
    watch._tick()
    tick = unpack.decompress(await anext(late))
    await anext(first)
    assert b"event: hello" in plain and b"event: state" in data and b'"fns":{"f":["2"' in tick
    assert packed(b"a" * 1000)[:2] != GZIP_HEAD[:2]
    await first.aclose()
    await late.aclose()


async def test_there_are_only_so_many_viewers() -> None:
    watch = quiet_watch(tick_s=3600.0)
    viewers = [watch.follow(WatchView()) for _ in range(VIEWERS_MAX)]
    for viewer in viewers:
        watch.check()
        await anext(viewer)
    with pytest.raises(CapacityExceeded):
        watch.check()
    for viewer in viewers:
        await viewer.aclose()
    watch.check()


async def test_a_fault_ends_the_stream_and_not_the_gateway() -> None:
    calls = iter([True, False])

    def glance() -> dict[str, Any]:
        return {} if not next(calls) else quiet_watch()._glance()  # type: ignore[return-value]

    watch = quiet_watch(glance=glance, tick_s=0.001)
    async with asyncio.timeout(DEADLINE_S):
        told = [data async for data in watch.follow(WatchView())]
    assert told[-1].startswith(b"event: bye")
