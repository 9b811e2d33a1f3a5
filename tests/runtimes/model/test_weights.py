"""Weights: slots, copies to (a fake) device, and what the sharding table does not say plainly is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from runtimes.model.arena import (
    DoesNotFit,
    SlotKey,
    Slots,
)
from runtimes.model.checkpoint import CopyRange, Cut, Head
from runtimes.model.weights import (
    GENTLE_PARTS,
    Cuda,
    DeviceBackend,
    Dropped,
    Host,
    ShardingPlan,
    Transfer,
    build_skeleton,
    plan_of,
)
from tests.runtimes.model.checkpoints import FAMILIES, SHAPE
from tests.runtimes.model.fake_cuda import FakeCuda

pytestmark = pytest.mark.model


PAGE = 4096


def key(name: str) -> SlotKey:
    return (name, 1, 0)


def test_the_least_recently_used_slot_goes_first() -> None:
    slots = Slots(3 * PAGE)
    for name in "abc":
        slots.allocate(key(name), PAGE)
    slots.pin(key("a"))
    slots.unpin(key("a"))
    assert slots.allocate(key("d"), PAGE)[1] == [key("b")]


def test_what_may_not_evict_takes_a_hole_or_does_not_fit() -> None:
    slots = Slots(3 * PAGE)
    slots.allocate(key("a"), PAGE)
    assert slots.allocate(key("b"), PAGE, evict_idle=False) == (PAGE, [])
    with pytest.raises(DoesNotFit):
        slots.allocate(key("c"), 2 * PAGE, evict_idle=False)
    assert slots.keys() == [key("a"), key("b")]


def test_what_computes_is_never_evicted() -> None:
    slots = Slots(2 * PAGE)
    slots.allocate(key("a"), PAGE)
    slots.pin(key("a"))
    slots.allocate(key("b"), PAGE)
    with pytest.raises(DoesNotFit):
        slots.allocate(key("c"), 2 * PAGE)
    assert key("a") in slots


def test_a_model_larger_than_the_arena_does_not_fit() -> None:
    with pytest.raises(DoesNotFit):
        Slots(PAGE).allocate(key("a"), 2 * PAGE)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()), max_size=60))
def test_slots_never_overlap_and_stay_in_bounds(moves: list[tuple[int, int, bool]]) -> None:
    slots = Slots(8 * PAGE)
    held: dict[SlotKey, tuple[int, int]] = {}
    for number, pages, release in moves:
        name = key(str(number))
        if release or name in slots:
            slots.evict(name)
            held.pop(name, None)
            continue
        offset, evicted = slots.allocate(name, pages * PAGE)
        for other in evicted:
            del held[other]
        held[name] = (offset, offset + pages * PAGE)
        ranges = sorted(held.values())
        assert ranges[-1][1] <= 8 * PAGE
        assert all(left[1] <= right[0] for left, right in pairwise(ranges))
        assert sorted(slots.keys()) == sorted(held)


PART = 1024
SIZE = 64 * PART


@pytest.fixture(params=["host", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    made: DeviceBackend = Host(PART, threads=3) if request.param == "host" else Cuda("cpu", PART, FakeCuda())
    yield made
    made.close()


def image() -> torch.Tensor:
    return torch.arange(1, SIZE + 1, dtype=torch.int64).to(torch.uint8)


def copied(backend: DeviceBackend, source: torch.Tensor, *, gentle: bool = False) -> tuple[torch.Tensor, Transfer]:
    """Two ranges of the image, one behind the other."""
    target = backend.allocate(SIZE).fill_(0)
    half = SIZE // 2
    copies = [CopyRange(source=half, target=0, size_bytes=half), CopyRange(source=0, target=half, size_bytes=half)]
    return target, backend.copy(source, target, copies, gentle=gentle)


@pytest.mark.parametrize("gentle", [False, True])
def test_what_was_waited_for_has_arrived(backend: DeviceBackend, gentle: bool) -> None:
    source = image()
    target, transfer = copied(backend, source, gentle=gentle)
    for end in (1, PART, 5 * PART + 7, SIZE // 2 + 1):
        transfer.wait(end)
        assert torch.equal(target[:end], source.roll(-SIZE // 2)[:end])
    transfer.finish()
    assert torch.equal(target, source.roll(-SIZE // 2))


def test_a_dropped_copy_never_disturbs_the_next_one_in_its_place(backend: DeviceBackend) -> None:
    target = backend.allocate(SIZE)
    for _ in range(50):
        first, second = torch.full((SIZE,), 1, dtype=torch.uint8), torch.full((SIZE,), 2, dtype=torch.uint8)
        whole = [CopyRange(source=0, target=0, size_bytes=SIZE)]
        backend.copy(first, target, whole, gentle=True).drop()
        transfer = backend.copy(second, target, whole, gentle=False)
        transfer.wait(SIZE)
        transfer.finish()
        assert torch.equal(target, second)


def test_whoever_waits_for_a_dropped_copy_is_told() -> None:
    host = Host(PART, threads=1)
    hold = threading.Event()
    host._copiers.submit(hold.wait)  # nobody carries anything
    _, transfer = copied(host, image())
    transfer.drop()
    for wait in (transfer.finish, lambda: transfer.wait(SIZE)):
        with pytest.raises(Dropped):
            wait()
    hold.set()
    host.close()


def test_whoever_waits_on_the_host_lends_a_hand() -> None:
    host = Host(PART, threads=1)
    hold = threading.Event()
    host._copiers.submit(hold.wait)  # the copier has other things to do
    source = image()
    target, transfer = copied(host, source)
    transfer.wait(SIZE)
    assert torch.equal(target, source.roll(-SIZE // 2))
    hold.set()
    host.close()


# -- CUDA


def test_a_wait_on_cuda_orders_the_computation_and_brings_no_more_than_it_needs() -> None:
    cuda = FakeCuda()
    backend = Cuda("cpu", PART, cuda)
    target, transfer = copied(backend, image())
    assert not target.any(), "the fake copies when it is waited for"
    transfer.wait(3 * PART)
    assert torch.equal(target[: 3 * PART], image().roll(-SIZE // 2)[: 3 * PART])
    assert not target[3 * PART :].any()
    backend.close()


def test_a_gentle_copy_keeps_few_parts_on_the_stream() -> None:
    cuda = FakeCuda()
    backend = Cuda("cpu", PART, cuda)
    copied(backend, image(), gentle=True)[1].finish()
    # Each part is a copy and its event.
    assert cuda.streams[0].ahead_max <= 2 * GENTLE_PARTS
    assert cuda.entered["feeder_0"] == "cpu", "the thread that feeds says which device is its"
    backend.close()


def test_a_copy_that_fails_is_told_to_whoever_waits() -> None:
    backend = Cuda("cpu", PART, FakeCuda())
    target = backend.allocate(SIZE)
    transfer = backend.copy(
        torch.zeros(PART, dtype=torch.uint8), target, [CopyRange(source=0, target=0, size_bytes=SIZE)], gentle=False
    )
    with pytest.raises(RuntimeError, match="size of tensor"):
        transfer.finish()
    backend.close()


def test_pinning_names_the_bytes_and_a_refusal_is_an_error() -> None:
    cuda = FakeCuda()
    backend = Cuda("cpu", PART, cuda)
    data = torch.zeros(PART, dtype=torch.float32)
    backend.pin(data)
    assert cuda.runtime.registered == {data.data_ptr(): 4 * PART}
    backend.unpin(data)
    assert not cuda.runtime.registered
    cuda.runtime.code = 1
    with pytest.raises(RuntimeError, match="CUDA refused to pin an image: story of 1"):
        backend.pin(data)
    assert not cuda.runtime.pending, "the next computation would fail by it"
    backend.close()


def test_a_cuda_error_condemns_the_process_and_a_host_error_does_not() -> None:
    cuda, host = Cuda("cpu", PART, FakeCuda()), Host(PART, threads=1)
    assert not cuda.survives(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert cuda.survives(ValueError("ours"))
    assert host.survives(RuntimeError("shapes differ"))
    cuda.close()
    host.close()


def plan(family: str, shape: Mapping[str, object], head: Head = Head.SCORE) -> ShardingPlan:
    config: dict[str, Any] = {**SHAPE, "model_type": family, **shape}
    return plan_of(build_skeleton(config, head, "float32", Path("checkpoint")))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_supported_family_is_cut_in_every_way(family: str) -> None:
    found = plan(family, {}, Head.LM)
    assert not found.refusals
    layer = "model.layers.0"
    assert found.placement(f"{layer}.self_attn.k_proj.weight").cut is Cut.HEADS
    assert found.placement(f"{layer}.mlp.up_proj.weight").cut is Cut.ROWS
    assert found.placement(f"{layer}.mlp.down_proj.weight").transposed
    assert found.placement(f"{layer}.input_layernorm.weight").cut is Cut.WHOLE
    assert found.placement("lm_head.weight").cut is Cut.ROWS


@pytest.mark.parametrize(
    ("family", "shape", "story"),
    [
        ("mixtral", {"num_local_experts": 4}, "sharding style"),
        ("phi3", {"pad_token_id": 0}, "Phi3ForSequenceClassification"),
        ("gemma2", {}, "not among the verified families"),
        ("bert", {}, "no tensor-parallel plan"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(family: str, shape: dict[str, object], story: str) -> None:
    found = plan(family, shape)
    assert set(found.refusals) == {2, 4, 8}
    assert story in found.refusals[2]
    assert not found.shardable


@pytest.mark.parametrize(
    ("shape", "dops", "story"),
    [
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4},
            {8},
            "12 attention heads do not divide by 8",
        ),
        ({"hidden_size": 96, "num_attention_heads": 24, "num_key_value_heads": 3}, {2, 4, 8}, "3 key-value heads"),
        ({"vocab_size": 260}, {8}, "vocabulary of 260 tokens does not divide by 8"),
        ({"intermediate_size": 68}, {8}, "gate_proj has 68 outputs"),
    ],
)
def test_what_does_not_divide_is_named(shape: dict[str, object], dops: set[int], story: str) -> None:
    refusals = plan("llama", shape).refusals
    assert set(refusals) == dops
    assert story in refusals[max(dops)]


DEEP_SHAPE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 24,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
def test_models_that_are_made_at_once_keep_their_dtypes() -> None:
    """transformers sets the default dtype of all threads meanwhile."""

    def made(dtype: str) -> tuple[str, set[str]]:
        model = build_skeleton(DEEP_SHAPE, Head.LM, dtype, Path("checkpoint"))
        return dtype, {str(value.dtype).removeprefix("torch.") for value in model.parameters()}

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(made, ["float32", "bfloat16", "float16"] * 12))
    assert [dtypes for _, dtypes in found] == [{dtype} for dtype, _ in found]
    assert torch.get_default_dtype() == torch.float32
