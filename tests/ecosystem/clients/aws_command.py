"""The AWS command line invokes functions: ``URL TOKEN DIRECTORY``."""

import json
import os
import subprocess
import sys
from pathlib import Path

url, token, directory = sys.argv[1:]
AWS = Path(sys.executable).with_name("aws")
env = {**os.environ, "AWS_ACCESS_KEY_ID": token, "AWS_SECRET_ACCESS_KEY": "anything", "AWS_DEFAULT_REGION": "us-east-1"}


def aws(*arguments):
    """Run ``aws lambda ...`` and return its exit status, what it printed as JSON, and what it complained of."""
    command = [str(AWS), "lambda", *arguments, "--endpoint-url", url, "--output", "json"]
    done = subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout or "null"), done.stderr.strip()


told = {}
status, answer, _ = aws("invoke", "--function-name", "echo", "--payload", '{"a": 1}', "out.json")
told["invoke"] = [status, answer["StatusCode"], json.loads(Path(directory, "out.json").read_text())]
status, answer, _ = aws("invoke", "--function-name", "echo", "--payload", '{"reason": "handler_error"}', "failed.json")
told["failed"] = [status, answer["FunctionError"]]
status, answer, _ = aws("invoke", "--function-name", "echo", "--invocation-type", "Event", "event.json")
told["event"] = [status, answer["StatusCode"]]
status, _, complaint = aws("invoke", "--function-name", "nowhere", "none.json")
told["missing"] = [status, "ResourceNotFoundException" in complaint]
status, answer, _ = aws("list-functions", "--query", "Functions[].FunctionName")
told["functions"] = answer
status, answer, _ = aws("get-function", "--function-name", "echo", "--query", "Configuration.State")
told["function"] = answer
status, _, complaint = aws("delete-function", "--function-name", "echo")
told["refused"] = [status != 0, complaint[-200:]]
print(json.dumps(told))
