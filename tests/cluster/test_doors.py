"""Doors in other protocols over trajectories on a node: what lives there outlives its daemon and the gateway."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
import yaml

from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import DEADLINE_S, ClusterGateway, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


def with_doors(gateway: ClusterGateway) -> Path:
    """Start it again with the doors of SWE-ReX and of Docker, over a function of the node; return Docker's socket."""
    path = gateway.directory / "docker.sock"
    gateway.stop()
    written = yaml.safe_load((gateway.directory / "tangram.yaml").read_text())
    written["functions"]["there"]["sandbox"] = {"background": "run"}
    written["server"] |= {"auth": "none", "facades": {"swerex": {"function": "there"}}}
    written["server"]["facades"]["docker"] = {"socket": str(path), "function": "there"}
    gateway.write(written)
    gateway.start()
    return path


def asked(gateway: ClusterGateway, verb: str, **body: object) -> Any:
    """Return the answer of the SWE-ReX door to one request of the trajectory `rex`."""
    answer = httpx.post(f"{gateway.url}/swerex/there/rex/{verb}", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def typed(gateway: ClusterGateway, command: str) -> Any:
    return asked(gateway, "run_in_session", command=command, timeout=60)["output"]


@pytest.mark.promise(
    "The facades of SWE-ReX and Docker work over a node as on the gateway's machine, and over the death of its daemon."
)
def test_a_swe_rex_session_on_a_node_goes_on_over_the_death_of_its_daemon_and_of_the_gateway(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    with_doors(gateway)
    node = make_node(gateway, "n1")
    node.start()
    gateway.until_state("n1", "ready")
    listen, _ = gateway.door
    asked(gateway, "create_session", session="default", startup_timeout=30)
    typed(gateway, "cd /tmp; N=1; f() { echo here $((N++)) $PWD; }")
    assert typed(gateway, "f") == "here 1 /tmp\n"
    node.kill()
    node.start()
    gateway.until_state("n1", "ready")
    assert typed(gateway, "f") == "here 2 /tmp\n"
    gateway.kill()
    gateway.listen_at(listen)
    gateway.start()
    gateway.until_state("n1", "ready")
    assert typed(gateway, "f") == "here 3 /tmp\n"
    asked(gateway, "write_file", path="/tmp/x", content="kept")
    assert asked(gateway, "read_file", path="/tmp/x") == {"content": "kept"}
    assert httpx.post(f"{gateway.url}/swerex/there/rex/close", timeout=DEADLINE_S).status_code == 200
    with gateway.client() as client:
        assert list(client.trajectories()) == []
        assert {each.node for each in client.list(function="there")} == {"n1"}


def test_a_container_on_a_node_runs_commands_before_and_after_its_daemon_died(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    path = with_doors(gateway)
    node = make_node(gateway, "n1")
    node.start()
    gateway.until_state("n1", "ready")
    engine = docker.DockerClient(base_url=f"unix://{path}", timeout=int(DEADLINE_S))
    box = engine.containers.run("tangram-base:bookworm", "sleep infinity", detach=True)
    assert box.exec_run(["sh", "-c", "echo $$ > pid; echo kept > file"]).exit_code == 0
    heard: list[Any] = []
    talk = "echo begun; until [ -e go ]; do sleep 0.05; done; echo went; exit 7"
    talking = threading.Thread(target=lambda: heard.append(box.exec_run(["sh", "-c", talk])))
    talking.start()
    with gateway.client() as client:
        until(lambda: [each.state for each in client.list(function="there", state="running")] == ["running"], "it runs")
    node.kill()
    node.start()
    gateway.until_state("n1", "ready")
    with gateway.client() as client:
        client.trajectory(client.trajectories()[0].trajectory, function="there").upload("go", b"")
    talking.join(DEADLINE_S)
    assert [(each.exit_code, each.output) for each in heard] == [(7, b"begun\nwent\n")]
    assert box.exec_run(["cat", "file"]).output == b"kept\n"
    listen, _ = gateway.door
    made = engine.api.exec_create(box.id, ["sh", "-c", "echo up; exec sleep 601"])["Id"]
    said = engine.api.exec_start(made, socket=True)
    assert isinstance(said, socket.SocketIO)
    connection = said._sock  # type: ignore[attr-defined]  # closing the stream alone would leave it open
    assert said.read(11)[8:] == b"up\n"  # behind the head of its frame
    gateway.kill()
    gateway.listen_at(listen)
    gateway.start()
    gateway.until_state("n1", "ready")
    assert box.exec_run(["pgrep", "-fc", "sleep 601"]).output == b"0\n", "it ended with the gateway that it was said to"
    said.close()
    connection.close()
    box.remove(force=True)
    engine.close()
    with gateway.client() as client:
        assert list(client.trajectories()) == []
