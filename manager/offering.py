"""Offering: an action whose turn has come is shown to the scheduling pass, in the group of those like it."""

from __future__ import annotations

from manager.action import Action
from manager.house import House
from manager.queue import Entry, Signature
from manager.trajectories import Trajectory


class Offering:
    """Puts waiting actions into the groups that a pass chooses from."""

    def __init__(self, house: House) -> None:
        self._house = house

    def needs_place(self, action: Action) -> bool:
        """Whether an action of a trajectory can run only where the trajectory lives."""
        return action.memory_bytes > 0 or self._house.resources.any_on_nodes(action.cost)

    def offer(self, entry: Entry, trajectory: Trajectory | None) -> None:
        """Let the pass choose it; a trajectory that it needs a place of has one."""
        action, house = entry.action, self._house
        node = ""
        if trajectory is not None and trajectory.node and self.needs_place(action):
            node = trajectory.node
        signature = Signature(
            task=action.task,
            demand=tuple([(kind, units.minimum) for kind, units in action.cost.items()]),
            memory_bytes=0 if trajectory is not None else action.memory_bytes,
            node=node,
            batch_service=self._batch_service(action),
            child=entry.child,
        )
        group = house.queue.offer(entry, signature)
        group.arrived += 1
        house.dirty_groups.add(group)

    def _batch_service(self, action: Action) -> str:
        """The service whose batch it may join; empty where it joins none."""
        if action.service is None or action.batch_tokens == 0:
            return ""
        service = self._house.services.get(action.service)
        return action.service if service is not None and service.batch_tokens else ""
