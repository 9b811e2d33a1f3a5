"""Causes: what a waiting action waits for, as data; of the whole queue by one look at each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from manager.action import ANYWHERE, NodeChoice
from manager.core.state import SchedulerState
from manager.core.trajectories import TrajectoryState
from manager.core.waiting.queue import QueueGroup, Waiting
from manager.resources.placed import PlacedPool
from manager.resources.pool import Pool, TimedPool

CauseKind = Literal["units", "devices", "quota", "memory", "node", "trajectory", "task_cap", "hold", "turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One thing that is missing. ``need`` and ``free`` are units of the pool, or bytes of memory."""

    kind: CauseKind
    #: The text for people.
    text: str
    #: The pool that has most of it free, ``node:NAME`` for memory or a node; empty if no pool is meant.
    pool: str = ""
    need: int = 0
    free: int = 0
    #: The action that has to end first, if it is one.
    behind: str | None = None
    #: Seconds until it is expected to be there; None if that is not known.
    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseTally:
    """Waiting actions of one task with the same cause."""

    cause: Cause
    task: str
    count: int
    #: Seconds for which the first of them in the order of service has waited.
    oldest_s: float


def cause_of(state: SchedulerState, waiting: Waiting) -> Cause:
    """Return the first thing that a waiting action lacks; its text names all."""
    if waiting.group is None:
        return _of_trajectory(state, waiting)
    return _of_group(state, waiting, waiting.group)


def counted_causes(state: SchedulerState) -> list[CauseTally]:
    """Return what the queue waits for, the most frequent cause first: work by groups and trajectories, not entries."""
    counts: Counter[tuple[str, Cause]] = Counter()
    oldest: dict[tuple[str, Cause], float] = {}

    def add(waiting: Waiting, cause: Cause, count: int) -> None:
        alike = (waiting.action.task, replace(cause, behind=None))
        counts[alike] += count
        oldest[alike] = max(oldest.get(alike, 0.0), state.now_s - waiting.action.submitted_s)

    for group in state.queue.groups():
        for first in islice(group, 1):
            add(first, cause_of(state, first), group.live)
    for trajectory in state.trajectories:
        if trajectory.unplaced:
            add(trajectory.unplaced[0], _place_of(state, trajectory), len(trajectory.unplaced))
        if trajectory.behind:
            cause = Cause(kind="trajectory", text="the earlier actions of their trajectories")
            add(trajectory.behind[0], cause, len(trajectory.behind))
    return [
        CauseTally(cause=cause, task=task, count=count, oldest_s=oldest[task, cause])
        for (task, cause), count in counts.most_common()
    ]


def _of_trajectory(state: SchedulerState, waiting: Waiting) -> Cause:
    """Return the cause of one whose turn in its trajectory has not come."""
    name = waiting.action.trajectory
    trajectory = None if name is None else state.trajectories.get(name)
    if trajectory is None:
        return Cause(kind="turn", text="the next pass")
    if waiting in trajectory.unplaced:
        return _place_of(state, trajectory)
    behind = None if trajectory.active is None else trajectory.active.id
    return Cause(kind="trajectory", text=f"the earlier actions of trajectory {trajectory.name}", behind=behind)


def _of_group(state: SchedulerState, waiting: Waiting, group: QueueGroup) -> Cause:
    hold = state.holds.get(waiting.id)
    if hold is not None:
        until_s = None if hold.until_s is None else max(0.0, hold.until_s - state.now_s)
        return Cause(kind="hold", text=hold.waits_for, until_s=until_s)
    memory_bytes, node = group.signature.memory_bytes, group.signature.node
    no_node = list(_nodes(state, group))
    missing = [*_caps(state, waiting), *(no_node or _units(state, group))]
    if not no_node and memory_bytes and memory_bytes > _free_memory(state, node)[0]:
        missing.append(_memory_of(state, memory_bytes, node))
    if missing:
        return replace(missing[0], text=" and ".join(each.text for each in missing))
    if state.paused:
        return Cause(kind="turn", text="the next gateway: this one drains")
    return Cause(kind="turn", text="its turn: what is free is kept for earlier actions")


def _caps(state: SchedulerState, waiting: Waiting) -> Iterable[Cause]:
    for kind, units in waiting.action.cost.items():
        room = state.cap_room(waiting, kind)
        if room is not None and room < units.minimum:
            task = waiting.action.task
            text = f"{units.minimum} of {kind} under the cap of task {task}"
            yield Cause(kind="task_cap", text=text, pool=kind, need=units.minimum, free=room)


def _nodes(state: SchedulerState, group: QueueGroup) -> Iterable[Cause]:
    """Yield what keeps all nodes from starting it that otherwise might."""
    node, placement = group.signature.node, group.signature.placement
    if node and node in state.nodes:
        place = state.nodes[node]
        if place.closed is not None and not place.finishing:
            yield Cause(kind="node", text=f"node {node}, which is closed: {place.closed}", pool=f"node:{node}")
        elif not place.spec.suits(placement):
            told = f"node {node} of its trajectory, which is not right for it: {_story(placement)}"
            yield Cause(kind="node", text=told, pool=f"node:{node}")
    elif _is_placed(state, group):
        yield from _open_node(state, placement)


def _open_node(state: SchedulerState, placement: NodeChoice) -> Iterable[Cause]:
    """Yield that no open node is right, if none is, and why the first of those that would be is closed."""
    if state.nodes.right_for(placement):
        return
    text, pool = f"an open node {_story(placement)}".rstrip(), ""
    closed = [place for place in state.nodes if place.closed is not None and place.spec.suits(placement)]
    if closed:
        name, others = closed[0].spec.name, len(closed) - 1
        text += f": {name} is closed: {closed[0].closed}" + (f" (and {others} more)" if others else "")
        pool = "" if others else f"node:{name}"
    yield Cause(kind="node", text=text, pool=pool)


def _is_placed(state: SchedulerState, group: QueueGroup) -> bool:
    """Return whether something of a node is needed."""
    resources, demand = state.resources, group.demand
    if group.signature.memory_bytes:
        return True
    anywhere = group.signature.placement == ANYWHERE
    return resources.any_on_nodes(demand) or (not anywhere and resources.any_placed(demand))


def _story(placement: NodeChoice) -> str:
    parts = [f"{label}={value}" for label, value in placement.labels]
    parts += [f"able to run {placement.function}"] if placement.function else []
    return " and ".join(parts)


def _units(state: SchedulerState, group: QueueGroup) -> Iterable[Cause]:
    node = group.signature.node
    where = f" on {node}" if node else ""
    anywhere = group.signature.placement == ANYWHERE
    among = frozenset[str]() if anywhere else state.nodes.right_for(group.signature.placement)
    for kind, need in group.demand.items():
        pools = [state.resources[name] for name in state.pools_of(group) if state.resources[name].kind == kind]
        if any(_has(pool, need, node, among) for pool in pools):
            continue
        best = max(pools, key=lambda pool: pool.free, default=None)
        yield Cause(
            kind=_kind_of(best),
            text=f"{need} of {kind}{where if best is None or best.node or isinstance(best, PlacedPool) else ''}",
            pool=kind if best is None else best.name,
            need=need,
            free=0 if best is None else max(0, best.free),
            until_s=_until(state, best),
        )


def _has(pool: Pool, need: int, node: str, among: frozenset[str]) -> bool:
    """Return whether the units can be had together."""
    return pool.headroom().fits(need, node, among)


def _kind_of(pool: Pool | None) -> CauseKind:
    if isinstance(pool, TimedPool):
        return "quota"
    return "devices" if isinstance(pool, PlacedPool) else "units"


def _until(state: SchedulerState, pool: Pool | None) -> float | None:
    """Return the seconds until something of the pool returns: by time, or by the first expected end."""
    if pool is None:
        return None
    if isinstance(pool, TimedPool):
        at_s = pool.next_return_s()
        return None if at_s is None else max(0.0, at_s - state.now_s)
    ends = [view.ends_in_s for view in state.executing.view(pool, state.now_s) if view.ends_in_s is not None]
    return min(ends, default=None)


def _free_memory(state: SchedulerState, node: str = "") -> tuple[int, str]:
    """Return the most that a node has free, and which."""
    places = [place for place in state.nodes if node in ("", place.spec.name)]
    return max(((place.free_bytes, place.spec.name) for place in places), default=(0, ""))


def _place_of(state: SchedulerState, trajectory: TrajectoryState) -> Cause:
    """Return what a trajectory lacks that has no place yet: an open node, else memory on one."""
    return next(iter(_open_node(state, trajectory.placement)), None) or _memory_of(state, trajectory.memory_bytes)


def _memory_of(state: SchedulerState, need_bytes: int, node: str = "") -> Cause:
    free_bytes, name = _free_memory(state, node)
    text = f"{need_bytes} bytes of memory on {node or 'a node'}"
    return Cause(kind="memory", text=text, pool=f"node:{name}" if name else "", need=need_bytes, free=free_bytes)
