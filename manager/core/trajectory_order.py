"""Lanes: the rules of trajectories. Whose turn it is, where a trajectory lives, and when it is over."""

from __future__ import annotations

from manager.action import Action, demand_of
from manager.core.queue import Entry
from manager.core.state import SchedulerState
from manager.core.trajectories import TrajectoryState
from manager.events import EndTrajectory, TrajectoryOpened, TrajectoryPlaced
from manager.resources.nodes import Node


class TrajectoryOrder:
    """One lane for each trajectory: its actions one at a time and in order; children pass beside."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def of(self, entry: Entry) -> TrajectoryState | None:
        """The trajectory that an action belongs to."""
        name = entry.action.trajectory
        return None if name is None else self._state.trajectories.get(name)

    def line_up(self, entry: Entry) -> None:
        """Offer an action to the pass, or put it behind the earlier ones of its trajectory."""
        action = entry.action
        if action.trajectory is None:
            self._state.queue.offer(entry)
            return
        trajectory = self._state.trajectories.get(action.trajectory)
        if trajectory is None:
            trajectory = TrajectoryState(
                action.trajectory, action.task, action.memory_bytes, action.trajectory_ttl_s, entry.seq
            )
            self._state.trajectories.open(trajectory)
        if entry.child:
            trajectory.children += 1
            self._offer(entry, trajectory)
        elif trajectory.active is None:
            trajectory.active = entry
            self._offer(entry, trajectory)
        else:
            trajectory.lane.append(entry)

    def can_resume(self, action: Action, node: str) -> bool:
        """Whether an action that runs on ``node`` already may have the turn of its trajectory, which lives there."""
        if action.trajectory is None:
            return True
        state = self._state
        trajectory = state.trajectories.get(action.trajectory)
        if trajectory is None or not trajectory.at_rest or trajectory.ending:
            return False
        if not self._needs_place(action):
            return True
        if trajectory.node:
            return trajectory.node == node
        return node in state.nodes and trajectory.memory_bytes <= state.nodes[node].free_bytes

    def resume(self, entry: Entry, node: str) -> None:
        """It has the turn, and its trajectory its place."""
        trajectory = self.of(entry)
        if trajectory is None:
            return
        trajectory.active = entry
        if not trajectory.node and self._needs_place(entry.action):
            self._pin(trajectory, self._state.nodes[node])

    def again(self, entry: Entry, lost: Entry) -> None:
        """Offer the next attempt of an action whose node was lost."""
        trajectory = self.of(entry)
        if trajectory is None:
            self._state.queue.offer(entry)
            return
        if trajectory.active is lost:
            trajectory.active = entry
        self._offer(entry, trajectory)

    def leave(self, entry: Entry) -> None:
        """An action has settled: the turn of the next one."""
        trajectory = self.of(entry)
        if trajectory is None:
            return
        if entry in trajectory.homeless:
            trajectory.homeless.remove(entry)
        if trajectory.active is entry:
            trajectory.active = None
        elif entry.child:
            trajectory.children -= 1
        else:
            trajectory.lane.remove(entry)
        self._next(trajectory)
        if trajectory.active is None and not trajectory.children:
            self._rest(trajectory)

    def open(self, event: TrajectoryOpened, seq: int) -> None:
        """Ask for a place ahead of the first action; idempotent."""
        trajectories = self._state.trajectories
        known = trajectories.get(event.trajectory)
        if known is not None:
            known.explicit = True
            return
        trajectory = TrajectoryState(event.trajectory, event.task, event.memory_bytes, event.ttl_s, seq)
        trajectories.open(trajectory)
        trajectory.explicit = True
        trajectory.demand = demand_of(event.cost)
        if event.memory_bytes or self._state.resources.any_on_nodes(event.cost):
            trajectories.wait_for_memory(trajectory)
        trajectories.rest(trajectory, self._state.now_s)

    def place(self) -> None:
        """Give memory to those that wait for it, first come first served."""
        state = self._state
        state.memory_waits_from = None
        for trajectory in state.trajectories.waiting():
            node = state.nodes.choose(trajectory.demand, trajectory.memory_bytes)
            if node is None:
                if state.nodes.ever(trajectory.demand, trajectory.memory_bytes):
                    state.memory_waits_from = trajectory.opened_seq
                    return
                continue  # only a new node could serve it: it must not hold up the others
            self._pin(trajectory, node)
            for entry in trajectory.homeless:
                self._state.queue.offer(entry, trajectory.node)
            trajectory.homeless.clear()
            if trajectory.at_rest:
                state.trajectories.rest(trajectory, state.now_s)

    def _pin(self, trajectory: TrajectoryState, node: Node) -> None:
        """Hold its memory where it lives from now on."""
        node.hold(trajectory.name, trajectory.memory_bytes)
        trajectory.node = node.spec.name
        self._state.trajectories.wait_no_more(trajectory)
        if trajectory.explicit:
            self._state.commands.append(TrajectoryPlaced(trajectory=trajectory.name, node=trajectory.node))

    def close(self, trajectory: TrajectoryState) -> None:
        """Its memory returns and its environment goes; nothing of it runs or waits."""
        state = self._state
        state.trajectories.close(trajectory)
        if trajectory.node and trajectory.node in state.nodes:
            state.nodes[trajectory.node].release(trajectory.name)
        state.commands.append(EndTrajectory(trajectory=trajectory.name))

    def _next(self, trajectory: TrajectoryState) -> None:
        """The turn of the trajectory's next action, where none has it."""
        if trajectory.active is None and trajectory.lane:
            trajectory.active = trajectory.lane.popleft()
            self._offer(trajectory.active, trajectory)

    def _offer(self, entry: Entry, trajectory: TrajectoryState) -> None:
        """Let the pass choose it, once its trajectory has a place (where it needs one)."""
        if not self._needs_place(entry.action):
            self._state.queue.offer(entry)
            return
        if trajectory.node:
            self._state.queue.offer(entry, trajectory.node)
            return
        trajectory.demand = trajectory.demand or entry.action.demand
        trajectory.homeless.append(entry)
        self._state.trajectories.wait_for_memory(trajectory)

    def _rest(self, trajectory: TrajectoryState) -> None:
        if trajectory.ending:
            self.close(trajectory)
            return
        if not trajectory.explicit:
            self._state.trajectories.wait_no_more(trajectory)
        self._state.trajectories.rest(trajectory, self._state.now_s)

    def _needs_place(self, action: Action) -> bool:
        """Return whether an action of a trajectory can run only where the trajectory lives."""
        return action.memory_bytes > 0 or self._state.resources.any_on_nodes(action.cost)
