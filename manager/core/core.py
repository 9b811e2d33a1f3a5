"""The scheduling core: a synchronous state machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manager.action import Action, Outcome, State
from manager.config import NodeSpec, share_of
from manager.core.executing import Running
from manager.core.outside import OutsideQueue
from manager.core.queue import Waiting
from manager.core.scheduling_pass import SchedulingPass
from manager.core.state import SchedulerState, Settling, TrajectoryOrder, cause_of
from manager.errors import CANCEL_ASKED, FILES_LOST, CapacityExceeded, CodedError, Conflict, Reason
from manager.events import (
    CancelRequested,
    Command,
    Event,
    Finished,
    NodeClosed,
    NodeJoined,
    NodeLost,
    NodeOpened,
    Reconfigured,
    Refuse,
    ReplicaEnded,
    Replicate,
    ResidencyReported,
    Resumed,
    Submitted,
    Tick,
    TrajectoryEnded,
    TrajectoryOpened,
    TryAgain,
    TryGranted,
    UnitsConsumed,
    WakeAt,
)
from manager.resources.cores import PlacedPool, Replica
from manager.resources.pools import TimedPool


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
                state.resources.refit(node, closed=known.closed is not None and not known.devices)
                has = node.devices, node.device_bytes
            state.nodes.describe(replace(node, devices=has[0], device_bytes=has[1]))
            state.resources.note_membership()
            return
        state.resources.join(node)
        state.nodes.join(node)

    def _has_device_leased(self, name: str) -> bool:
        leases = (running.lease for running in self._state.executing.all() if running.lease.node == name)
        return any(grant.chunk is not None for lease in leases for grant in lease.grants.values())

    def close(self, closed: NodeClosed) -> None:
        """Place nothing on a node any more, and start there what its trajectories ask for only if it is finishing."""
        if closed.node in self._state.nodes:
            self._state.nodes.close(closed.node, closed.why, finishing=closed.finishing, devices=closed.devices)
            self._state.resources.close(closed.node, finishing=closed.finishing, devices=closed.devices)

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
        pinned = [one for one in map(state.trajectories.get, state.nodes[name].pinned) if one is not None]
        gone = sorted(pinned, key=lambda one: one.opened_seq)
        for running in state.executing.all():
            if running.lease.node == name:
                self._lose(running, name)
        for trajectory in gone:
            trajectory.node = ""  # nothing of it returns to a node that comes back under this name
            self._settling.end_trajectory(trajectory, State.LOST, Reason.ENVIRONMENT_LOST)
        state.resources.leave(name)
        state.nodes.leave(name)

    def _lose(self, running: Running, node: str) -> None:
        """End it as lost; whoever submitted it decides about another try."""
        message, aborting = f"node {node} was lost", running.aborting
        self._settling.abort(running, message)
        trajectory = self._order.of(running.action)
        detail = {FILES_LOST: True} if trajectory is not None and trajectory.node == node else {}
        if aborting:
            message, detail = (
                f"{message} before it said that this had ended: {aborting}",
                {**detail, CANCEL_ASKED: True},
            )
        outcome = Outcome(state=State.LOST, reason=Reason.NODE_LOST, message=message, component="core", detail=detail)
        self._settling.retire(running, outcome)


# Replication: services in use are copied into free memory of idle devices, so that their next action starts warm.
#
# Nothing is evicted for a copy, and a copy is the first to go. One that failed is not tried again there before an
# action has restored the service itself.


class Replication:
    """Asks for copies after each pass, in pools that have places."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._count = 0
        #: Pool and copy of what is under way, by number.
        self._under_way: dict[int, tuple[PlacedPool, Replica]] = {}

    def run(self) -> None:
        """Ask for the copies that are worth having now."""
        state = self._state
        if state.spec.strict or state.paused or not state.spec.replicate:
            return
        for pool in state.resources.placed:
            for replica in pool.replicate(state.now_s) if pool.replicas_due else ():
                self._count += 1
                self._under_way[self._count] = pool, replica
                state.commands.append(
                    Replicate(number=self._count, service=replica.service, node=replica.node, chunk=replica.chunk)
                )

    def end(self, event: ReplicaEnded) -> None:
        """Note that a copy has arrived or failed; stale answers are ignored."""
        result = self._under_way.pop(event.number, None)
        if result is not None:
            pool, replica = result
            pool.replicated(replica, event.done)

    def lose(self, node: str) -> None:
        """Forget what was on its way to a node that is lost."""
        self._under_way = {number: what for number, what in self._under_way.items() if what[1].node != node}


# The core: events in, commands out. No clock, no I/O, no await; two shells drive it (`manager.engine`, `simulate`).
#
# Story: an accepted action waits in the queue (behind the earlier ones of its trajectory), is chosen by a scheduling
# pass, runs under a lease, and settles exactly once. A nested action (one with a running ``parent``) can never wait for
# its parent: it passes the trajectory's order and its task's caps, is served in its parent's place of the queue, and
# where the pools are full it runs on the cores and limits that its waiting parent holds, one child at a time. What a
# parent cannot lend (memory, devices, the cores of another node) a child waits for like everybody else; should others
# hold that for ever, the child ends with queue_timeout and says what it waited for, and its parent goes on.

#: Bounds of the Retry-After of a refusal, in seconds.
_RETRY_AFTER_S = (1.0, 60.0)


class Core:
    """The state machine. ``step`` is ``apply`` (what happened) and then ``schedule`` (what to do about it)."""

    def __init__(self, state: SchedulerState, outside: OutsideQueue | None = None) -> None:
        self.state = self._state = state
        #: What is shown beside the queue.
        self.outside = OutsideQueue(lambda: state.now_s) if outside is None else outside
        self._scheduling = SchedulingPass(state)
        self._replication = Replication(state)
        self._order = TrajectoryOrder(state)
        self._settling = Settling(state, self._order)
        self._membership = Membership(state, self._order, self._settling)
        self.accounts = self._settling.accounts
        self._seq = 0
        self._wake_s: float | None = None
        self.accepted = 0

    # -- the act

    def step(self, events: list[Event], now_s: float) -> list[Command]:
        """Take in what happened and decide what to do, in one scheduling pass."""
        return [*self.apply(events, now_s), *self.schedule(now_s)]

    def apply(self, events: Sequence[Event], now_s: float) -> list[Command]:
        """Take in what happened; nothing is started. An instant before the last one counts as the last one."""
        self._advance(now_s)
        for event in events:
            self._apply(event)
        commands, self._state.commands = self._state.commands, []
        return commands

    def schedule(self, now_s: float) -> list[Command]:
        """Settle what waited too long, then run one scheduling pass."""
        self._advance(now_s)
        state = self._state
        if self._order.free_turns:
            self._order.pass_turns()
        state.queue.release(state.now_s)
        for waiting in state.queue.expired(state.now_s):
            message = f"waited longer than queue_timeout, {waiting.action.queue_timeout_s:g} s, for "
            message += cause_of(state, waiting).text
            self._settling.end_waiting(waiting, State.TIMED_OUT, Reason.QUEUE_TIMEOUT, message)
        for trajectory in state.trajectories.expired(state.now_s):
            self._settling.end_trajectory(trajectory)
        self._order.place()
        self._scheduling.run()
        while state.children and self._lend():  # what the children had reserved may serve others
            self._scheduling.run()
        self._replication.run()
        self._wake()
        commands, state.commands = state.commands, []
        return commands

    def refusal(self, action: Action) -> CodedError | None:
        """Return why an action would not be accepted now; None if it would."""
        state = self._state
        if action.id in state.queue or action.id in state.executing:
            return Conflict(f"action {action.id} is queued or running", component="core", invocation_id=action.id)
        full = state.queue.refusal(action)
        if action.trajectory is not None:
            trajectory = state.trajectories.get(action.trajectory)
            if trajectory is None:
                full = full or self._crowd(action.task)
            elif trajectory.ending:
                message = f"trajectory {trajectory.name} is ending"
                return Conflict(message, component="core", invocation_id=action.id, retry_after_s=1.0)
        if full is not None:
            full.retry_after_s = self.retry_after_s()
        return full

    def crowded(self, trajectory: str | None, task: str) -> CodedError | None:
        """Return why a trajectory of a task may not begin now; None if it may, or has begun already."""
        if trajectory is None or self._state.trajectories.get(trajectory) is not None:
            return None
        return self._crowd(task)

    def _crowd(self, task: str) -> CapacityExceeded | None:
        """Return why one more trajectory of a task may not begin; None if it may."""
        living, limit = self._state.trajectories, self._state.spec.trajectories_max
        own, share = living.of_task(task), share_of(limit)
        if len(living) < limit and own < share:
            return None
        whose = f"{own} of them of task {task!r}, whose share is {share}"
        return CapacityExceeded(
            f"{len(living)} trajectories live already, {whose}; the bound trajectories_max is {limit}",
            component="core",
            retry_after_s=self.retry_after_s(),
        )

    def retry_after_s(self) -> float:
        """Return the seconds in which the queue is likely to have moved, by the recent rate of ends."""
        low, high = _RETRY_AFTER_S
        rate = self._settling.finishes.at(self._state.now_s)
        return high if rate <= 0 else min(high, max(low, 0.1 * len(self._state.queue) / rate))

    def pause(self) -> None:
        """Start nothing more but children of running actions: the gateway drains."""
        self._state.paused = True

    # -- views

    @property
    def settled(self) -> int:
        """Return how many actions have ended."""
        return self._settling.count

    def check(self) -> None:
        """Assert the invariants: nothing leased twice, and every accepted action queued, running or settled."""
        state = self._state
        assert not state.faults, f"policies failed: {state.faults}"
        state.resources.check()
        state.nodes.check()
        state.queue.check()
        state.executing.check()
        state.fair.check()
        waiting, running = len(state.queue), len(state.executing)
        assert self.accepted == waiting + running + self.settled, (
            f"{self.accepted} accepted, but {waiting} queued + {running} running + {self.settled} settled"
        )
        for trajectory in state.trajectories:
            active = trajectory.active
            assert active is None or active.id in state.queue or active.id in state.executing, f"{trajectory}"
            still = active is None and bool(trajectory.behind)
            assert not still or self._order.free_turns, f"trajectory {trajectory.name} stands still"

    # -- events

    def _apply(self, event: Event) -> None:
        match event:
            case Submitted():
                self._submit(event)
            case Resumed():
                self._resume(event)
            case Finished():
                self._finish(event)
            case CancelRequested():
                self._cancel(event.action_id, event.message or "cancelled by the caller")
            case TrajectoryOpened():
                self._seq += 1
                self._order.open(event, self._seq)
            case TrajectoryEnded():
                trajectory = self._state.trajectories.get(event.trajectory)
                if trajectory is not None and not trajectory.ending:
                    self._settling.end_trajectory(trajectory)
            case NodeLost():
                self._membership.lose(event.node)
                self._replication.lose(event.node)
            case NodeJoined():
                self._membership.join(event.node)
            case NodeClosed():
                self._membership.close(event)
            case NodeOpened():
                self._membership.open(event.node)
            case ResidencyReported():
                for pool in self._state.resources.placed:
                    pool.report(event.node, event.resident)
            case ReplicaEnded():
                self._replication.end(event)
            case Reconfigured():
                self._reconfigure(event)
            case UnitsConsumed():
                consumed = self._state.resources.get(event.resource)
                if isinstance(consumed, TimedPool):
                    consumed.restore(event.ended, event.running, self._state.now_s)
            case TryAgain():
                self._try_again(event)
            case Tick():
                pass

    def _submit(self, event: Submitted) -> None:
        action, state = event.action, self._state
        refusal = self.refusal(action)
        if refusal is not None:
            state.commands.append(Refuse(action_id=action.id, error=refusal))
            return
        self._seq += 1
        self.accepted += 1
        parent = None if action.parent is None else state.executing.get(action.parent)
        key = (self._stamp(action), self._seq, 0) if parent is None else (*parent.waited.key[:2], self._seq)
        child, not_before_s = parent is not None, event.not_before_s if event.not_before_s > state.now_s else 0.0
        waiting = Waiting(action, key, self._seq, child=child, not_before_s=not_before_s)
        state.queue.admit(waiting, state.now_s)
        if parent is not None:
            state.children.setdefault(parent.id, []).append(waiting)
        self._order.line_up(waiting)

    def _resume(self, event: Resumed) -> None:
        """Lease a running action; refuse it if its units, or the turn of its trajectory, cannot be had any more."""
        action, state = event.action, self._state
        known = action.id in state.queue or action.id in state.executing
        requests = state.executing.requests(action, event.node, event.units)
        if known or requests is None or not self._order.can_resume(action, event.node):
            message = f"action {action.id} cannot be resumed: what it held is not free"
            state.commands.append(Refuse(action_id=action.id, error=Conflict(message, component="core")))
            return
        self._seq += 1
        self.accepted += 1
        waiting = Waiting(action, (self._stamp(action), self._seq, 0), self._seq)
        self._order.resume(waiting, event.node)
        self._scheduling.dispatcher.resume(waiting, event.node, requests, event.started_s)

    def _stamp(self, action: Action) -> float:
        """Return the fair share's order; the strict reading knows no fairness but the order of submission."""
        if self._state.spec.strict:
            return 0.0
        return self._state.fair.stamp(action, self._state.weight(action.task))

    def _finish(self, event: Finished) -> None:
        running = self._state.executing.get(event.action_id)
        if running is None:
            return  # it was settled when its node was lost
        self._settling.retire(running, event.outcome)

    def _cancel(self, action_id: str, message: str) -> None:
        running = self._state.executing.get(action_id)
        if running is not None:
            self._settling.abort(running, message)
            return
        waiting = self._state.queue.get(action_id)
        if waiting is not None:
            self._settling.end_waiting(waiting, State.CANCELLED, Reason.CANCELLED, message)

    def _try_again(self, event: TryAgain) -> None:
        running = self._state.executing.get(event.action_id)
        if running is None:
            return
        timed = [pool for pool in self._state.resources.timed if pool.kind in running.lease.grants]
        for pool in timed:
            pool.want_again(running.id, running.lease.units(pool.kind))
        if not timed:
            self._state.commands.append(TryGranted(action_id=running.id))
        self._grant_tries()

    def _grant_tries(self) -> None:
        """Let those try again that have all that they want for it."""
        timed = self._state.resources.timed
        for pool in timed:
            for holder in pool.grant_again():
                if not any(other.wants_again(holder) for other in timed):
                    self._state.commands.append(TryGranted(action_id=holder))

    def _reconfigure(self, event: Reconfigured) -> None:
        state = self._state
        if event.tasks is not None:
            state.declare(event.tasks)
        if event.function_bounds is not None:
            state.queue.bounds.functions = event.function_bounds
        for name, declared in (event.resources or {}).items():
            state.resources.declare(name, declared)
        if event.services is not None:
            state.queue.services = {**state.queue.services, **event.services}
            for pool in state.resources.placed:
                pool.learn(event.services)
        state.fair.reconfigure(frozenset(pool.kind for pool in state.resources.timed))

    # -- time

    def look(self, now_s: float) -> None:
        """Bring the state forward for whoever reads it: the instant, and what returns with time; nothing is decided."""
        self._state.now_s = max(self._state.now_s, now_s)
        for pool in self._state.resources.timed:
            pool.advance(self._state.now_s)

    def _advance(self, now_s: float) -> None:
        state = self._state
        if now_s > state.now_s:
            state.now_s = now_s
        if state.resources.timed:
            for pool in state.resources.timed:
                pool.advance(state.now_s)
            self._grant_tries()

    def _lend(self) -> bool:
        """Start children that still wait on what their parents hold, one at a time; return whether any was started."""
        state, lent = self._state, False
        for parent_id, child in [(parent_id, siblings[0]) for parent_id, siblings in state.children.items()]:
            parent = state.executing.get(parent_id)
            if parent is not None and child.group is not None and state.executing.can_borrow(child, parent):
                self._scheduling.dispatcher.lend(child, parent)
                lent = True
        return lent

    def _wake(self) -> None:
        """Say when to come back, if that changed."""
        state = self._state
        wished = [state.queue.next_deadline_s(), state.trajectories.next_expiry_s(), *state.wakes.values()]
        wished.append(state.now_s if self._order.free_turns else state.queue.next_release_s())
        if state.memory_waits_from is not None:
            wished.append(self._order.room_from_s)
        if state.resources.timed:
            wished += [pool.next_return_s() for pool in self._awaited()]
        wake_s = None
        for instant in wished:
            if instant is not None and (wake_s is None or instant < wake_s):
                wake_s = instant
        if wake_s != self._wake_s or (wake_s is not None and wake_s <= state.now_s):
            self._wake_s = wake_s
            state.commands.append(WakeAt(instant_s=wake_s))

    def _awaited(self) -> list[TimedPool]:
        """Return the pools whose units return with time and for which something waits."""
        timed = self._state.resources.timed
        return [pool for pool in timed if self._state.queue.groups_of(pool.kind) or pool.wants_again()]
