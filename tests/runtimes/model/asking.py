"""Model functions and executions for tests, as the gateway would make them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from manager.action import Action, Chunk, Grant, Lease, UnitSet
from manager.executor import Call
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.runtime import Execution

_numbers = itertools.count(1)


class NoLog:
    """Drops what a runtime logs."""

    def write(self, stream: str, data: str) -> None:
        pass

    def omit(self, size_bytes: int) -> None:
        pass


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
        call=Call(function=asked, input=given, log=NoLog()),
    )
