"""The same tests are collected whenever, and in whatever environment, they are: workers of one run must agree."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.house.source import ROOT

#: Half a minute on a quiet machine.
COLLECT_S = 1500
#: The next collection begins in another second, which packed bytes and names of files may hold.
APART_S = 1.1


def collection(hash_seed: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=ROOT,
        env=environment | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ids(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate()
    assert process.returncode == 0, output[-2000:]
    return [line for line in output.splitlines() if "::" in line]


@pytest.mark.slow
@pytest.mark.timeout(COLLECT_S)
def test_a_second_another_hash_seed_and_another_environment_change_no_id_and_no_order() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with collection("1", environment) as first:
        time.sleep(APART_S)
        with collection("2", dict(reversed(environment.items())) | {"ANOTHER": "1"}) as second:
            collected, again = ids(first), ids(second)
    assert len(collected) > 1000
    assert [pair for pair in zip(collected, again, strict=False) if pair[0] != pair[1]] == []
    assert len(collected) == len(again)
