"""The plan: one decision on a written snapshot, and why each action starts or waits (``tangram plan``)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manager.action import Action
from manager.chunk import Chunk, power_at_least
from manager.errors import InvalidInput
from manager.scheduler.chunk_operator import best_fit, take
from manager.scheduler.durations import kind_of
from manager.scheduler.policy import ChunkView, Policy, PolicySpec, PoolView, RunningView, Start, WaitingView
from manager.scheduler.registry import make_policy
from manager.simulation.trace import parse_cost, parse_elasticity

Values = Mapping[str, object]

#: Restore seconds of a service of which the snapshot says nothing.
RESTORE_S = 1.0
SNAPSHOT_KEYS = frozenset({"now", "resources", "queue"})
RESOURCE_KEYS = frozenset(
    {"total", "free", "running", "gpus", "busy", "resident", "restore_s", "kind", "next_s", "limit"}
)
ACTION_KEYS = frozenset(
    {"id", "cost", "key", "t_ori_s", "serial_fraction", "efficiency", "age_s", "service", "malleable", "function"}
)


@dataclass(slots=True)
class _Pool:
    """One resource of the snapshot."""

    name: str
    total: int
    free: int
    running: list[RunningView] = field(default_factory=list)
    chunks: list[Chunk] | None = None
    resident: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)
    restore_s: dict[str, float] = field(default_factory=dict)
    #: Seconds until a unit returns by itself (quota).
    next_s: float | None = None

    @property
    def kind(self) -> str:
        return kind_of(self.name)


def plan(snapshot: Values, policy: str | None = None) -> dict[str, object]:
    """Decide once on ``snapshot``: what starts with which units and chunk, what waits, for what and until when.

    A snapshot holds ``now``, ``resources`` and ``queue``; ``policy`` replaces the default (adaptive on cores, price
    elsewhere). Raises InvalidInput that names the place at fault, InvalidConfig for an unknown policy.
    """
    if missing := [key for key in ("resources", "queue") if key not in snapshot]:
        raise InvalidInput(f"snapshot: {missing[0]} is needed (docs/reference/snapshot.md)", component="plan")
    if unknown := sorted(map(str, snapshot.keys() - SNAPSHOT_KEYS)):
        raise InvalidInput(f"snapshot: unknown key {unknown[0][:64]!r}", component="plan")
    now_s = _number(snapshot, "now", "snapshot", 0.0)
    pools = [_pool(name, value, now_s) for name, value in _object(snapshot, "resources", "snapshot").items()]
    queue = [_action(value, index, now_s) for index, value in enumerate(_list(snapshot, "queue", "snapshot"))]
    if len({action.id for action in queue}) != len(queue):
        raise InvalidInput("snapshot: queue: two actions have the same id", component="plan")
    chosen = {pool.kind: _policy(pool.kind, policy) for pool in pools}
    begin = time.perf_counter()
    started, reasons = _decide(pools, queue, chosen, now_s)
    decision_ms = 1e3 * (time.perf_counter() - begin)
    waiting = [{"id": action.id, **reasons[action.id]} for action in queue if action.id in reasons]
    return {"started": started, "waiting": waiting, "decision_ms": round(decision_ms, 3)}


def _decide(
    pools: Sequence[_Pool], queue: Sequence[Action], policies: Mapping[str, Policy], now_s: float
) -> tuple[list[dict[str, object]], dict[str, dict[str, object]]]:
    """Candidates by reservation, then each pool's policy."""
    room = {pool.name: pool.free for pool in pools}
    candidates: dict[str, list[Action]] = {pool.name: [] for pool in pools}
    reasons: dict[str, dict[str, object]] = {}
    places: dict[str, dict[str, _Pool]] = {}
    for action in queue:
        chosen, missing = _choose(action, pools, room)
        for kind, pool in chosen.items():
            room[pool.name] = max(0, room[pool.name] - action.cost[kind].minimum)
        if missing is not None:
            reasons[action.id] = _blocked(missing, action, now_s)
            continue
        places[action.id] = chosen
        key = action.key if action.key is not None else next(iter(action.cost), "")
        if key:
            candidates[chosen[key].name].append(action)
    started: list[dict[str, object]] = []
    for pool in pools:
        if candidates[pool.name]:
            _decide_pool(pool, candidates[pool.name], queue, policies[pool.kind], now_s, places, started, reasons)
    order = {action.id: index for index, action in enumerate(queue)}
    started.sort(key=lambda start: order[str(start["id"])])
    return started, reasons


def _choose(action: Action, pools: Sequence[_Pool], room: Mapping[str, int]) -> tuple[dict[str, _Pool], _Pool | None]:
    """The pool with most room for each kind that it needs, and the first one that has too little."""
    chosen: dict[str, _Pool] = {}
    missing: _Pool | None = None
    for kind, units in action.cost.items():
        able = [pool for pool in pools if pool.kind == kind and pool.total >= units.minimum]
        if not able:
            raise InvalidInput(f"queue: {action.id}: nothing provides {units.minimum} of {kind}", component="plan")
        chosen[kind] = max(able, key=lambda pool: room[pool.name])
        if missing is None and room[chosen[kind].name] < units.minimum:
            missing = chosen[kind]
    return chosen, missing


def _decide_pool(
    pool: _Pool,
    waiting: Sequence[Action],
    queue: Sequence[Action],
    policy: Policy,
    now_s: float,
    places: Mapping[str, Mapping[str, _Pool]],
    started: list[dict[str, object]],
    reasons: dict[str, dict[str, object]],
) -> None:
    view = _view(pool, waiting, queue, now_s)
    decision = policy.decide(view)
    actions = {action.id: action for action in waiting}
    for start in decision.starts:
        action = actions.pop(start.action_id, None)
        if action is not None:
            started.append(_started(start, action, pool, places[action.id]))
    held = {hold.action_id: hold for hold in decision.holds}
    for action_id in actions:
        hold = held.get(action_id)
        until_s = hold.until_s if hold is not None and hold.until_s is not None else _next_end_s(pool, now_s)
        reasons[action_id] = {
            "for": hold.waits_for if hold is not None else f"units of {pool.name}",
            "until_s": until_s,
        }


def _started(start: Start, action: Action, pool: _Pool, places: Mapping[str, _Pool]) -> dict[str, object]:
    units = {kind: action.cost[kind].minimum for kind in action.cost} | {pool.kind: start.units}
    entry: dict[str, object] = {
        "id": action.id,
        "units": units,
        "on": {kind: place.name for kind, place in places.items()},
    }
    chunk = start.chunk
    if pool.chunks is not None:
        chunk = chunk or best_fit(pool.chunks, power_at_least(start.units))
        assert chunk is not None, f"no chunk is left for {action.id}"
        take(pool.chunks, chunk)
        entry["chunk"] = list(chunk)
    duration_s = action.duration_s(start.units)
    if duration_s is not None:
        entry["expected_s"] = round(duration_s, 3)
    return entry


def _view(pool: _Pool, waiting: Sequence[Action], queue: Sequence[Action], now_s: float) -> PoolView:
    ids = {action.id for action in waiting}
    behind = [action for action in queue if pool.kind in action.cost and action.id not in ids]
    chunks = None
    if pool.chunks is not None:
        restore_s = pool.restore_s
        chunks = ChunkView(
            free=tuple(pool.chunks),
            resident=pool.resident,
            restore_s=lambda service, size: restore_s.get(service, RESTORE_S) / size,
        )
    return PoolView(
        name=pool.name,
        now_s=now_s,
        total=pool.total,
        free=pool.free,
        running=pool.running,
        candidates=[WaitingView(action=action, limit=_limit(action, pool)) for action in waiting],
        queued=[*waiting, *behind],
        backlog=len(waiting) + len(behind),
        eligible=waiting,
        utilisation=(pool.total - pool.free) / pool.total if pool.total else 0.0,
        chunks=chunks,
    )


def _limit(action: Action, pool: _Pool) -> int:
    units = action.units
    assert units is not None
    widest = pool.free if pool.chunks is None else max((chunk.size for chunk in pool.chunks), default=0)
    return units.at_most(max(units.minimum, widest)) or units.minimum


def _policy(kind: str, name: str | None) -> Policy:
    if name is None or (name == "adaptive" and kind != "cpu"):
        name = "adaptive" if kind == "cpu" else "price"
    name, _, dop = name.partition(":")
    return make_policy(PolicySpec(name=name, options={"dop": float(dop)} if dop else {}))


def _blocked(pool: _Pool, action: Action, now_s: float) -> dict[str, object]:
    """Why an action cannot start even at its minimum."""
    needed = action.cost[pool.kind].minimum
    return {
        "for": f"{needed} of {pool.name}, {pool.free} free before earlier ones",
        "until_s": _next_end_s(pool, now_s),
    }


def _next_end_s(pool: _Pool, now_s: float) -> float | None:
    """When the first units come back, by estimate; None where that is not known."""
    ends = [running.ends_in_s for running in pool.running if running.ends_in_s is not None]
    if pool.next_s is not None:
        ends.append(pool.next_s)
    return round(now_s + min(ends), 3) if ends else None


# -- reading


def _pool(name: str, value: object, now_s: float) -> _Pool:
    where = f"resources: {name}"
    values = _mapping(value, where)
    _known(values, RESOURCE_KEYS, where)
    next_s = _number(values, "next_s", where) if values.get("next_s") is not None else None
    if "gpus" in values:
        return _devices(name, values, where, now_s)
    free = int(_number(values, "free", where))
    total = int(_number(values, "total", where, float(max(free, 1))))
    if free > total:
        raise InvalidInput(f"{where}: {free} free of {total}", component="plan")
    running = []
    for index, item in enumerate(_list(values, "running", where)):
        place = f"{where}: running[{index}]"
        entry = _mapping(item, place)
        units = int(_number(entry, "units", place))
        ends_in_s = _number(entry, "ends_in", place) if entry.get("ends_in") is not None else None
        running.append(_running(f"{name}#{index}", units, ends_in_s, now_s, None))
    return _Pool(name, total, free, running, next_s=next_s)


def _devices(name: str, values: Values, where: str, now_s: float) -> _Pool:
    count = int(_number(values, "gpus", where))
    free: list[Chunk] = []
    start = 0
    while start < count:
        size = min(8, 1 << ((count - start).bit_length() - 1))
        free.append(Chunk(start, size))
        start += size
    running = []
    for index, item in enumerate(_list(values, "busy", where)):
        place = f"{where}: busy[{index}]"
        if not isinstance(item, list) or len(item) != 3:
            raise InvalidInput(f"{place}: [start, size, ends_in] is needed, not {item!r}", component="plan")
        chunk, ends_in_s = _chunk(item[:2], place), float(item[2])
        try:
            take(free, chunk)
        except StopIteration:
            raise InvalidInput(
                f"{place}: {list(chunk)} is no free chunk of {count} devices", component="plan"
            ) from None
        running.append(_running(f"{name}#{index}", chunk.size, ends_in_s, now_s, chunk))
    resident = {
        service: tuple(_chunk(chunk, f"{where}: resident: {service}") for chunk in chunks)
        for service, chunks in _object(values, "resident", where).items()
        if isinstance(chunks, list)
    }
    restores = _object(values, "restore_s", where)
    restore_s = {service: _number(restores, service, f"{where}: restore_s") for service in restores}
    return _Pool(name, count, sum(chunk.size for chunk in free), running, sorted(free), resident, restore_s)


def _chunk(value: object, where: str) -> Chunk:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, int) for part in value):
        chunk = Chunk(*value)
        if chunk.start >= 0 and chunk.size > 0 and chunk.size & (chunk.size - 1) == 0 and chunk.start % chunk.size == 0:
            return chunk
    raise InvalidInput(f"{where}: [start, size] of an aligned power of two is needed, not {value!r}", component="plan")


def _running(name: str, units: int, ends_in_s: float | None, now_s: float, chunk: Chunk | None) -> RunningView:
    return RunningView(
        action=Action(id=name, function="running"), units=units, ends_in_s=ends_in_s, started_s=now_s, chunk=chunk
    )


def _action(value: object, index: int, now_s: float) -> Action:
    where = f"queue[{index}]"
    values = _mapping(value, where)
    _known(values, ACTION_KEYS, where)
    cost = parse_cost(values.get("cost", {}), f"{where}: cost")
    key = values.get("key")
    if key is not None and key not in cost:
        raise InvalidInput(f"{where}: key {key!r} is not in cost", component="plan")
    if not isinstance(values.get("id"), str):
        raise InvalidInput(f"{where}: id: a text is needed", component="plan")
    service = values.get("service")
    return Action(
        id=str(values["id"]),
        function=str(values.get("function", "")),
        cost=cost,
        key=str(key) if key is not None else None,
        elasticity=parse_elasticity(values, where) if key is not None else None,
        t_ori_s=_number(values, "t_ori_s", where) if values.get("t_ori_s") is not None else None,
        malleable=bool(values.get("malleable", key == "cpu")),
        service=str(service) if service is not None else None,
        submitted_s=now_s - _number(values, "age_s", where, 0.0),
    )


def _mapping(value: object, where: str) -> Values:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{where}: an object is needed, not {type(value).__name__}", component="plan")
    return value


def _object(values: Values, key: str, where: str) -> Values:
    return _mapping(values.get(key, {}), f"{where}: {key}")


def _list(values: Values, key: str, where: str) -> list[object]:
    value = values.get(key, [])
    if not isinstance(value, list):
        raise InvalidInput(f"{where}: {key}: a list is needed", component="plan")
    return value


def _number(values: Values, key: str, where: str, default: float | None = None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidInput(f"{where}: {key}: a number of at least 0 is needed, not {value!r}", component="plan")
    return float(value)


def _known(values: Values, keys: frozenset[str], where: str) -> None:
    unknown = sorted(set(values) - keys)
    if unknown:
        known = ", ".join(sorted(keys))
        raise InvalidInput(f"{where}: unknown key {unknown[0]!r}; known are {known}", component="plan")
