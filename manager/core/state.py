"""What the core holds, why an action waits, and how it ends."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from manager.action import ANYWHERE, Action, NodeChoice, Outcome, Settlement, State, demand_of
from manager.config import SchedulerSpec, TaskSpec
from manager.core.executing import Accounts, Executing, Rate, Running
from manager.core.queue import FairShare, Queue, QueueGroup, Trajectories, TrajectoryState, Waiting
from manager.errors import FILES_LOST, Reason
from manager.events import Abort, Command, EndTrajectory, Execute, Resize, Settle, TrajectoryOpened
from manager.resources.cores import PlacedPool
from manager.resources.nodes import Node, Nodes, Resources
from manager.resources.pools import Pool, PoolRequest, TimedPool
from manager.scheduler.fixed import FixedPolicy
from manager.scheduler.policy import Hold, Policy

#: What decides in the place of a policy that failed.
_STAND_IN = FixedPolicy()
#: What holds for a task that the configuration does not name.
_UNKNOWN_TASK = TaskSpec()
#: What an action has used that never started.
_NOTHING_USED: Mapping[str, float] = {}


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
    #: Those that wait of the children of each running action that has some, first come first.
    children: dict[str, list[Waiting]] = field(default_factory=dict)
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
    capped: Mapping[str, TaskSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.declare(self.tasks)

    def declare(self, tasks: Mapping[str, TaskSpec]) -> None:
        """Let these tasks hold from now on."""
        self.tasks = self.queue.bounds.tasks = tasks
        self.capped = {name: task for name, task in tasks.items() if task.caps}

    def forget_child(self, child: Waiting) -> None:
        """Note that a child, if it is one, waits no more."""
        siblings = self.children.get(child.action.parent or "", [])
        if child in siblings:
            siblings.remove(child)
            if not siblings:
                del self.children[child.action.parent or ""]

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
            for task, spec in self.capped.items()
            for kind, cap in spec.caps.items()
        }

    def weight(self, task: str) -> float:
        """Return the share of a task."""
        return self.tasks.get(task, _UNKNOWN_TASK).weight

    def groups_at(self, pool: Pool) -> Iterable[QueueGroup]:
        """Return the groups whose actions a pool could serve."""
        return self.queue.groups_at(pool.kind, pool.node) if pool.node else self.queue.groups_of(pool.kind)

    def is_right(self, group: QueueGroup, pool: Pool) -> bool:
        """Return whether the labels and abilities of a pool's node, if it has one, are right for a group's actions."""
        placement = group.signature.placement
        return placement is ANYWHERE or not pool.node or self.nodes[pool.node].spec.suits(placement)

    def places_of(self, group: QueueGroup) -> int:
        """Return how many nodes may serve a group's actions; 1 if they need nothing of a node, or that of one."""
        places, version = group.places
        if version != self.resources.version:
            _, demand, _, node, _, _, placement = group.signature
            places, kinds = 1, [kind for kind, _ in demand if self.resources.on_nodes(kind)]
            if kinds and not node:
                right = self.nodes.right_for(placement)
                places = sum(all(self.resources.find(kind, name) is not None for kind in kinds) for name in right)
            group.places = places, self.resources.version
        return places

    def arrival_rate(self, pool: Pool) -> float:
        """Return the actions per second that come for a pool; for each of several of a kind their mean."""
        return self.executing.load(pool.kind).arrivals.at(self.now_s) / len(self.resources.of_kind(pool.kind))

    def open_pools(self, kind: str, node: str = "") -> list[Pool]:
        """Return the pools for actions bound to ``node``, if it is named, in which something may start or be resized.

        A pass looks at no others, so it costs the same on ten nodes and on a thousand whose cores are in use.
        """
        resources, resizable = self.resources, self.executing.resizable(kind)
        if not resources.on_nodes(kind):
            return list(resources.of_kind(kind))
        least = self.queue.least(kind)
        if node:
            pools = resources.serving(kind, node)
            return [pool for pool in pools if pool.free >= least or pool.name in resizable]
        free = resources.with_free(kind, least)
        if not resizable and len(free) < 2:
            return free
        return resources.in_order({pool.name: pool for pool in free} | resizable)

    def opens(self, group: QueueGroup) -> list[Pool]:
        """Return those of these pools that could serve a group's actions."""
        node = group.signature.node
        return [pool for kind in group.demand for pool in self.open_pools(kind, node) if self.is_right(group, pool)]


#: Waiting actions of one group that are looked at for a batch.
_BATCH_WINDOW = 256


class Dispatcher:
    """Leases actions and tells the shell."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def start(
        self, alike: Sequence[Waiting], node: str, requests: Sequence[tuple[Pool, PoolRequest]], workers: int = 0
    ) -> None:
        """Lease waiting actions of one group what each requests of each pool.

        One that may have a batch is started alone, together with those that join it. ``workers`` are started for the
        key resource of a malleable one.
        """
        queue, executing, now_s = self._state.queue, self._state.executing, self._state.now_s
        mates = self._batch_mates(alike[0], requests)
        queue.leave(alike)
        members = executing.start(alike, node, requests, workers, now_s)
        if not mates:
            self._execute(members)
            return
        for mate in mates:
            queue.withdraw(mate)
            members.append(executing.join(mate, members[0], now_s))
        executing.seal(members)
        for member in members:
            self._execute([member])

    def resume(
        self, waiting: Waiting, node: str, requests: Sequence[tuple[Pool, PoolRequest]], started_s: float
    ) -> None:
        """Lease an action that runs already what it was granted at its start."""
        self._execute([self._state.executing.resume(waiting, node, requests, started_s, self._state.now_s)])

    def lend(self, child: Waiting, parent: Running) -> None:
        """Start a child on the units of its waiting parent."""
        running = self._state.executing.borrow(child, parent, self._state.now_s)
        self._state.queue.withdraw(child)
        self._execute([running])

    def resize(self, running: Running, kind: str, units: int) -> None:
        """Change the units of a running action."""
        lease = self._state.executing.resize(running, kind, units, self._state.now_s)
        running.resize_after_s = self._state.now_s + self._state.option(kind, "resize_interval_s", 0.0)
        self._state.commands.append(Resize(action=running.action, lease=lease))

    def _execute(self, alike: Sequence[Running]) -> None:
        """Have actions of one group executed."""
        state = self._state
        state.fair.starts([running.action for running in alike])
        for running in alike:
            if state.holds:
                state.holds.pop(running.id, None)
            if running.child:
                state.forget_child(running.waited)
            queue_s = running.started_s - running.action.submitted_s
            state.commands.append(Execute(running.action, running.lease, queue_s if queue_s > 0.0 else 0.0))

    def _batch_mates(self, waiting: Waiting, requests: Sequence[tuple[Pool, PoolRequest]]) -> list[Waiting]:
        """Return waiting actions of the same service that join the batch, first come first, up to its tokens."""
        service = "" if waiting.group is None else waiting.group.signature.batch_service
        if not service:
            return []
        queue = self._state.queue
        units = {pool.kind: request.units for pool, request in requests}
        placement = waiting.action.placement
        budget = queue.services[service].batch_tokens - waiting.action.batch_tokens
        alike = [group for group in queue.groups() if group.signature.batch_service == service]
        if placement != ANYWHERE:  # wherever the leader may start, its mates must be able to run
            nodes, right = self._state.nodes, self._state.nodes.with_devices_for(placement)
            alike = [group for group in alike if nodes.with_devices_for(group.signature.placement) >= right]
        mates: list[Waiting] = []
        for mate in heapq.merge(*(islice(group, _BATCH_WINDOW) for group in alike), key=lambda mate: mate.order):
            if mate is waiting or mate.action.cost.keys() != units.keys():
                continue
            if mate.action.batch_tokens > budget:
                break
            if all(count in mate.action.cost[kind] for kind, count in units.items()):
                budget -= mate.action.batch_tokens
                mates.append(mate)
        return mates


CauseKind = Literal[
    "units",
    "devices",
    "quota",
    "memory",
    "node",
    "trajectory",
    "task_cap",
    "hold",
    "turn",
    "image",
    "requirements",
    "function",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One thing that is missing. ``need`` and ``free`` are units of the pool, or bytes of memory."""

    kind: CauseKind
    #: The text for people.
    text: str
    #: The pool that has most of it free, ``node:NAME`` for memory or a node; empty if no pool is meant.
    pool: str = ""
    need: int = 0
    free: int = 0
    #: The action that has to end first, if it is one.
    behind: str | None = None
    #: Seconds until it is expected to be there; None if that is not known.
    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseTally:
    """Waiting actions of one task with the same cause."""

    cause: Cause
    task: str
    count: int
    #: Seconds for which the first of them in the order of service has waited.
    oldest_s: float


def cause_of(state: SchedulerState, waiting: Waiting) -> Cause:
    """Return the first thing that a waiting action lacks; its text names all."""
    if waiting.group is None:
        return _of_trajectory(state, waiting)
    return _of_group(state, waiting, waiting.group)


def counted_causes(state: SchedulerState) -> list[CauseTally]:
    """Return what the queue waits for, the most frequent cause first: work by groups and trajectories, not entries."""
    counts: Counter[tuple[str, Cause]] = Counter()
    oldest: dict[tuple[str, Cause], float] = {}

    def add(waiting: Waiting, cause: Cause, count: int) -> None:
        alike = (waiting.action.task, replace(cause, behind=None))
        counts[alike] += count
        oldest[alike] = max(oldest.get(alike, 0.0), state.now_s - waiting.action.submitted_s)

    for group in state.queue.groups():
        for first in islice(group, 1):
            add(first, cause_of(state, first), group.live)
    for early in state.queue.early():
        add(early, Cause(kind="hold", text="the instant of their next try"), 1)
    for trajectory in state.trajectories:
        if trajectory.unplaced:
            add(trajectory.unplaced[0], _place_of(state, trajectory), len(trajectory.unplaced))
        if trajectory.behind:
            cause = Cause(kind="trajectory", text="the earlier actions of their trajectories")
            add(trajectory.behind[0], cause, len(trajectory.behind))
    return [
        CauseTally(cause=cause, task=task, count=count, oldest_s=oldest[task, cause])
        for (task, cause), count in counts.most_common()
    ]


def _of_trajectory(state: SchedulerState, waiting: Waiting) -> Cause:
    """Return the cause of one whose turn in its trajectory has not come."""
    if waiting in state.queue.early():
        until_s = max(0.0, waiting.not_before_s - state.now_s)
        return Cause(kind="hold", text=f"its next try, in {until_s:.3g} s", until_s=until_s)
    name = waiting.action.trajectory
    trajectory = None if name is None else state.trajectories.get(name)
    if trajectory is None:
        return Cause(kind="turn", text="the next pass")
    if waiting in trajectory.unplaced:
        return _place_of(state, trajectory)
    behind = None if trajectory.active is None else trajectory.active.id
    return Cause(kind="trajectory", text=f"the earlier actions of trajectory {trajectory.name}", behind=behind)


def _of_group(state: SchedulerState, waiting: Waiting, group: QueueGroup) -> Cause:
    hold = state.holds.get(waiting.id)
    if hold is not None:
        until_s = None if hold.until_s is None else max(0.0, hold.until_s - state.now_s)
        return Cause(kind="hold", text=hold.waits_for, until_s=until_s)
    memory_bytes, node = group.signature.memory_bytes, group.signature.node
    no_node = list(_nodes(state, group))
    missing = [*_caps(state, waiting), *(no_node or _units(state, group))]
    if not no_node and memory_bytes and memory_bytes > _free_memory(state, node)[0]:
        missing.append(_memory_of(state, memory_bytes, node))
    if missing:
        return replace(missing[0], text=" and ".join(each.text for each in missing))
    if state.paused:
        return Cause(kind="turn", text="the next gateway: this one drains")
    return Cause(kind="turn", text="its turn: what is free is kept for earlier actions")


def _caps(state: SchedulerState, waiting: Waiting) -> Iterable[Cause]:
    for kind, units in waiting.action.cost.items():
        room = state.cap_room(waiting, kind)
        if room is not None and room < units.minimum:
            task = waiting.action.task
            text = f"{units.minimum} of {kind} under the cap of task {task}"
            yield Cause(kind="task_cap", text=text, pool=kind, need=units.minimum, free=room)


def _nodes(state: SchedulerState, group: QueueGroup) -> Iterable[Cause]:
    """Yield what keeps all nodes from starting it that otherwise might."""
    node, placement = group.signature.node, group.signature.placement
    if node and node in state.nodes:
        place = state.nodes[node]
        if place.closed is not None and not place.finishing:
            yield Cause(kind="node", text=f"node {node}, which is closed: {place.closed}", pool=f"node:{node}")
        elif not place.spec.suits(placement):
            message = f"node {node} of its trajectory, which is not right for it: {_story(placement)}"
            yield Cause(kind="node", text=message, pool=f"node:{node}")
    elif group.signature.memory_bytes or state.resources.any_on_nodes(group.demand):
        yield from _open_node(state, placement, state.nodes.right_for(placement))
    elif placement != ANYWHERE and state.resources.any_placed(group.demand):
        yield from _open_node(state, placement, state.nodes.with_devices_for(placement))


def _open_node(state: SchedulerState, placement: NodeChoice, right: Collection[str]) -> Iterable[Cause]:
    """Yield that no open node is right, if none is, and why the first of those that would be is closed."""
    if right:
        return
    text, pool = f"an open node {_story(placement)}".rstrip(), ""
    closed = [place for place in state.nodes if place.closed is not None and place.spec.suits(placement)]
    if closed:
        name, others = closed[0].spec.name, len(closed) - 1
        text += f": {name} is closed: {closed[0].closed}" + (f" (and {others} more)" if others else "")
        pool = "" if others else f"node:{name}"
    yield Cause(kind="node", text=text, pool=pool)


def _story(placement: NodeChoice) -> str:
    parts = [f"{label}={value}" for label, value in placement.labels]
    parts += [f"able to run {placement.function}"] if placement.function else []
    return " and ".join(parts)


def _units(state: SchedulerState, group: QueueGroup) -> Iterable[Cause]:
    node = group.signature.node
    where = f" on {node}" if node else ""
    anywhere = group.signature.placement == ANYWHERE
    among = frozenset[str]() if anywhere else state.nodes.with_devices_for(group.signature.placement)
    for kind, need in group.demand.items():
        pools = [pool for pool in state.resources.serving(kind, node) if state.is_right(group, pool)]
        if any(pool.headroom().fits(need, node, among) for pool in pools):
            continue
        best = max(pools, key=lambda pool: pool.free, default=None)
        yield Cause(
            kind=_kind_of(best),
            text=f"{need} of {kind}{where if best is None or best.node or isinstance(best, PlacedPool) else ''}",
            pool=kind if best is None else best.name,
            need=need,
            free=0 if best is None else max(0, best.free),
            until_s=_until(state, best),
        )


def _kind_of(pool: Pool | None) -> CauseKind:
    if isinstance(pool, TimedPool):
        return "quota"
    return "devices" if isinstance(pool, PlacedPool) else "units"


def _until(state: SchedulerState, pool: Pool | None) -> float | None:
    """Return the seconds until something of the pool returns: by time, or by the first expected end."""
    if pool is None:
        return None
    if isinstance(pool, TimedPool):
        at_s = pool.next_return_s()
        return None if at_s is None else max(0.0, at_s - state.now_s)
    ends = [view.ends_in_s for view in state.executing.view(pool, state.now_s) if view.ends_in_s is not None]
    return min(ends, default=None)


def _free_memory(state: SchedulerState, node: str = "") -> tuple[int, str]:
    """Return the most that a node has free, and which."""
    places = [place for place in state.nodes if node in ("", place.spec.name)]
    return max(((place.free_bytes, place.spec.name) for place in places), default=(0, ""))


def _place_of(state: SchedulerState, trajectory: TrajectoryState) -> Cause:
    """Return what a trajectory lacks that has no place yet: an open node, else memory on one."""
    placement = trajectory.placement
    no_node = _open_node(state, placement, state.nodes.right_for(placement))
    return next(iter(no_node), None) or _memory_of(state, trajectory.memory_bytes)


def _memory_of(state: SchedulerState, need_bytes: int, node: str = "") -> Cause:
    free_bytes, name = _free_memory(state, node)
    text = f"{need_bytes} bytes of memory on {node or 'a node'}"
    return Cause(kind="memory", text=text, pool=f"node:{name}" if name else "", need=need_bytes, free=free_bytes)


#: Seconds for which a trajectory is idle before another task may get its memory: longer than a model thinks, as a rule.
IDLE_MIN_S = 60.0
#: Seconds until tasks' shares are looked at again for the sake of one that waits.
ROOM_EVERY_S = 5.0


class TrajectoryOrder:
    """The actions of each trajectory run one at a time and in order; children pass beside.

    The turn of one that has settled is passed on at the next pass: until then its next try (an attempt after the first)
    takes it again, so nothing that was asked for later runs between two tries.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        #: Whose turn nobody has, though something waits for it.
        self.free_turns: list[TrajectoryState] = []
        #: When idle trajectories may be ended next for those that wait for memory.
        self.room_from_s = 0.0

    def pass_turns(self) -> None:
        """Give the turns of actions that have settled, and are not tried again, to the next ones."""
        free, self.free_turns = self.free_turns, []
        for trajectory in free:
            if trajectory.active is None and trajectory.behind:
                trajectory.active = trajectory.behind.pop(0)
                self._offer(trajectory.active, trajectory)

    def of(self, action: Action) -> TrajectoryState | None:
        """Return the trajectory that an action belongs to; None if there is none."""
        return None if action.trajectory is None else self._state.trajectories.get(action.trajectory)

    def line_up(self, waiting: Waiting) -> None:
        """Offer an action to the pass, or put it behind the earlier ones of its trajectory."""
        action = waiting.action
        if action.trajectory is None:
            self._state.queue.offer(waiting)
            return
        trajectory = self.of(action) or self._begin(action.trajectory, waiting)
        if waiting.child:
            trajectory.children.append(waiting)
        elif trajectory.active is None and (action.attempt > 1 or not trajectory.behind):
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
        if trajectory is not None and (not trajectory.at_rest or trajectory.ending):
            return False
        if not self._needs_place(action):
            return True
        if trajectory is not None and trajectory.node:
            return trajectory.node == node
        memory_bytes = action.memory_bytes if trajectory is None else trajectory.memory_bytes
        return node in state.nodes and memory_bytes <= state.nodes[node].free_bytes

    def resume(self, waiting: Waiting, node: str) -> None:
        """Give a running action its trajectory's turn, and the trajectory its place."""
        name = waiting.action.trajectory
        if name is None:
            return
        trajectory = self.of(waiting.action) or self._begin(name, waiting)
        trajectory.active = waiting
        if not trajectory.node and self._needs_place(waiting.action):
            self._pin(trajectory, self._state.nodes[node])

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
            trajectory.children.remove(waiting)
        else:
            trajectory.behind.remove(waiting)
        if trajectory.active is None and trajectory.behind:
            self.free_turns.append(trajectory)
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
        """Give memory to those that wait for it, and note the first that gets none.

        First to the task that holds least of it for its weight, and of one task first come first served.
        """
        state = self._state
        state.memory_waits_from, state.memory_waits_bytes = None, 0
        if not state.trajectories.waiting_tasks:
            return
        for trajectory in self._by_share():
            place = trajectory.demand, trajectory.memory_bytes, trajectory.placement
            node = state.nodes.choose(*place)
            if node is None and self._make_room(trajectory):
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

    def _by_share(self) -> Iterable[TrajectoryState]:
        """Yield those that wait for memory, each in its turn; they get it between two of them, or do not."""
        trajectories = self._state.trajectories
        if len(trajectories.waiting_tasks) == 1:
            yield from trajectories.waiting()
            return
        lines: dict[str, deque[TrajectoryState]] = {}
        for trajectory in dict.fromkeys(trajectories.waiting()):  # one that began to wait again may come twice
            lines.setdefault(trajectory.task, deque()).append(trajectory)
        held = self._held_bytes()
        while lines:
            task = min(lines, key=lambda task: (held[task] / self._state.weight(task), lines[task][0].opened_seq))
            trajectory = lines[task].popleft()
            if not lines[task]:
                del lines[task]
            yield trajectory
            held[task] += trajectory.memory_bytes if trajectory.node else 0

    def _held_bytes(self) -> Counter[str]:
        """Return the memory that trajectories hold, by task."""
        held = Counter[str]()
        for trajectory in self._state.trajectories:
            held[trajectory.task] += trajectory.memory_bytes if trajectory.node else 0
        return held

    def _make_room(self, newcomer: TrajectoryState) -> bool:
        """End idle trajectories of tasks that hold more than their share, for one of a task that holds less.

        Those that were used least recently go first. Nothing ends if that does not make room for it on some node.
        """
        state, task = self._state, newcomer.task
        if state.now_s < self.room_from_s or not state.nodes.ever(
            newcomer.demand, newcomer.memory_bytes, newcomer.placement
        ):
            return False
        others = [each for each in state.trajectories if each.task != task and each.at_rest and each.node]
        held, self.room_from_s = self._held_bytes(), state.now_s + (ROOM_EVERY_S if others else IDLE_MIN_S)
        wanted = (held[task] + newcomer.memory_bytes) / state.weight(task)
        going: defaultdict[str, list[TrajectoryState]] = defaultdict(list)
        for idle in sorted(others, key=lambda each: each.idle_since_s):
            node, left = state.nodes.get(idle.node), (held[idle.task] - idle.memory_bytes) / state.weight(idle.task)
            if idle.ending or left < wanted or state.tasks.get(idle.task, _UNKNOWN_TASK).keep_idle:
                continue
            if node is None or node.closed is not None or not node.spec.suits(newcomer.placement):
                continue
            if idle.idle_since_s + IDLE_MIN_S > state.now_s:
                self.room_from_s = min(self.room_from_s, idle.idle_since_s + IDLE_MIN_S)
                continue
            held[idle.task] -= idle.memory_bytes
            going[idle.node].append(idle)
            if node.free_bytes + sum(each.memory_bytes for each in going[idle.node]) >= newcomer.memory_bytes:
                why = f"it was idle, and its memory went to task {task}, which holds less than its share"
                for each in going[idle.node]:
                    self.close(each, why)
                return True
        return False

    def close(self, trajectory: TrajectoryState, why: str = "") -> None:
        """Give back the memory, and end the environment, of a trajectory of which nothing runs or waits."""
        state = self._state
        state.trajectories.remove(trajectory)
        if trajectory.node and trajectory.node in state.nodes:
            state.nodes[trajectory.node].release(trajectory.name)
        state.commands.append(EndTrajectory(trajectory=trajectory.name, why=why))

    def _begin(self, name: str, first: Waiting) -> TrajectoryState:
        """Let a trajectory live from its first action on."""
        action = first.action
        trajectory = TrajectoryState(name, action.task, action.memory_bytes, action.trajectory_ttl_s, first.seq)
        self._state.trajectories.add(trajectory)
        return trajectory

    def _pin(self, trajectory: TrajectoryState, node: Node) -> None:
        """Hold its memory where it lives from now on."""
        node.hold(trajectory.name, trajectory.memory_bytes, trajectory=True)
        trajectory.node = node.spec.name
        self._state.trajectories.wait_no_more(trajectory)

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


class Settling:
    """The ends of actions and of trajectories, and the accounts that are drawn up then."""

    def __init__(self, state: SchedulerState, order: TrajectoryOrder) -> None:
        self._state = state
        self._order = order
        self.count = 0
        self.accounts = Accounts()
        #: Ends of running actions.
        self.finishes = Rate()

    def retire(self, running: Running, outcome: Outcome) -> None:
        """Release, account and settle a running action that is over."""
        state, action, now_s = self._state, running.action, self._state.now_s
        state.executing.end(running, now_s)
        state.fair.correct(action, state.weight(action.task), running.used)
        ran_s = max(0.0, now_s - running.started_s)
        execution_s = min(outcome.execution_s, ran_s)
        self.finishes.add(now_s)
        self._settle(
            Settlement(
                action=action,
                outcome=_with_usage(running, outcome, ran_s),
                lease=running.lease,
                queue_s=max(0.0, running.started_s - action.submitted_s),
                overhead_s=ran_s - execution_s,
                execution_s=execution_s,
                batch={} if running.batch is None else running.batch.members,
            ),
            running.used,
        )
        self._order.leave(running.waited)

    def end_waiting(self, waiting: Waiting, end_state: State, reason: Reason, message: str) -> None:
        """End an action that never started."""
        state, action = self._state, waiting.action
        state.queue.withdraw(waiting)
        state.fair.leaves(action, state.weight(action.task))
        state.holds.pop(waiting.id, None)
        state.forget_child(waiting)
        detail = {FILES_LOST: True} if reason is Reason.ENVIRONMENT_LOST else {}
        outcome = Outcome(state=end_state, reason=reason, message=message, component="queue", detail=detail)
        queue_s = max(0.0, state.now_s - action.submitted_s)
        self._settle(
            Settlement(action=action, outcome=outcome, lease=None, queue_s=queue_s, overhead_s=0.0, execution_s=0.0)
        )
        self._order.leave(waiting)

    def end_trajectory(
        self, trajectory: TrajectoryState, end_state: State = State.CANCELLED, reason: Reason = Reason.CANCELLED
    ) -> None:
        """Cancel what a trajectory has; its environment goes when nothing runs in it any more."""
        living = self._state.trajectories
        trajectory.ending = True
        if not trajectory.at_rest:
            self._cancel(trajectory, end_state, reason)
        if living.get(trajectory.name) is trajectory and trajectory.at_rest:
            self._order.close(trajectory)

    def _cancel(self, trajectory: TrajectoryState, end_state: State, reason: Reason) -> None:
        """End what waits of a trajectory and kill what runs."""
        state = self._state
        message = f"trajectory {trajectory.name} ended"
        first = [] if trajectory.active is None else [trajectory.active]
        actions = sorted([*first, *trajectory.behind, *trajectory.children], key=lambda one: one.order)
        for waiting in reversed(actions):  # so none gets its turn meanwhile
            if waiting.id in state.queue:
                self.end_waiting(waiting, end_state, reason, message)
        for one in actions:
            running = state.executing.get(one.id)
            if running is not None:
                self.abort(running, message)

    def abort(self, running: Running, message: str) -> None:
        """Have a running action killed, once."""
        if not running.aborting:
            running.aborting = message or "cancelled"
            self._state.commands.append(Abort(action_id=running.id, message=message))

    def _settle(self, settlement: Settlement, used: Mapping[str, float] = _NOTHING_USED) -> None:
        """Tell the end of an action that has left the queue or the executing set, which each leaves once."""
        action = settlement.action
        self.count += 1
        self.accounts.of(action.task).add(settlement, used)
        self._state.commands.append(Settle(settlement=settlement))
        self._state.children.pop(action.id, None)  # they go on as ordinary actions


def _with_usage(running: Running, outcome: Outcome, ran_s: float) -> Outcome:
    """Add what a duration teaches: the mean of the units over time if they changed, and the size of the call.

    An exported trace has both from the record.
    """
    action, told = running.action, dict[str, float]()
    if running.resized and action.key is not None and ran_s > 0 and "mean_units" not in outcome.usage:
        told["mean_units"] = running.used[action.key] / ran_s
    if action.size is not None:
        told["size"] = action.size
    return replace(outcome, usage={**outcome.usage, **told}) if told else outcome
