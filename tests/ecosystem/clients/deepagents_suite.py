"""LangChain's public standard suite for sandboxes of deepagents, on a gateway: ``URL``."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

SUITE = """
import os
from collections.abc import Iterator

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from tangram.adapters.deepagents import DeepAgentsBackend


class TestTangram(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[DeepAgentsBackend]:
        with DeepAgentsBackend(server=os.environ["URL"]) as backend:
            yield backend


def test_a_bound_of_time_has_no_exit_code():
    with DeepAgentsBackend(server=os.environ["URL"]) as backend:
        told = backend.execute("echo begun; sleep 1000", timeout=1)
    assert told.exit_code is None and told.output.startswith("begun")
"""


class SuiteTally:
    """What became of each test."""

    def __init__(self):
        self.told = {"passed": 0, "failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.told["failed"].append(f"{report.nodeid.partition('::')[2]}: {str(report.longrepr)[-600:]}")
        elif report.skipped:
            self.told["skipped"].append(report.nodeid.partition("::")[2])
        elif report.when == "call":
            self.told["passed"] += 1


with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
    file = Path(directory) / "test_suite.py"
    file.write_text(SUITE)
    patch.setenv("URL", sys.argv[1])
    tally = SuiteTally()
    pytest.main(["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", str(file)], plugins=[tally])
print(json.dumps(tally.told))
