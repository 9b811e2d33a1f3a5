"""A small world for policies: one pool, actions in it, and the rules that a decision must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manager.action import Action, Amdahl, Chunk, UnitSet
from manager.scheduler.policy import ChunkView, CrowdView, Decision, PoolView, RunningView, WaitingView


def suite(
    name: str, t_ori_s: float = 80.0, *, most: int = 32, serial: float = 0.05, submitted_s: float = 0.0
) -> Action:
    """A malleable test run."""
    return Action(
        id=name,
        function="unit_tests",
        cost={"cpu": UnitSet.span(1, most)},
        key="cpu",
        elasticity=Amdahl(serial),
        t_ori_s=t_ori_s,
        malleable=True,
        submitted_s=submitted_s,
    )


def shell(name: str, t_ori_s: float = 0.3, submitted_s: float = 0.0) -> Action:
    """A short rigid command."""
    return Action(id=name, function="shell", cost={"cpu": UnitSet.fixed(1)}, t_ori_s=t_ori_s, submitted_s=submitted_s)


def teacher(name: str, service: str, t_ori_s: float = 1.0) -> Action:
    """A request to a model service on 1, 2, 4 or 8 devices."""
    return Action(
        id=name,
        function="teacher",
        cost={"gpu": UnitSet.of((1, 2, 4, 8))},
        key="gpu",
        elasticity=Amdahl(0.05),
        t_ori_s=t_ori_s,
        service=service,
    )


def running(action: Action, units: int, *, ends_in_s: float | None = None, workers: int = 0) -> RunningView:
    duration_s = action.duration_s(units) if ends_in_s is None else ends_in_s
    return RunningView(
        action=action, units=units, ends_in_s=duration_s, started_s=0.0, remaining=1.0, workers=workers or units
    )


def pool(
    total: int,
    waiting: Sequence[Action],
    running_now: Sequence[RunningView] = (),
    *,
    now_s: float = 0.0,
    worker_cost_s: float = 0.0,
    utilisation: float = 1.0,
    crowd: bool = False,
) -> PoolView:
    """Cores: what nobody holds is free; candidates are the waiting actions that fit together at their minimum.

    With ``crowd`` the policy is shown what waits by its expected work as well.
    """
    free = total - sum(one.units for one in running_now)
    left, candidates = free, []
    for action in waiting:
        least = action.cost["cpu"].minimum
        if least > left:
            break
        left -= least
        limit = action.cost["cpu"].at_most(free)
        assert limit is not None
        candidates.append(WaitingView(action=action, limit=limit))
    return PoolView(
        name="cpu:node0",
        now_s=now_s,
        total=total,
        free=free,
        running=running_now,
        candidates=candidates,
        queued=waiting,
        backlog=len(waiting),
        eligible=waiting,
        crowd=crowd_of(waiting) if crowd else None,
        utilisation=utilisation,
        worker_cost_s=worker_cost_s,
    )


def crowd_of(waiting: Sequence[Action]) -> CrowdView:
    """The waiting actions by their expected work."""
    by_work = sorted(waiting, key=lambda action: action.t_ori_s or 1.0)
    return CrowdView(
        elastic=sum(action.key == "cpu" for action in waiting),
        work_s=lambda: sum(action.cost["cpu"].minimum * (action.t_ori_s or 1.0) for action in waiting),
        shortest=lambda: iter(by_work),
    )


def devices(
    free: Sequence[tuple[int, int]],
    waiting: Sequence[Action],
    running_now: Sequence[RunningView] = (),
    resident: Mapping[str, tuple[tuple[int, int], ...]] | None = None,
    restore_s: float = 1.0,
    recent: Mapping[str, float] | None = None,
    capacity: int = 100,
) -> PoolView:
    """Chunks of devices; restoring a service takes ``restore_s`` over the size of the chunk.

    Any place holds ``capacity`` services; those that are resident there in the same size go in order of their names.
    """
    units = sum(size for _, size in free)
    warm = {name: tuple(Chunk(*chunk) for chunk in chunks) for name, chunks in (resident or {}).items()}

    def evicts(_: str, chunk: Chunk) -> list[tuple[str, int]]:
        there = sorted(name for name, chunks in warm.items() if chunk in chunks)
        return [(name, chunk.size) for name in there[: max(0, len(there) + 1 - capacity)]]

    view = ChunkView(
        free=tuple(Chunk(*chunk) for chunk in free),
        resident=warm,
        restore_s=lambda _, size: restore_s / size,
        evicts=evicts,
        recent=lambda service: (recent or {}).get(service, 0.0),
    )
    return PoolView(
        name="gpu",
        now_s=0.0,
        total=units + sum(one.units for one in running_now),
        free=units,
        running=running_now,
        candidates=[WaitingView(action=action, limit=max(size for _, size in free)) for action in waiting[:units]],
        queued=waiting,
        backlog=len(waiting),
        eligible=waiting,
        chunks=view,
    )


def check_sums(view: PoolView, decision: Decision) -> None:
    """Units are admissible and there are enough of them: shrinks first, then starts, then growths."""
    held = {one.action.id: one for one in view.running}
    waiting = {action.id: action for action in view.eligible}
    free = view.free
    for resize in decision.resizes:
        one = held[resize.action_id]
        assert resize.units in one.action.cost["cpu"] and resize.units <= one.workers
        free -= resize.units - one.units
    for start in decision.starts:
        kind = view.name.partition(":")[0]
        assert start.units in waiting[start.action_id].cost[kind]
        free -= start.units
    assert free >= 0, f"{-free} units too many: {decision}"
    assert len({start.action_id for start in decision.starts}) == len(decision.starts)
