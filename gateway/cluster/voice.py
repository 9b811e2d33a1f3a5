"""What a node says of itself, and who is told."""

from __future__ import annotations

from collections.abc import Callable

from runtimes.node.membership import DrainAsked, Emptied, FoundUnfit, RosterEvent, SaidGoodbye


class Voice:
    """What one node says of itself, told to the roster: a `runtimes.node.remote.NodeListener`."""

    def __init__(
        self,
        name: str,
        instance: Callable[[], str],
        step: Callable[[RosterEvent], object],
        is_empty: Callable[[str], bool],
    ) -> None:
        """``is_empty`` tells whether a node has nothing of the scheduler's."""
        self._is_empty = is_empty
        self._name = name
        self._instance = instance
        self._step = step

    def draining(self, why: str) -> None:
        self._step(DrainAsked(self._name, why))

    def fitness(self, why: str, finishing: bool) -> None:
        self._step(FoundUnfit(self._name, self._instance(), why, finishing))

    def goodbye(self, why: str, killed: bool) -> None:
        if self._is_empty(self._name):
            self._step(Emptied(self._name))  # one that drains and has seen it first: nothing is lost with it
        self._step(SaidGoodbye(self._name, self._instance(), why, killed))

    def sandbox_changed(self, facts: object) -> None:
        """Its next action is told by the node itself."""
