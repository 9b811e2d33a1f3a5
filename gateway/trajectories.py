"""Opening a trajectory: the one way of every door to a sandbox before its first action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from msgspec import convert
from msgspec.structs import replace as replaced

from gateway import wire
from gateway.services import Services
from manager.errors import InvalidInput, NotFound, Unsupported
from manager.function import FunctionSpec
from runtimes.sandbox.spec import chosen, forked
from tangram.types import LivingSandbox, SandboxChoice, TrajectoryInfo, TrajectoryOpening


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
    name = wire.name(trajectory, "trajectory")
    function = services.functions.get(wire.name(asked.function, "function"))
    if asked.snapshot is not None:
        function = _begun_with(services, function, asked)
    elif asked.sandbox is not None:
        _require_images(services, asked.sandbox)
        function = with_choice(function, asked.sandbox)
    if asked.sandbox is not None and asked.sandbox.image is not None and services.images is not None:
        await services.images.require(asked.sandbox.image)  # before it holds memory or a core
    task = wire.name(asked.task, "task")
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
