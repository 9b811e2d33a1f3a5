"""Images of a real registry, and the gateway's own image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tangram import Client, InvalidConfigError
from tests.conftest import BASE_IMAGE
from tests.e2e.gateway import ROOT, GatewayProcess, document
from tests.registry import LoopbackRegistry
from tests.registry import docker as run_docker

BUILD_S, COMMAND_S = 600, 120
#: Serves with sandboxes that are not isolated from the gateway's container, which has to be asked for twice.
PLAIN = """
sed -i 's/^  provider: auto.*/  provider: plain\\n  plain_as_root: true/' tangram.yaml && exec python3 -m gateway serve
"""
#: Waits until the gateway inside is ready, then runs a handler through it; prints the result.
INSIDE = """
import json, time, urllib.request
from tangram.types import find_token

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {find_token('127.0.0.1', 8080)}"}
    request = urllib.request.Request("http://127.0.0.1:8080" + path, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)

deadline = time.monotonic() + 60
while True:
    try:
        ask("/readyz")
        break
    except OSError:
        assert time.monotonic() < deadline, "never ready"
        time.sleep(0.1)
print(ask("/v1/functions/math_reward/invocations", {"answer": "\\\\boxed{2}", "reference": "2"})["result"]["reward"])
print(ask("/v1/functions/shell/invocations", {"command": "hostname"})["result"]["stdout"].strip())
print(ask("/v1/resources")["sandboxes"]["engine"])
"""


@pytest.fixture(scope="module")
def registry(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackRegistry]:
    try:
        made = LoopbackRegistry(tmp_path_factory.mktemp("registry"))
    except RuntimeError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def gateway(registry: LoopbackRegistry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    directory: Path = tmp_path_factory.mktemp("images")
    described = document("container", directory / "state")
    described["functions"]["choosy"]["sandbox"]["images"] = [f"{registry.host}/tasks/*"]
    process = GatewayProcess(directory, described)
    process.start()
    yield process
    assert process.stop() == 0, "\n".join(process.log[-30:])


@pytest.mark.docker
@pytest.mark.slow
def test_an_image_is_pulled_as_a_trajectory_is_opened_and_its_failure_is_told(
    gateway: GatewayProcess, registry: LoopbackRegistry
) -> None:
    image = registry.push_local(BASE_IMAGE, "tasks/base:1")
    try:
        with Client(gateway.url) as client:
            with pytest.raises(InvalidConfigError, match=r"(?i)manifest unknown|not found"):
                client.trajectory("t", function="choosy", sandbox={"image": f"{registry.host}/tasks/none:1"}).open()
            assert client.trajectories() == [], "nothing was begun for it"
            with client.trajectory("t", function="choosy", sandbox={"image": image}) as opened:
                assert opened.exec("echo from there").result["stdout"] == "from there\n"
            found = {each.image: each for each in client.images()}
            assert found[image].pulled and found[BASE_IMAGE].kept and not found[BASE_IMAGE].pulled
            assert found[f"{registry.host}/tasks/none:1"].state == "failed"
    finally:
        run_docker("rmi", image)


@pytest.mark.docker
@pytest.mark.slow
def test_images_are_pulled_ahead_of_a_run(gateway: GatewayProcess, registry: LoopbackRegistry) -> None:
    images = [registry.push(f"tasks/{name}:1") for name in ("a", "b")]
    try:
        status, out = tangram(gateway, "images", "pull", *images, "--json")
        assert status == 0
        assert {each["image"]: each["state"] for each in json.loads(out)} == dict.fromkeys(images, "present")
        status, out = tangram(gateway, "images", "list")
        assert status == 0 and all(image in out for image in images)
        status, out = tangram(gateway, "images", "pull", f"{registry.host}/tasks/none:2")
        assert status == 1 and "failed" in out
    finally:
        run_docker("rmi", *images)


def tangram(gateway: GatewayProcess, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *words],
        cwd=ROOT,
        env=os.environ | {"TANGRAM_SERVER": gateway.url, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def image(docker: str) -> str:
    run([str(ROOT / "scripts" / "gateway-image"), docker, "tangram-gateway:test"], BUILD_S)
    return "tangram-gateway:test"


@contextmanager
def serving(image: str, *options: str, command: tuple[str, ...] = ()) -> Iterator[str]:
    """The name of a container in which a gateway serves."""
    name = f"tangram-gateway-test-{uuid.uuid4().hex[:8]}"
    run(["docker", "run", "--detach", "--network", "none", "--name", name, *options, image, *command], COMMAND_S)
    try:
        yield name
    finally:
        run(["docker", "rm", "--force", "--volumes", name], COMMAND_S)


def ask(container: str) -> list[str]:
    return run(["docker", "exec", container, "python3", "-c", INSIDE], COMMAND_S).splitlines()


@pytest.mark.docker
@pytest.mark.network
@pytest.mark.xdist_group("image")
@pytest.mark.slow
def test_the_image_serves(image: str) -> None:
    with serving(image, "--entrypoint", "/bin/sh", command=("-c", PLAIN)) as container:  # no Docker, no bubblewrap
        reward, _, engine = ask(container)
        assert (reward, engine) == ("1.0", "plain processes")


@pytest.mark.docker
@pytest.mark.network
@pytest.mark.xdist_group("image")
@pytest.mark.slow
def test_given_an_engine_it_makes_containers_beside_its_own(image: str) -> None:
    """The engine sees none of its files, and it sees none of their processes: it attaches."""
    with serving(image, "--volume", "/var/run/docker.sock:/var/run/docker.sock") as container:
        reward, hostname, engine = ask(container)
        assert (reward, hostname) == ("1.0", "sandbox")
        assert engine.endswith("attach transport")
        state = run(["docker", "exec", container, "cat", "/var/lib/tangram/sandboxes/state-id"], COMMAND_S)
        ours = ["docker", "ps", "--all", "--quiet", "--filter", f"label=tangram.gateway=tangram-{state}"]
        assert run(ours, COMMAND_S)
        run(["docker", "kill", "--signal", "INT", container], COMMAND_S)
        assert run(["docker", "wait", container], COMMAND_S).strip() == "0"
        assert run(ours, COMMAND_S) == ""


def run(command: list[str], seconds: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
