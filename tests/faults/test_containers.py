"""What is true of processes is true of containers: adopted after kill -9, lost with a typed reason when killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram import Client
from tests.e2e.gateway import GatewayProcess, document
from tests.faults.world import at_rest, record, sandboxes, until


@pytest.fixture
def gateway(tmp_path: Path, docker: str) -> Iterator[GatewayProcess]:
    made = GatewayProcess(tmp_path, document("container", tmp_path / "state"))
    made.start()
    yield made
    made.stop()


@pytest.mark.docker
def test_containers_are_adopted_after_a_kill_and_a_killed_one_is_told(gateway: GatewayProcess) -> None:
    with Client(gateway.url) as client:
        client.invoke("shell", {"command": "echo kept > note"}, trajectory="t")
    gateway.kill()
    gateway.start()
    with Client(gateway.url) as client:
        assert client.invoke("shell", {"command": "cat note"}, trajectory="t").result["stdout"] == "kept\n"
        accepted = client.submit("shell", {"command": "echo begun; exec sleep 1000"}, trajectory="t")
        lines = client.logs(accepted.id, follow=True)
        assert next(line.text for line in lines if line.stream == "stdout").strip() == "begun"
        (sandbox,) = sandboxes(gateway)
        subprocess.run(["docker", "kill", f"tangram-{sandbox.name}"], capture_output=True, check=True)
        end = record(gateway, accepted.id)
        assert (end["state"], end["reason"]) == ("failed", "environment_lost"), end
        client.end_trajectory("t")
    until(lambda: at_rest(gateway), "the gateway is at rest")
