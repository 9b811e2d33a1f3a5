"""The exporter against a collector on a real socket: batches, tries, bounds; and the whole way from a call to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.config.sections import TracesSection
from gateway.traces.exporter import TraceExporter
from runtimes.fake import ScriptedRuntime, ScriptStep
from runtimes.runtime import Execution
from tests.gateway.conftest import GatewayBench, serving, step_of, until
from tests.gateway.traces.test_spans import ID, KEPT, NOT_KEPT, PARENT, TRACE, ended


class Collector:
    """Takes spans at ``url`` after it has answered with each status of ``refusals``; does not answer while ``mute``."""

    def __init__(self, *refusals: int, answer: bytes = b"{}") -> None:
        self.refusals = list(refusals)
        self.answer = answer
        self.mute = False
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.spans: list[dict[str, Any]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
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
                    self.spans += orjson.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]
                told = self.answer if status == 200 else b""
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(told)}\r\n\r\n".encode() + told)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(collector: Collector) -> AsyncIterator[Collector]:
    server = await asyncio.start_server(collector.serve, "127.0.0.1", 0)
    collector.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces"
    try:
        yield collector
    finally:
        server.close()


@asynccontextmanager
async def exporting(url: str, **given: Any) -> AsyncIterator[TraceExporter]:
    """An exporter at work, which is ended as a gateway ends it."""
    usual: dict[str, Any] = {"endpoint": url, "interval_s": 0.01, "backoff_s": 0.001}
    spec = TracesSection(**(usual | given))
    exporter = TraceExporter(spec)
    task = asyncio.create_task(exporter.export_for_ever())
    try:
        yield exporter
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_spans_reach_the_collector_with_its_headers() -> None:
    async with listening(Collector()) as collector, exporting(collector.url, headers={"x-key": "k"}) as exporter:
        exporter.settled(ended())
        await until(lambda: exporter.sent == 4)
        assert [span["name"] for span in collector.spans] == ["invoke shell", "queue", "overhead", "execution"]
        assert collector.headers[0]["x-key"] == "k" and collector.headers[0]["content-type"] == "application/json"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_collector_that_is_busy_is_asked_again(status: int) -> None:
    async with listening(Collector(status, status)) as collector, exporting(collector.url) as exporter:
        exporter.settled(ended())
        await until(lambda: exporter.sent == 4)
        assert (collector.requests, exporter.dropped) == (3, 0)


async def test_a_refusal_that_is_final_is_not_asked_again() -> None:
    async with listening(Collector(400)) as collector, exporting(collector.url) as exporter:
        exporter.settled(ended())
        await until(lambda: exporter.dropped == 4)
        assert (collector.requests, exporter.sent) == (1, 0)


async def test_after_all_tries_a_batch_is_dropped_and_the_next_goes_on() -> None:
    async with listening(Collector(503, 503)) as collector, exporting(collector.url, max_attempts=2) as exporter:
        exporter.settled(ended())
        await until(lambda: exporter.dropped == 4)
        exporter.settled(ended())
        await until(lambda: exporter.sent == 4)
        assert collector.requests == 3


async def test_nobody_at_the_address_costs_the_spans_and_nothing_else() -> None:
    async with listening(Collector()) as collector:
        url = collector.url
    async with exporting(url, max_attempts=2) as exporter:
        exporter.settled(ended())
        await until(lambda: exporter.dropped == 4)


async def test_what_does_not_fit_the_queue_is_dropped_whole_and_counted() -> None:
    exporter = TraceExporter(TracesSection(endpoint="http://127.0.0.1:9/", queue_max=10))
    for _ in range(3):
        exporter.settled(ended())
    assert exporter.dropped == 4, "two calls of four spans fit ten"


async def test_a_batch_has_its_bound_and_everything_arrives() -> None:
    async with listening(Collector()) as collector, exporting(collector.url, batch_max=3) as exporter:
        for _ in range(5):
            exporter.settled(ended())
        await until(lambda: exporter.sent == 20)
        assert collector.requests == 7


async def test_spans_that_the_collector_says_it_refused_count_as_dropped() -> None:
    told = b'{"partialSuccess": {"rejectedSpans": "3"}}'
    async with listening(Collector(answer=told)) as collector, exporting(collector.url) as exporter:
        exporter.settled(ended())
        await until(lambda: exporter.dropped == 3)
        assert exporter.sent == 1


async def test_what_is_left_at_the_end_is_sent_once() -> None:
    async with listening(Collector()) as collector:
        async with exporting(collector.url, interval_s=3600.0) as exporter:
            await asyncio.wait_for(_turn(), 30)
            exporter.settled(ended())
        assert exporter.sent == 4 and len(collector.spans) == 4


async def test_a_collector_that_does_not_answer_holds_up_no_end() -> None:
    collector = Collector()
    collector.mute = True
    async with listening(collector):
        async with exporting(collector.url, timeout_s=0.05) as exporter:
            exporter.settled(ended())
            await until(lambda: collector.requests >= 1)
        assert exporter.sent == 0 and exporter.dropped == 4


async def _turn() -> None:
    """Let the exporter begin to wait."""
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await event.wait()


def test_without_an_endpoint_nothing_is_kept_and_the_callers_context_is_passed_on() -> None:
    exporter = TraceExporter(TracesSection())
    exporter.settled(ended())
    assert not exporter.on and exporter.dropped == 0
    assert exporter.passed_on(ID, ID, KEPT) == KEPT and exporter.passed_on(ID, ID, None) is None


def test_what_runs_is_told_the_span_of_its_execution() -> None:
    exporter = TraceExporter(TracesSection(endpoint="http://127.0.0.1:9/"))
    told = exporter.passed_on(ID, ID, KEPT)
    assert told is not None and told.startswith(f"00-{TRACE}-") and PARENT not in told and told.endswith("-01")
    assert exporter.passed_on(ID, f"{ID}.2", KEPT) != told, "each try is a span of its own"
    assert exporter.passed_on(ID, ID, NOT_KEPT) == NOT_KEPT
    own = exporter.passed_on(ID, ID, None)
    assert own is not None and own.endswith("-01")


async def test_a_call_through_the_gateway_is_a_trace_with_its_runtime_as_its_child(tmp_path: Path) -> None:
    async with listening(Collector()) as collector:
        traces = {"endpoint": collector.url, "interval": "10ms"}
        told: list[str | None] = []

        def script(execution: Execution) -> ScriptStep:
            told.append(execution.call.traceparent)
            return step_of(execution)

        runtime = ScriptedRuntime(script)
        async with serving(GatewayBench(tmp_path, server={"traces": traces}), runtime=runtime) as running:
            answer = await running.invoke({"n": 1}, headers={"traceparent": KEPT})
            assert answer.is_success
            await until(lambda: len(collector.spans) == 4)
            by_name = {span["name"]: span for span in collector.spans}
            assert {span["traceId"] for span in collector.spans} == {TRACE}
            assert by_name["invoke echo"]["parentSpanId"] == PARENT
            assert told == [f"00-{TRACE}-{by_name['execution']['spanId']}-01"]
            text = (await running.http.get("/metrics")).text
            assert "tangram_trace_spans_sent_total 4.0" in text and "tangram_trace_spans_dropped_total 0.0" in text
