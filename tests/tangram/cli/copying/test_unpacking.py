"""What a sandbox's archive makes on this machine: a tree in its place, and nothing beside it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import click
import pytest

from tangram.cli.copying.unpacking import Unpacking, write_below


def archive(*entries: tarfile.TarInfo, tree: bool = True) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in ([entry_of(".", tarfile.DIRTYPE)] if tree else []) + list(entries):
            tar.addfile(entry, io.BytesIO(b"x" * entry.size))
    return written.getvalue()


def entry_of(name: str, type: bytes = tarfile.REGTYPE, linkname: str = "", size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size, entry.mode = type, linkname, size, 0o755
    return entry


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out"])
def test_an_entry_that_leaves_the_tree_stops_the_copy_before_it_begins(tmp_path: Path, name: str) -> None:
    with pytest.raises(click.ClickException, match="nothing was copied"):
        Unpacking(tmp_path / "back", "tree").all(archive(entry_of("first", size=1), entry_of(name, size=1)))
    assert list(tmp_path.iterdir()) == []


def test_links_that_lead_out_by_way_of_one_another_are_left_out(tmp_path: Path) -> None:
    unpacking = Unpacking(tmp_path / "back", "tree")
    unpacking.all(
        archive(
            entry_of("d/x", tarfile.SYMTYPE, ".."),
            entry_of("y", tarfile.SYMTYPE, "d/x/.."),
            entry_of("root", tarfile.SYMTYPE, "/"),
            entry_of("near", tarfile.SYMTYPE, "d"),
            entry_of("y/file", size=1),
        )
    )
    back = tmp_path / "back"
    assert [each.path for each in unpacking.left_out] == ["tree/y", "tree/root"]
    assert sorted(str(each.relative_to(back)) for each in back.rglob("*")) == ["d", "d/x", "near", "y", "y/file"]
    assert list(tmp_path.iterdir()) == [back]


def test_a_second_name_is_one_of_a_file_that_was_copied(tmp_path: Path) -> None:
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine").write_text("mine")
    unpacking = Unpacking(tmp_path / "back", "tree")
    unpacking.all(
        archive(
            entry_of("a", size=2),
            entry_of("b", tarfile.LNKTYPE, "a"),
            entry_of("c", tarfile.LNKTYPE, "mine"),
            entry_of("d", tarfile.LNKTYPE, "../out"),
            entry_of("pipe", tarfile.FIFOTYPE),
        )
    )
    assert (tmp_path / "back" / "b").read_text() == "xx"
    assert [each.path for each in unpacking.left_out] == ["tree/c", "tree/d", "tree/pipe"]


def test_what_is_no_tree_and_no_file_is_refused(tmp_path: Path) -> None:
    for data in (b"no archive at all", archive(tree=False), archive(entry_of("a"), entry_of("b"), tree=False)):
        with pytest.raises(click.ClickException):
            Unpacking(tmp_path / "back", "tree").all(data)
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_lies_in_the_target_is_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "here"
    (outside / "deep").mkdir(parents=True)
    (outside / "file").write_text("kept")
    root.mkdir()
    (root / "file").symlink_to(outside / "file")
    (root / "deep").symlink_to(outside / "deep")
    for path in ("file", "deep/file"):
        with pytest.raises(click.ClickException, match="is a link"):
            write_below(root, root / path, b"written", 0o644)
    assert ((outside / "file").read_text(), list((outside / "deep").iterdir())) == ("kept", [])
    write_below(root, root / "a" / "b", b"written", 0o644)
    assert (root / "a" / "b").read_bytes() == b"written"
