"""The one table of errors of all foreign dialects: what went wrong, and how each of them says it.

What its client tries again must not be lost, and what no try can mend must not be tried: the statuses are those that
the real clients were seen to react to so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gateway.invocations.record import Record
from manager.errors import CodedError, Reason


class Dialect(StrEnum):
    """Whose words are spoken."""

    REWARDS = "rewards"
    SANDBOXFUSION = "sandboxfusion"
    OPENAI = "openai"
    MCP = "mcp"
    SWEREX = "swerex"
    DOCKER = "docker"


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


#: By `CodedError.code`.
KIND_BY_CODE: Mapping[str, FaultKind] = {
    "invalid_input": FaultKind.INPUT,
    "invalid_config": FaultKind.INTERNAL,
    "not_found": FaultKind.NOT_FOUND,
    "trajectory_ended": FaultKind.CONFLICT,
    "snapshot_lost": FaultKind.CONFLICT,
    "conflict": FaultKind.CONFLICT,
    "idempotency_key_reused": FaultKind.CONFLICT,
    "too_large": FaultKind.TOO_LARGE,
    "unauthorized": FaultKind.UNAUTHORIZED,
    "forbidden": FaultKind.FORBIDDEN,
    "unsatisfiable": FaultKind.UNSUPPORTED,
    "quota_exceeded": FaultKind.BUSY,
    "capacity_exceeded": FaultKind.BUSY,
    "function_unavailable": FaultKind.BUSY,
    "draining": FaultKind.BUSY,
    "storage_unavailable": FaultKind.BUSY,
    "unsupported": FaultKind.UNSUPPORTED,
    "action_failed": FaultKind.FAILED,
    "method_not_allowed": FaultKind.METHOD,
    "too_slow": FaultKind.BUSY,
    "internal": FaultKind.INTERNAL,
}

#: By the reason of an invocation that ended badly.
KIND_BY_REASON: Mapping[Reason, FaultKind] = {
    Reason.TIMEOUT: FaultKind.TIMEOUT,
    Reason.QUEUE_TIMEOUT: FaultKind.BUSY,
    Reason.OUT_OF_MEMORY: FaultKind.FAILED,
    Reason.CANCELLED: FaultKind.LOST,
    Reason.ENVIRONMENT_LOST: FaultKind.LOST,
    Reason.NODE_LOST: FaultKind.LOST,
    Reason.GATEWAY_RESTART: FaultKind.LOST,
    Reason.QUOTA: FaultKind.BUSY,
    Reason.UPSTREAM: FaultKind.LOST,
    Reason.HANDLER_ERROR: FaultKind.FAILED,
    Reason.MODEL_ERROR: FaultKind.FAILED,
    Reason.INVALID_INPUT: FaultKind.INPUT,
    Reason.OUTPUT_LIMIT: FaultKind.FAILED,
    Reason.INTERNAL: FaultKind.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class ForeignError:
    """How a dialect says it: the HTTP status, and its own name or number for the error if it has them."""

    status: int
    name: str = ""
    code: int = 0


#: What each dialect says. slime and OpenRLHF try everything again that is not 2xx; verl tries a 504 again, and takes
#: every other error for a failed test; TRL ends a training at a 429, and tries 500, 502 and 503 again.
TABLE: Mapping[Dialect, Mapping[FaultKind, ForeignError]] = {
    Dialect.REWARDS: {
        FaultKind.INPUT: ForeignError(422),
        FaultKind.UNAUTHORIZED: ForeignError(401),
        FaultKind.FORBIDDEN: ForeignError(403),
        FaultKind.NOT_FOUND: ForeignError(404),
        FaultKind.METHOD: ForeignError(405),
        FaultKind.CONFLICT: ForeignError(409),
        FaultKind.TOO_LARGE: ForeignError(413),
        FaultKind.UNSUPPORTED: ForeignError(422),
        FaultKind.BUSY: ForeignError(504),
        FaultKind.TIMEOUT: ForeignError(504),
        FaultKind.LOST: ForeignError(502),
        FaultKind.FAILED: ForeignError(502),
        FaultKind.INTERNAL: ForeignError(500),
    },
    Dialect.SANDBOXFUSION: {
        FaultKind.INPUT: ForeignError(422),
        FaultKind.UNAUTHORIZED: ForeignError(401),
        FaultKind.FORBIDDEN: ForeignError(403),
        FaultKind.NOT_FOUND: ForeignError(404),
        FaultKind.METHOD: ForeignError(405),
        FaultKind.CONFLICT: ForeignError(409),
        FaultKind.TOO_LARGE: ForeignError(413),
        FaultKind.UNSUPPORTED: ForeignError(501),
        FaultKind.BUSY: ForeignError(504),
        FaultKind.TIMEOUT: ForeignError(504),
        FaultKind.LOST: ForeignError(504),
        FaultKind.FAILED: ForeignError(504),
        FaultKind.INTERNAL: ForeignError(504),
    },
    Dialect.OPENAI: {
        FaultKind.INPUT: ForeignError(400, "BadRequestError"),
        FaultKind.UNAUTHORIZED: ForeignError(401, "AuthenticationError"),
        FaultKind.FORBIDDEN: ForeignError(403, "PermissionDeniedError"),
        FaultKind.NOT_FOUND: ForeignError(404, "NotFoundError"),
        FaultKind.METHOD: ForeignError(405, "MethodNotAllowedError"),
        FaultKind.CONFLICT: ForeignError(400, "ConflictError"),
        FaultKind.TOO_LARGE: ForeignError(413, "RequestTooLargeError"),
        FaultKind.UNSUPPORTED: ForeignError(400, "NotImplementedError"),
        FaultKind.BUSY: ForeignError(503, "ServiceUnavailableError"),
        FaultKind.TIMEOUT: ForeignError(504, "TimeoutError"),
        FaultKind.LOST: ForeignError(502, "BadGatewayError"),
        FaultKind.FAILED: ForeignError(500, "InternalServerError"),
        FaultKind.INTERNAL: ForeignError(500, "InternalServerError"),
    },
    # The statuses are those of requests that were refused unread; an error that answers a message is 200.
    Dialect.MCP: {
        FaultKind.INPUT: ForeignError(400, code=-32602),
        FaultKind.UNAUTHORIZED: ForeignError(401, code=-32001),
        FaultKind.FORBIDDEN: ForeignError(403, code=-32003),
        FaultKind.NOT_FOUND: ForeignError(404, code=-32601),
        FaultKind.METHOD: ForeignError(405, code=-32601),
        FaultKind.CONFLICT: ForeignError(409, code=-32600),
        FaultKind.TOO_LARGE: ForeignError(413, code=-32600),
        FaultKind.UNSUPPORTED: ForeignError(501, code=-32602),
        FaultKind.BUSY: ForeignError(503, code=-32000),
        FaultKind.TIMEOUT: ForeignError(504, code=-32000),
        FaultKind.LOST: ForeignError(502, code=-32000),
        FaultKind.FAILED: ForeignError(500, code=-32603),
        FaultKind.INTERNAL: ForeignError(500, code=-32603),
    },
    # Its client raises what a 511 holds, and drops the words of every other status.
    Dialect.SWEREX: {
        FaultKind.INPUT: ForeignError(422),
        FaultKind.UNAUTHORIZED: ForeignError(401),
        FaultKind.FORBIDDEN: ForeignError(403),
        FaultKind.NOT_FOUND: ForeignError(404),
        FaultKind.METHOD: ForeignError(405),
        FaultKind.CONFLICT: ForeignError(511),
        FaultKind.TOO_LARGE: ForeignError(511),
        FaultKind.UNSUPPORTED: ForeignError(511),
        FaultKind.BUSY: ForeignError(511),
        FaultKind.TIMEOUT: ForeignError(511),
        FaultKind.LOST: ForeignError(511),
        FaultKind.FAILED: ForeignError(511),
        FaultKind.INTERNAL: ForeignError(511),
    },
    # Its clients try nothing again; the CLI pulls an image and creates once more after a 404.
    Dialect.DOCKER: {
        FaultKind.INPUT: ForeignError(400),
        FaultKind.UNAUTHORIZED: ForeignError(401),
        FaultKind.FORBIDDEN: ForeignError(403),
        FaultKind.NOT_FOUND: ForeignError(404),
        FaultKind.METHOD: ForeignError(405),
        FaultKind.CONFLICT: ForeignError(409),
        FaultKind.TOO_LARGE: ForeignError(413),
        FaultKind.UNSUPPORTED: ForeignError(501),
        FaultKind.BUSY: ForeignError(503),
        FaultKind.TIMEOUT: ForeignError(504),
        FaultKind.LOST: ForeignError(500),
        FaultKind.FAILED: ForeignError(500),
        FaultKind.INTERNAL: ForeignError(500),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One refused or failed call, before it is put into a dialect's words."""

    kind: FaultKind
    #: The stable word for it: a code, or the reason of an invocation.
    code: str
    message: str
    invocation_id: str | None = None
    retry_after_s: float | None = None
    #: Where in the request it is, as a JSON path; empty if nowhere.
    path: str = ""

    def said(self, dialect: Dialect) -> ForeignError:
        """Return how the dialect says it."""
        return TABLE[dialect][self.kind]


def fault_of(error: CodedError) -> Fault:
    """Return the fault of a refused request; an unknown code is our own."""
    return Fault(
        kind=KIND_BY_CODE.get(error.code, FaultKind.INTERNAL),
        code=error.code,
        message=error.message,
        invocation_id=error.invocation_id,
        retry_after_s=error.retry_after_s,
        path=str(error.detail.get("path", "")),
    )


def fault_of_end(record: Record) -> Fault | None:
    """Return the fault of an invocation that has ended; None if it succeeded."""
    if record.reason is None:
        return None
    return Fault(
        kind=KIND_BY_REASON[record.reason],
        code=record.reason.value,
        message=f"{record.function}: {record.reason}: {record.message}",
        invocation_id=record.id,
        retry_after_s=record.retry_after_s,
        path=str(record.detail.get("path", "")),
    )
