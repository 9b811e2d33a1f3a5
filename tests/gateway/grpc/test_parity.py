"""Every method is an operation of HTTP, with the same choices, and none does anything for strangers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from google.protobuf.descriptor import Descriptor
from grpclib.const import Status

from gateway.grpc.generated import tangram_pb2
from gateway.grpc.server import SERVICE
from gateway.http.app import HttpApp
from tests.gateway.conftest import GatewayBench, RunningGateway, serving
from tests.gateway.grpc.peer import framed, head, peer

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
    "openSession": ("Session",),
    "attachSession": ("Session",),
    "writeSession": ("Session",),
    "steerSession": ("Session",),
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
    "openSession": {"callback_url", "on_disconnect", "trajectory"},
}


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
