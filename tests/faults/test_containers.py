"""What is true of processes is true of containers: adopted after kill -9, lost with a typed reason when killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram import Client
from tests.conftest import REMOTE
from tests.e2e.gateway import GatewayProcess, document
from tests.faults.world import at_rest, record, sandboxes, until


@pytest.fixture(params=[pytest.param("container", marks=pytest.mark.docker), REMOTE])
def engine(request: pytest.FixtureRequest, docker: str) -> str:
    """The address of an engine; empty is the machine's own."""
    assert docker
    return str(request.getfixturevalue("remote_engine").host) if request.param == "remote" else ""


@pytest.fixture
def gateway(tmp_path: Path, engine: str) -> Iterator[GatewayProcess]:
    described = document("container", tmp_path / "state")
    described["sandbox"]["docker"] = {"host": engine}
    made = GatewayProcess(tmp_path, described)
    made.start()
    yield made
    made.stop()


def test_containers_are_adopted_after_a_kill_and_a_killed_one_is_told(gateway: GatewayProcess, engine: str) -> None:
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
        host = ["--host", engine] if engine else []
        subprocess.run(["docker", *host, "kill", f"tangram-{sandbox.name}"], capture_output=True, check=True)
        end = record(gateway, accepted.id)
        assert (end["state"], end["reason"]) == ("failed", "environment_lost"), end
        client.end_trajectory("t")
    until(lambda: at_rest(gateway), "the gateway is at rest")
