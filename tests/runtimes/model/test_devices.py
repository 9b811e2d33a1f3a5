"""Devices: declared ``cpu`` ones where there are no others, in powers of two; two nodes know nothing of each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from manager.errors import InvalidConfig
from manager.function import ModelAction
from runtimes.model.devices import discover
from runtimes.model.process import Nursery
from runtimes.model.runtime import ModelRuntime
from runtimes.model.settings import GIB, ModelSettings
from tests.runtimes.model.asking import execution, function
from tests.runtimes.model.conftest import Write


@pytest.mark.parametrize(("declared", "made"), [(0, 1), (1, 1), (3, 2), (8, 8)])
def test_the_number_of_devices_is_a_power_of_two(declared: int, made: int) -> None:
    found = discover(ModelSettings(device="cpu", devices=declared))
    assert [device.index for device in found] == list(range(made))
    assert {device.arena_bytes for device in found} == {2 * GIB}


def test_cuda_is_refused_where_there_is_none() -> None:
    if any(device.kind == "cuda" for device in discover(ModelSettings())):
        pytest.skip("there is a CUDA device here")
    with pytest.raises(InvalidConfig, match="use device: cpu"):
        discover(ModelSettings(device="cuda"))


@pytest.mark.model
async def test_two_nodes_of_four_devices_run_the_same_service_apart(
    checkpoint: Write, settings: ModelSettings, nursery: Nursery
) -> None:
    nodes = [ModelRuntime(replace(settings, devices=4, node=name), nursery=nursery) for name in ("a", "b")]
    asked = function(checkpoint("llama", "lm"), ModelAction.LOGPROBS, (1, 2, 4))
    chunks = [(0, 2), (2, 2), (0, 4), (3, 1)]
    given = {"token_ids": [[5, 6, 7]]}
    results = await asyncio.gather(*(node.execute(execution(asked, given, c)) for node in nodes for c in chunks))
    sums = [result.value["sums"][0] for result in results]  # type: ignore[index]  # a JSON object
    assert sums == pytest.approx([sums[0]] * 8, abs=1e-5)
    assert asked.model is not None
    for node in nodes:
        assert sorted(node.residency()[asked.model.service]) == sorted(chunks)
        await node.close()
