"""Membership: nodes come and go, and nothing is lost silently with them."""

from __future__ import annotations

from dataclasses import replace

from manager.config import NodeSpec
from manager.core.queue import Entry
from manager.core.settling import Settling
from manager.core.state import SchedulerState
from manager.core.trajectory_order import TrajectoryOrder
from manager.errors import Reason
from manager.outcome import Outcome, State
from manager.resources.factory import PoolFactory


class Membership:
    """Joins and losses of nodes."""

    def __init__(self, state: SchedulerState, lanes: TrajectoryOrder, settling: Settling, pools: PoolFactory) -> None:
        self._state = state
        self._lanes = lanes
        self._settling = settling
        self._pools = pools

    def join(self, node: NodeSpec) -> None:
        """Use a node from now on; nothing where it is there already."""
        state = self._state
        if node.name in state.nodes:
            return
        for pool in self._pools.of_node(node):
            state.resources.add(pool)
        for pool in state.resources:
            pool.join(node)
        state.nodes.join(node)

    def lose(self, name: str) -> None:
        """Everything on the node is over: settled as lost, or queued again where that is safe."""
        state = self._state
        if name not in state.nodes:
            return
        gone = [trajectory for trajectory in state.trajectories if trajectory.node == name]
        for entry in state.executing.all():
            if entry.lease is not None and entry.lease.node == name:
                self._lose(entry, name)
        for trajectory in gone:
            trajectory.node = ""  # nothing of it returns to a node that comes back under this name
            self._settling.end_trajectory(trajectory, State.LOST, Reason.ENVIRONMENT_LOST)
        for pool in [pool for pool in state.resources if pool.node == name]:
            state.resources.remove(pool.name)
        for pool in state.resources:
            pool.leave(name)
        state.nodes.leave(name)

    def _lose(self, entry: Entry, node: str) -> None:
        message = f"node {node} was lost"
        aborting = entry.aborting
        self._settling.abort(entry, message)
        pinned = self._lanes.of(entry)
        if entry.idempotent and not aborting and (pinned is None or pinned.node != node):
            self._requeue(entry)
            return
        state, reason = (State.CANCELLED, Reason.CANCELLED) if aborting else (State.LOST, Reason.NODE_LOST)
        self._settling.retire(entry, Outcome(state=state, reason=reason, message=message, component="core"))

    def _requeue(self, lost: Entry) -> None:
        """Queue a lost action again, in its old place, as its next attempt."""
        state = self._state
        self._settling.release(lost)
        state.families.orphan(lost.id)
        action = replace(lost.action, attempt=lost.action.attempt + 1)
        again = Entry(action, lost.key, lost.seq, idempotent=True, child=lost.child)
        state.queue.admit(again, state.now_s)
        self._lanes.again(again, lost)
