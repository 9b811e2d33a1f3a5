"""What the views say in a real browser: functions and how they fare, the empty page, the menu, links into a log."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from playwright.async_api import expect

from manager.function import RetrySpec
from tests.gateway.conftest import FUNCTIONS, GatewayBench, RunningGateway, serving
from tests.gateway.dashboard.load import LoadedRollout, bench, loaded
from tests.gateway.dashboard.shown import IN_BROWSER, ShownPage

pytestmark = IN_BROWSER


def address(gateway: RunningGateway, path: str) -> str:
    return str(gateway.http.base_url).rstrip("/") + path


async def test_functions_tell_how_they_fare_and_each_run_is_a_dot_on_the_curve(
    tmp_path: Path, shown: ShownPage
) -> None:
    async with loaded(tmp_path, LoadedRollout(scale=0.05)) as gateway:
        runs = [(await gateway.invoke({}, function="judge")).json()["id"] for _ in range(4)]
        await gateway.invoke({"reason": "handler_error"}, function="echo")
        await shown.page.goto(address(gateway, "/ui/functions"))
        row = shown.page.locator("tbody tr", has_text="judge")
        await expect(row.locator("td.num").nth(0)).to_have_text("4")
        await expect(row.locator("td.num").nth(1)).to_have_text(re.compile(r"\d+ ms|\d+\.\d s"))
        await expect(row.locator("td.num").nth(3)).to_have_text("0")
        await row.click()
        await expect(shown.page.locator(".curve .dot")).to_have_count(4)
        await shown.page.locator(".curve .dot").first.click()
        await shown.page.wait_for_url("**/ui/invocations/*")
        assert shown.page.url.rpartition("/")[2] in runs


async def test_the_input_of_a_former_call_is_used_again(tmp_path: Path, shown: ShownPage) -> None:
    async with loaded(tmp_path, LoadedRollout(scale=0.05)) as gateway:
        await gateway.invoke({"command": "make test"}, function="shell")
        await shown.page.goto(address(gateway, "/ui/functions/shell"))
        await shown.find("tbody button", "use").click()
        await expect(shown.find("#f-command")).to_have_value("make test")
        assert '"make test"' in await shown.find("#f--json").input_value()


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


async def test_the_menu_behind_the_mark_and_the_count_of_dead_letters(tmp_path: Path, shown: ShownPage) -> None:
    once = replace(FUNCTIONS["echo"], name="once", retry=RetrySpec(max_attempts=1))
    async with serving(GatewayBench(tmp_path, functions={"once": once}, server={"auth": "token"})) as gateway:
        tokens = gateway.app.tokens
        assert tokens is not None
        dead = (await gateway.invoke({"reason": "handler_error"}, function="once", mode="async")).json()["id"]
        await gateway.http.get(f"/v1/invocations/{dead}?wait=5s")
        await shown.page.goto(address(gateway, "/ui/now"))
        await shown.find("#token").fill(tokens.admin)
        await shown.page.keyboard.press("Enter")
        await shown.says("#nav [data-v=dead] b", "1")
        await shown.find("#menu summary").click()
        await shown.says("#menuitems", re.compile(r"Tangram \d+\.\d+.*up ", re.DOTALL))
        await shown.find("#menuitems a", "Configuration").click()
        await shown.sees("textarea")
        await expect(shown.find("#menuitems")).to_be_hidden()
        await shown.page.evaluate("sessionStorage.clear()")
        await shown.page.goto(address(gateway, "/ui/now"))
        await shown.find("#token").fill(tokens.invoke)
        await shown.page.keyboard.press("Enter")
        await shown.sees(".verdict .badge")
        await shown.find("#menu summary").click()
        await shown.says("#menuitems", "Keys")
        assert "Configuration" not in await shown.find("#menuitems").inner_text(), "it is not for who may only invoke"


async def test_a_link_leads_to_a_line_of_a_log(tmp_path: Path, shown: ShownPage) -> None:
    many = "".join(f"line {number} of the log\n" for number in range(1, 2001))
    async with loaded(tmp_path, LoadedRollout()) as gateway:
        one = (await gateway.invoke({"log": many, "command": "x"}, function="shell")).json()["id"]
        await shown.page.goto(address(gateway, f"/ui/invocations/{one}#log:1042"))
        await shown.says(".line.found", "line 1042 of the log")
        link = shown.page.locator(".line.found .no")
        await expect(link).to_have_attribute("href", f"/ui/invocations/{one}#log:1042")
        assert await shown.page.locator(".line .when").count() == 0
        await shown.find("button", "times").click()
        await shown.says(".line .when", re.compile(r"\d\d:\d\d:\d\d"))


async def test_tab_completes_the_filter_as_far_as_there_is_one_way(tmp_path: Path, shown: ShownPage) -> None:
    async with serving(bench(tmp_path)) as gateway:
        await shown.page.goto(address(gateway, "/ui/invocations"))
        await shown.says("main", "No invocation passes this filter")
        line = shown.find("main .filter")
        for typed, completed in [("st", "state:"), ("state:f", "state:failed"), ("fn:ma", "fn:math_reward")]:
            await line.fill(typed)
            await line.press("Tab")
            await expect(line).to_have_value(completed)
        await line.fill("reason:o")
        await line.press("Tab")
        await expect(line).to_have_value("reason:out")
        await line.press("Tab")
        await expect(line).not_to_be_focused()
