"""The base image from what is installed: by debootstrap or a Dockerfile, each step told, nothing done twice."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import docker as docker_library
import docker.errors as docker_errors
import pytest

from manager.errors import InvalidConfig, Unsupported
from runtimes.sandbox.docker import images
from runtimes.sandbox.docker.engine import EngineConnection
from runtimes.sandbox.docker.images import BaseImageBuilder

PULLING = {"id": "a", "status": "Downloading"}


@dataclass
class ScriptedEngine:
    """Has ``images``, answers a build with ``events``, and keeps what it was asked for."""

    events: Sequence[Mapping[str, Any]] = ()
    images: set[str] = field(default_factory=set)
    imports: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)

    def inspect_image(self, image: str) -> dict[str, Any]:
        if not {image, f"{image}:latest"} & self.images:
            raise docker_errors.ImageNotFound("none")
        return {}

    def build(self, **asked: Any) -> Iterator[Mapping[str, Any]]:
        self.asked.append({**asked, "fileobj": asked["fileobj"].read().decode()})
        return iter(self.events)

    def import_image_from_file(self, filename: str, repository: str = "", tag: str = "", changes: Any = None) -> str:
        self.asked.append({"filename": filename, "changes": changes})
        if self.imports:
            self.images.add(f"{repository}:{tag}")
        return "{}" if self.imports else '{"errorDetail": {"message": "no space left"}}'


@dataclass
class Bench:
    engine: ScriptedEngine
    said: list[str]

    def builder(self, script: Path = images.PLACE / "debootstrap.sh") -> BaseImageBuilder:
        return BaseImageBuilder(api=cast(docker_library.APIClient, self.engine), say=self.said.append, script=script)


@pytest.fixture
def bench() -> Bench:
    return Bench(ScriptedEngine(), [])


def test_a_build_from_an_image_tells_each_step_and_each_tenth_of_the_pull(bench: Bench) -> None:
    bench.engine.events = [
        {"stream": "Step 1/2 : FROM debian\n"},
        {**PULLING, "progressDetail": {"current": 1, "total": 100}},
        {**PULLING, "progressDetail": {"current": 50, "total": 100}},
        {**PULLING, "progressDetail": {"current": 51, "total": 100}},
        {"stream": " ---> 0123"},
        {"stream": "Step 2/2 : RUN true\n"},
    ]
    bench.builder().dockerfile("a:b", "debian:other")
    assert bench.said == [
        "a:b: Step 1/2 : FROM debian",
        "a:b: 50 % of debian:other, 100 bytes",
        "a:b: Step 2/2 : RUN true",
    ]
    (asked,) = bench.engine.asked
    assert (asked["tag"], asked["buildargs"]) == ("a:b", {"BASE": "debian:other"})
    assert asked["fileobj"] == (images.PLACE / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["a b", "", "a@sha256:" + "0" * 64])
def test_what_no_image_can_be_called_is_refused_before_anything_is_done(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidConfig):
        bench.builder().dockerfile(name, "debian")
    with pytest.raises(InvalidConfig):
        bench.builder().debootstrap(name)
    assert bench.engine.asked == []


def test_a_tree_of_debootstrap_is_imported_with_what_its_script_asks_for(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('printf "/tree.tar\\nENV A=1\\nCMD [\\"/bin/sh\\"]\\n"')
    bench.builder(script).debootstrap("localhost:5000/a")
    assert bench.engine.asked == [{"filename": "/tree.tar", "changes": ["ENV A=1", 'CMD ["/bin/sh"]']}]
    assert bench.builder().present("localhost:5000/a:latest")
    bench.engine.imports = False
    with pytest.raises(Unsupported, match="no space left"):
        bench.builder(script).debootstrap("b")
    script.write_text("exit 3")
    with pytest.raises(Unsupported, match=r"exit status 3.*--from IMAGE"):
        bench.builder(script).debootstrap("b")


def test_where_there_is_no_engine_no_image_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(host: str) -> EngineConnection:
        raise Unsupported(f"no Docker engine answers at {host}", component="test")

    monkeypatch.setattr(images, "_opened", away)
    assert not images.lacks("a:b", "unix:///nowhere")
    with pytest.raises(Unsupported, match="unix:///nowhere"):
        images.build("a:b", source="", host="unix:///nowhere", again=False, say=print)


@pytest.mark.docker
def test_a_real_engine_builds_it_once_without_a_network_where_the_packages_are_there(docker: str) -> None:
    name, said = f"tangram-test-{secrets.token_hex(6)}:base", list[str]()
    api = docker_library.APIClient(version="auto")
    assert images.lacks(name, "")
    try:
        assert images.build(name, source=docker, host="", again=False, say=said.append)
        assert said[0].startswith(f"{name}: Step 1/")
        config = cast(Any, api).inspect_image(name)["Config"]
        assert (config["Cmd"], config["Entrypoint"]) == (["/bin/sh"], None)
        assert not images.build(name, source=docker, host="", again=False, say=said.append)
        assert not images.lacks(name, "")
        with pytest.raises(InvalidConfig, match="could not be built from localhost:1/none"):
            images.build(name, source="localhost:1/none", host="", again=True, say=said.append)
    finally:
        api.remove_image(name, force=True)
        api.close()
