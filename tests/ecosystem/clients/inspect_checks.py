"""Inspect's own checks of a sandbox, and one evaluation that finds the plug by its entry point: ``URL FUNCTION``."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

SUITE = """
import os

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from tangram.adapters.inspect import InspectSandbox, InspectSandboxConfig


@pytest.fixture
async def sandbox_env():
    config = InspectSandboxConfig(server=os.environ["URL"], function=os.environ["FUNCTION"])
    made = await InspectSandbox.sample_init("check", config, {})
    yield made["default"]
    await InspectSandbox.sample_cleanup("check", config, made, False)
"""


class CheckTally:
    """What became of each check."""

    def __init__(self):
        self.told = {"passed": 0, "failed": {}}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.told["failed"][report.nodeid.partition("::")[2]] = str(report.longrepr)[-600:]
        elif report.when == "call":
            self.told["passed"] += 1


os.environ["URL"], os.environ["FUNCTION"] = sys.argv[1:3]
with tempfile.TemporaryDirectory() as directory:
    file = Path(directory) / "test_checks.py"
    file.write_text(SUITE)
    tally = CheckTally()
    pytest.main(["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", str(file)], plugins=[tally])
    told = tally.told

    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import solver
    from inspect_ai.util import sandbox

    @solver
    def working():
        async def solve(state, generate):
            await sandbox().write_file("deep/made", "text")
            ended = await sandbox().exec(["sh", "-c", "cat given deep/made; cat ready"])
            state.output.completion = ended.stdout
            return state

        return solve

    chosen = Path(directory) / "tangram-sandbox.yaml"
    chosen.write_text(json.dumps({"server": sys.argv[1], "function": sys.argv[2]}))
    sample = Sample(input="x", target="given text", files={"given": "given "}, setup="#!/bin/sh\necho set up > ready\n")
    task = Task(dataset=[sample], solver=working(), scorer=includes(), sandbox=("tangram", str(chosen)))
    (log,) = eval(task, model="mockllm/model", log_dir=directory, display="none")
    told["eval"] = [log.status, log.results.scores[0].metrics["accuracy"].value if log.results else str(log.error)]
print(json.dumps(told))
