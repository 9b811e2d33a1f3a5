"""Which bound this machine has for a sandbox's disk: an image, or a walk by the watch alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import structlog

from manager.errors import Unsupported
from manager.function import Setting
from runtimes.sandbox.disk.image import ImageBound, probe, take_away

logger = structlog.get_logger("sandbox.disk")

COMPONENT = "sandbox.disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """How what a sandbox writes is bounded."""

    by: Annotated[
        Literal["auto", "image", "walk"],
        Setting(
            "by a file system image of its own, or by walks that end a sandbox above it; auto takes images where they "
            "can be made"
        ),
    ] = "auto"
    images_max: Annotated[int, Setting("file system images, and so loop devices, in use at once", ge=1)] = 1024


class DiskBound(Protocol):
    """Bounds the bytes and files below a directory. Its methods block; any thread may call them."""

    @property
    def name(self) -> str: ...

    def bind(self, place: Path, disk_bytes: int) -> None:
        """Bound what is written below an existing directory from now on; raises OSError or CapacityExceeded."""
        ...

    def adopt(self, place: Path) -> None:
        """Know of a directory that an earlier gateway bound."""
        ...

    def shows(self, place: Path) -> bool:
        """Return whether what was written below a bound directory is to be seen there."""
        ...

    def hand_over(self, place: Path) -> None:
        """Leave a file system of its own to the sandbox alone, which has mounted it elsewhere by now."""
        ...

    def release(self, place: Path) -> None:
        """Take the bound away, with what was written if it is a file system of its own; idempotent."""
        ...


class WalkBound:
    """No bound but the watch (`runtimes.sandbox.disk.watch`)."""

    name = "walk"

    def bind(self, place: Path, disk_bytes: int) -> None:
        """Do nothing."""

    def adopt(self, place: Path) -> None:
        """Do nothing."""

    def shows(self, place: Path) -> bool:
        return True

    def hand_over(self, place: Path) -> None:
        """Do nothing."""

    def release(self, place: Path) -> None:
        """Take away what a gateway with images has left there."""
        take_away(place)


def choose_bound(settings: DiskSettings, images: Path) -> DiskBound:
    """Return the bound of sandboxes' directories; images lie in ``images``. Blocks.

    Raises Unsupported, with the reason, if the one that is asked for by name cannot be had.
    """
    if settings.by in ("auto", "image"):
        reason = probe(images)
        if not reason:
            return ImageBound(images, settings.images_max)
        if settings.by == "image":
            raise Unsupported(f"sandbox.disk_bound.by: image cannot be had: {reason}", component=COMPONENT)
        logger.warning("no disk images: sandboxes are measured, and ended above their bound", why=reason)
    return WalkBound()
