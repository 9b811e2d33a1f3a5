"""Shared by the tests of the model room: one fork server, tiny checkpoints, and a runtime on eight ``cpu`` devices."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from runtimes.model.processes import ForkServer
from runtimes.model.request import ModelSettings
from runtimes.model.runtime import ModelRuntime

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """torch is imported once for the model processes of every test."""
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """``checkpoint(family, head)``: a tiny random checkpoint, written once."""
    from tests.runtimes.model import checkpoints

    directory = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, str, int], Path] = {}

    def write(family: str, head: str, seed: int = 0) -> Path:
        key = (family, head, seed)
        if key not in made:
            made[key] = checkpoints.write(directory, *key)
        return made[key]

    return write


@pytest.fixture
def settings(tmp_path: Path) -> ModelSettings:
    return ModelSettings(
        device="cpu", devices=8, device_bytes=64 * 2**20, state_dir=tmp_path / "models", kill_grace_s=0.5, recheck_s=0.0
    )


@pytest.fixture
async def runtime(settings: ModelSettings, fork_server: ForkServer) -> AsyncIterator[ModelRuntime]:
    made = ModelRuntime(settings, fork_server=fork_server)
    yield made
    await made.close()
