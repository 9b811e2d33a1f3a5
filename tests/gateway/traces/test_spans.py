"""Spans: their ids, places and times, from records alone."""

from __future__ import annotations

from datetime import UTC, datetime

import orjson
import pytest

from gateway.invocations.record import Mode, Record
from gateway.traces import otlp
from gateway.traces.spans import Span, context_of, execution_id, spans_of
from manager.errors import Reason
from manager.outcome import State
from tangram.types import Attempt

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEPT, NOT_KEPT = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
ID = "00000000001-e5bf4240beeb"


def ended(**given: object) -> Record:
    """A call that was accepted at 100 s, waited 1 s, was made ready for 2 s and ran for 4 s."""
    record = Record(
        seq=1,
        id=ID,
        function="shell",
        task="coding",
        trajectory="t1",
        parent=None,
        mode=Mode.SYNC,
        accepted_s=100.0,
        input=b"{}",
        state=State.SUCCEEDED,
        ended_s=107.0,
        queue_s=1.0,
        overhead_s=2.0,
        execution_s=4.0,
        node="local",
        units={"cpu": 2},
        usage={"cpu_s": 3.5},
    )
    for name, value in given.items():
        setattr(record, name, value)
    return record


def test_the_parts_of_a_call_lie_end_to_end_in_its_span() -> None:
    whole, queue, overhead, execution = spans_of(ended(), 1.0)
    assert (whole.name, whole.began_s, whole.ended_s) == ("invoke shell", 100.0, 107.0)
    assert [(span.name, span.began_s, span.ended_s) for span in (queue, overhead, execution)] == [
        ("queue", 100.0, 101.0),
        ("overhead", 101.0, 103.0),
        ("execution", 103.0, 107.0),
    ]
    assert {span.parent_id for span in (queue, overhead, execution)} == {whole.span_id}
    assert whole.attributes["tangram.units.cpu"] == 2 and whole.attributes["tangram.trajectory"] == "t1"


def test_a_callers_trace_is_gone_on_with() -> None:
    whole, *parts = spans_of(ended(options={"traceparent": KEPT}), 0.0)
    assert (whole.trace_id, whole.parent_id) == (TRACE, PARENT)
    assert all(span.trace_id == TRACE for span in parts)


def test_a_caller_that_does_not_keep_its_trace_is_told_nothing_of() -> None:
    assert spans_of(ended(options={"traceparent": NOT_KEPT}), 1.0) == []


def test_of_calls_without_a_trace_a_share_is_kept_and_always_the_same() -> None:
    ids = [f"{number:011x}-e5bf4240beeb" for number in range(1000)]
    kept = [id for id in ids if context_of(id, None, 0.25).sampled]
    assert 180 < len(kept) < 320
    assert kept == [id for id in ids if context_of(id, None, 0.25).sampled]
    assert not any(context_of(id, None, 0.0).sampled for id in ids)
    assert all(context_of(id, None, 1.0).sampled for id in ids)


def test_each_try_has_its_parts_and_the_failed_one_its_reason() -> None:
    past = Attempt(
        attempt=1,
        state="failed",
        reason="handler_error",
        message="not yet",
        ended_at=datetime.fromtimestamp(103.0, UTC),
        queue_ms=500.0,
        overhead_ms=500.0,
        execution_ms=2000.0,
    )
    whole, *parts = spans_of(ended(attempt=2, attempts=(past,)), 1.0)
    assert [(span.name, span.began_s, span.ended_s) for span in parts] == [
        ("queue", 100.0, 100.5),
        ("overhead", 100.5, 101.0),
        ("execution", 101.0, 103.0),
        ("queue", 103.0, 103.5),
        ("overhead", 103.5, 105.0),
        ("execution", 105.0, 107.0),
    ]
    assert [span.error for span in parts] == [None, None, "handler_error: not yet", None, None, None]
    assert len({span.span_id for span in (whole, *parts)}) == 7
    assert parts[2].span_id == execution_id(ID) and parts[5].span_id == execution_id(f"{ID}.2")


def test_what_never_ran_has_no_execution() -> None:
    record = ended(state=State.TIMED_OUT, reason=Reason.QUEUE_TIMEOUT, queue_s=7.0, overhead_s=0.0, execution_s=0.0)
    whole, *parts = spans_of(record, 1.0)
    assert [span.name for span in parts] == ["queue", "overhead"]
    assert whole.error is not None and whole.error.startswith("queue_timeout")


def test_a_request_is_what_collectors_take() -> None:
    document = orjson.loads(otlp.encode(spans_of(ended(), 1.0), service="rl", version="1"))
    (resource,) = document["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "rl"}} in resource["resource"]["attributes"]
    whole, queue, *_ = resource["scopeSpans"][0]["spans"]
    assert len(whole["traceId"]) == 32 and len(whole["spanId"]) == 16 and "parentSpanId" not in whole
    assert (whole["kind"], queue["kind"]) == (2, 1) and queue["parentSpanId"] == whole["spanId"]
    assert whole["startTimeUnixNano"] == "100000000000" and whole["endTimeUnixNano"] == "107000000000"
    told = {each["key"]: each["value"] for each in whole["attributes"]}
    assert told["tangram.units.cpu"] == {"intValue": "2"} and told["tangram.usage.cpu_s"] == {"doubleValue": 3.5}
    assert "status" not in whole


def test_a_span_that_failed_says_why_within_bounds() -> None:
    span = Span(trace_id="1" * 32, span_id="1" * 16, parent_id="", name="x", began_s=2, ended_s=1, error="e" * 5000)
    (told,) = orjson.loads(otlp.encode([span], service="s", version="1"))["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert told["status"] == {"code": 2, "message": "e" * 1024}
    assert told["endTimeUnixNano"] == told["startTimeUnixNano"], "a clock that was put back makes no negative span"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"{}", 0),
        (b'{"partialSuccess": {"rejectedSpans": "3"}}', 3),
        (b'{"partialSuccess": {"rejectedSpans": 2, "errorMessage": "too old"}}', 2),
        (b'{"partialSuccess": null}', 0),
        (b"not json", 0),
        (b'{"partialSuccess": {"rejectedSpans": -5}}', 0),
        (b"[]", 0),
    ],
)
def test_what_a_collector_says_of_refused_spans_is_read_and_never_trusted(body: bytes, count: int) -> None:
    assert otlp.rejected(body) == count
