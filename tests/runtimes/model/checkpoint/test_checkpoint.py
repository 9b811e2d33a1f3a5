"""A checkpoint that cannot be used is refused by name, with the remedy, before a weight is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from manager.errors import InvalidConfig, Unsupported
from runtimes.model.checkpoint import fingerprint, open_checkpoint


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
