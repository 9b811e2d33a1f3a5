"""The HTTP door against its own OpenAPI document: whatever is asked, the answer is one that the document names."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, CheckFunction, Response
from schemathesis.core.result import Ok
from schemathesis.generation.stateful.state_machine import APIStateMachine
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.gateway.conftest import DEADLINE_S, GatewayBench, serving

#: How much is asked: each operation by itself, and sequences of operations of so many steps.
EXAMPLES = int(os.environ.get("DOCUMENT_EXAMPLES", "20"))
SEQUENCES, STEPS = 4 * EXAMPLES, 8
#: What fits its schema is not refused, but for what no schema can tell: which keys were used, which trajectories live,
#: what a sandbox can be made of, what a configuration means, how long others take.
LEFT_OUT: list[CheckFunction] = [positive_data_acceptance]
BEYOND_SCHEMAS = ("idempotency_key_reused", "trajectory_ended", "unsupported", "invalid_config", "queue_timeout")
#: Text that nobody has thought of is not run in a shell, and the page's stream has no end.
UNASKED = ("putConfig", "putFunction", "invoke.shell", "openSession", "watch")


@contextmanager
def served(directory: Path) -> Iterator[schemathesis.BaseSchema]:
    """The document of a gateway that serves in a thread of its own."""
    started: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        async with serving(GatewayBench(directory)) as gateway:
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


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    with served(tmp_path_factory.mktemp("gateway")) as found:
        yield found


def ask_everything(document: schemathesis.BaseSchema) -> int:
    """Ask each operation by itself; how many times."""
    asked = 0
    for found in document.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def answered(case: Case[Any]) -> None:
            nonlocal asked
            asked += 1
            response = case.call(timeout=DEADLINE_S)
            beyond = response.status_code >= 400 and response.json()["code"] in BEYOND_SCHEMAS
            case.validate_response(response, excluded_checks=LEFT_OUT if beyond else [])

        answered()
    return asked


@pytest.mark.slow
def test_every_answer_is_one_that_the_document_names(document: schemathesis.BaseSchema) -> None:
    assert ask_everything(document.exclude(operation_id=list(UNASKED))) > 100


@pytest.mark.slow
def test_so_is_every_answer_to_a_new_configuration(tmp_path: Path) -> None:
    """By itself: it replaces the functions that everything else needs."""
    with served(tmp_path) as document:
        assert ask_everything(document.include(operation_id=["putConfig", "putFunction"])) > 0


@pytest.mark.slow
def test_sequences_that_follow_the_links_of_the_document_hold_together(document: schemathesis.BaseSchema) -> None:
    machine: type[APIStateMachine] = document.exclude(operation_id=list(UNASKED)).as_state_machine()
    seen: Counter[tuple[str, int]] = Counter()

    class Sequences(machine):  # type: ignore[valid-type, misc]
        def get_call_kwargs(self, case: Case[Any]) -> dict[str, Any]:
            return {"timeout": DEADLINE_S}

        def validate_response(self, response: Response, case: Case[Any], **given: Any) -> None:
            seen[case.operation.label, response.status_code] += 1
            case.validate_response(
                response, excluded_checks=LEFT_OUT, transport_kwargs=given or None, recorder=self.recorder
            )

    Sequences.run(
        settings=settings(
            max_examples=SEQUENCES,
            stateful_step_count=STEPS,
            phases=[Phase.generate],
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
    )
    assert sum(seen.values()) > SEQUENCES
    followed = {label for (label, status), _ in seen.items() if status < 300 and "{" in label}
    assert followed, f"no sequence came to an answer of what it had made: {seen}"
