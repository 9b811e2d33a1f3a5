"""kill -9 and restarts of the gateway, on processes and containers, and ten times what may wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tangram import Client, NotFoundError
from tests.e2e.gateway import GatewayProcess
from tests.faults.world import (
    HTTP,
    Deeds,
    Submitter,
    at_rest,
    balanced,
    faulty,
    record,
    runner_pids,
    series,
    until,
)

ROUNDS = 3
#: Calls accepted between two kills, by all submitters.
HARVEST = 60
#: Invocations that may wait in all, and of one function.
WAIT_MAX, OF_ONE_MAX = 120, 20
TIMES = 10
BALLAST = "x" * 48 * 1024
#: What may come on top once the queue is full. All that is refused together is several times as much.
GROWTH_MAX_BYTES = 24 * 2**20
CALLERS = 8
LEFT = """
import sys
from tangram import Client
client = Client(sys.argv[1], lease_s=1.0)
handle = client.trajectory("left").open()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.promise("Accepted asynchronous work survives kill -9, and nothing runs twice by mistake.")
def test_killed_again_and_again_it_loses_nothing_and_runs_nothing_twice(gateway: GatewayProcess, deeds: Deeds) -> None:
    submitters = [Submitter(lambda: gateway.url, function) for function in ("once", "once", "again", "again")]
    for submitter in submitters:
        submitter.start()

    def accepted() -> int:
        return sum(len(submitter.accepted) for submitter in submitters)

    for _ in range(ROUNDS):
        goal = accepted() + HARVEST
        until(lambda goal=goal: accepted() >= goal, "calls are accepted")  # type: ignore[misc]
        assert balanced(series(gateway))
        gateway.kill()
        gateway.start()
        assert balanced(series(gateway))
    for submitter in submitters:
        submitter.finish()
        assert submitter.complaints == []
    names = {name: each for submitter in submitters for name, each in submitter.accepted.items()}
    assert len(set(names.values())) == len(names) >= ROUNDS * HARVEST
    ends = {name: record(gateway, invocation_id) for name, invocation_id in names.items()}
    for name, end in ends.items():
        if name.startswith("again"):
            assert end["state"] == "succeeded", end
            # Its start is not on disk before it begins, so the record may not count a run that a kill cut short.
            assert 1 <= deeds.done[name] <= 1 + ROUNDS
        else:
            assert end["state"] in ("succeeded", "lost"), end
            assert end["reason"] in (None, "gateway_restart")
            assert deeds.done[name] <= 1, "it ran twice"
        assert deeds.done[name] >= (end["state"] == "succeeded"), "it ended without being done"
    assert any(end["attempt"] > 1 or end["state"] == "lost" for end in ends.values()), "nothing ran when it was killed"
    until(lambda: at_rest(gateway), "the gateway is at rest")


@pytest.fixture
def full_gateway(tmp_path: Path, deeds: Deeds) -> Iterator[GatewayProcess]:
    made = faulty(tmp_path, deeds, scheduler={"max_queued": WAIT_MAX}, bounded={"max_queued": OF_ONE_MAX})
    made.start()
    yield made
    made.stop()


def submit(full_gateway: GatewayProcess, function: str, name: str, task: str) -> httpx.Response:
    path = f"{full_gateway.url}/v1/functions/{function}/invocations"
    body = {"name": name, "ballast": BALLAST}
    return HTTP.post(path, params={"mode": "async"}, json=body, headers={"X-Task": task})


def peak_bytes(full_gateway: GatewayProcess) -> int:
    """The most memory that the gateway has held so far."""
    status = Path(f"/proc/{full_gateway.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_memory_is_bounded_under_ten_times_what_may_wait_and_nothing_accepted_is_lost(
    full_gateway: GatewayProcess, deeds: Deeds
) -> None:
    deeds.held.clear()
    capacity = WAIT_MAX + (os.cpu_count() or 1)
    accepted: dict[str, str] = {}
    refused: Counter[tuple[int, str]] = Counter()
    refused_names: set[str] = set()

    def ask(number: int) -> None:
        function = ("bounded", "once", "again")[number % 3]
        name = f"{function}-{number}"
        answer = submit(full_gateway, function, name, f"task-{number % 2}")  # one task may not fill the queue
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
        assert series(full_gateway)["tangram_invocations_queued"] == WAIT_MAX
        full_bytes, full = peak_bytes(full_gateway), len(accepted)
        list(callers.map(ask, range(2 * capacity, TIMES * capacity)))
    assert peak_bytes(full_gateway) - full_bytes < GROWTH_MAX_BYTES
    assert TIMES * capacity * len(BALLAST) > 2 * GROWTH_MAX_BYTES, "a gateway that kept what it refuses would be found"
    assert len(accepted) == full <= capacity and len(accepted) + refused.total() == TIMES * capacity
    assert refused.keys() == {(429, "quota_exceeded"), (503, "capacity_exceeded")}
    deeds.held.set()
    ends = {name: record(full_gateway, each)["state"] for name, each in accepted.items()}
    assert set(ends.values()) == {"succeeded"}, ends
    assert {name: deeds.done[name] for name in accepted} == dict.fromkeys(accepted, 1)
    assert not refused_names & deeds.done.keys(), "what was refused ran"
    until(lambda: at_rest(full_gateway), "the gateway is at rest")


def output(client: Client, command: str, trajectory: str = "t") -> str:
    ended = client.invoke("shell", {"command": command}, trajectory=trajectory)
    assert ended.state == "succeeded", ended
    return str(ended.result["stdout"])


@pytest.mark.promise("A rolling restart under load loses nothing.")
def test_a_rolling_restart_under_load_loses_nothing(gateway: GatewayProcess, deeds: Deeds) -> None:
    submitters = [Submitter(lambda: gateway.url, function) for function in ("once", "once", "again")]
    for submitter in submitters:
        submitter.start()
    until(lambda: all(len(submitter.accepted) >= 10 for submitter in submitters), "calls are accepted")
    deeds.held.clear()
    until(lambda: series(gateway)["tangram_invocations_running"] > 0, "something runs")
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(gateway.stop, signal.SIGTERM)
        until(lambda: any(submitter.refused for submitter in submitters), "intake is refused while work runs")
        deeds.held.set()
        assert stopping.result() == 0
    gateway.start()
    for submitter in submitters:
        submitter.finish()
        assert submitter.complaints == []
    names = {name: each for submitter in submitters for name, each in submitter.accepted.items()}
    for name, invocation_id in names.items():
        end = record(gateway, invocation_id)
        assert (end["state"], end["attempt"], deeds.done[name]) == ("succeeded", 1, 1), end
    until(lambda: at_rest(gateway), "the gateway is at rest")


@pytest.mark.promise("A trajectory goes on with its files after kill -9 and SIGTERM.")
def test_a_trajectory_goes_on_with_its_files_after_a_kill_and_after_sigterm(gateway: GatewayProcess) -> None:
    with Client(gateway.url) as client:
        client.invoke("shell", {"command": "echo kept > note"}, trajectory="t", task="rl")
    for end in (gateway.kill, lambda: gateway.stop(signal.SIGTERM)):
        end()
        gateway.start()
        with Client(gateway.url) as client:
            assert [(each.trajectory, each.task) for each in client.trajectories()] == [("t", "rl")]
            assert output(client, "cat note; echo again >> note").startswith("kept\n")
    with Client(gateway.url) as client:
        assert output(client, "cat note") == "kept\nagain\nagain\n"
        client.end_trajectory("t")
    until(lambda: at_rest(gateway), "the gateway is at rest")
    assert runner_pids(gateway) == []


@pytest.mark.promise(
    "A lost sandbox is reported to every action accepted before that, and none of them runs in an empty one instead."
)
def test_a_sandbox_that_died_with_its_gateway_is_told_once_and_never_passed_over(gateway: GatewayProcess) -> None:
    with Client(gateway.url) as client:
        output(client, "echo kept > note")
    pids = runner_pids(gateway)
    gateway.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    gateway.start()
    with Client(gateway.url) as client:
        told = client.invoke("shell", {"command": "cat note"}, trajectory="t")
        assert (told.state, told.reason) == ("failed", "environment_lost")
        assert output(client, "test -e note || echo anew") == "anew\n"
        client.end_trajectory("t")


@pytest.mark.promise("Ctrl-C leaves no sandbox behind.")
def test_ctrl_c_leaves_no_sandbox_behind(gateway: GatewayProcess) -> None:
    with Client(gateway.url) as client:
        output(client, "echo kept > note")
    assert gateway.stop(signal.SIGINT) == 0
    assert runner_pids(gateway) == []
    gateway.start()
    with Client(gateway.url) as client:
        try:
            client.end_trajectory("t")
        except NotFoundError:
            raise AssertionError("nobody is told that the sandbox of an open trajectory is gone") from None


@pytest.mark.promise("The trajectories of a client that was killed end with its lease, those of one that lives do not.")
def test_what_a_killed_client_left_ends_with_its_lease(gateway: GatewayProcess) -> None:
    with Client(gateway.url, lease_s=1.0) as client, client.trajectory("held") as held:
        argv = [sys.executable, "-c", LEFT, gateway.url]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "open\n"
            leased = {"held", "left"}
            until(lambda: leases(gateway) == leased, "both are leased")
            other.kill()
        until(lambda: "left" not in trajectories(gateway), "what it left has ended")
        assert trajectories(gateway) == {"held"}
        assert held.exec("echo lives").result["stdout"] == "lives\n"
    until(lambda: at_rest(gateway), "the gateway is at rest")


def trajectories(gateway: GatewayProcess) -> set[str]:
    with Client(gateway.url) as client:
        return {each.trajectory for each in client.trajectories()}


def leases(gateway: GatewayProcess) -> set[str]:
    with Client(gateway.url) as client:
        return {each.trajectory for each in client.trajectories() if each.lease_left_s}
