"""Tabs of one browser share one connection to the gateway, by a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from playwright.async_api import Browser, BrowserContext

from tests.gateway.conftest import RunningGateway, serving, until
from tests.gateway.dashboard.load import LoadedRollout, bench, loaded
from tests.gateway.dashboard.shown import IN_BROWSER, ShownPage

pytestmark = IN_BROWSER
#: A tab that joins the worker without bars, which pings each 20 ms, and answers if it is alive.
JOINS = """([address, alive]) => {
  window.joined = new SharedWorker(address, {name: "20"});
  window.pings = 0;
  window.joined.port.onmessage = ({data}) => {
    if (!data.ping) return;
    window.pings += 1;
    if (alive) window.joined.port.postMessage({kind: "pong"});
  };
  window.joined.port.postMessage({kind: "join", token: "", since: null, bars: false});
}"""
HELD = {"held": True, "command": "wait"}


class SharingTabs:
    """Tabs of one browser, each of which must come through the test without an error of its own."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.tabs: list[ShownPage] = []

    async def open(self, gateway: RunningGateway, path: str = "/ui/now") -> ShownPage:
        tab = ShownPage(await self.context.new_page())
        self.tabs.append(tab)
        await tab.page.goto(str(gateway.http.base_url).rstrip("/") + path)
        return tab


@pytest_asyncio.fixture(loop_scope="session")
async def tabs(browser: Browser) -> AsyncIterator[SharingTabs]:
    context = await browser.new_context()
    opened = SharingTabs(context)
    yield opened
    await context.close()
    assert [tab.errors for tab in opened.tabs if tab.errors] == []


async def viewers(gateway: RunningGateway, number: int) -> None:
    """Return when the gateway has so many."""
    await until(lambda: gateway.app.watch.viewers == number)


async def test_two_tabs_have_one_connection_and_each_sees_everything(tmp_path: Path, tabs: SharingTabs) -> None:
    async with serving(bench(tmp_path)) as gateway:
        one, two = await tabs.open(gateway), await tabs.open(gateway, "/ui/timeline")
        await one.sees(".verdict .badge")
        await viewers(gateway, 1)
        held = (await gateway.invoke(HELD, mode="async", function="shell")).json()["id"]
        await one.says(".kpi .v", "1")
        await two.holds("window.tangramTimeline?.hits.length === 1")
        await one.page.close()
        gateway.runtime.finish(held)
        await two.holds("window.tangramTimeline.hits.some(([, , , , bar]) => bar.end !== null)")
        assert gateway.app.watch.viewers == 1, "who is left keeps it"
        await two.page.goto("about:blank")
        await viewers(gateway, 0)


async def test_bars_are_asked_for_where_a_timeline_is_looked_at(tmp_path: Path, tabs: SharingTabs) -> None:
    rollout = LoadedRollout()
    async with loaded(tmp_path, rollout) as gateway:
        rollout.start(gateway.http, trajectories=8)
        asked: list[str] = []
        tabs.context.on("request", lambda request: asked.append(request.url))
        one = await tabs.open(gateway, "/ui/functions")
        await one.sees("td a", "shell")
        await viewers(gateway, 1)
        assert [each for each in asked if "/v1/watch?" in each and "bars=true" in each] == []
        await one.page.keyboard.press("t")
        await one.holds("window.tangramTimeline?.hits.length > 0")
        assert [each for each in asked if "/v1/watch?" in each and "bars=true" in each] != []
        await viewers(gateway, 1)
        last = "Math.max(...window.tangramTimeline.hits.map(([, , , , bar]) => bar.number))"
        before = await one.page.evaluate(last)
        await one.holds(f"{last} > {before}")


async def test_a_cut_and_a_restart_are_told_to_each_tab(tmp_path: Path, tabs: SharingTabs) -> None:
    async with serving(bench(tmp_path)) as gateway:
        port = gateway.app.http_port
        one, two = await tabs.open(gateway), await tabs.open(gateway)
        await viewers(gateway, 1)
    for tab in (one, two):
        await tab.says("#banner", "Connection lost")
    async with serving(bench(tmp_path, port=port)) as gateway:
        # In one step: it is gone once the page has found the gateway by itself.
        await two.page.evaluate("document.querySelector('#banner button')?.click()")
        for tab in (one, two):
            await tab.says("#banner", "The gateway restarted")
            await tab.says("#livetext", "live")
        await viewers(gateway, 1)


async def test_another_token_is_another_stream_and_a_wrong_one_none(tmp_path: Path, tabs: SharingTabs) -> None:
    async with serving(bench(tmp_path, auth="token")) as gateway:
        assert gateway.app.tokens is not None
        right, wrong = await tabs.open(gateway), await tabs.open(gateway)
        await right.find("#token").fill(gateway.app.tokens.admin)
        await right.page.keyboard.press("Enter")
        await right.sees(".verdict .badge")
        await wrong.find("#token").fill("wrong")
        await wrong.page.keyboard.press("Enter")
        await wrong.says(".problem", "the token that was sent is wrong")
        await viewers(gateway, 1)
        await right.says("#livetext", "live")
        await wrong.find("#token").fill(gateway.app.tokens.invoke)
        await wrong.page.keyboard.press("Enter")
        await wrong.sees(".verdict .badge")
        third = await tabs.open(gateway)
        await third.find("#token").fill(gateway.app.tokens.invoke)
        await third.page.keyboard.press("Enter")
        await third.sees(".verdict .badge")
        await viewers(gateway, 2)
        assert all("token" not in tab.page.url for tab in tabs.tabs)


async def test_a_tab_that_says_nothing_any_more_lets_the_stream_go(tmp_path: Path, tabs: SharingTabs) -> None:
    async with serving(bench(tmp_path)) as gateway:
        host = ShownPage(await tabs.context.new_page())
        await host.page.goto(str(gateway.http.base_url).rstrip("/") + "/openapi.json")
        for alive, left in ((True, 1), (False, 0)):
            await host.page.evaluate(JOINS, ["/ui/worker.js?" + str(alive), alive])
            await viewers(gateway, 1)
            await host.holds("window.pings >= 3")
            await viewers(gateway, left)
            if alive:
                await host.holds("window.pings >= 20")
                assert gateway.app.watch.viewers == 1, "one that answers stays"
                await host.page.evaluate("window.joined.port.postMessage({kind: 'leave'})")
                await viewers(gateway, 0)
