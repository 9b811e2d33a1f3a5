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
    write_safetensors(tmp_path / "model.safetensors")
    return tmp_path


def write_safetensors(file: Path, changes: Mapping[str, object] | None = None, *, size: int = 16) -> None:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **(changes or {})}
    header = json.dumps({"__metadata__": {}, "weight": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def test_a_sound_checkpoint_tells_where_each_tensor_lies(directory: Path) -> None:
    tensor = open_checkpoint(directory).tensors["weight"]
    size = (directory / "model.safetensors").stat().st_size
    assert (tensor.offset + 16, tensor.size_bytes, tensor.shape) == (size, 16, (2, 2))


def test_a_missing_file_is_named(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(InvalidConfig, match=r"config\.json is missing"):
        open_checkpoint(directory)


def test_a_pickle_is_refused_with_the_way_to_convert_it(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InvalidConfig, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        open_checkpoint(directory)


def test_a_shard_that_the_index_names_must_be_there(directory: Path) -> None:
    index = {"weight_map": {"weight": "model.safetensors", "other": "model-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidConfig, match=r"model-00002\.safetensors is missing but named"):
        open_checkpoint(directory)


def test_an_index_cannot_lead_out_of_the_checkpoint(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "../other.safetensors"}}')
    with pytest.raises(InvalidConfig, match="outside the checkpoint"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("content", "story"),
    [
        (b"abc", "has only 3 bytes"),
        (struct.pack("<Q", 2**60) + b"{}", "claims a header"),
        (struct.pack("<Q", 4) + b"{{{{", "no JSON"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 10**5) + b"[" * 10**5, "no JSON"),
    ],
)
def test_a_corrupt_header_is_refused(directory: Path, content: bytes, story: str) -> None:
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidConfig, match=rf"model\.safetensors.*{story}.*download it again"):
        open_checkpoint(directory)


def test_a_truncated_file_is_refused(directory: Path) -> None:
    write_safetensors(directory / "model.safetensors", size=15)
    with pytest.raises(InvalidConfig, match="ends before tensor 'weight'"):
        open_checkpoint(directory)


@pytest.mark.parametrize("changes", [{"shape": [3, 2]}, {"data_offsets": [4, 16]}, {"dtype": None, "shape": None}])
def test_an_entry_that_contradicts_itself_is_refused(directory: Path, changes: dict[str, object]) -> None:
    write_safetensors(directory / "model.safetensors", changes)
    with pytest.raises(InvalidConfig, match="weight"):
        open_checkpoint(directory)


def test_a_quantised_checkpoint_is_refused_by_its_method(directory: Path) -> None:
    (directory / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(Unsupported, match="awq"):
        open_checkpoint(directory)


def test_a_checkpoint_that_says_it_is_not_quantised_is_sound(directory: Path) -> None:
    (directory / "config.json").write_text('{"quantization_config": null}')
    assert open_checkpoint(directory).tensors


def test_more_layers_than_tensors_are_refused_before_anything_is_built(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1000000000}')
    with pytest.raises(InvalidConfig, match="asks for 1000000000 layers where there are 1 tensors"):
        open_checkpoint(directory)


def test_an_unknown_dtype_is_refused_by_name(directory: Path) -> None:
    write_safetensors(directory / "model.safetensors", {"dtype": "F8_E4M3"})
    with pytest.raises(Unsupported, match="F8_E4M3"):
        open_checkpoint(directory)


def test_a_replaced_file_changes_the_fingerprint(directory: Path) -> None:
    before = fingerprint(directory)
    write_safetensors(directory / "new")
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
