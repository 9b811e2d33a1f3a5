"""The states of a node, and the moves between them."""

from __future__ import annotations

from enum import StrEnum


class NodeState(StrEnum):
    """What the gateway makes of a node."""

    JOINING = "joining"  #: greeted, not yet reconciled
    READY = "ready"  #: serves
    UNFIT = "unfit"  #: heard, and says itself that nothing, or nothing new, can begin there; what runs there runs on
    SUSPECT = "suspect"  #: not heard: what runs there runs on, nothing new starts
    DRAINING = "draining"  #: takes nothing new, and goes when it is empty
    LOST = "lost"  #: counted out, with everything on it


#: The moves that a node may make; ``lost`` is final for a daemon, and its name may be used again.
LEGAL_NODE_MOVES: dict[NodeState, frozenset[NodeState]] = {
    NodeState.JOINING: frozenset(
        {NodeState.READY, NodeState.UNFIT, NodeState.DRAINING, NodeState.SUSPECT, NodeState.LOST}
    ),
    NodeState.READY: frozenset({NodeState.UNFIT, NodeState.SUSPECT, NodeState.DRAINING, NodeState.LOST}),
    NodeState.UNFIT: frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.DRAINING, NodeState.LOST}),
    NodeState.SUSPECT: frozenset({NodeState.JOINING, NodeState.LOST}),
    NodeState.DRAINING: frozenset({NodeState.SUSPECT, NodeState.READY, NodeState.UNFIT, NodeState.LOST}),
    NodeState.LOST: frozenset({NodeState.JOINING}),
}

#: The states of a node that is heard.
HEARD = frozenset({NodeState.JOINING, NodeState.READY, NodeState.UNFIT, NodeState.DRAINING})

#: The states of a node that is silent, or may be again before it serves.
UNSURE = frozenset({NodeState.SUSPECT, NodeState.JOINING})
