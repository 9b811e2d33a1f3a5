"""What the page costs: the gateway with and without viewers, the first view, and frames live and from a record.

The load is 10,000 invocations a minute of work that only waits, on 16 cores that are not there.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx

from bench.report import BenchReport, median, parser, play
from bench.serving import process, process_cpu_s

RATE_S = 10_000 / 60
WIDE: Any = {"width": 1440, "height": 900}
GATEWAY = """
import asyncio, json, sys
from pathlib import Path
import uvloop
from dataclasses import replace
from gateway.invocations.logs import configure
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.gateway.conftest import serving
from tests.gateway.dashboard.load import bench
configure("warning")
def step(execution):
    return ScriptStep(duration_s=float(execution.call.input.get("s", 0.2)), log="done")
async def main():
    async with serving(bench(Path(sys.argv[1])), runtime=ScriptedRuntime(step)) as running:
        print(json.dumps({"http": running.app.http_port}), flush=True)
        await asyncio.Event().wait()
uvloop.run(main())
"""


async def load(http: httpx.AsyncClient) -> None:
    """Send batches at a constant rate, whatever their answers, for ever."""
    names, number = ("math_reward", "judge", "shell"), 0
    began_s = time.monotonic()
    while True:
        due = int((time.monotonic() - began_s) * RATE_S) - number
        if due > 0:
            calls = [
                {"function": names[(number + each) % 3], "input": {"s": 0.05, "command": "x"}, "task": "swe-coding"}
                for each in range(due)
            ]
            number += due
            with suppress(httpx.HTTPError):
                await http.post("/v1/invocations:batch", json={"calls": calls})
        await asyncio.sleep(0.1)


async def view(base: str, taken: list[bytes]) -> None:
    """Watch as a page does, and keep what was sent, as it came over the wire."""
    async with (
        httpx.AsyncClient(base_url=base, timeout=None) as http,
        http.stream("GET", "/v1/watch?bars=true") as response,
    ):
        async for data in response.aiter_raw():
            taken.append(data)  # noqa: PERF401 (it is read meanwhile)


async def windows(pid: int, base: str, seconds: float, rounds: int) -> tuple[dict[int, list[float]], float]:
    """Return the gateway's share of a core with so many viewers, and the bytes a second that each was sent."""
    shares: dict[int, list[float]] = {0: [], 2: [], 10: []}
    rates = []
    for _ in range(rounds):
        for viewers, found in shares.items():
            taken: list[list[bytes]] = [[] for _ in range(viewers)]
            tasks = [asyncio.create_task(view(base, each)) for each in taken]
            await asyncio.sleep(1.5)
            sent = sum(len(data) for each in taken for data in each)
            used_s, began_s = process_cpu_s(pid), time.monotonic()
            await asyncio.sleep(seconds)
            passed_s = time.monotonic() - began_s
            found.append((process_cpu_s(pid) - used_s) / passed_s)
            if viewers:
                rates.append((sum(len(data) for each in taken for data in each) - sent) / viewers / passed_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return shares, median(rates)


async def recorded(base: str, seconds: float) -> list[str]:
    """Return the stream of some seconds, event by event, as text."""
    text: list[str] = []
    async with (
        httpx.AsyncClient(base_url=base, timeout=None) as http,
        http.stream("GET", "/v1/watch?bars=true") as response,
    ):
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for piece in response.aiter_text():
                    text.append(piece)  # noqa: PERF401 (kept when the time is over)
    return [each for each in "".join(text).split("\n\n") if each.startswith("id: ")]


FRAMES = """async (seconds) => {
  const t = window.tangramTimeline, first = t.frames, began = performance.now();
  t.slowest = [];
  await new Promise((done) => setTimeout(done, 1000 * seconds));
  const spent = [...t.slowest].sort((a, b) => a - b), passed = performance.now() - began;
  return [(t.frames - first) * 1000 / passed, spent[Math.floor(0.95 * (spent.length - 1))], t.hits.length];
}"""
FIRST = """new MutationObserver((_, observer) => {
  if (!document.querySelector('.verdict .badge')) return;
  observer.disconnect();
  requestAnimationFrame(() => { window.firstView = performance.now(); });
}).observe(document, {childList: true, subtree: true});"""
REPLAY = """async (events) => {
  const read = (text) => JSON.parse(text.slice(text.indexOf('data: ') + 6));
  const shift = Date.now() - read(events[0]).now;
  window.replayed = 0;
  events.forEach((text, at) => setTimeout(() => {
    const told = read(text);
    told.now += shift;
    for (const row of told.bars?.s || []) { row[0] += 1e6; row[5] += shift; }
    for (const row of told.bars?.e || []) row[0] += 1e6;
    window.tangramHandle(text.split('event: ')[1].split('\\n')[0], told);
    window.replayed += 1;
  }, 500 * at));
}"""


async def first_view(browser: Any, base: str) -> tuple[float, float]:
    """Return the milliseconds from the start of a navigation to the frame that shows the verdict, and those until
    the driver of the browser, whose own script has to run in the page too, has seen it.
    """
    page = await browser.new_page(viewport=WIDE)
    await page.add_init_script(FIRST)
    began_s = time.monotonic()
    await page.goto(f"{base}/ui/now")
    await page.locator(".verdict .badge").wait_for()
    driven_ms = 1000 * (time.monotonic() - began_s)
    await page.wait_for_function("window.firstView > 0")
    shown_ms = await page.evaluate("window.firstView")
    await page.close()
    return shown_ms, driven_ms


async def frames(report: BenchReport, base: str, loading: asyncio.Task[None], chromium: str, seconds: float) -> None:
    """Measure the first view, frames live, and frames from a recorded stream with no other load."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        firsts, driven = zip(*[await first_view(browser, base) for _ in range(5)], strict=True)
        report.check("first_view_ms", median(firsts), 500, "lower")
        report.figure("first_view_as_driven_ms", round(median(driven)))
        page: Any = await browser.new_page(viewport=WIDE)
        await page.goto(f"{base}/ui/timeline?span=60")
        await page.locator("canvas.tl").wait_for()
        await asyncio.sleep(seconds)
        rate, p95_ms, bars = await page.evaluate(FRAMES, seconds)
        report.check("frame_ms_p95", p95_ms, 33, "lower")
        report.figure("live_frames_per_s", round(rate, 1))
        report.figure("live_bars", bars)
        events = await recorded(base, 2 * seconds)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await asyncio.sleep(2.0)
        await page.evaluate(REPLAY, events)
        rate, p95_ms, bars = await page.evaluate(FRAMES, seconds)
        report.figure("replayed_events", await page.evaluate("window.replayed"))
        report.check("drawn_frames_per_s", rate, 30, "higher")
        report.figure("replayed_bars", bars)
        report.figure("replayed_frame_ms_p95", round(p95_ms, 2))
        await browser.close()


async def measure(report: BenchReport, quick: bool) -> None:
    seconds, rounds = (4.0, 2) if quick else (10.0, 3)
    with tempfile.TemporaryDirectory() as directory:
        async with process(GATEWAY, directory, ending=signal.SIGKILL) as server:
            base = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=base, timeout=60.0) as http:
                loading = asyncio.create_task(load(http))
                await asyncio.sleep(4.0)
                shares, rate = await windows(server.pid, base, seconds, rounds)
                none, two, ten = (median(found) for found in shares.values())
                cores = {str(viewers): round(median(each), 3) for viewers, each in shares.items()}
                report.figure("cores_used_by_viewers", dict(cores))
                report.check("gateway_cpu_share_added", two / none - 1, 0.05, "lower")
                report.figure("cores_added_by_ten_over_two", round(ten - two, 4))
                report.figure("bytes_per_s_per_viewer", round(rate))
                report.figure("ended_per_min", (await http.get("/v1/activity")).json()["ended"])
                report.keep()
                chromium = shutil.which("chromium")
                if chromium is None:
                    report.note("no chromium: frames and the first view were not measured")
                    loading.cancel()
                else:
                    await frames(report, base, loading, chromium, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("dashboard", parts=True).parse_args(argv)
    report = BenchReport("dashboard")
    return play(report, options, {"page": lambda: measure(report, options.quick)})


if __name__ == "__main__":
    sys.exit(main())
