"""Container images, on the wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tangram.types.scheduling import Image
from tangram.types.values.scalars import Count, Instant


class ImageInfo(Struct, frozen=True, kw_only=True):
    """A container image of the engine, or one that is being pulled or could not be."""

    image: str
    state: Annotated[str, Meta(extra_json_schema={"enum": ["pulling", "present", "failed"]})]
    size_bytes: Annotated[Count, Meta(description="On the disk, with layers that others share; 0 before it is there")]
    done_bytes: Annotated[Count, Meta(description="Of a pull: what has arrived")]
    total_bytes: Annotated[Count, Meta(description="Of a pull: what is known to come")]
    pulled: Annotated[bool, Meta(description="Whether this gateway has pulled it, and may remove it")]
    kept: Annotated[bool, Meta(description="Whether a function has it, or a sandbox that is being made")]
    used_at: Annotated[Instant | None, Meta(description="Its last use, of one that was pulled")]
    problem: Annotated[str, Meta(description="Why its last pull failed, in the registry's words")]


class ImageList(Struct, frozen=True, kw_only=True):
    """The images, by name."""

    images: tuple[ImageInfo, ...]
    bound_bytes: Annotated[Count, Meta(description="Most bytes of those that were pulled; 0 without a bound")]


class ImagesWanted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images to be pulled ahead of a run."""

    images: Annotated[tuple[Image, ...], Meta(min_length=1, max_length=10_000)]
