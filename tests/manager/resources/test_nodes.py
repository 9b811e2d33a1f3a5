"""The choice of a node by an order that is kept, against a look at every node."""

from __future__ import annotations

import random

import pytest

from manager.action import Demand
from manager.config import NodeSpec
from manager.resources.cores import CpuPool
from manager.resources.nodes import Node, Nodes, Resources


def spec(name: str, cores: int, memory_bytes: int) -> NodeSpec:
    return NodeSpec(name=name, numa=(tuple(range(cores)),), memory_bytes=memory_bytes)


def looked_at_all(nodes: Nodes, demand: Demand, memory_bytes: int) -> Node | None:
    able = [node for node in nodes if node.spec.cores >= dict(demand)["cpu"] and node.admits(memory_bytes)]
    return min(
        able,
        key=lambda node: ((node.held_bytes + memory_bytes) / node.bound_bytes, len(node.holders)),
        default=None,
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_node_that_is_chosen_is_the_least_held_that_admits(seed: int) -> None:
    chance = random.Random(seed)
    specs = [spec(f"n{number}", chance.choice((2, 8)), chance.choice((40, 100))) for number in range(6)]
    resources = Resources(CpuPool(one) for one in specs)
    nodes = Nodes(specs, resources, reserve=0.1)
    held: list[tuple[str, str]] = []
    refusals = 0
    for number in range(200):
        demand, memory_bytes = (("cpu", chance.choice((1, 4))),), chance.choice((1, 7, 30))
        chosen = nodes.choose(demand, memory_bytes)
        assert chosen is looked_at_all(nodes, demand, memory_bytes)
        refusals += chosen is None
        if chosen is not None and chance.random() < 0.7:
            trajectory = chance.random() < 0.8
            chosen.hold(f"h{number}", memory_bytes, trajectory=trajectory)
            held.append((chosen.spec.name, f"h{number}"))
        elif held:
            name, holder = held.pop(chance.randrange(len(held)))
            nodes[name].release(holder)
        if number == 100:  # a node goes with what it holds, and comes back empty, as the last one
            held = [each for each in held if each[0] != "n0"]
            nodes.leave("n0")
            resources.leave("n0")
            resources.join(specs[0])
            nodes.join(specs[0])
        nodes.check()
    assert refusals < 200
    assert nodes.choose((("cpu", 9),), 1) is None and not nodes.ever((("cpu", 9),), 1)
