"""Connections: how many one door has open, and what is said to one too many."""

from __future__ import annotations

from dataclasses import dataclass

from manager.errors import CapacityExceeded

#: Seconds that a refused connection may take to read its refusal.
LINGER_S = 1.0
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Connections:
    """How many are open, how many may be, and how many were refused."""

    limit: int = 8192
    open: int = 0
    refused: int = 0

    def enter(self, component: str) -> CapacityExceeded | None:
        """One more is open from now on, until `leave`; or why it may not be."""
        if self.open < self.limit:
            self.open += 1
            return None
        self.refused += 1
        message = f"{self.limit} connections are open already"
        return CapacityExceeded(message, component=component, retry_after_s=RETRY_AFTER_S)

    def leave(self) -> None:
        """One that had entered is closed."""
        self.open -= 1
