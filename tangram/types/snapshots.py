"""Snapshots of trajectories, and forks that begin with them, on the wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tangram.types.leases import OpeningLease
from tangram.types.scheduling import SnapshotId, TrajectoryInfo
from tangram.types.steps import StepNumber
from tangram.types.values.scalars import Count, Instant, Name


class SnapshotInfo(Struct, frozen=True, kw_only=True):
    """The files of a trajectory's sandbox as they were at a moment."""

    snapshot: SnapshotId
    trajectory: Annotated[Name, Meta(description="Whose files they were")]
    task: Name
    provider: Annotated[str, Meta(description="The kind of sandbox that can begin with it")]
    image: Annotated[str, Meta(description="The image below it; of no meaning where sandboxes are processes")]
    size_bytes: Annotated[Count, Meta(description="On the disk, beside the image")]
    made_at: Instant
    used_at: Annotated[Instant, Meta(description="When a sandbox began with it last, or it was taken")]
    in_use: Annotated[bool, Meta(description="Whether a living trajectory began with it: then it is not removed")]
    node: Annotated[str, Meta(description="The machine that has it; what begins with it begins there")] = ""
    lost: Annotated[str | None, Meta(description="Why it cannot be had before its node is back, or null")] = None


class SnapshotList(Struct, frozen=True, kw_only=True):
    """The snapshots, the oldest first."""

    snapshots: tuple[SnapshotInfo, ...]
    count_max: Annotated[
        Count, Meta(description="Most on the gateway's machine; beyond it those used least recently go")
    ]
    total_max_bytes: Annotated[Count, Meta(description="Most bytes of all of them; likewise")]


class ForkRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for trajectories that begin with another's files as they are now."""

    function: Annotated[Name, Meta(description="The registered function whose sandbox it is, as when one is opened")]
    to: Annotated[
        tuple[Name, ...], Meta(min_length=1, max_length=256, description="Names of trajectories that do not live yet")
    ]
    task: Annotated[Name | None, Meta(description="The RL task that they belong to, by default the other's")] = None
    step: Annotated[StepNumber | None, Meta(description="The step of the task that they belong to")] = None
    lease_s: OpeningLease = None


class ForkAnswer(Struct, frozen=True, kw_only=True):
    """What was forked, and with which snapshot it began."""

    snapshot: SnapshotInfo
    trajectories: tuple[TrajectoryInfo, ...]
