"""Doors, sessions and files that reach a node, and go on over the death of its daemon."""

from __future__ import annotations

import hashlib
import io
import random
import socket
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
import yaml

from tangram.client.sync import SessionHandle
from tangram.errors import TangramError
from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import DEADLINE_S, ClusterGateway, DaemonProcess
from tests.faults.world import HTTP, until
from tests.gateway.facades.e2b.test_e2b import enveloped, messages

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


def with_doors(gateway: ClusterGateway) -> Path:
    """Start it again with the doors of SWE-ReX and of Docker, over a function of the node; return Docker's socket."""
    path = gateway.directory / "docker.sock"
    gateway.stop()
    written = yaml.safe_load((gateway.directory / "tangram.yaml").read_text())
    written["functions"]["there"]["sandbox"] = {"background": "run"}
    written["server"] |= {"auth": "none", "facades": {name: {"function": "there"} for name in ("swerex", "e2b")}}
    written["server"]["facades"]["docker"] = {"socket": str(path), "function": "there"}
    gateway.write(written)
    gateway.start()
    return path


def joined(gateway: ClusterGateway, make_node: MakeNode) -> DaemonProcess:
    """Return a node that has joined and is able to run the function: a call waits for that, an opening does not."""
    node = make_node(gateway, "n1").join()
    until(lambda: "there" in gateway.has("n1").able, "the node is able to run it")
    return node


def asked(gateway: ClusterGateway, verb: str, **body: object) -> Any:
    """Return the answer of the SWE-ReX door to one request of the trajectory `rex`."""
    answer = httpx.post(f"{gateway.url}/swerex/there/rex/{verb}", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def typed(gateway: ClusterGateway, command: str) -> Any:
    return asked(gateway, "run_in_session", command=command, timeout=60)["output"]


def test_an_e2b_sandbox_on_a_node_runs_commands_beside_each_other_and_keeps_its_files(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    with_doors(gateway)
    node = joined(gateway, make_node)
    with httpx.Client(base_url=f"{gateway.url}/e2b", timeout=DEADLINE_S) as http:
        id = http.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
        own, octets = {"E2b-Sandbox-Id": id}, {"E2b-Sandbox-Id": id, "Content-Type": "application/octet-stream"}
        streamed = {**own, "Content-Type": "application/connect+json"}

        def starting(script: str) -> bytes:
            return enveloped({"process": {"cmd": "/bin/bash", "args": ["-c", script]}})

        waiting = starting("until [ -e go ]; do sleep 0.05; done; cat go")
        with http.stream("POST", "/process.Process/Start", content=waiting, headers=streamed) as server:
            pieces = server.iter_bytes()
            assert "start" in next(pieces).decode()
            beside = http.post("/process.Process/Start", content=starting("echo beside"), headers=streamed)
            assert [flags for flags, _ in messages(beside.content)] == [0, 0, 0, 2]
            assert http.post("/files", params={"path": "go"}, content=b"gone", headers=octets).status_code == 200
            said = messages(b"".join(pieces))
        assert [each["event"]["data"] for _, each in said if "data" in each.get("event", {})] == [
            {"stdout": "Z29uZQ=="}
        ]
        assert http.get("/files", params={"path": "go"}, headers=own).content == b"gone"
        assert http.post("/filesystem.Filesystem/Stat", json={"path": "go"}, headers=own).json()["entry"]["size"] == "4"
        assert http.post(f"/sandboxes/{id}/pause", json={}).status_code == 204
        assert http.post(f"/sandboxes/{id}/connect", json={}).status_code == 201
        assert http.get("/files", params={"path": "go"}, headers=own).content == b"gone"
        assert http.delete(f"/sandboxes/{id}").status_code == 204
    node.stop()


@pytest.mark.promise(
    "The facades of SWE-ReX and Docker work over a node as on the gateway's machine, and over the death of its daemon."
)
def test_a_swe_rex_session_on_a_node_goes_on_over_the_death_of_its_daemon_and_of_the_gateway(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    with_doors(gateway)
    node = joined(gateway, make_node)
    asked(gateway, "create_session", session="default", startup_timeout=30)
    typed(gateway, "cd /tmp; N=1; f() { echo here $((N++)) $PWD; }")
    assert typed(gateway, "f") == "here 1 /tmp\n"
    node.kill()
    node.join()
    assert typed(gateway, "f") == "here 2 /tmp\n"
    gateway.kill_and_start()
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
    node = joined(gateway, make_node)
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
    node.join()
    with gateway.client() as client:
        client.trajectory(client.trajectories()[0].trajectory, function="there").upload("go", b"")
    talking.join(DEADLINE_S)
    assert [(each.exit_code, each.output) for each in heard] == [(7, b"begun\nwent\n")]
    assert box.exec_run(["cat", "file"]).output == b"kept\n"
    made = engine.api.exec_create(box.id, ["sh", "-c", "echo up; exec sleep 601"])["Id"]
    said = engine.api.exec_start(made, socket=True)
    assert isinstance(said, socket.SocketIO)
    connection = said._sock  # type: ignore[attr-defined]  # closing the stream alone would leave it open
    assert said.read(11)[8:] == b"up\n"  # behind the head of its frame
    gateway.kill_and_start()
    gateway.until_state("n1", "ready")
    assert box.exec_run(["pgrep", "-fc", "sleep 601"]).output == b"0\n", "it ended with the gateway that it was said to"
    said.close()
    connection.close()
    box.remove(force=True)
    engine.close()
    with gateway.client() as client:
        assert list(client.trajectories()) == []


ECHO = ["sh", "-c", 'echo begun; while read -r line; do echo "said $line"; done; exit 9']


class SessionEar:
    """Somebody who reads a session in a thread of their own."""

    def __init__(self, session: SessionHandle) -> None:
        self.session = session
        self.said = b""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with suppress(TangramError, RuntimeError):  # its client is closed while it listens
            for piece in self.session.output():
                assert piece.offset == len(self.said), "nothing is doubled or left out"
                self.said += piece.data

    def until(self, data: bytes) -> None:
        until(lambda: data in self.said, f"{data!r} is said")

    def whole(self) -> bytes:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.said


@contextmanager
def meanwhile(session: SessionHandle, data: bytes) -> Iterator[None]:
    """Type while the block does what it does; the input has arrived at its end."""
    with ThreadPoolExecutor(1) as pool:
        typing = pool.submit(session.write, data)
        yield
        assert typing.result(DEADLINE_S)


def lines(first: int, end: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(first, end))


def test_a_session_goes_on_over_the_death_of_daemon_and_gateway_without_a_byte_lost_or_doubled(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    node = joined(gateway, make_node)
    with gateway.client() as client:
        session = client.trajectory("t", function="there").session(ECHO)
        heard = SessionEar(session)
        assert session.write(lines(0, 100))
        heard.until(b"said 99\n")
        node.kill()
        with meanwhile(session, lines(100, 200)):
            gateway.until_state("n1", "suspect")
            refused = HTTP.post(f"{gateway.url}/v1/invocations/{session.id}/session/control", json={"signal": "USR1"})
            assert (refused.status_code, refused.json()["code"]) == (503, "capacity_exceeded"), refused.text
            assert "n1" in refused.json()["detail"] and refused.headers["retry-after"] == "1", refused.text
            node.start()
        heard.until(b"said 199\n")
    gateway.kill_and_start()
    gateway.until_state("n1", "ready")
    with gateway.client() as client:
        session = client.session(session.id)
        heard = SessionEar(session)
        heard.until(b"said 199\n")
        assert session.write(lines(200, 300))
        session.close_input()
        said = heard.whole()
        assert said == b"begun\n" + b"".join(b"said %d\n" % number for number in range(300))
        assert session.end is not None
        assert (session.end.state, session.end.exit_code, session.missing) == ("succeeded", 9, 0)
        record = gateway.ended(session.id)
        assert (record["node"], record["attempt"]) == ("n1", 1)


def test_a_server_on_a_node_is_reached_also_after_the_death_of_gateway_and_daemon(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    node = joined(gateway, make_node)
    with gateway.client() as client:
        trajectory = client.trajectory("t", function="there")
        served = "setsid python3 -m http.server 8000 --bind 127.0.0.1 >log 2>&1 </dev/null & echo served > note.txt"
        assert trajectory.exec(served).result["exit_code"] == 0
        port = trajectory.port(8000)
        port.wait_ready()
        assert [HTTP.get(port.url + "/note.txt").text for _ in range(3)] == ["served\n"] * 3
        large = "x" * 2**22
        trajectory.upload("large.txt", large)
        assert HTTP.get(port.url + "/large.txt").text == large
        node.kill()
        node.start()
        port.wait_ready()
        assert HTTP.get(port.url + "/note.txt").text == "served\n"
    gateway.kill_and_start()
    gateway.until_state("n1", "ready")
    with gateway.client() as client:
        again = client.trajectory("t", function="there").port(8000)
        again.wait_ready()
        assert HTTP.get(again.url + "/large.txt").text == large


def test_a_session_of_a_node_that_is_lost_ends_and_the_next_one_begins_elsewhere(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway(lost_after="6s")
    first = joined(gateway, make_node)
    with gateway.client() as client:
        session = client.trajectory("t", function="there").session(ECHO)
        heard = SessionEar(session)
        session.write("one\n")
        heard.until(b"said one\n")
        first.kill()
        make_node(gateway, "n2", core=0).start()
        assert heard.whole() == b"begun\nsaid one\n"
        assert session.end is not None
        assert (session.end.state, session.end.reason) == ("lost", "node_lost")
        gateway.until_state("n2", "ready")
        anew = client.trajectory("t", function="there").session(["true"]).wait()
        assert (anew.state, anew.exit_code) == ("succeeded", 0)


LARGE = random.Random(3).randbytes(5 * 2**20 + 3)


def test_files_trees_and_errors_travel_between_a_client_and_a_node(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    joined(gateway, make_node)
    made = gateway.ended(gateway.submit("there", "mkdir -p out && echo here > out/said", trajectory="t"))
    assert made["node"] == "n1", made
    place = f"{gateway.url}/v1/trajectories/t"
    with gateway.client() as client:
        files = client.trajectory("t")
        files.upload("large", LARGE)
        digest = gateway.ended(gateway.submit("there", "sha256sum < large", trajectory="t"))
        assert digest["result"]["stdout"].split()[0] == hashlib.sha256(LARGE).hexdigest()
        assert files.download("large") == LARGE
        assert files.download("out/said") == b"here\n"
    listed = HTTP.get(f"{place}/files", params={"path": ".", "list": "true"}).json()["files"]
    assert {entry["path"].rsplit("/", 1)[-1] for entry in listed} >= {"large", "out"}
    missing = HTTP.get(f"{place}/files", params={"path": "none"})
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found"), missing.text
    packed = HTTP.get(f"{place}/archive", params={"path": "out"})
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as tar:
        said = tar.extractfile(next(name for name in tar.getnames() if name.endswith("said")))
        assert said is not None and said.read() == b"here\n"
    unpacked = HTTP.put(f"{place}/archive", params={"path": "copy"}, content=packed.content)
    assert unpacked.status_code == 201, unpacked.text
    found = gateway.ended(gateway.submit("there", "cat copy/said", trajectory="t"))
    assert found["result"]["stdout"] == "here\n"
