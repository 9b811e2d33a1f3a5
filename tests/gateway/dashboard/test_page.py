"""The page in a real browser: what it shows, its timeline, and tabs that share a stream."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Route, expect

from manager.function import SandboxSpec
from runtimes.testing import ScriptedRuntime
from tests.gateway.conftest import FUNCTIONS, GatewayBench, RunningGateway, serving, until
from tests.gateway.dashboard.load import LoadedRollout, bench, loaded
from tests.gateway.dashboard.shown import IN_BROWSER, ShownPage

pytestmark = IN_BROWSER

HELD = {"held": True, "command": "wait"}
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
VIEW_KEYS = {"n": "Now", "t": "Timeline", "i": "Invocations", "u": "Functions", "r": "Trajectories", "s": "Tasks"}

VIEW_KEYS |= {"o": "Nodes", "d": "Dead letters"}


def address(gateway: RunningGateway, path: str = "/ui/now") -> str:
    return str(gateway.http.base_url).rstrip("/") + path


async def busy(gateway: RunningGateway) -> None:
    """Return when there is something to see in every view."""
    seen = gateway.app.stats
    await until(lambda: seen.info().ended > 10 and len(seen.running) > 4)


async def test_now_says_why_work_waits_and_every_number_leads_on(tmp_path: Path, shown: ShownPage) -> None:
    rollout = LoadedRollout()
    async with loaded(tmp_path, rollout) as gateway:
        await shown.page.goto(address(gateway, "/"))
        await shown.says(".verdict", "Nothing runs".lower())
        await shown.sees("h2", "Ready. Nothing has run yet.")
        rollout.start(gateway.http)
        await shown.says(".verdict", re.compile(r"\d+ of \d+ waiting actions wait"))
        await shown.sees(".badge", "BOUND")
        await busy(gateway)
        await shown.sees(".cells a.cell.b")
        await shown.sees(".wf", "swe-coding")
        await shown.sees(".task", "deep-search")
        await shown.sees(".lg .num b")
        await shown.holds("window.tangramTimeline.hits.length > 10")
        assert await shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await shown.find(".wf").click()
        await shown.says("#nav a.on", "Invocations")
        assert "state%3Aqueued" in shown.page.url
        await shown.page.go_back()
        await shown.sees(".verdict")


async def test_the_timeline_holds_its_place_filters_and_opens_a_bar(tmp_path: Path, shown: ShownPage) -> None:
    rollout = LoadedRollout()
    async with loaded(tmp_path, rollout) as gateway:
        rollout.start(gateway.http)
        await busy(gateway)
        await shown.page.goto(address(gateway, "/ui/timeline?span=30"))
        await shown.holds("Boolean(window.tangramTimeline) && window.tangramTimeline.hits.length > 10")
        await shown.page.keyboard.press("ArrowLeft")
        await shown.sees("button", "behind, follow")
        assert "end=" in shown.page.url, "a colleague sees the same time"
        held = await shown.page.evaluate("window.tangramTimeline.end_ms")
        await busy(gateway)
        assert await shown.page.evaluate("window.tangramTimeline.end_ms") == held, "new data does not move it"
        await shown.page.keyboard.press("f")
        await shown.sees("button", "following")
        await shown.find(".filter").fill("fn:judge")
        assert await shown.page.evaluate("window.tangramTimeline.filter({fn: 'shell'})") is False
        await shown.find("button", "as table").click()
        await shown.sees("td a", "judge")
        await shown.page.evaluate("(() => { const t = window.tangramTimeline; t.options.onopen(t.hits.at(-1)[4]); })()")
        await shown.sees("h1 .st")


async def test_a_step_of_a_task_is_seen_with_its_expected_end(tmp_path: Path, shown: ShownPage) -> None:
    later_s = 0.0
    async with serving(bench(tmp_path), wall=lambda: time.time() + later_s) as gateway:
        for step in (6, 7):
            await gateway.http.put(f"/v1/tasks/math-mopd/steps/{step}", json={"expected": 2})
            for name in ("t1", "t2"):
                opening = {"function": "shell", "task": "math-mopd", "step": step}
                assert (await gateway.http.put(f"/v1/trajectories/{name}", json=opening)).status_code == 200
            if step == 6:
                await shown.page.goto(address(gateway, "/ui/tasks"))
                await shown.says(".step", "step 6: 0 of 2, 2 living")
                assert "ends in" not in (await shown.find(".step").inner_text()), "nothing tells it"
                later_s += 300.0
                for name in ("t1", "t2"):
                    await gateway.http.delete(f"/v1/trajectories/{name}")
        await shown.says(".step", re.compile(r"^step 7: 0 of 2, 2 living, ends in ~(4|5) min"))
        await shown.page.goto(address(gateway, "/ui/timeline?span=1800"))
        bands = "(window.tangramTimeline?.bands || [])"
        told = f"{bands}.map(({{step, text}}) => `${{step.end === null}} ${{text}}`).join(' | ')"
        await shown.holds(f"/^false step 6: .*true step 7: 0 of 2, 2 living, ends in/.test({told})")
        await gateway.http.delete("/v1/trajectories/t1")
        await shown.holds(f"/step 7: 1 of 2, 1 living/.test({told})")
        reaches = "({step, left, right, expected}) => step.end === null && left < t.nowX && t.nowX + 50 < expected"
        whole = f"{reaches} && expected === right && right < t.canvas.clientWidth"
        assert await shown.page.evaluate(f"(t => t.bands.some({whole}))(window.tangramTimeline)"), "its end is in sight"


async def test_what_is_to_come_has_room_and_a_held_view_keeps_it(tmp_path: Path, shown: ShownPage) -> None:
    picture = "(({x0, per_ms}) => [x0, per_ms])(window.tangramTimeline)"
    now = "(t => [t.nowX - 92, t.canvas.clientWidth - t.nowX])(window.tangramTimeline)"
    async with serving(bench(tmp_path)) as gateway:
        await shown.page.goto(address(gateway, "/ui/timeline?span=60"))
        await shown.holds("window.tangramTimeline?.frames > 1")
        past, ahead = await shown.page.evaluate(now)
        assert ahead == pytest.approx(past / 10, abs=2.0), "a margin, where nothing is expected"
        await shown.page.keyboard.press(" ")
        await shown.sees("button", "behind, follow")
        x0, per_ms = await shown.page.evaluate(picture)
        assert per_ms * 60e3 == pytest.approx(past, abs=2.0), "to hold it moves nothing"
        assert "ahead=6" in shown.page.url
        held = shown.page.url
        await shown.page.goto(address(gateway))
        await shown.page.goto(held)
        await shown.holds("window.tangramTimeline?.frames > 1")
        assert await shown.page.evaluate(picture) == pytest.approx([x0, per_ms]), "a colleague sees the same picture"
        await shown.page.mouse.move(700, 200)
        under = "(t => t.x0 + (700 - t.canvas.getBoundingClientRect().left - 92) / t.per_ms)(window.tangramTimeline)"
        before = await shown.page.evaluate(under)
        await shown.page.mouse.wheel(0, -100)
        await shown.holds(f"window.tangramTimeline.per_ms > {1.1 * per_ms}")
        assert await shown.page.evaluate(under) == pytest.approx(before, abs=20), "it zooms at the pointer"
        await shown.page.keyboard.press("f")
        await shown.sees("button", "following")
        assert "ahead" not in shown.page.url


async def test_an_invocation_is_found_opened_cancelled_and_run_again(tmp_path: Path, shown: ShownPage) -> None:
    async with loaded(tmp_path, LoadedRollout()) as gateway:
        await gateway.invoke({"log": "one\n"}, function="math_reward")
        held = (await gateway.invoke(HELD | {"log": "begins\n"}, mode="async", function="shell")).json()["id"]
        await gateway.executing(held)
        await shown.page.goto(address(gateway, "/ui/invocations?q=fn:shell"))
        row = await shown.sees("tr[data-href]")
        await expect(shown.page.locator("tbody tr")).to_have_count(1)
        await row.click()
        await shown.says("h1", "running")
        await shown.says(".log .line", "begins")
        assert held in shown.page.url
        await shown.page.keyboard.press("c")
        await shown.says("#ask", "Cancel shell")
        await shown.find("#ask button", "Leave it").click()
        assert held in gateway.runtime.running
        await shown.find("button", "Cancel").click()
        await shown.find("#ask button", "Cancel it").click()
        await shown.says("h1", "cancelled")
        await shown.says(".logpanel [role=status]", "ended")
        await shown.find("button", "Run again").click()
        await shown.find("#ask button", "Run it").click()
        await until(lambda: len(gateway.runtime.running) == 1 and held not in gateway.runtime.running)
        (again,) = gateway.runtime.running
        await shown.page.wait_for_url(f"**/ui/invocations/{again}")
        gateway.runtime.finish(again)
        await shown.says("h1", "succeeded")
        await shown.page.goto(address(gateway, "/ui/invocations?q=odd"))
        await shown.says(".problem", "not a filter: odd")
        await shown.page.goto(address(gateway, "/ui/invocations/00000000001-000000000000"))
        await shown.says(".problem", "no invocation")


async def test_a_log_is_shown_as_text_whatever_it_holds(tmp_path: Path, shown: ShownPage) -> None:
    odd = "\x1b[31mred\x1b[0m plain\x1b[2J\x1b]0;title\x07 \u202eodd"
    log = f"{HOSTILE}\n{odd}\n<script>document.title='owned'</script>\n"
    async with loaded(tmp_path, LoadedRollout()) as gateway:
        hostile = HELD | {"log": log, "name": HOSTILE}
        one = (await gateway.invoke(hostile, mode="async", function="shell")).json()["id"]
        await gateway.executing(one)
        await shown.page.goto(address(gateway, f"/ui/invocations/{one}"))
        await shown.says(".log", HOSTILE)
        await shown.says(".log .a-red", "red")
        await shown.says(".log", "␛[2J␛]0;title␇ �odd")
        assert await shown.page.locator(".log img, .log script, pre img").count() == 0
        async with shown.page.expect_download() as saving:
            await shown.find("button", "Save").click()
        saved = await saving.value
        assert saved.suggested_filename == f"{one}.log"
        kept = await saved.path()
        assert await asyncio.to_thread(kept.read_text) == log
        await shown.says("pre.json", "onerror")
        assert "owned" not in await shown.page.title()
        gateway.runtime.finish(one)


async def test_a_hundred_thousand_lines_are_followed_and_few_of_them_are_in_the_page(
    tmp_path: Path, shown: ShownPage
) -> None:
    many = "".join(f"line {number} of the log\n" for number in range(100_000))
    large = replace(FUNCTIONS["echo"], name="large", log_limit_bytes=2**24)
    rollout = LoadedRollout()
    async with serving(
        bench(tmp_path, functions={"large": large}), runtime=ScriptedRuntime(rollout.step_of)
    ) as gateway:
        one = (await gateway.invoke({"log": many}, mode="async", function="large")).json()["id"]
        await shown.page.goto(address(gateway, f"/ui/invocations/{one}"))
        await shown.says(".logpanel [role=status]", "ended, 100 k")
        await shown.sees(".line", "line 99999 of the log")
        assert await shown.page.locator(".line").count() < 200
        await shown.page.evaluate("document.querySelector('.log').scrollTop = 0")
        await shown.sees(".line", "line 0 of the log")
        await shown.find(".logpanel .filter").fill("line 54321 ")
        await shown.page.keyboard.press("Enter")
        await shown.sees(".line.found", "line 54321 of the log")
        await shown.find("button", "follow").click()
        await shown.sees(".line", "line 99999 of the log")


async def test_a_function_tells_what_to_send_and_the_form_sends_it(tmp_path: Path, shown: ShownPage) -> None:
    async with loaded(tmp_path, LoadedRollout()) as gateway:
        await shown.page.goto(address(gateway, "/ui/functions"))
        await (await shown.sees("td a", "shell")).click()
        await shown.says(".field", "command *")
        await shown.find("#f-command").fill("echo hello")
        await shown.find("#f-quiet").check()
        await shown.find("#f--task").fill("mine")
        given = await shown.find("#f--json").input_value()
        assert '"command": "echo hello"' in given and '"quiet": true' in given, "both edit the same text"
        await shown.find("#f--json").fill('{"command": "ls"}')
        await expect(shown.find("#f-command")).to_have_value("ls")
        await shown.find("button.pri", "Send").click()
        await shown.says("main", "Accepted: ")
        (record,) = (await gateway.http.get("/v1/invocations?task=mine")).json()["invocations"]
        assert record["function"] == "shell"
        await shown.says(".log", "ran shell")
        await shown.find("#f--json").fill("{")
        await shown.find("button.pri", "Send").click()
        await shown.says(".problem", "not JSON")
        await shown.page.goto(address(gateway, "/ui/functions/nowhere"))
        await shown.says(".problem", "nowhere")


async def test_trajectories_tasks_nodes_and_the_configuration_are_there(tmp_path: Path, shown: ShownPage) -> None:
    shell = replace(FUNCTIONS["shell"], name="bash", sandbox=SandboxSpec())
    async with serving(bench(tmp_path, functions={"bash": shell})) as gateway:
        call = {"command": "mkdir sub; echo found > sub/it.txt"}
        await gateway.invoke(call, function="bash", headers={"X-Trajectory-Id": "t-1", "X-Task": "mine"})
        await shown.page.goto(address(gateway, "/ui/trajectories"))
        await (await shown.sees("td a", "t-1")).click()
        await shown.sees(".strip .block")
        await (await shown.sees("button", "sub/")).click()
        await (await shown.sees("button", "it.txt")).click()
        await shown.says("pre.json", "found")
        await shown.page.keyboard.press("s")
        await shown.says("table", "mine")
        await shown.page.keyboard.press("o")
        await shown.says("main", "node-a")
        await shown.says("tbody tr", re.compile(r"node-a.*this machine.*ready", re.DOTALL))
        await shown.says("main", "bubblewrap")
        await shown.page.goto(address(gateway, "/ui/trajectories"))
        await (await shown.sees("button", "End")).click()
        await shown.find("#ask button", "End it").click()
        await shown.says("main", "No trajectory lives")
        await shown.page.goto(address(gateway, "/ui/config"))
        await shown.find("textarea").fill("version: 1\nfunctions:\n  hello:\n    runtime: exec\n    cost: {cpu: 1}\n")
        await shown.find("button", "Show the difference").click()
        await shown.says("pre.json", "hello")
        await shown.find("button", "Apply").click()
        await shown.find("#ask button", "Apply it").click()
        await shown.says("main", "Applied.")
        assert (await gateway.http.get("/v1/functions/hello")).status_code == 200
        later = {"definition": {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "7s"}}
        assert (await gateway.http.put("/v1/functions/hello", json=later)).status_code == 200
        await shown.page.goto(address(gateway, "/ui/functions/hello"))
        await shown.says("details tr:has-text('timeout_s')", "7.0")


async def test_a_wrong_token_is_told_and_the_right_one_lets_in(tmp_path: Path, shown: ShownPage) -> None:
    async with serving(bench(tmp_path, auth="token")) as gateway:
        assert gateway.app.tokens is not None
        await shown.page.goto(address(gateway))
        await shown.says("h2", "wants a token")
        await shown.find("#token").fill("wrong")
        await shown.page.keyboard.press("Enter")
        await shown.says(".problem", "the token that was sent is wrong")
        await shown.find("#token").fill(gateway.app.tokens.admin)
        await shown.page.keyboard.press("Enter")
        await shown.sees(".verdict .badge")
        assert gateway.app.tokens.admin not in shown.page.url
        await shown.page.goto(address(gateway, "/ui/invocations"))
        await shown.says("main", "No invocation passes this filter")


async def test_a_restart_in_the_middle_is_told_and_passes(tmp_path: Path, shown: ShownPage) -> None:
    rollout = LoadedRollout()
    async with loaded(tmp_path, rollout) as gateway:
        port = gateway.app.http_port
        rollout.start(gateway.http, trajectories=8)
        await shown.page.goto(address(gateway))
        await busy(gateway)
        await shown.sees(".cells a.cell.b")
    await shown.says("#banner", "Connection lost")
    await shown.says("#livetext", "lost")
    await shown.sees(".cells a.cell.b"), "what was seen stays in sight"
    await shown.sees("#banner button", "Try now")
    async with serving(bench(tmp_path, port=port)) as gateway:
        # In one step: it is gone once the page has found the gateway by itself.
        await shown.page.evaluate("document.querySelector('#banner button')?.click()")
        await shown.says("#banner", "The gateway restarted")
        await shown.says("#livetext", "live")
        await shown.says(".verdict", "nothing runs")


async def test_a_narrow_screen_a_dark_one_and_the_keyboard(tmp_path: Path, shown: ShownPage) -> None:
    rollout = LoadedRollout()
    async with loaded(tmp_path, rollout) as gateway:
        rollout.start(gateway.http)
        await busy(gateway)
        await shown.page.set_viewport_size({"width": 390, "height": 844})
        for name in (
            "now",
            "timeline",
            "invocations",
            "functions",
            "functions/shell",
            "trajectories",
            "tasks",
            "nodes",
        ):
            await shown.page.goto(address(gateway, f"/ui/{name}"))
            await shown.sees("main .panel")
            if name == "now":
                await shown.sees(".lg"), await shown.sees("tr .x")
            assert await shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        await shown.page.emulate_media(color_scheme="dark")
        await shown.holds("document.documentElement.dataset.theme == 'dark'")
        for key, name in VIEW_KEYS.items():
            for start in ("i", "u", "r", "d", "n"):  # also from lists, which have keys of their own
                await shown.page.keyboard.press(start)
                await shown.says("#nav a.on", VIEW_KEYS[start])
                await shown.page.keyboard.press(key)
                await shown.says("#nav a.on", name)
        await shown.page.keyboard.press("?")
        await shown.says("#ask", "previous and next of the trajectory")
        await shown.page.keyboard.press("Escape")
        await shown.page.keyboard.press("i")
        await shown.sees("tbody tr")
        await shown.page.keyboard.press("j")
        await shown.sees("tbody tr.on")
        await shown.page.keyboard.press("Enter")
        await shown.sees("h1 .st")


async def test_an_empty_page_says_what_there_is_and_runs_something(tmp_path: Path, shown: ShownPage) -> None:
    async with loaded(tmp_path, LoadedRollout(scale=0.05)) as gateway:
        await shown.page.goto(address(gateway, "/ui/now"))
        await shown.says(".card", re.compile(r"16 cores, \d+ functions"))
        await shown.says(".card pre", "tangram invoke shell")
        await shown.find(".card button", "Run it now").click()
        await shown.page.wait_for_url("**/ui/invocations/*")
        await shown.says("h1", "succeeded")
        await shown.page.goto(address(gateway, "/ui/now"))
        await expect(shown.page.locator(".kpi .v span").nth(2)).to_have_text("1")
        assert await shown.page.locator(".card").count() == 0


async def test_the_page_counts_ends_as_the_list_of_tasks_and_the_metrics_do(tmp_path: Path, shown: ShownPage) -> None:
    async with serving(GatewayBench(tmp_path, functions={"echo": FUNCTIONS["echo"]})) as gateway:
        await gateway.invoke({})
        await gateway.invoke({"reason": "handler_error"})
        going = (await gateway.invoke({"held": True}, mode="async")).json()["id"]
        await gateway.http.post(f"/v1/invocations/{going}/cancel")
        await gateway.http.get(f"/v1/invocations/{going}?wait=5s")
        (task,) = [each for each in (await gateway.http.get("/v1/tasks")).json()["tasks"] if each["task"] == "default"]
        assert (task["settled"], task["completed"]) == ({"succeeded": 1, "failed": 1, "cancelled": 1}, 2)
        activity = (await gateway.http.get("/v1/activity")).json()
        assert [activity[each] for each in ("ended", "failed", "cancelled")] == [3, 1, 1]
        assert activity["act"]["completed"] == 2
        metrics = (await gateway.http.get("/metrics")).text
        assert 'tangram_invocations_ended_total{function="echo",reason="cancelled",state="cancelled"} 1.0' in metrics
        assert 'tangram_act_execution_seconds_count{function="echo"} 2.0' in metrics
        await shown.page.goto(address(gateway, "/ui/now"))
        await shown.says(".task .m", re.compile(r"ended 3\s*failed 1\s*cancelled 1"))
        await shown.says(".kpi:nth-child(3) small", "3 accepted, 1 cancelled")
        await shown.says(".kpi:nth-child(4) small", "of 2 not cancelled")
        await shown.says(".kpis", "of 2 completed")
        await shown.page.goto(address(gateway, "/ui/tasks"))
        cells = shown.page.locator("tbody tr", has_text="default").locator("td.num")
        await expect(cells.nth(4)).to_have_text("3")
        await expect(cells.nth(5)).to_have_text("2")
        assert shown.errors == []


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
            await tab.says("#livetext", "live")
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
