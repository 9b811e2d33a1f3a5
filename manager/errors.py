"""Typed errors and the closed list of reasons for which an action can fail."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar


class Reason(StrEnum):
    """Why an action did not succeed. The list is closed: callers may switch on it."""

    TIMEOUT = "timeout"  #: the execution exceeded ``timeout``
    QUEUE_TIMEOUT = "queue_timeout"  #: it waited longer than ``queue_timeout`` or ``max_age``
    OUT_OF_MEMORY = "out_of_memory"  #: the sandbox or the device ran out of memory
    CANCELLED = "cancelled"  #: the caller asked, or went away
    ENVIRONMENT_LOST = "environment_lost"  #: the sandbox died under the action
    NODE_LOST = "node_lost"  #: the node that ran it is gone
    GATEWAY_RESTART = "gateway_restart"  #: it ran while the gateway was killed
    QUOTA = "quota"  #: a quota or concurrency bound refused it
    UPSTREAM = "upstream"  #: an external service failed
    HANDLER_ERROR = "handler_error"  #: the user's own code raised
    MODEL_ERROR = "model_error"  #: a model could not be loaded or run
    INVALID_INPUT = "invalid_input"  #: the input cannot be executed
    OUTPUT_LIMIT = "output_limit"  #: the result exceeds ``output_limit``
    INTERNAL = "internal"  #: our own fault


#: In the detail of an error: the sandbox is gone, with what a trajectory had in it.
FILES_LOST = "environment_lost"
#: In the detail of an error: a machine ran short before the action began, so that nothing of it ran.
NOT_BEGUN = "not_begun"
#: In the detail of an end: it was asked for by whoever had called, and nobody knows whether it came before the loss.
CANCEL_ASKED = "cancel_asked"


class CodedError(Exception):
    """Something a caller can be told: what, where and for which invocation.

    ``code`` is stable and crosses every wire; ``gateway.errors`` maps it to HTTP, gRPC and exit statuses.
    """

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        component: str = "gateway",
        invocation_id: str | None = None,
        retry_after_s: float | None = None,
        detail: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.component = component
        self.invocation_id = invocation_id
        self.retry_after_s = retry_after_s
        self.detail: Mapping[str, object] = detail or {}


class InvalidInput(CodedError):
    """The input does not fit the function; ``detail["path"]`` is the JSON path at fault."""

    code = "invalid_input"


class InvalidConfig(CodedError):
    """The configuration cannot be used; the message names file, line, key path and the remedy."""

    code = "invalid_config"


class NotFound(CodedError):
    """No such function, invocation, trajectory or file."""

    code = "not_found"


class Conflict(CodedError):
    """The thing is in a state that does not allow the request."""

    code = "conflict"


class TrajectoryHasEnded(CodedError):
    """The caller expects a living trajectory, and it has ended: it was closed, or idle for too long."""

    code = "trajectory_ended"


class SnapshotLost(CodedError):
    """The node that has the snapshot is gone, and with it the files; it is there again if the node comes back."""

    code = "snapshot_lost"


class KeyReused(CodedError):
    """An Idempotency-Key came again with another body."""

    code = "idempotency_key_reused"


class TooLarge(CodedError):
    """A body, file or batch exceeds its configured bound."""

    code = "too_large"


class Unauthorized(CodedError):
    """The bearer token is missing or wrong."""

    code = "unauthorized"


class Forbidden(CodedError):
    """The caller is known, or needs not be, but may not do this; or a web page asks that is not the gateway's own."""

    code = "forbidden"


class Unsatisfiable(CodedError):
    """No node could ever satisfy this cost; the largest node is named."""

    code = "unsatisfiable"


class QuotaExceeded(CodedError):
    """The caller's, the task's or the function's bound is reached; retry after ``retry_after_s``."""

    code = "quota_exceeded"


class CapacityExceeded(CodedError):
    """The gateway as a whole is full; retry after ``retry_after_s``."""

    code = "capacity_exceeded"


#: What a machine has too little of for a while, or a disk that fails: never the fault of who asked for the work.
EXHAUSTED = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.ENOBUFS,
        errno.EIO,
        errno.EROFS,
    )
)
EXHAUSTED_RETRY_S = 5.0


def exhaustion(error: BaseException, component: str) -> CapacityExceeded | None:
    """Return what is told of an error that says no more than that this machine ran short; None for another."""
    if not isinstance(error, MemoryError) and not (isinstance(error, OSError) and error.errno in EXHAUSTED):
        return None
    reason = "out of memory" if isinstance(error, MemoryError) else str(error)
    return CapacityExceeded(
        f"the gateway's machine ran short: {reason}", component=component, retry_after_s=EXHAUSTED_RETRY_S
    )


class FunctionUnavailable(CodedError):
    """The function cannot be made ready, and is not tried again soon enough; the message says what is missing."""

    code = "function_unavailable"


class Draining(CodedError):
    """The gateway is shutting down and takes no new work."""

    code = "draining"


class StorageUnavailable(CodedError):
    """The record cannot be written (disk full or corrupt): the work was not accepted."""

    code = "storage_unavailable"


class Unsupported(CodedError):
    """This sandbox, device or model cannot do what was asked; the message says which can."""

    code = "unsupported"


class ActionFailed(CodedError):
    """Raised by a runtime: the action ends with this ``reason``. It becomes an Outcome, never a traceback."""

    code = "action_failed"

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        component: str,
        result: object = None,
        retry_after_s: float | None = None,
        detail: Mapping[str, object] | None = None,
        usage: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(message, component=component, retry_after_s=retry_after_s, detail=detail)
        self.reason = reason
        #: What was measured until then; the unit ends each name.
        self.usage: Mapping[str, float] = usage or {}
        #: What is known so far (partial output, verdicts of the tests that ran), JSON-able, or None.
        self.result = result
