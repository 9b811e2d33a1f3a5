"""The timeline in a real browser: what is drawn of quotas and short actions, the drawer, the keyboard, and its file."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from playwright.async_api import Browser, Route, expect

from tests.gateway.conftest import RunningGateway, serving
from tests.gateway.dashboard.load import LoadedRollout, bench, loaded
from tests.gateway.dashboard.shown import IN_BROWSER, ShownPage

pytestmark = IN_BROWSER
HELD = {"held": True, "command": "wait"}
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
DRAWN = "Boolean(window.tangramTimeline) && window.tangramTimeline.hits.length > 0"
#: Plays bars to the page as a tick of the stream: [number, function, task, unit, milliseconds ago, milliseconds long,
#: reason], one unit of node-a each; without a number one call of the quota.
TELL = """(bars) => {
  const now = window.toldAt = Date.now(), first = 500;
  const names = [...new Set(bars.flatMap((bar) => [bar[1], bar[2]])), "cpu:node-a", "search"];
  const of = (name) => first + names.indexOf(name);
  const place = (unit) => unit < 0 ? [of("search"), -1, 1] : [of("cpu:node-a"), unit, 1];
  window.tangramHandle("tick", {bars: {names: [first, names],
    s: bars.map(([number, fn, task, unit, ago]) =>
      [1e6 + number, `told-${number}`, of(fn), of(task), 0, now - ago, 0, [place(unit)]]),
    e: bars.map(([number, , , , , long, reason]) => [1e6 + number, 0, long, reason])}});
}"""
#: Where in the window the newest bar is.
WHERE = """(([px, y, wide, tall]) => {
  const box = window.tangramTimeline.canvas.getBoundingClientRect();
  return [box.left + px + wide - 1, box.top + y + tall / 2];
})(window.tangramTimeline.hits.at(-1))"""


def address(gateway: RunningGateway, path: str) -> str:
    return str(gateway.http.base_url).rstrip("/") + path


async def test_a_bar_is_pinned_beside_with_its_record_and_log_and_enter_opens_its_page(
    tmp_path: Path, shown: ShownPage
) -> None:
    async with loaded(tmp_path, LoadedRollout()) as gateway:
        one = (await gateway.invoke(HELD | {"log": "it begins\n"}, mode="async", function="shell")).json()["id"]
        await gateway.executing(one)
        await shown.page.goto(address(gateway, "/ui/timeline?span=30"))
        await shown.holds(DRAWN)
        x, y = await shown.page.evaluate(WHERE)
        await shown.page.mouse.click(x, y)
        await shown.says(".drawer h2", "shell")
        await shown.says(".drawer dl", "node-a")
        await shown.says(".drawer .log", "it begins")
        await shown.says(".drawer .leg", "so far")
        gateway.runtime.finish(one)
        await shown.says(".drawer .leg", "ACT")
        assert shown.page.url.split("?")[0].endswith("/ui/timeline")
        await shown.page.keyboard.press("Escape")
        await expect(shown.find(".drawer")).to_be_hidden()
        assert shown.page.url.split("?")[0].endswith("/ui/timeline"), "it closes what is open before it goes back"
        await shown.page.get_by_role("button", name="following").click()  # a bar that has ended would move away
        x, y = await shown.page.evaluate(WHERE)
        await shown.page.mouse.click(x, y)
        await shown.sees(".drawer h2")
        await shown.page.keyboard.press("Enter")
        await shown.page.wait_for_url(f"**/ui/invocations/{one}")


async def test_who_looks_further_back_is_told_what_was_before(tmp_path: Path, shown: ShownPage) -> None:
    later_s = 0.0
    async with serving(bench(tmp_path), wall=lambda: time.time() + later_s) as gateway:
        for _ in range(3):
            await gateway.invoke({}, function="math_reward")
        later_s += 900.0
        await gateway.invoke({}, function="judge")
        await shown.page.goto(address(gateway, "/ui/timeline?span=120"))
        await shown.holds(DRAWN)
        names = "[...new Set(window.tangramTimeline.hits.map(([, , , , bar]) => bar.fn))].sort().join()"
        assert await shown.page.evaluate(names) == "judge"

        async def late(route: Route) -> None:
            for _ in range(3):  # meanwhile the stream that all tabs share tells of more, and could take over
                await gateway.invoke({}, function="judge")
                await asyncio.sleep(1.1)
            await route.continue_()

        await shown.page.route("**/v1/watch?*history=*", late)
        await shown.find("button", "30 min").click()
        await shown.holds(f"{names} === 'judge,math_reward'")
        starts = "(s => s.every((at, n) => !n || at >= s[n - 1]))(window.tangramTimeline.hits.map(([px]) => px))"
        assert await shown.page.evaluate(starts), "in their order"


async def test_what_is_seen_is_saved_as_one_file_that_needs_no_gateway(
    tmp_path: Path, shown: ShownPage, browser: Browser
) -> None:
    async with serving(bench(tmp_path)) as gateway:
        await shown.page.goto(address(gateway, "/ui/timeline?span=60"))
        await shown.holds("window.tangramTimeline?.frames > 1")
        bars = [[0, HOSTILE, HOSTILE, 2, 30_000, 5_000, 0], [1, "judge", "b", 2, 20_000, 5_000, "timeout"]]
        await shown.page.evaluate(TELL, [*bars, [2, "math_reward", "old", 5, 500_000, 4_000, 0]])
        await shown.holds("window.tangramTimeline.hits.length === 2")
        async with shown.page.expect_download() as saving:
            await shown.find("button", "Save as HTML").click()
        saved = await saving.value
        assert re.fullmatch(r"timeline-[\d-]{19}\.html", saved.suggested_filename)
        path = tmp_path / "saved.html"
        await saved.save_as(path)
    context = await browser.new_context(viewport={"width": 1000, "height": 700})
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    other = ShownPage(await context.new_page())
    await other.page.goto(f"file://{path}")
    await other.holds("window.tangramTimeline?.hits.length === 2")
    assert asked == [f"file://{path}"] and "owned" not in await other.page.title()
    await other.says("h1", "Timeline of 127.0.0.1")
    await other.find("button", "as table").click()
    await other.says("tbody", HOSTILE)
    assert await other.page.locator("main img").count() == 0
    assert "old" not in await other.find("tbody").inner_text(), "what is not seen is not in it"
    await other.page.mouse.wheel(0, 0)
    x, y = await other.page.evaluate(WHERE)
    await other.page.mouse.click(x, y)
    await other.says(".drawer", "timeout")
    assert other.errors == []
    await context.close()
