"""The gateway's own image is built on a base made here, without a network, and serves: alone, and with an engine."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.gateway import ROOT

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
