"""The scheduling pass: what changed, who competes for it, the candidates, and each pool's turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from manager.action import Action
from manager.house import House
from manager.queue import Group
from manager.resources.pool import Headroom, Pool
from manager.selection import Candidate, Selection, Selector
from manager.starting import Starter
from manager.turn import Turn

#: Rounds of one pass: units that a policy frees by resizing, or gives to somebody wider, are offered again this often.
_ROUNDS = 4


class Scheduling:
    """Runs passes over a house."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._starter = Starter(house)

    @property
    def starter(self) -> Starter:
        return self._starter

    def run(self) -> None:
        """Start what can start and resize what the policies want, until nothing changes (bounded)."""
        self._count_arrivals()
        self._pass_over_hopeless()
        for pool, wake_s in list(self._house.wakes.items()):
            if wake_s <= self._house.now_s:
                del self._house.wakes[pool]
                self._house.dirty.add(pool)
        for _ in range(_ROUNDS):
            if not self._house.dirty and not self._house.dirty_groups:
                break
            self._round()

    def _count_arrivals(self) -> None:
        """Each action that was offered since the last pass counts once for each kind that it needs."""
        house = self._house
        for group in house.dirty_groups:
            arrived, group.arrived = group.arrived, 0
            names = house.pools_of(group) if arrived else ()
            for name in names:
                house.executing.load(name).arrivals.add(house.now_s, arrived * len(group.demand) / len(names))

    def _pass_over_hopeless(self) -> None:
        """Look at no group for its arrivals alone where nothing that could serve it has or can make a free unit.

        It is looked at when one of its pools has changed. Under load this spares most submissions their pass.
        """
        house = self._house
        if not house.spec.strict:
            house.dirty_groups = {group for group in house.dirty_groups if group.live and self._hopeful(group)}

    def _hopeful(self, group: Group) -> bool:
        house = self._house
        names = house.pools_of(group)
        for name in names:
            if house.resources[name].free > 0 or house.executing.malleable(name):
                return True
        return not names

    def _round(self) -> None:
        house = self._house
        pools, groups = self._closure()
        rooms = self._cap_rooms()
        house.dirty.clear()
        house.dirty_groups.clear()
        selection = self.select(groups)
        by_pool: dict[str, list[Candidate]] = {}
        for candidate in selection.candidates:
            by_pool.setdefault(candidate.pool, []).append(candidate)
        for candidate in by_pool.pop("", []):
            self._starter.start(candidate.entry, candidate.option.node, ())
        for pool in list(house.resources):
            if pool.name in pools:
                Turn(house, self._starter, pool, by_pool.get(pool.name, []), selection).take()
        self._release_capped(rooms)

    def _release_capped(self, rooms: Mapping[tuple[str, str], int]) -> None:
        """An action that its task's cap has just come to block reserves nothing more: others are looked at again."""
        now = self._cap_rooms()
        if rooms == now:
            return
        for group in self._house.queue.groups():
            for kind, units in group.signature.demand:
                key = (group.signature.task, kind)
                if key in now and now[key] < units <= rooms[key]:
                    self._house.dirty_groups.add(group)

    def select(self, groups: Iterable[Group]) -> Selection:
        """What could start now of these groups, by reservation."""
        house = self._house
        selector = Selector(
            house.resources,
            house.nodes,
            self._caps(),
            memory_waits_from=house.memory_waits_from,
            strict=house.spec.strict,
        )
        return selector.walk(groups)

    def eligible(self, pool: Pool, most: int) -> list[Action]:
        """Waiting actions whose units this pool's policy chooses, and that nothing else keeps, in order of service."""
        groups = [group for group in self._house.queue.groups() if pool.name in self._house.pools_of(group)]
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

    def _closure(self) -> tuple[set[str], list[Group]]:
        """The pools that compete for the same waiting actions as those that changed, and these actions' groups."""
        pools = {name for name in self._house.dirty if self._house.resources.get(name) is not None}
        left = [
            (group, self._house.pools_of(group))
            for group in self._house.queue.groups()
            if group.signature.child or not self._house.paused
        ]
        chosen: list[Group] = []
        grown = True
        while grown:
            grown = False
            rest = []
            for group, names in left:
                if self._house.spec.strict or group in self._house.dirty_groups or not pools.isdisjoint(names):
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
            (task, kind): max(0, cap - self._house.executing.held_by(task, kind))
            for task, spec in self._house.tasks.items()
            for kind, cap in spec.caps.items()
        }
