"""Steps of RL tasks on the wire: what a trainer tells of one, and how far it is."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from tangram.types.values.scalars import Count, Instant, Name

#: As the trainer numbers them.
StepNumber = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StepPath(Struct, frozen=True, kw_only=True):
    """Which step of which task is meant."""

    task: Name
    step: StepNumber


class StepExpectation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer tells of a step."""

    expected: Annotated[
        int, Meta(ge=1, le=10**6, description="How many rollouts it is to have: trajectories, and calls of none")
    ]


class StepInfo(Struct, frozen=True, kw_only=True):
    """A step of a task. Its rollouts are the trajectories opened under it, and calls of no trajectory that name it."""

    task: Name
    step: StepNumber
    expected: Annotated[int | None, Meta(description="How many rollouts it is to have; null until that is told")]
    living: Annotated[Count, Meta(description="Rollouts that have begun and not ended")]
    ended: Annotated[Count, Meta(description="Rollouts that have ended, however")]
    opened_at: Instant
    ended_at: Annotated[Instant | None, Meta(description="When the last expected rollout ended; null before")]
    ends_in_s: Annotated[
        float | None, Meta(description="Seconds until it is expected to end; null if nothing tells, or it has")
    ]


class StepList(Struct, frozen=True, kw_only=True):
    """The steps of a task that are kept, that opened last first."""

    steps: tuple[StepInfo, ...]
