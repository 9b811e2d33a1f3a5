"""mini-swe-agent's own agent with its scripted model, in sandboxes of a gateway: ``URL``."""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output

from tangram.adapters import InfrastructureFailed

url = sys.argv[1]
CLASS = "tangram.adapters.mini_swe.MiniSweEnvironment"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat patch"


def environment(**given):
    return get_environment({"environment_class": CLASS, "server": url, **given})


def agent(number):
    commands = [f"echo {number} > patch; echo out; echo err >&2", "exit 7", "printf '\\303('; kill -9 $$", SUBMIT]
    outputs = [make_output("", [{"command": command}], cost=0.0) for command in commands]
    env = environment(env={"PAGER": "cat"})
    with tempfile.TemporaryDirectory() as directory:
        made = DefaultAgent(
            DeterministicModel(outputs=outputs),
            env,
            system_template="You are on {{system}} {{machine}}.",
            instance_template="{{task}}",
            output_path=Path(directory) / "trajectory.json",
        )
        end = made.run("task")
        kept = json.loads((Path(directory) / "trajectory.json").read_text())
    env.cleanup()
    env.cleanup()
    seen = [each["extra"]["raw_output"] for each in made.messages if "raw_output" in each.get("extra", {})]
    codes = [each["extra"]["returncode"] for each in made.messages if "returncode" in each.get("extra", {})]
    said = next(each["content"] for each in made.messages if each["role"] == "system")
    kind = kept["info"]["config"]["environment_type"]
    return [end["exit_status"], end["submission"], seen, codes, said.startswith("You are on Linux "), kind == CLASS]


with ThreadPoolExecutor(4) as pool:
    told = {"agents": list(pool.map(agent, range(4)))}
env = environment(timeout=1)
late = env.execute({"command": "echo begun; sleep 1000"})
told["late"] = [late["output"], late["returncode"], late["extra"]["exception_type"], "took" not in late["output"]]
told["again"] = env.execute({"command": "cd /tmp && pwd"}, timeout=30)
told["cwd"] = env.execute({"command": "pwd"}, "/tmp", timeout=30)["output"]
env._provider._client.end_trajectory(env.sandbox)
try:
    env.execute({"command": "true"})
except InfrastructureFailed as error:
    told["ended"] = error.reason
del env
try:
    environment(function="nowhere")
except InfrastructureFailed as error:
    told["refused"] = error.reason
try:
    environment(imagee="x")
except TypeError as error:
    told["unknown"] = "imagee" in str(error)
print(json.dumps(told))
