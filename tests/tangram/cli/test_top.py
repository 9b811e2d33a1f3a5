"""`tangram top` and `tangram queue`: no line is too wide, keys do what they say, the terminal is left as it was."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.cli.output import cells_of
from tangram.cli.top import TopState, TopView, sections
from tangram.types import ActivityInfo, QueueEntry, ResourcesInfo, TaskInfo, WaitCause
from tests.gateway.conftest import RunningGateway
from tests.tangram.cli.conftest import Served, id_of, invocation

PATIENCE_S = 60.0
NOW = datetime.now(UTC)


def entry(number: int, why: str, age_s: float) -> QueueEntry:
    return QueueEntry(
        id=f"{id_of(number)}.1",
        function="pytest_reward",
        task="swe",
        trajectory=f"swe-{number}",
        age_s=age_s,
        cost={"cpu": (2, 8)},
        waits_for=why,
        cause=WaitCause(kind="units", text=why),
    )


def placed(service: str, start: int, size: int) -> dict[str, Any]:
    return {"service": service, "chunk": [start, size], "bytes": 2**19}


HELD = [placed("/models/teacher:lm", 0, 2), placed("/models/reward:score", 0, 1)]
DEVICE: dict[str, Any] = {
    "index": 0,
    "kind": "cuda",
    "name": "cuda",
    "alive": True,
    "pid": 7,
    "restarts": 0,
    "running": HELD[0],
    "executions": 4,
    "swaps": 1,
    "hit_rate": 0.75,
    "arena_bytes": 64 * 2**20,
    "resident_bytes": 2**20,
    "used_bytes": None,
    "resident": HELD,
}
IDLE = DEVICE | {"index": 1, "alive": False, "running": None, "resident": [], "resident_bytes": 0, "used_bytes": 2**30}
HOLDER = {"function": "pytest_reward", "task": "swe", "trajectory": "swe-1", "running_s": 9.0}
POOL = {"policy": "adaptive", "utilisation": 0.5, "arrivals_per_s": 1.0}
RESOURCES: dict[str, Any] = {
    "nodes": [
        {
            "node": "node-a",
            "cores": 4,
            "devices": 2,
            "memory_bytes": 64 * 2**30,
            "held_bytes": 2**30,
            "trajectories": 3,
        }
    ],
    "pools": {
        "cpu:node-a": POOL
        | {
            "kind": "cpu",
            "node": "node-a",
            "total": 4,
            "free": 1,
            "held": {id_of(1): 2, id_of(2): 1},
            "holders": {id_of(1): HOLDER, id_of(2): HOLDER | {"function": "shell"}},
        },
        "search": POOL
        | {"kind": "search", "node": "", "total": 40, "free": 30, "held": {}, "period_s": 60.0, "next_return_s": 7.0},
    },
    "sandboxes": {
        "kind": "process",
        "engine": "",
        "isolation": "",
        "runtime": "",
        "runtimes": [],
        "limits": {},
        "weakenings": [],
    },
    "models": {
        "actions": 4,
        "executions": 4,
        "swaps": 1,
        "hit_rate": 0.75,
        "evictions": 0,
        "restore_s": 0.5,
        "restored_bytes": 2**20,
        "devices": [DEVICE, IDLE],
        "services": {},
        "host_images": {},
    },
}
STEP = {
    "task": "swe",
    "step": 7,
    "expected": 256,
    "living": 100,
    "ended": 120,
    "opened_at": NOW,
    "ended_at": None,
    "ends_in_s": 130.0,
}
TASK: dict[str, Any] = {
    "task": "swe",
    "weight": 1.0,
    "max_queued": None,
    "caps": {},
    "queued": 3,
    "running": 2,
    "core_s": 100.0,
    "gpu_s": 0.0,
    "quota_units": {},
    "slot_s": {},
    "settled": {"succeeded": 100, "timed_out": 3, "cancelled": 1},
    "steps": [STEP],
}
ACTIVITY: dict[str, Any] = {
    "started_at_s": 0.0,
    "uptime_s": 12_000.0,
    "accepted": 700,
    "ended": 690,
    "failed": 3,
    "cancelled": 2,
    "act": {
        "completed": 688,
        "queue_s": 0.05,
        "overhead_s": 0.005,
        "execution_s": 1.9,
        "p50_s": 3.8,
        "p99_s": 48.0,
    },
    "failures": [],
    "failed_15min": 3,
    "ended_15min": 900,
    "cancelled_15min": 2,
}
STATE = TopState(
    resources=msgspec.convert(RESOURCES, ResourcesInfo),
    tasks=[msgspec.convert(TASK, TaskInfo)],
    queue=[entry(8, "2 of cpu on node-a", 12.0), entry(9, "2 of cpu on node-a", 4.0), entry(10, "memory", 1.0)],
    functions=[],
    activity=msgspec.convert(ACTIVITY, ActivityInfo),
    running=[invocation(2, "shell"), invocation(1, "pytest_reward")],
    failed=[invocation(3, "pytest_reward", state="timed_out", reason="timeout")],
)


def words(lines: Sequence[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def test_80_columns_show_who_holds_what_what_waits_for_what_and_what_each_device_does() -> None:
    lines = list(sections(STATE, 80))
    assert max(map(cells_of, lines)) <= 80
    assert lines[0] == "2 running, 3 waiting, 2 of them for 2 of cpu on node-a"
    assert "690 ended, 3 failed; ACT 3.8s p50, 48s p99" in lines[1]
    found = words(lines)
    assert ["cpu:node-a", "[#########...]", "3/4", "pytest_reward", "2,", "shell", "1"] in found
    assert ["search", "[###.........]", "10/40", "more", "in", "7s"] in found
    assert ["node-a", "4", "2", "1Gi", "of", "64Gi", "3"] in found
    assert any(row[:4] == ["0", "cuda", "alive", "teacher:lm@0-1"] for row in found)
    assert any(row[:3] == ["1", "cuda", "dead"] for row in found)
    assert any(row[:7] == ["swe", "3", "2", "104", "3", "7:", "120/256"] and "2m10s" in row for row in found)
    assert ["2", "12s", "swe", "2", "of", "cpu", "on", "node-a"] in found
    assert any(row[1:4] == ["pytest_reward", "swe", "swe-1"] for row in found)


def screen(view: TopView, width: int = 80, height: int = 24) -> list[str]:
    drawn = view.draw(STATE, "http://gw1:8080", "live", width, height)
    return [click.unstyle(line) for line in drawn]


def view_of(**given: Any) -> TopView:
    return TopView(cancel=lambda id: None, **given)


@given(st.integers(1, 200), st.integers(1, 80), st.sampled_from(["running", "waiting", "failed", "tasks", "nodes"]))
def test_no_size_is_too_small_and_no_line_too_long(width: int, height: int, pane: str) -> None:
    for view in (view_of(pane=pane), view_of(pane=pane, helping=True)):
        lines = screen(view, width, height)
        assert len(lines) == height
        assert all(cells_of(line) <= width for line in lines)


def press(view: TopView, *keys: str) -> bool:
    pressed = [view.press(key, STATE) for key in keys]
    return all(pressed)


def test_the_cursor_stays_on_its_row_when_others_come_and_go() -> None:
    view = view_of()
    press(view, "j")
    assert view.selected == id_of(1)
    later = STATE._replace(running=[invocation(5, "echo"), *STATE.running])
    assert next(line for line in view.draw(later, "http://x", "live", 80, 24) if ">" in line).find("pytest_reward") > 0
    press(view, "down", "down")
    assert view.selected == id_of(1), "there is none below"
    press(view, "up")
    assert view.selected == id_of(2)


def test_lists_are_chosen_by_number_and_filtered_by_column_or_text() -> None:
    view = view_of()
    press(view, "2")
    assert [key for key, _ in view.rows(STATE)] == [id_of(8), id_of(9), id_of(10)]
    press(view, "/", *"memory", "enter")
    assert [key for key, _ in view.rows(STATE)] == [id_of(10)]
    press(view, "esc", "1", "/", *"function:shell")
    assert [key for key, _ in view.rows(STATE)] == [id_of(2)], "it holds while it is typed"
    press(view, *["back"] * len("shell"), *"none", "enter")
    assert "nothing passes the filter" in "\n".join(screen(view))
    press(view, "esc", "3")
    assert [key for key, _ in view.rows(STATE)] == [id_of(3)]
    press(view, "6")
    assert [key for key, _ in view.rows(STATE)] == ["0 cuda", "1 cuda"]


def test_nothing_is_cancelled_without_a_word() -> None:
    cancelled: list[str] = []
    view = TopView(cancel=cancelled.append)
    press(view, "c", "n", "3", "c")
    assert not view.prompt and not cancelled, "that one has ended"
    press(view, "2", "j", "c")
    assert "cancel 9? y/n" in screen(view)[-1]
    press(view, "y")
    assert cancelled == [id_of(9)]


def test_enter_shows_a_log_escape_closes_it_and_q_leaves() -> None:
    view = view_of()
    press(view, "enter")
    assert view.log is not None and view.log.id == id_of(2)
    view.log.lines.append("two \x1b[31mred")
    assert any("two \\x1b[31mred" in line for line in screen(view))
    press(view, "esc", "4", "enter")
    assert not any("log of" in line for line in screen(view)), "a task has no log"
    assert press(view, "?", "q"), "any key leaves the help"
    assert not press(view, "q")


def test_a_hostile_name_moves_no_cursor() -> None:
    odd = "\x1b]0;title\x07"
    state = STATE._replace(running=[invocation(1, odd)], queue=[entry(2, odd, 1.0)])
    view = view_of()
    drawn = "".join(click.unstyle(line) for line in view.draw(state, "http://x", "live", 120, 40))
    assert "\x1b" not in drawn + "".join(sections(state, 80)) and "\x07" not in drawn


async def test_what_waits_is_told_with_its_cause(served: Served, gateway: RunningGateway) -> None:
    status, out, err = await served("queue")
    assert (status, out, err) == (0, "", "nothing waits\n")
    call = ("invoke", "--async", "shell", '{"command": "sleep 60"}', "--trajectory", "one")
    ids = [(await served(*call))[1].strip() for _ in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            told = json.loads((await served("queue", "--json"))[1])
            if told["waiting"] == 2:
                break
    assert sum(each["count"] for each in told["causes"]) == 2 and len(told["queue"]) == 2
    _, out, err = await served("queue", "-n", "1")
    assert out.splitlines()[0].split() == ["WAITING", "OLDEST", "TASKS", "FOR"]
    assert told["queue"][0]["id"].partition(".")[0] in out and "1 more wait" in err
    await served("cancel", *ids)


async def on_terminal(*arguments: str) -> tuple[asyncio.subprocess.Process, int]:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway", "top", *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"},
        start_new_session=True,
    )
    os.close(theirs)
    return process, ours


async def seen_until(ours: int, *wanted: bytes) -> bytes:
    """Return what the terminal shows until all of it has been there, or to its end."""
    seen = b""
    with suppress(OSError):  # how Linux says that nobody has the other end open any more
        while not wanted or not all(each in seen for each in wanted):
            seen += await asyncio.to_thread(os.read, ours, 65536)
    return seen


@pytest.mark.slow
async def test_an_action_is_seen_its_log_followed_and_itself_cancelled(gateway: RunningGateway) -> None:
    calling = asyncio.create_task(gateway.invoke({"held": True, "log": "it has begun\n"}))
    process, ours = await on_terminal("--interval", "50ms", "--server", f"http://127.0.0.1:{gateway.app.http_port}")
    async with asyncio.timeout(PATIENCE_S):
        seen = await seen_until(ours, b"> ", b"echo", b"live")
        assert b"\x1b[?1049h" in seen
        os.write(ours, b"\r")
        await seen_until(ours, b"it has begun")
        os.write(ours, b"c")
        await seen_until(ours, b"y/n")
        os.write(ours, b"y")
        assert "cancelled" in (await calling).text
        await seen_until(ours, b"nothing here now")
        os.write(ours, b"q")
        assert b"\x1b[?1049l" in await seen_until(ours), "the terminal is as it was before"
        assert await process.wait() == 0
    os.close(ours)


@pytest.mark.slow
async def test_a_signal_leaves_the_terminal_as_it_was(gateway: RunningGateway) -> None:
    process, ours = await on_terminal("--server", f"http://127.0.0.1:{gateway.app.http_port}")
    async with asyncio.timeout(PATIENCE_S):
        await seen_until(ours, b"live")
        process.send_signal(signal.SIGINT)
        seen = await seen_until(ours)
        assert await process.wait() == 130
    os.close(ours)
    assert b"\x1b[?1049l" in seen and b"Traceback" not in seen
