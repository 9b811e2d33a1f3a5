"""The gRPC service, with a real client on a real socket: each method is an operation of HTTP."""

from __future__ import annotations

import filecmp
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from google.protobuf.descriptor import Descriptor
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpclib.reflection.v1.reflection_grpc import ServerReflectionStub
from grpclib.reflection.v1.reflection_pb2 import ServerReflectionRequest

from gateway.grpc.generated import tangram_pb2
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from gateway.grpc.server import SERVICE
from gateway.http.app import HttpApp
from tests.gateway.conftest import GatewayBench, RunningGateway, serving
from tests.gateway.grpc.peer import framed, head, peer

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
#: operationId of HTTP -> its methods.
METHODS: Mapping[str, tuple[str, ...]] = {
    "invoke": ("Invoke", "InvokeStream", "Submit", "Wait"),
    "getInvocation": ("Get", "Wait"),
    "getLogs": ("TailLogs",),
    "cancelInvocation": ("Cancel",),
    "invokeBatch": ("InvokeBatch",),
    "openTrajectory": ("OpenTrajectory",),
    "endTrajectory": ("EndTrajectory",),
    "putFileAt": ("WriteFile",),
    "getFileAt": ("ReadFile",),
}
#: What is called otherwise here: parameter of HTTP -> field.
RENAMED = {
    "expect": "living",
    "key": "idempotency_key",
    "max_age": "max_age_s",
    "on_disconnect": "detached",
    "timeout": "timeout_s",
}
#: Choices of HTTP that are methods of their own (``mode``), waits in seconds, or of HTTP alone.
OWN_WAY = {
    "invoke": {"mode", "wait"},
    "getInvocation": {"wait"},
    "getFileAt": {"list"},
    "getLogs": {"last_event_id"},
}

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def channel(gateway: RunningGateway) -> AsyncIterator[Channel]:
    opened = Channel("127.0.0.1", gateway.app.grpc_port)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
async def stub(gateway: RunningGateway) -> AsyncIterator[GatewayStub]:
    async with channel(gateway) as opened:
        yield GatewayStub(opened)


def call(body: object) -> pb.InvokeRequest:
    return pb.InvokeRequest(function="echo", input_json=orjson.dumps(body))


async def test_the_work_of_the_function_failing_is_an_answer_and_the_rest_a_status(stub: GatewayStub) -> None:
    ended = await stub.Invoke(call({"reason": "handler_error", "message": "why"}))
    assert (ended.state, ended.reason, ended.message) == ("failed", "handler_error", "why")
    with pytest.raises(GRPCError) as lost:
        await stub.Invoke(call({"reason": "environment_lost"}))
    assert lost.value.status is Status.ABORTED


async def test_the_same_table_names_every_refusal(stub: GatewayStub) -> None:
    for request, status in (
        (pb.InvokeRequest(function="nope"), Status.NOT_FOUND),
        (pb.InvokeRequest(function="echo", input_json=b"{"), Status.INVALID_ARGUMENT),
        (pb.InvokeRequest(function="echo", trajectory="../x"), Status.INVALID_ARGUMENT),
        (pb.InvokeRequest(function="echo", timeout_s=-1), Status.INVALID_ARGUMENT),
        (pb.InvokeRequest(function="echo", timeout_s=float("nan")), Status.INVALID_ARGUMENT),
    ):
        with pytest.raises(GRPCError) as refused:
            await stub.Invoke(request)
        assert refused.value.status is status
    with pytest.raises(GRPCError) as unknown:
        await stub.Get(pb.GetRequest(id="00000000001-000000000000"))
    assert unknown.value.status is Status.NOT_FOUND


async def test_submit_wait_cancel_and_get(gateway: RunningGateway, stub: GatewayStub) -> None:
    accepted = await stub.Submit(call({"hangs": True}))
    await gateway.executing(accepted.id)
    assert (await stub.Wait(pb.WaitRequest(id=accepted.id, timeout_s=0.01))).state == "running"
    with pytest.raises(GRPCError, match=r"timeout_s is 1e\+09, not more than 0 s and less than 315360000 s"):
        await stub.Wait(pb.WaitRequest(id=accepted.id, timeout_s=1e9))
    assert (await stub.Cancel(pb.CancelRequest(id=accepted.id))).state == "cancelled"
    assert (await stub.Get(pb.GetRequest(id=accepted.id))).reason == "cancelled"
    with pytest.raises(GRPCError) as again:
        await stub.Cancel(pb.CancelRequest(id=accepted.id))
    assert again.value.status is Status.FAILED_PRECONDITION


async def test_a_stream_sends_the_log_before_the_end(gateway: RunningGateway, stub: GatewayStub) -> None:
    async with stub.InvokeStream.open() as stream:
        await stream.send_message(call({"held": True, "log": "hello"}), end=True)
        accepted = await stream.recv_message()
        line = await stream.recv_message()
        assert accepted is not None
        assert line is not None
        assert line.log.data == "hello"
        gateway.runtime.finish(accepted.accepted.id)
        ended = await stream.recv_message()
        assert ended is not None
        assert ended.ended.state == "succeeded"


async def test_logs_are_tailed_from_an_offset_to_eof(stub: GatewayStub) -> None:
    ended = await stub.Invoke(call({"log": "x" * 20_000}))
    records = await stub.TailLogs(pb.TailLogsRequest(id=ended.id, offset=1, follow=True))
    assert [(record.offset, record.stream) for record in records] == [(1, "stdout"), (2, "eof")]


async def test_the_token_and_the_bound_of_a_message_are_enforced(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, server={"auth": "token", "token": "s3cret", "body_limit": 1000})
    async with serving(bench) as gateway, channel(gateway) as opened:
        stub = GatewayStub(opened)
        with pytest.raises(GRPCError) as stranger:
            await stub.Invoke(call({}))
        assert stranger.value.status is Status.UNAUTHENTICATED
        metadata = {"authorization": "Bearer s3cret"}
        assert (await stub.Invoke(call({}), metadata=metadata)).state == "succeeded"
        with pytest.raises(GRPCError) as large:
            await stub.Invoke(call({"x": "y" * 100_000}), metadata=metadata)
        assert large.value.status is Status.RESOURCE_EXHAUSTED


async def test_health_follows_the_readiness_and_reflection_names_what_is_served(gateway: RunningGateway) -> None:
    async with channel(gateway) as opened:
        health = HealthStub(opened)
        assert (await health.Check(HealthCheckRequest())).status == SERVING
        async with health.Watch.open() as watching:
            await watching.send_message(HealthCheckRequest(service="tangram.v1.Gateway"), end=True)
            first = await watching.recv_message()
            assert first is not None and first.status == SERVING
            gateway.app.admission.draining = True
            second = await watching.recv_message()  # within two seconds
            assert second is not None and second.status == NOT_SERVING
            await watching.cancel()
        assert (await health.Check(HealthCheckRequest())).status == NOT_SERVING
        gateway.app.admission.draining = False
        answers = await ServerReflectionStub(opened).ServerReflectionInfo([ServerReflectionRequest(list_services="")])
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"tangram.v1.Gateway", "grpc.health.v1.Health"} <= names


# --- batches
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


def test_the_generated_files_are_what_the_proto_makes(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "generate-grpc", tmp_path], check=True, capture_output=True)
    committed, made = ROOT / "gateway/grpc/generated", tmp_path / "gateway/grpc/generated"
    names = sorted(path.name for path in made.iterdir())
    assert names == ["tangram_grpc.py", "tangram_pb2.py", "tangram_pb2.pyi"]
    assert filecmp.cmpfiles(committed, made, names, shallow=False) == (names, [], [])


def fields(message: Descriptor) -> set[str]:
    """Names of a message's fields, and of those of the messages in it."""
    inner = [field.message_type for field in message.fields if field.message_type is not None]
    return {field.name for field in message.fields}.union(*(fields(each) for each in inner))


async def test_every_choice_that_http_gives_is_given_here(gateway: RunningGateway) -> None:
    service = tangram_pb2.DESCRIPTOR.services_by_name["Gateway"]
    assert {name for names in METHODS.values() for name in names} == set(service.methods_by_name)
    rows = {row.id: row for row in HttpApp(gateway.app.api).operations}
    missing = {}
    for id, names in METHODS.items():
        assert not rows[id].admin and not rows[id].open, "the invoke token does for it, and no other caller"
        there = set[str]().union(*(fields(service.methods_by_name[name].input_type) for name in names))
        shapes = [shape for shape in (rows[id].query, rows[id].headers) if shape is not None]
        asked = {name for shape in shapes for name in shape.__struct_fields__} - OWN_WAY.get(id, set())
        if absent := {name for name in asked if RENAMED.get(name, name) not in there}:
            missing[id] = absent
    assert missing == {}


async def status(gateway: RunningGateway, path: str, token: str | None) -> str | None:
    """The status of a call without anything in it."""
    bearer = {} if token is None else {"authorization": f"Bearer {token}"}
    async with peer(gateway) as opened:
        return (await opened.ask(head({":path": path, **bearer}), framed(b""))).status


async def test_no_method_does_anything_for_strangers(tmp_path: Path) -> None:
    stranger = str(Status.UNAUTHENTICATED.value)
    reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    async with serving(GatewayBench(tmp_path, server={"auth": "token"})) as gateway:
        tokens = gateway.app.tokens
        assert tokens is not None
        names = tangram_pb2.DESCRIPTOR.services_by_name["Gateway"].methods_by_name
        for path in (reflection, *(SERVICE + name for name in names)):
            for token in (None, "wrong"):
                assert await status(gateway, path, token) == stranger, path
            for token in (tokens.invoke, tokens.admin):
                assert await status(gateway, path, token) != stranger, path
        assert await status(gateway, "/grpc.health.v1.Health/Check", None) == "0"
