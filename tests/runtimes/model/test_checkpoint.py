"""A checkpoint that cannot be used is refused by name; one image serves every DoP; long inputs are cut on one side."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from manager.errors import InvalidConfig, InvalidInput, Unsupported
from manager.function import ModelAction, ModelSpec
from runtimes.model.checkpoint import Cut, Head, Layout, Piece, fingerprint, open_checkpoint, shard
from runtimes.model.host_images import Tokens, check_ids


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    return tmp_path


def safetensors(size: int = 16, **changes: object) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}
    header = json.dumps({"__metadata__": {}, "weight": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def test_a_sound_checkpoint_tells_where_each_tensor_lies(directory: Path) -> None:
    tensor = open_checkpoint(directory).tensors["weight"]
    size = (directory / "model.safetensors").stat().st_size
    assert (tensor.offset + 16, tensor.size_bytes, tensor.shape) == (size, 16, (2, 2))


INDEX = "model.safetensors.index.json"
BROKEN = r"model\.safetensors.*{}.*download it again"


@pytest.mark.parametrize(
    ("files", "story"),
    [
        ({"config.json": None}, r"config\.json is missing"),
        ({"model.safetensors": None, "pytorch_model.bin": b""}, r"pytorch_model\.bin is a pickle.*save_pretrained"),
        ({INDEX: b'{"weight_map": {"other": "m2.safetensors"}}'}, r"m2\.safetensors is missing but named"),
        ({INDEX: b'{"weight_map": {"weight": "../other.safetensors"}}'}, "outside the checkpoint"),
        ({"model.safetensors": b"abc"}, BROKEN.format("has only 3 bytes")),
        ({"model.safetensors": struct.pack("<Q", 2**60) + b"{}"}, BROKEN.format("claims a header")),
        ({"model.safetensors": struct.pack("<Q", 4) + b"{{{{"}, BROKEN.format("no JSON")),
        ({"model.safetensors": struct.pack("<Q", 2) + b"[]"}, BROKEN.format("no JSON object")),
        ({"model.safetensors": struct.pack("<Q", 10**5) + b"[" * 10**5}, BROKEN.format("no JSON")),
        ({"model.safetensors": safetensors(15)}, "ends before tensor 'weight'"),
        ({"model.safetensors": safetensors(shape=[3, 2])}, "weight"),
        ({"model.safetensors": safetensors(data_offsets=[4, 16])}, "weight"),
        ({"model.safetensors": safetensors(dtype=None, shape=None)}, "weight"),
        ({"model.safetensors": safetensors(dtype="F8_E4M3")}, "F8_E4M3"),
        ({"config.json": b'{"quantization_config": {"quant_method": "awq"}}'}, "awq"),
        (
            {"config.json": b'{"model_type": "llama", "num_hidden_layers": 1000000000}'},
            "asks for 1000000000 layers where there are 1 tensors",
        ),
    ],
)
def test_what_is_missing_broken_or_contradicts_itself_is_refused_by_name(
    directory: Path, files: Mapping[str, bytes | None], story: str
) -> None:
    for name, data in files.items():
        if data is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(data)
    with pytest.raises((InvalidConfig, Unsupported), match=story):
        open_checkpoint(directory)


def test_a_checkpoint_that_says_it_is_not_quantised_is_sound(directory: Path) -> None:
    (directory / "config.json").write_text('{"quantization_config": null}')
    assert open_checkpoint(directory).tensors


def test_a_replaced_file_changes_the_fingerprint(directory: Path) -> None:
    before = fingerprint(directory)
    (directory / "new").write_bytes(safetensors())
    (directory / "new").rename(directory / "model.safetensors")
    assert fingerprint(directory) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_description_that_is_larger_than_any_or_no_file_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("runtimes.model.checkpoint.SMALL_MAX_BYTES", 100)
    (directory / name).write_text('{"weight_map": {}, "model_type": "llama"' + " " * 100 + "}")
    with pytest.raises(InvalidConfig, match="more than 100 bytes"):
        open_checkpoint(directory)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(InvalidConfig, match="no plain file"):
        open_checkpoint(directory)


def layout(**changes: object) -> Layout:
    rows = Piece(name="rows", source="rows", offset=0, shape=(16, 4), dtype="float32", transposed=False, cut=Cut.ROWS)
    heads = Piece(
        name="heads", source="heads", offset=256, shape=(8, 4), dtype="float32", transposed=False, cut=Cut.HEADS
    )
    norm = Piece(name="norm", source="norm", offset=512, shape=(4,), dtype="float32", transposed=False, cut=Cut.WHOLE)
    values: dict[str, object] = {
        "pieces": (rows, heads, norm),
        "tied": {},
        "equal": {},
        "size_bytes": 4096,
        "kv_heads": 2,
        "head_dim": 4,
        "refusals": {8: "12 attention heads do not divide by 8"},
        "positions_max": 0,
        "vocab_size": 0,
        "config": {},
        "head": Head.LM,
        "dtype": "float32",
        **changes,
    }
    return Layout(**values)  # type: ignore[arg-type]  # checked by the dataclass


def rows_of(rank: int, dop: int, name: str) -> tuple[int, int]:
    """First row and number of rows that a rank copies of a piece."""
    part = shard(layout(), rank, dop)
    piece = next(piece for piece in layout().pieces if piece.name == name)
    view = part.views[name]
    copy = next(c for c in part.copies if c.target <= view.offset < c.target + c.size_bytes)
    first = (copy.source + view.offset - copy.target - piece.offset) // (piece.size_bytes // piece.shape[0])
    return first, view.shape[0]


@pytest.mark.parametrize("dop", [1, 2, 4])
def test_the_ranks_share_the_rows_without_gap_or_overlap(dop: int) -> None:
    assert [rows_of(rank, dop, "rows") for rank in range(dop)] == [(rank * 16 // dop, 16 // dop) for rank in range(dop)]


def test_few_heads_are_given_whole_to_several_ranks() -> None:
    assert [rows_of(rank, 4, "heads") for rank in range(4)] == [(0, 4), (0, 4), (4, 4), (4, 4)]


def test_what_is_not_cut_is_given_to_every_rank() -> None:
    assert {rows_of(rank, 2, "norm") for rank in range(2)} == {(0, 4)}


def test_a_dop_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="12 attention heads do not divide by 8"):
        shard(layout(), 0, 8)


WORDS = [f"w{number}" for number in range(9)]


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    """Every word is a token; a text begins with <s>, a conversation with nothing."""
    vocabulary = {word: number for number, word in enumerate(["<s>", *WORDS])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<s>"))
    model.pre_tokenizer = WhitespaceSplit()
    model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=model, bos_token="<s>")
    made.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    made.save_pretrained(tmp_path)
    return Tokens(tmp_path)


@pytest.mark.promise("An input that is too long for a model is refused, or cut on one side in every form.")
def test_texts_ids_and_conversations_lose_the_same_side(tokens: Tokens) -> None:
    text, ids = " ".join(WORDS), [range(1, 10)]
    chat = [[{"role": "user", "content": " ".join(WORDS[:4])}, {"role": "user", "content": " ".join(WORDS[4:])}]]
    kept = {"left": (6, 7, 8, 9), "right": (1, 2, 3, 4)}
    for side, last in kept.items():
        assert tokens.encode([text], 5, side).ids == ((0, *last),), "what the tokenizer adds stays"
        assert check_ids([list(*ids)], 4, side).ids == (last,)
        (row,) = tokens.encode_chats(chat, 4, side, continued=False).ids
        assert row in (last, (0, *last[:3]))
    assert check_ids([[0, *range(1, 10)]], 4, "left", 0).ids == ((0, 7, 8, 9),), "so does what a sequence begins with"
    assert check_ids([[0, *range(1, 10)]], 1, "left", 0).ids == ((0,),)
    assert tokens.encode(["w0", text], 3, "left").truncated == (1,)
    with pytest.raises(InvalidInput, match="overlong: truncate"):
        tokens.encode([text], 5, "")
    with pytest.raises(InvalidInput, match="overlong: truncate"):
        check_ids([list(*ids)], 4, "")


@pytest.mark.parametrize(
    ("action", "side"), [("score", "left"), ("generate", "left"), ("logprobs", "right"), ("embed", "right")]
)
def test_the_side_follows_what_is_asked_unless_it_is_said(action: str, side: str) -> None:
    spec = ModelSpec(path=Path("m"), action=ModelAction(action), overlong="truncate")
    assert spec.cut == side
    assert ModelSpec(path=Path("m"), action=ModelAction(action), overlong="truncate", truncate="right").cut == "right"
    assert ModelSpec(path=Path("m"), action=ModelAction(action), truncate="left").cut == ""
