"""What travels of the snapshots that a node keeps; their files stay there.

Its requests: ``snapshot`` takes one, ``snapshots`` has all told that there are, now and whenever that changes on this
link, and ``drop_snapshot`` removes one as soon as nothing needs it.
"""

from __future__ import annotations

import msgspec

from runtimes.node.message import Message
from runtimes.sandbox.snapshots.record import SnapshotRecord


class SnapshotsKept(Message):
    """All the snapshots that a node keeps now; from the node, once it was asked for them."""

    #: JSON, as in their own files.
    records: bytes

    @classmethod
    def of(cls, records: list[SnapshotRecord]) -> SnapshotsKept:
        """Return what tells of these."""
        return cls(msgspec.json.encode(records))

    def read(self) -> list[SnapshotRecord]:
        """Return them; raises msgspec.MsgspecError for what is none."""
        return msgspec.json.decode(self.records, type=list[SnapshotRecord])


class SnapshotOrder(msgspec.Struct, frozen=True):
    """What a request to take a snapshot says beside its trajectory."""

    #: Its name from the first: a request that is asked again, as its answer was lost, takes no second one.
    id: str
    #: Those that are not to be removed to make room: something is about to begin with them.
    spared: tuple[str, ...] = ()
