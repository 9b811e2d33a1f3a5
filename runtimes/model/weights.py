"""Weights of checkpoints: the backend that copies them to a device, skeletons, sharding plans and images."""

from __future__ import annotations

import ctypes
import datetime
import inspect
import mmap
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import nn
from torch.overrides import TorchFunctionMode

from manager.errors import InvalidConfig, Unsupported
from runtimes.model.checkpoint import (
    ALIGN_BYTES,
    PAGE_BYTES,
    TORCH_DTYPES,
    Checkpoint,
    CopyRange,
    Cut,
    Head,
    Layout,
    Piece,
    Pooling,
    Tensor,
    align,
    read_pooling,
)

#: torch leaves these untyped.
_dist: Any = torch.distributed
_cuda: Any = torch.cuda

#: Most bytes of one part of a copy on the host: so few that no thread waits long for the last one of another.
HOST_PART_BYTES = 4 * 2**20
#: Parts of a gentle copy under way at once on CUDA: what else goes to the device waits behind no more than these.
GENTLE_PARTS = 2


class Dropped(Exception):
    """The restore was given up: its place in the arena went to another service."""


class Transfer(Protocol):
    """A copy under way."""

    def wait(self, end: int) -> None:
        """Let the computation go on only when the slot's first ``end`` bytes have arrived; raises Dropped."""
        ...

    def finish(self) -> None:
        """Block, idly, until every byte has arrived; raises Dropped."""
        ...

    def drop(self) -> None:
        """Write nothing more: when this returns, a later copy to the same place is not disturbed. Idempotent."""
        ...


class DeviceBackend(Protocol):
    """One device. Copies begin in the order in which they are asked for."""

    #: As torch calls it.
    name: str

    def enter_thread(self) -> None:
        """To be called by every thread that works for the device."""
        ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Uninitialised bytes on the device."""
        ...

    def pin(self, data: torch.Tensor) -> None:
        """Lock host memory so that copies from it are asynchronous; raises RuntimeError."""
        ...

    def unpin(self, data: torch.Tensor) -> None:
        """Undo `pin`."""
        ...

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, copies: Sequence[CopyRange], *, gentle: bool
    ) -> Transfer:
        """Begin to make ``copies`` from pinned ``source`` to ``target``, in order; returns at once.

        A ``gentle`` copy leaves the way to the device free for a computation beside it.
        """
        ...

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        """The raw process group of one chunk, which meets at ``store``."""
        ...

    def trim(self) -> None:
        """Give memory that no tensor holds back to the device."""
        ...

    def survives(self, error: Exception) -> bool:
        """Return whether the process may go on with the device after ``error``."""
        ...

    def close(self) -> None: ...


def make_backend(device: str, copy_bytes: int, threads: int) -> DeviceBackend:
    """The backend of a device as torch calls it, with parts of ``copy_bytes`` at most; ``threads`` copy on the host."""
    return Host(copy_bytes, threads) if device == "cpu" else Cuda(device, copy_bytes)


class Watermark:
    """How far a copy has got, for those who wait for it. Parts may get there out of order."""

    def __init__(self, parts: Sequence[CopyRange]) -> None:
        self._ends = [part.target + part.size_bytes for part in parts]
        self._passed = [False] * len(parts)
        #: Parts that are through without a gap before them.
        self._count = 0
        self._moved = threading.Condition()
        #: Why no more will come.
        self.error: Exception | None = None

    def part_of(self, end: int) -> int:
        """The part that brings the byte before ``end``."""
        return min(bisect_left(self._ends, end), len(self._ends) - 1)

    def reach(self, part: int) -> None:
        with self._moved:
            self._passed[part] = True
            while self._count < len(self._passed) and self._passed[self._count]:
                self._count += 1
            self._moved.notify_all()

    def fail(self, error: Exception) -> None:
        """Tell everyone who waits for what has not come that it never will."""
        with self._moved:
            self.error = self.error or error
            self._moved.notify_all()

    def has(self, part: int) -> bool:
        """Return whether ``part`` and all before it are copied."""
        return self._count > part

    def wait(self, part: int) -> None:
        """Block until ``part`` and all before it are copied; raises what the copy failed with."""
        if self.has(part):
            return
        with self._moved:
            self._moved.wait_for(lambda: self.has(part) or self.error is not None)
            if self.error is not None and not self.has(part):
                raise self.error


class Host:
    """The host as a device: a few threads that copy."""

    name = "cpu"

    def __init__(self, copy_bytes: int, threads: int) -> None:
        self._part_bytes = min(copy_bytes, HOST_PART_BYTES)
        #: The thread that waits for the bytes is one more.
        self._copiers_max = max(threads - 1, 1)
        self._copiers = ThreadPoolExecutor(self._copiers_max, thread_name_prefix="copier")

    def enter_thread(self) -> None:
        """Every thread may work for the host."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return anonymous memory, in huge pages if the kernel gives them: a restore touches every page of its slot."""
        memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def pin(self, data: torch.Tensor) -> None:
        """Nothing to do: a copy on the host needs no locked pages."""

    def unpin(self, data: torch.Tensor) -> None:
        """Nothing to do: a copy on the host needs no locked pages."""

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, copies: Sequence[CopyRange], *, gentle: bool
    ) -> Transfer:
        transfer = HostTransfer(source, target, _cut(copies, self._part_bytes))
        for _ in range(1 if gentle else self._copiers_max):
            self._copiers.submit(transfer.carry)
        return transfer

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        return _dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_s))

    def trim(self) -> None:
        """The allocator keeps nothing worth mentioning."""

    def survives(self, error: Exception) -> bool:
        """An exception leaves nothing behind on the host."""
        return True

    def close(self) -> None:
        self._copiers.shutdown()


class HostTransfer:
    """Parts that free threads take one by one."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, parts: Sequence[CopyRange]) -> None:
        self._parts = parts
        #: A reference keeps both in memory.
        self._held = source, target
        self._from, self._to = source.data_ptr(), target.data_ptr()
        self._arrived = Watermark(parts)
        self._left = iter(range(len(parts)))
        self._taking = threading.Condition()
        self._carried = 0

    def carry(self) -> None:
        """One thread's share: part after part while any is left."""
        while self._carry_one():
            pass

    def wait(self, end: int) -> None:
        """Copy parts in the waiting thread too."""
        part = self._arrived.part_of(end)
        while not self._arrived.has(part) and self._carry_one():
            pass
        self._arrived.wait(part)

    def finish(self) -> None:
        self._arrived.wait(len(self._parts) - 1)

    def drop(self) -> None:
        self._arrived.fail(Dropped())
        with self._taking:
            self._taking.wait_for(lambda: not self._carried)

    def _carry_one(self) -> bool:
        """Copy the next part; return False if none is left."""
        number = self._take()
        if number is None:
            return False
        part = self._parts[number]
        ctypes.memmove(self._to + part.target, self._from + part.source, part.size_bytes)
        self._put(number)
        return True

    def _take(self) -> int | None:
        with self._taking:
            number = next(self._left, None) if self._arrived.error is None else None
            self._carried += number is not None
            return number

    def _put(self, number: int) -> None:
        self._arrived.reach(number)
        with self._taking:
            self._carried -= 1
            self._taking.notify_all()


class Cuda:
    """A CUDA device: one stream for copies, beside the stream that computes."""

    def __init__(self, name: str, copy_bytes: int, cuda: Any = _cuda) -> None:
        self.name, self._part_bytes, self._cuda = name, copy_bytes, cuda
        cuda.init()  # says plainly why not, where there is no driver or torch was built without CUDA
        self.enter_thread()
        self._stream = cuda.Stream(name)
        self._feeder = ThreadPoolExecutor(1, thread_name_prefix="feeder", initializer=self.enter_thread)

    def enter_thread(self) -> None:
        """CUDA's current device belongs to a thread; a stray one would make a context of half a gigabyte elsewhere."""
        self._cuda.set_device(self.name)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.name)

    def pin(self, data: torch.Tensor) -> None:
        """Registration pins the shared pages for this process's context: no second copy is made."""
        self._check(self._cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0), "pin")

    def unpin(self, data: torch.Tensor) -> None:
        self._check(self._cuda.cudart().cudaHostUnregister(data.data_ptr()), "unpin")

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, copies: Sequence[CopyRange], *, gentle: bool
    ) -> Transfer:
        parts = _cut(copies, self._part_bytes)
        transfer = CudaTransfer(self, source, target, parts)
        if gentle:
            self._feeder.submit(transfer.feed, GENTLE_PARTS)
        else:
            transfer.feed(len(parts))
        return transfer

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Put one copy on the copy stream; the event that marks its end."""
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._cuda.Event()
            event.record(self._stream)
        return event

    def hold_back(self, event: Any) -> None:
        """Let this thread's computation wait for ``event``, without blocking the thread."""
        self._cuda.current_stream().wait_event(event)

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        return _dist.ProcessGroupNCCL(store, rank, size, options)

    def trim(self) -> None:
        self._cuda.empty_cache()

    def survives(self, error: Exception) -> bool:
        """Return False for a CUDA error: it may stay with the context."""
        return not isinstance(error, RuntimeError)

    def close(self) -> None:
        self._feeder.shutdown()

    def _check(self, code: Any, what: str) -> None:
        if int(code) != 0:
            detail = self._cuda.cudart().cudaGetErrorString(code)
            # CUDA reports an error once more, from whatever is called next: here, not in somebody's computation.
            with suppress(RuntimeError):
                self._cuda.synchronize()
            raise RuntimeError(f"CUDA refused to {what} an image: {detail} (error {int(code)})")


class CudaTransfer:
    """Events on the copy stream; a wait orders the compute stream behind one of them and blocks no thread for long."""

    def __init__(self, device: Cuda, source: torch.Tensor, target: torch.Tensor, parts: Sequence[CopyRange]) -> None:
        self._device, self._source, self._target, self._parts = device, source, target, parts
        #: What is on the stream: from then on its event can be waited for.
        self._sent = Watermark(parts)
        self._events: list[Any] = []
        self._sending = threading.Lock()
        self._arrived = False

    def feed(self, ahead: int) -> None:
        """Put every part on the stream, never more than ``ahead`` of them at once. Fails to those who wait."""
        try:
            for number in range(len(self._parts)):
                if number >= ahead:
                    self._events[number - ahead].synchronize()
                if not self._send(number):
                    return
        except Exception as error:  # noqa: BLE001  # raised again by whoever waits
            self._sent.fail(error)

    def wait(self, end: int) -> None:
        if not self._arrived:
            part = self._sent.part_of(end)
            self._sent.wait(part)
            self._device.hold_back(self._events[part])

    def finish(self) -> None:
        last = len(self._parts) - 1
        self._sent.wait(last)
        self._events[last].synchronize()
        self._arrived = True

    def drop(self) -> None:
        """Stop sending; parts that are on the stream already come before any later copy."""
        with self._sending:
            self._sent.fail(Dropped())

    def _send(self, number: int) -> bool:
        """Put one part on the stream, unless there is no use for it any more."""
        part = self._parts[number]
        source = self._source[part.source : part.source + part.size_bytes]
        target = self._target[part.target : part.target + part.size_bytes]
        with self._sending:
            if self._sent.error is not None:
                return False
            self._events.append(self._device.send(source, target))
        self._sent.reach(number)
        return True


def _cut(parts: Sequence[CopyRange], size_bytes: int) -> list[CopyRange]:
    """The same ranges in parts of at most ``size_bytes``."""
    return [
        CopyRange(
            source=part.source + start, target=part.target + start, size_bytes=min(size_bytes, part.size_bytes - start)
        )
        for part in parts
        for start in range(0, part.size_bytes, size_bytes)
    ]


_COMPONENT = "model.skeleton"

#: transformers sets torch's default dtype, which all threads share, while it makes a model: of two models that are made
#: at once either may have the other's. Its modules are imported at their first use, which two threads cannot do either.
_ONE_AT_A_TIME = threading.Lock()

#: Decoder families whose logits are exactly ``lm_head(hidden)`` and whose sharding plan is complete: both are
#: checked against plain transformers by the tests. They are read straight from the files, are computed layer by layer
#: as they arrive, and are the only ones with a DoP above 1. Others load and compute as their class in transformers.
FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral"})


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

    Raises InvalidConfig if transformers does not know the architecture or it has no such head, and Unsupported if it
    cannot be computed right here.
    """
    with _ONE_AT_A_TIME:
        parsed = _parse(config, origin)
        return _build(_class_of(parsed, head, origin), parsed, head, dtype, origin)


def _build(kind: Any, parsed: Any, head: Head, dtype: str, origin: Path) -> nn.Module:
    # An embedding is pooled from the hidden states: no pooler's weights are needed, which many checkpoints lack.
    pooler = head is Head.BASE and "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    try:
        with _EmptyOnMeta(), torch.no_grad():
            model: nn.Module = kind._from_config(
                parsed, dtype=getattr(torch, dtype), **({"add_pooling_layer": False} if pooler else {})
            )
    except Exception as error:  # models check their configurations in whatever way they like
        raise InvalidConfig(
            f"{origin}: no {head} model can be made from its config.json ({type(error).__name__}: {error})",
            component=_COMPONENT,
        ) from error
    model.tie_weights()  # type: ignore[operator]  # a method of PreTrainedModel, which nn.Module does not declare
    return model.eval().requires_grad_(False)


def _class_of(parsed: Any, head: Head, origin: Path) -> Any:
    """Return transformers' class of a configuration for a head: the one that it declares, if it names any."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tables = {
        Head.LM: (auto.MODEL_FOR_CAUSAL_LM_MAPPING,),
        Head.SCORE: (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,),
        Head.STEPS: (auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,),
        Head.BASE: (auto.MODEL_FOR_TEXT_ENCODING_MAPPING, auto.MODEL_MAPPING),
    }
    found: list[Any] = [table.get(type(parsed), ()) for table in tables[head]]
    classes: list[Any] = [each for entry in found for each in (entry if isinstance(entry, tuple) else (entry,))]
    declared = (getattr(parsed, "architectures", None) or [""])[0]
    engine = "use an engine (model.engine)"
    if declared and not hasattr(transformers, declared):
        raise Unsupported(
            f"{origin / 'config.json'}: transformers has no {declared}, and code that a checkpoint brings along is "
            f"never run; {engine}",
            component=_COMPONENT,
        )
    chosen = next((each for each in classes if each.__name__ == declared), None)
    if chosen is None and declared and head is not Head.BASE:
        names = ", ".join(sorted({each.__name__ for each in classes})) or "none"
        raise InvalidConfig(
            f"{origin / 'config.json'} declares {declared}, which has no {head} head (of {parsed.model_type} "
            f"these have: {names}); is this the checkpoint for this action?",
            component=_COMPONENT,
        )
    if chosen is None and not classes:
        raise Unsupported(
            f"{origin}: transformers has no {head} model of {parsed.model_type!r}; {engine}", component=_COMPONENT
        )
    chosen = chosen or classes[-1]
    why = refusal_of(chosen, parsed, head)
    if why:
        raise Unsupported(f"{origin}: {chosen.__name__} {why}; {engine}", component=_COMPONENT)
    return chosen


def refusal_of(kind: Any, parsed: Any, head: Head) -> str:
    """Return why a class of transformers is not served with a configuration (or any of its class); empty if it is."""
    if kind.main_input_name != "input_ids":
        return f"reads {kind.main_input_name}, not text"
    if parsed.model_type in NOT_COMPARED:
        return "was not compared with plain transformers"
    if head is Head.LM and (parsed.model_type in NOT_CAUSAL or not getattr(parsed, "is_causal", True)):
        return "tells a token by what follows it, too"
    if (
        getattr(parsed, "is_encoder_decoder", False)
        and head is not Head.LM
        and not kind.__name__.endswith("EncoderModel")
    ):
        return "has an encoder and a decoder, and an input here is one sequence"
    if head is Head.BASE and not _is_of_text(parsed.model_type):
        return "is no model of text alone"
    if head is Head.LM and not kind.can_generate():
        return "cannot generate"
    both_ways = getattr(parsed, "is_decoder", None) is False and not getattr(parsed, "is_encoder_decoder", False)
    if head is Head.LM and both_ways and not parsed.model_type.startswith("gpt_neox"):
        return "reads a text both ways: its config.json says is_decoder: false"
    if not getattr(parsed.get_text_config(), "vocab_size", 0):
        return "has no vocabulary"
    return ""


def _is_of_text(kind: str) -> bool:
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )
    return any(kind in table for table in tables)


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


#: Families whose classes are called causal, and tell the probability of a token by what follows it too.
NOT_CAUSAL = frozenset({"cpmant", "prophetnet", "xlm", "xlnet"})

#: Families of which bench/model/architectures.py makes no tiny random checkpoint that plain transformers computes, or
#: which it does not load as they were saved: whether our numbers would be theirs is not known.
NOT_COMPARED = _names(
    "bailing_hybrid blt bros cohere_compass_text dots3_note emu3 emu3_text_model funnel gemma3n gemma3n_text "
    "gemma4_assistant gemma4_unified_assistant kimi_linear layoutlmv2 lilt llama4 mistral4 mllama mllama_text_model "
    "musicgen musicgen_melody neomme qwen4_exp qwen4_exp_text t5gemma t5gemma2 xlstm youtu zamba"
)

#: Families beside `FAMILIES` whose numbers padding does not change, which the same comparison checks. Of all others
#: only sequences of equal length share a batch.
PADDED = FAMILIES | _names(
    "albert bert camembert cohere2 deberta deberta-v2 deepseek_v3 distilbert electra eurobert gemma gemma2 gemma3_text "
    "glm4 glm4_moe gpt2 gpt_neox gpt_oss granite gte jina_embeddings_v3 minimax_m2 ministral mixtral modernbert mpnet "
    "nomic_bert olmo2 olmo3 phi phi3 qwen2_moe qwen3_moe roberta seed_oss smollm3 starcoder2 xlm-roberta"
)


def weight_dtype(checkpoint: Checkpoint, dtype: str) -> str:
    """The dtype of the weights: the function's choice, else what config.json says, else that of the tensors."""
    declared = dtype or str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "")
    if not declared:
        stored = (TORCH_DTYPES[tensor.dtype] for tensor in checkpoint.tensors.values())
        declared = next((name for name in stored if "float" in name), "float32")
    name = declared.removeprefix("torch.")
    entry = getattr(torch, name, None)
    if not isinstance(entry, torch.dtype) or not entry.is_floating_point or entry.itemsize < 2:
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
            "upgrade transformers, or use an engine (model.engine)",
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


# The sharding plan: transformers' table of styles, read as data and checked; the mechanism is `parallel`.
#
# What the table does not say plainly is refused by name: a style unknown here (packed projections, experts), a linear
# layer that the table leaves out, heads or a vocabulary that do not divide. Nothing is replicated in silence.

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


_IMAGE_COMPONENT = "model.image"


def build_layout(checkpoint: Checkpoint, head: Head, dtype: str = "", ignore: Sequence[str] = ()) -> Layout:
    """Lay out the parameters in the model's own (layer) order; raises InvalidConfig naming what is missing or left.

    ``ignore`` are patterns of tensors that may be left over.
    """
    dtype = weight_dtype(checkpoint, dtype)
    model: Any = build_skeleton(checkpoint.config, head, dtype, checkpoint.path)
    plan = plan_of(model)
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in _stored(model):
        first = names.setdefault(id(value), name)
        if first != name:
            tied[name] = first
    empty = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, TORCH_DTYPES[tensor.dtype]), device="meta")
        for name, tensor in checkpoint.tensors.items()
    }
    _check_no_quantised(checkpoint, model)
    loaded = _load(model, empty, dtype, "meta")
    sources = _sources(checkpoint, model, tied)
    _check_weights(checkpoint, model, head, loaded, sources, ignore)
    pieces: list[Piece] = []
    end = 0
    for name, value in _stored(model):
        if name not in tied and name not in loaded.missing_keys:
            pieces.append(_piece(plan, name, value, sources.get(name, ""), end))
            end += align(pieces[-1].size_bytes, ALIGN_BYTES)
    text = model.config.get_text_config()
    pooling = read_pooling(checkpoint.path) if head is Head.BASE else Pooling()
    positions = _positions(model, text)
    return Layout(
        pieces=tuple(pieces),
        tied=tied,
        equal={
            sources[name]: sources[first]
            for name, first in tied.items()
            if name in sources and sources[name] != sources[first]
        },
        size_bytes=align(end, PAGE_BYTES),
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        refusals=plan.refusals,
        positions_max=min(positions or pooling.max_tokens, pooling.max_tokens or positions),
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        config=checkpoint.config,
        head=head,
        dtype=dtype,
        pooling=pooling,
    )


def _positions(model: Any, config: Any) -> int:
    """Return the longest input that the positions allow; those of RoBERTa and its like begin behind the padding's."""
    most = int(getattr(config, "max_position_embeddings", 0) or 0)
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = getattr(next(tables, None), "padding_idx", None)
    return most if padding is None else most - padding - 1


def _load(model: Any, tensors: Mapping[str, Any], dtype: str, device: str) -> Any:
    """Load tensors as transformers does, by its conversions; return what it says of them.

    ``missing_keys`` are weights that no tensor was there for, ``unexpected_keys`` tensors that it has no use for, less
    those of which it knows that they do not matter: old rotary caches, position ids, heads for other tasks.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # it is untyped
    wanted = getattr(torch, dtype)
    options = LoadStateDictConfig(
        device_map={"": device},
        dtype=wanted,
        dtype_plan=model._get_dtype_plan(wanted),
        weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]  # transformers' own two names
    )
    loaded, _ = convert_and_load_state_dict_in_model(model, dict(tensors), options)
    model.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
    missing = set(loaded.missing_keys)
    model._adjust_missing_and_unexpected_keys(loaded)
    loaded.missing_keys = missing  # whatever its class says may be missing would be random
    return loaded


def _sources(checkpoint: Checkpoint, model: nn.Module, tied: Mapping[str, str]) -> dict[str, str]:
    """Return the tensor of each weight of a model that is read straight from the files; none of any other."""
    assert model.config is not None
    if getattr(model.config, "model_type", "") not in FAMILIES:
        return {}
    found = {
        name: next((a for a in _aliases(model, name) if a in checkpoint.tensors), "") for name, _ in _stored(model)
    }
    # A tied weight may be stored under any of its names.
    for name, first in tied.items():
        found[first] = found[first] or found[name]
    return {name: source for name, source in found.items() if source}


def _check_weights(
    checkpoint: Checkpoint, model: Any, head: Head, loaded: Any, sources: Mapping[str, str], ignore: Sequence[str]
) -> None:
    """Raise InvalidConfig where a weight has no tensor, or a tensor no use."""
    buffers = {name for name, _ in model.named_buffers()}
    missing = sorted(loaded.missing_keys - buffers)
    if missing:
        raise InvalidConfig(
            f"{checkpoint.path}: the weight {missing[0]} that {type(model).__name__} needs is missing; "
            "is this the checkpoint for this action?",
            component=_IMAGE_COMPONENT,
        )
    for name, found, expected in sorted(loaded.mismatched_keys):
        raise InvalidConfig(
            f"{checkpoint.path}: {name} has the shape {tuple(found)} where config.json asks for {tuple(expected)}",
            component=_IMAGE_COMPONENT,
        )
    for name, why in loaded.conversion_errors.items():
        raise InvalidConfig(
            f"{checkpoint.path}: transformers cannot make {name} of its tensors ({why})", component=_IMAGE_COMPONENT
        )
    left = set(loaded.unexpected_keys)
    if sources:
        left = {name for name in checkpoint.tensors.keys() - set(sources.values()) if not _HARMLESS.search(name)}
    if head is Head.BASE and left:
        left -= _weights_of_heads(checkpoint, model, left)
    unused = sorted(name for name in left if not any(fnmatchcase(name, pattern) for pattern in ignore))
    if unused:
        raise InvalidConfig(
            f"{checkpoint.path}: {type(model).__name__} has no use for {unused[0]}"
            f"{f' and {len(unused) - 1} more tensors' if unused[1:] else ''}, so its numbers would be those of another "
            "model; is this the checkpoint for this action? What may be left out is named by model.ignore_weights",
            component=_IMAGE_COMPONENT,
        )


#: Tensors of old checkpoints that are computed today, and so may be left over.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")


def _weights_of_heads(checkpoint: Checkpoint, model: Any, left: Iterable[str]) -> set[str]:
    """Return which of the tensors belong to the head (or pooler) of the class that the checkpoint declares.

    An embedding is made of the hidden states below them.
    """
    import transformers

    names = checkpoint.config.get("architectures")
    kind: Any = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    if kind is None:
        return set()
    with _ONE_AT_A_TIME:
        declared = _build(kind, _parse(checkpoint.config, checkpoint.path), Head.LM, "float32", checkpoint.path)
    known = declared.state_dict().keys() - model.state_dict().keys()
    return {name for name in left if not known.isdisjoint((name, *_aliases(declared, name), *_aliases(model, name)))}


def _check_no_quantised(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise Unsupported for whole numbers where the model has others."""
    for name, value in _stored(model):
        for alias in _aliases(model, name):
            kind = checkpoint.tensors[alias].dtype if alias in checkpoint.tensors else ""
            if kind and value.is_floating_point() != ("float" in TORCH_DTYPES[kind]):
                raise Unsupported(
                    f"{checkpoint.path}: {alias} is {kind} where the model computes with {value.dtype}: a quantised "
                    "weight, which means nothing without its scales; use the unquantised checkpoint",
                    component=_IMAGE_COMPONENT,
                )


def fill(checkpoint: Checkpoint, layout: Layout, path: str, threads: int) -> None:
    """Bring every weight into its place in the image at ``path``; raises InvalidConfig on a short file."""
    with map_image(path, layout.size_bytes) as view:
        if not all(piece.source for piece in layout.pieces):
            _fill_as_transformers(checkpoint, layout, view)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda piece: _read(checkpoint.tensors[piece.source], piece, view), layout.pieces))
    for name, other in layout.equal.items():
        pair = [bytearray(checkpoint.tensors[each].size_bytes) for each in (name, other)]
        for each, buffer in zip((name, other), pair, strict=True):
            _read_into(checkpoint.tensors[each], memoryview(buffer))
        if pair[0] != pair[1]:
            raise _untied(checkpoint, name, other)


def _fill_as_transformers(checkpoint: Checkpoint, layout: Layout, image: mmap.mmap) -> None:
    """Load a model by its class and copy its weights: while that lasts, the host holds them twice."""
    from safetensors import safe_open

    model = build_skeleton(layout.config, layout.head, layout.dtype, checkpoint.path)
    with ExitStack() as files:
        opened = {
            file: files.enter_context(safe_open(file, "pt"))
            for file in {tensor.file for tensor in checkpoint.tensors.values()}
        }
        slices = {name: opened[tensor.file].get_slice(name) for name, tensor in checkpoint.tensors.items()}
        _load(model, slices, layout.dtype, "cpu")
    weights = dict(_stored(model))
    for name, other in layout.tied.items():
        if weights[name] is not weights[other] and not torch.equal(weights[name], weights[other]):
            raise _untied(checkpoint, name, other)
    for piece in layout.pieces:
        target = torch.frombuffer(image, dtype=torch.uint8, count=piece.size_bytes, offset=piece.offset)
        target.view(getattr(torch, piece.dtype)).view(piece.shape).copy_(weights[piece.name])
        del target


def _untied(checkpoint: Checkpoint, name: str, other: str) -> InvalidConfig:
    return InvalidConfig(
        f"{checkpoint.path}: config.json ties {name} to {other}, and the file has other numbers for it; "
        "set tie_word_embeddings: false, or remove the one that is not meant",
        component=_IMAGE_COMPONENT,
    )


class Image:
    """An image mapped into this process, and pinned for its device."""

    def __init__(self, path: str, layout: Layout, backend: DeviceBackend) -> None:
        self.layout = layout
        self.bytes = torch.frombuffer(map_image(path, layout.size_bytes), dtype=torch.uint8)
        self._backend = backend
        backend.pin(self.bytes)

    def close(self) -> None:
        """Unpin and forget: the mapping goes with the last tensor that lies in it. Idempotent."""
        if self.bytes.nbytes:
            held, self.bytes = self.bytes, torch.empty(0, dtype=torch.uint8)
            self._backend.unpin(held)


def map_image(path: str, size_bytes: int) -> mmap.mmap:
    """Return a shared, writable mapping of an image file, in huge pages if the kernel gives them to shared memory."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        mapped = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _stored(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (tied ones under each of their names) and the buffers that a checkpoint holds."""
    yield from model.named_parameters(remove_duplicate=False)
    kept = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _piece(plan: ShardingPlan, name: str, value: torch.Tensor, source: str, offset: int) -> Piece:
    placement = plan.placement(name)
    shape = tuple(value.shape)
    return Piece(
        name=name,
        source=source,
        offset=offset,
        shape=shape[::-1] if placement.transposed else shape,
        dtype=str(value.dtype).removeprefix("torch."),
        transposed=placement.transposed,
        cut=placement.cut,
    )


def _aliases(model: nn.Module, name: str) -> Iterator[str]:
    """The names under which a checkpoint may hold a weight: with and without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    yield name
    yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name


def _read(tensor: Tensor, piece: Piece, image: mmap.mmap) -> None:
    """Bring one tensor into the image, converted and transposed if the layout says so."""
    straight = TORCH_DTYPES[tensor.dtype] == piece.dtype and not piece.transposed
    whole = memoryview(image)
    target = whole[piece.offset : piece.offset + piece.size_bytes]
    buffer = target if straight else memoryview(bytearray(tensor.size_bytes))
    try:
        _read_into(tensor, buffer)
        if not straight and tensor.size_bytes:
            loaded = torch.frombuffer(buffer, dtype=getattr(torch, TORCH_DTYPES[tensor.dtype])).view(tensor.shape)
            placed = torch.frombuffer(target, dtype=getattr(torch, piece.dtype)).view(piece.shape)
            placed.copy_(loaded.t() if piece.transposed else loaded)
            del loaded, placed
    finally:
        target.release()
        whole.release()


def _read_into(tensor: Tensor, buffer: memoryview) -> None:
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.offset)
        done = 0
        while done < tensor.size_bytes:
            count = stream.readinto(buffer[done:])
            if not count:
                raise InvalidConfig(
                    f"{tensor.file} ended after {tensor.offset + done} bytes; it was replaced or truncated",
                    component=_IMAGE_COMPONENT,
                )
            done += count
