"""Whole steps of a core under load, timed: what an end, a submission or a burst costs beside the reading of a document.

Times are of this thread on its processor. The document is a committed file of 100 kB, read by ``json.loads`` between
the steps: a slow or busy machine is as slow at both, so the quotient says what the code costs.
"""

from __future__ import annotations

import gc
import heapq
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.report import median, percentile
from manager.action import Action, Amdahl, Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec
from manager.core.core import Core
from manager.events import Command, Event, Execute, Finished, Resize, Submitted, Tick, WakeAt
from manager.simulation.simulator import cluster
from manager.simulation.workloads import coding

#: What a gateway answers when it is asked for its pools and its queue: 100 kB.
DOCUMENT = Path(__file__).with_name("document.json").read_text(encoding="utf-8")
#: Steps between which the document is read, and how often in a row: but for the first it is warm in the caches.
READ_EVERY = 50
READINGS = 5
TASKS = ("coding", "search", "judging")
#: Median seconds with one core, by whether more cores help: a test suite, a shell command.
MEDIAN_S = {True: 80.0, False: 0.5}
SIGMA = 0.6
#: What a trajectory holds of its node.
MEMORY_BYTES = 2**26


@dataclass(slots=True)
class StepTimes:
    """Seconds of steps, and of the readings of the document in between."""

    steps_s: list[float] = field(default_factory=list)
    document_s: list[float] = field(default_factory=list)

    def step(self, core: Core, events: list[Event], now_s: float) -> list[Command]:
        """Time one step; the document is read before it, if it is time."""
        if len(self.steps_s) % READ_EVERY == 0:
            self.read(READINGS)
        begin = time.thread_time()
        commands = core.step(events, now_s)
        self.steps_s.append(time.thread_time() - begin)
        return commands

    def read(self, times: int) -> None:
        """Time readings of the document."""
        for _ in range(times):
            begin = time.thread_time()
            json.loads(DOCUMENT)
            self.document_s.append(time.thread_time() - begin)

    @property
    def document_ms(self) -> float:
        return 1e3 * median(self.document_s)

    def over_document(self, share: float) -> float:
        """Return the step that ``share`` of the steps stay below, in readings of the document."""
        return percentile(self.steps_s, share) / median(self.document_s)


class LoadedCore:
    """A core of which every core is used and for which ``queued`` actions wait, half of them elastic.

    With ``trajectories`` each action belongs to one, which is pinned to a node; without, any node may serve it.
    """

    def __init__(self, spec: ManagerSpec, queued: int, seed: int, *, trajectories: bool) -> None:
        self._core = build_core(spec)
        self._rng = np.random.default_rng(seed)
        self._trajectories = trajectories
        self._made = 0
        self._now_s = 0.0
        self._wake_s: float | None = None
        #: Ends of running actions, soonest first, among them some that a resize has moved.
        self._ends: list[tuple[float, str]] = []
        self._running: dict[str, _Work] = {}
        cores = sum(node.cores for node in spec.nodes)
        # Elastic ones first: else the short ones would hold every core for a long time, and nothing could be resized.
        self._do(self._core.step([self._submission(elastic=True) for _ in range(cores // 2)], 0.0))
        self._do(self._core.step([self._submission() for _ in range(queued + cores // 2)], 0.0))
        while len(self._core.state.queue) < queued:
            self._do(self._core.step([self._submission()], 0.0))

    def turn_over(self, times: int) -> StepTimes:
        """Let the next action end and another come in its place, so many times; time the steps that take in both.

        What the core wants to be woken for comes between.
        """
        found = StepTimes()
        while len(found.steps_s) < times:
            end_s, action_id = self._ends[0]
            if self._wake_s is not None and self._wake_s < end_s:
                self._now_s = self._wake_s
                self._do(self._core.step([Tick()], self._now_s))
                continue
            heapq.heappop(self._ends)
            work = self._running.get(action_id)
            if work is None or work.end_s != end_s:
                continue
            del self._running[action_id]
            self._now_s = end_s
            done = Outcome(state=State.SUCCEEDED, execution_s=end_s - work.started_s)
            events: list[Event] = [Finished(action_id=action_id, outcome=done), self._submission(work.action)]
            self._do(found.step(self._core, events, end_s))
        return found

    def check(self) -> None:
        """Assert the core's invariants."""
        self._core.check()

    def _submission(self, after: Action | None = None, *, elastic: bool | None = None) -> Submitted:
        """Return the next action, of the trajectory of the one that it comes ``after``."""
        self._made += 1
        if elastic is None:
            elastic = bool(self._rng.random() < 0.5)
        own = f"t{self._made}" if after is None else after.trajectory
        action = Action(
            id=f"a{self._made}",
            function="suite" if elastic else "shell",
            task=TASKS[self._made % len(TASKS)] if after is None else after.task,
            trajectory=own if self._trajectories else None,
            memory_bytes=MEMORY_BYTES if self._trajectories else 0,
            trajectory_ttl_s=1e9,
            cost={"cpu": UnitSet.span(1, 32) if elastic else UnitSet.fixed(1)},
            key="cpu" if elastic else None,
            elasticity=Amdahl(round(float(self._rng.uniform(0.02, 0.1)), 3)) if elastic else None,
            t_ori_s=float(self._rng.lognormal(np.log(MEDIAN_S[elastic]), SIGMA)),
            malleable=elastic,
            submitted_s=self._now_s,
            queue_timeout_s=1e9,
        )
        return Submitted(action=action)

    def _do(self, commands: Sequence[Command]) -> None:
        """Carry the commands out as a runtime would whose actions take as long as they say."""
        for command in commands:
            match command:
                case Execute():
                    work = self._running[command.action.id] = _Work(command.action, self._now_s, self._now_s)
                    self._plan(work, command.lease.units("cpu"))
                case Resize():
                    self._plan(self._running[command.action.id], command.lease.units("cpu"))
                case WakeAt():
                    self._wake_s = command.instant_s
                case _:
                    pass

    def _plan(self, work: _Work, units: int) -> None:
        heapq.heappush(self._ends, (work.go_on(units, self._now_s), work.action.id))


@dataclass(slots=True)
class _Work:
    """One running action as it really goes."""

    action: Action
    started_s: float
    since_s: float
    done: float = 0.0
    duration_s: float = 0.0
    end_s: float = 0.0

    def go_on(self, units: int, now_s: float) -> float:
        """Work with ``units`` from now on; return when it ends."""
        if self.duration_s:
            self.done += (now_s - self.since_s) / self.duration_s
        self.since_s = now_s
        self.duration_s = self.action.duration_s(units) or 0.0
        self.end_s = now_s + max(0.0, 1.0 - self.done) * self.duration_s
        return self.end_s


def burst(nodes: int, cores: int, submissions: int, seed: int) -> StepTimes:
    """Time one step over the first actions of so many new trajectories, on an empty core."""
    core = build_core(cluster(policy="adaptive", nodes=nodes, cores=cores))
    events: list[Event] = [
        Submitted(
            action=Action(
                id=trajectory.id,
                function=trajectory.steps[0].function,
                trajectory=trajectory.id,
                memory_bytes=2**30,
                cost=trajectory.steps[0].cost,
                t_ori_s=trajectory.steps[0].t_ori_s,
            )
        )
        for trajectory in coding(submissions, seed).trajectories
    ]
    gc.collect()
    found = StepTimes()
    found.read(20)
    found.step(core, events, 0.0)
    found.read(20)
    core.check()
    return found


def arrivals(nodes: int, times: int) -> StepTimes:
    """Time submissions of new trajectories, each alone in its step, to ``nodes`` nodes with half of 16 cores in use."""
    core = build_core(cluster(policy="adaptive", nodes=nodes, cores=16 * nodes))
    core.step([_shell(f"old{number}", 0.0) for number in range(8 * nodes)], 0.0)
    found = StepTimes()
    for number in range(times):
        now_s = 1.0 + number
        submission = _shell(f"new{number}", now_s)
        found.step(core, [submission], now_s)
        done = Outcome(state=State.SUCCEEDED, execution_s=0.5)
        core.step([Finished(action_id=submission.action.id, outcome=done)], now_s + 0.5)
    core.check()
    return found


def _shell(name: str, now_s: float) -> Submitted:
    """Return a short action on one core, the first of a trajectory of its own."""
    return Submitted(
        action=Action(
            id=name,
            function="shell",
            trajectory=name,
            memory_bytes=MEMORY_BYTES,
            trajectory_ttl_s=1e9,
            cost={"cpu": UnitSet.fixed(1)},
            t_ori_s=0.5,
            submitted_s=now_s,
        )
    )
