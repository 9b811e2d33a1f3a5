"""Restarts: SIGTERM under load, and what becomes of the trajectories' sandboxes when their gateway goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tangram import Client, NotFoundError
from tests.e2e.gateway import GatewayProcess
from tests.faults.world import Deeds, Submitter, at_rest, record, runner_pids, series, until


def output(client: Client, command: str, trajectory: str = "t") -> str:
    ended = client.invoke("shell", {"command": command}, trajectory=trajectory)
    assert ended.state == "succeeded", ended
    return str(ended.result["stdout"])


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


LEFT = """
import sys
from tangram import Client
client = Client(sys.argv[1], lease_s=1.0)
handle = client.trajectory("left").open()
print("open", flush=True)
sys.stdin.read()
"""


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
