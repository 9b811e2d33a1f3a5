"""A tree as one file: what is kept is as it was, nothing leads elsewhere, and what cannot be kept is named."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from manager.errors import Conflict, TooLarge
from runtimes.sandbox.snapshots import pack, unpack
from tests.small_disk import small_disk_at

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to others")


def kept(source: Path, target: Path, *, base: int = 0, back: int = 0, left_bytes: int = 2**30) -> int:
    """Pack a tree and lay it out elsewhere; return the bytes that it took on the disk meanwhile."""
    packed = target.with_suffix(".tar")
    for directory in (source, target):
        directory.mkdir(exist_ok=True)
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        size_bytes = pack(fd, packed, base=base, left_bytes=left_bytes, too_large=lambda size: TooLarge(f"{size}"))
    finally:
        os.close(fd)
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        unpack(packed, fd, base=back, owners=os.geteuid() == 0)
    finally:
        os.close(fd)
    return size_bytes


@root_only
def test_ids_are_moved_from_one_block_to_another_and_a_strangers_becomes_nobodys(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name, uid in (("root", 100_000), ("user", 101_000), ("stranger", 7)):
        (source / name).write_text(name)
        os.chown(source / name, uid, uid)
    (source / "user").chmod(0o4755)
    kept(source, target, base=100_000, back=200_000)
    found = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in target.iterdir()}
    assert found == {"root": (200_000,) * 2, "user": (201_000,) * 2, "stranger": (265_534,) * 2}
    assert stat.S_IMODE((target / "user").stat().st_mode) == 0o4755, "the owner does not take setuid away"


def test_times_attributes_and_directories_that_nobody_may_write_to_come_back(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "closed" / "deep").mkdir(parents=True)
    (source / "closed" / "deep" / "file").write_text("x")
    try:
        os.setxattr(source / "closed", "user.note", b"\xff\0=\n")
    except OSError:
        pytest.skip("the file system of the tests has no attributes")
    os.utime(source / "closed" / "deep" / "file", ns=(5, 1_234_567_890_000_000_000))
    os.utime(source / "closed" / "deep", ns=(5, 7_000_000_000))
    (source / "closed").chmod(0o555)
    kept(source, target)
    (source / "closed").chmod(0o755)
    assert (target / "closed" / "deep" / "file").stat().st_mtime == 1_234_567_890
    assert (target / "closed" / "deep").stat().st_mtime == 7
    assert stat.S_IMODE((target / "closed").stat().st_mode) == 0o555
    assert os.getxattr(target / "closed", "user.note") == b"\xff\0=\n"
    (target / "closed").chmod(0o755)


@root_only
def test_what_is_mounted_in_it_is_not_the_trees_and_may_be_there_where_it_is_laid_out(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for root in (source, target):
        (root / "tools").mkdir(parents=True)
    (source / "tools" / "own").write_text("own")
    with small_disk_at(source / "tools" / "python", "6m"), small_disk_at(target / "tools" / "python", "6m"):
        (source / "tools" / "python" / "big").write_bytes(bytes(2**20))
        (target / "tools" / "python" / "there").write_text("there")
        assert kept(source, target) < 2**20
        found = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert found == ["tools", "tools/own", "tools/python", "tools/python/there"]


def test_links_are_kept_as_links_and_lead_nowhere_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "file").symlink_to(tmp_path / "outside" / "secret")
    (source / "directory").symlink_to(tmp_path / "outside")
    (source / "nowhere").symlink_to("/nonexistent")
    kept(source, target)
    assert {path.name: path.readlink() for path in target.iterdir()} == {
        path.name: path.readlink() for path in source.iterdir()
    }
    assert b"secret" not in target.with_suffix(".tar").read_bytes().replace(b"outside/secret", b"")


def test_a_hole_takes_no_disk_and_stays_one(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    with (source / "hole").open("wb") as file:
        file.seek(2**33)
        file.write(b"end")
    assert kept(source, target, left_bytes=2**20) < 2**20
    copy = target / "hole"
    assert copy.stat().st_size == 2**33 + 3
    assert copy.stat().st_blocks * 512 < 2**20
    with copy.open("rb") as file:
        file.seek(2**33)
        assert file.read() == b"end"


def test_sockets_are_left_out_and_the_second_name_of_a_file_is_the_same_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(source / "socket"))
        (source / "one").write_text("1")
        os.link(source / "one", source / "two")
        kept(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["one", "two"]
    assert (target / "one").stat().st_ino == (target / "two").stat().st_ino


def test_more_than_may_be_kept_or_deeper_than_can_be_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "large").write_bytes(os.urandom(2**20))
    with pytest.raises(TooLarge):
        kept(source, tmp_path / "target", left_bytes=2**19)
    (source / "large").unlink()
    deep = source
    for _ in range(300):
        deep /= "d"
        deep.mkdir()
    with pytest.raises(Conflict, match="directories"):
        kept(source, tmp_path / "deep")


def test_a_file_of_holes_that_no_disk_can_hold_twice_is_refused_by_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "huge").open("wb") as file:
        try:
            file.truncate(2**44 - 4096)
        except OSError:
            pytest.skip("the file system of the tests has no such files")
    if not _is_full(source / "huge"):
        pytest.skip("the file system of the tests has larger files yet")
    with pytest.raises(Conflict, match="'huge' is larger"):
        kept(source, tmp_path / "target")


def _is_full(path: Path) -> bool:
    """Whether no file can be larger than this one."""
    with path.open("r+b") as file:
        try:
            file.truncate(2**44 + 2**20)
        except OSError:
            return True
    return False
