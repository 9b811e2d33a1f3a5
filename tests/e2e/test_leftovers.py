"""What a sandbox's own user finds in it after a call: what the call was to leave, and nothing of ours."""

from __future__ import annotations

import http.client
import io
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from tangram import Client, Trajectory
from tangram.errors import TangramError
from tests.e2e.gateway import GatewayProcess, document
from tests.faults.world import until

pytestmark = pytest.mark.slow
IMAGE = "tangram-base:bookworm"
#: Where a sandbox may be written; a container is looked at from its root.
PLACES = {"process": "/workspace /tmp /var/tmp /dev/shm /run", "container": "/ /dev/shm /dev/mqueue"}
LIST = (
    "for place in {}; do find $place -xdev \\( -path /proc -o -path /sys \\) -prune -o -printf '%y %m %u %p %l\\n' "
    "2>/dev/null; done | sort -u"
)
TEST = "def test_passes():\n    assert True\n\ndef test_fails():\n    assert False\n"


@dataclass(frozen=True, slots=True)
class LookedAt:
    """A trajectory in whose sandbox it is seen what calls leave."""

    gateway: GatewayProcess
    client: Client
    box: Trajectory
    kind: str

    def tree(self) -> set[str]:
        """Return every file in it but what the look itself makes."""
        result = self.box.exec(LIST.format(PLACES[self.kind])).result
        assert isinstance(result, dict) and not result["stdout_truncated"]
        return set(result["stdout"].splitlines())

    def swerex(self, verb: str, **body: object) -> httpx.Response:
        """Ask the door of SWE-ReX."""
        return httpx.post(f"{self.gateway.url}/swerex/box/looked/{verb}", json=body, timeout=60)

    def uploaded(self, data: bytes, *, name: str, target: str, unzip: bool = False) -> httpx.Response:
        """Upload by the door of SWE-ReX."""
        files, form = {"file": (name, data)}, {"target_path": target, "unzip": str(unzip).lower()}
        url = f"{self.gateway.url}/swerex/box/looked/upload"
        return httpx.post(url, files=files, data=form, headers={"X-API-Key": "any"}, timeout=60)


@pytest.fixture(scope="module", params=["process", pytest.param("container", marks=pytest.mark.docker)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    kind = str(request.param)
    if kind == "container":
        request.getfixturevalue("docker")
    directory = tmp_path_factory.mktemp(f"leftovers-{kind}")
    box = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "30s", "output_limit": "16Mi"}
    described = document(kind, directory / "state", box=box)
    described["functions"]["box"]["sandbox"] = {"background": "run"}
    described["functions"]["tests"]["sandbox"] = {"background": "run"}
    described["server"] |= {"auth": "none", "body_limit": "16Mi"}
    described["server"]["facades"] = {
        "swerex": {"function": "box", "keep": True},
        "docker": {"socket": str(directory / "docker.sock"), "function": "box"},
    }
    process = GatewayProcess(directory, described)
    process.start()
    yield process
    assert process.stop() == 0, "\n".join(process.log[-30:])


@pytest.fixture
def looked(served: GatewayProcess) -> Iterator[LookedAt]:
    """A sandbox that is as it was made; whatever a test leaves in it is its fault."""
    kind = "process" if "process" in served.directory.name else "container"
    with Client(served.url) as client, client.trajectory("looked", function="box") as box:
        found = LookedAt(served, client, box, kind)
        box.exec("true")
        before = found.tree()
        yield found
        until(lambda: not list(client.list(trajectory="looked", state="running")), "all of it has ended")
        assert found.tree() ^ before == set()


@pytest.mark.promise("A call leaves in a sandbox only what was requested, over whatever API and however it ends.")
def test_commands_leave_nothing_however_they_end(looked: LookedAt) -> None:
    box = looked.box
    box.exec("cat >/dev/null", stdin="x" * 2**20)
    box.exec(["sh", "-c", "echo out; echo err >&2; kill -9 $$"], merge=True)
    assert box.exec("echo begun; sleep 1000", timeout_s=0.5).reason == "timeout"
    running = looked.client.submit("box", {"command": "sleep 1000"}, trajectory="looked")
    until(lambda: looked.client.get(running.id).state == "running", "it runs")
    looked.client.cancel(running.id)
    box.exec("true")


def test_a_session_leaves_nothing(looked: LookedAt) -> None:
    session = looked.box.session(["sh"], terminal=(24, 80))
    session.write("echo here; exit 3\n")
    assert session.wait().exit_code == 3
    piped = looked.box.session(["cat"])
    piped.write("x" * 100_000)
    piped.close_input()
    piped.wait()
    ended = looked.box.session(["sleep", "1000"])
    ended.cancel()


def test_a_suite_leaves_what_pytest_leaves(looked: LookedAt) -> None:
    looked.box.exec("mkdir project")
    looked.box.upload("project/test_it.py", TEST)
    result = looked.box.invoke("tests", {"cwd": "project"}).result
    assert isinstance(result, dict) and result["reward"] == 0.5
    left = looked.box.exec("find project -mindepth 1 -maxdepth 1 -printf '%f\\n' | sort").result
    assert isinstance(left, dict)
    assert set(left["stdout"].split()) <= {"test_it.py", "__pycache__", ".pytest_cache"}
    looked.box.exec("rm -r project /tmp/pytest-of-*")  # pytest's own, and its workers' temporary files


def test_files_and_archives_leave_themselves_also_where_they_are_refused_or_cut(looked: LookedAt) -> None:
    box, address = looked.box, httpx.URL(looked.gateway.url)
    box.upload("file", b"x" * 2**20)
    assert len(box.download("file")) == 2**20
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("one"), io.BytesIO())
        tar.addfile(tarfile.TarInfo("two"), io.BytesIO())
    box.upload_archive("tree", packed.getvalue())
    assert box.download_archive("tree")
    with pytest.raises(TangramError):
        box.upload_archive("tree", b"no tar at all" * 1000)
    with pytest.raises(TangramError):
        box.upload("/proc/nowhere", b"x")
    for path in ("files/workspace/cut", "archive?path=/workspace/cut"):
        conn = http.client.HTTPConnection(str(address.host), address.port, timeout=60)
        conn.putrequest("PUT", f"/v1/trajectories/looked/{path}")
        conn.putheader("Content-Type", "application/octet-stream")
        conn.putheader("Content-Length", str(2**20))
        conn.endheaders(packed.getvalue()[:2048] + b"x" * 4096)
        conn.close()
    until(lambda: ".tangram-" not in str(looked.tree()), "what was cut is gone")
    box.exec("rm -rf file tree cut")


def test_a_swe_rex_runtime_leaves_what_it_was_asked_for(looked: LookedAt) -> None:
    assert looked.swerex("execute", command="echo out", shell=True).status_code == 200
    assert looked.swerex("create_session", session="s", startup_timeout=20).status_code == 200
    assert looked.swerex("run_in_session", session="s", command="echo $PWD; false", check="silent").status_code == 200
    assert looked.swerex("run_in_session", session="s", command="sleep 1000", timeout=0.3).status_code == 511
    interrupt = {"session": "s", "timeout": 1.0, "action_type": "bash_interrupt"}
    assert looked.swerex("run_in_session", **interrupt).status_code == 200
    assert looked.swerex("close_session", session="s").status_code == 200
    assert looked.swerex("create_session", session="exits", startup_timeout=20).status_code == 200
    assert looked.swerex("run_in_session", session="exits", command="exit 5", check="silent").status_code == 200
    assert looked.swerex("create_session", session="left", startup_timeout=20).status_code == 200
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("a/b", "text")
    for data, unzip in ((b"text", False), (zipped.getvalue(), True), (b"no zip", True)):
        looked.uploaded(data, name="f", target="/workspace/up" if unzip else "/workspace/one", unzip=unzip)
    looked.uploaded(b"x", name="f", target="/proc/nowhere/x")
    looked.uploaded(b"x" * 2**20, name="f", target="/workspace/\0bad")
    address = httpx.URL(looked.gateway.url)
    conn = http.client.HTTPConnection(str(address.host), address.port, timeout=60)
    conn.putrequest("POST", "/swerex/box/looked/upload")
    conn.putheader("Content-Type", "multipart/form-data; boundary=mark")
    conn.putheader("X-API-Key", "any")
    conn.putheader("Content-Length", str(2**20))
    conn.endheaders(b'--mark\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 4096)
    conn.close()
    assert looked.swerex("close").status_code == 200
    until(lambda: "swerex-" not in str(looked.tree()), "what was cut is gone")
    looked.box.exec("rm -rf up one")


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker command line")
def test_a_container_has_in_it_what_was_put_there(served: GatewayProcess, tmp_path: Path) -> None:
    kind = "process" if "process" in served.directory.name else "container"
    engine: Any = docker.DockerClient(base_url=f"unix://{served.directory / 'docker.sock'}", timeout=60)
    box = engine.containers.run(IMAGE, "sleep infinity", detach=True, name=f"left-{kind}")

    def tree() -> set[str]:
        return set(box.exec_run(["sh", "-c", LIST.format(PLACES[kind])]).output.decode().splitlines())

    before = tree()
    box.exec_run(["sh", "-c", "echo out; echo err >&2; exit 3"], tty=True)
    made = engine.api.exec_create(box.id, ["sh", "-c", "exit 4"])["Id"]
    engine.api.exec_start(made, detach=True)
    until(lambda: not engine.api.exec_inspect(made)["Running"], "it has ended")
    assert engine.api.exec_inspect(made)["ExitCode"] == 4
    (tmp_path / "file").write_text("text")
    env = {"DOCKER_HOST": f"unix://{served.directory / 'docker.sock'}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for words in (
        (str(tmp_path / "file"), f"{box.name}:/workspace/in"),
        (f"{box.name}:/workspace/in", str(tmp_path / "out")),
    ):
        subprocess.run(["docker", "cp", *words], env=env, check=True, capture_output=True, timeout=60)
    with pytest.raises(docker.errors.APIError):
        box.put_archive("/workspace", b"no tar at all" * 1000)
    box.exec_run(["rm", "/workspace/in"])
    until(lambda: tree() ^ before == set(), f"{tree() ^ before} is gone")
    box.remove(force=True)
    engine.close()
