"""Actions that wait alone for one pool and have no choice of units: there is nothing to decide about them.

Most commands of a trajectory come to a node where nothing else waits. No order is to be found for such an action, no
count of units, and nobody whose reservation it could touch: a policy that is a `PromptPolicy` would start it. So it is
started without being weighed against others, and its pool has no turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from manager.core.state import SchedulerState
from manager.core.waiting.queue import QueueGroup, Waiting
from manager.resources.pool import Pool, PoolRequest
from manager.scheduler.policy import PromptPolicy


def waits_alone(state: SchedulerState, pool: Pool, groups: Sequence[QueueGroup]) -> Waiting | None:
    """Return the action that may start in a pool at once; None if anything is to be decided there.

    ``groups`` are all whose actions the pool could serve. What would have to be weighed: a second action, a second
    pool, memory, a cap, a running action that could be resized.
    """
    if len(groups) != 1 or groups[0].live != 1 or not pool.node or state.spec.strict:
        return None
    group = groups[0]
    task, demand, memory_bytes, node, batch_service, child, placement = group.signature
    if len(demand) != 1 or memory_bytes or node != pool.node or batch_service:
        return None
    waiting = group.first
    units = waiting.action.cost[pool.kind]
    if waiting.action.key is not None or units.elastic or units.minimum > pool.free:
        return None
    if not child and task in state.tasks and state.tasks[task].caps:
        return None
    if state.executing.can_resize(pool.name) or not isinstance(state.policy(pool), PromptPolicy):
        return None
    return waiting if state.nodes.may_go_on(placement, node) else None


def request_of(waiting: Waiting, pool: Pool) -> PoolRequest:
    """Return what an action that waits alone wants of its pool."""
    return PoolRequest(waiting.action.cost[pool.kind].minimum, waiting.action.service, node=pool.node)
