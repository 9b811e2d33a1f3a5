"""What a gateway with four cores, a device and a quota tells of itself, as its stream has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tangram.cli.top.watched import StreamEvent, Watched
from tangram.types import QueueEntry, WaitCause

NOW_MS = 1_000_000_000_000


def running(number: int) -> str:
    return f"{number:011x}-{number:012x}"


SECTIONS: Mapping[str, Any] = {
    "run": 2,
    "wait": 1,
    "rate": [700, 690, 3, 2],
    "act": [5300, 50, 1900, 3800, 48000, 688],
    "failed": [["pytest_reward", "timeout", "swe", 3, NOW_MS - 5000]],
    "failed_15min": 3,
    "causes": [["units", "cpu:node-a", "2 of cpu on node-a", "swe", 1, NOW_MS - 12000]],
    "causes_left_out": 0,
    "pools": {
        "cpu:node-a": {
            "kind": "cpu",
            "node": "node-a",
            "total": 4,
            "free": 1,
            "cells": [[0, 2, running(1), "pytest_reward"], [2, 1, running(2), "shell"]],
        },
        "search": {
            "kind": "search",
            "node": None,
            "total": 40,
            "free": 30,
            "timed": True,
            "next": NOW_MS + 7000,
            "by_function": [["web_search", 10]],
        },
    },
    "nodes": {"node-a": [4, 64 * 2**30, 2**30, 3]},
    "tasks": {"swe": [1, 2, {"succeeded": 100, "timed_out": 3}, 2.0], "idle": [0, 0, {}, 1.0]},
    "steps": {
        "swe/6": [256, 0, 256, NOW_MS - 900_000, NOW_MS - 300_000, None],
        "swe/7": [256, 100, 120, NOW_MS - 300_000, None, NOW_MS + 130_000],
    },
    "long": [[running(1), "pytest_reward", "swe", "swe-1", {"cpu": 2}, "node-a", NOW_MS - 9000, NOW_MS - 1000]],
    "traj": {"living": 3},
    "fns": {"pytest_reward": ["ready", ""], "shell": ["ready", ""], "web_search": ["unavailable", "no image"]},
    "verdict": ["units", "1 of 1 waiting actions wait for cpu:node-a; 3 of 4 are in use"],
}
#: number, id, function, task, trajectory, start, queue, places
STARTS = [
    [1, running(1), 1, 4, "swe-1", NOW_MS - 9000, 1000, [[5, 0, 2]]],
    [2, running(2), 2, 4, "swe-2", NOW_MS - 400, 100, [[5, 2, 1]]],
    [3, running(3), 1, 4, "swe-3", NOW_MS - 30000, 100, [[5, 0, 2]]],
    [4, running(4), 2, 4, "swe-4", NOW_MS - 20000, 100, [[5, 3, 1]]],
]
NAMES = ["other", "pytest_reward", "shell", "web_search", "swe", "cpu:node-a"]
ENDS = [[3, 50, 8000, "timeout"], [4, 50, 1000, 0]]
WAITING = QueueEntry(
    id=f"{running(9)}.1",
    function="pytest_reward",
    task="swe",
    trajectory="swe-9",
    age_s=12.0,
    cost={"cpu": (2, 8)},
    waits_for="2 of cpu on node-a",
    cause=WaitCause(kind="units", text="2 of cpu on node-a"),
)


def hello(epoch: str = "aaaa0000", began_ms: int = NOW_MS - 12_000_000) -> StreamEvent:
    return StreamEvent(None, "hello", {"form": 1, "epoch": epoch, "version": "0", "now": NOW_MS, "began": began_ms})


def state() -> StreamEvent:
    bars = {"s": STARTS, "e": ENDS, "names": [0, NAMES], "left_out": 0}
    return StreamEvent("aaaa0000.7", "state", {"now": NOW_MS, "d": SECTIONS, "bars": bars})


def watched() -> Watched:
    found = Watched()
    found.take(hello())
    found.take(state())
    return found
