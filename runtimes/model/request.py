"""Requests to models, and the settings of the runtime."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from manager.errors import InvalidInput
from manager.function import FunctionSpec, ModelAction, ModelSpec, Setting

_COMPONENT = "model.request"
_KINDS = ("texts", "token_ids", "messages")
#: Besides the sequences.
_OPTIONS: Mapping[ModelAction, tuple[str, ...]] = {
    ModelAction.GENERATE: ("max_new_tokens", "temperature", "top_p", "seed"),
    ModelAction.LOGPROBS: ("top_logprobs",),
    ModelAction.EMBED: ("prompt_name",),
    ModelAction.STEP_SCORES: ("step_token_id", "positions"),
}
#: Likeliest tokens that are told of each position.
TOP_LOGPROBS_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """Exactly one of texts, token ids and conversations, how to sample (`generate`) and what to tell (`logprobs`)."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    conversations: tuple[tuple[Mapping[str, object], ...], ...] = ()
    sampling: Sampling = Sampling(max_new_tokens=0)
    #: So many of the likeliest tokens beside each one, with ids and ranks (`logprobs` only); None tells none of them.
    top_logprobs: int | None = None
    #: The checkpoint's prompt that is put before each text (`embed`); None takes its default one, if it has any.
    prompt_name: str | None = None
    #: Where a step ends (`step_scores`): the token that separates them, or positions by sequence; None: at every token.
    step_token_id: int | None = None
    positions: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.texts) + len(self.token_ids) + len(self.conversations)


def model_of(function: FunctionSpec) -> ModelSpec:
    """The function's model section, which every function of this runtime has."""
    assert function.model is not None, f"{function.name} has no model section"
    return function.model


def parse_input(function: FunctionSpec, value: Mapping[str, object], sequences_max: int) -> ModelInput:
    """Check the shape of an input; raises InvalidInput whose ``detail["path"]`` is the JSON path at fault."""
    kinds = [kind for kind in _KINDS if kind in value]
    if len(kinds) != 1:
        raise _invalid("$", f"needs exactly one of {', '.join(_KINDS)}")
    action = model_of(function).action
    for name in value:
        if name not in (*_KINDS, *_OPTIONS.get(action, ())):
            raise _invalid(f"$.{name}", "is not known to this function")
    options = _options(value, model_of(function))
    kind = kinds[0]
    rows = value[kind]
    if kind == "messages" and isinstance(rows, list) and rows and isinstance(rows[0], dict):
        rows = [rows]  # a single conversation
    if not isinstance(rows, list) or not rows:
        raise _invalid(f"$.{kind}", "must be a list that is not empty")
    if len(rows) > sequences_max:
        raise _invalid(f"$.{kind}", f"has {len(rows)} sequences, more than {sequences_max}")
    if kind == "texts":
        return replace(options, texts=tuple(_text(row, i) for i, row in enumerate(rows)))
    if kind == "token_ids":
        return replace(options, token_ids=tuple(_ids(row, i) for i, row in enumerate(rows)))
    return replace(options, conversations=tuple(_chat(row, i) for i, row in enumerate(rows)))


def _options(inputs: Mapping[str, object], model: ModelSpec) -> ModelInput:
    """Return an input without its sequences."""
    if model.action is ModelAction.GENERATE:
        return ModelInput(sampling=_sampling(inputs, model))
    if model.action is ModelAction.STEP_SCORES:
        return _steps(inputs)
    if "prompt_name" in inputs:
        name = inputs["prompt_name"]
        if not isinstance(name, str) or "texts" not in inputs:
            raise _invalid("$.prompt_name", "must be a name, and goes with texts")
        return ModelInput(prompt_name=name)
    if "top_logprobs" not in inputs:
        return ModelInput()
    count = _number(inputs, "top_logprobs", 0, 0, TOP_LOGPROBS_MAX)
    if count != int(count):
        raise _invalid("$.top_logprobs", "must be a whole number")
    return ModelInput(top_logprobs=int(count))


def _steps(inputs: Mapping[str, object]) -> ModelInput:
    """Return where the steps end."""
    token, rows = inputs.get("step_token_id"), inputs.get("positions")
    if token is not None:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0 or rows is not None:
            raise _invalid("$.step_token_id", "must be a token id, and goes without positions")
        return ModelInput(step_token_id=token)
    if rows is None:
        return ModelInput()
    sequences = inputs.get("token_ids")
    if not isinstance(rows, list) or not isinstance(sequences, list) or len(rows) != len(sequences):
        raise _invalid("$.positions", "goes with token_ids: a list for each sequence")
    for index, (row, ids) in enumerate(zip(rows, sequences, strict=True)):
        known = len(ids) if isinstance(ids, list) else 0
        if not isinstance(row, list) or not all(type(each) is int and 0 <= each < known for each in row):
            raise _invalid(f"$.positions[{index}]", f"must be positions in a sequence of {known} tokens")
    return ModelInput(positions=tuple(tuple(row) for row in rows))


def _sampling(inputs: Mapping[str, object], model: ModelSpec) -> Sampling:
    """Return the sampling options. An unseeded draw gets a seed here, so that every rank (and a retry) draws alike."""
    return Sampling(
        max_new_tokens=int(_number(inputs, "max_new_tokens", model.max_new_tokens, 1, model.max_new_tokens)),
        temperature=_number(inputs, "temperature", 0.0, 0.0, 100.0),
        top_p=_number(inputs, "top_p", 1.0, 1e-6, 1.0),
        seed=int(_number(inputs, "seed", secrets.randbits(32), 0, 2**63 - 1)),
    )


def _number(inputs: Mapping[str, object], name: str, default: float, low: float, high: float) -> float:
    value = inputs.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _invalid(f"$.{name}", f"must be a number between {low} and {high}")
    return value


def _text(row: object, index: int) -> str:
    if not isinstance(row, str) or not row:
        raise _invalid(f"$.texts[{index}]", "must be a text that is not empty")
    return row


def _ids(row: object, index: int) -> tuple[int, ...]:
    if not isinstance(row, list) or not row or not all(type(token) is int and token >= 0 for token in row):
        raise _invalid(f"$.token_ids[{index}]", "must be a list of token ids that is not empty")
    return tuple(row)


def _chat(row: object, index: int) -> tuple[Mapping[str, object], ...]:
    if not isinstance(row, list) or not row:
        raise _invalid(f"$.messages[{index}]", "must be a list of messages that is not empty")
    for position, message in enumerate(row):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise _invalid(f"$.messages[{index}][{position}]", "must have a role and a content")
    return tuple(row)


def _invalid(path: str, what: str) -> InvalidInput:
    return InvalidInput(f"{path} {what}", component=_COMPONENT, detail={"path": path})


DeviceKind = Literal["cpu", "cuda", "auto", "none"]

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How models are held and run on this node."""

    #: ``auto`` takes CUDA devices where NVML finds some and ``cpu`` devices elsewhere, ``none`` no devices.
    device: DeviceKind = "auto"
    #: Number of ``cpu`` devices, or most CUDA devices to use; 0 takes every CUDA device, or one ``cpu`` device.
    devices: int = 0
    #: Bytes of each device's arena; 0 takes `arena_share` of a CUDA device's memory, or 2 GiB of a ``cpu`` device.
    device_bytes: int = 0
    #: Share of a CUDA device's memory that weights may fill; the rest is left for activations.
    arena_share: float = 0.75
    #: Least recently used images are dropped beyond it.
    host_bytes: Annotated[
        int | None, Setting("host memory for checkpoints; half of the machine's", key="host_memory")
    ] = None
    #: Directory for the rendezvous files of device groups; made on demand.
    state_dir: Path = field(default_factory=lambda: Path("/tmp") / f"tangram-model-{os.getuid()}")
    #: Name of the node in residency reports.
    node: str = "local"
    #: Whether engines may be started on this machine: their commands are the gateway's own, and a node runs none.
    engines: bool = True
    #: torch threads of one ``cpu`` device where the lease grants no cores.
    device_threads: int = 1
    #: Bytes of one asynchronous copy to a device.
    copy_bytes: int = 64 * 2**20
    stuck_s: Annotated[
        float,
        Setting("a device's process without progress for so long is replaced, and its action tried once more", gt=0),
    ] = 60.0
    dir: Annotated[Path | None, Setting("where relative model paths begin; the YAML file's directory by default")] = (
        None
    )
    #: Seconds that a collective waits for its peers (gloo reports it; NCCL is covered by ``stuck_s``).
    collective_s: float = 30.0
    #: Seconds that a process may take to start (it imports torch).
    start_s: float = 180.0
    #: Seconds left to a cancelled action to end by itself before its processes are killed.
    kill_grace_s: float = 1.0
    #: Seconds that the leader of a batch waits for the members that the lease names.
    gather_s: float = 0.25
    #: Seconds between two looks at a checkpoint's files.
    recheck_s: float = 2.0
    #: Most sequences of one action.
    sequences_max: int = 4096
    #: Bytes per second assumed for a restore before one has been measured.
    restore_bytes_per_s: float = 2 * GIB


def host_bytes(settings: ModelSettings) -> int:
    """The bound on host images in bytes."""
    if settings.host_bytes:
        return settings.host_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
