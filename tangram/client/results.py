"""What a call of a function gives back: its invocation, with its log if that was asked for."""

from __future__ import annotations

from typing import Self

import msgspec

from tangram.errors import InvocationFailed
from tangram.types import Invocation, LogLine


class InvocationResult(Invocation, frozen=True, kw_only=True, omit_defaults=True):
    """An invocation as its record stood when it was answered; all times are those of its last try."""

    #: The log, if it was asked for with ``logs=True``.
    logs: tuple[LogLine, ...] = ()

    def raise_for_failure(self) -> Self:
        """Return itself if it succeeded or has not ended; raises InvocationFailed."""
        if self.ended and not self.ok:
            raise InvocationFailed(self)
        return self


def result_of(invocation: Invocation) -> InvocationResult:
    """Return the result of a call whose record is part of another answer."""
    return InvocationResult(**{name: getattr(invocation, name) for name in msgspec.structs.asdict(invocation)})
