"""Machines of a Ray cluster: a ticket for each that holds its reservation, and who is told of what keeps it waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from gateway.cluster.ray import RayNodes
from manager.errors import InvalidInput
from runtimes.node.ray.process import RayDriverProcess, RayMessage, RaySettings
from tangram.types import NodeTicket
from tests.virtual_clock import VirtualClock

TTL_S = 120.0


class ScriptedDriver(RayDriverProcess):
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.started: list[tuple[str, list[str], str]] = []
        self.given_back: list[str] = []
        self.away: str | None = None
        self.on_release: Callable[[str], object] = lambda node: None

    def warning(self) -> str | None:
        return self.away

    def start_daemon(self, node: str, command: list[str], environment: Mapping[str, str], state_dir: str) -> None:
        assert not environment
        self.started.append((node, command, state_dir))

    def release(self, node: str, *, kill: bool = False) -> None:
        self.given_back.append(node)
        asyncio.get_running_loop().call_soon(self.on_release, node)

    async def run(self) -> None:
        await asyncio.Event().wait()


class ScriptedNodes:
    """A cluster whose nodes join when the test says so."""

    def __init__(self) -> None:
        self.issued: list[str] = []
        self.here: set[str] = set()
        self.drained: list[str] = []
        self.said: list[tuple[str, bool]] = []
        self.refuses = False

    def ticket(self, name: str) -> NodeTicket:
        if self.refuses:
            raise InvalidInput("no such name", component="cluster")
        self.issued.append(name)
        number = len(self.issued)
        return NodeTicket(name=name, ticket=f"t{number}", expires_in_s=TTL_S, gateway="gw:1", fingerprint="ab")

    def joined(self, name: str) -> bool:
        return name in self.here

    def drain_for_ray(self, name: str, why: str) -> None:
        self.drained.append(name)

    def note_ray(self, name: str, why: str, final: bool) -> None:
        self.said.append((name, final))


class Scene:
    """Machines of Ray's, a driver and a cluster that a test plays."""

    def __init__(self, **settings: Any) -> None:
        self.driver, self.office, self.clock = ScriptedDriver(), ScriptedNodes(), VirtualClock()
        office = self.office
        self.nodes = RayNodes(
            RaySettings(**settings),
            ticket=office.ticket,
            is_connected=office.joined,
            drain=office.drain_for_ray,
            report=office.note_ray,
            ticket_ttl_s=TTL_S,
            clock=self.clock,
        )

    async def __aenter__(self) -> Scene:
        self.nodes.open(self.driver)
        self.nodes.take(RayMessage(kind="connected", pid=1, version="2"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.nodes.close()

    def alive(self, id: str, address: str = "10.0.0.1", **labels: str) -> None:
        self.nodes.take(RayMessage(kind="alive", node=id, address=address, labels=labels))

    def ready(self, id: str) -> None:
        self.nodes.take(RayMessage(kind="actor", node=id, gpu_ids=(), daemon=0, pid=7))

    def pass_s(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        self.nodes.look()

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(each.node, each.state) for each in self.nodes.status()]


async def test_a_machine_that_holds_its_reservation_joins_by_a_ticket_of_its_own() -> None:
    async with Scene(join=("--cores", "0-3")) as scene:
        scene.alive("a" * 56, pool="x", **{"ray.io/node-id": "aa"})
        assert scene.states == [("ray-10.0.0.1", "found")] and not scene.office.issued
        scene.ready("a" * 56)
        words = "tangram node join --gateway gw:1 --fingerprint ab --name ray-10.0.0.1 --ticket t1"
        words += " --state-dir /var/lib/tangram-node --labels pool=x --cores 0-3"
        assert scene.driver.started == [("a" * 56, words.split(), "/var/lib/tangram-node")]
        assert scene.states == [("ray-10.0.0.1", "starting")]
        scene.office.here.add("ray-10.0.0.1")
        scene.pass_s(1.0)
        assert scene.states == [("ray-10.0.0.1", "serving")] and scene.nodes.warnings() == []
        scene.office.here.clear()  # it is not heard, is given time, and then a ticket
        scene.pass_s(1.0)
        assert scene.states == [("ray-10.0.0.1", "starting")] and len(scene.driver.started) == 1
        scene.pass_s(TTL_S)
        assert len(scene.driver.started) == 2


async def test_what_keeps_a_machine_from_joining_is_told() -> None:
    async with Scene(name="{id}") as scene:
        for id in ("waits", "dies", "mute", "refused"):
            scene.alive(id)
        scene.nodes.take(RayMessage(kind="waiting", node="waits", cpus=4.0, gpus=0.0, waited_s=30.0, free={"CPU": 1.0}))
        scene.nodes.take(RayMessage(kind="actor_failed", node="dies", why="ActorDiedError"))
        scene.ready("mute")
        scene.nodes.take(RayMessage(kind="started", node="mute"))
        scene.ready("refused")
        scene.nodes.take(RayMessage(kind="refused", node="refused", why="no actor is ready"))
        scene.driver.away = "ray: unreachable for 3 s: gone"
        told = "\n".join(scene.nodes.warnings())
        assert dict(scene.states) == {"waits": "waiting", "dies": "failed", "mute": "failed", "refused": "failed"}
        for words in ("unreachable for 3 s", "4 CPUs asked, 1 free", "ActorDiedError", "daemon.log", "no actor"):
            assert words in told
        scene.ready("dies")
        assert dict(scene.states)["dies"] == "starting"


async def test_a_ticket_that_cannot_be_had_is_asked_for_again() -> None:
    async with Scene() as scene:
        scene.office.refuses = True
        scene.alive("m")
        scene.ready("m")
        assert scene.states == [("ray-10.0.0.1", "failed")] and not scene.driver.started
        scene.office.refuses = False
        scene.pass_s(TTL_S)
        assert scene.states == [("ray-10.0.0.1", "starting")] and len(scene.driver.started) == 1


async def test_two_machines_of_one_name_are_told_apart_or_told_of() -> None:
    async with Scene() as scene:
        for id in ("old", "new"):
            scene.alive(id)
            scene.ready(id)
        assert [state for _, state in scene.states] == ["failed", "starting"]
        assert "ray-{id}" in scene.nodes.warnings()[0]
        scene.nodes.take(RayMessage(kind="dead", node="old", why="received SIGTERM"))
        assert scene.office.said[-1] == ("ray-10.0.0.1", False), "its machine is there, as another node of Ray's"
        scene.pass_s(1.0)
        assert scene.states == [("ray-10.0.0.1", "starting")]
        assert [id for id, _, _ in scene.driver.started] == ["old", "new"]
    async with Scene(name="r-{id}", state_dir="/s/{name}") as scene:
        for id in ("old", "new"):
            scene.alive(id, "fd00::1")
            scene.ready(id)
        assert [place for _, _, place in scene.driver.started] == ["/s/r-old", "/s/r-new"]


async def test_rays_word_is_passed_on_and_ended_machines_are_told_as_such() -> None:
    async with Scene() as scene:
        scene.alive("m")
        scene.nodes.take(RayMessage(kind="draining", node="m"))
        assert scene.office.drained == ["ray-10.0.0.1"]
        scene.ready("m")
        scene.pass_s(10 * TTL_S)
        assert scene.states == [("ray-10.0.0.1", "draining")] and not scene.driver.started
        scene.nodes.take(RayMessage(kind="dead", node="m", why="Expected termination: received SIGTERM"))
        scene.alive("n")
        scene.nodes.take(RayMessage(kind="dead", node="n", why="health check failed"))
        name = "ray-10.0.0.1"
        assert scene.office.said == [(name, False), (name, True), (name, False), (name, False)]
        assert scene.states == []


async def test_a_drained_node_stays_given_back_whatever_becomes_of_its_actor() -> None:
    async with Scene() as scene:
        scene.alive("m")
        scene.ready("m")
        scene.nodes.left("ray-10.0.0.1")
        scene.nodes.take(RayMessage(kind="actor_failed", node="m", why="ActorDiedError"))
        scene.nodes.take(RayMessage(kind="waiting", node="m", cpus=4.0, gpus=0.0, waited_s=30.0, free={"CPU": 0.0}))
        scene.nodes.take(RayMessage(kind="draining", node="m"))
        assert scene.nodes.warnings() == []
        scene.ready("m")
        scene.pass_s(10 * TTL_S)
        assert scene.driver.given_back == ["m", "m"] and len(scene.driver.started) == 1
        assert scene.states == [("ray-10.0.0.1", "released")]


async def test_the_end_of_the_gateway_keeps_or_releases_as_configured() -> None:
    async with Scene() as kept:
        kept.alive("m")
        kept.ready("m")
    assert kept.driver.given_back == []
    async with Scene(at_end="release", name="{id}") as scene:
        for id in ("m", "n", "lost"):
            scene.alive(id)
            scene.ready(id)

        def answer(node: str) -> None:
            gone = (
                RayMessage(kind="refused", node=node, why="none")
                if node == "lost"
                else RayMessage(kind="released", node=node, gone=True)
            )
            scene.nodes.take(gone)

        scene.driver.on_release = answer
    assert scene.driver.given_back == ["m", "n", "lost"]
