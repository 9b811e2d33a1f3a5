"""The settings of the model runtime: devices, memory bounds and deadlines, as one frozen value."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from manager.function import Setting

DeviceKind = Literal["cpu", "cuda", "auto", "none"]

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How models are held and run on this node."""

    #: ``auto`` takes CUDA devices where NVML finds some and ``cpu`` devices elsewhere, ``none`` no devices.
    device: DeviceKind = "auto"
    #: Number of ``cpu`` devices, or most CUDA devices to use; 0 takes every CUDA device, or one ``cpu`` device.
    devices: int = 0
    #: Bytes of each device's arena; 0 takes `arena_share` of a CUDA device's memory, or 2 GiB of a ``cpu`` device.
    device_bytes: int = 0
    #: Share of a CUDA device's memory that weights may fill; the rest is left for activations.
    arena_share: float = 0.75
    #: Least recently used images are dropped beyond it.
    host_bytes: Annotated[
        int | None, Setting("host memory for checkpoints; half of the machine's", key="host_memory")
    ] = None
    #: Directory for the rendezvous files of device groups; made on demand.
    state_dir: Path = field(default_factory=lambda: Path("/tmp") / f"tangram-model-{os.getuid()}")
    #: Name of the node in residency reports.
    node: str = "local"
    #: torch threads of one ``cpu`` device where the lease grants no cores.
    device_threads: int = 1
    #: Threads that read a checkpoint into its image.
    read_threads: int = 4
    #: Bytes of one asynchronous copy to a device.
    copy_bytes: int = 64 * 2**20
    stuck_s: Annotated[
        float,
        Setting("a device's process without progress for so long is replaced, and its action tried once more", gt=0),
    ] = 60.0
    dir: Annotated[Path | None, Setting("where relative model paths begin; the YAML file's directory by default")] = (
        None
    )
    #: Seconds that a collective waits for its peers (gloo reports it; NCCL is covered by ``stuck_s``).
    collective_s: float = 30.0
    #: Seconds that a process may take to start (it imports torch).
    start_s: float = 180.0
    #: Seconds left to a cancelled action to end by itself before its processes are killed.
    kill_grace_s: float = 1.0
    #: Seconds that the leader of a batch waits for the members that the lease names.
    gather_s: float = 0.25
    #: Seconds between two looks at a checkpoint's files.
    recheck_s: float = 2.0
    #: Most sequences of one action.
    sequences_max: int = 4096
    #: Bytes per second assumed for a restore before one has been measured.
    restore_bytes_per_s: float = 2 * GIB


def host_bytes(settings: ModelSettings) -> int:
    """The bound on host images in bytes."""
    if settings.host_bytes:
        return settings.host_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
