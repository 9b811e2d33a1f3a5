"""Both kinds of sandboxes, and the reward's own environments in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench.attacks.play import small
from bench.inputs import OWN_PATH
from manager.function import SandboxSpec
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.sandbox import Provider
from tests.runtimes.sandbox.conftest import provided, spec

__all__ = ["spec"]


@pytest.fixture(params=["process", pytest.param("container", marks=pytest.mark.docker)])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Provider]:
    """A provider of each kind, process sandboxes with the pytest of this machine."""
    if request.param == "container":
        request.getfixturevalue("docker")
    path = OWN_PATH if request.param == "process" else ""
    async with provided(tmp_path / "state", request.param, path=path) as provider:
        yield provider


@pytest.fixture
async def environments(provider: Provider, spec: SandboxSpec) -> AsyncIterator[Environments]:
    if not provider.info.limits["processes_hidden"]:
        pytest.skip("this machine's process sandboxes share the host's processes: nothing is attacked here")
    environments = Environments(provider, EnvironmentSettings(default=small(spec)))
    yield environments
    await environments.close()
