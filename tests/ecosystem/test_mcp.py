"""The Python SDK of MCP and LangChain's adapters, as they are on the registry, use functions as tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.facades.client_environments import ClientEnvironment
from tests.gateway.conftest import step_of, until
from tests.gateway.facades.world import doors

pytestmark = [pytest.mark.network, pytest.mark.slow]


async def test_the_sdk_of_mcp_is_served_in_both_eras_and_leaves_nothing(
    tmp_path: Path, client: Callable[[str], ClientEnvironment]
) -> None:
    tools = {"mcp": {"functions": ["shell", "echo"]}}
    async with doors(tmp_path, tools, step_of, auth="token", token="s3cret") as running:
        told = await client("mcp").run("tools/mcp_sdk", f"http://127.0.0.1:{running.app.http_port}/mcp", "s3cret")
        await until(lambda: not running.app.invocations.living)
        assert await running.app.engine.end_trajectory("pinned")
        assert running.app.engine.trajectories(10, None)["trajectories"] == []
    assert (told["version"], told["tools"]) == ("2025-11-25", ["shell", "echo"])
    assert told["kept"] == [False, "kept\n[exit code 3]", 3]
    assert told["failed"] == [True, True]
    assert told["unknown"] == -32602
    assert told["after"] == {"a": 1}
    assert told["client"] == ["2025-11-25", "kept\n"], "led to a session, in which its sandbox lives on"
    assert told["pinned"] == ["2026-07-28", "kept\n"]
    assert told["many"] == 1


async def test_langchains_adapters_make_them_tools_of_their_own(
    tmp_path: Path, client: Callable[[str], ClientEnvironment]
) -> None:
    tools = {"mcp": {"functions": ["shell", "echo"]}}
    async with doors(tmp_path, tools, step_of, auth="token", token="s3cret") as running:
        url = f"http://127.0.0.1:{running.app.http_port}/mcp"
        told = await client("langchain").run("tools/langchain_tools", url, "s3cret")
        await until(lambda: not running.app.invocations.living)
        left: Any = running.app.engine.trajectories(50, None)["trajectories"]
    assert (told["tools"], told["asks"]) == (["echo", "shell"], "string")
    assert told["kept"] == ["success", "kept\n[exit code 3]", 3]
    assert (told["failed"], told["refused"]) == (["error", True], "error"), "the model reads both, and goes on"
    assert told["apart"] == "", "a session for each call"
    assert (told["pinned"], told["many"]) == ("kept\n", ["kept\n"])
    assert {each["trajectory"] for each in left} == {"pinned", *(f"t{number}" for number in range(8))}
