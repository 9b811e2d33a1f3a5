"""Sandboxes of both kinds for the same tests."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from manager.function import SandboxSpec
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.conftest import REMOTE
from tests.remote_engine import RemoteEngine
from tests.runtimes.sandbox.box import Box, running_box


def unique(name: str) -> str:
    """A name that no other test process gives to a sandbox of the same engine."""
    return f"{name}-{secrets.token_hex(4)}"


@pytest.fixture(params=["process", pytest.param("container", marks=pytest.mark.docker), REMOTE])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Provider]:
    """A provider of each kind; whatever a test leaves behind is removed."""
    state_dir = tmp_path / "state"
    if request.param == "remote":
        settings = remote_settings(request.getfixturevalue("remote_engine"), state_dir)
    else:
        if request.param == "container":
            request.getfixturevalue("docker")
        settings = ProviderSettings(kind=request.param, state_dir=state_dir)
    provider = make_provider(settings)
    yield provider
    await provider.reap(())
    await provider.close()


def remote_settings(engine: RemoteEngine, state_dir: Path) -> ProviderSettings:
    return ProviderSettings(kind="container", state_dir=state_dir, docker=DockerSettings(host=engine.host))


@pytest.fixture
async def containers(docker: str, tmp_path: Path) -> AsyncIterator[Provider]:
    """A provider of containers, for what only they can do."""
    provider = make_provider(ProviderSettings(kind="container", state_dir=tmp_path / "state"))
    yield provider
    await provider.reap(())
    await provider.close()


@pytest.fixture
def spec() -> SandboxSpec:
    """A small sandbox of the base image (process sandboxes have no images and do not look)."""
    users = ("1000", "65534", "nobody-here", "root")
    return SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20, pids=64, users=users)


@pytest.fixture
async def sandbox(provider: Provider, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    made = await provider.create(spec, name=unique("test"), labels={}, mounts={})
    yield made
    await made.close()


@pytest.fixture
def box() -> Iterator[Box]:
    with running_box() as box:
        yield box
