"""The HTTP server against its own OpenAPI document, and the schemas in it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, CheckFunction
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving

#: What fits its schema is not refused, but for what no schema can tell: which keys were used, which trajectories live,
#: what a sandbox can be made of, what a configuration means, how long others take.
LEFT_OUT: list[CheckFunction] = [positive_data_acceptance]
BEYOND_SCHEMAS = ("idempotency_key_reused", "trajectory_ended", "unsupported", "invalid_config", "queue_timeout")
#: Text that nobody has thought of is not run in a shell, and the page's stream has no end.
UNASKED = ("putConfig", "putFunction", "invoke.shell", "openSession", "watch")
REFERRING = {
    "type": "object",
    "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
    "$defs": {"point": {"type": "integer"}},
}

#: How much is asked of each operation.
EXAMPLES = int(os.environ.get("DOCUMENT_EXAMPLES", "20"))


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


@pytest.mark.promise("The OpenAPI document names every answer.")
@pytest.mark.slow
def test_every_answer_is_one_that_the_document_names(document: schemathesis.BaseSchema) -> None:
    assert ask_everything(document.exclude(operation_id=list(UNASKED))) > 100


async def document_of(gateway: RunningGateway, **headers: str) -> dict[str, Any]:
    response = await gateway.http.get("/openapi.json", headers=headers)
    found: dict[str, Any] = response.json()
    return found


async def test_each_function_has_an_operation_with_its_input_and_its_result(tmp_path: Path) -> None:
    points = function("points", input_schema=REFERRING, result_schema={"type": "object", "required": ["sum"]})
    async with serving(GatewayBench(tmp_path, functions={"points": points})) as gateway:
        document = await document_of(gateway)
        shown = (await gateway.http.get("/v1/functions/points")).json()
    invoke = document["paths"]["/v1/functions/points/invocations"]["post"]
    given = invoke["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate({"points": [1]}, given)
    with pytest.raises(jsonschema.ValidationError):  # its references begin at itself
        jsonschema.validate({"points": ["a"]}, given)
    result = invoke["responses"]["200"]["content"]["application/json"]["schema"]["allOf"][1]["properties"]["result"]
    jsonschema.validate(None, result)
    jsonschema.validate({"sum": 1}, result)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({}, result)
    assert (shown["input_schema"], shown["result_schema"]) == (REFERRING, {"type": "object", "required": ["sum"]})
    shell = document["paths"]["/v1/functions/shell/invocations"]["post"]["requestBody"]["content"]["application/json"]
    assert "command" in shell["schema"]["properties"], "a built-in runtime tells its input too"


async def test_who_may_not_call_the_functions_is_not_told_of_them(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"auth": "token", "token": "s3cret"})) as gateway:
        assert "/v1/functions/echo/invocations" in (await document_of(gateway))["paths"]
        stranger = await document_of(gateway, Authorization="Bearer wrong")
    assert not [path for path in stranger["paths"] if "echo" in path]
    assert "/v1/functions/{name}/invocations" in stranger["paths"]


async def test_every_answer_of_the_document_has_a_type(gateway: RunningGateway) -> None:
    document = await document_of(gateway)
    untyped = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
        for answer in operation["responses"].values()
        for media, content in answer.get("content", {}).items()
        if "json" in media and not content["schema"].keys() & {"$ref", "anyOf", "allOf"}
    ]
    assert untyped == ["getOpenapi"]


async def test_an_event_source_that_has_received_nothing_begins_at_the_beginning(gateway: RunningGateway) -> None:
    path = f"/v1/invocations/{(await gateway.invoke({'log': 'hello'})).json()['id']}/logs"
    for last, streams in (("", ["stdout", "eof"]), ("0", ["eof"]), ("9" * 15, ["eof"])):
        response = await gateway.http.get(path, headers={"Last-Event-ID": last})
        assert [json.loads(line)["stream"] for line in response.text.splitlines()] == streams
    assert (await gateway.http.get(path, headers={"Last-Event-ID": "x"})).status_code == 422


async def test_any_cursor_of_the_form_that_the_document_gives_is_a_place_in_the_queue(gateway: RunningGateway) -> None:
    for cursor in ("0" * 64, "f" * 64, "7ff8" + "0" * 60):
        response = await gateway.http.get("/v1/queue", params={"cursor": cursor})
        assert (response.status_code, response.json()["queue"]) == (200, [])
    for odd in ("0", "x" * 64, "0" * 63):
        assert (await gateway.http.get("/v1/queue", params={"cursor": odd})).status_code == 422


async def test_a_callback_is_documented_where_callbacks_may_go_somewhere(tmp_path: Path) -> None:
    for allow in ([], ["hooks.example"]):
        bench = GatewayBench(tmp_path / str(len(allow)), server={"callbacks": {"allow": allow}})
        async with serving(bench) as gateway:
            parameters = (await document_of(gateway))["components"]["parameters"]
            assert ("X-Callback-Url" in parameters) is bool(allow)


async def test_a_path_is_refused_for_what_the_files_are_and_not_for_its_form(gateway: RunningGateway) -> None:
    await gateway.http.put("/v1/trajectories/t", json={"function": "shell"})
    files = "/v1/trajectories/t/files"
    assert (await gateway.http.put(f"{files}/workspace/notes", content=b"x")).status_code == 201
    refused = {"workspace": 409, "proc/self/status": 409, "a" * 300: 409, "é" * 1023: 409, "x" * 4095: 409}
    for path, status in refused.items():
        response = await gateway.http.put(f"{files}/{path}", content=b"x")
        assert (response.status_code, response.json()["code"]) == (status, "conflict"), path[:20]
    assert (await gateway.http.get(f"{files}/workspace")).status_code == 409, "a directory is no file"
    assert (await gateway.http.get(f"{files}/{'x' * 4096}")).status_code == 422
    assert (await gateway.http.get(f"{files}/a%00b")).status_code == 422
    for mode, status in (("755", 201), ("0644", 201), ("8", 422), ("77777", 422)):
        response = await gateway.http.put(f"{files}/workspace/tool", content=b"x", params={"mode": mode})
        assert response.status_code == status


async def test_a_timeout_means_in_a_header_what_it_means_in_a_file(gateway: RunningGateway) -> None:
    for text in ("1h30m", "2m5s", "500ms", "30"):
        response = await gateway.invoke({}, headers={"X-Timeout": text, "X-Max-Age": text}, wait=text)
        assert response.status_code == 200, response.text
    for odd in ("1h30", "m", "-1s", "1 s", "0", "0s", "0.0h00ms"):
        assert (await gateway.invoke({}, headers={"X-Timeout": odd})).status_code == 422
