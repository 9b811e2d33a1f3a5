"""A running gateway's pools and queue as the snapshot that ``tangram plan`` reads (docs/reference/snapshot.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, to_builtins

from tangram import Client
from tangram.types import FunctionInfo, PoolInfo, QueueEntry

#: Actions of the queue that are written.
QUEUE_MAX = 1000


def snapshot_of(client: Client) -> dict[str, object]:
    """Return what a gateway would decide on now; instants are seconds from now."""
    pools = client.resources().pools
    queue = client.queue(QUEUE_MAX)
    named = {each.function for each in queue}
    named |= {holder.function for pool in pools.values() for holder in (pool.holders or {}).values()}
    registered = {each.name for each in client.functions()}
    functions = {name: client.function(name) for name in sorted(named & registered)}
    return {
        "now": 0.0,
        "resources": {name: _pool(pool, functions) for name, pool in pools.items()},
        "queue": [_action(entry, functions.get(entry.function)) for entry in queue],
    }


def _pool(pool: PoolInfo, functions: Mapping[str, FunctionInfo]) -> dict[str, object]:
    ends = {id: _ends_in_s(holder.function, holder.running_s, functions) for id, holder in (pool.holders or {}).items()}
    if pool.chunks is not UNSET:
        return {
            "gpus": pool.total,
            "busy": [[start, size, ends.get(id) or 0.0] for id, (start, size) in pool.chunks.items()],
            "resident": _resident(pool),
            "restore_s": {
                service: info.restore_s_by_dop["1"]
                for service, info in (pool.services or {}).items()
                if "1" in info.restore_s_by_dop
            },
        }
    running = [{"units": units, "ends_in": ends.get(id)} for id, units in pool.held.items()]
    return {"total": pool.total, "free": max(0, pool.free), "running": running}


def _resident(pool: PoolInfo) -> dict[str, list[list[int]]]:
    """Return the chunks of each service: aligned runs of devices that hold it at the same degree of parallelism."""
    found: dict[str, list[list[int]]] = {}
    for device in pool.devices or ():
        for each in device.resident:
            start = device.device - device.device % each.dop
            chunk = [start, each.dop]
            if chunk not in found.setdefault(each.service, []):
                found[each.service].append(chunk)
    return found


def _ends_in_s(function: str, running_s: float, functions: Mapping[str, FunctionInfo]) -> float | None:
    """Return when it will end by what was learned of one unit; None if nothing was."""
    t_ori_s = _t_ori_s(functions.get(function))
    return None if t_ori_s is None else round(max(0.0, t_ori_s - running_s), 3)


def _t_ori_s(function: FunctionInfo | None) -> float | None:
    if function is None:
        return None
    learned = (function.learned or {}).get("")
    return function.duration.initial_s if learned is None else learned.t_ori_s


def _action(entry: QueueEntry, function: FunctionInfo | None) -> dict[str, object]:
    declared: Mapping[str, Any] = {} if function is None else to_builtins(function.cost)
    cost = {
        kind: declared.get(kind, least if least == most else {"min": least, "max": most})
        for kind, (least, most) in entry.cost.items()
    }
    action: dict[str, object] = {
        "id": entry.id,
        "function": entry.function,
        "cost": cost,
        "age_s": round(entry.age_s, 3),
    }
    t_ori_s = _t_ori_s(function) if entry.t_ori_s is None else entry.t_ori_s
    if t_ori_s is not None:
        action["t_ori_s"] = round(t_ori_s, 6)
    if function is not None and function.key:
        action["key"] = function.key
        action |= _elasticity(function)
        action["malleable"] = function.runtime == "pytest" and function.key == "cpu"
    return action


def _elasticity(function: FunctionInfo) -> dict[str, object]:
    declared = function.elasticity or {}
    if "points" in declared:
        return {"efficiency": {str(units): share for units, share in declared["points"]}}
    learned = (function.learned or {}).get("")
    serial = declared.get("serial_fraction", None if learned is None else learned.serial_fraction)
    return {} if serial is None else {"serial_fraction": serial}
