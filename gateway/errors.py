"""The one table of errors: what a failure is called on HTTP and on gRPC; its exit status is the CLI's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from manager.errors import CodedError, Reason
from tangram.types import UNSET, Problem


@dataclass(frozen=True, slots=True)
class Face:
    """How one failure shows itself: HTTP status, gRPC status name and a title."""

    http: int
    grpc: str
    title: str


#: By `CodedError.code`: the request itself was refused or failed.
FACES: Mapping[str, Face] = {
    "invalid_input": Face(422, "INVALID_ARGUMENT", "The input does not fit"),
    "invalid_config": Face(422, "INVALID_ARGUMENT", "The configuration cannot be used"),
    "not_found": Face(404, "NOT_FOUND", "No such thing"),
    "trajectory_ended": Face(410, "FAILED_PRECONDITION", "The trajectory has ended"),
    "snapshot_lost": Face(410, "FAILED_PRECONDITION", "The snapshot was lost"),
    "conflict": Face(409, "FAILED_PRECONDITION", "Not in this state"),
    "idempotency_key_reused": Face(422, "ALREADY_EXISTS", "The key was used with another body"),
    "too_large": Face(413, "RESOURCE_EXHAUSTED", "Too large"),
    "unauthorized": Face(401, "UNAUTHENTICATED", "A valid bearer token is needed"),
    "forbidden": Face(403, "PERMISSION_DENIED", "Not allowed to this caller"),
    "unsatisfiable": Face(422, "FAILED_PRECONDITION", "No node could ever run this"),
    "quota_exceeded": Face(429, "RESOURCE_EXHAUSTED", "A bound of the caller is reached"),
    "capacity_exceeded": Face(503, "UNAVAILABLE", "The gateway is full"),
    "function_unavailable": Face(503, "UNAVAILABLE", "The function cannot be made ready"),
    "draining": Face(503, "UNAVAILABLE", "The gateway is shutting down"),
    "storage_unavailable": Face(503, "UNAVAILABLE", "The record cannot be written"),
    "unsupported": Face(422, "UNIMPLEMENTED", "Not possible here"),
    "action_failed": Face(500, "INTERNAL", "The action failed"),
    "method_not_allowed": Face(405, "UNIMPLEMENTED", "The method is not allowed here"),
    "too_slow": Face(408, "DEADLINE_EXCEEDED", "The request came too slowly"),
    "internal": Face(500, "INTERNAL", "A fault of the gateway"),
}

#: By the reason of an invocation that ended badly. 200 marks an answer of the user's own work: it carries
#: ``X-Function-Error``, so that no client's default retry runs the work again.
REASON_FACES: Mapping[Reason, Face] = {
    Reason.TIMEOUT: Face(504, "DEADLINE_EXCEEDED", "The execution took too long"),
    Reason.QUEUE_TIMEOUT: Face(408, "DEADLINE_EXCEEDED", "It waited too long"),
    Reason.OUT_OF_MEMORY: Face(200, "OK", "Out of memory"),
    Reason.CANCELLED: Face(409, "CANCELLED", "Cancelled"),
    Reason.ENVIRONMENT_LOST: Face(502, "ABORTED", "The environment was lost"),
    Reason.NODE_LOST: Face(502, "ABORTED", "The node was lost"),
    Reason.GATEWAY_RESTART: Face(502, "ABORTED", "The gateway was restarted"),
    Reason.QUOTA: Face(429, "RESOURCE_EXHAUSTED", "A quota refused it"),
    Reason.UPSTREAM: Face(502, "UNAVAILABLE", "An external service failed"),
    Reason.HANDLER_ERROR: Face(200, "OK", "The function failed"),
    Reason.MODEL_ERROR: Face(500, "INTERNAL", "The model failed"),
    Reason.INVALID_INPUT: Face(422, "INVALID_ARGUMENT", "The input does not fit"),
    Reason.OUTPUT_LIMIT: Face(200, "OK", "The result is too large"),
    Reason.INTERNAL: Face(500, "INTERNAL", "A fault of the gateway"),
}


class MethodNotAllowed(CodedError):
    """The path exists, but not for this HTTP method; ``detail["allow"]`` lists those that do."""

    code = "method_not_allowed"


class TooSlow(CodedError):
    """A request's body did not arrive in time."""

    code = "too_slow"


def face(error: CodedError) -> Face:
    """The face of a refused request; an unknown code is our own fault."""
    return FACES.get(error.code, FACES["internal"])


def reason_face(reason: Reason | None) -> Face:
    """The face of an ended invocation; None is success."""
    return Face(200, "OK", "Succeeded") if reason is None else REASON_FACES[reason]


def problem(error: CodedError) -> Problem:
    """Return the problem body of a refused request, the same on HTTP and in batches."""
    shown = face(error)
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
