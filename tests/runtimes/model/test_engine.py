"""Batches, estimates of restores, and devices: declared cpu ones where there are no others, in powers of two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import ActionFailed, InvalidConfig
from manager.function import ModelAction
from runtimes.model import engine
from runtimes.model.compute import pack
from runtimes.model.engine import (
    KEPT,
    Device,
    Gpu,
    Restores,
    discover,
    nvml,
    used_bytes,
    visible_gpus,
)
from runtimes.model.processes import ForkServer, ModelProcess
from runtimes.model.request import GIB, ModelSettings
from runtimes.model.runtime import ModelRuntime
from tests.runtimes.model.conftest import Write, execution, function

lengths = st.lists(st.integers(1, 300), max_size=60)


@given(lengths, st.integers(1, 2000))
def test_every_sequence_is_in_exactly_one_batch(sizes: list[int], budget: int) -> None:
    assert sorted(index for batch in pack(sizes, budget) for index in batch) == list(range(len(sizes)))


@given(lengths, st.integers(1, 2000))
def test_no_batch_exceeds_the_budget_padding_included(sizes: list[int], budget: int) -> None:
    for batch in pack(sizes, budget):
        cost = len(batch) * max(sizes[index] for index in batch)
        assert cost <= budget or len(batch) == 1


def test_sequences_of_like_length_share_a_batch() -> None:
    sizes = [100, 10, 100, 10]
    assert pack(sizes, 200) == [[1, 3], [0, 2]]


def test_nothing_measured_is_estimated_by_the_rate_that_is_assumed() -> None:
    assert Restores(100.0).estimate("a", {1: 200, 2: 100}) == {1: 2.0, 2: 1.0}


def test_each_dop_follows_its_own_measurements_and_the_others_the_nodes_rate() -> None:
    restores = Restores(1.0)
    restores.add("a", 2, 100, 0.5)
    assert restores.estimate("a", {1: 200, 2: 100}) == {1: 1.0, 2: 0.5}
    restores.add("a", 1, 200, 4.0)
    assert restores.estimate("a", {1: 200, 2: 100}) == {1: 4.0, 2: 0.5}


def test_outliers_change_nothing() -> None:
    restores = Restores(1.0)
    for seconds in (1.0, 1.1, 0.9, 60.0, 1.0, 0.0001):
        restores.add("a", 1, 100, seconds)
    assert restores.estimate("a", {1: 100})[1] == pytest.approx(1.0)


def test_a_machine_that_became_slower_is_followed() -> None:
    restores = Restores(1.0)
    for seconds in (*[1.0] * 100, *[3.0] * KEPT):
        restores.add("a", 1, 100, seconds)
    assert restores.estimate("a", {1: 100}) == {1: 3.0}


@pytest.mark.parametrize(("declared", "made"), [(0, 1), (1, 1), (3, 2), (8, 8)])
def test_the_number_of_devices_is_a_power_of_two(declared: int, made: int) -> None:
    found = discover(ModelSettings(device="cpu", devices=declared))
    assert [device.index for device in found] == list(range(made))
    assert {device.arena_bytes for device in found} == {2 * GIB}


@dataclass(frozen=True)
class FakeDriver:
    """NVML of a machine with these GPUs."""

    known: Sequence[Gpu]

    def gpus(self) -> Sequence[Gpu]:
        return self.known

    def used_bytes(self, uuid: str) -> int | None:
        return next((gpu.memory_bytes // 2 for gpu in self.known if gpu.uuid == uuid), None)


GPUS = [Gpu(uuid=f"GPU-{letter}{letter}-{index}", name="H200", memory_bytes=100) for index, letter in enumerate("abcd")]


@pytest.mark.parametrize("kind", ["cuda", "auto"])
def test_cuda_devices_are_those_of_the_driver_each_alone_in_its_process(kind: Literal["cuda", "auto"]) -> None:
    found = discover(ModelSettings(device=kind, arena_share=0.5), FakeDriver(GPUS), visible="0,1,2,3")
    assert [device.kind for device in found] == ["cuda"] * 4
    assert [device.index for device in found] == [0, 1, 2, 3]
    assert {device.arena_bytes for device in found} == {50}
    assert [device.torch_name for device in found] == ["cuda:0"] * 4
    assert [device.environment for device in found] == [{"CUDA_VISIBLE_DEVICES": gpu.uuid} for gpu in GPUS]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, "abcd"),
        ("2,0", "ca"),
        (" 1 , 3 ", "bd"),
        ("GPU-cc-2,GPU-a", "ca"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("0,9,1", "a"),
        ("1,-1,2", "b"),
        ("0,0", ""),
        ("0,GPU-aa", ""),
        ("GPU-", ""),
        ("MIG-1", ""),
    ],
)
def test_what_cuda_would_not_see_is_no_device(setting: str | None, left: str) -> None:
    assert [gpu.uuid[4] for gpu in visible_gpus(GPUS, setting)] == list(left)


def test_the_environment_decides_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    found = discover(ModelSettings(), FakeDriver(GPUS))
    assert [device.uuid for device in found] == [GPUS[3].uuid, GPUS[1].uuid]


def test_a_gpu_divided_by_mig_is_refused_by_name() -> None:
    divided = FakeDriver([replace(GPUS[0], divided=True), GPUS[1]])
    with pytest.raises(InvalidConfig, match=r"GPU-aa-0 is divided by MIG.*CUDA_VISIBLE_DEVICES"):
        discover(ModelSettings(), divided)
    assert len(discover(ModelSettings(), divided, visible="1")) == 1


def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(InvalidConfig, match="use device: cpu"):
        discover(ModelSettings(device="cuda"), FakeDriver([]))


def test_the_memory_of_a_lost_device_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "nvml", lambda: FakeDriver(GPUS))
    known, lost = (Device(index=0, kind="cuda", name="", arena_bytes=1, uuid=uuid) for uuid in (GPUS[0].uuid, "GPU-x"))
    assert used_bytes(known) == 50
    assert used_bytes(lost) is None


def test_without_a_driver_there_are_no_gpus() -> None:
    if nvml().gpus():
        pytest.skip("there is a CUDA device here")
    assert [device.kind for device in discover(ModelSettings())] == ["cpu"]


@pytest.mark.model
async def test_a_device_that_cannot_be_had_is_told_by_its_process(fork_server: ForkServer) -> None:
    """A process of its own environment: there is no such GPU, and most likely no CUDA in torch either."""
    options = {"device": "cuda:0", "arena_bytes": 4096, "copy_bytes": 4096, "threads": 1, "collective_s": 1.0}
    worker = ModelProcess(fork_server, "worker", options, environment={"CUDA_VISIBLE_DEVICES": "GPU-none"}, start_s=120)
    with pytest.raises(ActionFailed, match=r"the worker process did not start: cuda:0: .*(CUDA|NVIDIA)"):
        await worker.start()
    assert not worker.alive
    await worker.close()


@pytest.mark.model
async def test_two_nodes_of_four_devices_run_the_same_service_apart(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    nodes = [ModelRuntime(replace(settings, devices=4, node=name), fork_server=fork_server) for name in ("a", "b")]
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
