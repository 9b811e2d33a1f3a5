"""Checkpoints, settings and processes for tests of models, and how an action is asked for."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest

from manager.action import Action, Chunk, Grant, Lease, UnitSet
from manager.executor import Call
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.model.processes import ForkServer
from runtimes.model.request import ModelSettings
from runtimes.model.runtime import ModelRuntime
from runtimes.runtime import Execution
from tests.runtimes.recorder import RecordingLog

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


_numbers = itertools.count(1)


def function(path: Path, action: ModelAction, dops: tuple[int, ...] = (1,), **options: object) -> FunctionSpec:
    """A model function named after its checkpoint and action; ``options`` are fields of ModelSpec."""
    return FunctionSpec(
        name=f"{path.name}-{action}",
        runtime="model",
        cost={"gpu": UnitSet.of(dops)},
        key="gpu",
        model=ModelSpec(path=path, action=action, **options),  # type: ignore[arg-type]  # checked by the dataclass
    )


def execution(
    asked: FunctionSpec,
    given: Mapping[str, object],
    chunk: tuple[int, int] = (0, 1),
    *,
    name: str = "",
    batch: tuple[str, ...] = (),
    evict: tuple[str, ...] = (),
) -> Execution:
    """One action with a lease on ``chunk``."""
    assert asked.model is not None
    action_id = name or f"action-{next(_numbers)}"
    grant = Grant(pool="gpu:local", units=chunk[1], chunk=Chunk(*chunk), evict=evict)
    return Execution(
        action=Action(id=action_id, function=asked.name, service=asked.model.service, cost=asked.cost),
        lease=Lease(action_id=action_id, node="local", grants={"gpu": grant}, batch=batch),
        call=Call(function=asked, input=given, log=RecordingLog()),
    )
