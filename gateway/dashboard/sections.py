"""Sections: what the page shows, as small values that are compared from one look to the next.

Instants are whole milliseconds since 1970 on the gateway's clock, so that what only grows older does not change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from gateway.dashboard.activity import RATE_S, Activity, Bar
from manager.core.state import CauseKind
from tangram.types import ActivityInfo, StepInfo

#: Verdict -> what is told of it; the first that holds is shown.
Verdict = Literal[
    "stopped", "draining", "lost", "unavailable", "quota", "memory", "devices", "units", "waiting", "ok", "idle"
]
#: Starts of one look that are told one by one.
BEGUN_MAX = 400
#: A cause -> the verdict where most wait for it.
_BOUND: Mapping[CauseKind, Verdict] = {"quota": "quota", "memory": "memory", "devices": "devices", "units": "units"}
#: Share of what waits from which on a shortage is the verdict, though more waits for something else.
_TELLING = 0.1
#: Seconds for which a machine that was lost is the first thing that is said.
LOST_SHOWN_S = 300.0
#: Ends in a minute below which they tell no rate.
_RATE_MIN = 10
#: JSON-able values: what the core shows has no types of its own.
Shown = Mapping[str, Any]


class Troubles(NamedTuple):
    """What is wrong with the gateway itself."""

    #: Why no work is taken now.
    stopped: str | None = None
    #: Machines that were lost of late.
    lost: Sequence[str] = ()


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
    seen: Shown,
    activity: Activity,
    wall_s: float,
    troubles: Troubles,
    functions: Mapping[str, tuple[str, str]],
    wanted: Collection[str],
) -> dict[str, object]:
    """Return everything that is shown of a glance at the core, by name. Functions cost the ``wanted`` kinds."""
    info = activity.info()
    return {
        "run": seen["running"],
        "wait": seen["waiting"],
        "rate": [info.accepted, info.ended, info.failed, info.cancelled],
        "act": _act(info),
        "failed": [[each.function, each.reason, each.task, each.count, _ms(each.last_at_s)] for each in info.failures],
        "failed_15min": info.failed_15min,
        "ended_15min": info.ended_15min,
        "cancelled_15min": info.cancelled_15min,
        "causes": [
            [each["kind"], each["pool"], each["text"], each["task"], each["count"], _ms(wall_s - each["oldest_s"])]
            for each in seen["causes"]
        ],
        "causes_left_out": seen["causes_left_out"],
        "pools": {name: _pool(pool, wall_s) for name, pool in seen["pools"].items() if _is_shown(pool, wanted)},
        "nodes": seen["nodes"],
        "tasks": seen["tasks"],
        "long": [_running(each, wall_s) for each in seen["longest"]],
        "traj": seen["trajectories"],
        "fns": functions,
        "verdict": verdict(seen, troubles, functions, info.ended),
    }


def _act(info: ActivityInfo) -> list[float | None]:
    act = info.act
    parts = (act.queue_s, act.overhead_s, act.execution_s, act.p50_s, act.p99_s)
    return [*(None if each is None else round(1000 * each) for each in parts), act.completed]


def _pool(pool: Shown, wall_s: float) -> dict[str, object]:
    found = {name: pool[name] for name in ("kind", "node", "total", "free")}
    found |= {name: pool[name] for name in ("cells", "by_function", "timed") if name in pool}
    if "next_return_s" in pool:
        next_s = pool["next_return_s"]
        found["next"] = None if next_s is None else _ms(wall_s + next_s, step_ms=100)
        found["period"] = round(1000 * pool["period_s"])
    if "devices" in pool:
        found["devices"] = [
            [each["memory_bytes"], each["used_bytes"], [[one["service"], one["bytes"]] for one in each["resident"]]]
            for each in pool["devices"]
        ]
        found["regions"] = pool["regions"]
        looked = pool["hits"] + pool["restores"]
        found["warm"] = round(100 * pool["hits"] / looked) if looked else None
    return found


def _is_shown(pool: Shown, wanted: Collection[str]) -> bool:
    """Devices of a processor are there for whoever has no other: they are nothing until a function wants some."""
    kinds = {kind for _, _, kind in pool.get("regions", {}).values()}
    return kinds != {"cpu"} or pool["kind"] in wanted


def _running(one: Shown, wall_s: float) -> list[object]:
    takes_s = one["takes_s"]
    return [
        one["id"],
        one["function"],
        one["task"],
        one["trajectory"],
        one["units"],
        one["node"],
        _ms(wall_s - one["running_s"], step_ms=100),
        None if takes_s is None else _ms(takes_s, step_ms=100),
    ]


def _ms(seconds: float, step_ms: int = 1000) -> int:
    """Return whole milliseconds, in steps: an instant that was computed twice must come out the same."""
    return round(seconds * 1000 / step_ms) * step_ms


def verdict(
    seen: Shown, troubles: Troubles, functions: Mapping[str, tuple[str, str]], ended: int
) -> tuple[Verdict, str]:
    """Return why what waits does wait, or that nothing does: the page's first line. ``ended`` have, in a minute."""
    waiting, running = seen["waiting"], seen["running"]
    if troubles.stopped is not None:
        return ("draining" if troubles.stopped == "draining" else "stopped"), troubles.stopped
    if troubles.lost:
        more = len(troubles.lost) - 1
        told = f"{troubles.lost[0]} was lost" + (f", and {more} more" if more else "")
        return "lost", f"{told}; {running} running, {waiting} waiting"
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
    most = max(counts, key=lambda each: counts[each], default="turn")
    # What waits for an earlier action of its trajectory waits for what that waits for.
    kind = max((each for each in counts if each in _BOUND), key=lambda each: counts[each], default=most)
    if kind != most and kind in _BOUND:
        # What waits for its turn stands behind what lacks the units.
        counts[kind] += counts.get("turn", 0)
        kind = kind if counts[kind] >= _TELLING * waiting else most
    bound = _BOUND.get(cast(CauseKind, kind), "waiting")
    what = {
        "trajectory": "for earlier actions of their trajectories",
        "task_cap": "under a cap of their task",
        "hold": "because the policy holds them back",
        "turn": "for their turn",
        "memory": "for memory",
        "node": "for a node that is open to them",
    }.get(kind, f"for {_unit(seen, pools.get(kind, ''))}")
    told = f"{counts.get(kind, 0)} of {waiting} waiting actions wait {what}{_use(seen, pools.get(kind, ''))}"
    return bound, f"{told}{_drain(waiting, ended)}"


def _unit(seen: Shown, pool: str) -> str:
    """Return what the units of a pool are called."""
    found = seen["pools"].get(pool, {})
    return "devices" if "devices" in found else "cores" if found.get("kind") == "cpu" else pool


def _use(seen: Shown, pool: str) -> str:
    """Return how many units are in use, of all nodes that have such."""
    found = seen["pools"].get(pool)
    if found is None:
        return ""
    alike = [each for each in seen["pools"].values() if each["kind"] == found["kind"]]
    total = sum(each["total"] for each in alike)
    used = total - sum(each["free"] for each in alike)
    return f"; {used} of {total} are {'used up' if 'timed' in found else 'busy'}"


def _drain(waiting: int, ended: int) -> str:
    """Return when what waits will have begun at the rate of the last minute; nothing where that says little."""
    if ended < _RATE_MIN:
        return ""
    seconds = RATE_S * waiting / ended
    if seconds < 1:
        return ""
    about = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return f". At the present rate they have begun in about {about}"


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
