"""The gateway's side: what a node says of its fitness is passed on."""

from __future__ import annotations

from collections.abc import Callable

from runtimes.node.fitness.messages import FitnessChanged
from runtimes.node.message import Message

#: Of why a node is not fit, as much is told to people.
WHY_MAX = 1000


class RemoteFitness:
    """One node's word on whether anything can begin there."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change

    def take(self, message: Message) -> bool:
        """Take what the node says, if it is of this; return whether it is."""
        if not isinstance(message, FitnessChanged):
            return False
        self._on_change(message.why[:WHY_MAX])
        return True
