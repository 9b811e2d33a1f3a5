"""A tree of this machine as tars."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import click
import pytest

from tangram.cli.copying import packing
from tangram.cli.copying.packing import batches, pack, walk


def test_directories_come_after_all_that_goes_into_them_and_pipes_are_named(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "file").touch()
    (tmp_path / "d" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    entries, left_out = walk(tmp_path)
    assert [each.name for each in entries] == ["d/e/file", "d/loop", "d", "d/e"]
    assert [each.path for each in left_out] == [f"{tmp_path}/pipe"]


def test_a_tree_is_cut_into_batches_by_bytes(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"x" * 3000)
    entries, _ = walk(tmp_path)
    assert [[each.name for each in batch] for batch in batches(entries, 9000)] == [["a", "b"], ["c"]]
    assert [[each.name for each in batch] for batch in batches(entries, 10)] == [["a"], ["b"], ["c"]]


def test_a_file_that_a_link_has_taken_the_place_of_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "other").write_text("other")
    entries, _ = walk(tmp_path)
    (tmp_path / "file").unlink()
    (tmp_path / "file").symlink_to("/etc/passwd")
    batch = pack(entries)
    assert [each.path for each in batch.left_out] == [f"{tmp_path}/file"]
    with tarfile.open(fileobj=io.BytesIO(batch.data)) as tar:
        assert tar.getnames() == ["other"]


def test_a_tree_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ENTRIES_MAX", 2)
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    with pytest.raises(click.ClickException, match="more than 2"):
        walk(tmp_path)
