"""The order of trajectories: whose turn it is, where a trajectory lives, and when it is over."""

from __future__ import annotations

from manager.action import Action, demand_of
from manager.core.state import SchedulerState
from manager.core.trajectories import TrajectoryState
from manager.core.waiting.queue import Waiting
from manager.events import EndTrajectory, TrajectoryOpened, TrajectoryPlaced
from manager.resources.nodes import Node


class TrajectoryOrder:
    """The actions of each trajectory run one at a time and in order; children pass beside."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def of(self, action: Action) -> TrajectoryState | None:
        """Return the trajectory that an action belongs to; None if there is none."""
        return None if action.trajectory is None else self._state.trajectories.get(action.trajectory)

    def line_up(self, waiting: Waiting) -> None:
        """Offer an action to the pass, or put it behind the earlier ones of its trajectory."""
        action = waiting.action
        if action.trajectory is None:
            self._state.queue.offer(waiting)
            return
        trajectory = self._state.trajectories.get(action.trajectory)
        if trajectory is None:
            trajectory = TrajectoryState(
                action.trajectory, action.task, action.memory_bytes, action.trajectory_ttl_s, waiting.seq
            )
            self._state.trajectories.add(trajectory)
        if waiting.child:
            trajectory.children += 1
        elif trajectory.active is None:
            trajectory.active = waiting
        else:
            trajectory.behind.append(waiting)
            return
        self._offer(waiting, trajectory)

    def can_resume(self, action: Action, node: str) -> bool:
        """Return whether a running action may take its trajectory's turn on ``node``."""
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

    def resume(self, waiting: Waiting, node: str) -> None:
        """Give a running action its trajectory's turn, and the trajectory its place."""
        trajectory = self.of(waiting.action)
        if trajectory is None:
            return
        trajectory.active = waiting
        if not trajectory.node and self._needs_place(waiting.action):
            self._pin(trajectory, self._state.nodes[node])

    def again(self, waiting: Waiting, lost: Waiting) -> None:
        """Offer the next attempt of an action whose node was lost."""
        trajectory = self.of(waiting.action)
        if trajectory is None:
            self._state.queue.offer(waiting)
            return
        if trajectory.active is lost:
            trajectory.active = waiting
        self._offer(waiting, trajectory)

    def leave(self, waiting: Waiting) -> None:
        """Give the turn of an action that has settled to the next one."""
        trajectory = self.of(waiting.action)
        if trajectory is None:
            return
        if waiting in trajectory.unplaced:
            trajectory.unplaced = tuple([one for one in trajectory.unplaced if one is not waiting])
        if trajectory.active is waiting:
            trajectory.active = None
        elif waiting.child:
            trajectory.children -= 1
        else:
            trajectory.behind.remove(waiting)
        if trajectory.active is None and trajectory.behind:
            trajectory.active = trajectory.behind.pop(0)
            self._offer(trajectory.active, trajectory)
        if trajectory.at_rest:
            self._rest(trajectory)

    def open(self, event: TrajectoryOpened, seq: int) -> None:
        """Ask for a place ahead of the first action; idempotent."""
        trajectories = self._state.trajectories
        known = trajectories.get(event.trajectory)
        if known is not None:
            known.explicit = True
            return
        trajectory = TrajectoryState(event.trajectory, event.task, event.memory_bytes, event.ttl_s, seq)
        trajectories.add(trajectory)
        trajectory.explicit = True
        trajectory.demand, trajectory.placement = demand_of(event.cost), event.placement
        home = self._state.nodes.get(event.node)
        if home is not None and event.memory_bytes <= home.free_bytes:
            self._pin(trajectory, home)
        elif event.memory_bytes or self._state.resources.any_on_nodes(event.cost):
            trajectories.wait_for_memory(trajectory)
        trajectories.rest(trajectory, self._state.now_s)

    def place(self) -> None:
        """Give memory to those that wait for it, first come first served, and note the first that gets none."""
        state = self._state
        state.memory_waits_from, state.memory_waits_bytes = None, 0
        for trajectory in state.trajectories.waiting():
            place = trajectory.demand, trajectory.memory_bytes, trajectory.placement
            node = state.nodes.choose(*place)
            if node is None:
                if state.nodes.ever(*place):
                    state.memory_waits_from = trajectory.opened_seq
                    state.memory_waits_bytes = trajectory.memory_bytes
                    return
                continue  # only a new node could serve it: it must not hold up the others
            self._pin(trajectory, node)
            if trajectory.unplaced:
                for waiting in trajectory.unplaced:
                    state.queue.offer(waiting, trajectory.node)
                trajectory.unplaced = ()
            elif trajectory.at_rest:
                state.trajectories.rest(trajectory, state.now_s)

    def close(self, trajectory: TrajectoryState) -> None:
        """Give back the memory, and end the environment, of a trajectory of which nothing runs or waits."""
        state = self._state
        state.trajectories.remove(trajectory)
        if trajectory.node and trajectory.node in state.nodes:
            state.nodes[trajectory.node].release(trajectory.name)
        state.commands.append(EndTrajectory(trajectory=trajectory.name))

    def _pin(self, trajectory: TrajectoryState, node: Node) -> None:
        """Hold its memory where it lives from now on."""
        node.hold(trajectory.name, trajectory.memory_bytes, trajectory=True)
        trajectory.node = node.spec.name
        self._state.trajectories.wait_no_more(trajectory)
        if trajectory.explicit:
            self._state.commands.append(TrajectoryPlaced(trajectory=trajectory.name, node=trajectory.node))

    def _offer(self, waiting: Waiting, trajectory: TrajectoryState) -> None:
        """Let the pass choose an action, once its trajectory has a place (if it needs one)."""
        if not self._needs_place(waiting.action):
            self._state.queue.offer(waiting)
        elif trajectory.node:
            self._state.queue.offer(waiting, trajectory.node)
        else:
            if not trajectory.demand:
                trajectory.demand, trajectory.placement = waiting.action.demand, waiting.action.placement
            trajectory.unplaced += (waiting,)
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
