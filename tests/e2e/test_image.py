"""The gateway's own image is built on a base made here, without a network, and serves."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.e2e.gateway import ROOT

BUILD_S, COMMAND_S = 600, 120
#: Waits until the gateway inside is ready, then runs a handler through it; prints the result.
INSIDE = """
import json, time, urllib.request

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request("http://127.0.0.1:8080" + path, data=data)
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
"""


@pytest.fixture(scope="module")
def container(docker: str) -> Iterator[str]:
    name = f"tangram-gateway-test-{uuid.uuid4().hex[:8]}"
    run([str(ROOT / "scripts" / "gateway-image"), docker, "tangram-gateway:test"], BUILD_S)
    # No Docker socket inside: its functions run in local process sandboxes.
    run(["docker", "run", "--detach", "--network", "none", "--name", name, "tangram-gateway:test"], COMMAND_S)
    yield name
    run(["docker", "rm", "--force", "--volumes", name], COMMAND_S)


@pytest.mark.docker
@pytest.mark.network
@pytest.mark.xdist_group("image")
def test_the_image_serves(container: str) -> None:
    assert run(["docker", "exec", container, "python3", "-c", INSIDE], COMMAND_S).strip() == "1.0"


def run(command: list[str], seconds: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
