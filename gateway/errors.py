"""The one table of errors: what a failure is on HTTP, on gRPC and in facades; its exit status is the CLI's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from manager.errors import CodedError, Reason
from tangram.types import UNSET, Problem


class FaultKind(StrEnum):
    """What went wrong, as far as a client's next step depends on it."""

    INPUT = "input"  #: the request cannot be right
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"  #: no such route or function
    METHOD = "method"
    CONFLICT = "conflict"  #: the thing is in another state
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"  #: known, and not possible here
    BUSY = "busy"  #: nothing was run: the same call may be sent again
    TIMEOUT = "timeout"  #: the execution took longer than it may
    LOST = "lost"  #: a sandbox, node or service was lost under it
    FAILED = "failed"  #: the function itself failed
    INTERNAL = "internal"  #: our own fault


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """How one failure shows itself: HTTP status, gRPC status name, what it is to a facade, and a title."""

    http: int
    grpc: str
    fault: FaultKind
    title: str


#: By `CodedError.code`: the request itself was refused or failed.
ERROR_STATUSES: Mapping[str, ErrorStatus] = {
    "invalid_input": ErrorStatus(422, "INVALID_ARGUMENT", FaultKind.INPUT, "The input does not fit"),
    "invalid_config": ErrorStatus(422, "INVALID_ARGUMENT", FaultKind.INTERNAL, "The configuration cannot be used"),
    "not_found": ErrorStatus(404, "NOT_FOUND", FaultKind.NOT_FOUND, "No such thing"),
    "trajectory_ended": ErrorStatus(410, "FAILED_PRECONDITION", FaultKind.CONFLICT, "The trajectory has ended"),
    "snapshot_lost": ErrorStatus(410, "FAILED_PRECONDITION", FaultKind.CONFLICT, "The snapshot was lost"),
    "conflict": ErrorStatus(409, "FAILED_PRECONDITION", FaultKind.CONFLICT, "Not in this state"),
    "idempotency_key_reused": ErrorStatus(
        422, "ALREADY_EXISTS", FaultKind.CONFLICT, "The key was used with another body"
    ),
    "too_large": ErrorStatus(413, "RESOURCE_EXHAUSTED", FaultKind.TOO_LARGE, "Too large"),
    "unauthorized": ErrorStatus(401, "UNAUTHENTICATED", FaultKind.UNAUTHORIZED, "A valid bearer token is needed"),
    "forbidden": ErrorStatus(403, "PERMISSION_DENIED", FaultKind.FORBIDDEN, "Not allowed to this caller"),
    "unsatisfiable": ErrorStatus(422, "FAILED_PRECONDITION", FaultKind.UNSUPPORTED, "No node could ever run this"),
    "quota_exceeded": ErrorStatus(429, "RESOURCE_EXHAUSTED", FaultKind.BUSY, "A bound of the caller is reached"),
    "capacity_exceeded": ErrorStatus(503, "UNAVAILABLE", FaultKind.BUSY, "The gateway is full"),
    "function_unavailable": ErrorStatus(503, "UNAVAILABLE", FaultKind.BUSY, "The function cannot be made ready"),
    "draining": ErrorStatus(503, "UNAVAILABLE", FaultKind.BUSY, "The gateway is shutting down"),
    "storage_unavailable": ErrorStatus(503, "UNAVAILABLE", FaultKind.BUSY, "The record cannot be written"),
    "unsupported": ErrorStatus(422, "UNIMPLEMENTED", FaultKind.UNSUPPORTED, "Not possible here"),
    "action_failed": ErrorStatus(500, "INTERNAL", FaultKind.FAILED, "The action failed"),
    "method_not_allowed": ErrorStatus(405, "UNIMPLEMENTED", FaultKind.METHOD, "The method is not allowed here"),
    "too_slow": ErrorStatus(408, "DEADLINE_EXCEEDED", FaultKind.BUSY, "The request came too slowly"),
    "port_failed": ErrorStatus(502, "UNAVAILABLE", FaultKind.LOST, "The server in the sandbox does not answer"),
    "internal": ErrorStatus(500, "INTERNAL", FaultKind.INTERNAL, "A fault of the gateway"),
}

#: By the reason of an invocation that ended badly. 200 marks an answer of the user's own work: it carries
#: ``X-Function-Error``, so that no client's default retry runs the work again.
REASON_STATUSES: Mapping[Reason, ErrorStatus] = {
    Reason.TIMEOUT: ErrorStatus(504, "DEADLINE_EXCEEDED", FaultKind.TIMEOUT, "The execution took too long"),
    Reason.QUEUE_TIMEOUT: ErrorStatus(408, "DEADLINE_EXCEEDED", FaultKind.BUSY, "It waited too long"),
    Reason.OUT_OF_MEMORY: ErrorStatus(200, "OK", FaultKind.FAILED, "Out of memory"),
    Reason.CANCELLED: ErrorStatus(409, "CANCELLED", FaultKind.LOST, "Cancelled"),
    Reason.ENVIRONMENT_LOST: ErrorStatus(502, "ABORTED", FaultKind.LOST, "The environment was lost"),
    Reason.NODE_LOST: ErrorStatus(502, "ABORTED", FaultKind.LOST, "The node was lost"),
    Reason.GATEWAY_RESTART: ErrorStatus(502, "ABORTED", FaultKind.LOST, "The gateway was restarted"),
    Reason.QUOTA: ErrorStatus(429, "RESOURCE_EXHAUSTED", FaultKind.BUSY, "A quota refused it"),
    Reason.UPSTREAM: ErrorStatus(502, "UNAVAILABLE", FaultKind.LOST, "An external service failed"),
    Reason.HANDLER_ERROR: ErrorStatus(200, "OK", FaultKind.FAILED, "The function failed"),
    Reason.MODEL_ERROR: ErrorStatus(500, "INTERNAL", FaultKind.FAILED, "The model failed"),
    Reason.INVALID_INPUT: ErrorStatus(422, "INVALID_ARGUMENT", FaultKind.INPUT, "The input does not fit"),
    Reason.OUTPUT_LIMIT: ErrorStatus(200, "OK", FaultKind.FAILED, "The result is too large"),
    Reason.INTERNAL: ErrorStatus(500, "INTERNAL", FaultKind.INTERNAL, "A fault of the gateway"),
}


class MethodNotAllowed(CodedError):
    """The path exists, but not for this HTTP method; ``detail["allow"]`` lists those that do."""

    code = "method_not_allowed"


class TooSlow(CodedError):
    """A request's body did not arrive in time."""

    code = "too_slow"


class PortFailed(CodedError):
    """What listens on a port of a sandbox, if anything does, gave no answer that can be passed on."""

    code = "port_failed"


def error_status(error: CodedError) -> ErrorStatus:
    """The error_status of a refused request; an unknown code is our own fault."""
    return ERROR_STATUSES.get(error.code, ERROR_STATUSES["internal"])


def problem(error: CodedError) -> Problem:
    """Return the problem body of a refused request, the same on HTTP and in batches."""
    shown = error_status(error)
    return Problem(
        type=f"urn:tangram:error:{error.code}",
        title=shown.title,
        status=shown.http,
        code=error.code,
        detail=error.message,
        component=error.component,
        invocation_id=UNSET if error.invocation_id is None else error.invocation_id,
        retry_after_s=UNSET if error.retry_after_s is None else error.retry_after_s,
        errors=dict(error.detail) if error.detail else UNSET,
    )


def retry_after(seconds: float) -> str:
    """The value of a Retry-After header: whole seconds, at least one."""
    return str(max(1, math.ceil(seconds)))
