"""An episode of SkyRL-Gym whose tools work in a sandbox of a gateway: ``URL``."""

import json
import sys

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from tangram.adapters import InfrastructureFailed
from tangram.adapters.skyrl import SandboxToolGroup

url = sys.argv[1]


class ShellEnv(BaseTextEnv):
    """One command a turn; the reward is the last one's."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.tools = SandboxToolGroup(server=url, timeout_s=2, functions=("double",))
        self.init_tool_groups([self.tools])

    def step(self, action):
        name, _, argument = action.partition(" ")
        said = self._execute_tool("SandboxToolGroup", name, [argument])
        done = name == "python"
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": said}], reward=float(done), done=done, metadata={}
        )

    def close(self):
        self.tools.close()


skyrl_gym.register(id="shell_env", entry_point=f"{__name__}:ShellEnv")
env = skyrl_gym.make("shell_env")
turns = [
    "shell echo kept > note",
    "shell cat note; exit 3",
    "shell echo a; sleep 100",
    "python print(open('note').read() * 2)",
]
told = {"turns": [env.step(turn)["observations"][0]["content"] for turn in turns]}
tools = env.unwrapped.tools if hasattr(env, "unwrapped") else env.tools
told["call"] = [tools.call("double", '{"value": 4}'), tools.call("shell"), tools.call("double", "{")]
told["call"][0] = json.loads(told["call"][0])["double"]
sandbox = tools.sandbox
env.close()
env.close()
told["anew"] = tools.shell("ls") + str(tools.sandbox != sandbox)
tools._provider._client.end_trajectory(tools.sandbox)
try:
    tools.shell("true")
except InfrastructureFailed as error:
    told["ended"] = error.reason
tools.close()
print(json.dumps(told))
