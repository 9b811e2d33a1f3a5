"""One client carries as many trajectories as a trainer runs at once, over a bounded number of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tangram import AsyncClient, Client, InvalidInputError, NotFoundError
from tangram.client import aio as aio_connections
from tangram.client.aio import ANSWER_S, CONNECTIONS, SPARE, AsyncSessionHandle
from tangram.testing import ScriptedCall, ScriptedGateway, ScriptedTrajectory
from tests.tangram.sockets import DEADLINE_S, served, serving

TRAJECTORIES = 500
THREADS = 100


class Crowd:
    """A function whose calls end only once so many of them are under way at the same time."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, call: ScriptedCall) -> object:
        self._missing -= 1
        if self._missing == 0:
            for waiting in self._waiting:
                waiting.set_result(None)
        elif self._missing > 0:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await asyncio.wait_for(asyncio.shield(self._waiting[-1]), DEADLINE_S)
        return {"trajectory": call.trajectory}


@pytest.mark.slow
async def test_five_hundred_trajectories_act_at_once_over_one_pool() -> None:
    async with serving(ScriptedGateway({"shell": Crowd(TRAJECTORIES)})) as server:
        async with AsyncClient(server.address) as client:

            async def rollout(number: int) -> None:
                async with client.trajectory(f"t{number}") as trajectory:
                    done = await trajectory.exec("crowd")
                    assert done.result == {"trajectory": f"t{number}"}

            await asyncio.gather(*map(rollout, range(TRAJECTORIES)))
        assert server.opened <= CONNECTIONS
        assert server.gateway.trajectories == {}


def test_threads_share_one_pool() -> None:
    with served(ScriptedGateway({"shell": Crowd(THREADS)})) as server, Client(server.address) as client:

        def rollout(number: int) -> None:
            with client.trajectory(f"t{number}") as trajectory:
                assert trajectory.exec("crowd").result == {"trajectory": f"t{number}"}

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(rollout, range(THREADS)))
        assert server.opened <= THREADS + 1


async def test_connections_are_bounded_and_whoever_finds_none_waits() -> None:
    async with serving(ScriptedGateway({"f": lambda call: call.input})) as server:
        async with AsyncClient(server.address, connections=4) as client:
            results = await asyncio.gather(*(client.invoke("f", {"n": n}) for n in range(50)))
        assert [each.result for each in results] == [{"n": n} for n in range(50)]
        assert server.open_max <= 4


async def test_calls_that_last_leave_connections_to_the_others() -> None:
    release = asyncio.Event()

    async def wait(call: ScriptedCall) -> object:
        return await release.wait()

    gateway = ScriptedGateway({"f": wait})
    async with serving(gateway) as server, AsyncClient(server.address, connections=SPARE + 2) as client:
        lasting = [asyncio.create_task(client.invoke("f", {})) for _ in range(5)]
        async with asyncio.timeout(DEADLINE_S):
            assert len(await client.functions()) == 1
            assert await client.tasks() == ()
        release.set()
        assert all(each.result is True for each in await asyncio.gather(*lasting))


#: What hangs on something else, which may take as long as that does: memory, a snapshot, a build, the work.
HANGING: dict[str, Callable[[AsyncClient], Awaitable[object]]] = {
    "open": lambda client: client.trajectory("t").open(),
    "open with a choice": lambda client: client.trajectory("t", sandbox={"memory": "1Gi"}).open(),
    "fork": lambda client: client.trajectory("t").fork(["u"]),
    "snapshot": lambda client: client.trajectory("t").snapshot(),
    "end": lambda client: client.end_trajectory("t"),
    "upload": lambda client: client.trajectory("t").upload("f", b""),
    "download": lambda client: client.trajectory("t").download("f"),
    "list": lambda client: client.trajectory("t").list(),
    "upload an archive": lambda client: client.trajectory("t").upload_archive("d", b""),
    "download an archive": lambda client: client.trajectory("t").download_archive("d"),
    "register": lambda client: client.put_function("f", {"runtime": "exec"}),
    "apply": lambda client: client.apply({}),
    "pull": lambda client: client.pull_images(["i"], wait_s=300.0),
    "remove a snapshot": lambda client: client.remove_snapshot("s"),
    "end of input": lambda client: AsyncSessionHandle(client, "s", begun=True).close_input(),
    "invoke": lambda client: client.invoke("f", {}),
}


@pytest.mark.parametrize("call", HANGING)
async def test_an_answer_that_hangs_on_a_queue_is_waited_for(call: str) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        problem = {"type": "t", "title": "t", "status": 404, "code": "not_found", "detail": "seen", "component": "test"}
        return httpx.Response(404, json=problem)

    async with AsyncClient(transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(NotFoundError, match="seen"):
            await HANGING[call](client)
    timeout = seen[0].extensions["timeout"]
    assert (timeout["read"], timeout["connect"]) == (None, ANSWER_S)


async def test_who_has_memory_acts_and_ends_while_all_others_wait_for_some() -> None:
    gateway, freed = ScriptedGateway({"f": {}, "shell": {}}), asyncio.Event()

    class Full(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.method == "PUT":
                await freed.wait()
            return await gateway.handle_async_request(request)

    gateway.trajectories["old"] = ScriptedTrajectory("old", "default")
    async with AsyncClient(transport=Full(), connections=4) as client:
        waiting = [asyncio.create_task(client.trajectory(f"t{n}").open()) for n in range(20)]
        async with asyncio.timeout(DEADLINE_S):
            assert (await client.invoke("f", {}, trajectory="old")).ok
            await client.end_trajectory("old")
            freed.set()
            await asyncio.gather(*waiting)


async def test_a_connection_is_used_again_also_after_a_refusal_and_a_failed_call() -> None:
    async with serving(ScriptedGateway({"f": {}})) as server:
        async with AsyncClient(server.address) as client:
            for _ in range(3):
                await client.invoke("f", {})
                with pytest.raises(Exception, match="no function 'g'"):
                    await client.invoke("g", {})
        assert server.opened == 1


async def test_a_cancelled_call_gives_its_place_back() -> None:
    async def wait(call: ScriptedCall) -> object:
        return await asyncio.Event().wait() if call.input else {}

    gateway = ScriptedGateway({"f": wait})
    async with serving(gateway) as server, AsyncClient(server.address, connections=3) as client:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.invoke("f", {"wait": True})
        assert (await client.invoke("f", {})).ok


async def test_connections_that_were_free_for_long_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_connections, "IDLE_S", 0.0)
    async with serving(ScriptedGateway({"f": Crowd(5)})) as server, AsyncClient(server.address) as client:
        await asyncio.gather(*(client.invoke("f", {}) for _ in range(5)))
        await client.functions()
        async with asyncio.timeout(DEADLINE_S):
            while server.open > 1:
                await client.functions()


def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(ScriptedGateway({"f": {}})) as server:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, server.address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1")
        with Client("http://gateway.example:8080") as client:
            assert len(client.functions()) == 1
            assert server.gateway.requests[0].url == "http://gateway.example:8080/v1/functions"
        with Client(server.address) as client:
            assert len(client.functions()) == 1
            assert server.gateway.requests[1].url == "http://server/v1/functions"


def test_a_client_needs_a_connection_for_an_opening_one_for_a_call_and_one_for_the_others() -> None:
    with pytest.raises(InvalidInputError, match="at least 3"):
        Client(connections=2)


def test_a_transport_of_ones_own_is_used_instead() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"tasks": []})

    with Client(transport=httpx.MockTransport(answer)) as client:
        assert client.tasks() == ()
