"""Images of a real registry, over real sockets: ahead of a run, as a trajectory chooses them, and when they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram import Client, InvalidConfigError
from tests.conftest import BASE_IMAGE
from tests.e2e.gateway import ROOT, GatewayProcess, document
from tests.registry import LoopbackRegistry
from tests.registry import docker as run_docker

pytestmark = [pytest.mark.docker, pytest.mark.slow]


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
