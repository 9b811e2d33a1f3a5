"""verl's own registries, tool agent loop and reward loader on the plugs: ``URL``."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

url = os.environ["TANGRAM_SERVER"] = sys.argv[1]
from omegaconf import OmegaConf
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.tool_registry import initialize_tools_from_config
from verl.trainer.ppo.reward import get_custom_reward_fn

from tangram import Client
from tangram.adapters import InfrastructureFailed
from tangram.adapters.verl import AgentRollout


def calls(commands):
    return [FunctionCall(name="shell", arguments=json.dumps({"command": command})) for command in commands]


class ScriptedLoop(AgentRollout):
    """The loop, whose model is a script: only what asks a language model is replaced."""

    def __init__(self, tools, script):
        self.tools, self.script, self.max_tool_response_length = {tool.name: tool for tool in tools}, script, 4096
        self.said = []


async def scripted_run(self, sampling_params, **kwargs):
    data = AgentData([], [], [], [], {}, {}, kwargs["name"], {"shell": {"create_kwargs": kwargs.get("create", {})}})
    for turn in self.script:
        answers = await asyncio.gather(*(self._call_tool(call, data.tools_kwargs, data) for call in calls(turn)))
        self.said += [answer[0].text for answer in answers]
    return self.said


ToolAgentLoop.run = scripted_run


async def main():
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tools.yaml"
        tool = {"class_name": "tangram.adapters.verl.RolloutShell", "config": {"type": "native", "timeout_s": 2}}
        file.write_text(json.dumps({"tools": [tool]}))
        tools = initialize_tools_from_config(str(file))
    one = ScriptedLoop(tools, [["echo kept > note"], ["cat note", "exit 3"], ["echo a; sleep 100"]])
    two = ScriptedLoop(tools, [["ls"]])
    told = {"turns": await asyncio.gather(one.run({}, name="one", global_steps=3), two.run({}, name="two"))}
    with Client(url) as client:
        told["steps"] = {each.step: each.living + each.ended for each in client.steps("default")}
    try:
        await ScriptedLoop(tools, [["true"]]).run({}, name="three", create={"image": "not/allowed"})
    except InfrastructureFailed as error:
        told["failed"] = error.reason
    kwargs = {"function": "judge", "failed_as": {"timeout": 0.0}}
    path = "pkg://tangram.adapters.verl_reward"
    config = {"reward": {"custom_reward_function": {"path": path, "name": "compute_score", "reward_kwargs": kwargs}}}
    score = get_custom_reward_fn(OmegaConf.create(config))
    row = {"data_source": "x", "ground_truth": "4"}
    told["scores"] = [await score(solution_str=text, **row) for text in ("it is 4", "it is 5")]
    print(json.dumps(told))


asyncio.run(main())
