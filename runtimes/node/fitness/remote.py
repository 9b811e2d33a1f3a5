"""The gateway's side: what a node says of its fitness is passed on."""

from __future__ import annotations

from collections.abc import Callable

from runtimes.node.fitness.messages import FitnessChanged
from runtimes.node.message import Message

#: Of why a node is not fit, as much is told to people.
WHY_MAX = 1000


def told(why: str, newcomers: str) -> tuple[str, bool]:
    """Return why a node is unfit, empty if it is not, and whether what lives there goes on."""
    return (why or newcomers)[:WHY_MAX], not why and bool(newcomers)


class RemoteFitness:
    """One node's word on whether anything can begin there."""

    def __init__(self, on_change: Callable[[str, bool], None]) -> None:
        """``on_change`` is told why the node is unfit, empty if it is not, and whether what lives there goes on."""
        self._on_change = on_change

    def take(self, message: Message) -> bool:
        """Take what the node says, if it is of this; return whether it is."""
        if not isinstance(message, FitnessChanged):
            return False
        self._on_change(*told(message.why, message.newcomers))
        return True
