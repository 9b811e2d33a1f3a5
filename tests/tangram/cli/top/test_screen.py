"""The screen on a gateway: what runs is shown, its log is followed, it is cancelled, and the size may change."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from textual.pilot import Pilot

from tangram import AsyncClient
from tangram.cli.top.screen import ScreenLines, TopScreen
from tests.gateway.conftest import RunningGateway

#: Nothing here takes so long unless it is broken.
PATIENCE_S = 60.0


@asynccontextmanager
async def screen(gateway: RunningGateway) -> AsyncIterator[Pilot[str | None]]:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}", token="") as client:
        app = TopScreen(client, "", ascii_only=True)
        async with app.run_test(size=(80, 24)) as pilot:
            yield pilot


def text(pilot: Pilot[str | None]) -> str:
    lines = pilot.app.query_one(ScreenLines)
    return "\n".join(lines.render_line(y).text for y in range(lines.size.height))


async def until(pilot: Pilot[str | None], condition: Callable[[str], bool]) -> str:
    """Return the screen once the condition holds of it."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(text(pilot)):
            await pilot.pause(0.02)
    return text(pilot)


@pytest.mark.slow
async def test_an_action_is_seen_its_log_followed_and_itself_cancelled(gateway: RunningGateway) -> None:
    calling = asyncio.create_task(gateway.invoke({"held": True, "log": "it has begun\n"}))
    async with screen(gateway) as pilot:
        seen = await until(pilot, lambda text: "R  " in text and "echo" in text)
        assert "tangram 127.0.0.1" in seen and "live" in seen
        await pilot.press("enter")
        await until(pilot, lambda text: "it has begun" in text)
        await pilot.resize_terminal(160, 50)
        wide = await until(pilot, lambda text: "LAST " in text)
        assert "| it has begun" in wide
        await pilot.press("c")
        await until(pilot, lambda text: "y/n" in text)
        await pilot.press("y")
        answer = await asyncio.wait_for(calling, PATIENCE_S)
        assert "cancelled" in answer.text
        await until(pilot, lambda text: "nothing here now" in text)
        await pilot.press("q")


@pytest.mark.slow
async def test_a_gateway_that_is_not_there_is_waited_for() -> None:
    async with AsyncClient("http://127.0.0.1:9", token="") as client:
        app = TopScreen(client, "", ascii_only=True)
        async with app.run_test(size=(80, 24)) as pilot:
            lost = await until(pilot, lambda text: "lost, again in" in text)
            assert "attempt" in lost, "and why"


@pytest.mark.slow
async def test_a_terminal_is_as_before_when_the_screen_is_left(gateway: RunningGateway) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway", "top", "--ascii", "--server", f"http://127.0.0.1:{gateway.app.http_port}"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    async with asyncio.timeout(PATIENCE_S):
        while b"IDLE" not in seen:
            seen += await asyncio.to_thread(os.read, ours, 65536)
        os.write(ours, b"q")
        with suppress(OSError):  # how Linux says that nobody has the other end open any more
            while more := await asyncio.to_thread(os.read, ours, 65536):
                seen += more
        assert await process.wait() == 0
    os.close(ours)
    assert b"\x1b[?1049h" in seen and b"\x1b[?1049l" in seen
    assert b"Traceback" not in seen
