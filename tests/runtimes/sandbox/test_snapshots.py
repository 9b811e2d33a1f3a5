"""Snapshots: a tree as one file, and the store of a provider."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from manager.errors import CapacityExceeded, CodedError, Conflict, NotFound, TooLarge, Unsupported
from manager.function import SandboxSpec
from runtimes.sandbox.snapshots import SnapshotRecord, SnapshotSettings, SnapshotStore, pack, unpack
from tests.small_disk import small_disk_at
from tests.virtual_clock import VirtualClock

SPEC = SandboxSpec(image="any")


def store(root: Path, clock: VirtualClock, provider: str = "process", **bounds: float) -> SnapshotStore:
    settings = SnapshotSettings(**bounds)  # type: ignore[arg-type]  # bounds by name
    return SnapshotStore(root, settings, provider=lambda: provider, wall=clock)


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


async def taken(snapshots: SnapshotStore, size_bytes: int = 10) -> SnapshotRecord:
    async def write(id: str, place: Path, limit_bytes: int) -> int:
        (place / "files").write_bytes(b"x")
        return size_bytes

    return await snapshots.take("t", "task", SPEC, write)


async def test_one_that_was_not_used_for_too_long_goes_unless_it_is_needed(tmp_path: Path) -> None:
    clock = VirtualClock(1000.0)
    snapshots = store(tmp_path, clock, age_s=100.0)
    old, needed, used = [await taken(snapshots) for _ in range(3)]
    snapshots.users = lambda: {needed.id: "living"}
    clock.now_s += 90.0
    async with snapshots.held(used.id):
        pass
    clock.now_s += 20.0
    again = store(tmp_path, clock, age_s=100.0)
    again.users = snapshots.users
    assert await again.prune() == 1
    assert {each.id for each in again.all()} == {needed.id, used.id}
    assert old.id not in entries(tmp_path)


async def test_nothing_is_awaited_once_a_sandbox_was_made_from_one(tmp_path: Path) -> None:
    snapshots = store(tmp_path, VirtualClock(1000.0))
    making = snapshots.held((await taken(snapshots)).id)
    await making.__aenter__()
    with pytest.raises(StopIteration):  # a caller that is cancelled here would lose the sandbox
        making.__aexit__(None, None, None).send(None)


async def test_what_an_earlier_gateway_left_half_taken_is_no_snapshot_and_goes(tmp_path: Path) -> None:
    snapshots, begun = store(tmp_path, VirtualClock(1000.0)), asyncio.Event()

    async def endless(id: str, place: Path, limit_bytes: int) -> int:
        (place / "files").write_bytes(b"half")
        begun.set()
        await asyncio.Event().wait()
        return 0

    taking = asyncio.create_task(snapshots.take("t", "task", SPEC, endless))
    await begun.wait()
    next_one = store(tmp_path, VirtualClock(1000.0))
    assert next_one.all() == []
    (id,) = next_one.ids
    with pytest.raises(NotFound):
        next_one.get(id)
    assert await next_one.prune() == 1
    assert entries(tmp_path) == []
    assert await snapshots.prune() == 0, "what is being taken is not half taken"
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert snapshots.ids == set()


async def test_the_bytes_of_all_are_bounded(tmp_path: Path) -> None:
    clock = VirtualClock(1000.0)
    snapshots = store(tmp_path, clock, total_max_bytes=100)
    first = await taken(snapshots, 60)
    clock.now_s += 1
    second = await taken(snapshots, 60)
    assert [each.id for each in snapshots.all()] == [second.id]
    assert first.id != second.id
    async with snapshots.held(second.id):
        with pytest.raises(CapacityExceeded, match="total_max"):
            await taken(snapshots, 60)
        with pytest.raises(Conflict, match="being made"):
            await snapshots.remove(second.id)
    assert [each.id for each in snapshots.all()] == [second.id]


async def test_another_kind_of_sandbox_cannot_begin_with_it(tmp_path: Path) -> None:
    record = await taken(store(tmp_path, VirtualClock(1000.0)))
    with pytest.raises(Unsupported, match="of kind process, and these are container"):
        store(tmp_path, VirtualClock(1000.0), "container").get(record.id)


async def test_one_that_cannot_be_removed_is_tried_again_and_used_no_more(tmp_path: Path) -> None:
    away = [CodedError("the engine is away")]

    async def remove(record: SnapshotRecord) -> None:
        if away:
            raise away.pop()

    snapshots = SnapshotStore(tmp_path, SnapshotSettings(), provider=lambda: "container", remove=remove)
    record = await taken(snapshots)
    await snapshots.remove(record.id)
    assert snapshots.all() == [] and snapshots.ids == {record.id}
    assert await snapshots.prune() == 1
    assert snapshots.ids == set() and entries(tmp_path) == []


async def test_one_that_somebody_else_names_is_taken_once_and_those_spared_make_no_room(tmp_path: Path) -> None:
    clock = VirtualClock(1000.0)
    snapshots = store(tmp_path, clock, count_max=2)
    changes: list[list[str]] = []
    snapshots.on_change = lambda: changes.append([each.id for each in snapshots.all()])
    first = await taken(snapshots)
    clock.now_s += 1.0
    written: list[str] = []

    async def write(id: str, place: Path, limit_bytes: int) -> int:
        written.append(id)
        return 1

    for _ in range(2):
        record = await snapshots.take("t", "task", SPEC, write, id="0" * 12)
        assert record.id == "0" * 12
    assert written == ["0" * 12]
    third = await snapshots.take("t", "task", SPEC, write, spared=[first.id])
    assert {each.id for each in snapshots.all()} == {first.id, third.id} == set(entries(tmp_path))
    assert changes[-1] == [first.id, third.id]
    with pytest.raises(CapacityExceeded):
        await snapshots.take("t", "task", SPEC, write, spared=[first.id, third.id])


async def test_one_that_is_given_up_goes_when_nothing_needs_it_or_in_the_next_life(tmp_path: Path) -> None:
    clock = VirtualClock(1000.0)
    snapshots = store(tmp_path, clock)
    free, needed = await taken(snapshots), await taken(snapshots)
    snapshots.users = lambda: {needed.id: "living"}
    for id in (free.id, needed.id, "f" * 12):
        await snapshots.give_up(id)
    assert snapshots.all() == [] and entries(tmp_path) == [needed.id]
    with pytest.raises(NotFound):
        snapshots.get(needed.id)
    again = store(tmp_path, clock)
    assert again.all() == [] and await again.prune() == 1
    snapshots.users = dict
    assert await snapshots.prune() == 1
    assert entries(tmp_path) == []


async def test_one_that_is_given_up_while_it_is_taken_is_none(tmp_path: Path) -> None:
    snapshots = store(tmp_path, VirtualClock(1000.0), at_once=1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def write(id: str, place: Path, limit_bytes: int) -> int:
        begun.set()
        await go_on.wait()
        return 1

    running = asyncio.create_task(snapshots.take("t", "task", SPEC, write, id="0" * 12))
    waiting = asyncio.create_task(snapshots.take("t", "task", SPEC, write, id="1" * 12))
    await begun.wait()
    await snapshots.give_up("0" * 12)
    await snapshots.give_up("1" * 12)
    go_on.set()
    for taking in (running, waiting):
        with pytest.raises(Conflict, match="given up"):
            await taking
    assert snapshots.all() == [] and entries(tmp_path) == []


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


@pytest.mark.promise("A sandbox never begins with a part of a snapshot.")
def test_a_packed_tree_that_lost_anything_of_its_end_is_laid_out_by_nobody(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "holes").touch()
    os.truncate(source / "holes", 2**16)
    (source / "text").write_bytes(b"x" * 1000)
    kept(source, tmp_path / "target")
    packed = tmp_path / "target.tar"
    whole = packed.read_bytes()
    cuts = {0, 1, *range(0, len(whole), 512), *range(len(whole) - 1025, len(whole))}
    for cut in sorted(cuts):
        os.truncate(packed, cut)
        _refused(packed, tmp_path / f"cut{cut}")
        packed.write_bytes(whole)
    for more in (b"\0", b"x", whole):
        packed.write_bytes(whole + more)
        _refused(packed, tmp_path / f"more{len(more)}{more[:1].hex()}")


def _refused(packed: Path, target: Path) -> None:
    target.mkdir()
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(Conflict, match="the snapshot is damaged"):
            unpack(packed, fd, base=0, owners=False)
    finally:
        os.close(fd)


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
