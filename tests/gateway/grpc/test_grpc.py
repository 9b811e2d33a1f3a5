"""The gRPC door, with a real client on a real socket."""

from __future__ import annotations

import asyncio
import filecmp
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from grpclib.client import Channel
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest
from grpclib.reflection.v1.reflection_grpc import ServerReflectionStub
from grpclib.reflection.v1.reflection_pb2 import ServerReflectionRequest

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until

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


async def test_invoke_answers_with_the_end(stub: GatewayStub) -> None:
    ended = await stub.Invoke(call({"a": 1}))
    assert (ended.state, orjson.loads(ended.result_json)) == ("succeeded", {"a": 1})
    assert dict(ended.units) == {"cpu": 1}
    record = orjson.loads(ended.record_json)
    assert record["act_ms"] == pytest.approx(ended.queue_ms + ended.overhead_ms + ended.execution_ms, abs=0.01)


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


async def test_a_call_that_is_cancelled_takes_its_invocation_with_it(
    gateway: RunningGateway, stub: GatewayStub
) -> None:
    task = asyncio.create_task(stub.Invoke(call({"hangs": True})))
    await until(lambda: bool(gateway.runtime.running))
    invocation_id = next(iter(gateway.runtime.running))
    task.cancel()
    await until(lambda: not gateway.runtime.running)
    assert (await stub.Wait(pb.WaitRequest(id=invocation_id))).state == "cancelled"


async def test_functions_are_listed_and_a_configuration_is_planned(stub: GatewayStub) -> None:
    listed = await stub.ListFunctions(pb.ListFunctionsRequest())
    assert "echo" in [function.name for function in listed.functions]
    document = b"version: 1\nfunctions:\n  fresh: {runtime: exec, cost: {cpu: 1}}\n"
    planned = await stub.ApplyConfig(pb.ApplyConfigRequest(document=document, dry_run=True))
    assert orjson.loads(planned.json)["added"] == ["fresh"]


async def test_steps_are_told_named_and_listed(stub: GatewayStub) -> None:
    told = await stub.TellStep(pb.TellStepRequest(task="math", step=0, expected=3))
    assert orjson.loads(told.json)["expected"] == 3
    await stub.Invoke(pb.InvokeRequest(function="echo", task="math", step=0))
    await stub.Invoke(pb.InvokeRequest(function="echo", task="math"))
    await stub.OpenTrajectory(pb.OpenTrajectoryRequest(trajectory="t", function="echo", task="math", step=0))
    (step,) = (await stub.ListSteps(pb.ListStepsRequest(task="math"))).steps
    shown = orjson.loads(step.json)
    assert (step.step, shown["living"], shown["ended"]) == (0, 1, 1)
    for odd in (pb.TellStepRequest(step=-1, expected=1), pb.TellStepRequest(step=1)):
        with pytest.raises(GRPCError) as refused:
            await stub.TellStep(odd)
        assert refused.value.status is Status.INVALID_ARGUMENT


async def test_health_and_reflection_are_served(gateway: RunningGateway) -> None:
    async with channel(gateway) as opened:
        health = await HealthStub(opened).Check(HealthCheckRequest(service="tangram.v1.Gateway"))
        assert health.status == 1
        answers = await ServerReflectionStub(opened).ServerReflectionInfo([ServerReflectionRequest(list_services="")])
        names = [service.name for service in answers[0].list_services_response.service]
    assert "tangram.v1.Gateway" in names


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


async def test_a_call_with_a_known_key_says_that_it_ran_nothing(stub: GatewayStub) -> None:
    request = pb.InvokeRequest(function="echo", input_json=b"{}", idempotency_key="once")
    for expected in (None, "true"):
        async with stub.Invoke.open() as opened:
            await opened.send_message(request, end=True)
            assert (await opened.recv_message()) is not None
            await opened.recv_trailing_metadata()
            assert opened.initial_metadata is not None
            assert opened.initial_metadata.get("tangram-idempotent-replay") == expected


async def test_random_bytes_are_an_error_and_the_gateway_lives_on(gateway: RunningGateway, stub: GatewayStub) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.grpc_port)
    writer.write(bytes(range(256)) * 16)
    await reader.read()
    writer.close()
    assert (await stub.Invoke(call({}))).state == "succeeded"


def test_the_generated_files_are_what_the_proto_makes(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "generate-grpc", tmp_path], check=True, capture_output=True)
    committed, made = ROOT / "gateway/grpc/generated", tmp_path / "gateway/grpc/generated"
    names = sorted(path.name for path in made.iterdir())
    assert names == ["tangram_grpc.py", "tangram_pb2.py", "tangram_pb2.pyi"]
    assert filecmp.cmpfiles(committed, made, names, shallow=False) == (names, [], [])


class Raw:
    """A message whose bytes are what they are."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf names it so
        return self._data


async def test_bytes_that_are_no_grpc_close_their_own_connection_only(
    gateway: RunningGateway, stub: GatewayStub
) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    frames = [b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\xff\xff\xff\xff", b"\xff" * 9, bytes(range(256)) * 8]
    for sent in (
        b"\x00\xff" * 400,
        b"GET / HTTP/1.1\r\n\r\n",
        preface + b"\x00" * 9,
        *(preface + each for each in frames),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.grpc_port)
        writer.write(sent)
        writer.write_eof()
        await asyncio.wait_for(reader.read(-1), DEADLINE_S)
        writer.close()
    assert (await stub.Invoke(call({"n": 1}))).state == "succeeded"


@pytest.mark.parametrize("message", [b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256))])
async def test_a_message_that_cannot_be_read_is_a_status(gateway: RunningGateway, message: bytes) -> None:
    async with channel(gateway) as opened:
        method = "/tangram.v1.Gateway/Invoke"
        async with opened.request(method, Cardinality.UNARY_UNARY, Raw, pb.Invocation) as stream:
            await stream.send_message(Raw(message), end=True)
            with pytest.raises(GRPCError):
                await stream.recv_message()
                await stream.recv_trailing_metadata()
    assert gateway.app.invocations.living == ()
