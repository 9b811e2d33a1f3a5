"""The skeleton: a transformers model whose parameters have shapes but no memory, and whose buffers are real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from manager.errors import InvalidConfig, Unsupported
from runtimes.model.checkpoint.checkpoint import TORCH_DTYPES, Checkpoint

_COMPONENT = "model.skeleton"

#: transformers sets torch's default dtype, which all threads share, while it makes a model: of two models that are made
#: at once either may have the other's. Its modules are imported at their first use, which two threads cannot do either.
_ONE_AT_A_TIME = threading.Lock()

#: Decoder families whose logits are exactly ``lm_head(hidden)`` and whose sharding plan is complete: both are
#: checked against plain transformers by the tests. Others compute with their own forward, at DoP 1.
FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral"})


class Head(StrEnum):
    """What stands on top of the base model."""

    LM = "lm"  #: next-token distribution: logprobs, generate
    SCORE = "score"  #: sequence classification
    BASE = "base"  #: hidden states: embed


class _EmptyOnMeta(TorchFunctionMode):
    """Uninitialised tensors (weights) get no memory; computed ones (rotary tables, position ids) stay real.

    So non-persistent buffers, which no checkpoint holds, are exactly those of an ordinary construction.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


def build_skeleton(config: Mapping[str, object], head: Head, dtype: str, origin: Path) -> nn.Module:
    """Construct the model of a config.json under ``head``, with weights of ``dtype``; ``origin`` is for messages.

    Raises InvalidConfig if transformers does not know the architecture, and Unsupported if the head cannot be
    computed exactly here.
    """
    with _ONE_AT_A_TIME:
        return _build(config, head, dtype, origin)


def _build(config: Mapping[str, object], head: Head, dtype: str, origin: Path) -> nn.Module:
    parsed = _parse(config, origin)
    if head is Head.LM and parsed.model_type not in FAMILIES:
        raise Unsupported(
            f"{origin}: logprobs and generate support {', '.join(sorted(FAMILIES))}, not "
            f"{parsed.model_type!r}; use an external engine (model.engine_url)",
            component=_COMPONENT,
        )
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    classes = {Head.LM: AutoModelForCausalLM, Head.SCORE: AutoModelForSequenceClassification, Head.BASE: AutoModel}
    auto: Any = classes[head]
    options = {"add_pooling_layer": False} if head is Head.BASE and parsed.model_type == "bert" else {}
    try:
        with _EmptyOnMeta(), torch.no_grad():
            model: nn.Module = auto.from_config(parsed, dtype=getattr(torch, dtype), **options)
    except Exception as error:  # models check their configurations in whatever way they like
        raise InvalidConfig(
            f"{origin}: no {head} model can be made from its config.json ({type(error).__name__}: {error})",
            component=_COMPONENT,
        ) from error
    model.tie_weights()  # type: ignore[operator]  # a method of PreTrainedModel, which nn.Module does not declare
    return model.eval().requires_grad_(False)


def weight_dtype(checkpoint: Checkpoint, dtype: str) -> str:
    """The dtype of the weights: the function's choice, else what config.json says, else that of the tensors."""
    declared = dtype or str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "")
    if not declared:
        stored = (TORCH_DTYPES[tensor.dtype] for tensor in checkpoint.tensors.values())
        declared = next((name for name in stored if "float" in name), "float32")
    name = declared.removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise InvalidConfig(
            f"model.dtype: {declared!r} is no floating dtype that weights can have", component=_COMPONENT
        )
    return name


def _parse(config: Mapping[str, object], origin: Path) -> Any:
    """transformers' configuration object; code that a checkpoint brings along is never run."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise InvalidConfig(
            f"{origin / 'config.json'}: transformers knows no model_type {kind!r}; "
            "upgrade transformers, or use an external engine (model.engine_url)",
            component=_COMPONENT,
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:
        raise InvalidConfig(
            f"{origin / 'config.json'} cannot be used by transformers ({error})", component=_COMPONENT
        ) from error


def place_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor], device: str) -> None:
    """Give the model these buffers on ``device``."""
    for name, buffer in buffers.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module)._buffers[leaf] = buffer.to(device)
