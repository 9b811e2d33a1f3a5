"""Retries: whether and when a failed invocation is tried again; pure."""

from __future__ import annotations

from manager.action import Outcome
from manager.errors import CANCEL_ASKED, FILES_LOST, NOT_BEGUN, Reason
from manager.function import FunctionSpec
from tangram.types import backoff_s

#: Reasons that are the machinery's fault: an idempotent function is tried again without being asked to.
INFRASTRUCTURE = frozenset({Reason.ENVIRONMENT_LOST, Reason.NODE_LOST, Reason.GATEWAY_RESTART})
INFRASTRUCTURE_ATTEMPTS = 3


def next_try_s(
    function: FunctionSpec,
    attempt: int,
    outcome: Outcome,
    chance: float,
    left_s: float | None = None,
    *,
    alone: bool = True,
    patience_s: float = 0.0,
) -> float | None:
    """Seconds until try ``attempt + 1``, or None when it is over.

    One that is not ``alone``, but was to go on from the files of a trajectory's lost sandbox, is not tried unasked. One
    that has not begun, as a machine ran short, is tried for ``patience_s`` more, whatever the function says of tries.

    Exponential backoff with full jitter (``chance`` is uniform in [0, 1)), never sooner than the Retry-After
    of an upstream, and never as late as ``left_s``, the age that is left. Without one an upstream may ask for no
    longer than the function waits anyway.
    """
    reason = outcome.reason
    if reason is None or reason is Reason.CANCELLED or CANCEL_ASKED in outcome.detail:
        return None
    spec = function.retry
    by_function = reason in spec.on and attempt < spec.max_attempts
    bereft = not alone and FILES_LOST in outcome.detail
    part = chance if spec.jitter == "full" else 1.0
    wait_s = max(backoff_s(attempt, spec.backoff_s, spec.backoff_max_s, part), outcome.retry_after_s or 0.0)
    if NOT_BEGUN in outcome.detail and wait_s < patience_s:
        return wait_s
    again = reason in INFRASTRUCTURE and not bereft
    by_machinery = again and function.idempotent and attempt < INFRASTRUCTURE_ATTEMPTS
    if not by_function and not by_machinery:
        return None
    bound_s = max(spec.backoff_max_s, function.queue_timeout_s) if left_s is None else left_s
    return wait_s if wait_s < bound_s else None
