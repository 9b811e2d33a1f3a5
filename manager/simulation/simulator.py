"""The simulator: the same core, policies and managers as the engine's, under a virtual clock.

A workload is played in a closed loop: a trajectory thinks, submits its next action, and goes on when that has
settled. Every run asserts that each action completed, that no unit was leased twice, and the core's own
invariants. The same workload and cluster give the same run, byte for byte.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from manager.action import Action, capped
from manager.assembly import build_core
from manager.batch import Work
from manager.config import ManagerSpec
from manager.core.views import replicas_view
from manager.errors import CANCEL_ASKED, FILES_LOST, Reason, Unsatisfiable
from manager.events import (
    Abort,
    Command,
    EndTrajectory,
    Event,
    Execute,
    Finished,
    NodeJoined,
    NodeLost,
    Refuse,
    ReplicaEnded,
    Replicate,
    Resize,
    Settle,
    Submitted,
    Tick,
    TrajectoryEnded,
    WakeAt,
)
from manager.lease import Lease
from manager.outcome import Outcome, Settlement, State
from manager.simulation.duration_model import DurationModel, Oracle
from manager.simulation.faults import FaultEvent, FaultTally
from manager.simulation.lease_audit import LeaseAudit
from manager.simulation.pending_restores import PendingRestores
from manager.simulation.played_action import PlayedAction, work_s
from manager.simulation.sandbox_starts import SandboxStarts
from manager.simulation.trace import TracedTrajectory

#: Steps between two checks of all the core's invariants.
CHECK_EVERY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """What elasticity costs on real machines; each says where it is measured."""

    #: Core-seconds that each further worker process of a test run adds: 0.2 to 1.4 on real suites.
    worker_cost_s: float = 0.3
    #: Seconds that a resized action stands still (more than a cgroup write takes in ``bench.sandbox``).
    resize_cost_s: float = 0.02
    #: How many times as long work takes while a service is restored beside it (the limit of ``bench.model``).
    replica_slowdown: float = 1.05
    #: What a further member adds to a batch, as a fraction of what it takes alone: 1 where one sequence keeps a device
    #: busy, as the log-probabilities of a whole rollout do; near 0 where launching is all that a short one costs. The
    #: runtime computes a batch in forward passes of ``batch_tokens`` each and answers all members at its end.
    batch_marginal: float = 1.0
    #: Seconds that a trajectory's sandbox takes to be there, from its first action on cores on, and how many of them a
    #: node makes in a second. 0: no time, as from a warm pool; what is compared with pods is charged as they are.
    sandbox_start_s: float = 0.0
    sandboxes_per_node_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAction:
    """One settled action."""

    trajectory: str
    #: Its place among the steps of its trajectory.
    number: int
    function: str
    submitted_s: float
    queue_s: float
    overhead_s: float
    execution_s: float
    units: int
    #: Unit-seconds that it held of its key resource, or of the first of a rigid action.
    unit_s: float

    @property
    def ended_s(self) -> float:
        return self.submitted_s + self.act_s

    @property
    def act_s(self) -> float:
        return self.queue_s + self.overhead_s + self.execution_s


@dataclass(slots=True, kw_only=True)
class SimulationRun:
    """What one simulation of one policy gave."""

    records: list[SimulatedAction]
    trajectories: int
    makespan_s: float
    ledger: LeaseAudit
    resizes: int = 0
    restores: int = 0
    #: Copies of services made in free memory, and how many of them were used.
    replicas: int = 0
    replica_hits: int = 0
    #: Actions that gave up: in baselines only.
    failures: int = 0
    #: What faults of the cluster have cost.
    faults: FaultTally = field(default_factory=FaultTally)


class Simulation:
    """Plays one workload on one core."""

    def __init__(
        self,
        spec: ManagerSpec,
        trajectories: Sequence[TracedTrajectory],
        *,
        physics: Physics | None = None,
        knowledge: DurationModel | None = None,
        faults: Sequence[FaultEvent] = (),
    ) -> None:
        """``faults``: what happens to nodes, in order of time (`manager.simulation.faults`)."""
        self._spec = spec
        self._core = build_core(spec)
        self._trajectories = trajectories
        self._physics = physics or Physics()
        self._knowledge = knowledge or Oracle(self._physics.batch_marginal)
        self._ledger = LeaseAudit()
        self._events: list[tuple[float, int, Event | tuple[int, int]]] = []
        self._seq = 0
        self._now_s = 0.0
        self._wake_s: float | None = None
        self._running: dict[str, PlayedAction] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._records: list[SimulatedAction] = []
        self._resizes = 0
        self._restores = 0
        self._arrivals = PendingRestores()
        self._faults = deque(faults)
        self._tally = FaultTally()
        self._gone: set[str] = set()
        #: Until when a node's ends are not heard.
        self._silent: dict[str, float] = {}
        #: Trajectories that have work left, how often each began again, and those whose sandbox was lost.
        self._left = sum(1 for trajectory in trajectories if trajectory.steps)
        self._lives = [0] * len(trajectories)
        self._lost: set[str] = set()
        self._tries: dict[str, int] = {}
        self._sandboxes = SandboxStarts(self._physics.sandbox_start_s, self._physics.sandboxes_per_node_s)
        self.steps = 0

    def run(self) -> SimulationRun:
        """Play to the end; raises Unsatisfiable where an action could never start.

        A trajectory whose sandbox is lost with its node begins again, as a trainer would have it; an action that lost
        its node alone is asked for again.
        """
        for index, trajectory in enumerate(self._trajectories):
            if trajectory.steps:
                self._push(trajectory.arrival_s + trajectory.steps[0].think_s, (index, 0))
        while self._events or self._wake_s is not None or (self._faults and self._left):
            events = self._next_events()
            if not events:
                continue  # an end that a resize has moved
            for command in self._core.step(events, self._now_s):
                self._obey(command)
            self.steps += 1
            if self.steps % CHECK_EVERY == 0:
                self._core.check()
        self._finish()
        return SimulationRun(
            records=self._records,
            trajectories=len(self._trajectories),
            makespan_s=max((record.ended_s for record in self._records), default=0.0),
            ledger=self._ledger,
            resizes=self._resizes,
            restores=self._restores,
            replicas=self._arrivals.count,
            replica_hits=replicas_view(self._core).get("hits", 0),
            faults=self._tally,
        )

    def _finish(self) -> None:
        self._core.check()
        expected = sum(len(trajectory.steps) for trajectory in self._trajectories)
        assert self._left == 0, f"{self._left} of {len(self._trajectories)} trajectories have not ended"
        assert len(self._records) >= expected, f"{len(self._records)} of {expected} actions completed"
        assert self._tally.trajectories or len(self._records) == expected, "an action was completed twice"
        assert self._ledger.empty and not self._running, "something is leased after the end"

    # -- time

    def _push(self, instant_s: float, event: Event | tuple[int, int]) -> None:
        self._seq += 1
        heapq.heappush(self._events, (instant_s, self._seq, event))

    def _next_events(self) -> list[Event]:
        """Go to the next instant at which something happens, and take all of it."""
        next_s = self._events[0][0] if self._events else float("inf")
        if self._faults and self._left:
            next_s = min(next_s, self._faults[0].instant_s)
        if self._wake_s is not None and self._wake_s < next_s:
            assert self._events or self._wake_s > self._now_s, "the core asks for an instant that has passed"
            self._now_s, self._wake_s = max(self._now_s, self._wake_s), None
            return [Tick()]
        self._now_s = next_s
        events: list[Event] = []
        while self._faults and self._left and self._faults[0].instant_s <= next_s:
            events += self._befall(self._faults.popleft())
        while self._events and self._events[0][0] <= next_s:
            event = heapq.heappop(self._events)[2]
            if isinstance(event, tuple):
                events.append(self._submission(*event))
            elif not isinstance(event, Finished) or self._is_current(event):
                events.append(event)
        return events

    def _is_current(self, event: Finished) -> bool:
        """Whether the end was not moved by a resize since, nor the action killed; that it was killed is told once."""
        if event.outcome.state is State.CANCELLED:
            return True
        running = self._running.get(event.action_id)
        if running is None or event.attempt != running.action.attempt:
            return False
        if event.outcome.usage.get("version") != running.version:
            return False
        heard_s = self._silent.get(running.lease.node, 0.0)
        if heard_s > self._now_s:
            self._push(heard_s, event)
            return False
        return True

    def _befall(self, fault: FaultEvent) -> list[Event]:
        """Return what the core is told of a fault."""
        if fault.silent_until_s is not None:
            self._silent[fault.node] = fault.silent_until_s
        if isinstance(fault.event, NodeJoined):
            self._gone.discard(fault.node)
        elif isinstance(fault.event, NodeLost) and fault.node not in self._gone:
            self._gone.add(fault.node)
            self._tally.nodes_lost += 1
            self._silent.pop(fault.node, None)
        return [] if fault.event is None else [fault.event]

    # -- the workload

    def _submission(self, index: int, number: int) -> Submitted:
        trajectory = self._trajectories[index]
        if self._name(index) in self._lost:  # while it thought
            self._begin_again(index)
            number = 0
        step = trajectory.steps[number]
        name = self._name(index)
        action_id = f"{name}/{number}"
        if action_id in self._tries:
            action_id = f"{action_id}~{self._tries[action_id]}"
        self._places[action_id] = (index, number)
        known = self._knowledge.of(step)
        return Submitted(
            action=Action(
                id=action_id,
                function=step.function,
                task=trajectory.task,
                trajectory=name,
                cost=capped(step.cost, step.key, known.units_max),
                memory_bytes=trajectory.memory_bytes,
                trajectory_ttl_s=1e9,
                key=step.key,
                elasticity=known.elasticity,
                t_ori_s=known.t_ori_s,
                line=known.line,
                borrows=known.borrows,
                malleable=step.malleable,
                service=step.service,
                profile_key=step.profile_key,
                size=known.size,
                batch_tokens=step.batch_tokens,
                batch_marginal=known.batch_marginal,
                submitted_s=self._now_s,
                timeout_s=1e9,
                queue_timeout_s=1e9,
            ),
            idempotent=step.service is not None,
        )

    def _name(self, index: int) -> str:
        """Return a trajectory's id; each new life has another."""
        name, lives = self._trajectories[index].id, self._lives[index]
        return f"{name}#{lives}" if lives else name

    def _begin_again(self, index: int) -> None:
        self._lost.discard(self._name(index))
        self._lives[index] += 1
        self._tally.trajectories += 1

    # -- the core's commands

    def _obey(self, command: Command) -> None:
        match command:
            case Execute():
                self._execute(command.action, command.lease)
            case Resize():
                self._resize(command.action, command.lease)
            case Replicate():
                self._replicate(command)
            case Settle():
                self._settle(command.settlement)
            case Abort():
                self._abort(command.action_id)
            case EndTrajectory():
                self._lost.add(command.trajectory)
                self._sandboxes.lost(command.trajectory)
            case WakeAt():
                self._wake_s = command.instant_s
            case Refuse():
                raise Unsatisfiable(f"the core refused {command.action_id}: {command.error}", component="simulate")
            case _:
                pass  # placing trajectories needs nothing here

    def _execute(self, action: Action, lease: Lease) -> None:
        self._ledger.grant(lease, self._now_s)
        index, number = self._places[action.id]
        step = self._trajectories[index].steps[number]
        grant = lease.grants.get(step.key or "")
        workers = 0 if grant is None else max(grant.units, grant.workers)
        leads = not lease.batch or lease.batch[0] == action.id
        ready_s = self._ready_s(action, lease) if leads else self._running[lease.batch[0]].ready_s
        if self._physics.sandbox_start_s and "cpu" in lease.grants:
            ready_s = max(ready_s, self._sandboxes.ready_s(action.trajectory or action.id, lease.node, self._now_s))
        running = PlayedAction(action, step, lease, workers, ready_s - self._now_s, ready_s, self._now_s, ready_s)
        running.resized_s = self._now_s
        self._running[action.id] = running
        self._tally.again += action.attempt > 1
        self._slow(running)

    def _ready_s(self, action: Action, lease: Lease) -> float:
        """When the action's service is in place: what travels to its devices already goes first."""
        chunk = lease.chunk
        if action.service is None or chunk is None:
            return self._now_s
        if not any(grant.restore for grant in lease.grants.values()):
            return self._arrivals.of(action.service, lease, self._now_s)
        self._restores += 1
        return self._arrivals.busy_until_s(lease.node, chunk, self._now_s) + self._restore_s(action.service, chunk.size)

    def _restore_s(self, service: str, units: int) -> float:
        return self._spec.services[service].restore_s_by_dop[units]

    def _replicate(self, command: Replicate) -> None:
        """Send a copy to devices on which nothing computes yet; what starts there meanwhile is slowed."""
        restore_s = self._restore_s(command.service, command.chunk.size)
        arrives_s = self._arrivals.add(command.node, command.service, command.chunk, self._now_s, restore_s)
        self._push(arrives_s, ReplicaEnded(number=command.number, done=True))

    def _slow(self, running: PlayedAction) -> None:
        """Plan the end of an action that works more slowly while anything travels to its devices."""
        chunk, slowdown = running.lease.chunk, self._physics.replica_slowdown
        if chunk is not None:
            from_s = max(self._now_s, running.since_s)
            beside_s = max(0.0, self._arrivals.busy_until_s(running.lease.node, chunk, self._now_s) - from_s)
            left_s = (1.0 - running.done) * self._duration_s(running)
            running.since_s = from_s + min(beside_s * (1 - 1 / slowdown), left_s * (slowdown - 1))
        running.version += 1
        self._schedule_end(running)

    def _resize(self, action: Action, lease: Lease) -> None:
        """Account the work done with the old units; the action stands still for a moment and goes on."""
        running = self._running[action.id]
        self._ledger.change(lease, self._now_s)
        self._resizes += 1
        self._account(running)
        running.area += running.units * (self._now_s - running.resized_s)
        running.resized_s = self._now_s
        running.lease = lease
        running.since_s += self._physics.resize_cost_s
        running.lost_s += self._physics.resize_cost_s
        running.version += 1
        self._schedule_end(running)

    def _account(self, running: PlayedAction) -> None:
        """Note the work that was done with the present units."""
        if self._now_s > running.since_s:
            running.done += (self._now_s - running.since_s) / self._duration_s(running)
            running.since_s = self._now_s

    def _duration_s(self, running: PlayedAction) -> float:
        """Seconds of the whole work with the present units: of its batch, where it is part of one."""
        if running.lease.batch:
            return self._batch_s(running.lease)
        step = running.step
        alone_s = work_s(step, running.lease)
        if step.key is None or not step.malleable:
            return alone_s
        units = running.lease.units(step.key)
        assert 0 < units <= running.workers, f"{running.action.id}: {units} units for {running.workers} workers"
        return alone_s + self._physics.worker_cost_s * running.workers / units

    def _batch_s(self, lease: Lease) -> float:
        """All members end together, when the last forward pass has."""
        places = (self._places[member] for member in lease.batch)
        works_s = [work_s(self._trajectories[index].steps[number], lease) for index, number in places]
        return Work.of(works_s).seconds(self._physics.batch_marginal)

    def _schedule_end(self, running: PlayedAction) -> None:
        left_s = max(0.0, 1.0 - running.done) * self._duration_s(running)
        end_s = max(running.since_s, self._now_s) + left_s
        ran_s = end_s - running.started_s
        area = running.area + running.units * (end_s - running.resized_s)
        outcome = Outcome(
            state=State.SUCCEEDED,
            execution_s=max(0.0, ran_s - running.lost_s),
            usage={"version": float(running.version), "mean_units": area / ran_s if ran_s > 0 else running.units},
        )
        attempt = running.action.attempt
        self._push(end_s, Finished(action_id=running.action.id, outcome=outcome, attempt=attempt))

    def _settle(self, settlement: Settlement) -> None:
        """Record it, and let its trajectory think on."""
        action = settlement.action
        if settlement.outcome.state in (State.LOST, State.CANCELLED) and self._tally.nodes_lost:
            self._settle_lost(settlement)
            return
        if settlement.outcome.reason is Reason.QUEUE_TIMEOUT and self._tally.nodes_lost:
            told = f"{action.id} waits for ever, with {len(self._gone)} nodes lost: {settlement.outcome.message}"
            raise Unsatisfiable(told, component="simulate")
        assert settlement.outcome.state is State.SUCCEEDED, f"{action.id}: {settlement.outcome}"
        self._ledger.settle(action.id, self._now_s)
        running = self._running.pop(action.id)
        index, number = self._places.pop(action.id)
        self._knowledge.observe(settlement)
        self._records.append(
            SimulatedAction(
                trajectory=action.trajectory or "",
                number=number,
                function=action.function,
                submitted_s=action.submitted_s,
                queue_s=settlement.queue_s,
                overhead_s=settlement.overhead_s,
                execution_s=settlement.execution_s,
                units=running.units,
                unit_s=running.area + running.units * (self._now_s - running.resized_s),
            )
        )
        steps = self._trajectories[index].steps
        if number + 1 < len(steps):
            self._push(self._now_s + steps[number + 1].think_s, (index, number + 1))
        else:
            self._left -= 1
            self._push(self._now_s, TrajectoryEnded(trajectory=self._name(index)))

    def _abort(self, action_id: str) -> None:
        """Its node is lost, or its trajectory's: what it did is wasted.

        Where its own node lives it holds its units until it is known to be dead, as a runtime would say.
        """
        running = self._running.pop(action_id)
        self._ledger.settle(action_id, self._now_s)
        killed = Finished(
            action_id=action_id,
            outcome=Outcome(state=State.CANCELLED, reason=Reason.CANCELLED),
            attempt=running.action.attempt,
        )
        self._push(max(self._now_s, self._silent.get(running.lease.node, 0.0)), killed)
        self._tally.actions += 1
        if running.lease.batch and running.lease.batch[0] != action_id:
            return  # its batch's units are its leader's
        for kind, grant in running.lease.grants.items():
            spent = grant.units * (self._now_s - running.started_s + running.lost_s)
            self._tally.wasted[kind] = self._tally.wasted.get(kind, 0.0) + spent

    def _settle_lost(self, settlement: Settlement) -> None:
        """Ask for an action again, or begin its trajectory again where that was lost with it."""
        action = settlement.action
        index, number = self._places.pop(action.id)
        trajectory = self._trajectories[index]
        bereft = (
            not {CANCEL_ASKED, FILES_LOST}.isdisjoint(settlement.outcome.detail)
            or settlement.outcome.state is State.CANCELLED
        )
        if bereft or settlement.outcome.reason is Reason.ENVIRONMENT_LOST:
            self._begin_again(index)
            self._push(self._now_s + trajectory.steps[0].think_s, (index, 0))
        else:
            first = f"{self._name(index)}/{number}"
            self._tries[first] = self._tries.get(first, 0) + 1
            self._push(self._now_s, (index, number))
