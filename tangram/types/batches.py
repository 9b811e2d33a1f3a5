"""Batches on the wire: many calls in one request, and a verdict for each."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType, field

from tangram.types.invocations import Invocation
from tangram.types.problems import Problem
from tangram.types.steps import StepNumber
from tangram.types.values.scalars import JsonObject, Key, Name, Timeout, Wait


class BatchItem(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One asynchronous call of a batch."""

    function: Annotated[Name, Meta(description="A registered function")]
    input: Annotated[JsonObject, Meta(description="What the function is given")] = field(default_factory=dict)
    task: Annotated[Name | None, Meta(description="The RL task that it belongs to; default without")] = None
    trajectory: Annotated[Name | None, Meta(description="The rollout whose environment it needs")] = None
    step: Annotated[StepNumber | None, Meta(description="The step of the task that it belongs to")] = None
    timeout: Annotated[Timeout | None, Meta(description="Bound of the execution, at most the function's")] = None
    max_age: Annotated[Wait | None, Meta(description="It is given up if it still waits at this age")] = None
    key: Annotated[Key | None, Meta(description="The same key and body latch on to the first invocation")] = None


class BatchRequest(Struct, frozen=True, kw_only=True):
    """Calls that are accepted with one commit."""

    calls: tuple[BatchItem, ...]


class BatchVerdict(Struct, frozen=True, kw_only=True):
    """What became of one call: either its invocation or its problem."""

    status: Annotated[int, Meta(description="200 ended, 202 accepted, otherwise that of the problem")]
    invocation: Invocation | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET
    replayed: Annotated[
        bool | UnsetType, Meta(description="The key was known: nothing was run, this is the first call's invocation")
    ] = UNSET


class BatchAnswer(Struct, frozen=True, kw_only=True):
    """The verdicts, in the order of the calls."""

    results: tuple[BatchVerdict, ...]
