"""What every message of the channel is, and how an error travels in one."""

from __future__ import annotations

import msgspec

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
