"""What the driver decides, from what Ray says: no Ray, no clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from runtimes.node.ray.driver import (
    BACKOFF_MAX_S,
    WAITING_AGAIN_S,
    WAITING_S,
    Act,
    RayMembers,
    RayNode,
    Reservation,
)

HEAD = RayNode(id="head", alive=True, resources={"CPU": 8.0, "node:__internal_head__": 1.0})
ALL = Reservation(cpus=None, gpus=None)


def machine(id: str, alive: bool = True, **labels: str) -> RayNode:
    return RayNode(id=id, alive=alive, address=f"10.0.0.{id[-1]}", labels=labels, resources={"CPU": 64.0, "GPU": 8.0})


def members(wanted: dict[str, str] | None = None, *, head: bool = False, reservation: Reservation = ALL) -> RayMembers:
    return RayMembers(wanted or {}, head=head, reservation=reservation)


def told(acts: Iterable[Act]) -> list[str]:
    """Kinds of the messages, and of what else is to be done."""
    return [str(act.message.get("kind", act.kind)) for act in acts]


def test_labels_choose_machines_and_a_star_takes_any_value() -> None:
    nodes = [machine("n1", pool="a"), machine("n2", pool="b"), machine("n3")]
    for wanted, chosen in (({"pool": "a"}, {"n1"}), ({"pool": "*"}, {"n1", "n2"}), ({}, {"n1", "n2", "n3"})):
        driver = members(wanted)
        driver.look(nodes, {}, 0.0)
        assert set(driver.known) == chosen
    driver = members({"pool": "*", "zone": "x"})
    assert driver.look(nodes, {}, 0.0) == []
    assert members().look([HEAD], {}, 0.0) == [], "the head is left alone unless it is asked for"
    assert told(members(head=True).look([HEAD], {}, 0.0)) == ["alive", "make"]


def test_no_more_machines_are_taken_than_are_asked_for_and_the_next_takes_the_place_of_one_that_goes() -> None:
    driver = RayMembers({}, head=False, reservation=ALL, most=2)
    nodes = [machine("n1"), machine("n2"), machine("n3")]
    driver.look(nodes, {}, 0.0)
    assert set(driver.known) == {"n1", "n2"}
    driver.look([machine("n1", alive=False), *nodes[1:]], {}, 1.0)
    assert set(driver.known) == {"n2", "n3"}


def test_what_is_reserved_is_a_number_or_all_of_the_machine() -> None:
    driver = members(reservation=Reservation(cpus=None, gpus=2.0))
    driver.look([machine("n1")], {}, 0.0)
    assert driver.reservation("n1") == (64.0, 2.0)
    assert Reservation(cpus=0.0, gpus=None).on(RayNode(id="n", alive=True)) == (0.0, 0.0)


def test_a_reservation_that_waits_is_told_after_half_a_minute_and_again_later() -> None:
    driver = members(reservation=Reservation(cpus=None, gpus=4.0))
    driver.look([machine("n1")], {}, 100.0)
    assert driver.look([machine("n1")], {}, 100.0 + WAITING_S - 1) == []
    (act,) = driver.look([machine("n1")], {}, 100.0 + WAITING_S)
    assert act.message == {"kind": "waiting", "node": "n1", "cpus": 64.0, "gpus": 4.0, "waited_s": 30}
    assert driver.look([machine("n1")], {}, 100.0 + WAITING_S + WAITING_AGAIN_S - 1) == []
    assert told(driver.look([machine("n1")], {}, 100.0 + WAITING_S + WAITING_AGAIN_S)) == ["waiting"]
    driver.answered("n1", {})
    assert driver.look([machine("n1")], {}, 10_000.0) == []


def test_a_actor_that_died_is_made_again_later_each_time() -> None:
    driver, now_s, waits = members(), 0.0, []
    driver.look([machine("n1")], {}, now_s)
    for _ in range(8):
        forget, failed = driver.failed("n1", "ActorDiedError", now_s)
        assert (forget.kind, failed.message["kind"]) == ("forget", "actor_failed")
        wait_s = float(str(failed.message["again_in_s"]))
        assert driver.look([machine("n1")], {}, now_s + wait_s - 0.5) == []
        now_s += wait_s
        assert told(driver.look([machine("n1")], {}, now_s)) == ["make"]
        waits.append(wait_s)
    assert waits == sorted(waits) and waits[0] < waits[2] and waits[-1] == BACKOFF_MAX_S
    driver.answered("n1", {})
    assert driver.failed("n1", "again", now_s)[1].message["again_in_s"] == waits[0], "an actor that came up was well"


def test_a_machine_that_is_dead_is_told_with_rays_reason_and_may_come_back() -> None:
    driver = members()
    driver.look([machine("n1")], {}, 0.0)
    dead = RayNode(id="n1", alive=False, why="received SIGTERM")
    forget, message = driver.look([dead], {}, 1.0)
    assert forget.kind == "forget" and message.message == {"kind": "dead", "node": "n1", "why": "received SIGTERM"}
    assert driver.look([dead], {}, 2.0) == [], "the dead of a cluster stay on its list"
    assert told(driver.look([machine("n1")], {}, 3.0)) == ["alive", "make"]
    assert told(driver.look([], {}, 4.0)) == ["forget", "dead"], "a head that forgot its machines"
    assert driver.answered("n1", {}) == [] and driver.failed("n1", "x", 0.0) == [], "late answers do nothing"


@given(st.integers(0, 2**32))
def test_whatever_happens_a_machine_has_at_most_one_actor_and_every_death_was_alive(seed: int) -> None:
    chance, driver, now_s = random.Random(seed), members({"pool": "*"}), 0.0
    actors: Counter[str] = Counter()
    alive: set[str] = set()
    for _ in range(60):
        now_s += chance.choice((0.1, 1.0, 45.0))
        name = f"n{chance.randrange(3)}"
        match chance.randrange(4):
            case 0 | 1:
                nodes = [
                    machine(f"n{number}", alive=chance.random() < 0.8, pool="a")
                    for number in range(3)
                    if chance.random() < 0.9
                ]
                acts = driver.look(nodes, {name: 1.0} if chance.random() < 0.1 else {}, now_s)
            case 2:
                acts = driver.answered(name, {}) if driver.known.get(name) and actors[name] else []
            case _:
                acts = driver.failed(name, "x", now_s) if actors[name] else []
        for act in acts:
            actors[act.node] += {"make": 1, "forget": -actors[act.node]}.get(act.kind, 0)
            kind = act.message.get("kind")
            assert (kind == "alive") <= (act.node not in alive) and (kind == "dead") <= (act.node in alive)
            alive = alive | {act.node} if kind == "alive" else alive - {act.node} if kind == "dead" else alive
        assert all(count in (0, 1) for count in actors.values())
        assert alive == set(driver.known)
