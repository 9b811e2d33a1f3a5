"""The judge of the kills: one check for each promise, each a pure function of the history.

A check names what broke it; the empty list is a promise that was held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import pairwise

from bench.kills.history import KilledCall, KillHistory, Record

LIMIT, PERIOD_S = 4, 2.0
#: Calls travel to the upstream for so long at most on a busy machine: windows are looked at that much shorter.
TRAVEL_S = 0.5
#: Times are told in milliseconds, and taken one after the other.
SUM_MS, WALL_MS = 1.0, 100.0
REWARD = 0.5
#: What a command of a trajectory notes at its end, behind its name; and the trajectory whose sandbox is killed.
OVER, FRAIL = "-over", "frail"


LOSSES = ("environment_lost", "node_lost", "gateway_restart")


def accepted_lost(history: KillHistory) -> list[str]:
    """What was accepted durably has a record, and comes to an end."""
    return [each.name for each in history.calls if each.durable and each.ids and not _ended(each.last)]


def lost_for_nothing(history: KillHistory) -> list[str]:
    """What outlives its gateway and its node's daemon in a sandbox is not lost with them."""
    return [
        f"{each.name}: {each.last['reason']} {each.last['message']}"
        for each in history.calls
        if each.trajectory not in (None, FRAIL) and each.last and _lost(each)
    ]


def run_twice_non_idempotent(history: KillHistory) -> list[str]:
    """What may not be repeated is done once at most, however it was asked for."""
    return [each.name for each in history.calls if not each.idempotent and history.done[each.name] > 1]


def done_not_told(history: KillHistory) -> list[str]:
    """What is told as succeeded was done."""
    counted = [
        each
        for each in history.calls
        if each.function in ("once", "again", "metered") or each.trajectory not in (None, FRAIL)
    ]
    return [each.name for each in counted if _state(each) == "succeeded" and not history.done[each.name]]


def ended_twice(history: KillHistory) -> list[str]:
    """No two callers are told different ends of one invocation."""
    return [
        f"{each.name}: {sorted(ends)}"
        for each in history.calls
        if each.durable and len(ends := {_end(told) for told in [*each.told, *_last(each)]}) > 1
    ]


def keyed_run_twice(history: KillHistory) -> list[str]:
    """A key stands for one invocation, however often it is sent."""
    return [each.name for each in history.calls if each.keyed and len(each.ids) > 1]


def callback_told_twice_differently(history: KillHistory) -> list[str]:
    """All tellings of a callback, and the record, say the same."""
    found = []
    for call in history.calls:
        tellings = [told for each in call.ids for told in history.callbacks[each]]
        if tellings and len(ends := {_end(told) for told in [*tellings, *_last(call)]}) > 1:
            found.append(f"{call.name}: {sorted(ends)}")
    return found


def callback_untold(history: KillHistory) -> list[str]:
    """Whoever asked for a callback is called at least once."""
    asked = [each for each in history.calls if each.calls_back and _ended(each.last)]
    return [each.name for each in asked if not any(history.callbacks[one] for one in each.ids)]


def logs_differ(history: KillHistory) -> list[str]:
    """Every reading of a log says the same at the same offset, without a hole, and what its result says."""
    return [f"{each.name}: {why}" for each in history.calls if each.logs and (why := _log(each))]


def times_do_not_sum(history: KillHistory) -> list[str]:
    """ACT is queue + overhead + execution, which is the time from acceptance to the end, over tries and restarts."""
    return [f"{each.name}: {why}" for each in history.calls if _ended(each.last) and (why := _times(each.last))]


def quota_exceeded_windows(history: KillHistory) -> list[str]:
    """No window of the period sees more arrivals than the limit, restarts or not."""
    return [f"{LIMIT + 1} within {span_s:.3f} s" for span_s in spans_s(history) if span_s < PERIOD_S - TRAVEL_S]


def spans_s(history: KillHistory) -> list[float]:
    """Seconds between each metered arrival and the one that is as many later as the limit."""
    at = sorted(history.arrivals)
    return [last - first for first, last in zip(at, at[LIMIT:], strict=False)]


def trajectory_out_of_order(history: KillHistory) -> list[str]:
    """A trajectory's actions run in the order in which they were accepted, and its files survive."""
    found = []
    for name, seen in history.files.items():
        asked = [each for each in history.calls if each.trajectory == name]
        if seen is None:
            found += [] if name == FRAIL else [f"{name}: its sandbox is gone"]
            continue
        found += [
            f"{name}: {line} after {before}"
            for before, line in pairwise(["", *seen])
            if line.endswith(OVER) and line != before + OVER
        ]
        order = {each.name: place for place, each in enumerate(asked)}
        places = [order[line] for line in seen if line in order]
        if places != sorted(places):
            found.append(f"{name}: {seen}")
    return found


def reward_wrong(history: KillHistory) -> list[str]:
    """A reward is what the tests said, or there is none."""
    suites = [each for each in history.calls if each.function == "suite" and _state(each) == "succeeded"]
    return [f"{each.name}: {each.last['result']}" for each in suites if each.last and _reward(each.last) != REWARD]


def untyped_ends(history: KillHistory) -> list[str]:
    """What did not succeed says why, and it is no fault of the gateway's own."""
    return [
        f"{each.name}: {each.last['state']} {each.last['reason']} {each.last['message']}"
        for each in history.calls
        if each.last and _ended(each.last) and _state(each) != "succeeded" and each.last["reason"] in (None, "internal")
    ]


def refused_wrongly(history: KillHistory) -> list[str]:
    """What a restarting gateway cannot take is 429 or 503 with Retry-After, and nothing else."""
    return [*history.unhelpful, *history.refused]


def unbalanced(history: KillHistory) -> list[str]:
    """Whatever the gateway says of itself, what it accepted is queued, running or ended."""
    return history.unbalanced


def bad_exits(history: KillHistory) -> list[str]:
    """A gateway that is told to stop ends well."""
    return [str(status) for status in history.exits if status]


def leftovers(history: KillHistory) -> list[str]:
    """After its end nothing of it is left: processes, control groups, sockets, files, containers."""
    return [f"{name}: {count} more" for name, count in history.left.items() if count > 0]


def ended_otherwise(history: KillHistory) -> list[str]:
    """What is cancelled, or has no more time, ends as that, and its command does so too."""
    cut = [each for each in history.calls if each.cut and _ended(each.last)]
    over = {line for seen in history.files.values() for line in seen or ()}
    wrong = [each for each in cut if _state(each) != each.cut and not (each.trajectory == FRAIL and _lost(each))]
    return [
        *(f"{each.name}: {_state(each)}, {each.cut} was asked for" for each in wrong),
        *(f"{each.name}: {_state(each)}, and went on" for each in cut if each.name + OVER in over),
    ]


Promise = Callable[[KillHistory], list[str]]
#: What each kind of broken promise is counted from.
KINDS: Mapping[str, tuple[Promise, ...]] = {
    "lost": (accepted_lost, lost_for_nothing, callback_untold),
    "doubled": (run_twice_non_idempotent, keyed_run_twice, quota_exceeded_windows),
    "order_broken": (trajectory_out_of_order,),
    "told_wrong": (
        done_not_told,
        ended_twice,
        ended_otherwise,
        callback_told_twice_differently,
        logs_differ,
        times_do_not_sum,
        reward_wrong,
        untyped_ends,
        refused_wrongly,
        unbalanced,
    ),
    "left_behind": (bad_exits, leftovers),
}
#: The checks by the names under which they are reported; these stay.
CHECKS: Mapping[str, Promise] = {check.__name__: check for kind in KINDS.values() for check in kind}
#: Those that a run can only break, and not yet keep: they are also told of one that was cut.
CERTAIN: Mapping[str, Promise] = {
    check.__name__: check
    for check in (keyed_run_twice, quota_exceeded_windows, refused_wrongly, unbalanced, run_twice_non_idempotent)
}


def _ended(record: Record | None) -> bool:
    return record is not None and record["ended_at"] is not None


def _lost(call: KilledCall) -> bool:
    return call.last is not None and call.last["reason"] in LOSSES


def _state(call: KilledCall) -> str:
    return "" if call.last is None else str(call.last["state"])


def _last(call: KilledCall) -> list[Record]:
    return [call.last] if call.last is not None and _ended(call.last) else []


def _end(record: Record) -> tuple[str, ...]:
    """What of an end may not be told in two ways."""
    result = json.dumps(record.get("result"), sort_keys=True)
    return (*(str(record[key]) for key in ("id", "state", "reason", "attempt", "ended_at")), result)


def _log(call: KilledCall) -> str:
    """Why its readings do not go together; empty if they do."""
    seen: dict[int, tuple[str, str]] = {}
    for reading in call.logs:
        offsets = [offset for offset, _, _ in reading]
        if offsets != list(range(offsets[0], offsets[0] + len(offsets))) if offsets else False:
            return f"offsets {offsets}"
        for offset, stream, data in reading:
            if seen.setdefault(offset, (stream, data)) != (stream, data):
                return f"at {offset} {seen[offset]} and {(stream, data)}"
    if len(call.logs) > 1 and len(call.logs[-1]) != len(call.logs[-2]) and call.logs[-1][:1] == call.logs[-2][:1]:
        return f"{len(call.logs[-2])} and {len(call.logs[-1])} records"
    if _state(call) == "succeeded" and call.last and call.last["attempt"] == 1 and call.trajectory:
        said = "".join(data for _, (stream, data) in sorted(seen.items()) if stream == "stdout")
        if said != call.last["result"]["stdout"]:
            return f"log {said!r}, result {call.last['result']['stdout']!r}"
    return ""


def _times(record: Record | None) -> str:
    assert record is not None
    parts = [record[key] or 0.0 for key in ("queue_ms", "overhead_ms", "execution_ms")]
    if abs(sum(parts) - record["act_ms"]) > SUM_MS:
        return f"{parts} and {record['act_ms']}"
    wall_s = _instant(record["ended_at"]) - _instant(record["accepted_at"])
    if abs(wall_s * 1000 - record["act_ms"]) > WALL_MS:
        return f"{record['state']}, {record['act_ms']:.0f} ms of {wall_s * 1000:.0f}"
    return ""


def _instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _reward(record: Record) -> object:
    return record["result"]["reward"]
