"""JSON-able views of the core for people: resources, queue, trajectories, tasks."""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields

from manager.config import TaskSpec
from manager.core.causes import Cause, cause_of, counted_causes
from manager.core.core import Core
from manager.core.trajectories import TrajectoryState
from manager.core.waiting.queue import Key, Waiting
from manager.errors import InvalidInput
from manager.resources.kinds import KINDS

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
                "arrivals_per_s": state.executing.load(pool.name).arrivals.at(core.state.now_s),
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

    ``cursor`` is the ``next_cursor`` of the page before; raises InvalidInput for any other.
    """
    after = None if cursor is None else _place_of(cursor)
    queue = core.state.queue
    behind = (waiting for waiting in queue if after is None or waiting.order > after)
    page = heapq.nsmallest(limit + 1, behind, key=lambda waiting: waiting.order)
    return {
        "waiting": len(queue),
        "causes": causes_view(core),
        "queue": [_waiting_view(core, waiting) for waiting in page[:limit]],
        "next_cursor": _cursor(page[limit - 1]) if len(page) > limit else None,
    }


def causes_view(core: Core) -> list[dict[str, object]]:
    """Return what the queue waits for, by cause and task, the most frequent first."""
    return [
        {"cause": _cause_view(each.cause), "task": each.task, "count": each.count, "oldest_s": each.oldest_s}
        for each in counted_causes(core.state)
    ]


def _cause_view(cause: Cause) -> dict[str, object]:
    return {field.name: getattr(cause, field.name) for field in fields(cause)}


def _waiting_view(core: Core, waiting: Waiting) -> dict[str, object]:
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


def _cursor(waiting: Waiting) -> str:
    return _PLACE.pack(*waiting.key, waiting.seq).hex()


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
    """Return every task that is configured, was seen or is one ``more``: its share, its bounds, and its account."""
    state = core.state
    views: list[dict[str, object]] = []
    for name in sorted({*state.tasks, *core.accounts, *more}):
        spec = state.tasks.get(name, TaskSpec())
        account = core.accounts.get(name)
        views.append(
            {
                "task": name,
                "weight": spec.weight,
                "max_queued": spec.max_queued,
                "caps": dict(spec.caps),
                "queued": state.queue.by_task(name),
                "running": sum(running.action.task == name for running in state.executing.all()),
                **_measured(core, {} if account is None else account.used),
                **({} if account is None else account.describe()),
            }
        )
    return views


def _measured(core: Core, used: Mapping[str, float]) -> dict[str, object]:
    """Return what was used, by its unit: core_s and gpu_s, and of declared resources quota_units and slot_s by name."""
    found: dict[str, object] = {"core_s": 0.0, "gpu_s": 0.0}
    by_name: dict[str, dict[str, float]] = {spec.measure: {} for spec in KINDS}
    for kind, amount in used.items():
        pools = core.state.resources.of_kind(kind)
        measure = pools[0].measure if pools else "core_s"  # cores alone lose their pool, with the last node
        if measure in by_name:
            by_name[measure][kind] = amount
        else:
            found[measure] = amount
    return found | by_name


def _trajectory_state(core: Core, active: Waiting | None, ending: bool, waiting: bool) -> str:
    if ending:
        return "ending"
    if waiting:
        return "waiting"
    if active is None:
        return "idle"
    return "running" if active.id in core.state.executing else "queued"
