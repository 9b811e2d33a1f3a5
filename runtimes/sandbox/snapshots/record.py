"""What is written down about each snapshot, so that the next gateway knows of it; and the bounds of them all."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from manager.function import SandboxSpec, Setting

#: In a provider's state directory: a directory for each snapshot.
SNAPSHOTS = "snapshots"
NAME = "record.json"
#: Label of a snapshot's image: the snapshot's id.
LABEL = "tangram.snapshot"
#: The repository of the images of snapshots, whose tag is the id.
REPOSITORY = "tangram-snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """How many snapshots are kept, and for how long; none goes while a trajectory lives that began with it."""

    count_max: Annotated[
        int, Setting("most snapshots; beyond it those used least recently are removed, never one in use", ge=1)
    ] = 64
    total_max_bytes: Annotated[
        int, Setting("most bytes of all of them on the disk; likewise", key="total_max", ge=1)
    ] = 20 * 2**30
    age_s: Annotated[float, Setting("one that was not used for so long is removed", gt=0)] = 7 * 86400.0
    at_once: Annotated[int, Setting("most that are taken at a time; more wait", ge=1)] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshotSettings:
    """How many snapshots all nodes together keep; those of each are its own `sandbox.snapshots`."""

    count_max: Annotated[
        int, Setting("most snapshots on all nodes; beyond it those used least recently are removed", ge=1)
    ] = 4096
    total_max_bytes: Annotated[
        int, Setting("most bytes of all of them on the nodes' disks; likewise", key="total_max", ge=1)
    ] = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """One snapshot."""

    id: str
    #: Whose files they were.
    trajectory: str
    task: str
    #: The kind of provider that made it, and no other can begin a sandbox with it.
    provider: str
    #: The sandbox in which the trajectory lived; of its environment only what the trajectory has chosen.
    spec: SandboxSpec
    #: Time of day at which it was taken, and at which a sandbox began with it last.
    made_s: float
    used_s: float
    #: On the disk, beside what the image has.
    size_bytes: int = 0
    #: False while it is being taken: if the gateway ends meanwhile, the next one removes it.
    ready: bool = False

    @property
    def image(self) -> str:
        """The name of its image, where sandboxes are containers."""
        return f"{REPOSITORY}:{self.id}"

    def write(self, root: Path) -> None:
        """Write it below ``root``, which only the owner may enter."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = root / self.id
        place.mkdir(mode=0o700, exist_ok=True)
        part = place / f"{NAME}.part"
        part.write_bytes(msgspec.json.encode(self))
        part.replace(place / NAME)


def read_snapshots(root: Path) -> list[SnapshotRecord]:
    """Return the records below ``root``; what has none that is whole is removed. Blocks."""
    found: list[SnapshotRecord] = []
    for place in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            found.append(msgspec.json.decode((place / NAME).read_bytes(), type=SnapshotRecord))
        except (OSError, msgspec.DecodeError):
            shutil.rmtree(place, ignore_errors=True)
    return found
