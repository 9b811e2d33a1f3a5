"""Lists and batches over gRPC on a real socket: the filters, cursors, verdicts and bounds that HTTP has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from tests.gateway.conftest import GatewayBench, RunningGateway, serving, until
from tests.gateway.grpc.test_grpc import call, channel, stub

__all__ = ["stub"]  # the fixture


async def ids(stub: GatewayStub, **asked: object) -> list[str]:
    """Ids of what is listed, over all messages."""
    pages = await stub.ListInvocations(pb.ListInvocationsRequest(**asked))  # type: ignore[arg-type]
    return [each.id for page in pages for each in page.invocations]


async def test_records_are_listed_with_the_filters_and_cursors_of_http(
    gateway: RunningGateway, stub: GatewayStub
) -> None:
    made = [(await stub.Invoke(call({"n": n}))).id for n in range(5)]
    await stub.Invoke(pb.InvokeRequest(function="echo", input_json=b'{"reason": "handler_error"}', task="other"))
    for params in (
        {"function": "echo", "task": "default", "limit": 2},
        {"order": "oldest", "limit": 3},
        {"since": "1m"},
    ):
        listed = (await gateway.http.get("/v1/invocations", params=params)).json()  # type: ignore[arg-type]
        (page,) = await stub.ListInvocations(pb.ListInvocationsRequest(**params))
        assert [each.id for each in page.invocations] == [each["id"] for each in listed["invocations"]]
        assert page.next_cursor == (listed["next_cursor"] or "")
        assert {each.result_json for each in page.invocations} == {b""}, "a list holds no results"
    assert await ids(stub, task="other", reason="handler_error") == await ids(stub, state="failed") != []
    assert await ids(stub, dead=False, task="default") == made[::-1]
    assert await ids(stub, until="1h") == [], "and none of what is younger than that"


async def test_all_pages_come_in_one_call_which_can_be_gone_on_with(stub: GatewayStub) -> None:
    made = [(await stub.Invoke(call({"n": n}))).id for n in range(7)]
    pages = await stub.ListInvocations(pb.ListInvocationsRequest(limit=3, order="oldest", all=True))
    assert [[each.id for each in page.invocations] for page in pages] == [made[:3], made[3:6], made[6:]]
    assert [bool(page.next_cursor) for page in pages] == [True, True, False]
    assert await ids(stub, cursor=pages[0].next_cursor, order="oldest", all=True) == made[3:]
    assert len(await stub.ListInvocations(pb.ListInvocationsRequest(limit=3))) == 1, "one page unless all are asked for"


async def test_an_odd_filter_is_refused_by_its_name(stub: GatewayStub) -> None:
    for odd in (
        {"state": "odd"},
        {"since": "soon"},
        {"cursor": "x"},
        {"limit": 1001},
        {"order": "up"},
        {"task": "../"},
    ):
        with pytest.raises(GRPCError) as refused:
            await stub.ListInvocations(pb.ListInvocationsRequest(**odd))
        assert refused.value.status is Status.INVALID_ARGUMENT
        assert next(iter(odd)) in str(refused.value.message)


async def test_trajectories_are_listed_told_and_held(gateway: RunningGateway, stub: GatewayStub) -> None:
    for name in ("a", "b", "c"):
        await stub.OpenTrajectory(pb.OpenTrajectoryRequest(trajectory=name, function="shell"))
    pages = await stub.ListTrajectories(pb.ListTrajectoriesRequest(limit=2, all=True))
    assert [[each.trajectory for each in page.trajectories] for page in pages] == [["a", "b"], ["c"]]
    (first,) = await stub.ListTrajectories(pb.ListTrajectoriesRequest(limit=2))
    (rest,) = await stub.ListTrajectories(pb.ListTrajectoriesRequest(cursor=first.next_cursor))
    assert [each.trajectory for each in rest.trajectories] == ["c"]
    gone = await stub.RenewLeases(pb.RenewLeasesRequest(trajectories=["a", "other"], lease_s=30))
    assert list(gone.gone) == ["other"]
    told = orjson.loads((await stub.GetTrajectory(pb.GetTrajectoryRequest(trajectory="a"))).json)
    http = (await gateway.http.get("/v1/trajectories/a")).json()
    assert told.keys() == http.keys() and told["sandbox"] == http["sandbox"]
    assert 0 < told["lease_left_s"] <= 30
    for odd, status in (
        (stub.GetTrajectory(pb.GetTrajectoryRequest(trajectory="other")), Status.NOT_FOUND),
        (stub.RenewLeases(pb.RenewLeasesRequest(trajectories=["a"], lease_s=86401)), Status.INVALID_ARGUMENT),
        (stub.RenewLeases(pb.RenewLeasesRequest(trajectories=["a"] * 1001)), Status.INVALID_ARGUMENT),
    ):
        with pytest.raises(GRPCError) as refused:
            await odd
        assert refused.value.status is status


async def test_what_waits_is_listed_in_order_of_service(gateway: RunningGateway, stub: GatewayStub) -> None:
    made = [(await stub.Submit(call({"hangs": True}))).id for _ in range(7)]
    await gateway.executing(made[0])
    waiting = [each for each in made if each not in gateway.runtime.running]
    pages = [orjson.loads(page.json) for page in await stub.ListQueue(pb.ListQueueRequest(limit=2, all=True))]
    listed = (await gateway.http.get("/v1/queue")).json()
    assert [each["id"] for page in pages for each in page["queue"]] == [each["id"] for each in listed["queue"]]
    assert [each["id"] for each in listed["queue"]] == waiting != []
    assert len(pages) == (len(waiting) + 1) // 2 and pages[-1]["next_cursor"] is None


# --- batches and dead letters


def batch(*calls: pb.InvokeRequest, wait: str = "", timeout_s: float = 0.0) -> pb.InvokeBatchRequest:
    return pb.InvokeBatchRequest(calls=calls, wait=wait, timeout_s=timeout_s)


async def test_each_call_of_a_batch_has_its_own_verdict(stub: GatewayStub) -> None:
    verdicts = await stub.InvokeBatch(
        batch(
            call({"n": 1}),
            pb.InvokeRequest(function="nope"),
            pb.InvokeRequest(function="echo", input_json=b"[]"),
            pb.InvokeRequest(function="echo", timeout_s=-1),
            pb.InvokeRequest(function="echo", callback_url="http://elsewhere/"),
            pb.InvokeRequest(function="shell", input_json=b"{}", trajectory="gone", living=True),
            pb.InvokeRequest(function="echo", input_json=b'{"reason": "handler_error"}', idempotency_key="k"),
            wait="all",
        )
    )
    assert [each.index for each in verdicts] == list(range(7))
    problems = {each.index: each.problem for each in verdicts if each.WhichOneof("verdict") == "problem"}
    assert {index: (Status(each.status), each.code) for index, each in problems.items()} == {
        1: (Status.NOT_FOUND, "not_found"),
        2: (Status.INVALID_ARGUMENT, "invalid_input"),
        3: (Status.INVALID_ARGUMENT, "invalid_input"),
        4: (Status.INVALID_ARGUMENT, "invalid_input"),
        5: (Status.FAILED_PRECONDITION, "trajectory_ended"),
    }
    assert orjson.loads(problems[3].json)["errors"] == {"path": "timeout_s"}
    assert orjson.loads(verdicts[0].invocation.result_json) == {"n": 1}
    assert (verdicts[6].invocation.reason, verdicts[6].replayed) == ("handler_error", False)
    again = pb.InvokeRequest(function="echo", input_json=b'{"reason": "handler_error"}', idempotency_key="k")
    (known,) = await stub.InvokeBatch(batch(again))
    assert (known.replayed, known.invocation.id) == (True, verdicts[6].invocation.id)


async def test_a_batch_may_wait_for_its_first_end_or_for_none(stub: GatewayStub) -> None:
    # One action for all batches: two would hold both cores of a small machine, and the call beside them would wait.
    hangs = pb.InvokeRequest(function="echo", input_json=b'{"hangs": true}', idempotency_key="hangs")
    none = await stub.InvokeBatch(batch(hangs))
    assert [each.invocation.state for each in none] in (["queued"], ["running"])
    any_of = await stub.InvokeBatch(batch(hangs, call({"n": 2}), wait="any"))
    assert [each.invocation.state == "succeeded" for each in any_of] == [False, True]
    timed = await stub.InvokeBatch(batch(hangs, wait="all", timeout_s=0.01))
    assert timed[0].invocation.state != "succeeded"
    with pytest.raises(GRPCError) as odd:
        await stub.InvokeBatch(batch(wait="some"))
    assert odd.value.status is Status.INVALID_ARGUMENT
    assert await stub.InvokeBatch(batch(wait="all")) == []


async def test_a_batch_has_its_bound(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"batch_max": 2})) as gateway, channel(gateway) as opened:
        stub = GatewayStub(opened)
        assert len(await stub.InvokeBatch(batch(call({}), call({})))) == 2
        with pytest.raises(GRPCError, match=r"server\.batch_max") as large:
            await stub.InvokeBatch(batch(call({}), call({}), call({})))
        assert large.value.status is Status.RESOURCE_EXHAUSTED


async def test_a_caller_that_goes_leaves_its_batch_which_is_durable(gateway: RunningGateway, stub: GatewayStub) -> None:
    waiting = asyncio.create_task(stub.InvokeBatch(batch(call({"held": True}), wait="all")))
    await until(lambda: bool(gateway.runtime.running))
    invocation_id = next(iter(gateway.runtime.running))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    gateway.runtime.finish(invocation_id)
    assert (await stub.Wait(pb.WaitRequest(id=invocation_id))).state == "succeeded"


async def test_a_dead_letter_is_sent_again_once_or_let_go_of(stub: GatewayStub) -> None:
    fails = [call({"reason": "handler_error", "n": n}) for n in range(3)]
    dead = [each.invocation.id for each in await stub.InvokeBatch(batch(*fails, wait="all"))]
    assert await ids(stub, dead=True) == dead[::-1]
    again = await stub.RedriveDeadLetter(pb.RedriveDeadLetterRequest(id=dead[0]))
    assert again.id not in dead
    with pytest.raises(GRPCError) as twice:
        await stub.RedriveDeadLetter(pb.RedriveDeadLetterRequest(id=dead[0]))
    assert twice.value.status is Status.FAILED_PRECONDITION
    assert (await stub.PurgeDeadLetter(pb.PurgeDeadLetterRequest(id=dead[1]))).purged == 1
    await stub.Wait(pb.WaitRequest(id=again.id))
    assert (await stub.PurgeDeadLetters(pb.PurgeDeadLettersRequest(function="shell"))).purged == 0
    assert (await stub.PurgeDeadLetters(pb.PurgeDeadLettersRequest())).purged == 2
    assert await ids(stub, dead=True) == []
