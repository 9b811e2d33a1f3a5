"""The Python SDK of MCP uses tools: ``URL TOKEN``; by its session and by its client that discovers."""

import asyncio
import json
import sys

import httpx2
from mcp import Client, ClientSession, MCPError
from mcp.client.streamable_http import streamable_http_client

URL = sys.argv[1]
TOKEN = {"Authorization": f"Bearer {sys.argv[2]}"}


def http(**headers):
    return httpx2.AsyncClient(headers=TOKEN | headers, timeout=60)


async def by_session():
    """The handshake of 2025-11-25, as LangGraph's adapters and most agents do."""
    told = {}
    async with (
        http() as client,
        streamable_http_client(URL, http_client=client) as (read, write, *_),
        ClientSession(read, write) as session,
    ):
        told["version"] = (await session.initialize()).protocol_version
        told["tools"] = [each.name for each in (await session.list_tools()).tools]
        await session.call_tool("shell", {"command": "echo kept > file"})
        kept = await session.call_tool("shell", {"command": "cat file; exit 3"})
        told["kept"] = [kept.is_error, kept.content[0].text, kept.structured_content["exit_code"]]
        failed = await session.call_tool("echo", {"reason": "handler_error", "message": "why"})
        told["failed"] = [failed.is_error, "why" in failed.content[0].text]
        try:
            await session.call_tool("nowhere", {})
        except MCPError as error:
            told["unknown"] = error.error.code
        slow = asyncio.create_task(session.call_tool("echo", {"hangs": True}))
        await session.send_ping()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        told["after"] = (await session.call_tool("echo", {"a": 1})).structured_content
    return told


async def by_client(**headers):
    """The client of 2026-07-28, which asks what there is and falls back."""
    async with http(**headers) as opened, Client(streamable_http_client(URL, http_client=opened)) as client:
        await client.call_tool("shell", {"command": "echo kept > file"})
        kept = await client.call_tool("shell", {"command": "cat file"})
        return [client.protocol_version, kept.structured_content["stdout"]]


async def many(count):
    """As many sessions at once, each with a sandbox of its own."""
    return sorted(map(str, await asyncio.gather(*(by_client() for _ in range(count)))))


async def main():
    told = await by_session()
    told["client"] = await by_client()
    told["pinned"] = await by_client(**{"X-Trajectory-Id": "pinned"})
    told["many"] = len(set(await many(8)))
    print(json.dumps(told))


asyncio.run(main())
