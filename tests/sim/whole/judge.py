"""The judge of a history: it knows promises only, and what callers, machines and disks have seen."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.sim.whole.history import ENDED, Asked, SimHistory, Told
from tests.sim.whole.outside import Run
from tests.sim.whole.system import QUOTA, functions

#: Seconds by which the clocks of a caller and of a machine may differ: answers are on their way.
SLACK_S = 1e-6


def verdict(seed: int, history: SimHistory) -> str:
    """Follow a history; return what promise it breaks, empty if none."""
    try:
        history.run()
    except (AssertionError, TimeoutError) as error:
        left = "; ".join([*history.world.complaints[:1], *history.left()[:4]])
        if history.world.app is None:
            left = f"no gateway serves; {left}"
        return f"it does not come to rest: {str(error) or type(error).__name__} ({left})"
    return next(judge(history), "")


def judge(history: SimHistory) -> Iterator[str]:
    """Yield every promise that a history broke."""
    runs: dict[str, list[Run]] = defaultdict(list)
    for run in history.world.ledger.runs:
        runs[run.invocation].append(run)
    yield from history.world.ledger.wrong
    yield from history.world.complaints
    yield from history.world.loop.errors
    yield from history.remains
    for call in history.calls.values():
        yield from _of_call(history, call, runs)
    yield from _order(history, runs)
    yield from _quotas(history)


def _of_call(history: SimHistory, call: Asked, runs: dict[str, list[Run]]) -> Iterator[str]:
    what = f"call {call.number}"
    if call.durable and len(call.ids) > 1:
        yield f"{what}: one key, and {len(call.ids)} invocations: {list(call.ids)}"
    if call.kept and call.told and call.record is None:
        yield f"{what}: accepted and lost without a word"
    mine = [run for id in call.ids for run in runs[id]]
    for id in call.ids:
        if call.kept:
            yield from _ends(what, [told for told in call.told if told.id == id and not told.refused])
    function = functions(history.plan.setting)[call.about["function"]]
    tries = 1 if not function.idempotent else 3
    tries = max(tries, function.retry.max_attempts)
    if len(mine) > tries:
        yield f"{what}: begun {len(mine)} times"
    once = not function.idempotent
    ended = [run for run in mine if run.how != "timed_out"]
    if once and len(ended) > 1:
        yield f"{what}: is not idempotent, and ran {[(run.attempt, run.how) for run in mine]}"
    for told in call.told:
        if told.state in ENDED - {"lost"} and not told.refused:
            late = [run for run in mine if run.ended_s is None or run.ended_s > told.at_s + SLACK_S]
            if late:
                yield f"{what}: {told.state} is told at {told.at_s - 1000.0:.3f} while {late[-1]} goes on"
                break
    if call.record is not None:
        yield from _end_of(history, call, mine)


def _ends(what: str, told: list[Told]) -> Iterator[str]:
    ends = {(each.state, each.reason, each.result) for each in told if each.state in ENDED}
    if len(ends) > 1:
        yield f"{what}: two ends were told: {sorted(map(str, ends))}"
    states = [each.state for each in told]
    if any(first in ENDED and later not in ENDED for first, later in pairwise(states)):
        yield f"{what}: an end was told, then {states}"


def _end_of(history: SimHistory, call: Asked, mine: list[Run]) -> Iterator[str]:
    """What the record says against what the machines saw."""
    record, what = call.record, f"call {call.number}"
    assert record is not None
    if not record.terminal:
        yield f"{what}: has no end: {record.state}"
        return
    done = [run for run in mine if run.how == "done"]
    in_box = call.about["function"] != "search"
    if in_box and record.state == "succeeded":
        result = json.loads(record.result or b"{}")
        of_try = [run for run in done if run.attempt == record.attempt]
        if not of_try:
            yield f"{what}: succeeded, and nothing ran to its end: {mine}"
        lines = call.about["script"].get("say", 0)
        said = "".join(f"{record.id} {record.attempt} {line}\n" for line in range(lines))
        if result.get("stdout") != said and of_try:
            yield f"{what}: its result says {result.get('stdout')!r}, and it said {said!r}"
        log = "".join(call.log)
        whole = log.count(said) == 1 or "disk refused" in log or "were dropped" in log
        if said and of_try and not whole and len(mine) == 1 and not history.holes:
            yield f"{what}: its log is {log!r}, and it said {said!r}"
    if record.state == "cancelled" and not call.cancelled and call.kept:
        yield f"{what}: nobody cancelled it: {record.message}"
    if record.reason is not None and record.reason.value in ("environment_lost", "node_lost", "gateway_restart"):
        excused = call.cancelled or bool(history.losses)
        # Of a sandbox of its own nobody knows whether its command was started: its record says that it might have been.
        unknown = call.about["trajectory"] is None and all(run.attempt < record.attempt for run in mine)
        if in_box and call.kept and not excused and not unknown:
            yield f"{what}: {record.state} {record.reason.value}: {record.message}, and nothing was lost: {mine}"
    if record.reason is not None and record.reason.value == "internal" and call.told:
        refused = "cannot be written" in record.message
        if not refused:
            yield f"{what}: a fault of ours: {record.message}"


def _order(history: SimHistory, runs: dict[str, list[Run]]) -> Iterator[str]:
    """One at a time in a trajectory; what was asked for once another was accepted runs after that, over all tries."""
    calls = {id: call for call in history.calls.values() for id in call.ids}
    of: dict[str, list[Run]] = defaultdict(list)
    for run in history.world.ledger.runs:
        if run.trajectory is not None:
            of[run.trajectory].append(run)
    for trajectory, found in of.items():
        found.sort(key=lambda one: one.begun_s)
        for place, other in enumerate(found):
            for one in found[:place]:
                if one.ended_s is None or one.ended_s > other.begun_s:
                    yield f"{trajectory}: two at once: {one} and {other}"
                earlier, later = calls.get(other.invocation), calls.get(one.invocation)
                if earlier is None or later is None or not earlier.told:
                    continue
                if earlier is not later and earlier.told[0].at_s < later.asked_s:
                    yield f"{trajectory}: {other} was accepted before {one} was asked for, and runs after it"


def _quotas(history: SimHistory) -> Iterator[str]:
    calls = sorted(history.world.ledger.calls)
    for first, after in zip(calls, calls[QUOTA.limit :], strict=False):
        if after - first < QUOTA.period_s - 0.05:
            yield f"quota: more than {QUOTA.limit} calls within {after - first:.2f} s"
