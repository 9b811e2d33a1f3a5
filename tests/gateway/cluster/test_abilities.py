"""Abilities: a function holds when one machine can run it, and each machine is known by what it said last."""

from __future__ import annotations

import pytest

from gateway.cluster.cluster import Abilities
from manager.errors import CapacityExceeded, Unsupported
from manager.function import FunctionSpec

F, G = FunctionSpec(name="f", runtime="exec"), FunctionSpec(name="g", runtime="exec")


class Workshop:
    """A machine that can run some functions."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    async def prepare(self, function: FunctionSpec) -> None:
        if function.name not in self.names:
            raise Unsupported(f"no {function.name} here")


async def test_a_function_holds_when_one_machine_can_run_it_and_the_others_are_told_apart() -> None:
    changed: list[str] = []
    abilities = Abilities(changed.append)
    abilities.join("a", Workshop("f").prepare)
    abilities.join("b", Workshop("f", "g").prepare)
    await abilities.prepare(F)
    await abilities.prepare(G)
    assert (set(abilities.able("a")), set(abilities.able("b"))) == ({"f"}, {"f", "g"})
    assert abilities.unable("a") == {"g": "no g here"}
    assert changed == ["a", "b", "b"]


async def test_a_function_that_no_machine_can_run_is_refused_as_the_first_one_says() -> None:
    abilities = Abilities(lambda machine: None)
    with pytest.raises(CapacityExceeded, match="no node has joined"):
        await abilities.prepare(F)
    abilities.join("a", Workshop().prepare)
    with pytest.raises(Unsupported, match="no f here"):
        await abilities.prepare(F)


async def test_what_a_machine_has_said_is_known_without_asking_any() -> None:
    abilities = Abilities(lambda machine: None)
    for name, knows in (("a", Workshop()), ("b", Workshop("f"))):
        abilities.join(name, knows.prepare)
        await abilities.prepare_all(name, (F, G))
    abilities.require_on("b", F)
    with pytest.raises(Unsupported, match="no f here"):
        abilities.require_on("a", F)
    with pytest.raises(CapacityExceeded, match="has not said yet"):
        abilities.require_on("c", F)


async def test_a_fault_while_one_function_is_prepared_costs_that_function_alone() -> None:
    class Broken(Workshop):
        async def prepare(self, function: FunctionSpec) -> None:
            if function is G:
                raise TypeError("Encoding objects of type PosixPath is unsupported")
            await super().prepare(function)

    abilities = Abilities(lambda machine: None)
    abilities.join("a", Broken("f").prepare)
    await abilities.prepare_all("a", (F, G))
    assert (set(abilities.able("a")), set(abilities.unable("a"))) == ({"f"}, {"g"})


async def test_a_machine_that_learns_is_believed_and_one_that_forgets_too() -> None:
    changed: list[str] = []
    abilities = Abilities(changed.append)
    workshop = Workshop("f")
    abilities.join("a", workshop.prepare)
    await abilities.prepare_all("a", (F, G))
    workshop.names = {"g"}
    await abilities.prepare_all("a", (F, G))
    assert (set(abilities.able("a")), dict(abilities.unable("a"))) == ({"g"}, {"f": "no f here"})
    abilities.forget("a")
    assert abilities.able("a") == frozenset()


async def test_what_a_machine_says_after_it_has_gone_counts_for_nothing() -> None:
    abilities = Abilities(lambda machine: None)

    async def goes_meanwhile(function: FunctionSpec) -> None:
        abilities.leave("a")

    abilities.join("a", goes_meanwhile)
    await abilities.prepare_on("a", F)
    assert abilities.able("a") == frozenset()
