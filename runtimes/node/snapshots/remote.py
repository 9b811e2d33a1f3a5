"""The gateway's side of a node's snapshots: what the node said of them last, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

import msgspec

from manager.errors import Conflict
from runtimes.node import wire
from runtimes.node.message import Message
from runtimes.node.remote_requests import RemoteRequests
from runtimes.node.snapshots.messages import SnapshotOrder, SnapshotsKept
from runtimes.node.wire import COMPONENT
from runtimes.sandbox.snapshots.record import SnapshotRecord

#: Of one node; its own bound (``sandbox.snapshots.count_max``) is far below.
SNAPSHOTS_MAX = 16384


class RemoteSnapshots:
    """The snapshots that one node keeps, as far as it has said so."""

    def __init__(self, node: str, requests: RemoteRequests) -> None:
        self._node = node
        self._requests = requests
        self._known: Mapping[str, SnapshotRecord] = {}
        #: Called with all of them, by id, whenever the node has said which they are.
        self.on_change: Callable[[Mapping[str, SnapshotRecord]], None] = lambda known: None

    async def compare(self) -> None:
        """Have the node say which snapshots it keeps, and whenever that changes on this link.

        Raises ActionFailed(node_lost) if it is given up.
        """
        await self._requests.answered("snapshots", "")

    async def order(self, trajectory: str, id: str, spared: Collection[str]) -> SnapshotRecord:
        """Have a snapshot taken of a trajectory that lives there, in spite of cuts.

        Raises ActionFailed(node_lost), and what the node says.
        """
        body = msgspec.json.encode(SnapshotOrder(id, tuple(spared)))
        await self._requests.answered("snapshot", trajectory, body=body)
        record = self._known.get(id)
        if record is None:
            told = f"snapshot {id!r} was removed on node {self._node} as soon as it was taken"
            raise Conflict(told, component=COMPONENT)
        return record

    def drop(self, id: str) -> asyncio.Future[bool]:
        """Have one removed as soon as nothing there needs it; return what is done once it was heard."""
        return self._requests.remember("drop_snapshot", id)

    def take(self, message: Message) -> bool:
        """Take what the node says, if it is of this; return whether it is. Raises ChannelError."""
        if not isinstance(message, SnapshotsKept):
            return False
        try:
            records = message.read()
        except (msgspec.MsgspecError, ValueError, TypeError, AssertionError) as error:
            raise wire.ChannelError(f"snapshots that do not fit: {error}") from None
        if len(records) > SNAPSHOTS_MAX:
            raise wire.ChannelError(f"a node that tells of more than {SNAPSHOTS_MAX} snapshots")
        self._known = {record.id: record for record in records}
        self.on_change(self._known)
        return True
