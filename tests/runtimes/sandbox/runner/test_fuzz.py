"""The fuzzer for a few seconds; ``RUNNER_FUZZ_S`` and ``RUNNER_FUZZ_SEED`` make it longer or another."""

from __future__ import annotations

import os

import pytest

from tests.runtimes.sandbox.runner.fuzzer import fuzz

SECONDS = float(os.environ.get("RUNNER_FUZZ_S", "4"))
SEED = int(os.environ.get("RUNNER_FUZZ_SEED", "1"))


@pytest.mark.timeout(SECONDS + 180)
async def test_whatever_is_asked_under_backpressure_ends_as_it_should() -> None:
    findings = await fuzz(SEED, SECONDS)
    assert findings.exchanges
    assert findings.clean, f"seed {SEED}: {findings}"
