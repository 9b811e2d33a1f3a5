"""Who listens to what a node says of itself."""

from __future__ import annotations

from typing import Protocol

from runtimes.node import wire


class NodeListener(Protocol):
    """Who wants to know what a node says of itself."""

    def draining(self, why: str) -> None:
        """It takes no new work."""
        ...

    def goodbye(self, why: str, killed: bool) -> None:
        """Its daemon ends; ``killed``: nothing of what it had is left."""
        ...

    def fitness(self, why: str, finishing: bool) -> None:
        """Nothing can begin there, and why; empty: anything can. ``finishing``: what lives there goes on."""
        ...

    def sandbox_changed(self, facts: wire.TrajectoryFacts) -> None:
        """A trajectory has another sandbox there, or none any more."""
        ...
