"""Snapshots and forks of trajectories: the one way of every door."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from msgspec.structs import replace as replaced

from gateway import wire
from gateway.cluster.snapshots import NodeSnapshot
from gateway.services import Services
from gateway.trajectories import open_trajectory
from manager.errors import ActionFailed, CodedError, Conflict, NotFound, Reason
from tangram.types import ForkAnswer, ForkRequest, SnapshotInfo, SnapshotList, TrajectoryInfo, TrajectoryOpening

COMPONENT = "snapshots"
#: Sandboxes that one fork has made at a time, beside the provider's own bound.
OPENED_AT_ONCE = 16


async def take_snapshot(services: Services, trajectory: str) -> SnapshotInfo:
    """Keep the files of a trajectory's sandbox, as they are when all that was asked of it before has ended.

    It stays where the trajectory lives. Raises NotFound without such a trajectory or its sandbox, Conflict if it ends
    meanwhile or its files are lost or on their way, CapacityExceeded while its node is not reached, and as
    `SnapshotCatalogue.take`.
    """
    name = wire.name(trajectory, "trajectory")

    async def take() -> NodeSnapshot:
        try:
            return await services.snapshots.take(name)
        except ActionFailed as error:
            if error.reason not in (Reason.ENVIRONMENT_LOST, Reason.NODE_LOST):
                raise
            raise Conflict(error.message, component=error.component, detail=error.detail) from None

    return snapshot_info(services, await services.turns.take(services.engine, name, "snapshot", take))


async def fork_trajectory(services: Services, trajectory: str, asked: ForkRequest) -> ForkAnswer:
    """Open trajectories that begin with the files of another one as they are now: all of them, or none and no snapshot.

    Raises as `take_snapshot` and `open_trajectory`, and Conflict for a name that lives or comes twice.
    """
    name = wire.name(trajectory, "trajectory")
    for place, new in enumerate(asked.to):
        if new == name or new in asked.to[:place]:
            told = f"$.to[{place}]: {new!r} is named twice, or is the trajectory itself"
            raise Conflict(told, component=COMPONENT, detail={"path": f"$.to[{place}]"})
        if services.engine.trajectory(new) is not None:
            raise Conflict(f"trajectory {new!r} lives already: choose another name, or end it", component=COMPONENT)
    found = services.engine.trajectory(name)
    if found is None:
        raise NotFound(f"no trajectory {name!r}", component=COMPONENT)
    services.functions.get(asked.function)
    taken = await take_snapshot(services, name)
    task = asked.task or str(found["task"])
    opening = TrajectoryOpening(function=asked.function, task=task, step=asked.step, snapshot=taken.snapshot)
    opening = replaced(opening, lease_s=asked.lease_s)
    try:
        # Which may wait long for memory, and be the least used.
        opened = await services.snapshots.begin(taken.snapshot, lambda: _open_all(services, asked.to, opening))
    except BaseException:
        with suppress(CodedError):  # nobody was told of it
            await services.snapshots.remove(taken.snapshot)
        raise
    return ForkAnswer(snapshot=snapshot_info(services, services.snapshots.get(taken.snapshot)), trajectories=opened)


async def _open_all(
    services: Services, names: tuple[str, ...], opening: TrajectoryOpening
) -> tuple[TrajectoryInfo, ...]:
    """Open them, or end those that could be opened and raise why another could not.

    They come under their step when all of them live: those of a fork that is refused were no rollouts.
    """
    alone = replaced(opening, step=None)
    gate = asyncio.Semaphore(OPENED_AT_ONCE)

    async def open_one(name: str) -> TrajectoryInfo:
        async with gate:
            return await open_trajectory(services, name, alone)

    opened = await asyncio.gather(*(open_one(name) for name in names), return_exceptions=True)
    failures = [each for each in opened if isinstance(each, BaseException)]
    if opening.step is not None and not failures:
        joining = (services.steps.opened(name, opening.task, opening.step) for name in names)
        joined = await asyncio.gather(*joining, return_exceptions=True)
        failures = [each for each in joined if each is not None]
    if failures:
        done = [each.trajectory for each in opened if not isinstance(each, BaseException)]
        await asyncio.gather(*(services.engine.end_trajectory(name) for name in done))
        raise failures[0]
    return tuple(each for each in opened if not isinstance(each, BaseException))


def list_snapshots(services: Services) -> SnapshotList:
    """Return every snapshot, the oldest first, and the bounds."""
    catalogue = services.snapshots
    used = catalogue.in_use()
    return SnapshotList(
        snapshots=tuple(_info(each, each.record.id in used) for each in catalogue.all()),
        count_max=catalogue.settings.count_max,
        total_max_bytes=catalogue.settings.total_max_bytes,
    )


def snapshot_info(services: Services, found: NodeSnapshot) -> SnapshotInfo:
    """Return a snapshot as it is told."""
    return _info(found, found.record.id in services.snapshots.in_use())


def _info(found: NodeSnapshot, in_use: bool) -> SnapshotInfo:
    record = found.record
    return SnapshotInfo(
        snapshot=record.id,
        trajectory=record.trajectory,
        task=record.task or "default",
        provider=record.provider,
        image=record.spec.image,
        size_bytes=record.size_bytes,
        made_at=wire.instant(record.made_s),
        used_at=wire.instant(record.used_s),
        in_use=in_use,
        node=found.node,
        lost=found.lost or None,
    )
