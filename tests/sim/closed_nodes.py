"""What is checked of nodes that are closed in simulated worlds."""

from __future__ import annotations

import math

from manager.action import Action
from manager.config import ManagerSpec, NodeSpec
from manager.events import (
    Abort,
    Command,
    EndTrajectory,
    Event,
    Execute,
    NodeClosed,
    NodeJoined,
    NodeLost,
    NodeOpened,
    Settle,
    Submitted,
    TrajectoryPlaced,
)


class ClosedNodes:
    """Nothing is placed on a closed node, or on one not right for it; where it finishes its trajectories go on."""

    def __init__(self, spec: ManagerSpec) -> None:
        self._nodes: dict[str, NodeSpec] = {node.name: node for node in spec.nodes}
        self._closed: set[str] = set()
        self._finishing: set[str] = set()
        #: Trajectories by the node where they are known to live.
        self._homes: dict[str, str] = {}
        #: When a trajectory was first asked for, and when a node was last closed: one that is not known to live
        #: anywhere may have been given its memory there in between.
        self._asked_s: dict[str, float] = {}
        self._closed_s: dict[str, float] = {}
        self._running: dict[str, str] = {}

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        match event:
            case Submitted() if event.action.trajectory is not None:
                self._asked_s.setdefault(event.action.trajectory, now_s)
            case NodeClosed():
                if event.node not in self._closed:
                    self._closed_s[event.node] = now_s
                self._closed |= self._nodes.keys() & {event.node}
                (self._finishing.add if event.finishing else self._finishing.discard)(event.node)
                assert not any(isinstance(command, Abort | Settle) for command in commands), f"{event} ends something"
            case NodeOpened():
                self._closed.discard(event.node)
            case NodeLost():
                self._closed.discard(event.node)
                self._nodes.pop(event.node, None)
            case NodeJoined():
                self._nodes[event.node.name] = event.node
            case _:
                pass
        for command in commands:
            if isinstance(command, TrajectoryPlaced):
                assert command.node not in self._closed, f"{command} at {now_s}"
                self._homes[command.trajectory] = command.node
            elif isinstance(command, EndTrajectory):
                self._homes.pop(command.trajectory, None)
                self._asked_s.pop(command.trajectory, None)
            elif isinstance(command, Execute) and command.lease.node:
                self._check(command.action, command.lease.node)

    def end(self) -> None:
        """All was checked as it happened."""

    def _check(self, action: Action, node: str) -> None:
        at_home = node in self._finishing and (self._lives(action.trajectory, node) or action.parent is not None)
        assert node not in self._closed or at_home, f"{action.id} is started on {node}, which is closed"
        if action.trajectory is not None and "cpu" in action.cost:  # what takes devices alone may be anywhere
            self._homes[action.trajectory] = node
        if set(action.cost) != {"gpu"}:  # devices alone are chosen by what is resident
            assert self._nodes[node].suits(action.placement), f"{action.id} is started on {node}: {action.placement}"

    def _lives(self, trajectory: str | None, node: str) -> bool:
        if trajectory is None or self._homes.get(trajectory, node) != node:
            return False
        return trajectory in self._homes or self._asked_s.get(trajectory, math.inf) <= self._closed_s[node]
