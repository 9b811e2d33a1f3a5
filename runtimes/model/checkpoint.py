"""Checkpoints: their files and the layout of their weights."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from manager.errors import InvalidConfig, Unsupported, exhaustion

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


class Cut(StrEnum):
    """How a stored tensor is shared among the ranks, always along its first stored dimension."""

    WHOLE = "whole"  #: every rank has all of it
    ROWS = "rows"  #: equal contiguous parts
    HEADS = "heads"  #: key and value projections: whole heads, each given to several ranks where heads are few


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of the image. ``shape`` is the shape as stored; a transposed one is stored as (in, out)."""

    name: str
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
    head: str
    dtype: str

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

_COMPONENT = "model.checkpoint"
_AGAIN = "download the checkpoint again"
_CORRUPT = "the file is truncated or corrupt: download it again"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.pkl")
_WATCHED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


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


def open_checkpoint(path: Path) -> Checkpoint:
    """Read config and headers; raises InvalidConfig or Unsupported, naming the file at fault and the remedy."""
    if not path.is_dir():
        raise _invalid(path, "is not a directory", "point model.path at a Hugging Face checkpoint directory")
    mark = fingerprint(path)
    config = _read_json(path / "config.json", "a Hugging Face checkpoint has one next to its weights")
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else "unknown"
        raise Unsupported(
            f"{path}: the checkpoint is quantised ({name}), and quantised weights cannot be sharded here; "
            "use the unquantised checkpoint, or an external engine (model.engine_url)",
            component=_COMPONENT,
        )
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path):
        tensors.update(_read_header(file))
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):
        raise _invalid(
            path / "config.json",
            f"asks for {layers} layers where there are {len(tensors)} tensors",
            "config.json and the weights belong to different models",
        )
    return Checkpoint(path=path, config=config, tensors=tensors, fingerprint=mark)


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
            digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\n".encode())
    return digest.hexdigest()[:16]


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint, by its index if it has one."""
    if (path / _INDEX).is_file():
        index = _read_json(path / _INDEX, _AGAIN)
        entries = index.get("weight_map")
        if not isinstance(entries, Mapping) or not entries:
            raise _invalid(path / _INDEX, "has no weight_map", _AGAIN)
        files = [path / str(name) for name in sorted(set(entries.values()))]
        for file in files:
            if file.parent != path:
                raise _invalid(path / _INDEX, f"names {file}, outside the checkpoint", "use a trusted checkpoint")
            if not file.is_file():
                raise _invalid(file, f"is missing but named by {_INDEX}", _AGAIN)
        return files
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickles = [file.name for pattern in _PICKLES for file in path.glob(pattern)]
    if pickles:
        raise _invalid(
            path / pickles[0],
            "is a pickle, which runs code when it is loaded, and there is no safetensors file",
            "convert it once: transformers' model.save_pretrained(directory) writes model.safetensors",
        )
    raise _invalid(path / "model.safetensors", "is missing", _AGAIN)


def _read_header(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one safetensors file, each checked against the file's real size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise _invalid(file, f"has only {size} bytes", _CORRUPT)
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(HEADER_BYTES_MAX, size - 8):
            raise _invalid(file, f"claims a header of {header_bytes} bytes in a file of {size}", _CORRUPT)
        raw = stream.read(header_bytes)
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


def _read_json(file: Path, remedy: str) -> Mapping[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise _invalid(file, "is missing", remedy) from error
    except (OSError, ValueError, RecursionError) as error:
        if short := exhaustion(error, _COMPONENT):
            raise short from None
        raise _invalid(file, f"cannot be read as JSON ({error})", _AGAIN) from error
    if not isinstance(value, dict):
        raise _invalid(file, "is no JSON object", _AGAIN)
    return value


def _invalid(file: Path, what: str, remedy: str) -> InvalidConfig:
    return InvalidConfig(f"{file} {what}; {remedy}", component=_COMPONENT, detail={"file": str(file)})


#: Checkpoint files that run code when they are read.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HEADER_LIMIT_BYTES = 100 * 2**20


def checkpoint_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None."""
    if not path.exists():
        return f"no checkpoint at {path}: put a directory with config.json and *.safetensors there"
    if not path.is_dir():
        return f"{path} is a file: name the directory that holds config.json and *.safetensors"
    tensors = sorted(path.glob("*.safetensors"))
    if not tensors:
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickles:
            return (
                f"{path / pickles[0]} is a pickle, which can run code when it is read: "
                "convert it to safetensors (model.save_pretrained(directory, safe_serialization=True))"
            )
        return f"{path} holds no *.safetensors: the weights are missing"
    if not (path / "config.json").is_file():
        return f"{path} holds no config.json: the architecture is unknown"
    return next((problem for file in tensors if (problem := _tensors_problem(file)) is not None), None)


def _tensors_problem(file: Path) -> str | None:
    """A safetensors file begins with the length of its JSON header."""
    try:
        with file.open("rb") as opened:
            head = opened.read(9)
    except OSError as error:
        if short := exhaustion(error, "model"):
            raise short from None
        return f"{file} cannot be read: {error.strerror}"
    header_bytes = int.from_bytes(head[:8], "little")
    if len(head) == 9 and head[8:] == b"{" and header_bytes < _HEADER_LIMIT_BYTES:
        return None
    kind = "a pickle" if head[:1] == b"\x80" or head[:2] == b"PK" else "no safetensors file"
    return f"{file} is {kind} in spite of its name: convert the checkpoint to safetensors"
