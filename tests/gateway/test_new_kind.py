"""A new runtime kind is its own modules and its row: all else is derived."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 120.0
CONFIG = """
functions: {say: {runtime: toy, times: 2}}
sandbox: {provider: process}
server: {port: 0, grpc_port: 0, state_dir: state}
"""


@pytest.mark.slow
def test_a_kind_that_has_its_row_is_configured_made_told_of_and_served(tmp_path: Path) -> None:
    (tmp_path / "tangram.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "tests.gateway.toy_kind", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert ran.returncode == 0, ran.stderr
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert (answers["function"]["runtime"], answers["function"]["own"]) == ("toy", {"times": 2})
    assert answers["function"]["input_schema"]["required"] == ["text"]
    assert answers["good"]["result"] == {"text": "abab"}
    assert answers["bad"] == 422
    assert answers["change"]["changed"] == {"say": ["times"]}
    assert answers["changed"]["result"] == {"text": "ababab"}
    assert answers["changed"]["revision"] != answers["good"]["revision"]
    assert answers["chapters"] == ["functions.NAME, runtime toy"]
