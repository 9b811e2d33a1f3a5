"""The document of the page, its sections, and the watch over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
import socket
import zlib
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.dashboard import stream as watching
from gateway.dashboard.files import bundled, the_page
from gateway.dashboard.stream import (
    GZIP_HEAD,
    LAG_MAX,
    VIEWERS_MAX,
    Names,
    Troubles,
    Watch,
    WatchView,
    packed,
    verdict,
)
from gateway.stats import Stats
from manager.errors import CapacityExceeded
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until


async def test_one_answer_brings_the_page_and_what_it_may_run_is_named_by_digest(gateway: RunningGateway) -> None:
    index = await gateway.http.get("/", headers={"Accept": "text/html"}, follow_redirects=True)
    policy = index.headers["content-security-policy"]
    assert index.url.path == "/ui/now" and "unsafe" not in policy and "'self'" not in policy.split("connect-src")[0]
    parts = re.findall(r"<(?:script[^>]*|style)>(.*?)</(?:script|style)>", index.text, re.DOTALL)
    assert len(parts) == 2
    for each in parts:
        assert f"'sha256-{b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" in policy
    same = await gateway.http.get("/ui/timeline", headers={"If-None-Match": index.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    bare = await gateway.http.get("/ui/now", headers={"Accept-Encoding": "identity"})
    assert bare.content == index.content == gzip.decompress(the_page().packed)


async def test_the_worker_of_the_page_may_ask_its_own_gateway_and_nothing_else(gateway: RunningGateway) -> None:
    (address,) = re.findall(r'"(/ui/worker\.js\?[0-9a-f]{16})"', the_page().data.decode())
    worker = await gateway.http.get(address)
    assert worker.headers["content-type"].startswith("text/javascript")
    assert worker.headers["content-security-policy"] == "default-src 'none'; connect-src 'self'"
    assert worker.headers["x-content-type-options"] == "nosniff"
    assert worker.content == the_page().worker.data and b"<!doctype" not in worker.content
    same = await gateway.http.get(address, headers={"If-None-Match": worker.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")


def test_the_page_is_small_and_names_nothing_foreign() -> None:
    page = the_page()
    assert len(page.data) <= 180_000 and len(page.packed) <= 55_000
    text = page.data.decode()
    assert [each for each in re.findall(r"https?://[^\"'\s)]+", text) if "www.w3.org/2000/svg" not in each] == []
    assert "innerHTML" not in text and "eval(" not in text and " style=" not in text
    assert re.findall(r"(?:src|href)=\"(?!/ui/|data:)", text) == []


def test_a_module_comes_once_and_after_what_it_imports() -> None:
    sources = {
        "app.js": 'import {one} from "./a.js";\nimport {two} from "./b.js";\nexport const three = one + two;',
        "a.js": 'import {two} from "./b.js";\nexport const one = two - 1;',
        "b.js": "export const two = 2;\nexport async function* more() {}",
    }
    script = bundled(sources, "app.js")
    assert [script.index(f"const $_{each} =") for each in "ba"] == sorted(
        script.index(f"const $_{each} =") for each in "ba"
    )
    assert script.count("const two = 2;") == 1 and "return {two, more};" in script
    assert "const {one} = $_a;" in script and "export" not in script


@pytest.mark.parametrize(
    "text",
    ['import * as b from "./b.js";', "export default 3;", "export let moving = 3;", 'const end = "</script>";'],
)
def test_what_one_document_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(AssertionError, match="cannot hold"):
        bundled({"app.js": text, "b.js": ""}, "app.js")


def seen(**given: object) -> dict[str, Any]:
    pools = {
        "cpu:n0": {"kind": "cpu", "total": 4, "free": 0},
        "cpu:n1": {"kind": "cpu", "total": 8, "free": 2},
        "search": {"kind": "search", "total": 10, "free": 0, "timed": True},
    }
    return {"running": 4, "waiting": 0, "causes": [], "pools": pools} | given


def cause(kind: str, count: int, pool: str = "") -> dict[str, object]:
    return {"kind": kind, "pool": pool, "count": count}


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ({"running": 0}, "idle", "nothing runs"),
        ({}, "ok", "4 running"),
        ({"waiting": 9, "causes": [cause("units", 7, "cpu:n0"), cause("trajectory", 2)]}, "units", "7 of 9"),
        ({"waiting": 9, "causes": [cause("units", 7, "cpu:n0")]}, "units", "wait for cores; 10 of 12 are busy"),
        ({"waiting": 5, "causes": [cause("quota", 5, "search")]}, "quota", "for search; 10 of 10 are used up"),
        ({"waiting": 5, "causes": [cause("memory", 5, "node:n0")]}, "memory", "wait for memory"),
        ({"waiting": 5, "causes": [cause("trajectory", 5)]}, "waiting", "earlier actions"),
        ({"waiting": 1}, "waiting", "0 of 1"),
        ({"waiting": 50, "causes": [cause("trajectory", 40), cause("units", 6, "cpu:n0")]}, "units", "6 of 50"),
        ({"waiting": 50, "causes": [cause("trajectory", 46), cause("units", 4, "cpu:n0")]}, "waiting", "46 of 50"),
        (
            {"waiting": 50, "causes": [cause("turn", 30), cause("trajectory", 18), cause("units", 2, "cpu:n0")]},
            "units",
            "32 of 50",
        ),
    ],
)
def test_the_verdict_names_what_most_wait_for(given: dict[str, object], code: str, told: str) -> None:
    found, text = verdict(seen(**given), Troubles(), {"f": ("ready", "")}, 0)
    assert found == code and told in text and "rate" not in text


def test_the_verdict_tells_when_what_waits_has_begun_where_a_rate_is_known() -> None:
    waits = seen(waiting=60, causes=[cause("units", 60, "cpu:n0")])
    assert verdict(waits, Troubles(), {}, 120)[1].endswith("At the present rate they have begun in about 30 s")
    assert verdict(waits, Troubles(), {}, 10)[1].endswith("in about 6 min")
    assert "rate" not in verdict(waits, Troubles(), {}, 9)[1], "too few to tell"


def test_what_stops_the_gateway_comes_before_everything_else() -> None:
    functions = {"f": ("unavailable", "image missing")}
    lost = Troubles(lost=["n1", "n2"])
    assert verdict(seen(), Troubles("draining"), functions, 0) == ("draining", "draining")
    assert verdict(seen(), lost._replace(stopped="the disk is full"), functions, 0)[0] == "stopped"
    assert verdict(seen(), lost, functions, 0) == ("lost", "n1 was lost, and 1 more; 4 running, 0 waiting")
    assert verdict(seen(), Troubles(), functions, 0) == ("unavailable", "f: image missing")


def test_names_beyond_the_bound_share_a_number() -> None:
    names = Names(most=3)
    assert [names.of(name) for name in ("a", "b", "c", "a", "d")] == [1, 2, 0, 1, 0]
    assert names.listed == ["other", "a", "b"]


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
    summary = {
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
        "summary": lambda: summary,
        "stats": Stats(lambda: 1.0, lambda: 1e9),
        "functions": dict,
        "steps": tuple,
        "troubles": Troubles,
        "wanted": set,
        "wall": lambda: 1e9,
    }
    return Watch(**(usual | given))


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
        watch.check(is_admin=True)
        await anext(viewer)
    with pytest.raises(CapacityExceeded):
        watch.check(is_admin=True)
    for viewer in viewers:
        await viewer.aclose()
    watch.check(is_admin=True)


async def test_a_fault_ends_the_stream_and_not_the_gateway() -> None:
    calls = iter([True, False])

    def summary() -> dict[str, Any]:
        return {} if not next(calls) else quiet_watch()._summary()  # type: ignore[return-value]

    watch = quiet_watch(summary=summary, tick_s=0.001)
    async with asyncio.timeout(DEADLINE_S):
        told = [data async for data in watch.follow(WatchView())]
    assert told[-1].startswith(b"event: bye")
