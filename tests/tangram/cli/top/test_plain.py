"""``tangram top`` shows the chunk map: each device with what it computes, what it holds, and how often it swapped."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tangram.cli.printing.output import show
from tangram.cli.top.plain import models_view
from tangram.types import ModelsInfo
from tests.gateway.conftest import RunningGateway

DEVICE: dict[str, Any] = {
    "index": 0,
    "kind": "cpu",
    "name": "cpu",
    "alive": True,
    "pid": 7,
    "restarts": 0,
    "running": {"service": "/models/teacher:lm", "chunk": [0, 2]},
    "executions": 4,
    "swaps": 1,
    "hit_rate": 0.75,
    "arena_bytes": 64 * 2**20,
    "resident_bytes": 2**20,
    "used_bytes": None,
    "resident": [
        {"service": "/models/teacher:lm", "chunk": [0, 2], "bytes": 2**19},
        {"service": "/models/reward:score", "chunk": [0, 1], "bytes": 2**19},
    ],
}
IDLE = DEVICE | {"index": 1, "alive": False, "running": None, "resident": [], "resident_bytes": 0, "used_bytes": 2**30}
COUNTS = {"actions": 4, "executions": 4, "evictions": 0, "restore_s": 0.5, "restored_bytes": 2**20}
MODELS: dict[str, Any] = COUNTS | {
    "swaps": 1,
    "hit_rate": 0.75,
    "devices": [DEVICE, IDLE],
    "services": {},
    "host_images": {"count": 2, "bytes": 2**21, "bound_bytes": 2**30, "reads": 2},
}


def shown(models: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    show(*models_view(msgspec.convert(models, ModelsInfo)))
    return [line.lstrip("├└─ ").split() for line in capsys.readouterr().out.splitlines()]


def test_each_device_tells_what_it_computes_and_holds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(MODELS, capsys)
    held = ["teacher:lm@0-1", "reward:score@0"]
    assert ["0", "cpu", "alive", "teacher:lm@0-1", *held, "1Mi", "64Mi", "-", "4", "1", "75%"] in lines
    assert ["1", "cpu", "dead", "-", "-", "0B", "64Mi", "1Gi", "4", "1", "75%"] in lines
    assert ["host_images:", "2,", "2Mi", "of", "1Gi"] in lines
    assert ["hit_rate:", "0.75"] in lines


def test_before_the_first_model_there_is_nothing_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(COUNTS | {"swaps": 0, "hit_rate": 0.0, "devices": [], "services": {}, "host_images": {}}, capsys)
    assert not any("DEVICE" in line for line in lines)


async def test_a_terminal_shows_it_again_and_again_until_it_is_interrupted(gateway: RunningGateway) -> None:
    ours, theirs = pty.openpty()
    server = f"http://127.0.0.1:{gateway.app.http_port}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway", "top", "--interval", "20ms", "--server", server),
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "60"},
    )
    os.close(theirs)
    async with asyncio.timeout(60):
        seen = b""
        while seen.count(b"queue: 0 waiting") < 3:
            seen += await asyncio.to_thread(os.read, ours, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # how Linux says that nobody has the other end open any more
            while more := await asyncio.to_thread(os.read, ours, 65536):
                seen += more
        assert await process.wait() == 130
    os.close(ours)
    assert b"\x1b[?1049h" in seen and b"\x1b[?1049l" in seen, "the screen is as it was before"
    assert b"Traceback" not in seen
