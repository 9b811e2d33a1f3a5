"""What a node says of its own fitness."""

from __future__ import annotations

from runtimes.node.message import Message


class FitnessChanged(Message):
    """Why nothing can begin on the node, or nothing new; both empty if anything can."""

    why: str
    #: Why no sandbox can be made there; what lives there goes on.
    newcomers: str
