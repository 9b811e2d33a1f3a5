"""What a call of a function gives back: its invocation, with its log if that was asked for."""

from __future__ import annotations

from typing import Self

import msgspec

from tangram.errors import InvocationFailed
from tangram.types import Invocation, LogLine


class InvocationResult(Invocation, frozen=True, kw_only=True, omit_defaults=True):
    """An invocation as its record stood when it was answered; its times are those of all its tries."""

    #: The log, if it was asked for with ``logs=True``.
    logs: tuple[LogLine, ...] = ()
    #: Whether the call's key was known: it ran nothing, and this is the invocation of the first call.
    replayed: bool = False

    def raise_for_failure(self) -> Self:
        """Return itself if it succeeded or has not ended; raises InvocationFailed."""
        if self.ended and not self.ok:
            raise InvocationFailed(self)
        return self


def result_of(invocation: Invocation, *, replayed: bool = False) -> InvocationResult:
    """Return the result of a call whose record is part of another answer."""
    fields = {name: getattr(invocation, name) for name in msgspec.structs.asdict(invocation)}
    return InvocationResult(**{**fields, "replayed": replayed})
