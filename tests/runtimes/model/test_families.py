"""Every supported architecture computes what plain transformers computes, or is refused with the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as functional
import transformers
from safetensors.torch import load_file, save_file

from bench.model.architectures import QUICK, RIGHT, classes, compare, table
from bench.model.one_device import OneDevice
from manager.errors import ActionFailed, InvalidConfig, InvalidInput, Unsupported
from manager.function import ModelAction
from runtimes.model.arena import DoesNotFit
from runtimes.model.checkpoint import Head, checkpoint_problem, open_checkpoint, read_pooling
from runtimes.model.compute import Generation
from runtimes.model.processes import Generated, RunBatch, WorkItem
from runtimes.model.request import Sampling, parse_input
from runtimes.model.runtime import ModelRuntime
from runtimes.model.torch_backend import _with_prompt
from runtimes.model.weights import FAMILIES as SUPPORTED
from runtimes.model.weights import (
    PADDED,
    Cuda,
    Dropped,
    Host,
    build_layout,
)
from tests.runtimes.model.checkpoints import FAMILIES, IDS, SHAPE, plain, plain_logprobs, write
from tests.runtimes.model.conftest import Write, execution, function
from tests.runtimes.model.fake_cuda import FakeCuda

pytestmark = pytest.mark.model


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


def saved(directory: Path, name: str, kind: str, **shape: object) -> Path:
    """A random checkpoint of a class."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **shape})
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory / name)
    return directory / name


def copy(path: Path, target: Path) -> Path:
    return Path(shutil.copytree(path, target / "copy"))


def change(path: Path, tensors: Mapping[str, torch.Tensor | None], **config: object) -> Path:
    """Change tensors (None removes one) and the configuration of a checkpoint."""
    held: dict[str, Any] = {**load_file(path / "model.safetensors"), **tensors}
    save_file({name: value for name, value in held.items() if value is not None}, path / "model.safetensors")
    declared = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(declared | config))
    return path


def run(computer: OneDevice, path: Path, action: ModelAction, ids: list[list[int]], budget: int = 1000) -> list[Any]:
    head = {ModelAction.SCORE: "score", ModelAction.EMBED: "base"}.get(action, "lm")
    return computer.run(computer.place(path, head), [WorkItem(ids=tuple(row), action=action) for row in ids], budget)


# -- the head that it has


@pytest.mark.parametrize(
    ("declared", "action", "way"),
    [
        ("Qwen2ForTokenClassification", ModelAction.SCORE, "use action step_scores"),
        ("Qwen2ForCausalLM", ModelAction.SCORE, "use action logprobs or generate"),
        ("Qwen2ForSequenceClassification", ModelAction.GENERATE, "use action score"),
        ("BertForMaskedLM", ModelAction.LOGPROBS, "use action embed"),
        ("Qwen2Model", ModelAction.LOGPROBS, "use action embed"),
    ],
)
def test_another_head_is_refused_before_torch_is_needed(
    declared: str, action: ModelAction, way: str, checkpoint: Write, tmp_path: Path
) -> None:
    path = change(copy(checkpoint("qwen2", "lm"), tmp_path), {}, architectures=[declared])
    problem = checkpoint_problem(path, action)
    assert problem is not None and f"declares {declared}, which has no head for" in problem and way in problem


def test_a_score_for_each_token_is_no_score_of_the_text(tmp_path: Path) -> None:
    path = saved(tmp_path, "Qwen2ForTokenClassification", "qwen2", num_labels=1)
    change(path, {}, architectures=None)  # nothing is declared: the bias of its head would be dropped
    with pytest.raises(InvalidConfig, match=r"has no use for score\.bias.*ignore_weights"):
        build_layout(open_checkpoint(path, Head.SCORE), Head.SCORE)


def test_code_of_the_checkpoint_is_refused_with_the_way_forward(checkpoint: Write, tmp_path: Path) -> None:
    path = change(copy(checkpoint("qwen2", "lm"), tmp_path), {}, architectures=["Qwen2ForProcessRewardModel"])
    with pytest.raises(Unsupported, match=r"has no Qwen2ForProcessRewardModel.*never run; use an engine"):
        build_layout(open_checkpoint(path, Head.SCORE), Head.SCORE)


@pytest.mark.parametrize("labels", [1, 2])
async def test_each_step_has_the_score_of_its_token(labels: int, tmp_path: Path, runtime: ModelRuntime) -> None:
    path = saved(tmp_path, "Qwen2ForTokenClassification", "qwen2", num_labels=labels)
    model = transformers.AutoModelForTokenClassification.from_pretrained(path).eval()
    with torch.no_grad():
        tables = [model(torch.tensor([row])).logits[0] for row in IDS]
    asked = function(path, ModelAction.STEP_SCORES)

    async def told(**given: object) -> Any:
        return (await runtime.execute(execution(asked, {"token_ids": IDS, **given}))).value

    def expected(places: list[list[int]]) -> list[Any]:
        rows = [table[where] for table, where in zip(tables, places, strict=True)]
        return [row[:, 0].tolist() if labels == 1 else row.tolist() for row in rows]

    places = [[0, 3], [8], [], [5, 1]]
    cases: list[tuple[dict[str, Any], list[list[int]]]] = [
        ({"positions": places}, places),
        ({"step_token_id": 5}, [[], [0, 1], [], []]),
        ({}, [list(range(len(row))) for row in IDS]),
    ]
    for given, where in cases:
        found = await told(**given)
        assert found["positions"] == where
        for ours, theirs in zip(found["step_scores"], expected(where), strict=True):
            assert torch.tensor(ours).numel() == torch.tensor(theirs).numel()
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-5)
    refused: list[dict[str, Any]] = [
        {"positions": [[4], [0], [0], [0]]},
        {"positions": [[0]]},
        {"step_token_id": 5, "positions": places},
    ]
    for wrong in refused:
        with pytest.raises(ActionFailed, match="positions"):
            await told(**wrong)


# -- the weights that it has


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_tensor_is_dropped_unless_it_is_named(family: str, tmp_path: Path, device: OneDevice) -> None:
    path = write(tmp_path, family, "lm")
    change(path, {"model.layers.1.self_attn.q_proj.lora_A.weight": torch.ones(2, 2)})
    with pytest.raises(InvalidConfig, match=r"has no use for model\.layers\.1\.self_attn\.q_proj\.lora_A\.weight"):
        device.place(path, "lm")
    device.place(path, "lm", ignore=["*.lora_?.weight"])


def test_tensors_that_are_known_not_to_matter_may_be_left(checkpoint: Write, tmp_path: Path, device: OneDevice) -> None:
    path = copy(checkpoint("llama", "lm"), tmp_path)
    change(path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    device.place(path, "lm")


def test_the_head_of_an_embedding_model_is_not_its_business(
    checkpoint: Write, tmp_path: Path, device: OneDevice
) -> None:
    device.place(checkpoint("llama", "lm"), "base")
    with pytest.raises(InvalidConfig, match="no use for"):
        path = copy(checkpoint("llama", "score"), tmp_path)
        change(path, {"value_head.weight": torch.ones(2, 2)})
        device.place(path, "base")


def test_the_file_that_is_meant_is_read(checkpoint: Write, tmp_path: Path, device: OneDevice) -> None:
    path = copy(checkpoint("qwen3", "lm"), tmp_path)
    expected = run(device, path, ModelAction.LOGPROBS, IDS)
    shutil.copy(checkpoint("qwen3", "lm", 1) / "model.safetensors", path / "model_old.safetensors")
    assert run(device, path, ModelAction.LOGPROBS, IDS) == expected
    (path / "model.safetensors").rename(path / "model_new.safetensors")
    assert "without an index; name the one" in str(checkpoint_problem(path, ModelAction.LOGPROBS))
    (path / "model_old.safetensors").unlink()
    assert run(device, path, ModelAction.LOGPROBS, IDS) == expected
    index = {"weight_map": dict.fromkeys(load_file(path / "model_new.safetensors"), "model_new.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(device, path, ModelAction.LOGPROBS, IDS) == expected
    shutil.copy(path / "model_new.safetensors", path / "model.safetensors")
    assert "does not name model.safetensors beside it" in str(checkpoint_problem(path, ModelAction.LOGPROBS))


def test_an_adapter_beside_a_model_is_refused_with_the_way_to_merge_it(checkpoint: Write, tmp_path: Path) -> None:
    path = copy(checkpoint("llama", "lm"), tmp_path)
    (path / "adapter_config.json").write_text("{}")
    assert "merge_and_unload" in str(checkpoint_problem(path, ModelAction.LOGPROBS))


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_tied_head_that_is_stored_with_other_numbers_is_told(family: str, tmp_path: Path, device: OneDevice) -> None:
    path = write(tmp_path, family, "lm", tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    change(path, {"lm_head.weight": embedding.clone()})
    device.place(path, "lm")
    change(path, {"lm_head.weight": embedding + 1})
    with pytest.raises(InvalidConfig, match="other numbers for it"):
        device.place(path, "lm")


# -- where a score is read


@pytest.mark.parametrize("pad", [2, 0, None])
@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gpt2"])
def test_a_score_is_read_where_transformers_reads_it(
    family: str, pad: int | None, tmp_path: Path, device: OneDevice
) -> None:
    path = write(tmp_path, family, "score", pad_token_id=pad, eos_token_id=2)
    rows = [[7, 3, 99, 2], [5, 5, 201, 34, 2, 2], [9, 2, 4], [8, 8, 8, 0], [2, 2]]
    model = plain(path, "score")
    with torch.no_grad():
        expected = [float(model(torch.tensor([row])).logits[0, 0]) for row in rows]
    assert run(device, path, ModelAction.SCORE, rows) == pytest.approx(expected, abs=1e-5)


def test_what_reads_both_ways_does_not_see_the_padding(tmp_path: Path, device: OneDevice) -> None:
    path = write(tmp_path, "qwen3", "score", is_causal=False)
    alone = [run(device, path, ModelAction.SCORE, [row])[0] for row in IDS]
    assert run(device, path, ModelAction.SCORE, IDS) == pytest.approx(alone, abs=1e-5)
    with torch.no_grad():
        expected = [float(plain(path, "score")(torch.tensor([row])).logits[0, 0]) for row in IDS]
    assert alone == pytest.approx(expected, abs=1e-5)
    path = write(tmp_path, "qwen3", "lm", is_causal=False)
    with pytest.raises(Unsupported, match="by what follows it"):
        device.place(path, "lm")


def test_positions_that_begin_behind_the_padding_are_not_counted(tmp_path: Path) -> None:
    path = saved(tmp_path, "RobertaModel", "roberta", pad_token_id=1, max_position_embeddings=34)
    assert build_layout(open_checkpoint(path), Head.BASE).positions_max == 32


# -- how an embedding is pooled


def pooled(path: Path, pooling: Mapping[str, object], *more: str, **declared: object) -> Path:
    kinds = ["Transformer", "Pooling", *more]
    places = {"Transformer": "", "Pooling": "1_Pooling"}
    rows = [
        {
            "idx": i,
            "name": str(i),
            "path": places.get(kind, f"{i}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(rows))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "config_sentence_transformers.json").write_text(json.dumps(declared))
    return path


@pytest.mark.parametrize(
    ("pooling", "way"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, lambda h: h[0]),
        ({"pooling_mode_lasttoken": True}, lambda h: h[-1]),
        ({"pooling_mode_mean_tokens": True}, lambda h: h.mean(0)),
        ({"pooling_mode_max_tokens": True}, lambda h: h.amax(0)),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, lambda h: h.sum(0) / len(h) ** 0.5),
        (
            {"pooling_mode": ["weightedmean"]},
            lambda h: (h * torch.arange(1, len(h) + 1)[:, None]).sum(0) / sum(range(1, len(h) + 1)),
        ),
    ],
)
@pytest.mark.parametrize("name", ["BertModel", "Qwen3ForCausalLM"])
def test_a_vector_is_pooled_as_declared(
    name: str, pooling: dict[str, object], way: Any, tmp_path: Path, device: OneDevice
) -> None:
    path = saved(tmp_path, name, "bert" if name == "BertModel" else "qwen3")
    model = transformers.AutoModel.from_pretrained(path).eval()
    with torch.no_grad():
        expected = [way(model(torch.tensor([row])).last_hidden_state[0]) for row in IDS]
    found = run(device, pooled(path, pooling), ModelAction.EMBED, IDS)
    for vector, other in zip(found, expected, strict=True):
        assert vector == pytest.approx(other.tolist(), abs=1e-5)
    units = OneDevice(Host(4096, threads=1))
    for vector, other in zip(
        run(units, pooled(path, pooling, "Normalize"), ModelAction.EMBED, IDS), expected, strict=True
    ):
        assert vector == pytest.approx(functional.normalize(other, dim=-1).tolist(), abs=1e-5)
    units.close()


@pytest.mark.parametrize(
    ("pooling", "more", "declared", "story"),
    [
        ({"pooling_mode": "mean"}, ["Dense"], {}, "this is Transformer, Pooling, Dense"),
        ({"pooling_mode": ["mean", "cls"]}, [], {}, "does not compute the pooling 'mean,cls'"),
        ({"pooling_mode": "mean", "include_prompt": False}, [], {"prompts": {"q": "a"}}, "include_prompt"),
    ],
)
def test_what_is_declared_and_not_computed_is_refused(
    pooling: dict[str, object],
    more: list[str],
    declared: dict[str, object],
    story: str,
    checkpoint: Write,
    tmp_path: Path,
) -> None:
    path = pooled(copy(checkpoint("llama", "lm"), tmp_path), pooling, *more, **declared)
    problem = checkpoint_problem(path, ModelAction.EMBED)
    assert problem is not None and story in problem and "an engine (model.engine)" in problem
    assert checkpoint_problem(path, ModelAction.LOGPROBS) is None


def test_prompts_are_put_before_texts(checkpoint: Write, tmp_path: Path) -> None:
    path = copy(checkpoint("llama", "lm"), tmp_path)
    pooled(path, {"pooling_mode": "mean"}, prompts={"query": "Q: ", "document": ""}, default_prompt_name="query")
    asked, pooling = function(path, ModelAction.EMBED), read_pooling(path)

    def texts(**named: str) -> tuple[str, ...]:
        return _with_prompt(parse_input(asked, {"texts": ["a"], **named}, 4), pooling)

    assert (texts(), texts(prompt_name="document"), texts(prompt_name="")) == (("Q: a",), ("a",), ("a",))
    with pytest.raises(InvalidInput, match="no prompt 'x'; known: query, document"):
        texts(prompt_name="x")
    with pytest.raises(InvalidInput, match="goes with texts"):
        parse_input(asked, {"token_ids": [[1]], "prompt_name": "query"}, 4)


ROOT = Path(__file__).parents[3]
#: The version that the table of docs/MODELS.md is of.
DOCUMENTED = "5.23.0"
CASES = [(head, kind) for head in Head for kind in classes(head)]


@pytest.mark.parametrize(
    ("head", "kind"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_an_architecture_is_equal_or_refused(head: Head, kind: str, tmp_path: Path) -> None:
    found = compare(tmp_path, kind, head)
    if found.refusal:
        assert kind not in SUPPORTED
        return
    assert found.difference <= RIGHT
    assert found.batch_difference <= RIGHT


def test_what_may_be_padded_is_compared() -> None:
    assert {kind for _, kind in CASES} >= PADDED


def test_the_documented_table_is_that_of_this_version() -> None:
    if transformers.__version__ != DOCUMENTED:
        pytest.skip(f"the table is that of transformers {DOCUMENTED}")
    assert table() in (ROOT / "docs" / "MODELS.md").read_text()


def test_tokens_are_drawn_by_temperature_within_the_smallest_set_of_top_p() -> None:
    logits = torch.tensor([0.1, 2.0, 1.0, 1.5, -3.0, 0.5])
    heat, top_p, rows = 0.7, 0.8, 6000
    drawn = [Sampling(max_new_tokens=1, temperature=heat, top_p=top_p, seed=seed) for seed in range(rows)]
    best = Sampling(max_new_tokens=1)
    items = [
        (position, WorkItem(ids=(1,), action=ModelAction.GENERATE, sampling=sampling))
        for position, sampling in enumerate([*drawn, best])
    ]

    def next_logits(tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: object) -> torch.Tensor:
        return logits.expand(len(tokens), -1)

    found: dict[int, int] = {}
    together = Generation(items, budget_tokens=10 * rows, device="cpu", filler=0)
    together.run(next_logits, lambda position, result: found.update({position: result.ids[0]}), lambda: None)
    shares = (logits / heat).softmax(-1)
    likeliest = [1, 3, 2]  # 0.52, 0.25 and 0.12 of the probability: the first three reach 0.8
    expected = shares[likeliest] / shares[likeliest].sum()
    counts = torch.tensor([sum(found[row] == token for row in range(rows)) for token in likeliest])
    assert counts.sum() == rows, "nothing outside the set"
    assert (counts / rows).tolist() == pytest.approx(expected.tolist(), abs=0.03)
    assert found[rows] == 1, "without temperature the best"
