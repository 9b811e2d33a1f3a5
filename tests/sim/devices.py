"""Devices: what they really hold in worlds whose nodes tell it, as they do: before they answer for what they did."""

from __future__ import annotations

import random

from manager.action import Chunk
from manager.config import ManagerSpec
from manager.core.core import Core
from manager.events import Command, Event, Execute, Finished, NodeLost, ReplicaEnded, Replicate, ResidencyReported

#: (service, first device, size), counted on a node.
Copy = tuple[str, int, int]


class Devices:
    """The truth. Runs restore what they need, now and then lose everything, and idle copies go for no good reason."""

    def __init__(self, spec: ManagerSpec, chance: random.Random) -> None:
        self._spec = spec
        self._chance = chance
        self._held: dict[str, set[Copy]] = {node.name: set() for node in spec.nodes}
        #: What runs, by action and try: its node, its copy, and what goes for it.
        self._runs: dict[str, tuple[str, Copy, tuple[str, ...]]] = {}
        self._under_way: dict[int, Replicate] = {}

    def obey(self, commands: list[Command]) -> None:
        """Begin what the core asks for."""
        for command in commands:
            match command:
                case Execute(action=action, lease=lease):
                    grant = lease.grants.get("gpu")
                    leads = not lease.batch or lease.batch[0] == action.id
                    if grant is not None and grant.chunk is not None and action.service is not None and leads:
                        copy = (action.service, *grant.chunk)
                        self._runs[action.id] = lease.node, copy, grant.evict
                case Replicate():
                    self._under_way[command.number] = command
                case _:
                    pass

    def before(self, event: Event) -> ResidencyReported | None:
        """What a node says before ``event``, where it has changed."""
        match event:
            case NodeLost():
                self._lose(event.node)
            case Finished() if event.action_id in self._runs:
                node, copy, evict = self._runs.pop(event.action_id)
                self._end(node, copy, evict)
                return self._report(node)
            case ReplicaEnded() if event.number in self._under_way:
                replica = self._under_way.pop(event.number)
                if event.done:
                    self._held[replica.node].add((replica.service, *replica.chunk))
                return self._report(replica.node)
            case _:
                pass
        return None

    def has_room(self, number: int) -> bool:
        """Return whether what is under way fits beside everything that is there: nothing goes for it."""
        replica = self._under_way.get(number)
        if replica is None:
            return False
        running = {one for node, one, _ in self._runs.values() if node == replica.node}
        return self._fits(replica.node, self._held[replica.node] | running | {(replica.service, *replica.chunk)})

    def check(self, core: Core) -> None:
        """Of devices on which nothing computes or arrives the core believes no more than what is there."""
        (pool,) = core.state.resources.placed
        told, view = pool.describe(), pool.chunk_view(core.state.now_s)
        regions, chunks = told["regions"], told["chunks"]
        assert isinstance(regions, dict) and isinstance(chunks, dict)
        for node, region in regions.items():
            first = region["start"]
            busy = [("", start - first, size) for start, size in chunks.values()]
            busy += [("", *one.chunk) for one in self._under_way.values() if one.node == node]
            for service, places in view.resident.items():
                for start, size in places:
                    copy = (service, start - first, size)
                    mine = first <= start < first + region["devices"]
                    if mine and not any(_meet(copy, other) for other in busy):
                        assert copy in self._held[node], f"{copy} is not on {node}: {sorted(self._held[node])}"

    def _end(self, node: str, copy: Copy, evict: tuple[str, ...]) -> None:
        chance, held = self._chance, self._held[node]
        self._evict(node, (copy[1], copy[2]), evict)
        if chance.random() < 0.1:
            held -= {one for one in held if _meet(one, copy)}  # its process was lost
            return
        held.add(copy)
        idle = sorted(one for one in held if one != copy and not self._in_use(node, one))
        while not self._fits(node, held) or (idle and chance.random() < 0.1):
            held.remove(idle.pop(chance.randrange(len(idle))))

    def _evict(self, node: str, chunk: tuple[int, int], services: tuple[str, ...]) -> None:
        held = self._held[node]
        held -= {one for one in held if one[0] in services and _meet(one, ("", *chunk)) and not self._in_use(node, one)}

    def _in_use(self, node: str, copy: Copy) -> bool:
        return any((where, one) == (node, copy) for where, one, _ in self._runs.values())

    def _fits(self, node: str, copies: set[Copy]) -> bool:
        devices = next(one for one in self._spec.nodes if one.name == node)
        return all(
            sum(self._bytes(one) for one in copies if one[1] <= device < one[1] + one[2]) <= devices.device_bytes
            for device in range(devices.devices)
        )

    def _bytes(self, copy: Copy) -> int:
        return self._spec.services[copy[0]].bytes_by_dop.get(copy[2], 0)

    def _lose(self, node: str) -> None:
        self._held[node] = set()
        self._runs = {key: run for key, run in self._runs.items() if run[0] != node}
        self._under_way = {number: one for number, one in self._under_way.items() if one.node != node}

    def _report(self, node: str) -> ResidencyReported:
        resident: dict[str, tuple[Chunk, ...]] = {}
        for service, *chunk in sorted(self._held[node]):
            resident[service] = (*resident.get(service, ()), Chunk(*chunk))
        return ResidencyReported(node=node, resident=resident)


def _meet(one: Copy, other: Copy) -> bool:
    return one[1] < other[1] + other[2] and other[1] < one[1] + one[2]
