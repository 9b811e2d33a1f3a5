"""Leases: who is held, until when, and what ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import trajectory_records
from gateway.trajectory_records import NOBODY, ConnectionPeer, Leases, UnreadAnswers
from manager.errors import Conflict
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until


class LeaseBench:
    """A clock, and trajectories with the instant of their last action."""

    def __init__(self, *living: str) -> None:
        self.now_s = 100.0
        self.used_s = dict.fromkeys(living, self.now_s)
        self.leases = Leases(lambda: self.now_s, self._idle_s, self._end)

    def _idle_s(self, trajectory: str) -> float | None:
        used_s = self.used_s.get(trajectory)
        return None if used_s is None else self.now_s - used_s

    async def _end(self, trajectory: str) -> bool:
        return self.used_s.pop(trajectory, None) is not None

    async def later(self, seconds: float, *used: str) -> set[str]:
        """Who lives so much later, when these did something just then."""
        self.now_s += seconds
        self.used_s |= dict.fromkeys(used, self.now_s)
        await self.leases.end_lapsed()
        return set(self.used_s)


@pytest.mark.promise("The trajectories of a client that was killed end with its lease, those of one that lives do not.")
async def test_what_its_client_and_everybody_else_have_forgotten_ends() -> None:
    world = LeaseBench("forgotten", "renewed", "used", "never leased")
    assert world.leases.renew(["forgotten", "renewed", "used"], 10.0) == []
    assert world.leases.left_s("never leased") is None
    assert await world.later(9.0, "used") == {"forgotten", "renewed", "used", "never leased"}
    world.leases.renew(["renewed"], 11.0)
    assert (world.leases.left_s("forgotten"), world.leases.left_s("renewed")) == (1.0, 11.0)
    assert await world.later(2.0) == {"renewed", "used", "never leased"}, "used 2 s ago"
    assert await world.later(7.9) == {"renewed", "used", "never leased"}
    assert await world.later(0.2) == {"renewed", "never leased"}
    assert await world.later(1.0) == {"never leased"}
    assert await world.later(1e6) == {"never leased"}, "idle_ttl is the core's"


async def test_what_ended_is_told_and_forgotten() -> None:
    world = LeaseBench("t")
    world.leases.renew(["t"], 10.0)
    del world.used_s["t"]
    assert world.leases.renew(["t", "unknown"], 10.0) == ["t", "unknown"]
    world.leases.ended("t")
    world.used_s["t"] = world.now_s
    assert world.leases.left_s("t") is None
    assert await world.later(11.0) == {"t"}, "another of its name, which nobody has leased"


async def test_a_lease_is_renewed_over_http_and_shown(gateway: RunningGateway) -> None:
    await gateway.http.put("/v1/trajectories/t", json={"function": "echo"})
    assert (await gateway.http.get("/v1/trajectories/t")).json()["lease_left_s"] is None
    answer = await gateway.http.post("/v1/leases", json={"trajectories": ["t", "other"], "lease_s": 30})
    assert (answer.status_code, answer.json()) == (200, {"gone": ["other"]})
    (listed,) = (await gateway.http.get("/v1/trajectories")).json()["trajectories"]
    assert 0 < listed["lease_left_s"] <= 30


@pytest.mark.parametrize("lease_s", [0, 86401, "soon"])
async def test_a_lease_out_of_bounds_is_refused(gateway: RunningGateway, lease_s: object) -> None:
    answer = await gateway.http.post("/v1/leases", json={"trajectories": ["t"], "lease_s": lease_s})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    assert "lease" in answer.json()["detail"]


async def test_what_several_hold_ends_with_the_last_of_them() -> None:
    world = LeaseBench("t", "u", "v")
    for holder in ("one", "two"):
        world.leases.renew(["t", "u"], 10.0, holder)
    world.leases.hold("v", NOBODY, None)
    world.leases.renew(["v"], 10.0, "one")
    await world.leases.release(["t", "v", "unknown"], "one")
    await world.leases.release(["t"], "stranger")
    assert set(world.used_s) == {"t", "u", "v"}
    await world.leases.release(["t"], "two")
    assert await world.later(5.0) == {"u", "v"}
    world.leases.renew(["u"], 10.0, "two")
    assert await world.later(6.0) == {"u", "v"}, "one of both holds it yet"
    assert await world.later(6.0) == {"v"}, "whoever made it asked for no lease"


async def test_what_its_client_never_learned_of_is_undone_when_the_connection_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trajectory_records, "UNREAD_S", 0.05)
    answers, undone = UnreadAnswers(), list[str]()
    first, second, third = ConnectionPeer(), ConnectionPeer(), ConnectionPeer()

    def undo(name: str) -> Callable[[], Awaitable[object]]:
        return partial(asyncio.to_thread, undone.append, name)

    for name in ("lost", "known", "again", "late"):
        answers.expect(first, "one", name, undo(name))
    answers.known("one", ["known", "never made"])
    answers.known("stranger", ["lost"])
    answers.expect(second, "one", "again", undo("again"))
    answers.expect(third, "one", "read", undo("read"))
    third.asks()
    assert [answers.awaits("one", name) for name in ("lost", "known", "again", "read")] == [True, False, True, False]
    for peer in (first, third):
        peer.close()
    answers.known("one", ["late"])  # who lives speaks over another connection
    await until(lambda: undone == ["lost"])
    answers.expect(third, "one", "late", undo("late"))
    await until(lambda: undone == ["lost", "late"])
    answers.leave()
    second.close()
    assert not answers.awaits("one", "again"), "the gateway itself closes its connections"
    await asyncio.sleep(0)
    assert undone == ["lost", "late"]


async def test_a_request_that_is_sent_again_joins_what_it_made() -> None:
    world = LeaseBench("t")
    world.leases.begin("t", "opening")
    assert not world.leases.joins("t", "opening")
    assert world.leases.joins("t", "another") and world.leases.joins("t", None) and world.leases.joins("u", "opening")
    world.leases.ended("t")
    assert world.leases.joins("t", "opening")


async def test_leases_survive_a_restart_of_the_gateway(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as first:
        body = {"function": "echo", "lease_s": 300, "holder": "one"}
        assert (await first.http.put("/v1/trajectories/t", json=body)).status_code == 200
        first.app.stop(keep_environments=True)
    async with serving(bench) as second:
        info = (await second.http.get("/v1/trajectories/t")).json()
        assert 200 < info["lease_left_s"] <= 300
        await second.http.post("/v1/leases", json={"holder": "one", "released": ["t"]})
        assert second.app.engine.trajectory("t") is None


@pytest.mark.parametrize("waits_for", ["the opening", "memory"])
async def test_who_goes_away_while_its_trajectory_is_made_takes_it_along(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    making, cancelled = asyncio.Event(), asyncio.Event()

    async def never(*arguments: Any, **named: Any) -> None:
        making.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    body = {"function": "echo"}
    if waits_for == "the opening":
        monkeypatch.setattr(gateway.app.runtimes.environments, "ensure", never)
    else:
        monkeypatch.setattr(gateway.app.engine, "open_trajectory", never)
    async with httpx.AsyncClient(base_url=gateway.http.base_url, headers=gateway.http.headers) as client:
        request = asyncio.create_task(client.put("/v1/trajectories/left", json=body))
        await making.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await asyncio.wait_for(cancelled.wait(), DEADLINE_S)
    await until(lambda: gateway.app.engine.trajectory("left") is None)


async def test_an_opening_that_is_refused_changes_no_lease_of_who_lives(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_arguments: object, **_named: object) -> None:
        raise Conflict("it lives in another sandbox")

    path, opened = "/v1/trajectories/t", gateway.app.engine.open_trajectory
    assert (await gateway.http.put(path, json={"function": "echo"})).json()["lease_left_s"] is None
    for held_s in (None, 50):
        monkeypatch.setattr(gateway.app.engine, "open_trajectory", refused)
        assert (await gateway.http.put(path, json={"function": "echo", "lease_s": 5})).status_code == 409
        left_s = (await gateway.http.get(path)).json()["lease_left_s"]
        assert left_s is None if held_s is None else left_s > 5, "whoever is refused shortens nobody's"
        monkeypatch.setattr(gateway.app.engine, "open_trajectory", opened)
        assert (await gateway.http.put(path, json={"function": "echo", "lease_s": 50})).json()["lease_left_s"] > 5


async def test_what_cannot_be_opened_leaves_no_lease(gateway: RunningGateway) -> None:
    refused = await gateway.http.put("/v1/trajectories/t", json={"function": "nope", "lease_s": 300})
    assert refused.status_code == 404
    assert (await gateway.http.put("/v1/trajectories/t", json={"function": "echo"})).json()["lease_left_s"] is None
    for lease_s in (0.5, 86401, "soon"):
        bad = await gateway.http.put("/v1/trajectories/u", json={"function": "echo", "lease_s": lease_s})
        assert (bad.status_code, "lease_s" in bad.text) == (422, True)
