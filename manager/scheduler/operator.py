"""The DP operator: what DPArrange must know of a resource's topology (paper, appendix "Unified DPArrange")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Operator(Protocol):
    """A topology as a box of demand vectors.

    The paper's four primitives become three facts. START is the zero vector, END is ``capacity``; PREV(j, k)
    is ``j - demand(k)``, the same shift for every state, so a whole table moves at once; ISVALID is being
    inside the box (an infinity in the table says the rest, docs/SCHEDULING.md R7).
    """

    @property
    def capacity(self) -> tuple[int, ...]:
        """The largest demand that fits, one number an axis."""
        ...

    @property
    def interchangeable(self) -> bool:
        """Whether any of the units serve any request: then alone may units be handed out one by one."""
        ...

    def demand(self, units: int) -> tuple[int, ...]:
        """What ``units`` take, along the axes of ``capacity``; a set of requests fits iff its sum is inside."""
        ...


@dataclass(frozen=True, slots=True)
class BasicOperator:
    """Interchangeable units (cores, quota): one axis."""

    units: int

    @property
    def capacity(self) -> tuple[int, ...]:
        return (self.units,)

    @property
    def interchangeable(self) -> bool:
        return True

    def demand(self, units: int) -> tuple[int, ...]:
        return (units,)
