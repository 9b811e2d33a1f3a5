"""Harbor's own runner with its oracle agent, on generated tasks: ``URL``."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TASK = """
version = "1.0"
[metadata]
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 60.0
[environment]
docker_image = "tangram-base:bookworm"
"""
GRADE = "#!/bin/bash\nif grep -q right /tmp/answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def write(root, name, solution):
    task = root / name
    for directory in ("environment", "solution", "tests"):
        (task / directory).mkdir(parents=True)
    (task / "task.toml").write_text(TASK)
    (task / "instruction.md").write_text("Write the answer.")
    (task / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    (task / "tests" / "test.sh").write_text(GRADE)


with tempfile.TemporaryDirectory() as directory:
    root = Path(directory)
    write(root / "tasks", "good", "echo right > /tmp/answer")
    write(root / "tasks", "bad", "echo wrong > /tmp/answer")
    command = [Path(sys.executable).with_name("harbor"), "run", "-p", root / "tasks", "-a", "oracle", "-n", "2"]
    command += ["--env", "tangram.adapters.harbor:HarborEnvironment", "--ek", f"server={sys.argv[1]}"]
    command += ["-o", root / "jobs", "--quiet"]
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    told = {"status": done.returncode, "said": (done.stdout + done.stderr)[-1500:], "trials": {}}
    for file in (root / "jobs").rglob("result.json"):
        result = json.loads(file.read_text())
        if "task_name" in result:
            rewards = (result.get("verifier_result") or {}).get("rewards")
            error = (result.get("exception_info") or {}).get("exception_message")
            told["trials"][result["task_name"].rpartition("/")[2]] = [rewards, error]
print(json.dumps(told))
