"""Machines of Ray as nodes: which are taken, their actors and daemons, and the driver that speaks with Ray."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.clock import Clock
from runtimes.node.ray.driver import (
    BACKOFF_MAX_S,
    WAITING_AGAIN_S,
    WAITING_S,
    Act,
    RayMembers,
    RayNode,
    Reservation,
)
from runtimes.node.ray.process import RayDriverProcess, RayMessage, RaySettings
from tests.gateway.conftest import until
from tests.virtual_clock import VirtualClock

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


DEADLINE_S = 60.0
#: Says that it is connected, answers pings, and says of each command which line it was.
OBEDIENT = """
import json, os, sys
def tell(**message):
    print(json.dumps(message), flush=True)
given = json.loads(sys.stdin.readline())
tell(kind="connected", pid=os.getpid(), version=given["address"])
for line in sys.stdin:
    command = json.loads(line)
    if command["kind"] == "ping":
        tell(kind="pong", looked_ago_s=0.1, why="")
    else:
        tell(kind="refused", node=command["node"], why=line.strip())
"""
AWAY = OBEDIENT.replace('looked_ago_s=0.1, why=""', 'looked_ago_s=43.0, why="TimeoutError: GCS"')
SILENT = """
import json, os, time
print(json.dumps({"kind": "connected", "pid": os.getpid(), "version": "1"}), flush=True)
time.sleep(600)
"""
REFUSED = """
import json, sys
sys.stderr.write("InvalidAuthToken")
print(json.dumps({"kind": "unreachable", "why": "ConnectionError: token"}), flush=True)
"""
GARBLED = "print('hello', flush=True)\nimport time\ntime.sleep(600)\n"
ENVIRONMENT = """
import json, os, sys
told = json.dumps({"kind": "unreachable", "why": " ".join(sorted(os.environ))})
print(told, flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def running(
    program: str, directory: Path, clock: Clock | None = None
) -> AsyncIterator[tuple[RayDriverProcess, list[RayMessage]]]:
    """A driver of this program, and what it has said."""
    driver, said = directory / "driver.py", list[RayMessage]()
    driver.write_text(program)
    settings = RaySettings(address="head:6379", ping_s=0.05, silent_s=60.0)
    process = RayDriverProcess(settings, said.append, driver=driver, clock=clock)
    task = asyncio.create_task(process.run())
    try:
        yield process, said
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pids(said: list[RayMessage]) -> list[int]:
    """Of each driver that has connected."""
    return [message.pid for message in said if message.kind == "connected"]


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


async def test_a_driver_is_configured_and_told_what_to_do(tmp_path: Path) -> None:
    async with running(OBEDIENT, tmp_path) as (process, said):
        await until(lambda: bool(said))
        assert said[0].kind == "connected" and said[0].version == "head:6379"
        process.start_daemon("n1", ["tangram"], {"A": "b"}, "/s")
        process.release("n1")
        await until(lambda: len(said) == 3)
        commands = [msgspec.json.decode(message.why) for message in said if message.kind == "refused"]
        assert [command["kind"] for command in commands] == ["start", "release"]
        assert commands[0]["environment"] == {"A": "b"} and commands[0]["state_dir"] == "/s"
        await until(lambda: process.warning() is None)


async def test_a_driver_that_speaks_nonsense_is_ended_and_said_so(tmp_path: Path) -> None:
    async with running(GARBLED, tmp_path) as (process, _):
        await until(lambda: process.starts == 2)
        assert "nobody understands" in str(process.warning())


async def test_a_cluster_that_does_not_answer_is_a_warning_with_its_age(tmp_path: Path) -> None:
    async with running(AWAY, tmp_path) as (process, _):
        await until(lambda: "TimeoutError: GCS" in str(process.warning()))
        assert "unreachable for 4" in str(process.warning())


async def test_a_refusal_is_told_in_rays_words(tmp_path: Path) -> None:
    async with running(REFUSED, tmp_path) as (process, said):
        await until(lambda: bool(said))
        assert said[0] == RayMessage(kind="unreachable", why="ConnectionError: token")
        assert "ConnectionError: token" in str(process.warning())


async def test_an_interpreter_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    process = RayDriverProcess(RaySettings(python="/nowhere/python"), lambda _: None)
    task = asyncio.create_task(process.run())
    await until(lambda: "cannot be started" in str(process.warning()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_gateways_own_variables_stay_with_it_and_rays_go_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the cluster")
    async with running(ENVIRONMENT, tmp_path) as (_, said):
        await until(lambda: bool(said))
        assert said[0].kind == "unreachable"
        names = said[0].why.split()
        assert "RAY_AUTH_TOKEN" in names and "TANGRAM_TOKEN" not in names


def test_a_reservation_that_waits_says_what_was_asked_and_what_is_free() -> None:
    waiting = RayMessage(kind="waiting", node="abcdef0123456789", cpus=64.0, gpus=0.0, waited_s=30.0, free={"CPU": 2.0})
    assert waiting.reservation() == "Ray node abcdef012345 waits for its reservation since 30 s: 64 CPUs asked, 2 free"
    waiting = RayMessage(kind="waiting", node="n", cpus=0.0, gpus=2.0, waited_s=31.0, free={"CPU": 2.0})
    assert waiting.reservation().endswith("2 GPUs asked, none free")
    waiting = RayMessage(kind="waiting", node="n", cpus=1.0, gpus=0.0, waited_s=31.0, free={})
    assert waiting.reservation().endswith("1 CPUs asked")


@pytest.mark.parametrize("program", [OBEDIENT, SILENT], ids=["killed", "silent"])
async def test_a_driver_that_dies_or_is_silent_is_started_again_and_ends_with_its_gateway(
    tmp_path: Path, program: str
) -> None:
    clock = VirtualClock()
    async with running(program, tmp_path, clock) as (process, said):
        process.release("n1")  # without a driver it is dropped
        await until(lambda: bool(said))
        if program == OBEDIENT:
            os.kill(pids(said)[0], signal.SIGKILL)
        else:
            clock.advance_to(61.0)
        await until(lambda: len(pids(said)) == 2)
        assert process.starts == 2 and len(set(pids(said))) == 2
    assert not any(map(alive, pids(said)))
