"""Whole steps of a core under load, timed: what an end, a submission or a burst costs beside the reading of a document.

Times are of this thread on its processor. The document is a committed file of 100 kB, read by ``json.loads``: a slow
machine is as slow at both, so the quotient says what the code costs.
"""

from __future__ import annotations

import gc
import heapq
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.report import median
from manager.action import Action, Amdahl, Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec
from manager.core.core import Core
from manager.events import (
    CancelRequested,
    Command,
    Event,
    Execute,
    Finished,
    NodeJoined,
    NodeLost,
    Resize,
    Settle,
    Submitted,
    Tick,
    WakeAt,
)
from manager.simulation.simulator import cluster
from manager.simulation.workloads import coding

#: What a gateway answers when it is asked for its pools and its queue: 100 kB.
DOCUMENT = Path(__file__).with_name("document.json").read_text(encoding="utf-8")
#: How often the document is read: but for the first time it is warm in the caches.
READINGS = 100
TASKS = ("coding", "search", "judging")
#: Median seconds with one core, by whether more cores help: a test suite, a shell command.
MEDIAN_S = {True: 80.0, False: 0.5}
SIGMA = 0.6
#: What a trajectory holds of its node.
MEMORY_BYTES = 2**26
#: How a short action ends.
DONE = Outcome(state=State.SUCCEEDED, execution_s=0.5)


def reading_s() -> float:
    """Return the seconds of a reading of the document, the middle of several."""
    found = []
    for _ in range(READINGS):
        begin = time.thread_time()
        json.loads(DOCUMENT)
        found.append(time.thread_time() - begin)
    return median(found)


def step_s(core: Core, events: list[Event], now_s: float) -> tuple[float, list[Command]]:
    """Return what one step takes, and what it tells."""
    begin = time.thread_time()
    commands = core.step(events, now_s)
    return time.thread_time() - begin, commands


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

    def turn_over(self, times: int) -> list[float]:
        """Let the next action end and another come in its place, so many times; return the seconds of these steps.

        What the core wants to be woken for comes between.
        """
        found: list[float] = []
        while len(found) < times:
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
            took_s, commands = step_s(self._core, events, end_s)
            found.append(took_s)
            self._do(commands)
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


def burst_s(nodes: int, cores: int, submissions: int, seed: int) -> float:
    """Return the seconds of one step over the first actions of so many new trajectories, on an empty core."""
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
    took_s, _ = step_s(core, events, 0.0)
    core.check()
    return took_s


class FullCluster:
    """A core of which every core is used, 16 a node, and for which ``queued`` short actions wait.

    One in ``lone`` has no trajectory, so that any node may serve it: all with 1, none with 0.
    """

    def __init__(self, nodes: int, queued: int, lone: int) -> None:
        self._spec = cluster(policy="adaptive", nodes=nodes, cores=16 * nodes)
        scheduler = replace(self._spec.scheduler, trajectories_max=10**9)
        self._core = build_core(replace(self._spec, scheduler=scheduler))
        self._queued, self._lone = queued, lone
        self._made = 0
        self._waiting: dict[str, None] = {}
        self._running: dict[str, None] = {}
        self._fill()

    def time(self, times: int, rare: int) -> dict[str, list[float]]:
        """Return the seconds of steps by what happened in them, ``rare`` of each that changes the nodes."""
        found: dict[str, list[float]] = {}
        for round_ in range(times):
            found.setdefault("end", []).append(self._step(Finished(action_id=next(iter(self._running)), outcome=DONE)))
            found.setdefault("submission", []).append(self._step(self._submission()))
            found.setdefault("cancel", []).append(self._step(CancelRequested(action_id=next(reversed(self._waiting)))))
            if round_ < rare:
                node = self._spec.nodes[round_ % len(self._spec.nodes)]
                found.setdefault("node leaves", []).append(self._step(NodeLost(node=node.name)))
                found.setdefault("node joins", []).append(self._step(NodeJoined(node=node)))
            self._fill()
        self._core.check()
        return found

    def _fill(self) -> None:
        """Submit until every core is used and as many wait as are to."""
        while (missing := len(self._spec.nodes) * 16 + self._queued - len(self._running) - len(self._waiting)) > 0:
            self._step(*[self._submission() for _ in range(min(missing, 1000))])

    def _submission(self) -> Submitted:
        self._made += 1
        return _shell(f"a{self._made}", 0.001 * self._made, alone=self._lone > 0 and self._made % self._lone == 0)

    def _step(self, *events: Event) -> float:
        self._waiting.update((event.action.id, None) for event in events if isinstance(event, Submitted))
        took_s, commands = step_s(self._core, list(events), 0.001 * self._made)
        for command in commands:
            if isinstance(command, Execute):
                del self._waiting[command.action.id]
                self._running[command.action.id] = None
            elif isinstance(command, Settle):
                self._waiting.pop(command.settlement.action.id, None)
                self._running.pop(command.settlement.action.id, None)
        return took_s


def _shell(name: str, now_s: float, *, alone: bool = False) -> Submitted:
    """Return a short action on one core, the first of a trajectory of its own, or ``alone`` without one."""
    return Submitted(
        action=Action(
            id=name,
            function="shell",
            trajectory=None if alone else name,
            memory_bytes=MEMORY_BYTES,
            trajectory_ttl_s=1e9,
            cost={"cpu": UnitSet.fixed(1)},
            t_ori_s=0.5,
            submitted_s=now_s,
        )
    )
