"""The timeline in a real browser: what is drawn of quotas and short actions, the drawer, the keyboard, and its file."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from gateway.config.load import GatewayConfig
from gateway.config.schema import DevicesConfig
from manager.action import UnitSet
from tests.gateway.conftest import RunningGateway, function, serving
from tests.gateway.dashboard.load import LoadedBench, LoadedRollout, bench, loaded
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
#: The share of a column of pixels of a row that is drawn upon, so long before it was told; or of one colour only.
COLUMN = """([lane, row, ago, only]) => {
  const t = window.tangramTimeline, scale = devicePixelRatio;
  t.draw();
  const found = t.lanes.find((each) => each.name === lane);
  const tall = Math.round((found.timed ? found.height : found.rowHeight) * scale);
  const x = Math.round((92 + (window.toldAt - ago - t.x0) * t.per_ms) * scale);
  const top = Math.round((found.top + row * found.rowHeight) * scale);
  const style = getComputedStyle(document.documentElement);
  const tone = (name) => style.getPropertyValue(`--${name}`).trim().toLowerCase(), sunk = tone("sunk");
  const wanted = only && tone(only);
  const data = t.canvas.getContext("2d").getImageData(x, top, 1, tall).data;
  let drawn = 0;
  for (let at = 0; at < data.length; at += 4) {
    const hex = "#" + [...data.slice(at, at + 3)].map((part) => part.toString(16).padStart(2, "0")).join("");
    drawn += only ? hex === wanted : data[at + 3] > 0 && hex !== sunk;
  }
  return drawn / tall;
}"""
#: Where in the window the newest bar is.
WHERE = """(([px, y, wide, tall]) => {
  const box = window.tangramTimeline.canvas.getBoundingClientRect();
  return [box.left + px + wide - 1, box.top + y + tall / 2];
})(window.tangramTimeline.hits.at(-1))"""


def address(gateway: RunningGateway, path: str) -> str:
    return str(gateway.http.base_url).rstrip("/") + path


async def test_a_quota_is_an_area_of_what_is_used_and_what_failed_is_a_cross(tmp_path: Path, shown: ShownPage) -> None:
    async with serving(bench(tmp_path)) as gateway:
        await shown.page.goto(address(gateway, "/ui/timeline?span=60"))
        await shown.holds("window.tangramTimeline?.frames > 1")
        # Ten units from 30 s ago on, twenty more from 25 s ago on, each for a second and the period of ten.
        bars = [[each, "web_search", "mine", -1, 30_000, 1_000, 0] for each in range(10)]
        bars += [[10 + each, "web_search", "mine", -1, 25_000, 1_000, 0] for each in range(20)]
        await shown.page.evaluate(TELL, [*bars, [30, "web_search", "mine", -1, 8_000, 100, "upstream"]])
        await shown.holds("window.tangramTimeline.hits.length === 3")
        shares = [await shown.page.evaluate(COLUMN, ["search", 0, ago]) for ago in (33_000, 27_000, 22_000, 17_000)]
        none, ten, thirty, twenty = shares
        assert none < ten < twenty < thirty < 1, "ten came back a period after their end"
        assert thirty - none == pytest.approx(3 * (ten - none), abs=0.12)
        assert await shown.page.evaluate(COLUMN, ["search", 0, 8_000, "fail"]) > 0
        assert await shown.page.evaluate(COLUMN, ["search", 0, 25_000, "fail"]) == 0
        lane = "(({title, about}) => [title, about])(window.tangramTimeline.lanes.find((each) => each.timed))"
        assert await shown.page.evaluate(lane) == ["search", "40 in 10 s"]


async def test_what_is_narrower_than_a_pixel_is_as_high_as_the_share_of_time_that_it_took(
    tmp_path: Path, shown: ShownPage
) -> None:
    async with serving(bench(tmp_path)) as gateway:
        await shown.page.goto(address(gateway, "/ui/timeline?span=1800"))
        await shown.holds("window.tangramTimeline?.frames > 1")
        # A minute in which unit 3 was busy for half of the time, unit 4 for a tenth, in 50 ms each.
        half = [[each, "math_reward", "mine", 3, 400_000 - 100 * each, 50, 0] for each in range(600)]
        tenth = [[1000 + each, "math_reward", "mine", 4, 400_000 - 500 * each, 50, 0] for each in range(120)]
        tenth[60][6] = "timeout"
        await shown.page.evaluate(TELL, half + tenth)
        await shown.holds("window.tangramTimeline.hits.length > 20")
        high, low = [await shown.page.evaluate(COLUMN, ["cpu:node-a", row, 370_000 - 5_000]) for row in (3, 4)]
        assert 0.3 < high < 0.75 and 0 < low < high / 2, "idle time stays to be seen"
        assert await shown.page.evaluate("window.tangramTimeline.hits.length") < 200, (
            "one place to point at a pixel or so"
        )
        reason = "window.tangramTimeline.hits.some(([, , , , bar]) => bar.reason === 'timeout')"
        assert await shown.page.evaluate(reason), "what failed is never merged away"


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


async def test_arrows_go_from_bar_to_bar_and_say_which(tmp_path: Path, shown: ShownPage) -> None:
    async with serving(bench(tmp_path)) as gateway:
        await shown.page.goto(address(gateway, "/ui/timeline?span=60"))
        await shown.holds("window.tangramTimeline?.frames > 1")
        bars = [[0, "shell", "a", 2, 30_000, 5_000, 0], [1, "judge", "b", 2, 20_000, 5_000, "timeout"]]
        await shown.page.evaluate(TELL, [*bars, [2, "math_reward", "c", 5, 28_000, 4_000, 0]])
        await shown.holds("window.tangramTimeline.hits.length === 3")
        await shown.page.locator("canvas.tl").focus()
        await shown.page.keyboard.press("ArrowLeft")
        await shown.says("[role=status].unseen", "judge, failed: timeout, 5.0 s")
        for key, name in [("ArrowLeft", "shell, ended"), ("ArrowDown", "math_reward"), ("ArrowUp", "shell")]:
            await shown.page.keyboard.press(key)
            await shown.says("[role=status].unseen", name)
        await shown.says("[role=status].unseen", "task a; cpu:node-a 2; began")
        await shown.page.keyboard.press("ArrowRight")
        await shown.says("[role=status].unseen", "judge")
        assert "end=" not in shown.page.url, "arrows on the picture do not move it"
        await shown.page.keyboard.press("Enter")
        await shown.page.wait_for_url("**/ui/invocations/told-1")


async def test_the_filter_knows_how_wide_and_how_long(tmp_path: Path, shown: ShownPage) -> None:
    async with serving(bench(tmp_path)) as gateway:
        await shown.page.goto(address(gateway, "/ui/timeline"))
        await shown.holds("window.tangramTimeline?.frames > 1")
        wide = "{fn: 'f', task: 't', start: 0, end: 3000, reason: '', places: [['cpu:a', 0, 1], ['cpu:a', 4, 2]]}"
        thin = "{fn: 'f', task: 't', start: 0, end: 900, reason: 'timeout', places: [['cpu:a', 0, 1]]}"
        for words, lets in [
            ("wider:2", [True, False]),
            ("wider:3", [False, False]),
            ("longer:1s", [True, False]),
            ("longer:500ms", [True, True]),
            ("failed", [False, True]),
        ]:
            await shown.find(".bar1 .filter").fill(words)
            found = await shown.page.evaluate(f"[{wide}, {thin}].map((bar) => window.tangramTimeline.filter(bar))")
            assert found == lets, words
        pressed = shown.find("button", "failed only")
        await expect(pressed).to_have_attribute("aria-pressed", "true")
        await pressed.click()
        await expect(shown.find(".bar1 .filter")).to_have_value("")
        assert await shown.page.evaluate("window.tangramTimeline.filter") is None


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
        await shown.find("button", "30 min").click()
        await shown.holds(f"{names} === 'judge,math_reward'")
        starts = "(s => s.every((at, n) => !n || at >= s[n - 1]))(window.tangramTimeline.hits.map(([px]) => px))"
        assert await shown.page.evaluate(starts), "in their order"


class DeviceBench(LoadedBench):
    """Sixteen cores and four devices of the processor."""

    def config(self) -> GatewayConfig:
        config = LoadedBench.config(self)
        return replace(config, node=replace(config.node, devices=DevicesConfig(kind="cpu", count=4)))


async def test_devices_have_their_rows_and_say_that_they_are_the_processors(tmp_path: Path, shown: ShownPage) -> None:
    usual = bench(tmp_path)
    teacher = function("teacher", cost={"gpu": UnitSet.fixed(2)})
    with_devices = DeviceBench(
        tmp_path, functions={"teacher": teacher}, server=usual.server, tasks=usual.tasks, resources=usual.resources
    )
    async with serving(with_devices) as gateway:
        one = (await gateway.invoke(HELD, mode="async", function="teacher")).json()["id"]
        await gateway.executing(one)
        await shown.page.goto(address(gateway, "/ui/timeline?span=30"))
        await shown.holds(DRAWN)
        row = "window.tangramTimeline.lanes.find((each) => each.name === 'gpu:node-a').rowHeight"
        tall = f"window.tangramTimeline.hits[0][3] === 2 * {row} - 1"
        assert await shown.page.evaluate(tall), "a chunk of two devices is two rows high"
        await shown.page.goto(address(gateway, "/ui/now"))
        await shown.says(".row:has-text('CPU devices')", "2 of 4 CPU devices")
        await shown.says(".kpi small", "16 cores, 4 CPU devices")
        gateway.runtime.finish(one)
    async with serving(bench(tmp_path)) as gateway:
        await shown.page.goto(address(gateway, "/ui/now"))
        await shown.says(".kpi small", "16 cores")
        assert await shown.page.locator(".row", has_text="device").count() == 0, (
            "no function wants the processor as one"
        )


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
