"""Open, end, fork and snapshot trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from msgspec import convert
from msgspec.structs import replace as replaced

from gateway import serialization
from gateway.cluster.store import NodeSnapshot
from gateway.services import Services
from manager.errors import ActionFailed, CodedError, Conflict, InvalidInput, NotFound, Reason, Unsupported
from manager.function import FunctionSpec
from runtimes.sandbox.spec import chosen, forked
from tangram.types import (
    ForkAnswer,
    ForkRequest,
    LivingSandbox,
    SandboxChoice,
    SnapshotInfo,
    SnapshotList,
    TrajectoryInfo,
    TrajectoryOpening,
)


async def open_trajectory(
    services: Services, trajectory: str, asked: TrajectoryOpening, gone: Callable[[], bool] = lambda: False
) -> TrajectoryInfo:
    """Make the trajectory's sandbox as it was chosen, or find that it lives so already; return the trajectory.

    It is held from the beginning for who asks for that: whoever dies while it is made leaves it to its lease. Nobody
    holds what was made for a caller who is ``gone`` at the end, but for the time in which he may ask again.

    Raises NotFound for the function or the snapshot, SnapshotLost if that is lost with its node, InvalidInput with the
    field that the function does not allow, Conflict if the trajectory lives in another sandbox, and what the engine
    raises.
    """
    name = serialization.name(trajectory, "trajectory")
    function = services.functions.get(serialization.name(asked.function, "function"))
    if asked.snapshot is not None:
        function = _begun_with(services, function, asked)
    elif asked.sandbox is not None:
        _require_images(services, asked.sandbox)
        function = with_choice(function, asked.sandbox)
    if asked.sandbox is not None and asked.sandbox.image is not None and services.images is not None:
        await services.images.require(asked.sandbox.image)  # before it holds memory or a core
    task = serialization.name(asked.task, "task")
    services.functions.task(task)
    lease = None
    if asked.lease_s is not None and services.engine.trajectory(name) is None:
        lease = services.leases.hold(name, asked.lease_s)
    try:
        if asked.snapshot is None:
            await services.engine.open_trajectory(name, task, function)
        else:
            begin = partial(services.engine.open_trajectory, name, task, function)
            await services.snapshots.begin(asked.snapshot, begin)
    except BaseException:
        if lease is not None:
            services.leases.let_go(name, lease)
        raise
    if lease is None and asked.lease_s is not None:
        services.leases.hold(name, asked.lease_s)  # it lived, and whose opening is refused holds it no shorter
    elif lease is not None and gone():
        services.leases.abandon(name, lease)
    if asked.step is not None:
        await services.steps.opened(name, task, asked.step)
    return trajectory_info(services, name)


def with_choice(function: FunctionSpec, asked: SandboxChoice) -> FunctionSpec:
    """Return the function with the sandbox that a trajectory has chosen; raises InvalidInput."""
    if function.sandbox is None:
        raise _no_choice(function, "sandbox")
    return replace(function, sandbox=chosen(function.sandbox, asked))


def _begun_with(services: Services, function: FunctionSpec, asked: TrajectoryOpening) -> FunctionSpec:
    """Return the function with a sandbox that begins with a snapshot, on the machine that has it.

    Raises as `SnapshotCatalogue.get`, InvalidInput or Conflict.
    """
    if asked.sandbox is not None:
        told = "$.sandbox: what begins with a snapshot has the choices of the trajectory it was taken of; leave it out"
        raise InvalidInput(told, component="http", detail={"path": "$.sandbox"})
    if function.sandbox is None:
        raise _no_choice(function, "snapshot")
    snapshot = services.snapshots.get(asked.snapshot or "")
    sandbox = forked(function.sandbox, snapshot.record, images=snapshot.record.provider == "container")
    return replace(function, sandbox=sandbox, on_node=snapshot.node)


def _no_choice(function: FunctionSpec, field: str) -> InvalidInput:
    told = f"$.{field}: function {function.name!r} has no sandbox of which anything could be chosen"
    return InvalidInput(told, component="http", detail={"path": f"$.{field}"})


def _require_images(services: Services, asked: SandboxChoice) -> None:
    """Raise Unsupported if an image is named where sandboxes have none."""
    kind = services.sandboxes().kind
    if asked.image is not None and kind != "container":
        told = f"$.sandbox.image: this gateway's sandboxes are of kind {kind} and have no images; serve it with Docker"
        raise Unsupported(told, component="sandbox", detail={"path": "$.sandbox.image"})


def trajectory_info(services: Services, name: str) -> TrajectoryInfo:
    """Return a living trajectory with its sandbox; raises NotFound."""
    found = services.engine.trajectory(name)
    if found is None:
        raise NotFound(f"no trajectory {name!r}")
    sandbox = services.environments.get(name)
    living = services.machines.living(name)
    if sandbox is not None:
        spec = sandbox.spec
        living = LivingSandbox(
            image=spec.image,
            workdir=spec.workdir,
            user=spec.user,
            network=spec.network.value,
            memory_bytes=spec.memory_bytes,
        )
    return leased(services, replaced(convert(found, TrajectoryInfo), sandbox=living))


def leased(services: Services, trajectory: TrajectoryInfo) -> TrajectoryInfo:
    """Return it with the time for which its client holds it."""
    return replaced(trajectory, lease_left_s=services.leases.left_s(trajectory.trajectory))


COMPONENT = "snapshots"
#: Sandboxes that one fork has made at a time, beside the provider's own bound.
OPENED_AT_ONCE = 16


async def take_snapshot(services: Services, trajectory: str) -> SnapshotInfo:
    """Keep the files of a trajectory's sandbox, as they are when all that was asked of it before has ended.

    It stays where the trajectory lives. Raises NotFound without such a trajectory or its sandbox, Conflict if it ends
    meanwhile or its files are lost or on their way, CapacityExceeded while its node is not reached, and as
    `SnapshotCatalogue.take`.
    """
    name = serialization.name(trajectory, "trajectory")

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
    name = serialization.name(trajectory, "trajectory")
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
        made_at=serialization.instant(record.made_s),
        used_at=serialization.instant(record.used_s),
        in_use=in_use,
        node=found.node,
        lost=found.lost or None,
    )
