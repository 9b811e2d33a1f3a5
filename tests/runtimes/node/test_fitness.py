"""A node finds its disk short before a write fails, and by one that does; and fit again once it takes something."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtimes.node import daemon as node_daemon
from runtimes.node.daemon import NodeFitness
from runtimes.node.protocol import FitnessChanged
from tests.runtimes.node.session import STUCK_S
from tests.small_disk import fill, small_disk_at

SIZE = 4 * 2**20


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_daemon, "FITNESS_LOOK_S", 0.001)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    with small_disk_at(tmp_path / "disk", str(SIZE)):
        yield tmp_path / "disk"


def test_too_little_room_is_found_before_a_write_fails_and_enough_again_once_there_is_some_more(disk: Path) -> None:
    told: list[str] = []
    fitness = NodeFitness(disk, 2 * 2**20, on_change=lambda changed: told.append(changed.why))
    fitness.look()
    assert (fitness.report.why, told) == ("", [])
    filler = disk / "filler"
    filler.write_bytes(bytes(SIZE - 2**20))
    fitness.look()
    fitness.look()
    assert len(told) == 1 and "server.free_min" in told[0]
    filler.write_bytes(bytes(SIZE - 2 * 2**20))
    fitness.look()
    assert fitness.report.why, "just at the bound it would come and go"
    filler.unlink()
    fitness.look()
    assert (fitness.report.why, told[1:]) == ("", [""])


def test_a_disk_that_refuses_is_unfit_until_it_takes_a_write_of_ours_and_nothing_of_that_is_left(disk: Path) -> None:
    fitness = NodeFitness(disk, 0)
    filler = fill(disk)
    fitness.look()
    assert not fitness.report.why, "it asks for no room, and nothing was refused"
    fitness.refused(OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left" in fitness.report.why and "make room" in fitness.report.why
    filler.unlink()
    fitness.look()
    assert fitness.report.why == "" and list(disk.iterdir()) == []


def test_a_refusal_that_is_over_already_closes_nothing(tmp_path: Path) -> None:
    fitness = NodeFitness(tmp_path, 0)
    fitness.refused(OSError(errno.EIO, "once"))
    assert fitness.report.why == ""


async def test_one_whose_sandboxes_are_in_trouble_says_that_nothing_new_can_begin_until_they_are_not(
    tmp_path: Path,
) -> None:
    trouble = "its engine is gone"
    told: asyncio.Queue[FitnessChanged] = asyncio.Queue()

    async def found() -> str:
        return trouble

    fitness = NodeFitness(tmp_path, 0, trouble=found, on_change=told.put_nowait)
    watching = asyncio.create_task(fitness.watch_for_ever())
    async with asyncio.timeout(STUCK_S):
        assert await told.get() == FitnessChanged("its engine is gone", True)
        trouble = ""
        assert await told.get() == FitnessChanged("", False)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_an_engine_that_hangs_holds_up_no_look_at_the_disk(disk: Path) -> None:
    told: asyncio.Queue[FitnessChanged] = asyncio.Queue()

    async def hangs() -> str:
        await asyncio.Event().wait()
        return ""

    fitness = NodeFitness(disk, 2 * 2**20, trouble=hangs, on_change=told.put_nowait)
    watching = asyncio.create_task(fitness.watch_for_ever())
    (disk / "filler").write_bytes(bytes(SIZE - 2**20))
    async with asyncio.timeout(STUCK_S):
        assert "server.free_min" in (await told.get()).why
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
