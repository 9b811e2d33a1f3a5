"""Declared resources: their names, what they need of each other, and a cost with those needs added."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from gateway.config.declared import Resource
from gateway.config.document import MACHINE_KINDS, suggestion
from gateway.config.yaml import KeyPath
from manager.action import UnitSet


def costed_kinds(declared: Collection[str]) -> set[str]:
    """Every resource that a cost may name."""
    return {*MACHINE_KINDS, *declared}


def resource_problems(
    resources: Mapping[str, Resource], declared: Collection[str]
) -> Iterator[tuple[str, KeyPath, str]]:
    """(resource, key path in it, what is wrong): reserved names, unknown needs, and cycles, each cycle once."""
    for name in declared:
        if name in (*MACHINE_KINDS, "memory"):
            yield name, (), f"{name!r} is the machine's own: it is discovered, and bounded in the node section"
    for name, resource in resources.items():
        for at, needed in enumerate(resource.needs):
            if needed not in declared:
                yield name, ("needs", at), f"{needed!r} is no declared resource{suggestion(needed, declared)}"
    seen: set[str] = set()
    for name in resources:
        cycle = _cycle(name, resources)
        if cycle and not seen.intersection(cycle):
            seen.update(cycle)
            yield name, ("needs",), f"resources need each other in a cycle: {' -> '.join([*cycle, cycle[0]])}"


def with_needs(cost: Mapping[str, UnitSet], resources: Mapping[str, Resource]) -> dict[str, UnitSet]:
    """The cost with a unit of every needed resource for each unit of what needs it; an amount given explicitly stays.

    A needed resource takes the largest count where the given one is elastic.
    """
    implied: dict[str, int] = {}
    for kind, units in cost.items():
        for needed in _closure(kind, resources):
            implied[needed] = implied.get(needed, 0) + units.maximum
    return {**{kind: UnitSet.fixed(units) for kind, units in implied.items() if kind not in cost}, **cost}


def _closure(kind: str, resources: Mapping[str, Resource]) -> list[str]:
    """What a unit of ``kind`` needs, directly and through others, each once."""
    found: dict[str, None] = {}
    open_kinds = [kind]
    while open_kinds:
        resource = resources.get(open_kinds.pop())
        for needed in () if resource is None else resource.needs:
            if needed not in found and needed != kind:
                found[needed] = None
                open_kinds.append(needed)
    return list(found)


def _cycle(start: str, resources: Mapping[str, Resource]) -> list[str]:
    """A chain of needs from ``start`` back to it, or nothing."""
    chains = [[start]]
    visited: set[str] = set()
    while chains:
        chain = chains.pop()
        resource = resources.get(chain[-1])
        for needed in () if resource is None else resource.needs:
            if needed == start:
                return chain
            if needed not in visited:
                visited.add(needed)
                chains.append([*chain, needed])
    return []
