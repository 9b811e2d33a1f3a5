"""A node's side of snapshots: they are taken, told and removed as the gateway asks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import convert

from manager.errors import InvalidInput
from runtimes.node.message import Message
from runtimes.node.snapshots.messages import SnapshotOrder, SnapshotsKept
from runtimes.node.wire import COMPONENT
from runtimes.sandbox.environments import Environments
from tangram.types import SnapshotId


class ServedSnapshots:
    """The snapshots of one node. Use from one event loop."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._store = environments.provider.snapshots
        self._store.on_change = self._changed
        #: Called with all that are kept, whenever that changes and the gateway of this link has asked for it.
        self.on_change: Callable[[Message], None] = lambda told: None
        self._asked = False

    async def take(self, trajectory: str, order: bytes) -> None:
        """Take a snapshot of a trajectory, once; raises as `Environments.snapshot`."""
        try:
            wanted = msgspec.json.decode(order, type=SnapshotOrder)
            id = convert(wanted.id, SnapshotId)
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"no order of a snapshot: {error}", component=COMPONENT) from None
        await self._environments.snapshot(trajectory, id=id, spared=wanted.spared)
        self.tell()  # before the answer, whatever was told under an earlier link

    async def drop(self, id: str) -> None:
        """Remove one as soon as nothing needs it."""
        await self._store.give_up(id)

    def tell(self) -> None:
        """Tell of all that are kept, from now on whenever that changes."""
        self._asked = True
        self._changed()

    def detach(self) -> None:
        """There is no link: the next gateway asks anew."""
        self._asked = False

    def _changed(self) -> None:
        if self._asked:
            self.on_change(SnapshotsKept.of(self._store.all()))
