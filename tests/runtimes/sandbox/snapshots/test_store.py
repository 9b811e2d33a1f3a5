"""The snapshots of a provider: what is half taken, too old or somebody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from manager.errors import CapacityExceeded, CodedError, Conflict, NotFound, Unsupported
from manager.function import SandboxSpec
from runtimes.sandbox.snapshots.record import SnapshotRecord, SnapshotSettings
from runtimes.sandbox.snapshots.store import SnapshotStore

SPEC = SandboxSpec(image="any")


class TimeOfDay:
    """A time of day that a test sets."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def store(root: Path, clock: TimeOfDay, provider: str = "process", **bounds: float) -> SnapshotStore:
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
    clock = TimeOfDay()
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


async def test_what_an_earlier_gateway_left_half_taken_is_no_snapshot_and_goes(tmp_path: Path) -> None:
    snapshots, begun = store(tmp_path, TimeOfDay()), asyncio.Event()

    async def endless(id: str, place: Path, limit_bytes: int) -> int:
        (place / "files").write_bytes(b"half")
        begun.set()
        await asyncio.Event().wait()
        return 0

    taking = asyncio.create_task(snapshots.take("t", "task", SPEC, endless))
    await begun.wait()
    next_one = store(tmp_path, TimeOfDay())
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
    clock = TimeOfDay()
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
    record = await taken(store(tmp_path, TimeOfDay()))
    with pytest.raises(Unsupported, match="of kind process, and these are container"):
        store(tmp_path, TimeOfDay(), "container").get(record.id)


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
