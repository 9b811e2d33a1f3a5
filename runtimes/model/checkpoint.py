"""Checkpoints: their files and the layout of their weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from manager.errors import CodedError, InvalidConfig, Unsupported, exhaustion
from manager.function import ModelAction

#: Every tensor starts at a multiple of this, in the image and in the arena: no copy or kernel sees a ragged start.
ALIGN_BYTES = 256
#: Images and slots are whole pages.
PAGE_BYTES = 4096

#: Bytes of one element by torch's name of its dtype.
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Head(StrEnum):
    """What stands on top of the base model."""

    LM = "lm"  #: next-token distribution: logprobs, generate
    SCORE = "score"  #: sequence classification
    STEPS = "step_scores"  #: token classification
    BASE = "base"  #: hidden states: embed


HEADS: Mapping[ModelAction, Head] = {
    ModelAction.SCORE: Head.SCORE,
    ModelAction.STEP_SCORES: Head.STEPS,
    ModelAction.LOGPROBS: Head.LM,
    ModelAction.GENERATE: Head.LM,
    ModelAction.EMBED: Head.BASE,
}


class Cut(StrEnum):
    """How a stored tensor is shared among the ranks, always along its first stored dimension."""

    WHOLE = "whole"  #: every rank has all of it
    ROWS = "rows"  #: equal contiguous parts
    HEADS = "heads"  #: key and value projections: whole heads, each given to several ranks where heads are few


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How the hidden states of a text become one vector, as the checkpoint declares for sentence-transformers.

    Without such a declaration: the mean over the tokens, scaled to length one.
    """

    mode: str = "mean"
    normalized: bool = True
    #: What is put before a text, by name, and the name that is taken where an input names none; empty: nothing.
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    #: Most tokens that the model was made for; 0 where it is not declared.
    max_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of the image. ``shape`` is the shape as stored; a transposed one is stored as (in, out)."""

    name: str
    #: Its name in the checkpoint; empty where transformers makes it of several tensors, or of one by another name.
    source: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    transposed: bool
    cut: Cut

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A whole image: pieces in layer order. One image serves every DoP that `refusals` does not name."""

    pieces: tuple[Piece, ...]
    #: Tied parameter name -> the name of the piece it shares.
    tied: Mapping[str, str]
    #: Tensors of the checkpoint that are not read because they must be equal to another one: tied ones.
    equal: Mapping[str, str]
    size_bytes: int
    #: Heads of keys and values, and their width; both 0 where the model has no sharding plan.
    kv_heads: int
    head_dim: int
    #: DoP -> why the model cannot be sharded so; absent means it can.
    refusals: Mapping[int, str]
    #: Longest input in tokens that the model's positions allow; 0 where it has no bound.
    positions_max: int
    vocab_size: int
    #: What a skeleton is built from: config.json as it was, the head, and the dtype of the weights.
    config: Mapping[str, object]
    head: Head
    dtype: str
    pooling: Pooling = Pooling()

    def check_dop(self, dop: int) -> None:
        """Raise Unsupported with the name of what does not divide."""
        if dop in self.refusals:
            raise Unsupported(f"DoP {dop}: {self.refusals[dop]}", component="model.sharding")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRange:
    """One contiguous range to copy: from the image, into the slot."""

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where a parameter lies in its slot. ``shape`` is as stored, before a transposed view is turned."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds: the copies that bring it, in layer order, and the views to bind."""

    rank: int
    dop: int
    size_bytes: int
    copies: tuple[CopyRange, ...]
    views: Mapping[str, View]


def shard(layout: Layout, rank: int, dop: int) -> Shard:
    """Return the part of ``rank`` among ``dop``; raises Unsupported if the layout does not allow the DoP."""
    layout.check_dop(dop)
    copies: list[CopyRange] = []
    views: dict[str, View] = {}
    end = 0
    for piece in layout.pieces:
        first, last = _rows(layout, piece, rank, dop)
        row_bytes = piece.size_bytes // (piece.shape[0] if piece.shape else 1)
        size = (last - first) * row_bytes
        shape = (last - first, *piece.shape[1:]) if piece.shape else ()
        views[piece.name] = View(
            offset=end, size_bytes=size, shape=shape, dtype=piece.dtype, transposed=piece.transposed
        )
        _append(copies, CopyRange(source=piece.offset + first * row_bytes, target=end, size_bytes=size))
        end += align(size, ALIGN_BYTES)
    return Shard(rank=rank, dop=dop, size_bytes=align(end, PAGE_BYTES), copies=tuple(copies), views=views)


def align(size: int, step: int) -> int:
    """Return ``size`` rounded up to a multiple of ``step``."""
    return (size + step - 1) // step * step


def _rows(layout: Layout, piece: Piece, rank: int, dop: int) -> tuple[int, int]:
    """Return the first and last row (exclusive) of ``piece`` for one rank."""
    rows = piece.shape[0] if piece.shape else 1
    if dop == 1 or piece.cut is Cut.WHOLE:
        return 0, rows
    if piece.cut is Cut.HEADS and dop > layout.kv_heads:
        head = rank * layout.kv_heads // dop
        return head * layout.head_dim, (head + 1) * layout.head_dim
    return rank * rows // dop, (rank + 1) * rows // dop


def _append(copies: list[CopyRange], copy: CopyRange) -> None:
    """Add a range, joined to its neighbour if only alignment lies between them."""
    if copies:
        last = copies[-1]
        gap = copy.source - last.source - last.size_bytes
        if copy.source - last.source == copy.target - last.target and 0 <= gap < ALIGN_BYTES:
            joined = copy.source + copy.size_bytes - last.source
            copies[-1] = CopyRange(source=last.source, target=last.target, size_bytes=joined)
            return
    copies.append(copy)


#: A header larger than this is taken for garbage: the largest public checkpoints stay under 10 MiB.
HEADER_BYTES_MAX = 100 * 2**20

#: torch's name of each safetensors dtype. The 8-bit floats mean a quantised checkpoint and are refused.
TORCH_DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

#: Bytes of a configuration or an index: the largest that is known has a third.
SMALL_MAX_BYTES = 32 * 2**20

_COMPONENT = "model.checkpoint"
_AGAIN = "download the checkpoint again"
_CORRUPT = "the file is truncated or corrupt: download it again"
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_WATCHED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*/config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Where one tensor lies: file, absolute offset and bytes; its safetensors dtype and its shape."""

    file: Path
    offset: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checked Hugging Face directory."""

    path: Path
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    #: Changes when any file that matters is replaced.
    fingerprint: str

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def open_checkpoint(path: Path, head: Head | None = None) -> Checkpoint:
    """Read config and headers, no weight; raises InvalidConfig or Unsupported, naming the file and the remedy.

    With a ``head`` also what the checkpoint says it is must fit that.
    """
    if not path.exists():
        remedy = "put config.json and *.safetensors there (hf download NAME --local-dir DIRECTORY)"
        raise _invalid(path, "is no checkpoint: there is no such directory", remedy)
    if not path.is_dir():
        raise _invalid(path, "is not a directory", "name the one that holds config.json and *.safetensors")
    mark = fingerprint(path)
    if (path / "adapter_config.json").is_file():
        raise Unsupported(
            f"{path / 'adapter_config.json'}: a LoRA adapter is not applied here; merge it into its base once "
            "(peft: model.merge_and_unload().save_pretrained(directory)) and serve that directory",
            component=_COMPONENT,
        )
    files = weight_files(path)
    config = _read_json(path / "config.json", "a Hugging Face checkpoint has one next to its weights")
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else "unknown"
        raise Unsupported(
            f"{path}: the checkpoint is quantised ({name}), and quantised weights cannot be sharded here; "
            "use the unquantised checkpoint, or an engine (model.engine)",
            component=_COMPONENT,
        )
    if head is not None:
        _check_architecture(path, config, head)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _read_header(file):
            if name in tensors:
                raise _invalid(file, f"holds {name}, and so does {tensors[name].file.name}", _AGAIN)
            tensors[name] = tensor
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):
        raise _invalid(
            path / "config.json",
            f"asks for {layers} layers where there are {len(tensors)} tensors",
            "config.json and the weights belong to different models",
        )
    return Checkpoint(path=path, config=config, tensors=tensors, fingerprint=mark)


def checkpoint_problem(path: Path, action: ModelAction) -> str | None:
    """Return what is wrong with a checkpoint directory as far as it is seen without torch, or None."""
    try:
        open_checkpoint(path, HEADS[action])
        if HEADS[action] is Head.BASE:
            read_pooling(path)
    except CodedError as error:
        return error.message
    return None


#: How the name of a class of transformers ends -> the head that it has (None: one that no action asks for), in words.
_ENDINGS: Mapping[str, tuple[Head | None, str]] = {
    "ForCausalLM": (Head.LM, "a language model: use action logprobs or generate"),
    "LMHeadModel": (Head.LM, "a language model: use action logprobs or generate"),
    "ForSequenceClassification": (Head.SCORE, "a reward model or classifier: use action score"),
    "ForTokenClassification": (Head.STEPS, "a model with a score for each token: use action step_scores"),
    "ForMaskedLM": (None, "a masked language model: use action embed"),
    "ForPreTraining": (None, "a pre-trained model: use action embed"),
    "ForQuestionAnswering": (None, "a model that finds answers in a text, which no action asks for"),
    "ForMultipleChoice": (None, "a model that chooses among answers, which no action asks for"),
    "ForNextSentencePrediction": (None, "a model that joins sentences, which no action asks for"),
    "Model": (Head.BASE, "a model without a head: use action embed"),
}


def _check_architecture(path: Path, config: Mapping[str, object], head: Head) -> None:
    """Raise InvalidConfig where the class that config.json names has another head than is asked for.

    An embedding needs no head: any text model has hidden states. A class that is not known by its name is looked for
    when the model is made.
    """
    names = config.get("architectures")
    declared = str(names[0]) if isinstance(names, list) and names else ""
    ending = max((each for each in _ENDINGS if declared.endswith(each)), key=len, default="")
    if ending == "Model" and "For" in declared:
        return  # a head of its own
    if head is Head.BASE or not ending or _ENDINGS[ending][0] is head:
        return
    wanted = ", ".join(action for action, needed in HEADS.items() if needed is head)
    raise _invalid(
        path / "config.json", f"declares {declared}, which has no head for {wanted}", f"it is {_ENDINGS[ending][1]}"
    )


def read_pooling(path: Path) -> Pooling:
    """Return what the files of sentence-transformers declare; raises Unsupported for what is not computed here."""
    if not (path / "modules.json").is_file():
        return Pooling()
    try:
        modules = json.loads(read_small(path / "modules.json"))
        steps = [(str(each["type"]).rpartition(".")[2], path / str(each["path"])) for each in modules]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _invalid(path / "modules.json", f"cannot be read ({error!r})", _AGAIN) from error
    kinds = [kind for kind, _ in steps if kind != "Dropout"]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or steps[0][1] != path:
        raise Unsupported(
            f"{path / 'modules.json'}: embed computes Transformer, Pooling and Normalize, and this is "
            f"{', '.join(kinds)}; use an engine (model.engine)",
            component=_COMPONENT,
        )
    pooling = _read_json(steps[1][1] / "config.json", _AGAIN)
    sentences = _read_optional(path / "sentence_bert_config.json")
    declared = _read_optional(path / "config_sentence_transformers.json")
    prompts = declared.get("prompts") or {}
    default = declared.get("default_prompt_name") or ""
    max_tokens = sentences.get("max_seq_length") or 0
    mode = _pooling_mode(pooling)
    if mode not in POOLING_MODES:
        _refuse_pooling(steps[1][1], f"the pooling {mode!r}")
    if sentences.get("do_lower_case"):
        _refuse_pooling(path / "sentence_bert_config.json", "do_lower_case")
    if declared.get("similarity_fn_name") == "maxsim" or declared.get("model_type", "SentenceTransformer") not in (
        "SentenceTransformer",
        None,
    ):
        _refuse_pooling(path / "config_sentence_transformers.json", f"a {declared.get('model_type')}")
    if not isinstance(prompts, Mapping) or not isinstance(max_tokens, int) or (default and default not in prompts):
        raise _invalid(path / "config_sentence_transformers.json", "names no usable prompts", _AGAIN)
    if pooling.get("include_prompt") is False and any(prompts.values()):
        _refuse_pooling(steps[1][1], "include_prompt: false, with prompts")
    return Pooling(
        mode=mode,
        normalized=kinds[-1] == "Normalize",
        prompts={str(name): str(prompt or "") for name, prompt in prompts.items()},
        default_prompt=str(default),
        max_tokens=max_tokens,
    )


POOLING_MODES = ("cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")


def _pooling_mode(pooling: Mapping[str, object]) -> str:
    """Return the way of pooling in its newer words; several are joined by a comma."""
    declared = pooling.get("pooling_mode")
    if declared is None:
        prefix, ending = "pooling_mode_", "_tokens"
        chosen = [
            key.removeprefix(prefix) for key, value in pooling.items() if key.startswith(prefix) and value is True
        ]
        names = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}
        declared = [names.get(key, key if key.startswith("mean_sqrt") else key.removesuffix(ending)) for key in chosen]
    return ",".join(map(str, declared)) if isinstance(declared, list) else str(declared)


def _read_optional(file: Path) -> Mapping[str, object]:
    return _read_json(file, _AGAIN) if file.is_file() else {}


def _refuse_pooling(file: Path, what: str) -> None:
    raise Unsupported(f"{file}: embed does not compute {what}; use an engine (model.engine)", component=_COMPONENT)


def fingerprint(path: Path) -> str:
    """Digest of names, sizes, inodes and times of the files that make the checkpoint; empty files included."""
    digest = hashlib.sha256()
    for pattern in _WATCHED:
        for file in sorted(path.glob(pattern)):
            try:
                stat = file.stat()
            except OSError as error:
                if short := exhaustion(error, _COMPONENT):
                    raise short from None
                raise _invalid(file, f"cannot be read ({error.strerror})", "restore the file") from error
            digest.update(f"{file.relative_to(path)}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\n".encode())
    return digest.hexdigest()[:16]


def weight_files(path: Path) -> list[Path]:
    """Return the files of the weights: those of the index, else model.safetensors, else the only safetensors file."""
    files = sorted(path.glob("*.safetensors"))
    if (path / _INDEX).exists():
        index = _read_json(path / _INDEX, _AGAIN)
        entries = index.get("weight_map")
        if not isinstance(entries, Mapping) or not entries:
            raise _invalid(path / _INDEX, "has no weight_map", _AGAIN)
        named = [path / str(name) for name in sorted(set(entries.values()))]
        for file in named:
            if file.parent != path:
                raise _invalid(path / _INDEX, f"names {file}, outside the checkpoint", "use a trusted checkpoint")
            if not file.is_file():
                raise _invalid(file, f"is missing but named by {_INDEX}", _AGAIN)
        if path / _WHOLE in files and path / _WHOLE not in named:
            # transformers would read the one, and others the other.
            raise _invalid(path / _INDEX, f"does not name {_WHOLE} beside it", "remove the one that is not meant")
        return named
    if path / _WHOLE in files:
        return [path / _WHOLE]
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise _invalid(path, f"holds {names} without an index", f"name the one that is meant {_WHOLE}")
    if files:
        return files
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise _invalid(
            path / pickles[0],
            "is a pickle, which runs code when it is loaded, and there is no safetensors file",
            "convert it once: transformers' model.save_pretrained(directory) writes model.safetensors",
        )
    raise _invalid(path, "holds no *.safetensors", "the weights are missing: download them")


def _read_header(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one safetensors file, each checked against the file's real size."""
    try:
        size, opened = file.stat().st_size, file.open("rb")
    except OSError as error:
        if short := exhaustion(error, _COMPONENT):
            raise short from None
        raise _invalid(file, f"cannot be read ({error.strerror})", "restore the file") from error
    with opened as stream:
        prefix, begin = stream.read(8), stream.read(1)
        if begin != b"{" and (prefix[:1] == b"\x80" or prefix[:2] == b"PK"):
            raise _invalid(file, "is a pickle in spite of its name", "convert the checkpoint to safetensors")
        if len(prefix) < 8:
            raise _invalid(file, f"has only {size} bytes", _CORRUPT)
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(HEADER_BYTES_MAX, size - 8):
            raise _invalid(file, f"claims a header of {header_bytes} bytes in a file of {size}", _CORRUPT)
        raw = begin + stream.read(header_bytes - 1)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _invalid(file, "has a header that is no JSON", _CORRUPT) from error
    if not isinstance(header, dict):
        raise _invalid(file, "has a header that is no JSON object", _CORRUPT)
    start = 8 + header_bytes
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _tensor(file, name, entry, start, size)


def _tensor(file: Path, name: str, entry: object, start: int, size: int) -> Tensor:
    try:
        assert isinstance(entry, dict)
        dtype = str(entry["dtype"])
        shape = tuple(int(n) for n in entry["shape"])
        first, last = (int(n) for n in entry["data_offsets"])
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise _invalid(file, f"has a broken entry for tensor {name!r}", _CORRUPT) from error
    if dtype not in TORCH_DTYPES:
        raise Unsupported(
            f"{file}: tensor {name!r} is {dtype}, a quantised or unknown dtype; use an unquantised checkpoint",
            component=_COMPONENT,
        )
    if last - first != math.prod(shape) * DTYPE_BYTES[TORCH_DTYPES[dtype]] or first < 0:
        raise _invalid(file, f"tensor {name!r} of shape {shape} does not fill its {last - first} bytes", _CORRUPT)
    if start + last > size:
        raise _invalid(file, f"ends before tensor {name!r} does ({size} of {start + last} bytes)", _CORRUPT)
    return Tensor(file=file, offset=start + first, size_bytes=last - first, dtype=dtype, shape=shape)


def read_small(file: Path) -> bytes:
    """Return a file that describes others; raises OSError, and ValueError for what is larger or no plain file."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError("it is no plain file")
        data = opened.read(SMALL_MAX_BYTES + 1)
    if len(data) > SMALL_MAX_BYTES:
        raise ValueError(f"it has more than {SMALL_MAX_BYTES} bytes")
    return data


def _read_json(file: Path, remedy: str) -> Mapping[str, object]:
    try:
        value = json.loads(read_small(file), object_hook=_plain_number)
    except FileNotFoundError as error:
        raise _invalid(file, "is missing", remedy) from error
    except (OSError, ValueError, RecursionError) as error:
        if short := exhaustion(error, _COMPONENT):
            raise short from None
        raise _invalid(file, f"cannot be read as JSON ({error})", _AGAIN) from error
    if not isinstance(value, dict):
        raise _invalid(file, "is no JSON object", _AGAIN)
    return value


def _plain_number(value: dict[str, object]) -> object:
    """Return what transformers writes as an object because JSON has no word for it: ``{"__float__": "Infinity"}``."""
    return float(str(value["__float__"])) if value.keys() == {"__float__"} else value


def _invalid(file: Path, what: str, remedy: str) -> InvalidConfig:
    return InvalidConfig(f"{file} {what}; {remedy}", component=_COMPONENT, detail={"file": str(file)})
