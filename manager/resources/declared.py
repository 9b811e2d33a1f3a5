"""Declared resources: what the configuration declares by a spec of some kind, and the spec makes its own pool.

A new kind is a module with its spec and its pool, and a row in `manager.resources.kinds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from manager.resources.pool import Pool


class ResourceSpec(ABC):
    """One declared resource; the kinds are frozen dataclasses."""

    __slots__ = ()

    #: As the configuration's ``kind`` names it, and what that means.
    kind: ClassVar[str]
    meaning: ClassVar[str]
    #: What the account of its use counts, with its unit.
    measure: ClassVar[str] = "slot_s"

    #: Units when nothing is held.
    limit: int

    @property
    @abstractmethod
    def most(self) -> int:
        """Units that can be granted at once."""

    @abstractmethod
    def make_pool(self, name: str) -> DeclaredPool[Any]:
        """Return the pool of a resource of this name."""


SpecT = TypeVar("SpecT", bound=ResourceSpec)


class DeclaredPool(Pool, Generic[SpecT]):
    """A resource without a place, by its spec."""

    def __init__(self, name: str, spec: SpecT) -> None:
        super().__init__(name, name)
        self.spec = spec
        self.measure = spec.measure

    @property
    def total(self) -> int:
        return self.spec.limit

    def admits(self, units: int) -> bool:
        return units <= self.spec.most

    def reconfigure(self, spec: SpecT) -> None:
        """Take new bounds; nothing that is held is taken away."""
        self.spec = spec
        self._note_change()
