"""JSON-able views of the core for people: resources, queue, trajectories, tasks."""

from __future__ import annotations

from manager.config import TaskSpec
from manager.core import Core
from manager.queue import Entry


def resources_view(core: Core) -> dict[str, object]:
    """Nodes with their memory, and every pool with its holders and load."""
    house = core.house
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
            for node in house.nodes
        ],
        "pools": {
            pool.name: {
                **pool.describe(),
                "policy": house.policy(pool.kind).name,
                "utilisation": house.executing.load(pool.name).utilisation(core.now_s),
                "arrivals_per_s": house.executing.load(pool.name).arrivals.at(core.now_s),
            }
            for pool in house.resources
        },
    }


def queue_view(core: Core) -> list[dict[str, object]]:
    """Every waiting action in order of service, and what it waits for."""
    return [
        {
            "id": entry.id,
            "function": entry.action.function,
            "task": entry.action.task,
            "trajectory": entry.action.trajectory,
            "age_s": core.now_s - entry.action.submitted_s,
            "cost": {kind: [units.minimum, units.maximum] for kind, units in entry.action.cost.items()},
            "waits_for": core.house.waits_for(entry),
        }
        for entry in sorted(core.house.queue, key=lambda entry: entry.order)
    ]


def trajectories_view(core: Core) -> list[dict[str, object]]:
    """Every living trajectory."""
    return [
        {
            "trajectory": trajectory.name,
            "task": trajectory.task,
            "node": trajectory.node,
            "memory_bytes": trajectory.memory_bytes,
            "ttl_s": trajectory.ttl_s,
            "state": _trajectory_state(core, trajectory.active, trajectory.ending, trajectory.waiting),
            "queued": len(trajectory.lane),
            "active": None if trajectory.active is None else trajectory.active.id,
            "idle_s": core.now_s - trajectory.idle_since_s if trajectory.at_rest else 0.0,
        }
        for trajectory in core.trajectories
    ]


def tasks_view(core: Core) -> list[dict[str, object]]:
    """Every task that is configured or was seen: its share, its bounds, and its account."""
    house = core.house
    views: list[dict[str, object]] = []
    for name in sorted(set(house.tasks) | set(core.accounts)):
        spec = house.tasks.get(name, TaskSpec())
        account = core.accounts.get(name)
        views.append(
            {
                "task": name,
                "weight": spec.weight,
                "max_queued": spec.max_queued,
                "caps": dict(spec.caps),
                "queued": house.queue.by_task(name),
                "running": sum(entry.action.task == name for entry in house.executing.all()),
                **({} if account is None else account.describe()),
            }
        )
    return views


def _trajectory_state(core: Core, active: Entry | None, ending: bool, waiting: bool) -> str:
    if ending:
        return "ending"
    if waiting:
        return "waiting"
    if active is None:
        return "idle"
    return "running" if active.id in core.house.executing else "queued"
