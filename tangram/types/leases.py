"""Leases of trajectories: who opened them says now and then that it lives."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tangram.types.values.scalars import Name

#: Trajectories of one request.
LEASES_MAX = 1000
LEASE_MIN_S, LEASE_MAX_S = 1.0, 86400.0
#: Of what is opened for a client that renews leases.
OpeningLease = Annotated[
    Annotated[float, Meta(ge=LEASE_MIN_S, le=LEASE_MAX_S)] | None,
    Meta(
        description="Seconds for which it is held from now on for a client that renews its lease; without, and "
        "without a renewal, until its idle_ttl"
    ),
]


class LeaseRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trajectories whose client lives. Each ends when for ``lease_s`` no such request came and no action used it."""

    trajectories: Annotated[tuple[Name, ...], Meta(max_length=LEASES_MAX)]
    lease_s: Annotated[float, Meta(ge=LEASE_MIN_S, le=LEASE_MAX_S, description="Seconds")] = 300.0


class LeaseAnswer(Struct, frozen=True, kw_only=True):
    """What became of them."""

    gone: Annotated[tuple[Name, ...], Meta(description="Those that do not live (any more)")]
