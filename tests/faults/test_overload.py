"""Ten times what may wait is asked for: what is refused is typed, memory has a bound, and nothing accepted is lost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.gateway import GatewayProcess
from tests.faults.world import HTTP, Deeds, at_rest, faulty, record, series, until

#: Invocations that may wait in all, and of one function.
WAIT_MAX, OF_ONE_MAX = 120, 20
TIMES = 10
BALLAST = "x" * 48 * 1024
#: What may come on top once the queue is full. All that is refused together is several times as much.
GROWTH_MAX_BYTES = 24 * 2**20
CALLERS = 8


@pytest.fixture
def gateway(tmp_path: Path, deeds: Deeds) -> Iterator[GatewayProcess]:
    made = faulty(tmp_path, deeds, scheduler={"max_queued": WAIT_MAX}, bounded={"max_queued": OF_ONE_MAX})
    made.start()
    yield made
    made.stop()


def submit(gateway: GatewayProcess, function: str, name: str) -> httpx.Response:
    path = f"{gateway.url}/v1/functions/{function}/invocations"
    return HTTP.post(path, params={"mode": "async"}, json={"name": name, "ballast": BALLAST})


def peak_bytes(gateway: GatewayProcess) -> int:
    """The most memory that the gateway has held so far."""
    status = Path(f"/proc/{gateway.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_memory_is_bounded_under_ten_times_what_may_wait_and_nothing_accepted_is_lost(
    gateway: GatewayProcess, deeds: Deeds
) -> None:
    deeds.held.clear()
    capacity = WAIT_MAX + (os.cpu_count() or 1)
    accepted: dict[str, str] = {}
    refused: Counter[tuple[int, str]] = Counter()
    refused_names: set[str] = set()

    def ask(number: int) -> None:
        function = ("bounded", "once", "again")[number % 3]
        name = f"{function}-{number}"
        answer = submit(gateway, function, name)
        body = answer.json()
        if answer.status_code == 202:
            accepted[name] = body["id"]
            return
        assert answer.status_code in (429, 503), answer.text
        assert int(answer.headers["retry-after"]) >= 1 and body["detail"]
        refused[answer.status_code, body["code"]] += 1
        refused_names.add(name)

    with ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(ask, range(2 * capacity)))
        assert series(gateway)["tangram_invocations_queued"] == WAIT_MAX
        full_bytes, full = peak_bytes(gateway), len(accepted)
        list(callers.map(ask, range(2 * capacity, TIMES * capacity)))
    assert peak_bytes(gateway) - full_bytes < GROWTH_MAX_BYTES
    assert TIMES * capacity * len(BALLAST) > 2 * GROWTH_MAX_BYTES, "a gateway that kept what it refuses would be found"
    assert len(accepted) == full <= capacity and len(accepted) + refused.total() == TIMES * capacity
    assert refused.keys() == {(429, "quota_exceeded"), (503, "capacity_exceeded")}
    deeds.held.set()
    ends = {name: record(gateway, each)["state"] for name, each in accepted.items()}
    assert set(ends.values()) == {"succeeded"}, ends
    assert {name: deeds.done[name] for name in accepted} == dict.fromkeys(accepted, 1)
    assert not refused_names & deeds.done.keys(), "what was refused ran"
    until(lambda: at_rest(gateway), "the gateway is at rest")
