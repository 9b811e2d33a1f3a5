"""The scheduling pass: what changed, who competes for it, the candidates, and each pool's turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from manager.action import Action
from manager.core.candidates import Candidate, CandidateSelection, Selector
from manager.core.dispatcher import Dispatcher
from manager.core.pool_dispatch import PoolDispatch
from manager.core.queue import QueueGroup
from manager.core.state import SchedulerState
from manager.resources.pool import Headroom, Pool

#: Rounds of one pass: units that a policy frees by resizing, or gives to somebody wider, are offered again this often.
_ROUNDS = 4


class SchedulingPass:
    """Runs the passes."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._starter = Dispatcher(state)

    @property
    def starter(self) -> Dispatcher:
        return self._starter

    def run(self) -> None:
        """Start what can start and resize what the policies want, until nothing changes (bounded)."""
        self._count_arrivals()
        self._pass_over_hopeless()
        for pool, wake_s in list(self._state.wakes.items()):
            if wake_s <= self._state.now_s:
                del self._state.wakes[pool]
                self._state.dirty.add(pool)
        for _ in range(_ROUNDS):
            if not self._state.dirty and not self._state.dirty_groups:
                break
            self._round()

    def _count_arrivals(self) -> None:
        """Each action that was offered since the last pass counts once for each kind that it needs."""
        state = self._state
        for group in state.dirty_groups:
            arrived, group.arrived = group.arrived, 0
            names = state.pools_of(group) if arrived else ()
            for name in names:
                state.executing.load(name).arrivals.add(state.now_s, arrived * len(group.demand) / len(names))

    def _pass_over_hopeless(self) -> None:
        """Look at no group for its arrivals alone where nothing that could serve it has or can make a free unit.

        It is looked at when one of its pools has changed. Under load this spares most submissions their pass.
        """
        state = self._state
        if not state.spec.strict:
            state.dirty_groups = {group for group in state.dirty_groups if group.live and self._hopeful(group)}

    def _hopeful(self, group: QueueGroup) -> bool:
        state = self._state
        names = state.pools_of(group)
        for name in names:
            if state.resources[name].free > 0 or state.executing.malleable(name):
                return True
        return not names

    def _round(self) -> None:
        state = self._state
        pools, groups = self._closure()
        rooms = self._cap_rooms()
        state.dirty.clear()
        state.dirty_groups.clear()
        selection = self.select(groups)
        by_pool: dict[str, list[Candidate]] = {}
        for candidate in selection.candidates:
            by_pool.setdefault(candidate.pool, []).append(candidate)
        for candidate in by_pool.pop("", []):
            self._starter.start(candidate.entry, candidate.option.node, ())
        for pool in list(state.resources):
            if pool.name in pools:
                PoolDispatch(state, self._starter, pool, by_pool.get(pool.name, []), selection).take()
        self._release_capped(rooms)

    def _release_capped(self, rooms: Mapping[tuple[str, str], int]) -> None:
        """An action that its task's cap has just come to block reserves nothing more: others are looked at again."""
        now = self._cap_rooms()
        if rooms == now:
            return
        for group in self._state.queue.groups():
            for kind, units in group.signature.demand:
                key = (group.signature.task, kind)
                if key in now and now[key] < units <= rooms[key]:
                    self._state.dirty_groups.add(group)

    def select(self, groups: Iterable[QueueGroup]) -> CandidateSelection:
        """What could start now of these groups, by reservation."""
        state = self._state
        selector = Selector(
            state.resources,
            state.nodes,
            self._caps(),
            memory_waits_from=state.memory_waits_from,
            strict=state.spec.strict,
        )
        return selector.walk(groups)

    def eligible(self, pool: Pool, most: int) -> list[Action]:
        """Waiting actions whose units this pool's policy chooses, and that nothing else keeps, in order of service."""
        groups = [group for group in self._state.queue.groups() if pool.name in self._state.pools_of(group)]
        if not groups:
            return []
        selection = self.select(groups)
        items = [
            item
            for group in groups
            if group not in selection.capped and any(one.fits(beside=pool.name) for one in selection.options[group])
            for item in group.first(most)
        ]
        return [entry.action for _, _, entry in sorted(items) if entry.action.chooser == pool.kind][:most]

    def _closure(self) -> tuple[set[str], list[QueueGroup]]:
        """The pools that compete for the same waiting actions as those that changed, and these actions' groups."""
        pools = {name for name in self._state.dirty if self._state.resources.get(name) is not None}
        left = [
            (group, self._state.pools_of(group))
            for group in self._state.queue.groups()
            if group.signature.child or not self._state.paused
        ]
        chosen: list[QueueGroup] = []
        grown = True
        while grown:
            grown = False
            rest = []
            for group, names in left:
                if self._state.spec.strict or group in self._state.dirty_groups or not pools.isdisjoint(names):
                    chosen.append(group)
                    grown = grown or not pools.issuperset(names)
                    pools.update(names)
                else:
                    rest.append((group, names))
            left = rest
        return pools, chosen

    def _caps(self) -> dict[tuple[str, str], Headroom]:
        """What is left of each task's caps, to be shared by one walk."""
        return {key: Headroom(room) for key, room in self._cap_rooms().items()}

    def _cap_rooms(self) -> dict[tuple[str, str], int]:
        """Units that each task's caps leave, by task and kind."""
        return {
            (task, kind): max(0, cap - self._state.executing.held_by(task, kind))
            for task, spec in self._state.tasks.items()
            for kind, cap in spec.caps.items()
        }
