"""Errors of a node's side and of the gateway's: as they travel, and as the end of an attempt."""

from __future__ import annotations

from manager.action import Outcome, State
from manager.errors import ActionFailed, CodedError, Reason, Unsupported
from runtimes.node.message import ErrorFacts
from runtimes.node.wire import COMPONENT, pack, unicode, unpack, unpack_object


def failed(error: CodedError) -> Outcome:
    """Return an error as the end of an attempt that it kept from running."""
    if isinstance(error, ActionFailed):
        reason = error.reason
    else:
        reason = Reason.INVALID_INPUT if isinstance(error, Unsupported) else Reason.INTERNAL
    return Outcome(state=State.FAILED, reason=reason, message=error.message, component=error.component)


def facts_of(error: CodedError) -> ErrorFacts:
    """Return an error as it travels."""
    reason, result = (error.reason, error.result) if isinstance(error, ActionFailed) else (None, None)
    return ErrorFacts(
        code=error.code,
        message=unicode(error.message),
        component=error.component,
        reason=reason,
        retry_after_s=error.retry_after_s,
        detail=pack(dict(error.detail)),
        result=pack(result),
    )


def error_of(facts: ErrorFacts) -> CodedError:
    """Return the error that travelled; one of a code that is not known here is a plain CodedError."""
    detail = unpack_object(facts.detail)
    if facts.reason is not None:
        return ActionFailed(
            facts.reason,
            facts.message,
            component=facts.component,
            result=unpack(facts.result),
            retry_after_s=facts.retry_after_s,
            detail=detail,
        )
    kinds = {kind.code: kind for kind in CodedError.__subclasses__() if kind.__module__ == CodedError.__module__}
    kind = kinds.get(facts.code, CodedError)
    return kind(facts.message, component=facts.component, retry_after_s=facts.retry_after_s, detail=detail)


def as_failure(error: CodedError) -> ActionFailed:
    """Return an error as what ends an action: by its own reason, or as a fault of ours."""
    if isinstance(error, ActionFailed):
        return error
    return ActionFailed(Reason.INTERNAL, error.message, component=error.component, retry_after_s=error.retry_after_s)


def mislaid(message: str) -> Outcome:
    """Return the end of an attempt that its node lost."""
    return Outcome(state=State.LOST, reason=Reason.NODE_LOST, message=message, component=COMPONENT)


def oversized(outcome: Outcome, result_bytes: int) -> Outcome:
    """Return the outcome of an attempt whose result is too large to be told."""
    return Outcome(
        state=State.FAILED,
        reason=Reason.OUTPUT_LIMIT,
        message=f"its result of {result_bytes} bytes is more than a frame of the channel holds",
        component=COMPONENT,
        execution_s=outcome.execution_s,
    )
