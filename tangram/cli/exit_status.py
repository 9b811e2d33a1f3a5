"""Exit statuses (sysexits): what a refused request and an invocation that ended badly are to a shell."""

from __future__ import annotations

from collections.abc import Mapping

#: When a keyboard interrupt ended the command.
INTERRUPTED = 130
#: For a code that this version does not know.
INTERNAL = 70

#: By the code of an error: the request was refused, or could not be made.
BY_CODE: Mapping[str, int] = {
    "invalid_input": 65,
    "invalid_config": 78,
    "not_found": 66,
    "conflict": 73,
    "idempotency_key_reused": 65,
    "too_large": 65,
    "too_slow": 124,
    "unauthorized": 77,
    "forbidden": 77,
    "unsatisfiable": 78,
    "quota_exceeded": 75,
    "capacity_exceeded": 75,
    "function_unavailable": 69,
    "draining": 75,
    "storage_unavailable": 74,
    "unsupported": 69,
    "port_failed": 69,
    "action_failed": 70,
    "method_not_allowed": 64,
    "trajectory_ended": 66,
    "snapshot_lost": 71,
    "connection_failed": 69,
    "unreadable_answer": 69,
    "internal": INTERNAL,
}

#: By the reason of an invocation that ended badly; 1 is a failure of the user's own work.
BY_REASON: Mapping[str, int] = {
    "timeout": 124,
    "queue_timeout": 124,
    "out_of_memory": 1,
    "cancelled": 130,
    "environment_lost": 71,
    "node_lost": 71,
    "gateway_restart": 71,
    "quota": 75,
    "upstream": 69,
    "handler_error": 1,
    "model_error": 70,
    "invalid_input": 65,
    "output_limit": 1,
    "internal": INTERNAL,
}


def of_code(code: str) -> int:
    """Return the exit status of a refused request."""
    return BY_CODE.get(code, INTERNAL)


def of_reason(reason: str | None) -> int:
    """Return the exit status of an invocation by its reason; None is success."""
    return 0 if reason is None else BY_REASON.get(reason, INTERNAL)
