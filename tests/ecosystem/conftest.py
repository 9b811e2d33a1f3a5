"""Rows of the ecosystem: a real client from the registry, and a gateway with the door that it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tangram import Client
from tests.e2e.gateway import ROOT, GatewayProcess, document
from tests.ecosystem.environments import ClientEnvironment, ClientFailed, client_environment

#: What Harbor's verifier and Inspect's checks do as root, and the user that one of these adds.
ROOT_INSIDE = {"users": ["root", "inspect-ai-test-exec-as-user"], "capabilities": "default"}


@pytest.fixture(scope="session")
def client() -> Callable[[str], ClientEnvironment]:
    """Return a client's environment; the test is skipped without a registry, and fails where ``CI=true``."""

    def find(name: str) -> ClientEnvironment:
        try:
            return client_environment(name)
        except ClientFailed as error:
            if os.environ.get("CI") == "true":
                pytest.fail(str(error))
            pytest.skip(str(error))

    return find


@pytest.fixture(scope="session")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `tangram-client`, laid out: what a framework's environment gets of us, entry points too."""
    directory = tmp_path_factory.mktemp("distribution")
    shutil.copytree(ROOT / "client", directory / "client", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    code = f"import setuptools.build_meta as backend; print(backend.build_wheel({str(directory)!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=directory / "client", capture_output=True, text=True, check=True)
    with zipfile.ZipFile(directory / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(directory / "installed")
    return directory / "installed"


@pytest.fixture(scope="module", params=["process", pytest.param("container", marks=pytest.mark.docker)])
def boxes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A serving gateway for plugs, with sandboxes of each kind; nothing lives in it when its tests have ended."""
    kind = str(request.param)
    if kind == "container":
        request.getfixturevalue("docker")
    directory = tmp_path_factory.mktemp(f"boxes-{kind}")
    large = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "5m", "output_limit": "16Mi"}
    images = {"images": ["swebench/*"]} if kind == "container" else {}
    described = document(
        kind,
        directory / "state",
        boxes={**large, "sandbox": {**ROOT_INSIDE, **images, "background": "run"}},
        harbor={**large, "sandbox": {**ROOT_INSIDE, "user": "root"}},
        judge={"runtime": "handler", "handler": "handler:judge", "cost": {"cpu": 1}, "idempotent": True},
        broken_judge={"runtime": "handler", "handler": "handler:broken", "cost": {"cpu": 1}, "idempotent": True},
        mute_judge={"runtime": "handler", "handler": "handler:mute", "cost": {"cpu": 1}, "idempotent": True},
    )
    described["server"] |= {"body_limit": "128Mi", "auth": "none", "facades": {"swerex": {"function": "boxes"}}}
    described["server"]["facades"]["docker"] = {"socket": str(directory / "docker.sock"), "function": "boxes"}
    process = GatewayProcess(directory, described)
    with (directory / "handler.py").open("a") as file:
        file.write("\n\ndef judge(event, context):\n    return float(event['response'].endswith(event['label']))\n")
        file.write("\n\ndef mute(event, context):\n    return None\n")
    process.start()
    yield process
    with Client(process.url) as client:
        assert [each.trajectory for each in client.trajectories()] == []
    assert process.stop() == 0, "\n".join(process.log[-30:])
