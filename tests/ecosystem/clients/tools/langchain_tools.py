"""LangChain's adapters make MCP tools their own: ``URL TOKEN``; a session for each call, one for all, one pinned."""

import asyncio
import json
import sys

from langchain_core.tools import ToolException
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools

URL, TOKEN = sys.argv[1:]


def servers(**headers):
    connection = {
        "transport": "streamable_http",
        "url": URL,
        "headers": {"Authorization": f"Bearer {TOKEN}", **headers},
    }
    return MultiServerMCPClient({"tangram": connection})


def call(name, **given):
    """A model's call of a tool; its answer is a message with the result as its artifact."""
    return {"type": "tool_call", "id": "1", "name": name, "args": given}


async def by_session():
    """What an agent does whose tools share one sandbox."""
    told = {}
    async with servers().session("tangram") as session:
        tools = {tool.name: tool for tool in await load_mcp_tools(session)}
        told["tools"] = sorted(tools)
        told["asks"] = tools["shell"].args_schema["properties"]["command"]["type"]
        await tools["shell"].ainvoke(call("shell", command="echo kept > file"))
        kept = await tools["shell"].ainvoke(call("shell", command="cat file; exit 3"))
        told["kept"] = [kept.status, kept.content[0]["text"], kept.artifact["structured_content"]["exit_code"]]
        failed = await tools["echo"].ainvoke(call("echo", reason="handler_error", message="why"))
        told["failed"] = [failed.status, "why" in str(failed.content)]
        try:
            refused = await tools["shell"].ainvoke(call("shell", command=7))
            told["refused"] = refused.status
        except ToolException as error:
            told["refused"] = type(error).__name__
    return told


async def by_call(**headers):
    """What `get_tools` gives: each call has a session of its own, and so a sandbox, unless a header names one."""
    tools = {tool.name: tool for tool in await servers(**headers).get_tools()}
    await tools["shell"].ainvoke(call("shell", command="echo kept > file"))
    found = await tools["shell"].ainvoke(call("shell", command="cat file"))
    return found.artifact["structured_content"]["stdout"]


async def main():
    told = await by_session()
    told["apart"] = await by_call()
    told["pinned"] = await by_call(**{"X-Trajectory-Id": "pinned"})
    found = await asyncio.gather(*(by_call(**{"X-Trajectory-Id": f"t{number}"}) for number in range(8)))
    told["many"] = sorted(set(found))
    print(json.dumps(told))


asyncio.run(main())
