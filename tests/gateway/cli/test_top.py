"""``tangram top`` shows the chunk map: each device with what it computes, what it holds, and how often it swapped."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.top import _print

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
MODELS: dict[str, Any] = {
    "swaps": 1,
    "hit_rate": 0.75,
    "devices": [DEVICE, IDLE],
    "services": {},
    "host_images": {"count": 2, "bytes": 2**21, "bound_bytes": 2**30, "reads": 2},
}


def shown(models: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    _print({"models": models}, 0, [])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_each_device_tells_what_it_computes_and_holds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(MODELS, capsys)
    held = ["teacher:lm@0-1", "reward:score@0"]
    assert ["0", "cpu", "alive", "teacher:lm@0-1", *held, "1Mi", "64Mi", "-", "4", "1", "75%"] in lines
    assert ["1", "cpu", "dead", "-", "-", "0B", "64Mi", "1Gi", "4", "1", "75%"] in lines
    assert ["host_images:", "2,", "2Mi", "of", "1Gi"] in lines
    assert ["hit_rate:", "0.75"] in lines


def test_before_the_first_model_there_is_nothing_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown({"swaps": 0, "devices": [], "services": {}, "host_images": {}}, capsys)
    assert not any("DEVICE" in line for line in lines)
