"""The exporter: spans of ended invocations, sent to a collector in batches and never in anybody's way.

What does not fit the queue, and what the collector does not take after all tries, is dropped and counted.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version

import httpx
import structlog

from gateway.config.sections import TracesSection
from gateway.invocations.record import Record
from gateway.metrics import Metrics
from gateway.traces import otlp
from gateway.traces.spans import Span, context_of, execution_id, spans_of
from tangram.types.values.backoff import backoff_s

#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()
BACKOFF_MAX_S = 30.0
#: What OTLP says may be sent again; every other refusal is final.
AGAIN = frozenset({429, 502, 503, 504})
#: Longest answer that is read.
ANSWER_MAX_BYTES = 64 * 2**10


class TraceExporter:
    """An observer of invocations (`gateway.invocations.invocation.Observer`) that sends what has ended, if it is on."""

    def __init__(self, spec: TracesSection, *, chance: Callable[[], float] = CHANCE.random) -> None:
        self._spec = spec
        self._chance = chance
        self._queue: deque[Span] = deque()
        self._full = asyncio.Event()
        self._version = version("tangram-gateway")
        self._log = structlog.get_logger("gateway.traces")
        self.sent = 0
        self.dropped = 0

    @property
    def on(self) -> bool:
        return bool(self._spec.endpoint)

    def measured_by(self, metrics: Metrics) -> None:
        """Show what was sent and dropped."""
        told, lost = "Spans that a collector took", "Spans dropped: the queue was full, or no collector took them"
        metrics.watch("tangram_trace_spans_sent", told, lambda: self.sent, counter=True)
        metrics.watch("tangram_trace_spans_dropped", lost, lambda: self.dropped, counter=True)

    def accepted(self, record: Record) -> None:
        """Do nothing: a span is told once, when it has ended."""

    def moved(self, record: Record) -> None:
        """Do nothing, likewise."""

    def settled(self, record: Record) -> None:
        """Queue the spans of an ended invocation, all of them or none."""
        if not self.on:
            return
        spans = spans_of(record, self._spec.share)
        if len(self._queue) + len(spans) > self._spec.queue_max:
            self.dropped += len(spans)
            return
        self._queue.extend(spans)
        if len(self._queue) >= self._spec.batch_max:
            self._full.set()

    def passed_on(self, invocation_id: str, action_id: str, traceparent: str | None) -> str | None:
        """Return the ``traceparent`` of what an action runs: its execution, if that is told, else the caller."""
        context = context_of(invocation_id, traceparent, self._spec.share)
        return context.traceparent(execution_id(action_id)) if self.on and context.sampled else traceparent

    async def export_for_ever(self) -> None:
        """Send what there is, at the latest ``interval_s`` after it came; what is left at the end is tried once."""
        if not self.on:
            return
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(timeout=self._spec.timeout_s, trust_env=False, limits=limits) as client:
            try:
                while True:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._full.wait(), self._spec.interval_s)
                    self._full.clear()
                    while self._queue:
                        await self._send(client, self._batch(), self._spec.max_attempts)
            finally:
                await self._send_rest(client)

    async def _send_rest(self, client: httpx.AsyncClient) -> None:
        """Send what is left, each batch once, as long as the collector answers and time is left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._spec.timeout_s):
                while self._queue and await self._send(client, self._batch(), 1):
                    pass
        self.dropped += len(self._queue)
        self._queue.clear()

    def _batch(self) -> list[Span]:
        return [self._queue.popleft() for _ in range(min(self._spec.batch_max, len(self._queue)))]

    async def _send(self, client: httpx.AsyncClient, spans: list[Span], tries: int) -> bool:
        """Send one batch, again where that may help; return whether it was taken."""
        body = otlp.encode(spans, service=self._spec.service, version=self._version)
        why, taken = "", False
        try:
            for attempt in range(1, tries + 1):
                why, final = await self._post(client, body, len(spans))
                taken = not why
                if taken or final:
                    break
                if attempt < tries:
                    await asyncio.sleep(backoff_s(attempt, self._spec.backoff_s, BACKOFF_MAX_S, self._chance()))
        finally:
            if not taken:
                self.dropped += len(spans)
        if not taken:
            self._log.warning("spans dropped", spans=len(spans), why=why, endpoint=self._spec.endpoint)
        return taken

    async def _post(self, client: httpx.AsyncClient, body: bytes, spans: int) -> tuple[str, bool]:
        """One try: (why it was not taken, whether that is final); no reason if it was taken."""
        headers = {"Content-Type": "application/json", **self._spec.headers}
        try:
            async with (
                asyncio.timeout(self._spec.timeout_s),
                client.stream("POST", self._spec.endpoint, content=body, headers=headers) as answer,
            ):
                if not answer.is_success:
                    return f"status {answer.status_code}", answer.status_code not in AGAIN
                told = b""
                async for piece in answer.aiter_bytes():
                    told += piece
                    if len(told) > ANSWER_MAX_BYTES:
                        break
        except TimeoutError:
            return f"not taken within {self._spec.timeout_s:g} s", False
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return f"{type(error).__name__}: {error}", False
        refused = min(spans, otlp.rejected(told))
        self.sent += spans - refused
        self.dropped += refused
        return "", True
