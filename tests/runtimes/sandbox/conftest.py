"""Sandboxes of both kinds for the same tests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from manager.function import SandboxSpec
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.box import Box, running_box


def unique(name: str) -> str:
    """A name that no other test process gives to a sandbox of the same engine."""
    return f"{name}-{secrets.token_hex(4)}"


@asynccontextmanager
async def provided(state_dir: Path, kind: str = "process", **settings: Any) -> AsyncIterator[Provider]:
    """A provider; whatever a test leaves behind is removed."""
    known = ProviderSettings(kind=kind, state_dir=state_dir, **settings)  # type: ignore[arg-type]  # the tests' own
    # In a thread, as the way to an engine may be a task of ours.
    provider = await asyncio.to_thread(make_provider, known)
    try:
        yield provider
    finally:
        await provider.reap(())
        await provider.close()


async def sh(sandbox: Sandbox, text: str, **options: object) -> CommandResult:
    """Run a shell's command; what its end leaves is killed soon."""
    return await sandbox.run(Command(shell=text, **{"kill_grace_s": 0.2, **options}))  # type: ignore[arg-type]  # by name


async def say(sandbox: Sandbox, text: str, user: str = "") -> str:
    """Return what a shell's command says."""
    return (await sh(sandbox, text, user=user)).stdout.decode()


#: For what the runner alone decides, in the same way in every kind of sandbox.
RUNNER_ALONE = pytest.mark.parametrize("provider", ["process"], indirect=True)
#: The same for tests of a module's one sandbox.
SHARED_RUNNER_ALONE = pytest.mark.parametrize("shared_provider", ["process"], indirect=True)
#: For single tests that use a module's one sandbox.
ON_SHARED_LOOP = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(params=["process", pytest.param("container", marks=pytest.mark.docker)])
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Provider]:
    """A provider of each kind."""
    if request.param == "container":
        request.getfixturevalue("docker")
    async with provided(tmp_path / "state", request.param) as provider:
        yield provider


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["process", pytest.param("container", marks=pytest.mark.docker)]
)
async def shared_provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Provider]:
    """A provider of each kind for all tests of a module, which run on the module's event loop."""
    if request.param == "container":
        request.getfixturevalue("docker")
    async with provided(tmp_path_factory.mktemp("shared") / "state", request.param) as provider:
        yield provider


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_sandbox(shared_provider: Provider) -> AsyncIterator[Sandbox]:
    """One sandbox for all tests of a module that leave it as it was: no process, no bound that was met."""
    made = await shared_provider.create(small(), name=unique("test"), labels={}, mounts={})
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def tidy_sandbox(shared_sandbox: Sandbox) -> Sandbox:
    """The module's one sandbox, with nothing in its working directory."""
    await shared_sandbox.run(Command(shell="chmod -R u+rwx . && find . -mindepth 1 -delete"))
    return shared_sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def fresh_sandbox(shared_provider: Provider) -> AsyncIterator[Sandbox]:
    """A sandbox of its own beside the shared one."""
    made = await shared_provider.create(small(), name=unique("test"), labels={}, mounts={})
    yield made
    await made.close()


@pytest.fixture
async def containers(docker: str, tmp_path: Path) -> AsyncIterator[Provider]:
    """A provider of containers, for what only they can do."""
    async with provided(tmp_path / "state", "container") as provider:
        yield provider


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Provider]:
    """A provider of process sandboxes alone."""
    async with provided(tmp_path / "state") as provider:
        yield provider


def small() -> SandboxSpec:
    """A small sandbox of the base image (process sandboxes have no images and do not look)."""
    users = ("1000", "65534", "nobody-here", "root")
    return SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20, pids=64, users=users)


@pytest.fixture
def spec() -> SandboxSpec:
    return small()


@pytest.fixture
async def sandbox(provider: Provider, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    made = await provider.create(spec, name=unique("test"), labels={}, mounts={})
    yield made
    await made.close()


@pytest.fixture
def box() -> Iterator[Box]:
    with running_box() as box:
        yield box
