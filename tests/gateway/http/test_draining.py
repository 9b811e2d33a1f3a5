"""A gateway that is told to stop: whoever waits for a call that it does not end is told to come again."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from grpclib import GRPCError, Status
from grpclib.client import Channel

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from tangram.client.aio import AsyncClient
from tests.gateway.conftest import GatewayBench, RunningGateway, serving, until

KEY = {"Idempotency-Key": "k"}


async def held(gateway: RunningGateway, *names: str) -> None:
    """Return when so many calls run, and the gateway has been told to stop with all of them under way."""
    await until(lambda: len(gateway.app.invocations.living) == len(names))
    gateway.app.stop()


async def test_who_waits_for_a_durable_call_is_told_to_come_again(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as first:
        accepted = (await first.invoke({"held": True}, function="again", mode="async")).json()["id"]
        waiting = asyncio.create_task(first.http.get(f"/v1/invocations/{accepted}", params={"wait": "20s"}))
        keyed = asyncio.create_task(first.invoke({"held": True}, function="again", headers=KEY))
        batch = {"calls": [{"function": "again", "input": {"held": True}, "key": "b"}]}
        batched = asyncio.create_task(first.http.post("/v1/invocations:batch", json=batch, params={"wait": "all"}))
        await held(first, "accepted", "keyed", "batched")
        shown, refused, verdicts = await waiting, await keyed, await batched
    assert (shown.status_code, shown.json()["id"]) == (200, accepted)
    assert shown.json()["state"] in ("queued", "running")
    assert (refused.status_code, refused.json()["code"]) == (503, "draining")
    assert float(refused.headers["Retry-After"]) > 0
    (verdict,) = verdicts.json()["results"]
    assert (verdicts.status_code, verdict["status"]) == (200, 202)
    async with serving(GatewayBench(tmp_path)) as second:
        again = asyncio.create_task(second.invoke({"held": True}, function="again", headers=KEY))
        done: set[str] = set()
        while len(done) < 3:  # more than there are cores
            await until(lambda: bool(set(second.runtime.running) - done))
            for running in set(second.runtime.running) - done:
                second.runtime.finish(running)
                done.add(running)
        answer = await again
        assert (answer.status_code, answer.headers["X-Idempotent-Replay"]) == (200, "true")


async def test_a_call_that_has_not_begun_is_refused_and_one_that_has_is_lost(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as first:
        cores = first.app.node.cores
        running = [asyncio.create_task(first.invoke({"held": True})) for _ in range(cores)]
        await until(lambda: len(first.runtime.running) == len(running))
        waiting = asyncio.create_task(first.invoke({"held": True}))
        await held(first, *map(str, running), "waiting")
        refused = await waiting
        assert (refused.status_code, refused.json()["code"]) == (503, "draining"), "it may be sent again"
        for answer in await asyncio.gather(*running):
            assert answer.json()["code"] == "gateway_restart"


async def test_over_grpc_it_is_unavailable(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as first, Channel("127.0.0.1", first.app.grpc_port) as channel:
        request = pb.InvokeRequest(function="again", input_json=b'{"held": true}', idempotency_key="k")
        calling = asyncio.create_task(GatewayStub(channel).Invoke(request))
        await held(first, "calling")
        with pytest.raises(GRPCError) as failure:
            await calling
    assert failure.value.status is Status.UNAVAILABLE


async def test_what_has_no_answer_when_the_grace_is_over_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        begun = asyncio.Event()

        async def never(*_arguments: object, **_named: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(gateway.app.engine, "open_trajectory", never)
        opening = asyncio.create_task(gateway.http.put("/v1/trajectories/t", json={"function": "echo"}))
        await begun.wait()
        gateway.app.stop()
        with pytest.raises(httpx.TransportError):  # no answer is an answer that the client tries again
            await opening


async def test_a_clients_calls_outlast_a_planned_restart(tmp_path: Path) -> None:
    async with AsyncExitStack() as clients:
        async with serving(GatewayBench(tmp_path)) as first:
            port = first.app.http_port
            client = await clients.enter_async_context(AsyncClient(f"http://127.0.0.1:{port}", token=""))
            job = await client.submit("again", {"held": True})
            waiting = asyncio.create_task(client.wait(job.id, timeout_s=60.0))
            keyed = asyncio.create_task(client.invoke("again", {"held": True}, key="k"))
            await until(lambda: len(first.runtime.running) == 2)
        async with serving(GatewayBench(tmp_path, server={"port": port})) as second:
            await until(lambda: len(second.runtime.running) == 2)
            for running in list(second.runtime.running):
                second.runtime.finish(running)
            assert (await waiting).ok
            assert (await keyed).ok
