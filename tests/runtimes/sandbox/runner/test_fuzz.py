"""The fuzzer for a few seconds; ``RUNNER_FUZZ_S`` and ``RUNNER_FUZZ_SEED`` make it longer or another."""

from __future__ import annotations

import os

import pytest

from tests.runtimes.sandbox.runner.fuzzer import fuzz

SECONDS = float(os.environ.get("RUNNER_FUZZ_S", "4"))
SEED = int(os.environ.get("RUNNER_FUZZ_SEED", "1"))
#: A fault to be found: commands are under way before they are watched, and what is not watched is changed all the same.
ANNOUNCED_FIRST = """
run = runner.Jobs.run
def announce(self, number, request):
    late = []
    self.poller.watch = lambda *given: late.append(given)
    try:
        run(self, number, request)
    finally:
        del self.poller.watch
        for given in late:
            try:
                self.poller.watch(*given)
            except OSError:
                pass
runner.Jobs.run = announce
runner.Poller.change = lambda self, fd, events: self.epoll.modify(fd, events)
"""


@pytest.mark.timeout(SECONDS + 180)
async def test_whatever_is_asked_under_backpressure_ends_as_it_should() -> None:
    findings = await fuzz(SEED, SECONDS)
    assert findings.exchanges
    assert findings.clean, f"seed {SEED}: {findings}"


async def test_the_fuzzer_finds_commands_that_are_announced_before_they_are_watched() -> None:
    findings = await fuzz(SEED, 60.0, change=ANNOUNCED_FIRST)
    assert any("FileNotFoundError" in told for told in findings.wrong), findings
