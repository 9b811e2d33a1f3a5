"""Traces: spans from records alone, and the exporter against a collector on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from gateway.config.schema import TracesSection
from gateway.invocations.record import Mode, Record
from gateway.tracing import TraceExporter, context_of, execution_id, spans_of
from manager.action import State
from manager.errors import Reason
from runtimes.runtime import Execution
from runtimes.testing import ScriptedRuntime, ScriptStep
from tangram.types import Attempt
from tests.gateway.conftest import DEADLINE_S, GatewayBench, serving, step_of, until
from tests.listening import listening

RESOURCE = Resource({"service.name": "rl", "service.version": "1"})
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


def spans(record: Record, share: float = 1.0) -> list[ReadableSpan]:
    return spans_of(record, share, RESOURCE)


def times_s(span: ReadableSpan) -> tuple[str, float, float]:
    assert span.start_time is not None and span.end_time is not None
    return span.name, span.start_time / 1e9, span.end_time / 1e9


def ids(span: ReadableSpan) -> tuple[int, int]:
    """Its own id and its parent's, 0 for none."""
    context, parent = span.context, span.parent
    assert context is not None
    return context.span_id, 0 if parent is None else parent.span_id


def test_the_parts_of_a_call_lie_end_to_end_in_its_span() -> None:
    whole, queue, overhead, execution = spans(ended())
    assert times_s(whole) == ("invoke shell", 100.0, 107.0)
    assert [times_s(span) for span in (queue, overhead, execution)] == [
        ("queue", 100.0, 101.0),
        ("overhead", 101.0, 103.0),
        ("execution", 103.0, 107.0),
    ]
    assert {ids(span)[1] for span in (queue, overhead, execution)} == {ids(whole)[0]}
    assert whole.attributes is not None
    assert whole.attributes["tangram.units.cpu"] == 2 and whole.attributes["tangram.trajectory"] == "t1"


def test_a_callers_trace_is_gone_on_with() -> None:
    whole, *parts = spans(ended(options={"traceparent": KEPT}), 0.0)
    assert ids(whole)[1] == int(PARENT, 16)
    assert {span.context.trace_id for span in (whole, *parts)} == {int(TRACE, 16)}


def test_a_caller_that_does_not_keep_its_trace_is_told_nothing_of() -> None:
    assert spans(ended(options={"traceparent": NOT_KEPT})) == []


def test_of_calls_without_a_trace_a_share_is_kept_and_always_the_same() -> None:
    calls = [f"{number:011x}-e5bf4240beeb" for number in range(1000)]
    kept = [id for id in calls if context_of(id, None, 0.25).trace_flags.sampled]
    assert 180 < len(kept) < 320
    assert kept == [id for id in calls if context_of(id, None, 0.25).trace_flags.sampled]
    assert not any(context_of(id, None, 0.0).trace_flags.sampled for id in calls)
    assert all(context_of(id, None, 1.0).trace_flags.sampled for id in calls)


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
    whole, *parts = spans(ended(attempt=2, attempts=(past,)))
    assert [times_s(span) for span in parts] == [
        ("queue", 100.0, 100.5),
        ("overhead", 100.5, 101.0),
        ("execution", 101.0, 103.0),
        ("queue", 103.0, 103.5),
        ("overhead", 103.5, 105.0),
        ("execution", 105.0, 107.0),
    ]
    assert [span.status.description for span in parts] == [None, None, "handler_error: not yet", None, None, None]
    assert len({ids(span)[0] for span in (whole, *parts)}) == 7
    assert ids(parts[2])[0] == execution_id(ID) and ids(parts[5])[0] == execution_id(f"{ID}.2")


def test_what_never_ran_has_no_execution() -> None:
    record = ended(state=State.TIMED_OUT, reason=Reason.QUEUE_TIMEOUT, queue_s=7.0, overhead_s=0.0, execution_s=0.0)
    whole, *parts = spans(record)
    assert [span.name for span in parts] == ["queue", "overhead"]
    assert whole.status.description is not None and whole.status.description.startswith("queue_timeout")


def test_a_span_that_failed_says_why_within_bounds() -> None:
    record = ended(state=State.FAILED, reason=Reason.HANDLER_ERROR, message="e" * 5000, accepted_s=108.0)
    whole, *_ = encode_spans(spans(record)).resource_spans[0].scope_spans[0].spans
    assert whole.status.code == 2 and len(whole.status.message) == 1024
    assert whole.end_time_unix_nano == whole.start_time_unix_nano, "a clock that was put back makes no negative span"


def rejecting(count: int) -> bytes:
    """The answer of a collector that took all spans but these."""
    told = ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess(rejected_spans=count))
    return told.SerializeToString()


class Collector:
    """Takes spans at ``url`` after it has answered with each status of ``refusals``; does not answer while ``mute``."""

    def __init__(self, *refusals: int, answer: bytes = b"") -> None:
        self.refusals = list(refusals)
        self.answer = answer
        self.mute = False
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.spans: list[Span] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            body = await reader.readexactly(int(headers["content-length"]))
            self.requests += 1
            if self.mute:
                await reader.read()
                return
            status = self.refusals.pop(0) if self.refusals else 200
            if status == 200:
                self.headers.append(headers)
                told = ExportTraceServiceRequest.FromString(body)
                self.spans += told.resource_spans[0].scope_spans[0].spans
            answer = self.answer if status == 200 else b""
            head = f"HTTP/1.1 {status} X\r\nRetry-After: 0\r\nContent-Length: {len(answer)}\r\n\r\n"
            writer.write(head.encode() + answer)
            await writer.drain()


@asynccontextmanager
async def collecting(collector: Collector) -> AsyncIterator[Collector]:
    async with listening(collector.serve) as port:
        collector.url = f"http://127.0.0.1:{port}/v1/traces"
        yield collector


@asynccontextmanager
async def exporting(
    url: str, *, headers: Mapping[str, str] | None = None, **bounds: Any
) -> AsyncIterator[TraceExporter]:
    """An exporter at work, which is ended as a gateway ends it."""
    exporter = TraceExporter(TracesSection(endpoint=url, headers=headers or {}), **{"interval_s": 0.01, **bounds})
    try:
        yield exporter
    finally:
        await exporter.close()


async def test_spans_reach_the_collector_with_its_headers() -> None:
    async with collecting(Collector()) as collector, exporting(collector.url, headers={"x-key": "k"}) as exporter:
        exporter.ended(ended())
        await until(lambda: exporter.sent == 4)
        assert [span.name for span in collector.spans] == ["invoke shell", "queue", "overhead", "execution"]
        assert collector.headers[0]["x-key"] == "k" and collector.headers[0]["content-type"] == "application/x-protobuf"


async def test_after_all_tries_a_batch_is_dropped_and_the_next_goes_on() -> None:
    async with collecting(Collector(*[503] * 6)) as collector, exporting(collector.url) as exporter:
        exporter.ended(ended())
        await until(lambda: exporter.dropped == 4)
        exporter.ended(ended())
        await until(lambda: exporter.sent == 4)
        assert collector.requests == 7


async def test_what_does_not_fit_the_queue_is_dropped_whole_and_counted() -> None:
    async with (
        collecting(Collector()) as collector,
        exporting(collector.url, queue_max=10, interval_s=3600.0) as exporter,
    ):
        for _ in range(3):
            exporter.ended(ended())
        assert exporter.dropped == 4, "two calls of four spans fit ten"
    assert (exporter.sent, exporter.dropped) == (8, 4)


@pytest.mark.parametrize(
    ("answer", "refused"), [(rejecting(3), 3), (rejecting(9), 4), (rejecting(-5), 0), (b"not protobuf", 0)]
)
async def test_spans_that_the_collector_says_it_refused_count_as_dropped(answer: bytes, refused: int) -> None:
    async with collecting(Collector(answer=answer)) as collector, exporting(collector.url) as exporter:
        exporter.ended(ended())
        await until(lambda: exporter.sent + exporter.dropped == 4)
        assert exporter.dropped == refused


async def test_a_collector_that_does_not_answer_holds_up_no_end() -> None:
    collector = Collector()
    collector.mute = True
    async with collecting(collector):
        async with exporting(collector.url, timeout_s=0.05) as exporter:
            exporter.ended(ended())
            await until(lambda: collector.requests >= 1)
        assert exporter.sent == 0 and exporter.dropped == 4


async def test_a_call_through_the_gateway_is_a_trace_with_its_runtime_as_its_child(tmp_path: Path) -> None:
    async with collecting(Collector()) as collector:
        traces = {"endpoint": collector.url}
        told: list[str | None] = []

        def script(execution: Execution) -> ScriptStep:
            told.append(execution.call.traceparent)
            return step_of(execution)

        runtime = ScriptedRuntime(script)
        async with serving(GatewayBench(tmp_path, server={"traces": traces}), runtime=runtime) as running:
            answer = await running.invoke({"n": 1}, headers={"traceparent": KEPT})
            assert answer.is_success
            await until(lambda: len(collector.spans) == 4)
            by_name = {span.name: span for span in collector.spans}
            assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
            assert by_name["invoke echo"].parent_span_id.hex() == PARENT
            assert told == [f"00-{TRACE}-{by_name['execution'].span_id.hex()}-01"]
            async with asyncio.timeout(DEADLINE_S):  # each counts once it is answered
                while "tangram_trace_spans_sent_total 4.0" not in (text := (await running.http.get("/metrics")).text):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert "tangram_trace_spans_dropped_total 0.0" in text
