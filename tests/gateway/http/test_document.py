"""The HTTP door against its own OpenAPI document: whatever is asked, the answer is one that the document names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.gateway.conftest import DEADLINE_S, Bench, serving


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    """A gateway in a thread of its own, and the document that it serves."""
    started: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        async with serving(Bench(tmp_path_factory.mktemp("gateway"))) as gateway:
            stop = asyncio.Event()
            started.append((gateway.app.http_port, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    port, loop, stop = started[0]
    try:
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_S)


def test_every_answer_is_one_that_the_document_names(document: schemathesis.BaseSchema) -> None:
    asked = 0
    for found in document.exclude(operation_id="putConfig").get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def answered(case: schemathesis.Case[Any]) -> None:
            nonlocal asked
            asked += 1
            # A schema cannot tell which parents live, so an input that fits it may still be refused with 422.
            case.call_and_validate(timeout=DEADLINE_S, excluded_checks=[positive_data_acceptance])

        answered()
    assert asked > 100
