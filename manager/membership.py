"""Membership: nodes come and go, and nothing is lost silently with them."""

from __future__ import annotations

from dataclasses import replace

from manager.config import NodeSpec
from manager.errors import Reason
from manager.house import House
from manager.lanes import Lanes
from manager.outcome import Outcome, State
from manager.queue import Entry
from manager.resources.factory import PoolFactory
from manager.settling import Settling


class Membership:
    """Joins and losses of nodes."""

    def __init__(self, house: House, lanes: Lanes, settling: Settling, pools: PoolFactory) -> None:
        self._house = house
        self._lanes = lanes
        self._settling = settling
        self._pools = pools

    def join(self, node: NodeSpec) -> None:
        """Use a node from now on; nothing where it is there already."""
        house = self._house
        if node.name in house.nodes:
            return
        for pool in self._pools.of_node(node):
            house.resources.add(pool)
        for pool in house.resources:
            pool.join(node)
        house.nodes.join(node)
        house.all_dirty()

    def lose(self, name: str) -> None:
        """Everything on the node is over: settled as lost, or queued again where that is safe."""
        house = self._house
        if name not in house.nodes:
            return
        gone = [trajectory for trajectory in house.trajectories if trajectory.node == name]
        for entry in house.executing.all():
            if entry.lease is not None and entry.lease.node == name:
                self._lose(entry, name)
        for trajectory in gone:
            trajectory.node = ""  # nothing of it returns to a node that comes back under this name
            self._settling.end_trajectory(trajectory, State.LOST, Reason.ENVIRONMENT_LOST)
        for pool in [pool for pool in house.resources if pool.node == name]:
            house.resources.remove(pool.name)
        for pool in house.resources:
            pool.leave(name)
        house.nodes.leave(name)
        house.all_dirty()

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
        house = self._house
        self._settling.release(lost)
        house.families.orphan(lost.id)
        action = replace(lost.action, attempt=lost.action.attempt + 1)
        again = Entry(action, lost.key, lost.seq, idempotent=True, child=lost.child)
        house.queue.admit(again, house.now_s)
        self._lanes.again(again, lost)
