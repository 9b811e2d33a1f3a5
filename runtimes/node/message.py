"""What every message of the channel is, and how an error travels in one."""

from __future__ import annotations

import msgspec

from manager.action import State
from manager.errors import Reason


class Message(msgspec.Struct, array_like=True, gc=False):
    """What one frame says."""


class ErrorFacts(Message, kw_only=True):
    """A `CodedError`."""

    code: str
    message: str
    component: str
    reason: Reason | None
    retry_after_s: float | None
    #: `runtimes.node.wire.pack`ed.
    detail: bytes
    result: bytes


class ToldOutcome(msgspec.Struct, kw_only=True, gc=False):
    """A `manager.action.Outcome` without result and detail, by the same names, as it is made and read in no time."""

    state: State
    reason: Reason | None
    message: str
    component: str
    execution_s: float
    retry_after_s: float | None
    usage: dict[str, float]

    def __post_init__(self) -> None:
        if not self.state.terminal or (self.reason is None) != (self.state is State.SUCCEEDED):
            raise ValueError(f"no outcome is {self.state} for {self.reason}")
