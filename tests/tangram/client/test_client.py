"""The client against a real gateway on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tangram import (
    AsyncClient,
    BatchCall,
    Client,
    ConflictError,
    InvalidInputError,
    InvocationFailed,
    InvocationResult,
    NotFoundError,
    UnauthorizedError,
)
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving


@asynccontextmanager
async def client_of(running: RunningGateway, **options: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"http://127.0.0.1:{running.app.http_port}", **options) as client:
        yield client


async def test_an_invocation_comes_back_typed(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        result = await client.invoke("echo", {"n": 3, "log": "hello\n"}, task="t", logs=True)
    assert (result.state, result.reason, result.task, result.ok) == ("succeeded", None, "t", True)
    assert result.result["n"] == 3
    assert result.act_s == pytest.approx(result.queue_s + result.overhead_s + result.execution_s)
    assert [line.text for line in result.logs if line.stream != "system"] == ["hello\n"]
    assert result.units == {"cpu": 1}
    assert result.accepted_at is not None and result.ended_at is not None and result.ended_at >= result.accepted_at


async def test_a_call_with_a_known_key_says_that_it_ran_nothing(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        for reason in (None, "upstream"):  # a record, and one within a problem
            ends = [await client.invoke("echo", {"reason": reason}, key=f"k-{reason}") for _ in range(2)]
            assert ([each.replayed for each in ends], ends[0].id) == ([False, True], ends[1].id)
        call = BatchCall(function="echo", key="in a batch".replace(" ", "-"))
        verdicts = [await client.submit_all([call, BatchCall(function="echo")]) for _ in range(2)]
        told = [[isinstance(each, InvocationResult) and each.replayed for each in verdict] for verdict in verdicts]
        assert told == [[False, False], [True, False]]


async def test_a_failure_is_returned_and_raised_where_that_is_wanted(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        result = await client.invoke("echo", {"reason": "handler_error"})
        assert result.state == "failed"
        with pytest.raises(InvocationFailed, match="handler_error") as caught:
            result.raise_for_failure()
        assert caught.value.invocation is result
    async with client_of(gateway, raise_failures=True) as client:
        with pytest.raises(InvocationFailed):
            await client.invoke("echo", {"reason": "upstream"})


async def test_a_refusal_is_the_error_of_its_code(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(NotFoundError, match="nobody"):
            await client.invoke("nobody", {})
        with pytest.raises(InvalidInputError) as caught:
            await client.invoke("strict", {"n": "x"})
        assert caught.value.detail["path"] == "$.n"
        done = await client.invoke("echo", {})
        with pytest.raises(ConflictError):
            await client.cancel(done.id)


async def test_work_is_submitted_waited_for_listed_and_cancelled(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        held = await client.submit("echo", {"held": True})
        assert not held.ended
        with pytest.raises(TimeoutError):
            await client.wait(held.id, 0.0)
        await gateway.executing(held.id)
        cancelled = await client.cancel(held.id)
        assert cancelled.state == "cancelled"
        for _ in range(3):
            await client.invoke("echo", {})
        assert [each.state async for each in client.list(limit=3)] == ["succeeded"] * 3
        assert [each.id async for each in client.list(state="cancelled")] == [held.id]


async def test_one_key_is_one_execution(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        first, second = await asyncio.gather(*(client.submit("echo", {"n": 1}, key="k") for _ in range(2)))
        assert first.id == second.id
        assert (await client.wait(first.id, DEADLINE_S)).ok


async def test_a_trajectory_keeps_its_files_and_goes_when_it_is_left(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        async with client.trajectory("t1", function="shell") as trajectory:
            home = (await trajectory.exec(["pwd"])).raise_for_failure().result["stdout"].strip()
            where = f"{home}/notes.txt"
            await trajectory.upload(where, "hello")
            assert (await trajectory.exec("cat notes.txt")).result["stdout"] == "hello"
            await trajectory.exec("echo more >> notes.txt; exit 3")
            assert await trajectory.download(where) == b"hellomore\n"
            assert "notes.txt" in [Path(entry.path).name for entry in await trajectory.list(home)]
            assert [each.trajectory for each in await client.trajectories()] == ["t1"]
        assert await client.trajectories() == []
        await trajectory.close()


async def test_a_handles_workdir_is_where_commands_run_and_files_lie(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client, client.trajectory("w", function="shell") as whole:
        home = (await whole.exec("mkdir -p repo/src; pwd")).result["stdout"].strip()
        inside = client.trajectory("w", function="shell", workdir=f"{home}/repo")
        await inside.upload("a.txt", "of the handle's directory")
        assert (await inside.exec("pwd -P; cat a.txt")).result["stdout"] == f"{home}/repo\nof the handle's directory"
        assert (await inside.exec("pwd -P", cwd="src")).result["stdout"] == f"{home}/repo/src\n"
        assert (await inside.exec("pwd -P", cwd=home)).result["stdout"] == f"{home}\n"
        await inside.close()


async def test_the_gateways_state_can_be_asked_for(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        assert "echo" in [each.name for each in await client.functions()]
        assert (await client.function("echo")).runtime == "handler"
        assert "cpu:local" in (await client.resources()).pools
        assert list(await client.queue()) == []
        assert [each.task for each in await client.tasks()] == ["default"]


async def test_a_token_is_sent(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"auth": "token", "token": "sesame"})) as running:
        async with client_of(running, token="sesame") as client:
            assert (await client.invoke("echo", {})).ok
        async with client_of(running, token="wrong") as client:
            with pytest.raises(UnauthorizedError):
                await client.functions()


async def test_the_synchronous_client_does_the_same(gateway: RunningGateway) -> None:
    def use() -> list[str]:
        with Client(f"http://127.0.0.1:{gateway.app.http_port}") as client:
            result = client.invoke("echo", {"log": "one\ntwo\n"}, logs=True).raise_for_failure()
            with client.trajectory("s") as trajectory:
                assert trajectory.exec("echo hi").result["stdout"] == "hi\n"
            with pytest.raises(NotFoundError):
                client.end_trajectory("s")
            assert [each.id for each in client.list(function="echo", limit=1)] == [result.id]
            return [line.text for line in client.logs(result.id) if line.stream != "system"]

    assert "".join(await asyncio.to_thread(use)) == "one\ntwo\n"


def test_the_twins_have_the_same_methods() -> None:
    assert _public(Client) == _public(AsyncClient)


def _public(client: type) -> list[str]:
    return [name for name in vars(client) if not name.startswith("_")]


async def test_a_batch_comes_back_as_one_verdict_for_each_call(gateway: RunningGateway) -> None:
    calls = [
        BatchCall(function="echo", input={"n": 1}, task="t"),
        BatchCall(function="nobody"),
        BatchCall(function="echo", input={"reason": "handler_error"}),
    ]
    async with client_of(gateway) as client:
        done, refused, failed = await client.submit_all(calls, wait="all", timeout_s=5.0)
        assert isinstance(done, InvocationResult) and (done.state, done.task) == ("succeeded", "t")
        assert isinstance(refused, NotFoundError)
        assert isinstance(failed, InvocationResult) and failed.state == "failed"
        held = [BatchCall(function="echo", input={"held": True}), BatchCall(function="echo", key="once")]
        first, second = await client.submit_all(held, wait="any", timeout_s=5.0)
        assert isinstance(first, InvocationResult) and isinstance(second, InvocationResult)
        assert second.ok and not first.ended
        assert [each.id async for each in client.list(dead=True)] == [failed.id]
        again = await client.wait((await client.redrive(failed.id)).id)
        assert await client.purge(again.id) == 1
        assert await client.purge_all() == 0
