"""Membership: nodes come and go, and nothing is lost silently with them."""

from __future__ import annotations

from dataclasses import replace

from manager.config import NodeSpec
from manager.core.executing import Running
from manager.core.settling import Settling
from manager.core.state import SchedulerState
from manager.core.waiting.trajectory_order import TrajectoryOrder
from manager.errors import CANCEL_ASKED, FILES_LOST, Reason
from manager.outcome import Outcome, State


class Membership:
    """Joins and losses of nodes."""

    def __init__(self, state: SchedulerState, order: TrajectoryOrder, settling: Settling) -> None:
        self._state = state
        self._order = order
        self._settling = settling

    def join(self, node: NodeSpec) -> None:
        """Use a node from now on; of one that is there already take up its labels and what it is able to run.

        Its devices too, unless one is leased: a node that is awaited may come with others than are on record.
        """
        state = self._state
        if node.name in state.nodes:
            known = state.nodes[node.name]
            has = known.spec.devices, known.spec.device_bytes
            if has != (node.devices, node.device_bytes) and not self._has_device_leased(node.name):
                state.resources.refit(node, closed=known.closed is not None)
                has = node.devices, node.device_bytes
            state.nodes.describe(replace(node, devices=has[0], device_bytes=has[1]))
            state.resources.note_membership()
            return
        state.resources.join(node)
        state.nodes.join(node)

    def _has_device_leased(self, name: str) -> bool:
        leases = (running.lease for running in self._state.executing.all() if running.lease.node == name)
        return any(grant.chunk is not None for lease in leases for grant in lease.grants.values())

    def close(self, name: str, why: str, *, finishing: bool = False) -> None:
        """Place nothing on a node any more, and start there what its trajectories ask for only if it is finishing."""
        if name in self._state.nodes:
            self._state.nodes.close(name, why, finishing=finishing)
            self._state.resources.close(name, finishing=finishing)

    def open(self, name: str) -> None:
        """Start and place on a closed node again."""
        if name in self._state.nodes:
            self._state.nodes.open(name)
            self._state.resources.open(name)

    def lose(self, name: str) -> None:
        """End everything on a node: as lost, or queued again if that is safe."""
        state = self._state
        if name not in state.nodes:
            return
        gone = [trajectory for trajectory in state.trajectories if trajectory.node == name]
        for running in state.executing.all():
            if running.lease.node == name:
                self._lose(running, name)
        for trajectory in gone:
            trajectory.node = ""  # nothing of it returns to a node that comes back under this name
            self._settling.end_trajectory(trajectory, State.LOST, Reason.ENVIRONMENT_LOST)
        state.resources.leave(name)
        state.nodes.leave(name)

    def _lose(self, running: Running, node: str) -> None:
        """End it as lost, or queue it again unless it was to end: whether it has, nobody knows, and nobody wants it."""
        message, aborting = f"node {node} was lost", running.aborting
        self._settling.abort(running, message)
        trajectory = self._order.of(running.action)
        if running.waited.idempotent and not aborting and (trajectory is None or trajectory.node != node):
            self._requeue(running)
            return
        detail = {FILES_LOST: True} if trajectory is not None and trajectory.node == node else {}
        if aborting:
            message, detail = (
                f"{message} before it said that this had ended: {aborting}",
                {**detail, CANCEL_ASKED: True},
            )
        outcome = Outcome(state=State.LOST, reason=Reason.NODE_LOST, message=message, component="core", detail=detail)
        self._settling.retire(running, outcome)

    def _requeue(self, lost: Running) -> None:
        """Queue a lost action again, in its old place, as its next attempt."""
        state = self._state
        self._settling.release(lost)
        state.children.orphan(lost.id)
        again = replace(lost.waited, action=replace(lost.action, attempt=lost.action.attempt + 1), group=None)
        state.queue.admit(again, state.now_s)
        self._order.again(again, lost.waited)
