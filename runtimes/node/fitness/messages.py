"""What a node says of its own fitness."""

from __future__ import annotations

from runtimes.node.message import Message

#: What a gateway that hears of it says in its welcome (`runtimes.node.wire.NodeWelcome.hears`).
FITNESS = "fitness"


class FitnessChanged(Message):
    """Why nothing can begin on the node, or nothing new; both empty if anything can."""

    why: str
    #: Why no sandbox can be made there; what lives there goes on. Gateways before it was told skip it.
    newcomers: str = ""
