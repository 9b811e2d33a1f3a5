"""The sharding plan: transformers' table of styles, read as data and checked; the mechanism is `parallel`.

What the table does not say plainly is refused by name: a style unknown here (packed projections, experts), a linear
layer that the table leaves out, heads or a vocabulary that do not divide. Nothing is replicated in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from runtimes.model.checkpoint.layout import Cut
from runtimes.model.checkpoint.skeleton import FAMILIES

DOPS = (1, 2, 4, 8)

_COLUMNS = frozenset({"colwise"})
_ROWS = frozenset({"rowwise"})
_WHOLE = frozenset({"replicate", "replicated", "replicated_with_grad_allreduce"})
_VOCABULARY = frozenset({"colwise_gather_output", "colwise_rep"})
#: Token embeddings are shared by vocabulary here, whatever the table says, so that a tied head needs no second copy.
_EMBEDDING = frozenset({"embedding_rowwise"})
_KEY_VALUE = re.compile(r"\.(k|v)_proj$")
_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How one parameter is stored and cut."""

    cut: Cut = Cut.WHOLE
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """The styles of one model by module name, and why a DoP is impossible."""

    styles: Mapping[str, str]
    embedding: str
    refusals: Mapping[int, str]
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def shardable(self) -> bool:
        return any(dop not in self.refusals for dop in DOPS[1:])

    def placement(self, parameter: str) -> Placement:
        """How to store ``parameter`` (a full name such as ``model.layers.0.mlp.up_proj.weight``)."""
        if not self.shardable:
            return Placement()
        module, _, leaf = parameter.rpartition(".")
        style = self.styles.get(module, "")
        if module == self.embedding or style in _VOCABULARY:
            return Placement(cut=Cut.ROWS)
        if style in _COLUMNS:
            return Placement(cut=Cut.HEADS if _KEY_VALUE.search(module) else Cut.ROWS)
        if style in _ROWS and leaf == "weight":
            return Placement(cut=Cut.ROWS, transposed=True)
        return Placement()

    def is_rowwise(self, module: str) -> bool:
        return self.styles.get(module) in _ROWS


def plan_of(model: nn.Module) -> ShardingPlan:
    """Read the model's own table (`config.base_model_tp_plan` and the class's ``_tp_plan``) into a Plan."""
    config: Any = model.config
    styles = _styles(model)
    embedding = next((name for name, m in model.named_modules() if isinstance(m, nn.Embedding)), "")
    general = _general_refusal(model, styles)
    if general:
        return ShardingPlan(styles=styles, embedding=embedding, refusals=dict.fromkeys(DOPS[1:], general))
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    refusals = {dop: why for dop in DOPS[1:] if (why := _division_refusal(model, styles, embedding, dop))}
    return ShardingPlan(styles=styles, embedding=embedding, refusals=refusals, kv_heads=kv_heads, head_dim=head_dim)


def _table(model: nn.Module) -> dict[str, str]:
    """Return the style by module pattern, as transformers declares it for the base model and for its head."""
    base: Any = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    table = {prefix + key: style for key, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items()}
    return table | (getattr(type(model), "_tp_plan", None) or {})


def _styles(model: nn.Module) -> dict[str, str]:
    """Return the style by concrete module name: ``layers.*.mlp`` of the table matches every layer."""
    table = _table(model)
    named = ((name, table.get(_INDEX.sub(".*", name))) for name, _ in model.named_modules())
    return {name: style for name, style in named if style is not None}


def _general_refusal(model: nn.Module, styles: Mapping[str, str]) -> str:
    """Return why the model cannot be sharded at all; empty if it can."""
    kind, config = type(model).__name__, model.config
    assert config is not None
    if not getattr(config, "base_model_tp_plan", None):
        return f"{kind} has no tensor-parallel plan; use DoP 1"
    known = _COLUMNS | _ROWS | _WHOLE | _VOCABULARY | _EMBEDDING
    unknown = sorted({style for style in _table(model).values() if style not in known})
    if unknown:
        return f"{kind} uses the sharding style {unknown[0]!r}, which is not supported; use DoP 1"
    if getattr(config, "model_type", "") not in FAMILIES:
        return f"{kind} is not among the verified families ({', '.join(sorted(FAMILIES))}); use DoP 1"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in f".{name}" and name not in styles:
            return f"{kind}: the plan leaves out the linear layer {name}; use DoP 1"
    return ""


def _division_refusal(model: nn.Module, styles: Mapping[str, str], embedding: str, dop: int) -> str:
    """Return what does not divide by ``dop``, by name; empty if everything does."""
    config: Any = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % dop:
        return f"{heads} attention heads do not divide by {dop}"
    if kv_heads % dop and dop % kv_heads:
        return f"{kv_heads} key-value heads neither divide by {dop} nor divide it"
    for name, module in model.named_modules():
        style = styles.get(name, "")
        if isinstance(module, nn.Embedding) and name == embedding and module.num_embeddings % dop:
            return f"the vocabulary of {module.num_embeddings} tokens does not divide by {dop}"
        if isinstance(module, nn.Linear) and style in _COLUMNS and not _KEY_VALUE.search(name):
            if module.out_features % dop:
                return f"{name} has {module.out_features} outputs, which do not divide by {dop}"
        elif isinstance(module, nn.Linear) and style in _ROWS and module.in_features % dop:
            return f"{name} has {module.in_features} inputs, which do not divide by {dop}"
    return ""
