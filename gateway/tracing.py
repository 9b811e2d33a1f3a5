"""OpenTelemetry traces: the spans of each ended invocation, sent to a collector by OTLP over HTTP.

A span of the whole call has queue, overhead and execution of each try below it. Every id is derived from the
invocation's own, so that a span is the same whichever gateway ends it, and what runs can be told its parent before that
span exists. Imported only where ``server.traces.endpoint`` is set: the SDK is in the extra ``otel``.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
)

from gateway.config.schema import TracesSection
from gateway.invocations.record import Record, action_id_of
from gateway.metrics import Metrics
from manager.action import State

PARTS = ("queue", "overhead", "execution")
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
#: Most spans in one request, as the SDK has it.
BATCH_MAX = 512
#: Most spans that wait (beyond it they are dropped and counted), and for how many seconds, at most, for their request:
#: a few MiB of memory, and a trace that is there while one still looks for it.
QUEUE_MAX, INTERVAL_S = 8192, 2.0
#: Seconds for one request with the tries after it; the end of a gateway waits as long for what is left.
TIMEOUT_S = 10.0
#: Characters of an error that its span tells.
ERROR_MAX = 1024
Attribute = str | int | float | bool


class TraceExporter:
    """Sends the spans of what has ended."""

    def __init__(
        self,
        spec: TracesSection,
        *,
        queue_max: int = QUEUE_MAX,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._spec = spec
        self._queue_max, self._timeout_s = queue_max, timeout_s
        fields = {"service.name": spec.service, "service.version": version("tangram-gateway")}
        self._resource = Resource.create(fields)
        self._collector = _Collector(spec, timeout_s)
        self._processor = BatchSpanProcessor(
            self._collector,
            max_queue_size=queue_max,
            schedule_delay_millis=1000 * interval_s,
            max_export_batch_size=min(BATCH_MAX, queue_max),
        )
        self._queued = 0
        self._refused = 0

    @property
    def sent(self) -> int:
        """Spans that the collector took."""
        return self._collector.sent

    @property
    def dropped(self) -> int:
        """Spans that found the queue full, or that the collector did not take."""
        return self._refused + self._collector.dropped

    def measured_by(self, metrics: Metrics) -> None:
        """Show what was sent and dropped."""
        sent, lost = "Spans that a collector took", "Spans dropped: the queue was full, or no collector took them"
        metrics.watch("tangram_trace_spans_sent", sent, lambda: self.sent, counter=True)
        metrics.watch("tangram_trace_spans_dropped", lost, lambda: self.dropped, counter=True)

    def ended(self, record: Record) -> None:
        """Queue the spans of an ended invocation, all of them or none."""
        spans = spans_of(record, self._spec.share, self._resource)
        if self._queued - self._collector.taken + len(spans) > self._queue_max:
            self._refused += len(spans)
            return
        self._queued += len(spans)
        for span in spans:
            self._processor.on_end(span)

    def passed_on(self, invocation_id: str, action_id: str, traceparent: str | None) -> str | None:
        """Return the ``traceparent`` of what an action runs: its execution, if that is told, else the caller."""
        context = context_of(invocation_id, traceparent, self._spec.share)
        if not context.trace_flags.sampled:
            return traceparent
        return f"00-{format_trace_id(context.trace_id)}-{format_span_id(execution_id(action_id))}-01"

    async def close(self) -> None:
        """Send what is left; after ``timeout_s`` nothing is tried again, and what is not sent is dropped."""
        closing = asyncio.create_task(asyncio.to_thread(self._processor.shutdown))
        await asyncio.wait({closing}, timeout=self._timeout_s)
        self._collector.shutdown()
        await closing


class _Collector(SpanExporter):
    """The collector, with counts of what it took; used by the thread of the processor."""

    def __init__(self, spec: TracesSection, timeout_s: float) -> None:
        session = requests.Session()
        session.trust_env = False
        session.hooks["response"].append(self._answered)
        self._exporter = OTLPSpanExporter(spec.endpoint, headers=spec.headers, timeout=timeout_s, session=session)
        self._rejected = 0
        self._closed = False
        #: Spans that left the queue.
        self.taken = 0
        self.sent = 0
        self.dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch, again within its time where that may help."""
        self.taken += len(spans)
        self._rejected = 0
        result = self._exporter.export(spans)
        dropped = min(self._rejected, len(spans)) if result is SpanExportResult.SUCCESS else len(spans)
        self.sent += len(spans) - dropped
        self.dropped += dropped
        return result

    def shutdown(self) -> None:
        """Refuse every batch from here on, and wait for no other try of the one under way."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _answered(self, answer: requests.Response, **_: object) -> None:
        """Read how many spans an answer says were not taken; 0 if it says nothing that can be read."""
        self._rejected = 0
        with suppress(DecodeError):
            response = ExportTraceServiceResponse.FromString(answer.content)
            self._rejected = max(0, response.partial_success.rejected_spans)


# Spans, from records alone


def context_of(invocation_id: str, traceparent: str | None, share: float) -> SpanContext:
    """Return the caller's span, whose choice to keep the trace holds, or a trace of its own for a ``share`` of them.

    The span id of the latter is 0: nothing is its parent.
    """
    if traceparent is not None:
        _, trace_id, parent_id, flags = traceparent.split("-")[:4]
        return SpanContext(int(trace_id, 16), int(parent_id, 16), True, TraceFlags(int(flags, 16)))
    own_id = derived(f"{invocation_id} trace", 16)
    kept = own_id >> 96 < share * 2**32
    return SpanContext(own_id, 0, False, SAMPLED if kept else TraceFlags())


def derived(name: str, size_bytes: int) -> int:
    """Return an id that belongs to the name, and is never zero."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=size_bytes).digest()) or 1


def execution_id(action_id: str) -> int:
    """Return the id of the span of an action's execution: each try of an invocation is an action."""
    return derived(f"{action_id} execution", 8)


def spans_of(record: Record, share: float, resource: Resource) -> list[ReadableSpan]:
    """Return the spans of a record that has ended; none if its trace is not kept."""
    context = context_of(record.id, record.trace["traceparent"], share)
    if not context.trace_flags.sampled or record.ended_s is None:
        return []
    whole = _span(
        f"invoke {record.function}",
        SpanContext(context.trace_id, derived(f"{record.id} invocation", 8), False, SAMPLED),
        context if context.span_id else None,
        resource,
        (record.accepted_s, record.ended_s),
        _attributes(record),
        _error(record.state, record.reason, record.message),
    )
    return [whole, *_tries(record, whole)]


def _tries(record: Record, whole: ReadableSpan) -> Iterator[ReadableSpan]:
    """Each try's three parts, end to end: what is overhead after an execution is shown before it."""
    assert record.ended_s is not None
    left = {part: 1000 * (getattr(record, f"{part}_s") or 0.0) for part in PARTS}
    for past in record.attempts:
        spent = {part: getattr(past, f"{part}_ms") or 0.0 for part in PARTS}
        left = {part: max(0.0, left[part] - spent[part]) for part in PARTS}
        if past.ended_at is not None:
            error = _error(State(past.state), past.reason, past.message)
            yield from _parts(record, whole, past.attempt, past.ended_at.timestamp(), spent, error)
    error = _error(record.state, record.reason, record.message)
    yield from _parts(record, whole, record.attempt, record.ended_s, left, error)


def _parts(
    record: Record, whole: ReadableSpan, attempt: int, ended_s: float, spent_ms: Mapping[str, float], error: str | None
) -> Iterator[ReadableSpan]:
    at_s = ended_s - sum(spent_ms.values()) / 1000
    action_id = action_id_of(record.id, attempt)
    for part in PARTS:
        began_s, at_s = at_s, at_s + spent_ms[part] / 1000
        executes = part == "execution"
        if executes and not spent_ms[part]:
            continue  # it never began
        span_id = execution_id(action_id) if executes else derived(f"{action_id} {part}", 8)
        yield _span(
            part,
            SpanContext(whole.context.trace_id, span_id, False, SAMPLED),
            whole.context,
            whole.resource,
            (began_s, at_s),
            {"tangram.attempt": attempt},
            error if executes else None,
        )


def _span(
    name: str,
    context: SpanContext,
    parent: SpanContext | None,
    resource: Resource,
    times_s: tuple[float, float],
    attributes: Mapping[str, Attribute],
    error: str | None,
) -> ReadableSpan:
    """Return a span between two wall-clock times; a clock that was put back makes none of a negative length."""
    began_s, ended_s = times_s
    return ReadableSpan(
        name,
        context,
        parent,
        resource,
        attributes,
        kind=SpanKind.SERVER if name.startswith("invoke ") else SpanKind.INTERNAL,
        status=Status() if error is None else Status(StatusCode.ERROR, error[:ERROR_MAX]),
        start_time=int(began_s * 1e9),
        end_time=int(max(began_s, ended_s) * 1e9),
        instrumentation_scope=InstrumentationScope("tangram.gateway", str(resource.attributes["service.version"])),
    )


def _attributes(record: Record) -> dict[str, Attribute]:
    fields: dict[str, Attribute | None] = {
        "tangram.invocation": record.id,
        "tangram.function": record.function,
        "tangram.revision": record.revision,
        "tangram.task": record.task,
        "tangram.trajectory": record.trajectory,
        "tangram.parent": record.parent,
        "tangram.mode": record.mode.value,
        "tangram.state": record.state.value,
        "tangram.reason": None if record.reason is None else record.reason.value,
        "tangram.node": record.node,
        "tangram.attempts": record.attempt,
        **{f"tangram.units.{kind}": units for kind, units in record.units.items()},
        **{f"tangram.usage.{name}": amount for name, amount in record.usage.items()},
    }
    return {name: value for name, value in fields.items() if value is not None}


def _error(state: State, reason: object, message: str) -> str | None:
    return None if state is State.SUCCEEDED else f"{reason}: {message}"
