"""Every operation of HTTP is one of gRPC, with the same rights and the same choices, or is named with its reason."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from grpclib.const import Status

from gateway.grpc.generated import tangram_pb2
from gateway.grpc.server import ADMIN, OPEN, SERVICE
from gateway.http.app import HttpApp
from gateway.http.operation import Operation
from tests.gateway.conftest import GatewayBench, RunningGateway, serving
from tests.gateway.grpc.peer import framed, head, peer
from tests.house.source import ROOT

#: operationId of HTTP -> its methods.
METHODS: Mapping[str, tuple[str, ...]] = {
    "invoke": ("Invoke", "InvokeStream", "Submit", "Wait"),
    "getInvocation": ("Get", "Wait"),
    "listInvocations": ("ListInvocations",),
    "getLogs": ("TailLogs",),
    "cancelInvocation": ("Cancel",),
    "invokeBatch": ("InvokeBatch",),
    "redriveDeadLetter": ("RedriveDeadLetter",),
    "purgeDeadLetter": ("PurgeDeadLetter",),
    "purgeDeadLetters": ("PurgeDeadLetters",),
    "openTrajectory": ("OpenTrajectory",),
    "listTrajectories": ("ListTrajectories",),
    "getTrajectory": ("GetTrajectory",),
    "endTrajectory": ("EndTrajectory",),
    "putFile": ("WriteFile",),
    "putFileAt": ("WriteFile",),
    "getFile": ("ReadFile", "ListFiles"),
    "getFileAt": ("ReadFile", "ListFiles"),
    "putArchive": ("WriteArchive",),
    "getArchive": ("ReadArchive",),
    "openSession": ("Session",),
    "attachSession": ("Session",),
    "writeSession": ("Session",),
    "steerSession": ("Session",),
    "takeSnapshot": ("TakeSnapshot",),
    "forkTrajectory": ("ForkTrajectory",),
    "listSnapshots": ("ListSnapshots",),
    "removeSnapshot": ("RemoveSnapshot",),
    "listImages": ("ListImages",),
    "pullImages": ("PullImages",),
    "renewLeases": ("RenewLeases",),
    "listFunctions": ("ListFunctions",),
    "getFunction": ("GetFunction",),
    "putFunction": ("PutFunction",),
    "removeFunction": ("RemoveFunction",),
    "putConfig": ("ApplyConfig",),
    "getResources": ("GetResources",),
    "getActivity": ("GetActivity",),
    "getQueue": ("ListQueue",),
    "getReadiness": ("GetReadiness",),
    "getTasks": ("ListTasks",),
    "listSteps": ("ListSteps",),
    "putStep": ("TellStep",),
    "listNodes": ("ListNodes",),
    "drainNode": ("DrainNode",),
    "issueTicket": ("IssueTicket",),
}
#: Those that are no methods. The page of the reference gives each one's reason.
HTTP_ONLY = {"getHealth", "getMetrics", "getOpenapi", "watch"}
#: What is called otherwise here: parameter of HTTP -> field.
RENAMED = {
    "expect": "living",
    "key": "idempotency_key",
    "max_age": "max_age_s",
    "on_disconnect": "detached",
    "timeout": "timeout_s",
    "wait": "wait",
}
#: Choices of HTTP that are methods of their own (``mode``, ``list``), waits in seconds, or of HTTP alone.
OWN_WAY = {
    "invoke": {"mode", "wait"},
    "getInvocation": {"wait"},
    "pullImages": {"wait"},
    "getFile": {"list"},
    "getFileAt": {"list"},
    "getLogs": {"last_event_id"},
    "openSession": {"callback_url", "on_disconnect", "trajectory"},
}


@pytest.fixture
async def rows(gateway: RunningGateway) -> list[Operation]:
    return HttpApp(gateway.app.services).operations


def methods() -> set[str]:
    return set(tangram_pb2.DESCRIPTOR.services_by_name["Gateway"].methods_by_name)


def fields(message: Descriptor) -> set[str]:
    """Names of a message's fields, and of those of the messages in it."""
    inner = [field.message_type for field in message.fields if field.message_type is not None]
    return {field.name for field in message.fields}.union(*(fields(each) for each in inner))


async def test_every_operation_of_http_has_its_method_or_is_named(rows: list[Operation]) -> None:
    known = {row.id for row in rows}
    assert METHODS.keys() | HTTP_ONLY == known, "a new route has a method, or stands in HTTP_ONLY with its reason"
    assert not METHODS.keys() & HTTP_ONLY
    assert {name for names in METHODS.values() for name in names} == methods(), "and every method has its route"


async def test_the_reference_gives_the_reason_of_each_that_has_none(rows: list[Operation]) -> None:
    page = (ROOT / "docs/reference/grpc.md").read_text()
    there = {row.id: f"{row.method} {row.path}" for row in rows}
    (table,) = re.findall(r"\| on HTTP only \| why \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    assert set(re.findall(r"^\| `([^`]+)` \| .{10,} \|$", table, re.MULTILINE)) == {there[name] for name in HTTP_ONLY}


async def test_the_same_token_does_on_both_doors(rows: list[Operation]) -> None:
    by_id = {row.id: row for row in rows}
    assert {name for row, names in METHODS.items() for name in names if by_id[row].admin} == ADMIN
    assert {name for row, names in METHODS.items() for name in names if by_id[row].open} == OPEN


async def test_every_choice_that_http_gives_is_given_here(rows: list[Operation]) -> None:
    service = tangram_pb2.DESCRIPTOR.services_by_name["Gateway"]
    missing = {}
    for row in rows:
        if row.id not in METHODS:
            continue
        there = set[str]().union(*(fields(service.methods_by_name[name].input_type) for name in METHODS[row.id]))
        shapes = [shape for shape in (row.query, row.headers) if shape is not None]
        asked = {name for shape in shapes for name in shape.__struct_fields__} - OWN_WAY.get(row.id, set())
        if absent := {name for name in asked if RENAMED.get(name, name) not in there}:
            missing[row.id] = absent
    assert missing == {}


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with serving(GatewayBench(tmp_path, server={"auth": "token"})) as gateway:
        yield gateway


async def status(gateway: RunningGateway, method: str, token: str | None) -> str | None:
    """The status of a call without anything in it."""
    bearer = {} if token is None else {"authorization": f"Bearer {token}"}
    async with peer(gateway) as opened:
        return (await opened.ask(head({":path": SERVICE + method, **bearer}), framed(b""))).status


async def test_no_method_does_anything_for_strangers_or_more_than_the_invoke_token_may(guarded: RunningGateway) -> None:
    tokens = guarded.app.tokens
    assert tokens is not None
    stranger, denied = str(Status.UNAUTHENTICATED.value), str(Status.PERMISSION_DENIED.value)
    for method in sorted(methods()):
        assert (await status(guarded, method, None) == stranger) == (method not in OPEN), method
        assert (await status(guarded, method, "wrong") == stranger) == (method not in OPEN), method
        assert (await status(guarded, method, tokens.invoke) == denied) == (method in ADMIN), method
    for method in sorted(ADMIN - {"ApplyConfig"}):
        assert await status(guarded, method, tokens.admin) not in (stranger, denied), method
