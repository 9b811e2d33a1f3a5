"""When the sandboxes of a simulation are there: a node makes them one after the other, each with its first action."""

from __future__ import annotations


class SandboxStarts:
    """Sandboxes by trajectory; each takes ``start_s`` once its node gets to it, ``per_node_s`` of them a second."""

    def __init__(self, start_s: float, per_node_s: float) -> None:
        self._start_s = start_s
        self._per_node_s = per_node_s
        self._made: set[str] = set()
        #: When a node can make the next one.
        self._next_s: dict[str, float] = {}

    def ready_s(self, trajectory: str, node: str, now_s: float) -> float:
        """The instant from which an action of a trajectory can work; its first one asks for the sandbox."""
        if trajectory in self._made:
            return now_s
        self._made.add(trajectory)
        made_s = max(now_s, self._next_s.get(node, 0.0)) + 1.0 / self._per_node_s
        self._next_s[node] = made_s
        return made_s + self._start_s

    def lost(self, trajectory: str) -> None:
        """Its sandbox went with its node: the trajectory will ask for another one."""
        self._made.discard(trajectory)
