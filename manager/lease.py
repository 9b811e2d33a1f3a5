"""The lease: what an action was granted, on which node, until it settles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from manager.chunk import Chunk
from manager.noun import noun


@noun
class Grant:
    """An amount of one resource kind, with its place if it has one."""

    #: The pool it was taken from, for example ``cpu:local``, ``gpu:local`` or ``google_search``.
    pool: str
    units: int
    #: CPU: the exclusive core ids of the node.
    cores: tuple[int, ...] = ()
    #: Malleable actions: the most units it may grow to, so that as many workers are started; 0 means ``units``.
    workers: int = 0
    #: GPU: its devices, counted on the node.
    chunk: Chunk | None = None
    #: GPU: whether the service must be restored into the chunk first, and what is evicted for it.
    restore: bool = False
    evict: tuple[str, ...] = ()


@noun
class Lease:
    """Everything granted to one action; made by the core and frozen. A resize makes a new one."""

    action_id: str
    node: str
    #: By resource kind.
    grants: Mapping[str, Grant] = field(default_factory=dict)
    #: Bytes of the node's memory newly held for it (0 when its trajectory holds them already).
    memory_bytes: int = 0
    #: Actions of the same service executed in the same batch as this one, leader first; empty when alone.
    batch: tuple[str, ...] = ()

    @property
    def chunk(self) -> Chunk | None:
        """Its devices, counted on the node."""
        return next((grant.chunk for grant in self.grants.values() if grant.chunk is not None), None)

    def units(self, kind: str) -> int:
        """Return the units granted of ``kind``; 0 if none."""
        grant = self.grants.get(kind)
        return 0 if grant is None else grant.units

    @property
    def cores(self) -> tuple[int, ...]:
        grant = self.grants.get("cpu")
        return () if grant is None else grant.cores
