"""MCP over streamable HTTP, as its clients of both eras send it and as they read the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from gateway.facades import mcp
from tests.gateway.conftest import DEADLINE_S, RunningGateway, function, step_of, until
from tests.gateway.facades.world import doors

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": True}
TOOLS = ["echo", "shell", "typed", "narrow"]
TYPED = {"typed": function("typed", input_schema=SCHEMA, description="counts")}
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"},
}


@pytest.fixture
async def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningGateway]:
    monkeypatch.setattr(mcp, "SESSIONS_MAX", 2)
    async with doors(tmp_path, {"mcp": {"functions": TOOLS}}, step_of, TYPED) as running:
        yield running


class Talk:
    """A client of the older era, as the SDKs of it send."""

    def __init__(self, running: RunningGateway, **headers: str) -> None:
        self.http = running.http
        self.headers = {"accept": "application/json, text/event-stream", **headers}

    async def post(self, method: str, params: object = None, request_id: object = 1) -> httpx.Response:
        body = {"jsonrpc": "2.0", "method": method} | ({} if params is None else {"params": params})
        return await self.http.post(
            "/mcp", json=body if request_id is None else body | {"id": request_id}, headers=self.headers
        )

    async def open(self) -> str:
        answer = await self.post("initialize", HELLO)
        assert answer.status_code == 200, answer.text
        session = answer.headers["mcp-session-id"]
        self.headers |= {"mcp-session-id": session, "mcp-protocol-version": "2025-11-25"}
        assert (await self.post("notifications/initialized", request_id=None)).status_code == 202
        return session

    async def call(self, name: str, arguments: object = None, request_id: object = 1) -> dict[str, Any]:
        answer = await self.post("tools/call", {"name": name, "arguments": arguments or {}}, request_id)
        assert (answer.status_code, answer.json()["id"]) == (200, request_id), answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def end(self) -> httpx.Response:
        return await self.http.delete("/mcp", headers=self.headers)


async def single(
    running: RunningGateway, method: str, params: Mapping[str, object] | None = None, **headers: str
) -> httpx.Response:
    """One request of the newer era."""
    given = {"_meta": META, **(params or {})}
    sent = {"mcp-protocol-version": "2026-07-28", "mcp-method": method}
    if "name" in given:
        sent["mcp-name"] = str(given["name"])
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"jsonrpc": "2.0", "id": "a", "method": method, "params": given}
    return await running.http.post("/mcp", json=body, headers=sent)


# The older era: a handshake, and a session


async def test_the_named_functions_are_the_tools_with_their_schemas(door: RunningGateway) -> None:
    talk = Talk(door)
    await talk.open()
    assert (await talk.post("ping")).json() == {"jsonrpc": "2.0", "id": 1, "result": {}}
    tools = {each["name"]: each for each in (await talk.post("tools/list", {})).json()["result"]["tools"]}
    assert list(tools) == TOOLS
    assert (tools["typed"]["description"], tools["typed"]["inputSchema"]) == ("counts", SCHEMA)
    assert {each["inputSchema"]["type"] for each in tools.values()} == {"object"}
    assert "command" in tools["shell"]["inputSchema"]["properties"]
    assert "oneOf" not in tools["shell"]["inputSchema"], "interfaces of models refuse it at the top"


async def test_a_session_is_a_trajectory_whose_calls_share_a_sandbox_until_it_ends(door: RunningGateway) -> None:
    one, other = Talk(door), Talk(door)
    session = await one.open()
    await other.open()
    told = (await one.call("shell", {"command": "echo kept > file; echo said >&2; exit 3"}))["result"]
    assert (told["isError"], told["structuredContent"]["exit_code"]) == (False, 3), "an exit status is data"
    assert told["content"] == [{"type": "text", "text": "[stderr]\nsaid\n[exit code 3]"}]
    told = (await one.call("shell", {"command": "cat file"}))["result"]
    assert told["content"][0]["text"] == "kept\n[exit code 0]"
    assert (await other.call("shell", {"command": "cat file"}))["result"]["structuredContent"]["exit_code"] == 1
    assert door.app.engine.trajectory(session) is not None
    assert (await one.end()).status_code == 200
    assert door.app.engine.trajectory(session) is None
    gone = await one.post("tools/list", {})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, -32600)
    assert (await one.end()).status_code == 404
    await other.end()


async def test_a_session_whose_trajectory_was_ended_does_not_begin_anew_in_silence(door: RunningGateway) -> None:
    talk = Talk(door)
    session = await talk.open()
    await talk.call("shell", {"command": "echo kept > file"})
    await door.app.engine.end_trajectory(session)
    gone = await talk.post("tools/call", {"name": "shell", "arguments": {"command": "cat file"}})
    assert (gone.status_code, gone.json()["id"]) == (404, 1)
    assert "initialize" in gone.json()["error"]["message"]


async def test_a_full_table_forgets_only_sessions_that_have_nothing_to_lose(door: RunningGateway) -> None:
    kept, idle, third, refused = (Talk(door) for _ in range(4))
    await kept.open()
    await kept.call("shell", {"command": "true"})
    await idle.open()
    await third.open()
    assert (await idle.post("ping")).status_code == 404
    assert (await kept.post("ping")).status_code == 200
    await third.call("shell", {"command": "true"})
    answer = await refused.post("initialize", HELLO)
    assert answer.json()["error"]["code"] == -32000
    assert (answer.headers["retry-after"], answer.json()["error"]["data"]["code"]) == ("5", "capacity_exceeded")
    await kept.end()
    await refused.open()


async def test_a_call_that_failed_is_a_result_for_the_model_to_see(door: RunningGateway) -> None:
    talk = Talk(door)
    await talk.open()
    answer = await talk.post("tools/call", {"name": "echo", "arguments": {"reason": "handler_error", "message": "why"}})
    told = answer.json()["result"]
    assert told["isError"] is True
    assert "handler_error: why" in told["content"][0]["text"]
    assert told["_meta"]["tangram/invocation"] == answer.headers["x-invocation-id"]
    assert (await talk.call("echo", {"a": [1]}))["result"]["structuredContent"] == {"a": [1]}


async def test_a_call_that_was_not_run_is_an_error_which_no_model_is_to_see(door: RunningGateway) -> None:
    talk = Talk(door)
    await talk.open()
    busy = (await talk.call("echo", {"reason": "quota"}))["error"]
    assert (busy["code"], busy["data"]["code"]) == (-32000, "quota")


async def test_arguments_that_do_not_fit_are_told_to_the_model_which_may_send_better_ones(
    door: RunningGateway,
) -> None:
    talk = Talk(door)
    await talk.open()
    told = (await talk.call("typed", {"n": "x"}))["result"]
    alone = (await single(door, "tools/call", {"name": "typed", "arguments": {"n": "x"}}, x_trajectory_id="t")).json()
    assert alone["result"]["resultType"] == "complete"
    for each in (told, alone["result"]):
        assert each["isError"] is True
        assert each["content"][0]["text"].startswith("typed: invalid_input: $.n: ")
    assert not door.app.invocations.living
    assert (await talk.call("typed", {"n": 1}))["result"]["isError"] is False


async def test_what_is_not_there_is_refused_in_json_rpcs_own_errors(door: RunningGateway) -> None:
    for method, params, code, named in [
        ("resources/list", {}, -32601, "resources/list"),
        ("server/discover", {}, -32601, "server/discover"),
        ("tools/call", {"name": "short"}, -32602, "no such tool: 'short'"),
        ("tools/call", {"name": "echo", "arguments": []}, -32602, "arguments"),
        ("tools/call", {}, -32602, "name"),
        ("tools/list", {"cursor": "x"}, -32602, "cursor"),
        ("initialize", {}, -32602, "protocolVersion"),
    ]:
        talk = Talk(door)
        await talk.open()
        answer = await talk.post(method, params, "id")
        assert (answer.status_code, answer.json()["id"], answer.json()["error"]["code"]) == (200, "id", code)
        assert named in answer.json()["error"]["message"]


async def test_what_is_no_message_is_an_error_without_an_id(door: RunningGateway) -> None:
    for body, code in [
        (b"{", -32700),
        (b"[]", -32600),
        (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "result": {}}', -32600),
    ]:
        answer = await door.http.post("/mcp", content=body)
        assert (answer.status_code, answer.json()["id"], answer.json()["error"]["code"]) == (400, None, code)


async def test_a_call_outside_a_session_needs_a_trajectory_of_its_own(door: RunningGateway) -> None:
    answer = await Talk(door).post("tools/call", {"name": "echo"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32600)
    assert "Mcp-Session-Id" in answer.json()["error"]["message"]
    named = Talk(door, **{"X-Trajectory-Id": "mine"})
    assert "result" in await named.call("shell", {"command": "true"})
    assert door.app.engine.trajectory("mine") is not None
    assert (await named.end()).status_code == 400, "it is none of a session's"
    old = await Talk(door, **{"mcp-protocol-version": "1999-01-01"}).post("tools/list")
    assert (old.status_code, old.json()["error"]["code"]) == (400, -32022)
    assert "2025-11-25" in old.json()["error"]["data"]["supported"]


async def test_a_call_that_its_client_takes_back_is_cancelled_and_no_other(door: RunningGateway) -> None:
    talk, stranger = Talk(door), Talk(door)
    session = await talk.open()
    await stranger.open()
    running = asyncio.create_task(talk.post("tools/call", {"name": "echo", "arguments": {"hangs": True}}, 7))
    await until(lambda: bool(door.runtime.running))
    again = await talk.post("tools/call", {"name": "echo"}, 7)
    assert again.json()["error"]["code"] == -32600
    for who, request_id in ((stranger, 7), (talk, "7"), (talk, 8), (talk, None), (talk, [7])):
        told = await who.post("notifications/cancelled", {"requestId": request_id}, None)
        assert told.status_code == 202
    assert not running.done()
    await talk.post("notifications/cancelled", {"requestId": 7, "reason": "late"}, None)
    answer = await asyncio.wait_for(running, DEADLINE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (200, -32800)
    await until(lambda: not door.app.invocations.living)
    assert not door.runtime.running
    assert (await talk.call("echo", {"n": 1}, 7))["result"]["isError"] is False, f"{session} goes on"


async def test_ending_a_session_ends_its_calls(door: RunningGateway) -> None:
    talk = Talk(door)
    await talk.open()
    running = asyncio.create_task(talk.call("echo", {"hangs": True}))
    await until(lambda: bool(door.runtime.running))
    assert (await talk.end()).status_code == 200
    assert (await asyncio.wait_for(running, DEADLINE_S))["result"]["isError"] is True
    await until(lambda: not door.app.invocations.living)


# The newer era: each request stands alone


async def test_a_request_of_the_newer_era_stands_alone(door: RunningGateway) -> None:
    listed = (await single(door, "tools/list")).json()["result"]
    assert [each["name"] for each in listed["tools"]] == TOOLS
    assert (listed["resultType"], listed["ttlMs"], listed["cacheScope"]) == ("complete", 0, "private")
    assert listed["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "tangram"
    call = {"name": "shell", "arguments": {"command": "echo x | tee -a file"}}
    alone = [(await single(door, "tools/call", call)).json()["result"] for _ in range(2)]
    assert [each["structuredContent"]["stdout"] for each in alone] == ["x\n", "x\n"]
    assert {each["resultType"] for each in alone} == {"complete"}
    look = {"name": "shell", "arguments": {"command": "cat file"}}
    await single(door, "tools/call", call, x_trajectory_id="mine")
    assert (await single(door, "tools/call", look, x_trajectory_id="mine")).json()["result"]["structuredContent"][
        "stdout"
    ] == "x\n"
    told = await door.http.post(
        "/mcp", json={"jsonrpc": "2.0", "method": "x"}, headers={"mcp-protocol-version": "2026-07-28"}
    )
    assert (told.status_code, told.content) == (202, b"")


async def test_discovery_leads_to_sessions_where_a_sandbox_would_be_lost(tmp_path: Path, door: RunningGateway) -> None:
    asked = (await single(door, "server/discover")).json()["result"]
    assert asked["supportedVersions"] == list(HANDSHAKE_PROTOCOL_VERSIONS)
    named = (await single(door, "server/discover", x_trajectory_id="mine")).json()["result"]
    assert named["supportedVersions"][-1] == "2026-07-28"
    async with doors(tmp_path / "b", {"mcp": {"functions": ["echo"]}}, step_of) as other:
        asked = (await single(other, "server/discover")).json()["result"]
    assert (asked["supportedVersions"][-1], asked["resultType"]) == ("2026-07-28", "complete")


async def test_the_newer_era_has_its_own_statuses_and_its_headers_agree_with_its_body(door: RunningGateway) -> None:
    rows: list[tuple[str, dict[str, object], dict[str, str], int, int]] = [
        ("ping", {}, {}, 404, -32601),
        ("tools/call", {"name": "nowhere"}, {}, 400, -32602),
        ("tools/call", {"name": "echo"}, {"mcp_name": "shell"}, 400, -32020),
        ("tools/list", {}, {"mcp_method": "tools/call"}, 400, -32020),
        ("tools/list", {"_meta": META | {"io.modelcontextprotocol/protocolVersion": "x"}}, {}, 400, -32020),
    ]
    for method, params, headers, status, code in rows:
        answer = await single(door, method, params, **headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


# Who comes in


async def test_a_strange_page_and_a_wrong_token_are_refused_in_json_rpc(tmp_path: Path, door: RunningGateway) -> None:
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    page = await door.http.post("/mcp", json=ping, headers={"Origin": "https://strange.example"})
    assert (page.status_code, page.json()["error"]["code"], page.json()["id"]) == (403, -32003, None)
    assert "origin" in page.json()["error"]["message"]
    assert (await door.http.get("/mcp")).status_code == 405, "nothing is told unasked"
    async with doors(tmp_path / "b", {"mcp": {"functions": ["echo"]}}, step_of, auth="token", token="s3cret") as other:
        wrong = await other.http.post("/mcp", json=ping, headers={"Authorization": "Bearer x"})
        right = await other.http.post("/mcp", json=ping)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, -32001)
    assert right.json()["result"] == {}
