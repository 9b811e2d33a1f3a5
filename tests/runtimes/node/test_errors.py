"""Errors that travel: the same on the other side, and as the end of an attempt."""

from __future__ import annotations

import pytest

from manager.action import State
from manager.errors import ActionFailed, CodedError, InvalidConfig, Reason, Unsupported
from runtimes.node.protocol import as_failure, error_of, facts_of, failed


@pytest.mark.parametrize(
    "error",
    [
        Unsupported("not here", component="sandbox", detail={"image": "x"}),
        InvalidConfig("no such image", component="docker", retry_after_s=3.0),
        ActionFailed(Reason.TIMEOUT, "too long", component="executor", result={"x": 1}, detail={"y": 2}),
    ],
)
def test_an_error_is_the_same_error_on_the_other_side(error: ActionFailed | Unsupported | InvalidConfig) -> None:
    there = error_of(facts_of(error))
    assert type(there) is type(error)
    assert (there.message, there.component, there.detail) == (error.message, error.component, error.detail)
    assert there.retry_after_s == error.retry_after_s
    if isinstance(error, ActionFailed) and isinstance(there, ActionFailed):
        assert (there.reason, there.result) == (error.reason, error.result)


def test_what_keeps_an_attempt_from_running_is_its_end_by_the_reason_that_it_has() -> None:
    own = ActionFailed(Reason.TIMEOUT, "too long", component="executor")
    assert as_failure(own) is own
    strange = as_failure(CodedError("a bug", component="node", retry_after_s=2.0))
    assert (strange.reason, strange.message, strange.retry_after_s) == (Reason.INTERNAL, "a bug", 2.0)
    ends = [
        failed(error) for error in (own, Unsupported("not here", component="x"), CodedError("a bug", component="x"))
    ]
    assert [end.state for end in ends] == [State.FAILED] * 3
    assert [end.reason for end in ends] == [Reason.TIMEOUT, Reason.INVALID_INPUT, Reason.INTERNAL]
