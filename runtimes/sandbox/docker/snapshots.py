"""Snapshots of containers: an image each, with what the container had written as its last layer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from manager.function import SandboxSpec
from runtimes.sandbox.docker.engine import DockerEngine
from runtimes.sandbox.docker.images import ImageStore
from runtimes.sandbox.docker.remains import GATEWAY
from runtimes.sandbox.snapshots.record import LABEL, REPOSITORY, SnapshotSettings
from runtimes.sandbox.snapshots.store import SnapshotStore


class ContainerSnapshots(SnapshotStore):
    """The snapshots of one state directory on one engine, whose images have ``label`` as their gateway."""

    def __init__(
        self, engine: DockerEngine, images: ImageStore, root: Path, settings: SnapshotSettings, label: str
    ) -> None:
        super().__init__(
            root,
            settings,
            provider=lambda: "container",
            remove=lambda record: engine.remove_image(record.image),
        )
        self._engine, self._images, self._label = engine, images, label

    @asynccontextmanager
    async def image_of(self, spec: SandboxSpec) -> AsyncIterator[tuple[str, Mapping[str, str]]]:
        """Yield the image that a sandbox begins with and its labels: the spec's, or that of a snapshot.

        It is not removed meanwhile. Raises as `ImageStore.require`, or NotFound if the snapshot has gone.
        """
        if not spec.snapshot:
            async with self._images.held(spec.image) as labels:
                yield spec.image, labels
            return
        async with self.held(spec.snapshot) as record:
            yield record.image, await self._engine.image_labels(record.image)

    async def reap(self) -> None:
        """Remove snapshots that are too old, and images of ours that no snapshot is known to have."""
        await self.prune()
        # What becomes ready only after the engine was asked may not be in its answer yet.
        known, ready = self.ids, {each.id for each in self.all()}
        labels = await self._engine.labelled_images(LABEL, f"{GATEWAY}={self._label}")
        found = {each[LABEL] for each in labels}
        for id in found - known - self.ids:
            await self._engine.remove_image(f"{REPOSITORY}:{id}")
        await self.lose(found, ready)
