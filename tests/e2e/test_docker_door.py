"""The docker command line as it is, over sandboxes of both kinds, and through a kill of the gateway."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tangram import Client
from tests.e2e.gateway import GatewayProcess, document

IMAGE = "tangram-base:bookworm"
pytestmark = pytest.mark.skipif(shutil.which("docker") is None, reason="no docker command line")
LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class DockerCommandLine:
    """The docker CLI, whose engine is a gateway."""

    process: GatewayProcess
    socket: Path

    def __call__(self, *words: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.socket.parent), "DOCKER_HOST": f"unix://{self.socket}"}
        done = subprocess.run(
            ["docker", *words], input=stdin, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert not check or done.returncode == 0, done
        return done


@pytest.fixture(scope="module", params=["process", pytest.param("container", marks=pytest.mark.docker)])
def cli(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerCommandLine]:
    kind = str(request.param)
    if kind == "container":
        request.getfixturevalue("docker")
    directory = tmp_path_factory.mktemp(f"engine-{kind}")
    box = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "1m", "sandbox": {"background": "run"}}
    described = document(kind, directory / "state", box=box)
    described["server"] |= {
        "body_limit": "16Mi",
        "facades": {"docker": {"socket": str(directory / "docker.sock"), "function": "box"}},
    }
    process = GatewayProcess(directory, described)
    process.start()
    yield DockerCommandLine(process, directory / "docker.sock")
    with Client(process.url) as client:
        assert [each.trajectory for each in client.trajectories()] == []
    assert process.stop() == 0, "\n".join(process.log[-30:])


def test_a_container_runs_commands_takes_input_and_files_and_goes(cli: DockerCommandLine, tmp_path: Path) -> None:
    id = cli("run", "-d", "--rm", "--name", "box", "-w", "/tmp", IMAGE, "sleep", "2h").stdout.strip()
    ran = cli("exec", "-e", "A=1", id[:12], "bash", "-lc", "echo $A; pwd; echo e >&2; exit 3", check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("1\n/tmp\n", "e\n", 3)
    assert cli("exec", "-i", "box", "cat", stdin="typed").stdout == "typed"
    (tmp_path / "file").write_text("there and back")
    cli("cp", str(tmp_path / "file"), "box:/workspace/file")
    cli("cp", "box:/workspace/file", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "there and back"
    assert cli("inspect", "-f", "{{.State.Status}} {{.Name}}", "box").stdout == "running /box\n"
    large = cli("exec", "box", "head", "-c", "20000000", "/dev/zero")
    assert len(large.stdout) == 20_000_000
    cli("stop", "box")
    assert cli("ps", "-aq").stdout == ""


@pytest.mark.slow
def test_a_container_outlives_a_gateway_that_is_killed(cli: DockerCommandLine) -> None:
    cli("run", "-d", "--name", "kept", "--label", "k=v", IMAGE, "sleep", "infinity")
    cli("exec", "kept", "sh", "-c", "echo before > file")
    cli.process.kill()
    cli.process.start()
    assert cli("ps", "--filter", "label=k=v", "--format", "{{.Names}}").stdout == "kept\n"
    assert cli("exec", "kept", "cat", "file").stdout == "before\n"
    cli("rm", "-f", "kept")
    assert cli("ps", "-aq").stdout == ""


@pytest.mark.promise("A command over Docker's facade ends with its gateway, and the next one does not wait for it.")
@pytest.mark.slow
def test_a_command_ends_with_the_gateway_whose_client_heard_it(cli: DockerCommandLine) -> None:
    """Nobody hears it any more: it holds up no other, and is not there beside the next."""
    cli("run", "-d", "--name", "kept", IMAGE, "sleep", "infinity")
    cli("run", "-d", "--name", "main", IMAGE, "sh", "-c", "echo up; exec sleep 600")
    words = ["docker", "exec", "kept", "sh", "-c", "echo up; exec sleep 601"]
    env = {"PATH": os.environ["PATH"], "HOME": str(cli.socket.parent), "DOCKER_HOST": f"unix://{cli.socket}"}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as heard:
        assert heard.stdout is not None
        assert heard.stdout.readline() == "up\n"
        cli.process.kill()
        cli.process.start()
        assert heard.wait(LIMIT_S) != 0
    with Client(cli.process.url) as client:
        assert [each.function for each in client.list(state="running")] == []
    assert cli("exec", "kept", "pgrep", "-fc", "sleep 601", check=False).stdout == "0\n"
    assert cli("inspect", "-f", "{{.State.Status}} {{.State.ExitCode}}", "main").stdout == "exited 255\n"
    cli("start", "main")
    assert cli("inspect", "-f", "{{.State.Status}}", "main").stdout == "running\n"
    cli("rm", "-f", "kept", "main")
    assert cli("ps", "-aq").stdout == ""
