"""What is checked of nodes that are closed in simulated worlds."""

from __future__ import annotations

from manager.action import Action
from manager.config import ManagerSpec
from manager.core.core import Core
from manager.events import Abort, Command, Event, Execute, NodeClosed, NodeJoined, NodeLost, NodeOpened, Settle


class ClosedNodes:
    """Nothing is placed on a closed node, or on one not right for it; where it finishes its trajectories go on."""

    def __init__(self, spec: ManagerSpec, core: Core) -> None:
        self._trajectories = core.state.trajectories
        self._nodes = {node.name: node for node in spec.nodes}
        self._closed: set[str] = set()
        self._finishing: set[str] = set()
        #: Those whose devices serve on.
        self._devices: set[str] = set()
        #: Where the trajectories lived before what is seen now.
        self._homes: dict[str, str] = {}

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        match event:
            case NodeClosed():
                self._closed |= self._nodes.keys() & {event.node}
                (self._finishing.add if event.finishing else self._finishing.discard)(event.node)
                (self._devices.add if event.devices else self._devices.discard)(event.node)
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
        homes = {trajectory.name: trajectory.node for trajectory in self._trajectories if trajectory.node}
        for name, node in homes.items() - self._homes.items():
            assert node not in self._closed, f"{name} is placed on {node}, which is closed, at {now_s}"
        for command in commands:
            if isinstance(command, Execute) and command.lease.node:
                self._check(command.action, command.lease.node)
        self._homes = homes

    def end(self) -> None:
        """All was checked as it happened."""

    def _check(self, action: Action, node: str) -> None:
        lives = action.trajectory is not None and self._homes.get(action.trajectory) == node
        at_home = node in self._finishing and (lives or action.parent is not None)
        devices_alone = set(action.cost) == {"gpu"}
        serves = at_home or (devices_alone and node in self._devices)
        assert node not in self._closed or serves, f"{action.id} is started on {node}, which is closed"
        if not devices_alone:  # they are chosen by what is resident
            assert self._nodes[node].suits(action.placement), f"{action.id} is started on {node}: {action.placement}"
