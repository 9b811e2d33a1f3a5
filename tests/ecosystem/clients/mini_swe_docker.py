"""mini-swe-agent's own DockerEnvironment, over whichever engine ``DOCKER_HOST`` names: ``IMAGE COMMANDS``.

With ``THOUGHT_S COMMAND_S`` it does nothing but so many commands of that length, each after a thought of that length.
"""

import json
import statistics
import subprocess
import sys
import time

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output

image, count = sys.argv[1], int(sys.argv[2])
thought_s, command_s = (float(each) for each in (sys.argv[3:5] or ("0", "0")))
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat patch"


def environment(**given):
    return get_environment({"environment_class": "docker", "image": image, "cwd": "/tmp", **given})


def end(env):
    """Remove it, and return when that is done: its own clean-up goes on behind."""
    subprocess.run(["docker", "rm", "-f", env.container_id], check=True, capture_output=True)


env = environment(env={"PAGER": "cat"})
if thought_s:
    began = time.perf_counter()
    for _ in range(count):
        time.sleep(thought_s)
        assert env.execute({"command": f"sleep {command_s}"})["returncode"] == 0
    lived_s = time.perf_counter() - began
    end(env)
    print(json.dumps({"lived_s": lived_s}))
    sys.exit(0)
commands = ["echo 1 > patch; echo $PAGER; echo err >&2", "exit 7", "kill -9 $$", SUBMIT]
outputs = [make_output("", [{"command": command}], cost=0.0) for command in commands]
agent = DefaultAgent(
    DeterministicModel(outputs=outputs), env, system_template="You are on {{system}}.", instance_template="{{task}}"
)
ended = agent.run("task")
extras = [each.get("extra", {}) for each in agent.messages]
told = {
    "end": [ended["exit_status"], ended["submission"]],
    "outputs": [each["raw_output"] for each in extras if "raw_output" in each],
    "codes": [each["returncode"] for each in extras if "returncode" in each],
}
late = env.execute({"command": "echo begun; sleep 1000"}, timeout=1)
told["late"] = [late["output"], late["returncode"], late["extra"]["exception_type"]]
told["after"] = env.execute({"command": "pwd"})["output"]
spans = []
for _ in range(count):
    began = time.perf_counter()
    assert env.execute({"command": "true"})["returncode"] == 0
    spans.append(time.perf_counter() - began)
told["p50_s"] = statistics.median(spans) if spans else 0.0
end(env)
print(json.dumps(told))
