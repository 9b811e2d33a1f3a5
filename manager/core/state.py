"""The state of the scheduler: the parts that the core and its pass share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from manager.action import ANYWHERE
from manager.config import SchedulerSpec, TaskSpec
from manager.core.executing import Executing, Running
from manager.core.trajectories import Trajectories
from manager.core.waiting.children import WaitingChildren
from manager.core.waiting.fairness import FairShare
from manager.core.waiting.queue import Queue, QueueGroup, Waiting
from manager.events import Command
from manager.resources.nodes import Nodes
from manager.resources.pool import Pool
from manager.resources.resources import Resources
from manager.scheduler.fixed import FixedPolicy
from manager.scheduler.policy import Hold, Policy

#: What decides in the place of a policy that failed.
_STAND_IN = FixedPolicy()
#: What holds for a task that the configuration does not name.
_UNKNOWN_TASK = TaskSpec()


@dataclass(slots=True, kw_only=True)
class SchedulerState:
    """One manager's state, without its rules."""

    spec: SchedulerSpec
    tasks: Mapping[str, TaskSpec]
    resources: Resources
    nodes: Nodes
    queue: Queue
    executing: Executing
    fair: FairShare
    #: By resource kind; ``default`` for the others.
    policies: Mapping[str, Policy]
    trajectories: Trajectories = field(default_factory=Trajectories)
    children: WaitingChildren = field(default_factory=WaitingChildren)
    now_s: float = 0.0
    #: What the shell is to be told at the end of the step.
    commands: list[Command] = field(default_factory=list)
    #: When a policy wants to be asked again, by pool.
    wakes: dict[str, float] = field(default_factory=dict)
    #: What the policies hold back on purpose, by action.
    holds: dict[str, Hold] = field(default_factory=dict)
    #: Why a pool's policy is asked no more: it raised, or wanted what cannot be. `FixedPolicy` serves in its place.
    faults: dict[str, str] = field(default_factory=dict)
    #: Whether only children of running actions may start (the gateway drains).
    paused: bool = False
    #: First submission among trajectories that wait for memory; None when none does.
    memory_waits_from: int | None = None
    #: What that one needs.
    memory_waits_bytes: int = 0
    #: Those of the tasks that have caps.
    _capped: Mapping[str, TaskSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.declare(self.tasks)

    def declare(self, tasks: Mapping[str, TaskSpec]) -> None:
        """Let these tasks hold from now on."""
        self.tasks = self.queue.bounds.tasks = tasks
        self._capped = {name: task for name, task in tasks.items() if task.caps}

    def policy(self, pool: Pool) -> Policy:
        """Return what decides on a pool now."""
        if pool.name in self.faults:
            return _STAND_IN
        return self.policies.get(pool.kind) or self.policies["default"]

    def option(self, kind: str, name: str, default: float) -> float:
        """Return a constant of the policy of ``kind``."""
        policies = self.spec.policies
        spec = policies.get(kind, policies.get("default"))
        return default if spec is None else float(spec.options.get(name, default))

    def cap_room(self, one: Waiting | Running, kind: str) -> int | None:
        """Return the units of ``kind`` that the task's cap leaves for one of its actions; None if no cap binds it.

        Children run under what their parents were granted: a full cap never blocks what it waits for.
        """
        task = self.tasks.get(one.action.task)
        if task is None or kind not in task.caps or one.child:
            return None
        return max(0, task.caps[kind] - self.executing.held_by(one.action.task, kind))

    def cap_rooms(self) -> dict[tuple[str, str], int]:
        """Return the units that each task's caps leave, by task and kind."""
        return {
            (task, kind): max(0, cap - self.executing.held_by(task, kind))
            for task, spec in self._capped.items()
            for kind, cap in spec.caps.items()
        }

    def weight(self, task: str) -> float:
        """Return the share of a task."""
        return self.tasks.get(task, _UNKNOWN_TASK).weight

    def groups_at(self, pool: Pool) -> Iterable[QueueGroup]:
        """Return the groups whose actions a pool could serve."""
        return self.queue.groups_at(pool.kind, pool.node) if pool.node else self.queue.groups_of(pool.kind)

    def pools_of(self, group: QueueGroup) -> tuple[str, ...]:
        """Return the names of the pools that could serve a group's actions."""
        if group.pools_version != self.resources.version:
            node, placement = group.signature.node, group.signature.placement
            pools = [pool for kind in group.demand for pool in self.resources.serving(kind, node)]
            if placement is not ANYWHERE:
                pools = [pool for pool in pools if not pool.node or self.nodes[pool.node].spec.suits(placement)]
            group.pools = tuple([pool.name for pool in pools])
            group.pools_version = self.resources.version
        return group.pools
