"""The client against a real gateway on real sockets, and against answers that a gateway gives only in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.client import AsyncClient, BatchCall, Client, ConnectionFailed, InvocationFailed, InvocationResult
from gateway.client.requests import Retries
from manager.errors import Conflict, InvalidInput, NotFound, QuotaExceeded, Unauthorized
from manager.outcome import State
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving

QUICK = Retries(max_attempts=3, wait_max_s=5.0)


@asynccontextmanager
async def client_of(running: RunningGateway, **options: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"http://127.0.0.1:{running.app.http_port}", **options) as client:
        yield client


async def test_an_invocation_comes_back_typed(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        result = await client.invoke("echo", {"n": 3, "log": "hello\n"}, task="t", logs=True)
    assert (result.state, result.reason, result.task, result.ok) == (State.SUCCEEDED, None, "t", True)
    assert result.result["n"] == 3
    assert result.act_s == pytest.approx(result.queue_s + result.overhead_s + result.execution_s)
    assert [line.text for line in result.logs if line.stream != "system"] == ["hello\n"]
    assert result.units == {"cpu": 1}
    assert result.accepted_at is not None and result.ended_at is not None and result.ended_at >= result.accepted_at


async def test_a_failure_is_returned_and_raised_where_that_is_wanted(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        result = await client.invoke("echo", {"reason": "handler_error"})
        assert result.state is State.FAILED
        with pytest.raises(InvocationFailed, match="handler_error") as caught:
            result.raise_for_failure()
        assert caught.value.invocation is result
    async with client_of(gateway, raise_failures=True) as client:
        with pytest.raises(InvocationFailed):
            await client.invoke("echo", {"reason": "upstream"})


async def test_refusals_are_the_errors_of_the_manager(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(NotFound, match="nobody"):
            await client.invoke("nobody", {})
        with pytest.raises(InvalidInput) as caught:
            await client.invoke("strict", {"n": "x"})
        assert caught.value.detail["path"] == "$.n"
        done = await client.invoke("echo", {})
        with pytest.raises(Conflict):
            await client.cancel(done.id)


async def test_work_is_submitted_waited_for_listed_and_cancelled(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        held = await client.submit("echo", {"held": True})
        assert not held.state.terminal
        with pytest.raises(TimeoutError):
            await client.wait(held.id, 0.0)
        await gateway.executing(held.id)
        cancelled = await client.cancel(held.id)
        assert cancelled.state is State.CANCELLED
        for _ in range(3):
            await client.invoke("echo", {})
        assert [each.state async for each in client.list(limit=3)] == [State.SUCCEEDED] * 3
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
            assert [each["trajectory"] for each in await client.trajectories()] == ["t1"]
        assert await client.trajectories() == []
        await trajectory.close()


async def test_the_gateways_state_can_be_asked_for(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        assert "echo" in [each["name"] for each in await client.functions()]
        assert (await client.function("echo"))["runtime"] == "handler"
        assert "pools" in await client.resources()
        assert list(await client.queue()) == []
        assert isinstance(await client.tasks(), list)


async def test_a_token_is_sent(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"token": "sesame"})) as running:
        async with client_of(running, token="sesame") as client:
            assert (await client.invoke("echo", {})).ok
        async with client_of(running, token="wrong") as client:
            with pytest.raises(Unauthorized):
                await client.functions()


async def test_the_synchronous_client_does_the_same(gateway: RunningGateway) -> None:
    def use() -> list[str]:
        with Client(f"http://127.0.0.1:{gateway.app.http_port}") as client:
            result = client.invoke("echo", {"log": "one\ntwo\n"}, logs=True).raise_for_failure()
            with client.trajectory("s") as trajectory:
                assert trajectory.exec("echo hi").result["stdout"] == "hi\n"
            with pytest.raises(NotFound):
                client.end_trajectory("s")
            assert [each.id for each in client.list(function="echo", limit=1)] == [result.id]
            return [line.text for line in client.logs(result.id) if line.stream != "system"]

    assert "".join(await asyncio.to_thread(use)) == "one\ntwo\n"


def test_the_twins_have_the_same_methods() -> None:
    assert _public(Client) == _public(AsyncClient)


def _public(client: type) -> list[str]:
    return [name for name in vars(client) if not name.startswith("_")]


def scripted(*answers: Callable[[httpx.Request], httpx.Response]) -> tuple[httpx.MockTransport, list[httpx.Request]]:
    """A transport that gives these answers in turn, and what it was asked."""
    asked: list[httpx.Request] = []
    left: Iterator[Callable[[httpx.Request], httpx.Response]] = iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return next(left)(request)

    return httpx.MockTransport(answer), asked


def problem(status: int, code: str, **more: object) -> Callable[[httpx.Request], httpx.Response]:
    body = {"code": code, "detail": code, "component": "admission", **more}
    return lambda request: httpx.Response(status, content=orjson.dumps(body))


def broken(kind: type[httpx.TransportError]) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        raise kind("broken")

    return answer


def found(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=b'{"queue": []}')


def accepted(request: httpx.Request) -> httpx.Response:
    empty: dict[str, object] = dict.fromkeys(
        (
            "trajectory",
            "reason",
            "queue_ms",
            "overhead_ms",
            "execution_ms",
            "node",
            "accepted_at",
            "started_at",
            "ended_at",
        )
    )
    known = {"id": "i", "function": "f", "task": "t", "state": "queued", "message": "", "component": "", "attempt": 1}
    return httpx.Response(202, content=orjson.dumps(empty | known | {"units": {}, "usage": {}}))


def test_a_refusal_is_tried_again_after_the_time_it_names() -> None:
    refusal = problem(429, "quota_exceeded", retry_after_s=0.001)
    transport, asked = scripted(refusal, problem(503, "draining", retry_after_s=0.001), found)
    with Client(transport=transport, retries=QUICK) as client:
        assert list(client.queue()) == []
    assert len(asked) == 3


def test_retries_are_bounded_in_number_and_in_time() -> None:
    transport, asked = scripted(*[problem(429, "quota_exceeded", retry_after_s=0.001)] * 3)
    with Client(transport=transport, retries=QUICK) as client, pytest.raises(QuotaExceeded):
        client.queue()
    assert len(asked) == 3
    transport, asked = scripted(problem(429, "quota_exceeded", retry_after_s=60))
    with Client(transport=transport, retries=QUICK) as client, pytest.raises(QuotaExceeded) as caught:
        client.queue()
    assert (len(asked), caught.value.retry_after_s) == (1, 60.0)


def test_work_that_may_have_started_is_not_sent_again_without_a_key() -> None:
    transport, asked = scripted(broken(httpx.ReadError))
    with Client(transport=transport, retries=QUICK) as client, pytest.raises(ConnectionFailed):
        client.invoke("f", {})
    assert len(asked) == 1
    transport, asked = scripted(broken(httpx.ConnectError), broken(httpx.ConnectError), accepted)
    with Client(transport=transport, retries=QUICK) as client:
        client.invoke("f", {})
    assert len(asked) == 3


def test_a_submit_that_is_sent_again_carries_the_same_key() -> None:
    transport, asked = scripted(broken(httpx.ReadError), accepted)
    with Client(transport=transport, retries=QUICK) as client:
        client.submit("f", {})
    first, second = (request.headers["idempotency-key"] for request in asked)
    assert first == second


def log(*records: dict[str, object], broken_off: bool = False) -> Callable[[httpx.Request], httpx.Response]:
    def chunks() -> Iterator[bytes]:
        for record in records:
            yield orjson.dumps(record) + b"\n"
        if broken_off:
            raise httpx.ReadError("broken")

    class Stream(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            return chunks()

    return lambda request: httpx.Response(200, stream=Stream())


def row(offset: int) -> dict[str, object]:
    return {"offset": offset, "time": "2026-01-01T00:00:00.000Z", "stream": "stdout", "data": f"{offset}\n"}


def test_a_followed_log_resumes_where_it_broke_and_repeats_nothing() -> None:
    transport, asked = scripted(
        log(row(0), {"stream": "heartbeat"}, row(1), broken_off=True),
        log(row(1), row(2)),
        log(row(3), {"stream": "dropped", "next_offset": 4, "data": "too slow"}),
        log(row(4), {"stream": "eof", "offset": 5}),
    )
    with Client(transport=transport, retries=QUICK) as client:
        assert [line.text for line in client.logs("i", follow=True)] == ["0\n", "1\n", "2\n", "3\n", "4\n"]
    assert [request.url.params["offset"] for request in asked] == ["0", "2", "3", "4"]


def test_a_log_that_never_comes_back_is_an_error() -> None:
    transport, asked = scripted(*[log(broken_off=True)] * 3)
    with Client(transport=transport, retries=QUICK) as client, pytest.raises(ConnectionFailed, match="log of i"):
        list(client.logs("i", follow=True))
    assert len(asked) == 3


def test_an_answer_that_is_not_ours_is_quoted() -> None:
    transport, _ = scripted(lambda request: httpx.Response(502, text="<html>bad gateway</html>"))
    with Client(transport=transport) as client, pytest.raises(Exception, match="502: <html>bad gateway"):
        client.queue()


async def test_a_batch_comes_back_as_one_verdict_for_each_call(gateway: RunningGateway) -> None:
    calls = [
        BatchCall(function="echo", input={"n": 1}, task="t"),
        BatchCall(function="nobody"),
        BatchCall(function="echo", input={"reason": "handler_error"}),
    ]
    async with client_of(gateway) as client:
        done, refused, failed = await client.submit_all(calls, wait="all", timeout_s=5.0)
        assert isinstance(done, InvocationResult) and (done.state, done.task) == (State.SUCCEEDED, "t")
        assert isinstance(refused, NotFound)
        assert isinstance(failed, InvocationResult) and failed.state is State.FAILED
        held = [BatchCall(function="echo", input={"held": True}), BatchCall(function="echo", key="once")]
        first, second = await client.submit_all(held, wait="any", timeout_s=5.0)
        assert isinstance(first, InvocationResult) and isinstance(second, InvocationResult)
        assert second.ok and not first.state.terminal
        assert [each.id async for each in client.list(dead=True)] == [failed.id]
        again = await client.wait((await client.redrive(failed.id)).id)
        assert await client.purge(again.id) == 1
        assert await client.purge_all() == 0
