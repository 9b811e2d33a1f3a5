"""Health of the gateway, on the wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class Health(Struct, frozen=True, kw_only=True):
    """Whether the process lives, or takes work."""

    status: Annotated[str, Meta(description="ok or ready; otherwise why no work is taken")]
