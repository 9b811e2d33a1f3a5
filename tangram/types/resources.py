"""Resources on the wire: nodes, pools and who holds them, sandboxes, devices and the models on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tangram.types.values.scalars import Count

ChunkPair = Annotated[tuple[int, int], Meta(description="First device, and how many")]


class NodeInfo(Struct, frozen=True, kw_only=True):
    """A machine that actions run on."""

    node: str
    cores: Count
    devices: Count
    memory_bytes: Count
    held_bytes: Annotated[Count, Meta(description="Held by trajectories and actions")]
    trajectories: Annotated[Count, Meta(description="How many hold memory here")]


class RegionInfo(Struct, frozen=True, kw_only=True):
    """The devices of one node within a pool."""

    start: Count
    devices: Count


class ResidentInfo(Struct, frozen=True, kw_only=True):
    """A service on a device, as the scheduler believes."""

    service: str
    dop: Annotated[int, Meta(ge=1, description="On how many devices it lies")]
    bytes: Annotated[Count, Meta(description="What it takes of this device")]


class DeviceInfo(Struct, frozen=True, kw_only=True):
    """A device, as the scheduler believes."""

    device: Count
    memory_bytes: Count
    used_bytes: Count
    resident: tuple[ResidentInfo, ...]


class ServiceInfo(Struct, frozen=True, kw_only=True):
    """What a service takes of each device, and how long it takes to restore, by degree of parallelism."""

    bytes_by_dop: Mapping[str, int]
    restore_s_by_dop: Mapping[str, float]
    restore_s_by_node: Annotated[
        Mapping[str, Mapping[str, float]], Meta(description="The same as each node has measured it that can hold it")
    ] = msgspec.field(default_factory=dict)


class HolderInfo(Struct, frozen=True, kw_only=True):
    """Who holds units of a pool."""

    function: str
    task: str
    trajectory: str | None
    running_s: Annotated[float, Meta(description="Seconds since it was leased")]


class PoolInfo(Struct, frozen=True, kw_only=True):
    """A pool of one resource, and who holds what of it; the last fields are there if its kind has them."""

    kind: str
    node: Annotated[str, Meta(description="Whose units they are; empty for those of no node")]
    total: Count
    free: int
    held: Annotated[Mapping[str, int], Meta(description="Units by invocation")]
    policy: Annotated[str, Meta(description="The scheduling policy of its kind")]
    utilisation: Annotated[float, Meta(description="Smoothed share in use")]
    arrivals_per_s: Annotated[float, Meta(description="Smoothed rate of actions that need it")]
    holders: Annotated[
        Mapping[str, HolderInfo] | UnsetType, Meta(description="Who that is, by invocation; a batch by its first")
    ] = UNSET
    cores: Annotated[
        Mapping[str, tuple[int, ...]] | UnsetType, Meta(description="CPU: numbers of the cores by invocation")
    ] = UNSET
    regions: Annotated[Mapping[str, RegionInfo] | UnsetType, Meta(description="Devices: those of each node")] = UNSET
    chunks: Annotated[Mapping[str, ChunkPair] | UnsetType, Meta(description="Devices: chunk by invocation")] = UNSET
    devices: Annotated[tuple[DeviceInfo, ...] | UnsetType, Meta(description="Devices: what is resident")] = UNSET
    services: Annotated[Mapping[str, ServiceInfo] | UnsetType, Meta(description="Devices: known services")] = UNSET
    restores: Annotated[int | UnsetType, Meta(description="Devices: actions that had to wait for a restore")] = UNSET
    hits: Annotated[int | UnsetType, Meta(description="Devices: actions that found their service resident")] = UNSET
    prefetches: Annotated[
        Mapping[str, int] | UnsetType, Meta(description="Devices: how services that were brought in ahead fared")
    ] = UNSET
    period_s: Annotated[float | UnsetType, Meta(description="Quota: its period in seconds")] = UNSET
    next_return_s: Annotated[float | UnsetType | None, Meta(description="Quota: seconds until units return")] = UNSET


class SandboxesInfo(Struct, frozen=True, kw_only=True):
    """Which kind of sandbox is used, and what it promises, in plain words."""

    kind: Annotated[str, Meta(description="container, process (bubblewrap) or plain")]
    engine: str
    isolation: str
    runtime: Annotated[str, Meta(description="What containers are run with, unless a function says otherwise")]
    runtimes: Annotated[tuple[str, ...], Meta(description="What sandbox.runtime may be; empty without containers")]
    limits: Annotated[Mapping[str, bool], Meta(description="Promise -> whether it is kept")]
    weakenings: Annotated[Sequence[str], Meta(description="In what they are weaker than they could be")]
    disk: Annotated[
        Literal["image", "walk"],
        Meta(description="What bounds the disk: an image for each, or walks that end a sandbox"),
    ] = "walk"


class PlacedModel(Struct, frozen=True, kw_only=True):
    """A model on its chunk of devices."""

    service: str
    chunk: ChunkPair
    bytes: Annotated[Count | UnsetType, Meta(description="What it takes of this device")] = UNSET


class ModelDevice(Struct, frozen=True, kw_only=True):
    """One device's process, and what is really there."""

    index: Count
    kind: str
    name: str
    alive: bool
    pid: int | None
    restarts: Count
    running: Annotated[PlacedModel | None, Meta(description="What it computes now")]
    executions: Count
    swaps: Count
    hit_rate: Annotated[float, Meta(description="Share of the executions that found their model in place")]
    arena_bytes: Annotated[Count, Meta(description="Memory for models")]
    resident_bytes: Annotated[Count, Meta(description="What of it is taken")]
    used_bytes: Annotated[int | None, Meta(description="Memory of the device in use; null where it is not known")]
    resident: tuple[PlacedModel, ...]


class HostImagesInfo(Struct, frozen=True, kw_only=True):
    """Models in the host's memory; empty while no device was used."""

    bytes: Count | UnsetType = UNSET
    bound_bytes: Count | UnsetType = UNSET
    count: Count | UnsetType = UNSET
    reads: Annotated[Count | UnsetType, Meta(description="Times that a checkpoint was read from the disk")] = UNSET


class ModelsInfo(Struct, frozen=True, kw_only=True):
    """The model devices, and the counts of swaps since the start."""

    actions: Count
    executions: Count
    swaps: Count
    hit_rate: Annotated[float, Meta(description="Share of the executions that found their model in place")]
    evictions: Count
    restore_s: Annotated[float, Meta(description="Seconds of all restores")]
    restored_bytes: Count
    devices: tuple[ModelDevice, ...]
    services: Annotated[Mapping[str, tuple[ChunkPair, ...]], Meta(description="Where each service is resident")]
    host_images: HostImagesInfo


class ResourcesInfo(Struct, frozen=True, kw_only=True):
    """Nodes, pools by name, what the sandboxes are, and the model devices."""

    nodes: tuple[NodeInfo, ...]
    pools: Mapping[str, PoolInfo]
    sandboxes: SandboxesInfo
    models: ModelsInfo
