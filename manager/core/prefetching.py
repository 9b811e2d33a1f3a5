"""Prefetching: services are brought in ahead of their use, on idle places and beside what computes.

A replica is a copy of a service in use in free memory of an idle place: nothing goes for it, and it goes first. A look
ahead brings in what each busy place will serve next: the policy itself says what comes, asked about the very places
and the very queue as they will be when the action that ends first has ended, and so on for the next few. A service
that it would start cold, on a part of what a running action holds, is brought in there while that action computes, if
what is in use leaves it room. A running action is accompanied once; what failed is not tried again before an action
has restored it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from manager.action import Action
from manager.batch import expected_s, mates_of
from manager.core.scheduling_pass import SchedulingPass
from manager.core.state import SchedulerState
from manager.events import Prefetch, PrefetchEnded
from manager.resources.chunk import Chunk
from manager.resources.forecast import Forecast
from manager.resources.pool import Ahead, Pool
from manager.scheduler.policy import PoolView, RunningView, WaitingView

#: Ends that a look ahead plays forward, and the waiting actions that it shows the policy.
ENDS_MAX = 8
WINDOW = 16


class Prefetching:
    """Looks ahead after each pass, over pools that have places."""

    def __init__(self, state: SchedulerState, scheduling: SchedulingPass) -> None:
        self._state = state
        self._scheduling = scheduling
        self._count = 0
        #: Pool, node, service and chunk (in the pool's indices) of what is under way, by number.
        self._under_way: dict[int, tuple[str, str, str, Chunk]] = {}
        #: What the last look ahead of a pool was about: the same again would find the same.
        self._looked: dict[str, object] = {}

    def run(self) -> None:
        """Ask for what is worth having on idle places and beside what computes now."""
        state = self._state
        if state.spec.strict or state.paused:
            return
        for pool in state.resources:
            if not pool.has_places:
                continue
            if state.spec.prefetch and state.executing.holders(pool.name):
                self._look_ahead(pool)
            if state.spec.replicate:
                for chunk, ahead in pool.replicate(state.now_s):
                    self._bring_in(pool, chunk, ahead)

    def end(self, event: PrefetchEnded) -> None:
        """One has arrived or failed; stale answers are ignored."""
        found = self._under_way.pop(event.number, None)
        if found is not None:
            name, _, service, chunk = found
            self._state.resources[name].prefetched(service, chunk, event.done)
            self._looked.pop(name, None)

    def lose(self, node: str) -> None:
        """What was on its way to a node that is lost will not arrive."""
        self._under_way = {number: what for number, what in self._under_way.items() if what[1] != node}

    def _look_ahead(self, pool: Pool) -> None:
        waiting = self._scheduling.eligible(pool, WINDOW)
        about = (frozenset(self._state.executing.holders(pool.name)), [action.id for action in waiting])
        forecast = pool.forecast(self._state.now_s)
        if forecast is None or not waiting or self._looked.get(pool.name) == about:
            return
        self._looked[pool.name] = about
        spared = frozenset(action.service for action in waiting if action.service)

        def ask(action: Action, chunk: Chunk, sure: bool) -> None:
            self._ask(pool, action, chunk, lambda service: not sure or service in spared)

        _Look(self._state, pool, forecast, waiting, ask).run()

    def _ask(self, pool: Pool, action: Action, chunk: Chunk, spared: Callable[[str], bool]) -> None:
        """Have a waiting action's service brought in, where the pool can take it.

        Nothing that is waited for goes for it: should the policy choose otherwise after all, that would cost twice.
        """
        assert action.service is not None
        ahead = pool.prefetch(action.service, chunk, spared)
        if ahead is not None:
            self._bring_in(pool, chunk, ahead)

    def _bring_in(self, pool: Pool, chunk: Chunk, ahead: Ahead) -> None:
        """``chunk`` in the pool's indices."""
        self._count += 1
        self._under_way[self._count] = (pool.name, ahead.node, ahead.service, chunk)
        command = Prefetch(
            number=self._count, service=ahead.service, node=ahead.node, chunk=ahead.chunk, evict=ahead.evict
        )
        self._state.commands.append(command)


class _Look:
    """One look ahead: ends in the order that is expected, and after each what the policy would start."""

    def __init__(
        self,
        state: SchedulerState,
        pool: Pool,
        forecast: Forecast,
        waiting: Sequence[Action],
        ask: Callable[[Action, Chunk, bool], None],
    ) -> None:
        self._state = state
        self._pool = pool
        self._forecast = forecast
        self._waiting = list(waiting)
        self._ask = ask
        self._behind = sum(group.live for group in state.queue.groups() if pool.name in state.pools_of(group))
        #: Devices that become free at an instant that is known.
        self._known: set[int] = set()
        #: Places that have their next action: what follows it is too far ahead.
        self._taken: set[int] = set()
        self._passed_s = 0.0
        self._running = sorted(state.executing.view(pool, state.now_s), key=_expected_end)

    def run(self) -> None:
        for _ in range(min(ENDS_MAX, len(self._running))):
            ended = self._running.pop(0)
            assert ended.chunk is not None, f"{self._pool.name} has places, {ended} has none"
            if ended.ends_in_s:
                self._known.update(range(ended.chunk[0], sum(ended.chunk)))
            self._pass(ended.ends_in_s or 0.0)
            self._forecast.end(ended.chunk)
            for start in self._state.policy(self._pool.kind).decide(self._view()).starts:
                if not self._start(start.action_id, start.units, start.chunk):
                    return
            if not self._waiting:
                return
            self._running.sort(key=_expected_end)

    def _pass(self, seconds: float) -> None:
        """Let time pass until an end."""
        self._passed_s += seconds
        self._running = [
            one if one.ends_in_s is None else replace(one, ends_in_s=max(0.0, one.ends_in_s - seconds))
            for one in self._running
        ]

    def _start(self, action_id: str, units: int, wish: Chunk | None) -> bool:
        """Play a start forward; where it is a cold one beside what computes now, ask for its service."""
        action = next((action for action in self._waiting if action.id == action_id), None)
        if action is None:
            return True  # it has joined the batch of an earlier start
        placed = self._forecast.start(action.service or "", units, wish)
        if placed is None:
            return False
        chunk, restore_s = placed
        mates = self._mates(action)
        self._waiting = [one for one in self._waiting if one is not action and one not in mates]
        self._behind -= 1 + len(mates)
        devices = range(chunk[0], sum(chunk))
        if restore_s > 0 and self._taken.isdisjoint(devices):
            self._ask(action, chunk, self._known.issuperset(devices))
        self._taken.update(devices)
        duration_s = expected_s([one.duration_s(units) for one in (action, *mates)], action.batch_marginal)
        self._running.append(
            RunningView(
                action=action,
                units=chunk[1],
                ends_in_s=None if duration_s is None else duration_s + restore_s,
                started_s=self._state.now_s + self._passed_s,
                chunk=chunk,
            )
        )
        return True

    def _mates(self, action: Action) -> list[Action]:
        """Those that would join its batch."""
        service = self._state.queue.services.get(action.service or "")
        if service is None or not service.batch_tokens or not action.batch_tokens:
            return []
        alike = (one for one in self._waiting if one.service == action.service and one.batch_tokens)
        return mates_of(action, alike, service.batch_tokens)

    def _view(self) -> PoolView:
        pool, state, free = self._pool, self._state, self._forecast.free
        load = state.executing.load(pool.name)
        minima = [action.cost[pool.kind].minimum for action in self._waiting]
        candidates = []
        for action in self._waiting[: self._forecast.fitting(minima)]:
            limit = action.cost[pool.kind].at_most(free)
            assert limit is not None
            candidates.append(WaitingView(action=action, limit=limit))
        return PoolView(
            name=pool.name,
            now_s=state.now_s + self._passed_s,
            total=pool.total,
            free=free,
            running=self._running,
            candidates=candidates,
            queued=self._waiting,
            backlog=self._behind,
            eligible=self._waiting,
            arrival_rate=load.arrivals.at(state.now_s),
            utilisation=load.utilisation(state.now_s),
            chunks=self._forecast.view(),
            worker_cost_s=state.option(pool.kind, "worker_cost_s", 0.0),
        )


def _expected_end(one: RunningView) -> tuple[bool, float, float]:
    """Soonest first; those of which nothing is known last, in the order of their starts."""
    return one.ends_in_s is None, one.ends_in_s or 0.0, one.started_s
