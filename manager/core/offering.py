"""Offering: an action whose turn has come is shown to the scheduling pass, in the group of those like it."""

from __future__ import annotations

from manager.action import Action
from manager.core.queue import Entry, Signature
from manager.core.state import SchedulerState


class Offering:
    """Puts waiting actions into the groups that a pass chooses from."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def needs_place(self, action: Action) -> bool:
        """Whether an action of a trajectory can run only where the trajectory lives."""
        return action.memory_bytes > 0 or self._state.resources.any_on_nodes(action.cost)

    def offer(self, entry: Entry, node: str = "") -> None:
        """Let the pass choose it, on ``node`` where it is bound to one; its trajectory, if any, holds its memory."""
        action, state = entry.action, self._state
        memory_bytes = action.memory_bytes if action.trajectory is None else 0
        service = "" if action.service is None else self._batch_service(action.service, action)
        signature = Signature(action.task, action.demand, memory_bytes, node, service, entry.child)
        group = state.queue.offer(entry, signature)
        group.arrived += 1
        state.dirty_groups.add(group)

    def _batch_service(self, name: str, action: Action) -> str:
        """The service whose batch it may join; empty where it joins none."""
        service = self._state.services.get(name) if action.batch_tokens else None
        return name if service is not None and service.batch_tokens else ""
