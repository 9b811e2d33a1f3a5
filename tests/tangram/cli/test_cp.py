"""Files go into a trajectory's sandbox and come out of it as they were, and nothing lands beside its place."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from pathlib import Path

import click
import pytest

from tangram import FileEntry
from tangram.archive import FILE, Entry
from tangram.cli import cp as module
from tangram.cli.cp import Remote, SandboxPlace, Unpacking, batches, pack, remote, walk, write_alone
from tangram.client.sync import Trajectory
from tangram.errors import ConflictError, UnsupportedError
from tests.tangram.cli.conftest import Served, Tangram

EXEC = '{"command": "true"}'


class WithoutPython(Trajectory):
    """A sandbox that takes no archives, and holds a few files."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, int]] = {}
        self.broken: set[str] = set()

    def upload(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        assert isinstance(data, bytes)
        self.files[path] = (data, 0o644 if mode is None else mode)

    def download(self, path: str, *, user: str | None = None) -> bytes:
        if path in self.broken:
            raise ConflictError(f"{path}: Permission denied")
        return self.files[path][0]

    def list(self, path: str = ".", *, user: str | None = None) -> list[FileEntry]:
        found = {}
        for each, (data, mode) in self.files.items():
            if each.startswith(f"{path}/"):
                name, slash, _ = each.removeprefix(f"{path}/").partition("/")
                found[name] = FileEntry(
                    path=f"{path}/{name}", size_bytes=len(data), directory=bool(slash), mode=f"{mode:o}"
                )
        return [found[name] for name in sorted(found)]

    def upload_archive(self, path: str, data: bytes, *, user: str | None = None) -> None:
        raise UnsupportedError("the image has no python3")

    def download_archive(self, path: str = ".", *, user: str | None = None) -> bytes:
        raise UnsupportedError("the image has no python3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t1:/workspace/a", Remote("t1", "/workspace/a")),
        ("t1:notes.txt", Remote("t1", "notes.txt")),
        ("run:7:/a:b", Remote("run:7", "/a:b")),
        ("run:7:a", Remote("run:7", "a")),
        ("t1:o/a:b", Remote("t1", "o/a:b")),
        ("t1:./a:b", Remote("t1", "./a:b")),
        ("dir/odd:name", None),
        ("notes.txt", None),
        ("./odd:name", None),
        ("/odd:name", None),
    ],
)
def test_a_place_in_a_sandbox_is_told_from_one_here(text: str, expected: Remote | None) -> None:
    assert remote(text) == expected


async def test_names_links_directories_and_modes_of_a_tree_come_back_as_they_were(
    served: Served, tmp_path: Path
) -> None:
    tree, odd = tmp_path / "tree", os.fsdecode(b"bad\xff")
    (tree / "empty").mkdir(parents=True, mode=0o700)
    (tree / odd).write_text("odd")
    (tree / "secret").write_text("s")
    (tree / "secret").chmod(0o600)
    (tree / "tool").write_text("t")
    (tree / "tool").chmod(0o4755)
    (tree / "near").symlink_to("secret")
    (tree / "dangling").symlink_to("nowhere")
    await served("invoke", "shell", EXEC, "--trajectory", "t1")
    assert (await served("cp", str(tree), "t1:tree"))[0] == 0
    assert (await served("cp", str(tree / odd), "t1:alone/"))[0] == 0
    shell = '{"command": "readlink tree/near; stat -c %a tree/tool; ls alone | wc -l"}'
    _, out, _ = await served("invoke", "shell", shell, "--trajectory", "t1")
    assert json.loads(out)["stdout"].split() == ["secret", "755", "1"]
    await served("invoke", "shell", '{"command": "chmod 4755 tree/tool"}', "--trajectory", "t1")
    status, _, err = await served("cp", "t1:tree", str(tmp_path / "back"))
    back = tmp_path / "back"
    assert (status, err) == (0, "5 copied\n")
    assert (back / odd).read_text() == "odd"
    assert (back / "near").readlink() == Path("secret")
    assert (back / "dangling").readlink() == Path("nowhere")
    modes = {name: stat.S_IMODE((back / name).stat().st_mode) for name in ("empty", "secret", "tool")}
    assert modes == {"empty": 0o700, "secret": 0o600, "tool": 0o755}


async def test_a_link_is_not_its_target_in_the_sandbox_and_leads_nowhere_out_of_a_copy(
    served: Served, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret of this machine")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "token")
    (tmp_path / "tree" / "file").touch()
    await served("invoke", "shell", EXEC, "--trajectory", "t1")
    await served("cp", str(tmp_path / "tree"), "t1:tree")
    _, out, _ = await served("invoke", "shell", '{"command": "readlink tree/link"}', "--trajectory", "t1")
    assert json.loads(out)["stdout"] == f"{tmp_path}/token\n"
    status, _, err = await served("cp", "t1:tree", str(tmp_path / "back"))
    assert status == 73
    assert f"tree/link: left out: it is a link that leads out of the copy, to {tmp_path}/token" in err
    assert [each.name for each in (tmp_path / "back").iterdir()] == ["file"]


async def test_a_place_that_cannot_be_written_to_is_named_as_it_was_given(served: Served, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    await served("invoke", "shell", '{"command": "mkdir -p taken"}', "--trajectory", "t1")
    status, _, err = await served("cp", str(tmp_path / "notes.txt"), "t1:taken")
    assert status == 73
    assert "taken: Is a directory" in err


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
    listed = {"tree": [FileEntry(path=f"tree/{name}", size_bytes=1, directory=False, mode="644")]}
    with pytest.raises(click.ClickException, match="nothing was copied"):
        list(module._downloads(lambda path: listed[path], "tree", tmp_path))


def test_a_sandbox_that_lists_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 1000)
    deeper = [FileEntry(path="d", size_bytes=0, directory=True, mode="755")]
    with pytest.raises(click.ClickException, match="more than 1000"):
        list(module._downloads(lambda path: deeper, "tree", tmp_path))


def test_where_no_archive_is_taken_files_go_one_by_one_and_the_rest_is_named(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "empty").mkdir()
    (tree / "d" / "run").write_text("r")
    (tree / "d" / "run").chmod(0o4750)
    (tree / os.fsdecode(b"bad\xff")).touch()
    (tree / "link").symlink_to("d")
    sandbox = WithoutPython()
    entries, _ = walk(tree)
    done = module._tree_in(entries, SandboxPlace(sandbox, "there", None))
    assert sandbox.files == {"there/d/run": (b"r", 0o750)}
    assert [each.path for each in done.left_out] == [f"{tree}/bad\\xff", f"{tree}/link", f"{tree}/empty"]
    sandbox.upload("there/closed", b"c", mode=0)
    sandbox.broken.add("there/closed")
    done = module._copy_out(SandboxPlace(sandbox, "there", None), tmp_path / "back")
    assert [each.path for each in done.left_out] == ["there/closed"]
    assert stat.S_IMODE((tmp_path / "back/d/run").stat().st_mode) == 0o750


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
    monkeypatch.setattr(module, "ENTRIES_MAX", 2)
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    with pytest.raises(click.ClickException, match="more than 2"):
        walk(tmp_path)


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


def test_what_is_no_tree_and_no_file_is_refused(tmp_path: Path) -> None:
    for data in (b"no archive at all", archive(tree=False), archive(entry_of("a"), entry_of("b"), tree=False)):
        with pytest.raises(click.ClickException):
            Unpacking(tmp_path / "back", "tree").all(data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("`tangram cp` follows no link and writes nowhere outside its target.")
def test_a_link_that_lies_in_the_target_is_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "here"
    (outside / "deep").mkdir(parents=True)
    (outside / "file").write_text("kept")
    root.mkdir()
    (root / "file").symlink_to(outside / "file")
    (root / "deep").symlink_to(outside / "deep")
    unpacking = Unpacking(root, "tree")
    unpacking.all(archive(entry_of("file", size=2), entry_of("deep/file", size=2), entry_of("a/b", size=2)))
    assert ((outside / "file").read_text(), list((outside / "deep").iterdir())) == ("kept", [])
    assert ((root / "file").read_text(), (root / "a" / "b").read_text()) == ("xx", "xx")
    assert [(each.path, "is a link here" in each.why) for each in unpacking.left_out] == [("tree/deep/file", True)]
    with pytest.raises(click.ClickException, match="is a link"):
        Unpacking(root / "deep", "tree").all(archive(entry_of("file", size=2)))
    write_alone(root / "alone", Entry("f", FILE, 0o4755, 2), [(0, b"xx")])
    assert stat.S_IMODE((root / "alone").stat().st_mode) == 0o755
