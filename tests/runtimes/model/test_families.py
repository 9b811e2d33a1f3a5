"""Every supported family computes what plain transformers computes, from weights and buffers that are bit-equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

import torch

from bench.model.one_device import OneDevice
from manager.errors import InvalidConfig, Unsupported
from manager.function import ModelAction
from runtimes.model.checkpoint import Head, open_checkpoint
from runtimes.model.processes import Generated, RunBatch, WorkItem
from runtimes.model.request import Sampling
from runtimes.model.weights import (
    Cuda,
    DoesNotFit,
    Dropped,
    Host,
    build_layout,
)
from tests.runtimes.model.checkpoints import FAMILIES, IDS, plain, plain_logprobs, plain_score, write
from tests.runtimes.model.conftest import Write
from tests.runtimes.model.fake_cuda import FakeCuda


@pytest.fixture
def device() -> Iterator[OneDevice]:
    made = OneDevice(Host(4096, threads=1))
    yield made
    made.close()


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(patience_s=60)


@pytest.fixture
def lazy(cuda: FakeCuda) -> Iterator[OneDevice]:
    """A device on which no weight is there before it was waited for."""
    made = OneDevice(Cuda("cpu", 4096, cuda))
    yield made
    for stream in cuda.streams:
        stream.finish()  # a copy that was given up is waited for by no computation, but by its own thread
    made.close()


def items(action: ModelAction) -> list[WorkItem]:
    return [WorkItem(ids=tuple(ids), action=action) for ids in IDS]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(family: str, checkpoint: Write, device: OneDevice) -> None:
    path = checkpoint(family, "lm")
    rows = device.run(device.place(path, "lm"), items(ModelAction.LOGPROBS))
    for ids, row in zip(IDS, rows, strict=True):
        assert row == pytest.approx(plain_logprobs(path, ids), abs=1e-5)


@pytest.mark.promise("A restored model computes what transformers does, at every degree of parallelism.")
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family: str, checkpoint: Write, device: OneDevice) -> None:
    path = checkpoint(family, "score")
    scores = device.run(device.place(path, "score"), items(ModelAction.SCORE))
    assert scores == pytest.approx([plain_score(path, ids) for ids in IDS], abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_that_of_transformers(family: str, checkpoint: Write, device: OneDevice) -> None:
    path = checkpoint(family, "lm")
    sampling = Sampling(max_new_tokens=6, stop_ids=(2,))
    asked = [WorkItem(ids=tuple(ids), action=ModelAction.GENERATE, sampling=sampling) for ids in IDS]
    for ids, made in zip(IDS, device.run(device.place(path, "lm"), asked, budget_tokens=100), strict=True):
        whole = plain(path, "lm").generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6, do_sample=False
        )
        expected = [token for token in whole[0, len(ids) :].tolist() if token not in (0, 2)]
        assert isinstance(made, Generated)
        assert list(made.ids) == expected
        assert made.reason == ("length" if len(expected) == 6 else "stop")


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
    ],
)
def test_variants_of_a_family_are_exact_too(
    family: str, shape: dict[str, object], tmp_path: Path, device: OneDevice
) -> None:
    path = write(tmp_path, family, "lm", 0, **shape)
    rows = device.run(device.place(path, "lm"), items(ModelAction.LOGPROBS))
    for ids, row in zip(IDS, rows, strict=True):
        assert row == pytest.approx(plain_logprobs(path, ids), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "shape"), [*((family, {}) for family in FAMILIES), ("mistral", {"sliding_window": 4})]
)
@pytest.mark.parametrize(
    "budget_tokens", [40, *(pytest.param(other, marks=pytest.mark.slow) for other in (1, 75, 10_000))]
)
def test_sequences_that_take_the_places_of_others_are_continued_as_alone(
    family: str, shape: dict[str, object], budget_tokens: int, tmp_path: Path, device: OneDevice
) -> None:
    place = device.place(write(tmp_path, family, "lm", 0, **shape), "lm")
    asked = [
        WorkItem(
            ids=tuple(ids),
            action=ModelAction.GENERATE,
            sampling=Sampling(max_new_tokens=tokens, temperature=heat, top_p=0.95, seed=tokens, stop_ids=(2, 9)),
        )
        for tokens, heat, ids in zip((1, 14, 3, 9, 6, 1, 11, 2), (0.0, 1.0) * 4, IDS * 2, strict=True)
    ]
    alone = [device.run(place, [item], 1000)[0] for item in asked]
    order: list[int] = []
    together = device.run(place, asked, budget_tokens, ended=lambda position, result, used: order.append(position))
    assert together == alone
    assert sorted(order) == list(range(len(asked)))


def test_a_place_that_falls_free_is_taken_at_once(checkpoint: Write, device: OneDevice) -> None:
    place = device.place(checkpoint("llama", "lm"), "lm")
    asked = [
        WorkItem(ids=(7, 8, 9), action=ModelAction.GENERATE, sampling=Sampling(max_new_tokens=tokens))
        for tokens in (20, 2, 2, 2, 2)
    ]
    order: list[int] = []
    device.run(place, asked, 2 * 23, ended=lambda position, result, used: order.append(position))
    assert order == [1, 2, 3, 4, 0], "two fit at a time, and the long one keeps nobody waiting"


def test_a_seed_decides_what_is_drawn_whoever_shares_the_batch(checkpoint: Write, device: OneDevice) -> None:
    place = device.place(checkpoint("qwen3", "lm"), "lm")
    draw = Sampling(max_new_tokens=5, temperature=1.0, top_p=0.9, seed=11)
    item = WorkItem(ids=(7, 8, 9), action=ModelAction.GENERATE, sampling=draw)
    other = WorkItem(
        ids=(3,), action=ModelAction.GENERATE, sampling=Sampling(max_new_tokens=5, temperature=1.0, seed=5)
    )
    assert device.run(place, [item], 1000)[0] == device.run(place, [other, item], 1000)[1]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_buffers_and_ties_are_bit_equal(tied: bool, tmp_path: Path, device: OneDevice) -> None:
    path = write(tmp_path, "qwen3", "lm", tie_word_embeddings=tied)
    place = device.place(path, "lm")
    device.run(place, items(ModelAction.LOGPROBS))
    model = device.engine.skeleton(place).model
    expected = plain(path, "lm")
    for (name, mine), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    for (name, mine), (_, theirs) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_cut_restore_still_computes_right(checkpoint: Write, device: OneDevice) -> None:
    """Many small copies, and a computation that starts before they have arrived."""
    path = checkpoint("llama", "lm")
    place = device.place(path, "lm")
    for _ in range(5):
        device.engine.evict()
        rows = device.run(place, items(ModelAction.LOGPROBS))
        assert rows[0] == pytest.approx(plain_logprobs(path, IDS[0]), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("action", [ModelAction.LOGPROBS, ModelAction.SCORE, ModelAction.GENERATE])
def test_every_module_waits_for_its_own_weights(
    family: str, action: ModelAction, checkpoint: Write, device: OneDevice, lazy: OneDevice
) -> None:
    head = "score" if action is ModelAction.SCORE else "lm"
    path = checkpoint(family, head)
    sampling = Sampling(max_new_tokens=3) if action is ModelAction.GENERATE else None
    asked = [WorkItem(ids=tuple(ids), action=action, sampling=sampling) for ids in IDS]
    assert lazy.run(lazy.place(path, head), asked) == device.run(device.place(path, head), asked)


def test_tied_weights_are_waited_for_too(tmp_path: Path, device: OneDevice, lazy: OneDevice) -> None:
    path = write(tmp_path, "qwen3", "lm", tie_word_embeddings=True)
    asked = items(ModelAction.LOGPROBS)
    assert lazy.run(lazy.place(path, "lm"), asked) == device.run(device.place(path, "lm"), asked)


def test_an_image_is_pinned_while_it_is_attached(checkpoint: Write, lazy: OneDevice, cuda: FakeCuda) -> None:
    place = lazy.place(checkpoint("llama", "lm"), "lm")
    assert len(cuda.runtime.registered) == 1
    lazy.engine.detach(place.image_id)
    assert not cuda.runtime.registered


def test_a_run_that_waits_for_its_image_gives_signs_of_life(checkpoint: Write, device: OneDevice) -> None:
    place = device.place(checkpoint("llama", "lm"), "lm")
    image = device.engine._images.pop(place.image_id)
    lives: list[int] = []

    def live() -> None:
        lives.append(1)
        device.engine._images[place.image_id] = image

    asked = RunBatch(place=place, items=tuple(items(ModelAction.LOGPROBS)), budget_tokens=1000)
    device.engine.run(asked, restored=lambda: None, progress=live)
    assert lives


def test_an_image_that_cannot_be_pinned_is_the_error_of_whoever_needs_it(
    checkpoint: Write, lazy: OneDevice, cuda: FakeCuda
) -> None:
    cuda.runtime.code = 2
    place = lazy.place(checkpoint("llama", "lm"), "lm")
    with pytest.raises(RuntimeError, match="refused to pin"):
        lazy.run(place, items(ModelAction.LOGPROBS))


def test_an_evicted_service_leaves_no_buffer_and_comes_back_exact(checkpoint: Write, device: OneDevice) -> None:
    places = [device.place(checkpoint(family, "lm"), "lm") for family in ("llama", "qwen3", "mistral")]
    first = [device.run(place, items(ModelAction.LOGPROBS)) for place in places]
    for _ in range(2):
        for place, expected in zip(reversed(places), reversed(first), strict=True):
            device.engine.evict()
            assert device.run(place, items(ModelAction.LOGPROBS)) == expected


def test_a_service_that_is_evicted_while_it_arrives_is_given_up(checkpoint: Write, lazy: OneDevice) -> None:
    loaded = lazy.engine.restore(lazy.place(checkpoint("llama", "lm"), "lm"), gentle=True)[0]
    lazy.engine.evict()
    with pytest.raises(Dropped):
        loaded.transfer.finish()


def test_other_weights_are_not_restored_over_those_that_compute(checkpoint: Write, device: OneDevice) -> None:
    place = device.place(checkpoint("llama", "lm"), "lm")
    replaced = replace(place, image_id=device.place(checkpoint("llama", "lm", 1), "lm").image_id)
    met: list[BaseException] = []

    def restore_other() -> None:
        try:
            device.engine.restore(replaced)
        except DoesNotFit as error:
            met.append(error)

    asked = RunBatch(place=place, items=tuple(items(ModelAction.LOGPROBS)), budget_tokens=20)
    device.engine.run(asked, restored=restore_other, progress=lambda: None)
    assert met


def test_the_image_is_hardly_larger_than_the_model(checkpoint: Write) -> None:
    opened = open_checkpoint(checkpoint("mistral", "lm"))
    assert build_layout(opened, Head.LM).size_bytes <= opened.size_bytes * 1.05 + 4096


def test_a_model_without_the_head_is_refused_by_the_missing_weight(checkpoint: Write) -> None:
    opened = open_checkpoint(checkpoint("llama", "lm"))
    with pytest.raises(InvalidConfig, match="declares LlamaForCausalLM, which has no score head"):
        build_layout(opened, Head.SCORE)
    undeclared = replace(opened, config={**opened.config, "architectures": None})
    with pytest.raises(InvalidConfig, match=r"score\.weight that LlamaForSequenceClassification needs is missing"):
        build_layout(undeclared, Head.SCORE)


@pytest.mark.parametrize(
    ("changes", "story"),
    [
        ({"num_hidden_layers": 1, "layer_types": None}, r"no use for model\.layers\.1\.\S+ and \d+ more"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"pad_token_id": 10**9}, "Padding_idx"),
        ({"hidden_size": -4}, "negative dimension"),
    ],
)
def test_a_config_that_fits_no_model_is_refused(
    changes: dict[str, object], story: str, checkpoint: Write, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoint("qwen3", "lm"), tmp_path / "changed"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InvalidConfig, match=story):
        build_layout(open_checkpoint(path), Head.LM)


def test_whole_numbers_are_no_weights(checkpoint: Write) -> None:
    opened = open_checkpoint(checkpoint("llama", "lm"))
    name = "model.layers.0.mlp.up_proj.weight"
    quantised = {**opened.tensors, name: replace(opened.tensors[name], dtype="I32")}
    with pytest.raises(Unsupported, match=rf"{name} is I32.*quantised"):
        build_layout(replace(opened, tensors=quantised), Head.LM)
