"""Snapshots of containers, beside an engine whose answers come late."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manager.function import SandboxSpec
from runtimes.sandbox.docker.images import ContainerSnapshots
from runtimes.sandbox.snapshots import LABEL, SnapshotSettings


class LateEngine:
    """Tells the images that there were when it was asked, once it may answer."""

    def __init__(self) -> None:
        self.images: list[str] = []
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def labelled_images(self, *labels: str) -> list[Mapping[str, str]]:
        found = [{LABEL: id} for id in self.images]
        self.asked.set()
        await self.may_answer.wait()
        return list(found)

    async def remove_image(self, name: str) -> None:
        if (id := name.partition(":")[2]) in self.images:
            self.images.remove(id)


async def test_one_that_became_ready_while_the_engine_was_asked_is_not_lost(tmp_path: Path) -> None:
    engine = LateEngine()
    anything: Any = engine
    snapshots = ContainerSnapshots(anything, anything, tmp_path, SnapshotSettings(), "own")
    looks: list[asyncio.Task[None]] = []

    async def write(id: str, place: Path, limit_bytes: int) -> int:
        looks.append(asyncio.create_task(snapshots.reap()))
        await engine.asked.wait()
        engine.images.append(id)
        return 1

    taken = await snapshots.take("t", "task", SandboxSpec(image="any"), write)
    engine.may_answer.set()
    await looks[0]
    assert [each.id for each in snapshots.all()] == [taken.id]
    engine.images.clear()  # by somebody else
    async with snapshots.held(taken.id):
        await snapshots.reap()
    assert snapshots.all() == [], "what somebody else removed is forgotten"
