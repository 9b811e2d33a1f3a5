"""On real CUDA devices only: what the fakes of `test_backend` and `test_families` stand for elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bench.model.one_device import OneDevice
from manager.function import ModelAction
from runtimes.model.engine import nvml
from runtimes.model.processes import ForkServer, WorkItem
from runtimes.model.request import ModelSettings
from runtimes.model.runtime import ModelRuntime
from runtimes.model.weights import Cuda
from tests.runtimes.model.checkpoints import FAMILIES, IDS, plain_logprobs, plain_score
from tests.runtimes.model.conftest import Write, execution, function
from tests.runtimes.model.test_families import items

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.model,
    pytest.mark.skipif(
        torch.version.cuda is None or not nvml().gpus(),
        reason="needs a CUDA device, and a torch that was built for CUDA",
    ),
]
GIVEN = {"token_ids": IDS}


@pytest.fixture
def device() -> Iterator[OneDevice]:
    made = OneDevice(Cuda("cuda:0", 4096))
    yield made
    made.close()


@pytest.fixture
def cuda_settings(settings: ModelSettings) -> ModelSettings:
    return replace(settings, device="cuda", devices=0, device_bytes=2**30)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_computes_what_transformers_does(family: str, checkpoint: Write, device: OneDevice) -> None:
    path = checkpoint(family, "lm")
    for ids, row in zip(IDS, device.run(device.place(path, "lm"), items(ModelAction.LOGPROBS)), strict=True):
        assert row == pytest.approx(plain_logprobs(path, ids), abs=1e-3)
    path = checkpoint(family, "score")
    scores = device.run(device.place(path, "score"), items(ModelAction.SCORE))
    assert scores == pytest.approx([plain_score(path, ids) for ids in IDS], abs=1e-3)


def test_a_cold_action_is_a_warm_one_bit_for_bit_and_evicted_services_keep_nothing(
    checkpoint: Write, device: OneDevice
) -> None:
    place = device.place(checkpoint("qwen3", "lm"), "lm")
    warm = [device.run(place, items(ModelAction.LOGPROBS)) for _ in range(2)][-1]
    device.engine.evict()
    device.engine.release_cache()
    parked = torch.cuda.memory_allocated()
    for _ in range(5):
        assert device.run(place, items(ModelAction.LOGPROBS)) == warm
        device.engine.evict()
    device.engine.release_cache()
    assert torch.cuda.memory_allocated() == parked


def test_a_gentle_restore_beside_a_computation_arrives_whole(checkpoint: Write, device: OneDevice) -> None:
    first, second = (device.place(checkpoint(family, "lm"), "lm") for family in ("llama", "mistral"))
    expected = device.run(second, items(ModelAction.LOGPROBS))
    device.engine.evict()
    device.run(first, [WorkItem(ids=tuple(IDS[0]), action=ModelAction.LOGPROBS)])
    loaded, cold, _ = device.engine.restore(second, gentle=True)
    device.run(first, items(ModelAction.LOGPROBS))
    loaded.transfer.finish()
    assert cold
    assert device.run(second, items(ModelAction.LOGPROBS)) == expected


async def test_the_runtime_finds_the_devices_and_survives_a_killed_worker(
    checkpoint: Write, cuda_settings: ModelSettings, fork_server: ForkServer
) -> None:
    runtime = ModelRuntime(cuda_settings, fork_server=fork_server)
    asked = function(checkpoint("qwen3", "score"), ModelAction.SCORE)
    first = await runtime.execute(execution(asked, GIVEN))
    devices = runtime.resources()["devices"]
    assert isinstance(devices, list)
    assert devices[0]["kind"] == "cuda"
    assert devices[0]["used_bytes"] >= 2**30, "the arena at least"
    os.kill(devices[0]["pid"], signal.SIGKILL)
    second = await runtime.execute(execution(asked, GIVEN))
    assert second.value == first.value
    assert second.usage["restored"] == 1.0
    await runtime.close()


@pytest.mark.parametrize("dop", [2, 4, 8])
async def test_degrees_of_parallelism_agree_over_nccl(
    dop: int, checkpoint: Write, cuda_settings: ModelSettings, fork_server: ForkServer, tmp_path: Path
) -> None:
    if len(nvml().gpus()) < dop:
        pytest.skip(f"needs {dop} CUDA devices")
    runtime = ModelRuntime(replace(cuda_settings, state_dir=tmp_path / str(dop)), fork_server=fork_server)
    asked = function(checkpoint("llama", "lm"), ModelAction.LOGPROBS, (1, dop))
    alone, shared = await asyncio.gather(
        runtime.execute(execution(asked, GIVEN, (0, 1))), runtime.execute(execution(asked, GIVEN, (0, dop)))
    )
    for one, other in zip(alone.value["logprobs"], shared.value["logprobs"], strict=True):  # type: ignore[index]  # a JSON object
        assert one == pytest.approx(other, abs=1e-3)
    await runtime.close()
