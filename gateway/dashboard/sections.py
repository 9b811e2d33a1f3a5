"""Sections: what the page shows, as small values that are compared from one look to the next.

Instants are whole milliseconds since 1970 on the gateway's clock, so that what only grows older does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from gateway.dashboard.activity import Activity, Bar
from manager.core.causes import CauseKind
from tangram.types import ActivityInfo, StepInfo

#: Verdict -> what is told of it; the first that holds is shown.
Verdict = Literal["stopped", "draining", "unavailable", "quota", "memory", "devices", "units", "waiting", "ok", "idle"]
#: Starts of one look that are told one by one.
BEGUN_MAX = 400
#: A cause -> the verdict where most wait for it.
_BOUND: Mapping[CauseKind, Verdict] = {"quota": "quota", "memory": "memory", "devices": "devices", "units": "units"}
#: JSON-able values: what the core shows has no types of its own.
Shown = Mapping[str, Any]


class Names:
    """Functions, tasks and pools by number: what repeats in every bar is told once. Bounded: later ones share 0."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._numbers: dict[str, int] = {"other": 0}
        self.listed: list[str] = ["other"]

    def of(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            if len(self.listed) >= self._most:
                return 0
            number = self._numbers[name] = len(self.listed)
            self.listed.append(name)
        return number


def sections(
    seen: Shown, activity: Activity, wall_s: float, stopped: str | None, functions: Mapping[str, tuple[str, str]]
) -> dict[str, object]:
    """Return everything that is shown of a glance at the core, by name."""
    info = activity.info()
    return {
        "run": seen["running"],
        "wait": seen["waiting"],
        "rate": [info.accepted, info.ended, info.failed],
        "act": _act(info),
        "failed": [[each.function, each.reason, each.task, each.count, _ms(each.last_at_s)] for each in info.failures],
        "failed_15min": info.failed_15min,
        "causes": [
            [each["kind"], each["pool"], each["text"], each["task"], each["count"], _ms(wall_s - each["oldest_s"])]
            for each in seen["causes"]
        ],
        "causes_left_out": seen["causes_left_out"],
        "pools": {name: _pool(pool, wall_s) for name, pool in seen["pools"].items()},
        "nodes": seen["nodes"],
        "tasks": seen["tasks"],
        "long": [_running(each, wall_s) for each in seen["longest"]],
        "traj": seen["trajectories"],
        "fns": functions,
        "verdict": verdict(seen, stopped, functions),
    }


def _act(info: ActivityInfo) -> list[float | None]:
    act = info.act
    parts = (act.queue_s, act.overhead_s, act.execution_s, act.p50_s, act.p99_s)
    return [None if each is None else round(1000 * each) for each in parts]


def _pool(pool: Shown, wall_s: float) -> dict[str, object]:
    found = {name: pool[name] for name in ("kind", "node", "total", "free")}
    found |= {name: pool[name] for name in ("cells", "by_function", "timed") if name in pool}
    if "next_return_s" in pool:
        next_s = pool["next_return_s"]
        found["next"] = None if next_s is None else _ms(wall_s + next_s, step_ms=100)
    if "devices" in pool:
        found["devices"] = [
            [each["memory_bytes"], each["used_bytes"], [one["service"] for one in each["resident"]]]
            for each in pool["devices"]
        ]
    return found


def _running(one: Shown, wall_s: float) -> list[object]:
    ends_s = one["ends_in_s"]
    expected_s = None if ends_s is None else one["running_s"] + ends_s
    return [
        one["id"],
        one["function"],
        one["task"],
        one["trajectory"],
        one["units"],
        one["node"],
        _ms(wall_s - one["running_s"], step_ms=100),
        # Once it is over its time the estimate grows with it: then there is none.
        None if expected_s is None or ends_s == 0 else _ms(expected_s, step_ms=100),
    ]


def _ms(seconds: float, step_ms: int = 1000) -> int:
    """Return whole milliseconds, in steps: an instant that was computed twice must come out the same."""
    return round(seconds * 1000 / step_ms) * step_ms


def verdict(seen: Shown, stopped: str | None, functions: Mapping[str, tuple[str, str]]) -> tuple[Verdict, str]:
    """Return why what waits does wait, or that nothing does: the page's first line."""
    waiting, running = seen["waiting"], seen["running"]
    if stopped is not None:
        return ("draining" if stopped == "draining" else "stopped"), stopped
    missing = [name for name, (status, _) in functions.items() if status == "unavailable"]
    if missing:
        return "unavailable", f"{missing[0]}: {functions[missing[0]][1]}" if functions[missing[0]][1] else missing[0]
    if not waiting:
        return ("ok", f"{running} running, nothing waits") if running else ("idle", "nothing runs and nothing waits")
    counts: dict[str, int] = {}
    pools: dict[str, str] = {}
    for cause in seen["causes"]:
        counts[cause["kind"]] = counts.get(cause["kind"], 0) + cause["count"]
        pools.setdefault(cause["kind"], cause["pool"])
    kind = max(counts, key=lambda each: counts[each], default="turn")
    bound = _BOUND.get(cast(CauseKind, kind), "waiting")
    what = {
        "trajectory": "for earlier actions of their trajectories",
        "task_cap": "under a cap of their task",
        "hold": "because the policy holds them back",
        "turn": "for their turn",
        "memory": "for memory",
        "node": "for a node that is open to them",
    }.get(kind, f"for {pools.get(kind, '')}")
    return bound, f"{counts.get(kind, 0)} of {waiting} waiting actions wait {what}{_use(seen, pools.get(kind, ''))}"


def _use(seen: Shown, pool: str) -> str:
    found = seen["pools"].get(pool)
    return "" if found is None else f"; {found['total'] - found['free']} of {found['total']} are in use"


def step_rows(steps: Sequence[StepInfo], wall_s: float) -> dict[str, object]:
    """Return steps as ``TASK/STEP: [expected, living, ended, opened_ms, ended_ms, expected_end_ms]``, null for none."""
    return {
        f"{each.task}/{each.step}": [
            each.expected,
            each.living,
            each.ended,
            round(1000 * each.opened_at.timestamp()),
            None if each.ended_at is None else round(1000 * each.ended_at.timestamp()),
            None if each.ends_in_s is None else _ms(wall_s + each.ends_in_s),
        ]
        for each in steps
    }


def begun_rows(bars: Sequence[Bar], names: Names) -> list[list[object]]:
    """Return the starts as ``[number, id, function, task, trajectory, start_ms, queue_ms, [[pool, first, count]]]``."""
    return [
        [
            bar.number,
            bar.id,
            names.of(bar.function),
            names.of(bar.task),
            bar.trajectory or 0,
            round(bar.start_s * 1000),
            round(bar.queue_s * 1000),
            [[names.of(pool), first, count] for pool, first, count in bar.places],
        ]
        for bar in bars
    ]


def ended_rows(bars: Sequence[Bar]) -> list[list[object]]:
    """Return the ends as ``[number, overhead_ms, execution_ms, reason or 0]``."""
    return [[bar.number, round(bar.overhead_s * 1000), round(bar.execution_s * 1000), bar.reason or 0] for bar in bars]
