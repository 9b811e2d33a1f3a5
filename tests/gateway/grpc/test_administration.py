"""What the gateway has and how it stands, over gRPC on a real socket, and who may change it."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from runtimes.sandbox.provider import ProviderSettings
from tests.gateway.conftest import GatewayBench, RunningGateway, serving
from tests.gateway.grpc.test_grpc import channel, stub

__all__ = ["stub"]  # the fixture
EXEC = {"runtime": "exec", "timeout": "30s"}
IMAGE = "tangram-base:bookworm"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def put(definition: object, **more: object) -> pb.PutFunctionRequest:
    return pb.PutFunctionRequest(name="mine", definition_json=orjson.dumps(definition), **more)  # type: ignore[arg-type]


async def test_a_function_is_put_told_and_removed(gateway: RunningGateway, stub: GatewayStub) -> None:
    planned = orjson.loads((await stub.PutFunction(put(EXEC, dry_run=True))).json)
    assert (planned["added"], planned["applied"]) == (["mine"], False)
    await stub.PutFunction(put(EXEC))
    changed = orjson.loads((await stub.PutFunction(put(EXEC | {"timeout": "1m"}))).json)
    assert changed["changed"] == {"mine": ["timeout_s"]}
    told = await stub.GetFunction(pb.GetFunctionRequest(name="mine"))
    assert (told.name, told.runtime) == ("mine", "exec")
    assert orjson.loads(told.json) == (await gateway.http.get("/v1/functions/mine")).json()
    assert "changes" in orjson.loads(told.json)
    removed = orjson.loads((await stub.RemoveFunction(pb.RemoveFunctionRequest(name="mine"))).json)
    assert removed["removed"] == ["mine"]


async def test_a_handlers_files_come_with_it(gateway: RunningGateway, stub: GatewayStub) -> None:
    source = "def reward(event, context):\n    return {}\n"
    handler = {"runtime": "handler", "handler": "mine:reward"}
    await stub.PutFunction(put(handler, sources={"mine.py": source}))
    assert "mine" in [each.name for each in (await stub.ListFunctions(pb.ListFunctionsRequest())).functions]
    for odd, status in (
        (stub.PutFunction(put(handler, sources={"../mine.py": source})), Status.INVALID_ARGUMENT),
        (stub.PutFunction(put({"runtim": "exec"})), Status.INVALID_ARGUMENT),
        (stub.PutFunction(pb.PutFunctionRequest(name="mine", definition_json=b"[]")), Status.INVALID_ARGUMENT),
        (stub.PutFunction(pb.PutFunctionRequest(name="../x", definition_json=b"{}")), Status.INVALID_ARGUMENT),
        (stub.GetFunction(pb.GetFunctionRequest(name="nope")), Status.NOT_FOUND),
        (stub.RemoveFunction(pb.RemoveFunctionRequest(name="echo")), Status.FAILED_PRECONDITION),
    ):
        with pytest.raises(GRPCError) as refused:
            await odd
        assert refused.value.status is status


async def test_the_state_is_told_as_on_http(gateway: RunningGateway, stub: GatewayStub) -> None:
    await stub.Invoke(pb.InvokeRequest(function="echo", task="math"))
    resources = orjson.loads((await stub.GetResources(pb.GetResourcesRequest())).json)
    assert resources.keys() == (await gateway.http.get("/v1/resources")).json().keys()
    activity = orjson.loads((await stub.GetActivity(pb.GetActivityRequest())).json)
    assert activity.keys() == (await gateway.http.get("/v1/activity")).json().keys()
    tasks = {each.task: orjson.loads(each.json) for each in (await stub.ListTasks(pb.ListTasksRequest())).tasks}
    assert tasks.keys() == {each["task"] for each in (await gateway.http.get("/v1/tasks")).json()["tasks"]}
    assert tasks["math"]["task"] == "math"
    nodes = await stub.ListNodes(pb.ListNodesRequest())
    (http,) = (await gateway.http.get("/v1/nodes")).json()["nodes"]
    (node,) = nodes.nodes
    assert (node.node, node.state) == (http["node"], http["state"]) == ("local", "ready")
    assert orjson.loads(node.json).keys() == http.keys()
    assert len(orjson.loads(nodes.json)["nodes"]) == 1
    for odd, status in (
        (stub.DrainNode(pb.DrainNodeRequest(node="local")), Status.UNIMPLEMENTED),
        (stub.DrainNode(pb.DrainNodeRequest(node="../")), Status.INVALID_ARGUMENT),
        (stub.IssueTicket(pb.IssueTicketRequest(node="n1")), Status.UNIMPLEMENTED),
    ):
        with pytest.raises(GRPCError) as refused:
            await odd
        assert refused.value.status is status, refused.value


async def test_sandboxes_without_images_have_none_to_list(stub: GatewayStub) -> None:
    for work in (
        stub.ListImages(pb.ListImagesRequest()),
        stub.PullImages(pb.PullImagesRequest(images=["debian:bookworm"])),
    ):
        with pytest.raises(GRPCError, match="no images") as refused:
            await work
        assert refused.value.status is Status.UNIMPLEMENTED


@pytest.mark.slow
@pytest.mark.docker
async def test_images_are_listed_and_pulled_ahead(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, sandboxes=ProviderSettings(kind="container"))
    async with serving(bench) as gateway, channel(gateway) as opened:
        stub = GatewayStub(opened)
        parts = await stub.ListImages(pb.ListImagesRequest())
        assert IMAGE in [each.image for part in parts for each in part.images]
        (pulled,) = await stub.PullImages(pb.PullImagesRequest(images=[IMAGE], wait_s=5))
        assert [(each.image, each.state) for each in pulled.images] == [(IMAGE, "present")]
        with pytest.raises(GRPCError) as refused:
            await stub.PullImages(pb.PullImagesRequest(images=["../x"]))
        assert refused.value.status is Status.INVALID_ARGUMENT


async def test_readiness_and_health_say_when_no_work_is_taken(gateway: RunningGateway) -> None:
    async with channel(gateway) as opened:
        stub, health = GatewayStub(opened), HealthStub(opened)
        assert (await health.Check(HealthCheckRequest())).status == SERVING
        async with health.Watch.open() as watching:
            await watching.send_message(HealthCheckRequest(service="tangram.v1.Gateway"), end=True)
            first = await watching.recv_message()
            assert first is not None and first.status == SERVING
            gateway.app.admission.draining = True
            second = await watching.recv_message()  # within a second
            assert second is not None and second.status == NOT_SERVING
            await watching.cancel()
        assert (await health.Check(HealthCheckRequest())).status == NOT_SERVING
        told = await stub.GetReadiness(pb.GetReadinessRequest())
        assert (told.ready, told.status) == (False, "draining")
        assert orjson.loads(told.json) == (await gateway.http.get("/readyz")).json()
        gateway.app.admission.draining = False
        assert (await stub.GetReadiness(pb.GetReadinessRequest())).ready
