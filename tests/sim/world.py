"""The world: from a seed, a configuration and everything that happens to a core, until nothing is left."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from manager.action import ANYWHERE, Action, Amdahl, Chunk, NodeChoice, Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, ServiceSpec, TaskSpec
from manager.core.core import Core
from manager.core.scheduling_pass import SchedulingPass
from manager.errors import Reason
from manager.events import (
    Abort,
    CancelRequested,
    Command,
    Event,
    Execute,
    Finished,
    NodeClosed,
    NodeJoined,
    NodeLost,
    NodeOpened,
    Reconfigured,
    ReplicaEnded,
    Replicate,
    ResidencyReported,
    Resize,
    Settle,
    Submitted,
    Tick,
    TrajectoryEnded,
    TrajectoryOpened,
    WakeAt,
)
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from manager.scheduler.policy import Policy, PolicySpec
from manager.scheduler.registry import make_policy
from tests.sim.checkers import (
    Checker,
    EndsChecker,
    Exclusive,
    FirstComeFirstServed,
    Late,
    Quotas,
    Residents,
    TrajectoriesChecker,
    Workers,
    story,
)
from tests.sim.closed_nodes import ClosedNodes
from tests.sim.devices import Devices
from tests.sim.policies import RandomPolicy

#: Seconds in which submissions fall; the clock may jump far beyond.
_SPAN_S = 20.0
#: Steps after which a world that does not come to rest is taken to be stuck.
_STEPS_MAX = 5000
_MEBIBYTE = 2**20


@dataclass(slots=True)
class Journal:
    """All that happened, as text."""

    lines: list[str] = field(default_factory=list)

    def note(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        self.lines.append(f"{now_s:.6f} {story(event)}")
        for command in commands:
            match command:
                case Execute() | Resize():
                    grants = {
                        kind: (grant.units, grant.cores, grant.chunk) for kind, grant in command.lease.grants.items()
                    }
                    self.lines.append(f"    {type(command).__name__} {command.action.id} {command.lease.node} {grants}")
                case Settle():
                    outcome = command.settlement.outcome
                    self.lines.append(
                        f"    Settle {command.settlement.action.id} {outcome.state.value} {outcome.reason}"
                    )
                case _:
                    self.lines.append(f"    {command}")

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


class World:
    """One seed's world. ``run`` raises AssertionError where a promise is broken, or a policy fails.

    ``policy`` decides on everything, instead of ``fixed`` or the random one.
    """

    def __init__(self, seed: int, policy: PolicySpec | None = None) -> None:
        self._random = random.Random(seed)
        self._policy = policy
        self.orderly = self._random.random() < 0.6 and policy is None
        #: Whether most actions ask models, so that devices are fought over.
        self._modelling = self._random.random() < 0.3
        #: Whether actions choose their nodes, by labels and by what these are able to run.
        self._choosy = self._random.random() < 0.2
        self.spec = self._spec()
        #: What the devices really hold, in worlds whose nodes tell of it.
        self._devices = Devices(self.spec, self._random) if self._random.random() < 0.5 else None
        self.core = self._core(seed)
        self.journal = Journal()
        self._checkers: list[Checker] = [
            Exclusive(self.spec),
            EndsChecker(),
            Quotas(self.spec),
            TrajectoriesChecker(),
            Late(),
            ClosedNodes(self.spec, self.core),
            Residents(),
            Workers(),
        ]
        if self.orderly:
            self._checkers.append(FirstComeFirstServed(self.spec))
        #: (instant, order, event or what makes one).
        self._agenda: list[tuple[float, int, Event | Callable[[], Event | None]]] = []
        self._count = 0
        self._now_s = 0.0
        self._wake_s: float | None = None
        #: Running, by id, and how it goes on when it is killed.
        self._running: dict[str, float] = {}
        self._spawned = 0

    def run(self) -> Journal:
        """Play everything to its end."""
        self._write_agenda()
        for _ in range(_STEPS_MAX):
            if not self._next():
                break
        else:
            raise AssertionError(f"not at rest after {_STEPS_MAX} steps")
        for checker in self._checkers:
            checker.end()
        assert self.core.accepted == self.core.settled
        for pool in self.core.state.resources:
            assert not pool.held, f"{pool.name} holds {dict(pool.held)} at the end"
        return self.journal

    # -- what there is

    def _spec(self) -> ManagerSpec:
        chance = self._random
        nodes = tuple(
            NodeSpec(
                name=f"n{index}",
                numa=tuple(
                    tuple(range(start, start + chance.randint(1, 4))) for start in (0, 10)[: chance.randint(1, 2)]
                ),
                memory_bytes=chance.choice((4, 8, 64)) * _MEBIBYTE,
                devices=chance.choice((0, 1, 2, 4, 6)),
                device_bytes=100,
                labels={"pool": chance.choice("ab")} if self._choosy else {},
                able=frozenset({chance.choice("fg")}) if self._choosy and chance.random() < 0.3 else None,
            )
            for index in range(chance.randint(1, 3))
        )
        services = {
            name: ServiceSpec(
                name=name,
                bytes_by_dop={1: size, 2: size // 2, 4: size // 4},
                restore_s_by_dop={1: 0.4, 2: 0.2, 4: 0.1},
                batch_tokens=chance.choice((0, 0, 10)),
            )
            for name, size in (("s0", 60), ("s1", 90), ("s2", 30))
        }
        return ManagerSpec(
            nodes=nodes,
            resources={
                "search": QuotaSpec(
                    limit=chance.randint(1, 5),
                    period_s=chance.choice((0.5, 1.0, 3.0)),
                    burst=chance.choice((None, 1, 2)),
                ),
                "parser": ConcurrencySpec(limit=chance.randint(1, 4)),
            },
            tasks={
                "red": TaskSpec(
                    weight=chance.choice((1.0, 3.0)),
                    max_queued=chance.choice((20, 1000)),
                    caps=chance.choice(({}, {}, {"cpu": 2}, {"parser": 1})),
                ),
                "blue": TaskSpec(weight=1.0),
            },
            services=services,
            scheduler=SchedulerSpec(
                policies={"default": PolicySpec(name="fixed", options={"dop": chance.choice((1, 2, 4))})},
                strict=chance.random() < 0.1,
                max_queued=chance.choice((15, 1000)),
                queue_window=chance.choice((4, 2048)),
                replicate=chance.random() < 0.7,
            ),
        )

    def _core(self, seed: int) -> Core:
        policies: dict[str, Policy] = {}
        if self._policy is not None:
            policies = {"default": make_policy(self._policy)}
        elif not self.orderly:
            policies = {kind: RandomPolicy(seed + index) for index, kind in enumerate(("default", "cpu", "gpu"))}
        return build_core(self.spec, policies=policies, function_bounds={"f": self._random.choice((10, 1000))})

    # -- what happens

    def _write_agenda(self) -> None:
        chance = self._random
        burst_s = chance.uniform(0, _SPAN_S)
        for _ in range(chance.randint(3, 45)):
            at_s = burst_s if chance.random() < 0.3 else chance.uniform(0, _SPAN_S)
            self._at(at_s, lambda: Submitted(action=self._action()))
        for _ in range(chance.choice((0, 0, 1, 4))):
            self._at(chance.uniform(0, _SPAN_S), self._cancel)
        if chance.random() < 0.3:
            self._write_node_losses()
        if chance.random() < 0.3:
            at_s = chance.uniform(0, _SPAN_S)
            self._at(
                at_s,
                TrajectoryOpened(
                    trajectory="t0", memory_bytes=2 * _MEBIBYTE, ttl_s=5.0, cost={"cpu": UnitSet.fixed(1)}
                ),
            )
        for _ in range(chance.choice((0, 0, 2))):
            self._at(chance.uniform(0, _SPAN_S), TrajectoryEnded(trajectory=f"t{chance.randrange(4)}"))
        if chance.random() < 0.2:
            self._at(chance.uniform(0, _SPAN_S), Reconfigured(tasks={"red": TaskSpec(weight=2.0)}))
        if self._devices is None and chance.random() < 0.3:
            resident = {"s0": (Chunk(0, 1),), "s2": (Chunk(0, 1),)}
            self._at(chance.uniform(0, _SPAN_S), ResidencyReported(node="n0", resident=resident))
        if chance.random() < 0.4:
            self._write_closings()

    def _write_node_losses(self) -> None:
        node = self._random.choice(self.spec.nodes)
        lost_s = self._random.uniform(0, _SPAN_S)
        self._at(lost_s, NodeLost(node=node.name))
        if self._random.random() < 0.7:
            self._at(lost_s + self._random.uniform(0.1, 5.0), NodeJoined(node=node))

    def _write_closings(self) -> None:
        """Nodes are closed, now and then twice, and opened again, mostly; some are lost meanwhile."""
        chance = self._random
        for _ in range(chance.choice((1, 2, 6))):
            name, closed_s = chance.choice(self.spec.nodes).name, chance.uniform(0, _SPAN_S)
            self._at(closed_s, NodeClosed(node=name, why="suspect"))
            if chance.random() < 0.2:
                self._at(closed_s + chance.uniform(0, 2.0), NodeClosed(node=name, why="draining", finishing=True))
            if chance.random() < 0.2:
                again_s = closed_s + chance.uniform(0, 2.0)
                self._at(again_s, NodeClosed(node=name, why="unfit", finishing=True, devices=True))
            if chance.random() < 0.8:
                self._at(closed_s + chance.choice((0.0, 0.1, 3.0)), NodeOpened(node=name))

    def _at(self, instant_s: float, what: Event | Callable[[], Event | None]) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (instant_s, self._count, what))

    def _action(self, parent: Action | None = None) -> Action:
        chance = self._random
        self._spawned += 1
        cost = self._cost()
        elastic = "cpu" in cost and cost["cpu"].elastic
        in_trajectory = chance.random() < 0.35
        trajectory = f"t{chance.randrange(4)}" if in_trajectory else None
        if parent is not None and chance.random() < 0.5:
            trajectory = parent.trajectory
        return Action(
            id=f"a{self._spawned}",
            function=chance.choice(("f", "g")),
            task=chance.choice(("red", "blue", "grey")) if parent is None else parent.task,
            trajectory=trajectory,
            cost=cost,
            memory_bytes=chance.choice((0, 0, 1, 2)) * _MEBIBYTE if "cpu" in cost else 0,
            placement=self._placement(),
            trajectory_ttl_s=chance.choice((0.5, 5.0, 1800.0)),
            key="cpu" if elastic else "gpu" if "gpu" in cost and cost["gpu"].elastic else None,
            elasticity=Amdahl(0.1),
            t_ori_s=chance.choice((None, 0.5, 3.0)),
            malleable=elastic and parent is None and chance.random() < 0.5,
            service=chance.choice(("s0", "s1", "s2")) if "gpu" in cost else None,
            batch_tokens=chance.choice((0, 2, 4)) if list(cost) == ["gpu"] else 0,
            submitted_s=self._now_s,
            queue_timeout_s=chance.choice((0.5, 5.0, 60.0)),
            parent=None if parent is None else parent.id,
        )

    def _placement(self) -> NodeChoice:
        """Mostly anywhere; else what one or no node has, or is able to run."""
        chance = self._random
        if not self._choosy or chance.random() < 0.5:
            return ANYWHERE
        labels = (("pool", chance.choice(("a", "b"))),) if chance.random() < 0.6 else ()
        return NodeChoice(labels, chance.choice(("", "f", "g")))

    def _cost(self) -> dict[str, UnitSet]:
        chance = self._random
        if self._modelling and chance.random() < 0.7:
            return {"gpu": UnitSet.of((1, 2, 4)) if chance.random() < 0.5 else UnitSet.fixed(chance.choice((1, 2)))}
        largest = max(node.cores for node in self.spec.nodes)
        kinds = chance.choice(
            (
                ("cpu",),
                ("cpu",),
                ("cpu",),
                ("search",),
                ("parser",),
                ("gpu",),
                ("cpu", "search"),
                ("parser", "cpu"),
                ("cpu", "gpu"),
                (),
            )
        )
        cost: dict[str, UnitSet] = {}
        for kind in kinds:
            if kind == "cpu":
                low = chance.randint(1, min(2, largest))
                cost[kind] = UnitSet.span(low, chance.randint(low, 6)) if chance.random() < 0.6 else UnitSet.fixed(low)
            elif kind == "gpu":
                cost[kind] = UnitSet.of((1, 2, 4)) if chance.random() < 0.5 else UnitSet.fixed(chance.choice((1, 2)))
            else:
                cost[kind] = UnitSet.fixed(1)
        return cost

    def _cancel(self) -> Event | None:
        ids = sorted({entry.id for entry in self.core.state.queue} | self._running.keys())
        return CancelRequested(action_id=self._random.choice(ids)) if ids else None

    # -- time

    def _next(self) -> bool:
        """One step at the next instant at which something happens; whether there was one."""
        instants = [self._agenda[0][0]] if self._agenda else []
        if self._wake_s is not None:
            instants.append(self._wake_s)
        if not instants:
            return False
        late_s = self._random.choice((0.0, 0.0, 0.0, 0.001, 2.0))  # a wake-up that comes late: the clock jumps
        self._now_s = max(self._now_s, min(instants) + late_s)
        events: list[Event] = []
        while self._agenda and self._agenda[0][0] <= self._now_s:
            what = heapq.heappop(self._agenda)[2]
            event = what() if callable(what) else what
            if event is not None:
                events.append(event)
        for event in events or [Tick()]:
            report = None if self._devices is None else self._devices.before(event)
            for each in (event,) if report is None else (report, event):
                self._tell(each, self.core.apply([each], self._now_s))
        self._tell(None, self.core.schedule(self._now_s))
        self.core.check()
        if self._devices is not None:
            self._devices.check(self.core)
        if self.orderly:
            self._check_progress()
        return True

    def _check_progress(self) -> None:
        """A policy that starts what it can leaves nothing waiting that could start beside all reservations."""
        state = self.core.state
        startable = SchedulingPass(state).select(state.queue.groups()).candidates
        assert not startable, f"{[candidate.waiting.id for candidate in startable]} could start at {self._now_s}"

    def _tell(self, event: Event | None, commands: list[Command]) -> None:
        self.journal.note(self._now_s, event, commands)
        if isinstance(event, Finished):
            self._running.pop(event.action_id, None)
        for checker in self._checkers:
            checker.see(self._now_s, event, commands)
        if self._devices is not None:
            self._devices.obey(commands)
        for command in commands:
            match command:
                case Execute():
                    self._begin(command)
                case Abort():
                    self._kill(command)
                case Replicate():
                    self._bring(command)
                case WakeAt():
                    self._wake_s = command.instant_s
                case _:
                    pass

    def _begin(self, command: Execute) -> None:
        chance, action = self._random, command.action
        ran_s = chance.choice((0.0, 0.01, 0.3, 2.0, 8.0)) * chance.uniform(0.5, 1.5)
        hangs = chance.random() < 0.03
        self._running[action.id] = self._now_s
        if action.parent is None and chance.random() < 0.15:
            for _ in range(chance.randint(1, 2)):
                self._at(self._now_s + ran_s * chance.uniform(0, 1), lambda: self._child(action))
        self._at(self._now_s + (action.timeout_s if hangs else ran_s), self._outcome(action.id, hangs))

    def _bring(self, command: Replicate) -> None:
        """It arrives sooner or later, or does not; an answer may come twice."""
        for _ in range(self._random.choice((1, 1, 1, 2))):
            lucky = self._random.random() < 0.8
            instant_s = self._now_s + self._random.choice((0.0, 0.1, 0.4, 3.0))
            self._at(instant_s, lambda lucky=lucky: self._brought(command.number, lucky))  # type: ignore[misc]

    def _brought(self, number: int, lucky: bool) -> ReplicaEnded:
        return ReplicaEnded(number=number, done=lucky and (self._devices is None or self._devices.has_room(number)))

    def _child(self, parent: Action) -> Event | None:
        """A running action invokes another and goes on for a while."""
        return Submitted(action=self._action(parent)) if parent.id in self._running else None

    def _outcome(self, action_id: str, hangs: bool) -> Finished:
        chance = self._random
        execution_s = chance.uniform(0, 3.0)
        if hangs:
            outcome = Outcome(state=State.TIMED_OUT, reason=Reason.TIMEOUT, execution_s=execution_s)
        elif chance.random() < 0.1:
            outcome = Outcome(state=State.FAILED, reason=Reason.HANDLER_ERROR, execution_s=execution_s)
        else:
            outcome = Outcome(state=State.SUCCEEDED, execution_s=execution_s)
        return Finished(action_id=action_id, outcome=outcome)

    def _kill(self, command: Abort) -> None:
        """The executor kills it, sooner or later; the answer it had under way may come as well."""
        outcome = Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message=command.message)
        finished = Finished(action_id=command.action_id, outcome=outcome)
        self._at(self._now_s + self._random.choice((0.0, 0.05, 1.0)), finished)
