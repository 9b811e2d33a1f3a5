"""What a node says of itself, and who is told."""

from __future__ import annotations

from collections.abc import Callable

from runtimes.node.roster import DrainAsked, FoundUnfit, RosterEvent, SaidGoodbye


class Voice:
    """What one node says of itself, told to the roster: a `runtimes.node.listener.NodeListener`."""

    def __init__(self, name: str, instance: Callable[[], str], step: Callable[[RosterEvent], object]) -> None:
        self._name = name
        self._instance = instance
        self._step = step

    def draining(self, why: str) -> None:
        self._step(DrainAsked(self._name, why))

    def fitness(self, why: str, finishing: bool) -> None:
        self._step(FoundUnfit(self._name, self._instance(), why, finishing))

    def goodbye(self, why: str, killed: bool) -> None:
        self._step(SaidGoodbye(self._name, self._instance(), why, killed))

    def sandbox_changed(self, facts: object) -> None:
        """Its next action is told by the node itself."""
