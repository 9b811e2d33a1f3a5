"""What the store knows of nodes: who has joined, by which key it comes again, and how often the gateway was started."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from gateway.store.store import Store
from manager.config import NodeSpec

GENERATION = "cluster.generation"
#: Followed by a node's name: which life of its state directory is known.
EPOCH = "cluster.epoch."
#: Whether a node is waited for after a restart: one that was lost is not.
KnownState = Literal["ready", "draining", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedNode:
    """A node that has joined."""

    name: str
    spec: NodeSpec
    key_digest: str
    state: KnownState
    joined_s: float
    #: Which life of its state directory this gateway has compared its record with; empty if none yet.
    epoch: str = ""


class NodeRecords:
    """The nodes on record. Changes are noted at once and durable with the next commit."""

    def __init__(self, store: Store, wall: Callable[[], float] = time.time, *, nodes_max: int = 1024) -> None:
        """``nodes_max``: beyond so many, those that were lost go, the one that joined longest ago first."""
        self._store = store
        self._wall = wall
        self._nodes_max = nodes_max
        self._known: dict[str, RecordedNode] = {}
        self.generation = 0

    async def open(self) -> None:
        """Read what is on record, and count this start of the gateway; raises StorageUnavailable."""
        before = await self._store.document(GENERATION)
        self.generation = int(before or 0) + 1
        self._store.save_document(GENERATION, str(self.generation))
        for row in await self._store.read("nodes", ()):
            spec = msgspec.json.decode(row["spec"], type=NodeSpec)
            known = RecordedNode(
                name=row["name"],
                spec=spec,
                key_digest=row["key_digest"],
                state=row["state"],
                joined_s=row["joined_s"],
                epoch=await self._store.document(EPOCH + row["name"]) or "",
            )
            self._known[known.name] = known
        self._keep_bound()
        for row in await self._store.read("document_names", (EPOCH,)):
            if str(row["name"]).removeprefix(EPOCH) not in self._known:
                self._store.save_document(row["name"], None)
        await self._store.durable()

    def get(self, name: str) -> RecordedNode | None:
        return self._known.get(name)

    @property
    def all(self) -> Mapping[str, RecordedNode]:
        return self._known

    def joined(self, spec: NodeSpec, key_digest: str) -> None:
        """It has joined, or comes with another key."""
        state: KnownState = "ready"
        known = self._known.get(spec.name)
        self._save(
            RecordedNode(
                name=spec.name,
                spec=replace(spec, able=None),
                key_digest=key_digest,
                state=state,
                joined_s=self._wall(),
                epoch="" if known is None else known.epoch,
            )
        )
        self._keep_bound()

    def compared(self, name: str, epoch: str) -> None:
        """What is on record of this life of a node is decided on: what begins there from now on is of this one."""
        known = self._known.get(name)
        if known is not None and known.epoch != epoch:
            self._known[name] = replace(known, epoch=epoch)
            self._store.save_document(EPOCH + name, epoch)

    def moved(self, name: str, state: KnownState) -> None:
        """It drains, was lost, or serves again."""
        known = self._known.get(name)
        if known is not None and known.state != state:
            self._save(replace(known, state=state))

    def forget(self, name: str) -> None:
        """It may come again by a new ticket only."""
        if self._known.pop(name, None) is not None:
            self._store.note("delete_node", name)
            self._store.save_document(EPOCH + name, None)

    def _keep_bound(self) -> None:
        if len(self._known) <= self._nodes_max:
            return
        lost = sorted(
            (known for known in self._known.values() if known.state == "lost"), key=lambda each: each.joined_s
        )
        for known in lost[: max(0, len(self._known) - self._nodes_max)]:
            self.forget(known.name)

    async def durable(self) -> None:
        """Wait until what was noted is on disk."""
        await self._store.durable()

    def _save(self, known: RecordedNode) -> None:
        self._known[known.name] = known
        spec = msgspec.json.encode(known.spec).decode()
        self._store.note("save_node", known.name, spec, known.key_digest, known.state, known.joined_s)
