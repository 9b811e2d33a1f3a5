"""What the core shows of itself."""

from __future__ import annotations

import heapq
import itertools
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import cast

from manager.config import TaskSpec
from manager.core.core import Core
from manager.core.executing import Running
from manager.core.outside import OutsideWait
from manager.core.queue import Key, TrajectoryState, Waiting
from manager.core.state import Cause, CauseTally, cause_of, counted_causes
from manager.errors import InvalidInput
from manager.resources.cores import PlacedPool
from manager.resources.pools import KINDS, Pool, TimedPool

# The summary: what fits one screen of the core, made twice a second while somebody looks.
#
# Its size is bounded by what there is to see, not by how much waits or runs: a pool of many units is told by function.

#: Units of a pool that are shown one by one.
CELLS_MAX = 64
#: Rows of each list.
ROWS_MAX = 24
LONGEST_MAX = 8


def summary(core: Core) -> dict[str, object]:
    """Return a JSON-able view: ``now_s`` is the core's instant, all others are seconds relative to it."""
    state, now_s = core.state, core.state.now_s
    causes = _counted_causes(core)
    running = state.executing.all()
    return {
        "now_s": now_s,
        "waiting": len(state.queue) + len(core.outside),
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
    view: dict[str, object] = {"kind": pool.kind, "node": pool.node, "total": pool.total, "free": pool.free}
    if isinstance(pool, TimedPool):
        next_s = pool.next_return_s()
        view["next_return_s"] = None if next_s is None else max(0.0, next_s - core.state.now_s)
        view["timed"] = True
        view["period_s"] = pool.describe().get("period_s")
    holders = core.state.executing.holders(pool.name)
    if pool.total <= CELLS_MAX and not isinstance(pool, TimedPool):
        view["cells"] = [
            [first, count, holder, one.action.function]
            for holder, one in holders.items()
            for first, count in _runs(pool, holder, one)
        ]
    else:
        by_function = Counter[str]()
        for holder, one in holders.items():
            by_function[one.action.function] += pool.held.get(holder, 0)
        view["by_function"] = by_function.most_common(ROWS_MAX)
    if isinstance(pool, PlacedPool):
        description = pool.describe()
        view |= {name: description[name] for name in ("devices", "hits", "restores") if name in description}
        regions = cast(Mapping[str, Mapping[str, int]], description["regions"])
        view["regions"] = {
            name: [one["start"], one["devices"], core.state.nodes[name].spec.device_kind]
            for name, one in regions.items()
        }
    return view


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
    queued = {name: _queued(core, name) for name in _known(core, at_work)}
    busy = {name: count + at_work[name] for name, count in queued.items()}
    chosen = heapq.nlargest(ROWS_MAX, busy, key=lambda name: (busy[name], name))
    tasks: dict[str, object] = {}
    for name in sorted(chosen):
        account = core.accounts.get(name)
        settled = {} if account is None else dict(account.settled)
        tasks[name] = [queued[name], at_work[name], settled, state.tasks.get(name, TaskSpec()).weight]
    return tasks


def _known(core: Core, at_work: Iterable[str]) -> set[str]:
    """Return the tasks that are configured, have actions or had some."""
    return {*core.state.tasks, *core.accounts, *core.state.queue.tasks(), *core.outside.tasks(), *at_work}


def _queued(core: Core, task: str) -> int:
    return core.state.queue.by_task(task) + core.outside.by_task(task)


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


#: A place in the order of service as bytes: it stays a place when the waiting has left.
_PLACE = struct.Struct(">dqqq")


def resources_view(core: Core) -> dict[str, object]:
    """Return the nodes with their memory, and every pool with its holders and load."""
    state = core.state
    return {
        "nodes": [
            {
                "node": node.spec.name,
                "cores": node.spec.cores,
                "devices": node.spec.devices,
                "memory_bytes": node.spec.memory_bytes,
                "held_bytes": node.held_bytes,
                "trajectories": len(node.holders),
            }
            for node in state.nodes
        ],
        "pools": {
            pool.name: {
                **pool.describe(),
                "holders": _holders_view(core, pool.name),
                "policy": state.policy(pool).name,
                "utilisation": state.executing.load(pool.name).utilisation(core.state.now_s),
                "arrivals_per_s": state.arrival_rate(pool),
            }
            for pool in state.resources
        },
    }


def _holders_view(core: Core, pool: str) -> dict[str, object]:
    """Return who holds units of a pool, by the id of the holder: a batch has one, its leader."""
    return {
        holder: {
            "function": running.action.function,
            "task": running.action.task,
            "trajectory": running.action.trajectory,
            "running_s": max(0.0, core.state.now_s - running.started_s),
        }
        for holder, running in core.state.executing.holders(pool).items()
    }


def replicas_view(core: Core) -> dict[str, int]:
    """Return how copies of services have fared: started, under_way, hits, wasted, failed."""
    counts = Counter[str]()
    for pool in core.state.resources.placed:
        counts.update(pool.replicas)
    return dict(counts)


def queue_view(core: Core, limit: int, cursor: str | None) -> dict[str, object]:
    """Return how many wait, and ``limit`` of them in order of service, each with what it waits for.

    Behind the queue comes what waits outside of it, in the order of its coming. ``cursor`` is the ``next_cursor`` of
    the page before; raises InvalidInput for any other.
    """
    after = None if cursor is None else _place_of(cursor)
    queue = core.state.queue
    listed: Iterable[tuple[tuple[Key, int], Waiting | OutsideWait]] = ((waiting.order, waiting) for waiting in queue)
    every = itertools.chain(listed, core.outside.ordered())
    behind = (each for each in every if after is None or each[0] > after)
    page = heapq.nsmallest(limit + 1, behind, key=lambda each: each[0])
    return {
        "waiting": len(queue) + len(core.outside),
        "causes": [
            {"cause": _cause_view(each.cause), "task": each.task, "count": each.count, "oldest_s": each.oldest_s}
            for each in _counted_causes(core)
        ],
        "queue": [_waiting_view(core, waiting) for _, waiting in page[:limit]],
        "next_cursor": _cursor(page[limit - 1][0]) if len(page) > limit else None,
    }


def _counted_causes(core: Core) -> list[CauseTally]:
    """Return what the queue and those outside of it wait for, by cause and task, the most frequent first."""
    counted = [*counted_causes(core.state), *core.outside.counted(core.state.now_s)]
    return sorted(counted, key=lambda each: -each.count)


def _cause_view(cause: Cause) -> dict[str, object]:
    return {field.name: getattr(cause, field.name) for field in fields(cause)}


def _waiting_view(core: Core, waiting: Waiting | OutsideWait) -> dict[str, object]:
    if isinstance(waiting, OutsideWait):
        cause = waiting.why()
        return {
            "id": waiting.id,
            "function": waiting.function,
            "task": waiting.task,
            "trajectory": waiting.trajectory,
            "age_s": max(0.0, core.state.now_s - waiting.since_s),
            "cost": {},
            "waits_for": cause.text,
            "cause": _cause_view(cause),
        }
    cause = cause_of(core.state, waiting)
    return {
        "id": waiting.id,
        "function": waiting.action.function,
        "task": waiting.action.task,
        "trajectory": waiting.action.trajectory,
        "age_s": core.state.now_s - waiting.action.submitted_s,
        "cost": {kind: [units.minimum, units.maximum] for kind, units in waiting.action.cost.items()},
        "waits_for": cause.text,
        "cause": _cause_view(cause),
        "t_ori_s": waiting.action.t_ori_s,
    }


def _cursor(place: tuple[Key, int]) -> str:
    return _PLACE.pack(*place[0], place[1]).hex()


def _place_of(cursor: str) -> tuple[Key, int]:
    try:
        stamp, seq, child_seq, own_seq = _PLACE.unpack(bytes.fromhex(cursor))
    except (ValueError, struct.error):
        message = f"cursor {cursor[:64]!r} is no next_cursor of this list"
        raise InvalidInput(message, component="queue", detail={"path": "cursor"}) from None
    return (stamp, seq, child_seq), own_seq


def trajectories_view(core: Core, limit: int, cursor: str | None) -> dict[str, object]:
    """Return ``limit`` living trajectories by name; ``cursor`` is the ``next_cursor`` of the page before."""
    behind = (each for each in core.state.trajectories if cursor is None or each.name > cursor)
    page = heapq.nsmallest(limit + 1, behind, key=lambda trajectory: trajectory.name)
    return {
        "trajectories": [trajectory_view(core, trajectory) for trajectory in page[:limit]],
        "next_cursor": page[limit - 1].name if len(page) > limit else None,
    }


def trajectory_view(core: Core, trajectory: TrajectoryState) -> dict[str, object]:
    """Return one living trajectory."""
    return {
        "trajectory": trajectory.name,
        "task": trajectory.task,
        "node": trajectory.node,
        "memory_bytes": trajectory.memory_bytes,
        "ttl_s": trajectory.ttl_s,
        "state": _trajectory_state(core, trajectory.active, trajectory.ending, trajectory.waiting),
        "queued": len(trajectory.behind),
        "active": None if trajectory.active is None else trajectory.active.id,
        "idle_s": core.state.now_s - trajectory.idle_since_s if trajectory.at_rest else 0.0,
    }


def tasks_view(core: Core, more: Iterable[str] = ()) -> list[dict[str, object]]:
    """Return every task that is configured, has actions or had some, or is one ``more``: share, bounds and account."""
    state = core.state
    views: list[dict[str, object]] = []
    at_work = Counter(running.action.task for running in state.executing.all())
    for name in sorted({*_known(core, at_work), *more}):
        spec = state.tasks.get(name, TaskSpec())
        account = core.accounts.get(name)
        views.append(
            {
                "task": name,
                "weight": spec.weight,
                "max_queued": spec.max_queued,
                "caps": dict(spec.caps),
                "queued": _queued(core, name),
                "running": at_work[name],
                **_measured(core, {} if account is None else account.used),
                **({} if account is None else account.describe()),
            }
        )
    return views


def _measured(core: Core, used: Mapping[str, float]) -> dict[str, object]:
    """Return what was used, by its unit: core_s and gpu_s, and of declared resources quota_units and slot_s by name."""
    totals: dict[str, object] = {"core_s": 0.0, "gpu_s": 0.0}
    by_name: dict[str, dict[str, float]] = {spec.measure: {} for spec in KINDS}
    for kind, amount in used.items():
        pools = core.state.resources.of_kind(kind)
        measure = pools[0].measure if pools else "core_s"  # cores alone lose their pool, with the last node
        if measure in by_name:
            by_name[measure][kind] = amount
        else:
            totals[measure] = amount
    return totals | by_name


def _trajectory_state(core: Core, active: Waiting | None, ending: bool, waiting: bool) -> str:
    if ending:
        return "ending"
    if waiting:
        return "waiting"
    if active is None:
        return "idle"
    return "running" if active.id in core.state.executing else "queued"
