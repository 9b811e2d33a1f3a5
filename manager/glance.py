"""The glance: what fits one screen of the core, made twice a second while somebody looks.

Its size is bounded by what there is to see, not by how much waits or runs: a pool of many units is told by function.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import cast

from manager.config import TaskSpec
from manager.core.causes import counted_causes
from manager.core.core import Core
from manager.core.executing import Running
from manager.resources.placed import PlacedPool
from manager.resources.pool import Pool, TimedPool

#: Units of a pool that are shown one by one.
CELLS_MAX = 64
#: Rows of each list.
ROWS_MAX = 24
LONGEST_MAX = 8


def glance(core: Core) -> dict[str, object]:
    """Return a JSON-able view: ``now_s`` is the core's instant, all others are seconds relative to it."""
    state, now_s = core.state, core.state.now_s
    causes = counted_causes(state)
    running = state.executing.all()
    return {
        "now_s": now_s,
        "waiting": len(state.queue),
        "running": len(running),
        "paused": state.paused,
        "pools": {pool.name: _pool(core, pool) for pool in state.resources},
        "nodes": {
            node.spec.name: [node.spec.cores, node.spec.memory_bytes, node.held_bytes, len(node.holders)]
            for node in state.nodes
        },
        "causes": [
            {
                "kind": each.cause.kind,
                "pool": each.cause.pool,
                "need": each.cause.need,
                "text": each.cause.text,
                "task": each.task,
                "count": each.count,
                "oldest_s": each.oldest_s,
            }
            for each in causes[:ROWS_MAX]
        ],
        "causes_left_out": sum(each.count for each in causes[ROWS_MAX:]),
        "tasks": _tasks(core, running),
        "longest": [_running(core, one) for one in heapq.nsmallest(LONGEST_MAX, running, key=_started)],
        "trajectories": _trajectories(core),
    }


def _started(running: Running) -> float:
    return running.started_s


def _pool(core: Core, pool: Pool) -> dict[str, object]:
    found: dict[str, object] = {"kind": pool.kind, "node": pool.node, "total": pool.total, "free": pool.free}
    if isinstance(pool, TimedPool):
        next_s = pool.next_return_s()
        found["next_return_s"] = None if next_s is None else max(0.0, next_s - core.state.now_s)
        found["timed"] = True
        found["period_s"] = pool.describe().get("period_s")
    holders = core.state.executing.holders(pool.name)
    if pool.total <= CELLS_MAX and not isinstance(pool, TimedPool):
        found["cells"] = [
            [first, count, holder, one.action.function]
            for holder, one in holders.items()
            for first, count in _runs(pool, holder, one)
        ]
    else:
        by_function = Counter[str]()
        for holder, one in holders.items():
            by_function[one.action.function] += pool.held.get(holder, 0)
        found["by_function"] = by_function.most_common(ROWS_MAX)
    if isinstance(pool, PlacedPool):
        told = pool.describe()
        found |= {name: told[name] for name in ("devices", "hits", "restores") if name in told}
        regions = cast(Mapping[str, Mapping[str, int]], told["regions"])
        found["regions"] = {
            name: [one["start"], one["devices"], core.state.nodes[name].spec.device_kind]
            for name, one in regions.items()
        }
    return found


def _runs(pool: Pool, holder: str, running: Running) -> Iterable[tuple[int, int]]:
    """Return which units a holder has: first and count of each run; first is -1 if they have no numbers."""
    if isinstance(pool, PlacedPool):
        chunk = pool.chunk_of(holder)
        return [] if chunk is None else [(chunk.start, chunk.size)]
    grant = next((grant for grant in running.lease.grants.values() if grant.pool == pool.name), None)
    if grant is None or not grant.cores:
        return [(-1, pool.held.get(holder, 0))]
    return runs_of(grant.cores)


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the count of each run of neighbouring numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _tasks(core: Core, running: Iterable[Running]) -> dict[str, object]:
    """Return queued, running, settled and weight of the tasks that have most to do now."""
    state = core.state
    at_work = Counter(one.action.task for one in running)
    busy = {name: state.queue.by_task(name) + at_work[name] for name in {*state.tasks, *core.accounts}}
    chosen = heapq.nlargest(ROWS_MAX, busy, key=lambda name: (busy[name], name))
    found: dict[str, object] = {}
    for name in sorted(chosen):
        account = core.accounts.get(name)
        settled = {} if account is None else dict(account.settled)
        found[name] = [state.queue.by_task(name), at_work[name], settled, state.tasks.get(name, TaskSpec()).weight]
    return found


def _running(core: Core, one: Running) -> dict[str, object]:
    action, now_s = one.action, core.state.now_s
    return {
        "id": one.id,
        "function": action.function,
        "task": action.task,
        "trajectory": action.trajectory,
        "units": {kind: grant.units for kind, grant in one.lease.grants.items()},
        "node": one.lease.node,
        "running_s": max(0.0, now_s - one.started_s),
        "takes_s": core.state.executing.takes_s(one),
    }


def _trajectories(core: Core) -> dict[str, int]:
    counts = Counter(living=0, running=0, queued=0, memory=0, idle=0)
    for each in core.state.trajectories:
        counts["living"] += 1
        if each.waiting:
            counts["memory"] += 1
        elif each.active is None:
            counts["idle"] += 1
        else:
            counts["running" if each.active.id in core.state.executing else "queued"] += 1
    return dict(counts)
