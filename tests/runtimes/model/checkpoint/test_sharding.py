"""What the sharding table does not say plainly is refused at registration, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

from runtimes.model.checkpoint import Cut, Head
from runtimes.model.weights import ShardingPlan, build_skeleton, plan_of
from tests.runtimes.model.checkpoints import FAMILIES, SHAPE


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
