"""What the scheduler believes of what a node tells of model services."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.cluster import DEVICE_COPIES_MAX, NODE_COPIES_MAX, DeclaredServices
from manager.action import Chunk
from manager.config import ServiceSpec
from manager.function import FunctionSpec, ModelAction, ModelSpec

MODEL = ModelSpec(path=Path("/models/judge"), action=ModelAction.SCORE, batch_tokens=100)
SERVICE = MODEL.service
TOLD = ServiceSpec(name=SERVICE, bytes_by_dop={1: 40, 2: 20}, restore_s_by_dop={1: 1.0, 2: 0.5}, batch_tokens=100)


def declared(*models: ModelSpec) -> DeclaredServices:
    services = DeclaredServices()
    services.declare(FunctionSpec(name="shell", runtime="exec"))
    services.declare(
        *(FunctionSpec(name=f"f{number}", runtime="model", model=model) for number, model in enumerate(models))
    )
    return services


def test_services_of_no_declared_function_are_not_kept() -> None:
    services = declared(MODEL)
    assert services.services([TOLD, replace(TOLD, name="another")]) == [TOLD]
    assert services.resident({SERVICE: [Chunk(0, 2)], "another": [Chunk(0, 1)]}, 2) == {SERVICE: (Chunk(0, 2),)}
    assert declared().services([TOLD]) == []


def test_whether_it_is_batched_and_copied_is_as_declared() -> None:
    told = replace(TOLD, batch_tokens=10**9, replicable=False, restore_s_by_node={"n2": {1: 9.0}})
    assert declared(MODEL, replace(MODEL, batch_tokens=70)).services([told]) == [replace(TOLD, batch_tokens=70)]
    engine = replace(MODEL, engine_url="http://engine")
    (service,) = declared(engine).services([replace(TOLD, name=engine.service)])
    assert (service.batch_tokens, service.replicable) == (0, False)


@pytest.mark.parametrize(
    "costs",
    [
        {"restore_s_by_dop": {1: math.inf}},
        {"restore_s_by_dop": {1: math.nan}},
        {"restore_s_by_dop": {1: -1.0}},
        {"bytes_by_dop": {1: -1}},
        {"bytes_by_dop": {1: 2**62}},
        {"bytes_by_dop": {0: 1}},
    ],
)
def test_costs_that_cannot_be_are_not_believed(costs: dict[str, Any]) -> None:
    assert declared(MODEL).services([replace(TOLD, **costs)]) == []


def test_copies_lie_on_the_nodes_own_devices_and_each_counts_once() -> None:
    fits = [Chunk(0, 2), Chunk(2, 1), Chunk(0, 4)]
    beyond = [Chunk(4, 2), Chunk(-1, 1), Chunk(1, 2), Chunk(0, 3), Chunk(0, 0), Chunk(0, -1), Chunk(0, 2**40)]
    assert declared(MODEL).resident({SERVICE: [*fits, *beyond, *fits]}, 5) == {SERVICE: tuple(fits)}


def test_what_a_node_tells_of_copies_is_bounded() -> None:
    models = [replace(MODEL, path=Path(f"/models/{number}")) for number in range(DEVICE_COPIES_MAX + 1)]
    services = declared(*models)
    on_one = services.resident({model.service: [Chunk(0, 1)] for model in models}, 1)
    assert sum(map(len, on_one.values())) == DEVICE_COPIES_MAX
    on_many = services.resident({models[0].service: [Chunk(number, 1) for number in range(4096)]}, 4096)
    assert sum(map(len, on_many.values())) == NODE_COPIES_MAX
