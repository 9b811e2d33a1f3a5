"""The placed pool: units that are not interchangeable, over the nodes that have them; a grant names its chunk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from manager.chunk import Chunk
from manager.config import NodeSpec, ServiceSpec
from manager.resources.pool import Pool
from manager.scheduler.policy import ChunkView


class Replica(NamedTuple):
    """A copy of a service in use that is to be made in free memory of idle places."""

    service: str
    node: str
    #: Counted on the node.
    chunk: Chunk
    #: The same in the pool's indices.
    place: Chunk


class PlacedPool(Pool):
    """Chunks that span nodes and hold services between actions."""

    @abstractmethod
    def join(self, node: NodeSpec) -> None:
        """Take in the units of a node that has come."""

    @abstractmethod
    def leave(self, node: str) -> None:
        """Forget the units of a node that is gone, and of which nothing is held any more."""

    @abstractmethod
    def close(self, node: str) -> None:
        """Give no units of a node any more; those that are held stay so."""

    @abstractmethod
    def open(self, node: str) -> None:
        """Give a closed node's units again."""

    @abstractmethod
    def learn(self, services: Mapping[str, ServiceSpec]) -> None:
        """Take up services that are new, or of another size than before."""

    @abstractmethod
    def report(self, node: str, resident: Mapping[str, Iterable[Chunk]]) -> None:
        """Believe what a node's devices hold: chunks by service, counted on the node."""

    @abstractmethod
    def restore_s(self, service: str, units: int, node: str = "") -> float:
        """Return the seconds to make a service resident on ``units``, of a node if one is named."""

    @abstractmethod
    def replicate(self, now_s: float) -> Iterable[Replica]:
        """Count on copies of services in use in free memory of idle places; nothing goes for them."""

    @abstractmethod
    def replicated(self, replica: Replica, done: bool) -> None:
        """Note that what `replicate` promised has arrived, or never will."""

    @property
    @abstractmethod
    def replicas(self) -> Mapping[str, int]:
        """How copies of services have fared, by outcome."""

    @abstractmethod
    def node_of(self, chunk: Chunk) -> str:
        """Return the node on which a place lies, given in the pool's indices."""

    @abstractmethod
    def chunk_of(self, holder: str) -> Chunk:
        """Return the place of a holder's units, in the pool's indices."""

    @abstractmethod
    def chunk_view(self, now_s: float) -> ChunkView:
        """Return the places of the pool as its policy sees them."""
