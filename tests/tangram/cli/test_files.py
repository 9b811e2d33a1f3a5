"""Files go into a trajectory's sandbox and come out of it as they were."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from tangram import FileEntry
from tangram.cli import files
from tangram.cli.files import Remote, remote, write_below
from tests.tangram.cli.conftest import Served, Tangram

EXEC = '{"command": "true"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t1:/workspace/a", Remote("t1", "/workspace/a")),
        ("t1:notes.txt", Remote("t1", "notes.txt")),
        ("run:7:/a:b", Remote("run:7", "/a:b")),
        ("run:7:a", Remote("run:7", "a")),
        ("notes.txt", None),
        ("./odd:name", None),
        ("/odd:name", None),
    ],
)
def test_a_place_in_a_sandbox_is_told_from_one_here(text: str, expected: Remote | None) -> None:
    assert remote(text) == expected


async def test_a_directory_goes_in_and_comes_out_again(served: Served, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "deep" / "data").write_bytes(bytes(range(256)))
    await served("invoke", "shell", EXEC, "--trajectory", "t1")
    status, _, err = await served("cp", str(tree), "t1:tree")
    assert (status, err) == (0, "2 copied\n")
    _, out, _ = await served("invoke", "shell", '{"command": "test -x tree/run.sh && echo runs"}', "--trajectory", "t1")
    assert json.loads(out)["stdout"] == "runs\n"
    status, out, _ = await served("cp", "--json", "t1:tree", f"{tmp_path}/back/")
    assert [each["there"] for each in json.loads(out)["copied"]] == ["tree/deep/data", "tree/run.sh"]
    assert (tmp_path / "back/tree/deep/data").read_bytes() == bytes(range(256))


async def test_one_file_takes_its_own_name_in_a_directory(served: Served, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    await served("invoke", "shell", EXEC, "--trajectory", "t1")
    assert (await served("cp", str(tmp_path / "notes.txt"), "t1:in/"))[0] == 0
    assert (await served("cp", "t1:in/notes.txt", str(tmp_path / "again.txt")))[0] == 0
    assert (tmp_path / "again.txt").read_text() == "hello"
    assert (await served("cp", "t1:in/gone.txt", str(tmp_path)))[0] == 66
    assert (await served("cp", "nobody:in/notes.txt", str(tmp_path)))[0] == 66


def test_copying_needs_exactly_one_sandbox(tangram: Tangram, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert tangram("cp", str(tmp_path / "a"), str(tmp_path / "b"))[0] == 2
    assert tangram("cp", "t1:a", "t2:a")[0] == 2
    assert tangram("cp", str(tmp_path / "gone"), "t1:a")[0] == 2


@pytest.mark.parametrize("name", ["..", ".", "", "a/..", "a\0b"])
def test_what_a_sandbox_lists_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    listed = {"": [], "tree": [FileEntry(path=f"tree/{name}", size_bytes=1, directory=False, mode="644")]}
    with pytest.raises(click.ClickException, match="nothing was copied"):
        list(files._downloads(lambda path: listed.get(path, []), "tree", tmp_path))


def test_a_sandbox_that_lists_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ENTRIES_MAX", 1000)
    deeper = [FileEntry(path="d", size_bytes=0, directory=True, mode="755")]
    with pytest.raises(click.ClickException, match="more than 1000"):
        list(files._downloads(lambda path: deeper, "tree", tmp_path))


def test_a_link_that_lies_in_the_target_is_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "here"
    (outside / "deep").mkdir(parents=True)
    (outside / "file").write_text("kept")
    root.mkdir()
    (root / "file").symlink_to(outside / "file")
    (root / "deep").symlink_to(outside / "deep")
    for path in ("file", "deep/file"):
        with pytest.raises(click.ClickException, match="is a link"):
            write_below(root, root / path, b"written")
    assert ((outside / "file").read_text(), list((outside / "deep").iterdir())) == ("kept", [])
    write_below(root, root / "a" / "b", b"written")
    assert (root / "a" / "b").read_bytes() == b"written"
