"""The core: events in, commands out. No clock, no I/O, no await; two shells drive it (`manager.engine`, `simulate`).

Story: an accepted action waits in the queue (behind the earlier ones of its trajectory), is chosen by a scheduling
pass, runs under a lease, and settles exactly once. A nested action (one with a running ``parent``) can never wait for
its parent: it passes the trajectory's order and its task's caps, is served in its parent's place of the queue, and
where the pools are full it runs on the units that its waiting parent holds, one child at a time.
"""

from __future__ import annotations

from dataclasses import replace

from manager.action import Action
from manager.config import TaskSpec
from manager.errors import Conflict, Reason, TangramError
from manager.events import (
    Abort,
    CancelRequested,
    Command,
    EndTrajectory,
    Event,
    Finished,
    NodeJoined,
    NodeLost,
    Reconfigured,
    Refuse,
    ResidencyReported,
    Settle,
    Submitted,
    Tick,
    TrajectoryEnded,
    TrajectoryOpened,
    TrajectoryPlaced,
    WakeAt,
)
from manager.house import House
from manager.outcome import Outcome, Settlement, State
from manager.queue import Entry, Signature
from manager.resources.factory import PoolFactory
from manager.scheduling import Scheduling
from manager.statistics import Account, Rate
from manager.trajectories import Trajectories, Trajectory

#: Bounds of the Retry-After of a refusal, in seconds.
_RETRY_AFTER_S = (1.0, 60.0)


class Core:
    """The state machine. ``step`` is ``apply`` (what happened) and then ``schedule`` (what to do about it)."""

    def __init__(self, house: House, pools: PoolFactory) -> None:
        self._house = house
        self._pools = pools
        self._scheduling = Scheduling(house)
        self._trajectories = Trajectories()
        self._commands: list[Command] = []
        self._now_s = 0.0
        self._seq = 0
        self._wake_s: float | None = None
        self._finishes = Rate()
        #: Waiting children by the id of their running parent, first come first.
        self._children: dict[str, list[Entry]] = {}
        self.accepted = 0
        self.settled = 0
        self.accounts: dict[str, Account] = {}

    # -- the act

    def step(self, events: list[Event], now_s: float) -> list[Command]:
        """Take in what happened and decide what to do, in one scheduling pass."""
        return [*self.apply(events, now_s), *self.schedule(now_s)]

    def apply(self, events: list[Event], now_s: float) -> list[Command]:
        """Take in what happened; nothing is started. An instant before the last one counts as the last one."""
        self._advance(now_s)
        for event in events:
            self._apply(event)
        return self._take_commands()

    def schedule(self, now_s: float) -> list[Command]:
        """Settle what waited too long, then run one scheduling pass."""
        self._advance(now_s)
        for entry in self._house.queue.expired(self._now_s):
            waited_s = entry.action.queue_timeout_s
            message = f"waited longer than queue_timeout, {waited_s:g} s"
            self._settle_waiting(entry, State.TIMED_OUT, Reason.QUEUE_TIMEOUT, message)
        for trajectory in self._trajectories.expired(self._now_s):
            self._end(trajectory)
        self._place_trajectories()
        self._commands += self._scheduling.run(self._now_s)
        while self._lend():  # what the children had reserved may serve others
            self._commands += self._scheduling.run(self._now_s)
        self._wake()
        return self._take_commands()

    def refusal(self, action: Action) -> TangramError | None:
        """Why this action would not be accepted now; None where it would."""
        trajectory = None if action.trajectory is None else self._trajectories.get(action.trajectory)
        if action.id in self._house.queue or action.id in self._house.executing:
            return Conflict(f"action {action.id} is queued or running", component="core", invocation_id=action.id)
        if trajectory is not None and trajectory.ending:
            return Conflict(
                f"trajectory {trajectory.name} is ending", component="core", invocation_id=action.id, retry_after_s=1.0
            )
        return self._house.queue.refusal(action, self.retry_after_s())

    def retry_after_s(self) -> float:
        """Seconds in which the queue is likely to have moved, by the recent rate of ends."""
        low, high = _RETRY_AFTER_S
        rate = self._finishes.at(self._now_s)
        return high if rate <= 0 else min(high, max(low, 0.1 * len(self._house.queue) / rate))

    def pause(self) -> None:
        """Start nothing more but children of running actions: the gateway drains."""
        self._house.paused = True

    # -- views

    @property
    def house(self) -> House:
        return self._house

    @property
    def trajectories(self) -> Trajectories:
        return self._trajectories

    @property
    def now_s(self) -> float:
        return self._now_s

    def check(self) -> None:
        """Assert the invariants: nothing leased twice, and every accepted action queued, running or settled."""
        house = self._house
        house.resources.check()
        house.nodes.check()
        house.queue.check()
        house.executing.check()
        waiting, running = len(house.queue), len(house.executing)
        assert self.accepted == waiting + running + self.settled, (
            f"{self.accepted} accepted, but {waiting} queued + {running} running + {self.settled} settled"
        )
        for trajectory in self._trajectories:
            active = trajectory.active
            assert active is None or active.id in house.queue or active.id in house.executing, f"{trajectory}"
            assert active is not None or not trajectory.lane, f"trajectory {trajectory.name} stands still"

    # -- events

    def _apply(self, event: Event) -> None:
        match event:
            case Submitted():
                self._submit(event)
            case Finished():
                self._finish(event)
            case CancelRequested():
                self._cancel(event.action_id, event.message or "cancelled by the caller")
            case TrajectoryOpened():
                self._open(event)
            case TrajectoryEnded():
                trajectory = self._trajectories.get(event.trajectory)
                if trajectory is not None and not trajectory.ending:
                    self._end(trajectory)
            case NodeLost():
                self._lose_node(event.node)
            case NodeJoined():
                self._join_node(event)
            case ResidencyReported():
                for pool in self._house.resources:
                    pool.report(event.node, event.copies)
                    self._house.dirty.add(pool.name)
            case Reconfigured():
                self._reconfigure(event)
            case Tick():
                pass

    def _submit(self, event: Submitted) -> None:
        action = event.action
        refusal = self.refusal(action)
        if refusal is not None:
            self._commands.append(Refuse(action_id=action.id, error=refusal))
            return
        self._seq += 1
        self.accepted += 1
        parent = None if action.parent is None else self._house.executing.get(action.parent)
        key = (self._stamp(action), self._seq, 0) if parent is None else (*parent.key[:2], self._seq)
        entry = Entry(action, key, self._seq, idempotent=event.idempotent, child=parent is not None)
        self._house.queue.admit(entry, self._now_s)
        if parent is not None:
            self._children.setdefault(parent.id, []).append(entry)
        self._line_up(entry)

    def _stamp(self, action: Action) -> float:
        """The fair share's order; the strict reading knows no fairness but the order of submission."""
        if self._house.spec.strict:
            return 0.0
        return self._house.fair.stamp(action, self._weight(action.task))

    def _line_up(self, entry: Entry) -> None:
        """Offer an action to the pass, or put it behind the earlier ones of its trajectory."""
        action = entry.action
        if action.trajectory is None:
            self._offer(entry, None)
            return
        trajectory = self._trajectories.get(action.trajectory)
        if trajectory is None:
            trajectory = self._new_trajectory(
                action.trajectory, action.task, action.memory_bytes, action.trajectory_ttl_s
            )
        if entry.child:
            trajectory.children += 1
            self._offer(entry, trajectory)
            return
        trajectory.lane.append(entry)
        self._next(trajectory)

    def _next(self, trajectory: Trajectory) -> None:
        """The turn of the trajectory's next action, where none has it."""
        if trajectory.active is None and trajectory.lane:
            trajectory.active = trajectory.lane.popleft()
            self._offer(trajectory.active, trajectory)

    def _offer(self, entry: Entry, trajectory: Trajectory | None) -> None:
        """Let the pass choose it, once its trajectory has a place (where it needs one)."""
        action = entry.action
        node = ""
        resources = self._house.resources
        if trajectory is not None and (action.memory_bytes or any(resources.on_nodes(kind) for kind in action.cost)):
            if not trajectory.node:
                trajectory.cost = trajectory.cost or action.cost
                trajectory.homeless.append(entry)
                self._trajectories.wait_for_memory(trajectory)
                return
            node = trajectory.node
        service = action.service or ""
        batches = (
            action.batch_tokens > 0 and service in self._house.services and self._house.services[service].batch_tokens
        )
        signature = Signature(
            task=action.task,
            demand=tuple((kind, units.minimum) for kind, units in action.cost.items()),
            memory_bytes=0 if trajectory is not None else action.memory_bytes,
            node=node,
            batch_service=service if batches else "",
            child=entry.child,
        )
        self._house.queue.offer(entry, signature)
        assert entry.group is not None
        self._house.dirty_groups.add(entry.group)
        pools = self._house.pools_of(entry.group)
        for name in pools:
            self._house.executing.load(name).arrivals.add(self._now_s, len(action.cost) / len(pools))

    def _finish(self, event: Finished) -> None:
        entry = self._house.executing.get(event.action_id)
        if entry is None or entry.action.attempt != event.attempt:
            return  # a stale answer: the action was settled when its node was lost
        self._retire(entry, event.outcome)

    def _cancel(self, action_id: str, message: str) -> None:
        running = self._house.executing.get(action_id)
        if running is not None:
            self._abort(running, message)
            return
        waiting = self._house.queue.get(action_id)
        if waiting is not None:
            self._settle_waiting(waiting, State.CANCELLED, Reason.CANCELLED, message)

    def _abort(self, entry: Entry, message: str) -> None:
        if not entry.aborting:
            entry.aborting = True
            self._commands.append(Abort(action_id=entry.id, attempt=entry.action.attempt, message=message))

    # -- ends

    def _retire(self, entry: Entry, outcome: Outcome) -> None:
        """A running action is over: release, account, settle."""
        self._release(entry)
        lease = entry.lease
        queue_s = max(0.0, entry.started_s - min(entry.action.submitted_s, entry.started_s))
        ran_s = max(0.0, self._now_s - entry.started_s)
        execution_s = min(outcome.execution_s, ran_s)
        self._finishes.add(self._now_s)
        self._settle(
            entry,
            Settlement(
                action=entry.action,
                outcome=outcome,
                lease=lease,
                queue_s=queue_s,
                overhead_s=ran_s - execution_s,
                execution_s=execution_s,
            ),
        )

    def _release(self, entry: Entry) -> None:
        house = self._house
        for pool in house.executing.end(entry, self._now_s):
            house.dirty.add(pool.name)
        if entry.lease is not None and entry.lease.memory_bytes:
            house.dirty.update(pool.name for pool in house.resources if pool.node == entry.lease.node)
        self._mark_capped(entry)
        house.fair.correct(entry.action, self._weight(entry.action.task), entry.used)
        account = self._account(entry.action.task)
        for kind, amount in entry.used.items():
            account.used[kind] = account.used.get(kind, 0.0) + amount

    def _mark_capped(self, entry: Entry) -> None:
        """Where its task has a cap, others of the task may start in pools that did not change."""
        task = self._house.tasks.get(entry.action.task)
        for kind in entry.action.cost if task is not None and task.caps else ():
            self._house.dirty.update(pool.name for pool in self._house.resources.of_kind(kind))

    def _settle_waiting(self, entry: Entry, state: State, reason: Reason, message: str) -> None:
        """End an action that never started."""
        self._touch(entry)
        self._house.queue.leave(entry)
        self._house.holds.pop(entry.id, None)
        outcome = Outcome(state=state, reason=reason, message=message, component="queue")
        queue_s = max(0.0, self._now_s - entry.action.submitted_s)
        self._settle(
            entry,
            Settlement(
                action=entry.action, outcome=outcome, lease=None, queue_s=queue_s, overhead_s=0.0, execution_s=0.0
            ),
        )

    def _touch(self, entry: Entry) -> None:
        """What a waiting action had reserved may serve others."""
        if self._house.spec.strict:
            self._all_dirty()  # it may have stood in the way of everything behind it
        elif entry.group is not None:
            self._house.dirty.update(self._house.pools_of(entry.group))

    def _settle(self, entry: Entry, settlement: Settlement) -> None:
        assert not entry.state.terminal, f"{entry.id} settles twice: {entry.state}, {settlement.outcome.state}"
        entry.state = settlement.outcome.state
        self.settled += 1
        self._account(entry.action.task).add(settlement)
        self._commands.append(Settle(settlement=settlement))
        self._leave_family(entry)
        self._leave_trajectory(entry)

    def _leave_family(self, entry: Entry) -> None:
        """Its own children go on as ordinary actions; its parent no longer waits for it."""
        self._children.pop(entry.id, None)
        siblings = self._children.get(entry.action.parent or "")
        if siblings is not None and entry in siblings:
            siblings.remove(entry)

    def _leave_trajectory(self, entry: Entry) -> None:
        trajectory = None if entry.action.trajectory is None else self._trajectories.get(entry.action.trajectory)
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

    def _rest(self, trajectory: Trajectory) -> None:
        if trajectory.ending:
            self._close(trajectory)
            return
        if trajectory.waiting and not trajectory.explicit:
            trajectory.waiting = False
        self._trajectories.rest(trajectory, self._now_s)

    # -- trajectories

    def _new_trajectory(self, name: str, task: str, memory_bytes: int, ttl_s: float) -> Trajectory:
        trajectory = Trajectory(name, task, memory_bytes, ttl_s, self._seq)
        self._trajectories.open(trajectory)
        return trajectory

    def _open(self, event: TrajectoryOpened) -> None:
        """Ask for a place ahead of the first action; idempotent."""
        if self._trajectories.get(event.trajectory) is not None:
            return
        self._seq += 1
        trajectory = self._new_trajectory(event.trajectory, event.task, event.memory_bytes, event.ttl_s)
        trajectory.explicit = True
        trajectory.cost = event.cost
        if event.memory_bytes or any(self._house.resources.on_nodes(kind) for kind in event.cost):
            self._trajectories.wait_for_memory(trajectory)
        self._trajectories.rest(trajectory, self._now_s)

    def _place_trajectories(self) -> None:
        """Give memory to those that wait for it, first come first served."""
        nodes = self._house.nodes
        self._house.memory_waits_from = None
        for trajectory in self._trajectories.waiting():
            node_cost = {kind: units for kind, units in trajectory.cost.items() if self._house.resources.on_nodes(kind)}
            node = nodes.choose(node_cost, trajectory.memory_bytes)
            if node is None:
                if nodes.ever(node_cost, trajectory.memory_bytes):
                    self._house.memory_waits_from = trajectory.opened_seq
                    return
                continue  # only a new node could serve it: it must not hold up the others
            node.hold(trajectory.name, trajectory.memory_bytes)
            trajectory.node, trajectory.waiting = node.spec.name, False
            self._commands.append(TrajectoryPlaced(trajectory=trajectory.name, node=trajectory.node))
            homeless, trajectory.homeless = trajectory.homeless, []
            for entry in homeless:
                self._offer(entry, trajectory)
            if trajectory.at_rest:
                self._trajectories.rest(trajectory, self._now_s)

    def _end(self, trajectory: Trajectory, state: State = State.CANCELLED, reason: Reason = Reason.CANCELLED) -> None:
        """Cancel what it has; the environment goes when nothing runs in it any more."""
        trajectory.ending = True
        message = f"trajectory {trajectory.name} ended"
        for entry in self._house.queue.of_trajectory(trajectory.name):
            if entry.id in self._house.queue:
                self._settle_waiting(entry, state, reason, message)
        for entry in self._house.executing.all():
            if entry.action.trajectory == trajectory.name:
                self._abort(entry, message)
        if self._trajectories.get(trajectory.name) is trajectory and trajectory.at_rest:
            self._close(trajectory)

    def _close(self, trajectory: Trajectory) -> None:
        self._trajectories.close(trajectory)
        if trajectory.node and trajectory.node in self._house.nodes:
            self._house.nodes[trajectory.node].release(trajectory.name)
            self._house.dirty.update(pool.name for pool in self._house.resources if pool.node == trajectory.node)
        self._commands.append(EndTrajectory(trajectory=trajectory.name))

    # -- nodes and configuration

    def _lose_node(self, name: str) -> None:
        """Everything on the node is over: settled as lost, or queued again where that is safe."""
        if name not in self._house.nodes:
            return
        gone = [trajectory for trajectory in self._trajectories if trajectory.node == name]
        for entry in self._house.executing.all():
            if entry.lease is not None and entry.lease.node == name:
                self._lose(entry, name)
        for trajectory in gone:
            trajectory.node = ""  # nothing of it returns to a node that comes back under this name
            self._end(trajectory, State.LOST, Reason.ENVIRONMENT_LOST)
        for pool in [pool for pool in self._house.resources if pool.node == name]:
            self._house.resources.remove(pool.name)
        for pool in self._house.resources:
            pool.leave(name)
        self._house.nodes.leave(name)
        self._all_dirty()

    def _lose(self, entry: Entry, node: str) -> None:
        message = f"node {node} was lost"
        aborting = entry.aborting
        self._abort(entry, message)
        pinned = None if entry.action.trajectory is None else self._trajectories.get(entry.action.trajectory)
        if entry.idempotent and not aborting and (pinned is None or pinned.node != node):
            self._requeue(entry)
            return
        state, reason = (State.CANCELLED, Reason.CANCELLED) if aborting else (State.LOST, Reason.NODE_LOST)
        self._retire(entry, Outcome(state=state, reason=reason, message=message, component="core"))

    def _requeue(self, entry: Entry) -> None:
        """Queue a lost action again, in its old place, as its next attempt."""
        self._release(entry)
        again = Entry(
            replace(entry.action, attempt=entry.action.attempt + 1),
            entry.key,
            entry.seq,
            idempotent=True,
            child=entry.child,
        )
        self._children.pop(entry.id, None)
        self._house.queue.admit(again, self._now_s)
        trajectory = None if again.action.trajectory is None else self._trajectories.get(again.action.trajectory)
        if trajectory is not None and trajectory.active is entry:
            trajectory.active = again
        self._offer(again, trajectory)

    def _join_node(self, event: NodeJoined) -> None:
        if event.node.name in self._house.nodes:
            return
        self._house.nodes.join(event.node)
        for pool in self._pools.of_node(event.node):
            self._house.resources.add(pool)
        for pool in self._house.resources:
            pool.join(event.node)
        self._all_dirty()

    def _reconfigure(self, event: Reconfigured) -> None:
        house = self._house
        if event.tasks is not None:
            house.tasks = house.queue.bounds.tasks = event.tasks
        if event.function_bounds is not None:
            house.queue.bounds.functions = event.function_bounds
        for name, quota in (event.quotas or {}).items():
            self._pools.quota(house.resources, name, quota)
        for name, concurrency in (event.concurrency or {}).items():
            self._pools.concurrency(house.resources, name, concurrency)
        if event.services is not None:
            house.services = {**house.services, **event.services}
            self._pools.services(house.resources, event.services)
        house.fair.reconfigure(frozenset(pool.kind for pool in house.resources if pool.timed))
        self._all_dirty()

    def _all_dirty(self) -> None:
        self._house.dirty.update(pool.name for pool in self._house.resources)
        self._house.dirty_groups.update(self._house.queue.groups())

    # -- time

    def _advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        for pool in self._house.resources:
            if pool.timed:
                free = pool.free
                pool.advance(self._now_s)
                if pool.free > free:
                    self._house.dirty.add(pool.name)

    def _lend(self) -> bool:
        """Children that are still waiting run on what their parents hold, one at a time; whether any was started."""
        starter = self._scheduling.starter
        lent = False
        for parent_id in list(self._children):
            parent = self._house.executing.get(parent_id)
            waiting = [entry for entry in self._children[parent_id] if entry.id in self._house.queue]
            if parent is None or not waiting:
                del self._children[parent_id]
                continue
            self._children[parent_id] = waiting
            first = waiting[0]
            if first.group is not None and self._house.executing.can_borrow(first, parent):
                self._touch(first)
                starter.lend(first, parent)
                lent = True
        self._commands += starter.take_commands()
        return lent

    def _wake(self) -> None:
        """Say when to come back, where that changed."""
        house = self._house
        instants = [
            house.queue.next_deadline_s(),
            self._trajectories.next_expiry_s(),
            *house.wakes.values(),
            *(house.resources[name].next_return_s() for name in self._awaited()),
        ]
        wake_s = min((instant for instant in instants if instant is not None), default=None)
        if wake_s != self._wake_s or (wake_s is not None and wake_s <= self._now_s):
            self._wake_s = wake_s
            self._commands.append(WakeAt(instant_s=wake_s))

    def _awaited(self) -> set[str]:
        """Pools whose units return with time and for which something waits."""
        timed = {pool.name for pool in self._house.resources if pool.timed}
        if not timed:
            return timed
        return timed & {name for group in self._house.queue.groups() for name in group.demand}

    # -- small parts

    def _weight(self, task: str) -> float:
        spec = self._house.tasks.get(task)
        return (TaskSpec() if spec is None else spec).weight

    def _account(self, task: str) -> Account:
        account = self.accounts.get(task)
        if account is None:
            account = self.accounts[task] = Account()
        return account

    def _take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands
