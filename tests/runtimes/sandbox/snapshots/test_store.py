"""The snapshots of a provider: what is half taken, too old or somebody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from manager.errors import CapacityExceeded, CodedError, Conflict, NotFound, Unsupported
from manager.function import SandboxSpec
from runtimes.sandbox.snapshots import SnapshotRecord, SnapshotSettings, SnapshotStore

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


async def test_one_that_somebody_else_names_is_taken_once_and_those_spared_make_no_room(tmp_path: Path) -> None:
    clock = TimeOfDay()
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
    clock = TimeOfDay()
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
    snapshots = store(tmp_path, TimeOfDay(), at_once=1)
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
