"""The scripted gateway answers as a real one does, as far as its users can see."""

from __future__ import annotations

import asyncio

import pytest

from tangram import (
    AsyncClient,
    BatchCall,
    Client,
    ConflictError,
    InvocationResult,
    NotFoundError,
    TrajectoryEndedError,
)
from tangram.testing import ScriptedCall, ScriptedFailure, ScriptedGateway


def behave(call: ScriptedCall) -> object:
    call.log(f"n is {call.input['n']}\n")
    if call.input["n"] < 0:
        raise ScriptedFailure("timeout", "too long", {"partial": True})
    return {"double": 2 * call.input["n"]}


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway({"f": behave, "constant": {"reward": 1.0}})


def test_a_function_does_what_its_script_says(gateway: ScriptedGateway) -> None:
    with Client(transport=gateway) as client:
        done = client.invoke("f", {"n": 2}, task="t", logs=True)
        failed = client.invoke("f", {"n": -1})
        assert client.invoke("constant", {}).result == {"reward": 1.0}
        with pytest.raises(NotFoundError, match="nobody"):
            client.invoke("nobody", {})
    assert (done.result, done.state, done.task, done.logs[0].text) == ({"double": 4}, "succeeded", "t", "n is 2\n")
    assert (failed.state, failed.reason, failed.result) == ("timed_out", "timeout", {"partial": True})
    assert [(call.function, dict(call.input)) for call in gateway.calls] == [
        ("f", {"n": 2}),
        ("f", {"n": -1}),
        ("constant", {}),
    ]


def test_submitted_work_runs_when_somebody_waits_for_it(gateway: ScriptedGateway) -> None:
    with Client(transport=gateway) as client:
        first, second, third = (client.submit("f", {"n": n}) for n in range(3))
        assert client.get(first.id).state == "queued"
        with pytest.raises(TimeoutError):
            client.wait(first.id, 0.0)
        assert client.wait(first.id).result == {"double": 0}
        assert [line.text for line in client.logs(second.id, follow=True)] == ["n is 1\n"]
        assert client.cancel(third.id).state == "cancelled"
        with pytest.raises(ConflictError):
            client.cancel(third.id)
        assert [each.id for each in client.list(state="succeeded")] == [second.id, first.id]
        assert [each.id for each in client.list(limit=1)] == [third.id]


def test_a_batch_has_a_verdict_for_each_call(gateway: ScriptedGateway) -> None:
    calls = [BatchCall(function="f", input={"n": 1}), BatchCall(function="nobody")]
    with Client(transport=gateway) as client:
        queued, refused = client.submit_all(calls)
        ended, _ = client.submit_all(calls, wait="all")
    assert isinstance(queued, InvocationResult) and queued.state == "queued"
    assert isinstance(ended, InvocationResult) and ended.result == {"double": 2}
    assert isinstance(refused, NotFoundError)


async def test_trajectories_keep_files_until_they_end(gateway: ScriptedGateway) -> None:
    async with AsyncClient(transport=gateway) as client:
        async with client.trajectory("a:b", function="constant", task="t") as trajectory:
            await trajectory.upload("dir/notes", "hello", mode=0o600)
            assert await trajectory.download("/workspace/dir/notes") == b"hello"
            assert [(each.path, each.mode) for each in await trajectory.list("dir")] == [
                ("/workspace/dir/notes", "600")
            ]
            assert [(each.trajectory, each.task) for each in await client.trajectories()] == [("a:b", "t")]
            with pytest.raises(NotFoundError):
                await trajectory.download("nothing")
            gateway.end_trajectory("a:b")
            with pytest.raises(TrajectoryEndedError):
                await trajectory.exec("ls")
        assert gateway.trajectories == {}


async def test_a_script_may_wait_with_an_asynchronous_client_only() -> None:
    async def wait(call: ScriptedCall) -> object:
        await asyncio.sleep(call.input.get("s", 0))
        return {"waited": True}

    async def answer(call: ScriptedCall) -> object:
        return 1

    gateway = ScriptedGateway({"wait": wait, "answer": answer})
    async with AsyncClient(transport=gateway) as client:
        assert (await client.invoke("wait", {})).result == {"waited": True}
    with Client(transport=gateway) as blocking:
        assert blocking.invoke("answer", {}).result == 1
        with pytest.raises(TypeError, match="needs an AsyncClient"):
            blocking.invoke("wait", {})


def test_what_a_script_has_no_part_in_is_not_there(gateway: ScriptedGateway) -> None:
    with Client(transport=gateway) as client:
        assert client.function("f").runtime == "handler"
        with pytest.raises(NotFoundError, match="no such path: /v1/resources"):
            client.resources()
