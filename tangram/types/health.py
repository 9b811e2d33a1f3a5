"""Health of the gateway, on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType


class Health(Struct, frozen=True, kw_only=True):
    """Whether the process lives, or takes work."""

    status: Annotated[str, Meta(description="ok or ready; otherwise why no work is taken")]
    warnings: Annotated[Sequence[str], Meta(description="What does not stop it, and should be looked at")] = ()
    record: Annotated[
        str | UnsetType,
        Meta(description="After an unclean end: checking, ok, unfinished (out of time), or what is wrong"),
    ] = UNSET
    preparing: Annotated[
        tuple[str, ...] | UnsetType, Meta(description="Functions that are made ready: their actions queue")
    ] = UNSET
    unavailable: Annotated[
        tuple[str, ...] | UnsetType,
        Meta(description="Functions that cannot be made ready, and are tried again; the function tells why"),
    ] = UNSET
