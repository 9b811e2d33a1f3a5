"""Requests to models, and the settings of the runtime."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from manager.errors import InvalidInput
from manager.function import FunctionSpec, ModelAction, ModelSpec, Setting
from tangram.types import explained

_COMPONENT = "model.request"

TokenId = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]


class ModelInputFields(TypedDict, total=False):
    """Sequences: exactly one of ``texts``, ``token_ids`` and ``messages``."""

    texts: Annotated[tuple[Text, ...], Meta(min_length=1, description="Texts, one sequence each")]
    token_ids: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1)], ...],
        Meta(min_length=1, description="Token ids, one list for each sequence"),
    ]
    messages: Annotated[
        list[dict[str, Any] | list[Any]],
        Meta(min_length=1, description="One conversation (messages with role and content), or a list of them"),
    ]


class GenerateInputFields(ModelInputFields, total=False):
    """Sequences to continue, and how to sample: exactly one of ``texts``, ``token_ids`` and ``messages``."""

    max_new_tokens: Annotated[int, Meta(ge=1, description="At most the function's max_new_tokens, its default")]
    temperature: Annotated[float, Meta(ge=0, le=100, description="0, the default, takes the likeliest token")]
    top_p: Annotated[float, Meta(gt=0, le=1, description="Mass of the likeliest tokens to draw from; 1 by default")]
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="Seed of the draws; a random one by default, told in the result")
    ]


class EmbedInputFields(ModelInputFields, total=False):
    """Sequences to embed: exactly one of ``texts``, ``token_ids`` and ``messages``."""

    prompt_name: Annotated[
        str, Meta(description="Prompt of the checkpoint, put before each text; its default one where none is named")
    ]


class StepScoresInputFields(ModelInputFields, total=False):
    """Sequences to judge step by step: exactly one of ``texts``, ``token_ids`` and ``messages``."""

    step_token_id: Annotated[
        int, Meta(ge=0, description="The token that ends a step; every token is told without it and positions")
    ]
    positions: Annotated[
        tuple[tuple[TokenId, ...], ...],
        Meta(description="Where steps end, a list for each sequence of token_ids, instead"),
    ]


class LogprobsInputFields(ModelInputFields, total=False):
    """Sequences to judge token by token: exactly one of ``texts``, ``token_ids`` and ``messages``."""

    top_logprobs: Annotated[
        int,
        Meta(ge=0, le=128, description="Also tell ids, ranks and so many of the likeliest tokens"),
    ]


#: What each action takes.
INPUTS: Mapping[ModelAction, type] = {
    ModelAction.SCORE: ModelInputFields,
    ModelAction.STEP_SCORES: StepScoresInputFields,
    ModelAction.LOGPROBS: LogprobsInputFields,
    ModelAction.EMBED: EmbedInputFields,
    ModelAction.GENERATE: GenerateInputFields,
}
#: The forms of its sequences, one of which is given.
SEQUENCES = tuple(ModelInputFields.__annotations__)


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
    """Check an input; raises InvalidInput whose ``detail["path"]`` is the JSON path at fault."""
    forms = [form for form in SEQUENCES if form in value]
    if len(forms) != 1:
        raise _invalid("$", f"needs exactly one of {', '.join(SEQUENCES)}")
    model = model_of(function)
    fields = INPUTS[model.action]
    for name in value:
        if name not in fields.__annotations__:
            raise _invalid(f"$.{name}", "is not known to this function")
    try:
        known: Any = msgspec.convert(value, fields)
    except msgspec.ValidationError as error:
        message, place = explained(error)
        raise _invalid(f"${place}", f"is not as declared: {message}") from None
    rows = known[forms[0]]
    if "messages" in known and isinstance(rows[0], dict):
        rows = [rows]  # a single conversation
    if len(rows) > sequences_max:
        raise _invalid(f"$.{forms[0]}", f"has {len(rows)} sequences, more than {sequences_max}")
    if "prompt_name" in known and "texts" not in known:
        raise _invalid("$.prompt_name", "goes with texts")
    return ModelInput(
        texts=known.get("texts", ()),
        token_ids=known.get("token_ids", ()),
        conversations=tuple(_chat(row, index) for index, row in enumerate(rows)) if "messages" in known else (),
        sampling=_sampling(known, model),
        top_logprobs=known.get("top_logprobs"),
        prompt_name=known.get("prompt_name"),
        step_token_id=known.get("step_token_id"),
        positions=_positions(known),
    )


def _positions(known: Mapping[str, Any]) -> tuple[tuple[int, ...], ...] | None:
    """Return where the steps end, if the input says so."""
    rows: tuple[tuple[int, ...], ...] | None = known.get("positions")
    if rows is None:
        return None
    if "step_token_id" in known:
        raise _invalid("$.step_token_id", "goes without positions")
    sequences = known.get("token_ids", ())
    if len(rows) != len(sequences):
        raise _invalid("$.positions", "goes with token_ids: a list for each sequence")
    for index, (row, ids) in enumerate(zip(rows, sequences, strict=True)):
        if max(row, default=-1) >= len(ids):
            raise _invalid(f"$.positions[{index}]", f"must be positions in a sequence of {len(ids)} tokens")
    return rows


def _sampling(known: Mapping[str, Any], model: ModelSpec) -> Sampling:
    """Return the sampling options. An unseeded draw gets a seed here, so that every rank (and a retry) draws alike."""
    if model.action is not ModelAction.GENERATE:
        return Sampling(max_new_tokens=0)
    most = known.get("max_new_tokens", model.max_new_tokens)
    if most > model.max_new_tokens:
        raise _invalid("$.max_new_tokens", f"must be {model.max_new_tokens} at most")
    return Sampling(
        max_new_tokens=most,
        temperature=known.get("temperature", 0.0),
        top_p=known.get("top_p", 1.0),
        seed=known.get("seed", secrets.randbits(32)),
    )


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
