"""The nodes: memory held for the life of a trajectory, and the node it is pinned to (paper, CPU Manager via AOE)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from manager.action import UnitSet
from manager.config import NodeSpec
from manager.resources.pool import Resources

#: Demands of which the able nodes are remembered.
_DEMANDS_MAX = 1024


@dataclass(slots=True)
class Node:
    """One living node and who holds how much of its memory."""

    spec: NodeSpec
    bound_bytes: int
    held_bytes: int = 0
    #: Bytes by holder: a trajectory, or an action without one.
    holders: dict[str, int] = field(default_factory=dict)

    @property
    def free_bytes(self) -> int:
        return self.bound_bytes - self.held_bytes

    def hold(self, holder: str, memory_bytes: int) -> None:
        assert holder not in self.holders, f"{self.spec.name}: {holder} holds memory already"
        assert memory_bytes <= self.free_bytes, f"{self.spec.name}: {memory_bytes} bytes of {self.free_bytes} wanted"
        self.holders[holder] = memory_bytes
        self.held_bytes += memory_bytes

    def release(self, holder: str) -> None:
        self.held_bytes -= self.holders.pop(holder)


class Nodes:
    """All living nodes by name."""

    def __init__(self, specs: Iterable[NodeSpec], resources: Resources) -> None:
        self._nodes = {spec.name: Node(spec, spec.memory_bytes) for spec in specs}
        self._resources = resources
        #: Nodes that could serve a demand, were they empty.
        self._able: dict[tuple[tuple[str, int], ...], list[Node]] = {}

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def join(self, spec: NodeSpec) -> None:
        assert spec.name not in self._nodes, f"node {spec.name} is there already"
        self._nodes[spec.name] = Node(spec, spec.memory_bytes)
        self._able.clear()

    def leave(self, name: str) -> None:
        del self._nodes[name]
        self._able.clear()

    def choose(self, cost: Mapping[str, UnitSet], memory_bytes: int) -> Node | None:
        """The node for a new trajectory: enough cores in all, enough memory now, memory left most balanced.

        Equal memory is broken by the fewest trajectories. None where no node has the memory now.
        """
        best, least, fewest = None, math.inf, 0
        for node in self._hosts(cost):
            held_bytes = node.held_bytes + memory_bytes
            if held_bytes > node.bound_bytes:
                continue
            share = held_bytes / node.bound_bytes if held_bytes else 0.0
            if share < least or (share == least and len(node.holders) < fewest):
                best, least, fewest = node, share, len(node.holders)
        return best

    def ever(self, cost: Mapping[str, UnitSet], memory_bytes: int) -> bool:
        """Whether some living node, empty, could take it."""
        return any(memory_bytes <= node.spec.memory_bytes for node in self._hosts(cost))

    def check(self) -> None:
        for node in self._nodes.values():
            held = sum(node.holders.values())
            assert held == node.held_bytes <= node.spec.memory_bytes, f"{node.spec.name}: {node.holders}"

    def _hosts(self, cost: Mapping[str, UnitSet]) -> list[Node]:
        """The nodes that could serve the minimum of a cost that is bound to nodes, were nothing held."""
        demand = tuple([(kind, units.minimum) for kind, units in cost.items()])
        hosts = self._able.get(demand)
        if hosts is None:
            if len(self._able) >= _DEMANDS_MAX:
                self._able.clear()
            hosts = self._able[demand] = [node for name, node in self._nodes.items() if self._could_serve(name, demand)]
        return hosts

    def _could_serve(self, name: str, demand: Iterable[tuple[str, int]]) -> bool:
        for kind, units in demand:
            pool = self._resources.find(kind, name)
            if pool is None or not pool.admits(units):
                return False
        return True
