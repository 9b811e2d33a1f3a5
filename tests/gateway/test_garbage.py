"""What a request brought is let go of with its answer, not when the collector comes: an overload would come first."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.http.server import BoundedResets, HttpConnection, NamedStatuses
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving, until
from tests.gateway.grpc.peer import framed, head, peer
from tests.gateway.http.test_odd_names import ask

BALLAST = "ballast " * 1000
FULL = {"full": function("full", max_queued=0)}
#: Hypercorn's connection and its protocol hold each other until it is closed.
CONNECTION = (HttpConnection, NamedStatuses, BoundedResets)


@pytest.fixture
def collector() -> Iterator[None]:
    """A collector that comes when it is called, and keeps what it finds; what was there before is none of its work."""
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()
    gc.enable()


def circles() -> list[str]:
    """What is in a circle by now and is our own, or holds a request's body."""
    gc.garbage.clear()
    gc.collect()
    holders = [
        type(each).__qualname__
        for each in gc.garbage
        for held in gc.get_referents(each)
        if isinstance(held, bytes | str | bytearray) and len(held) >= len(BALLAST)
    ]
    kinds = [type(each) for each in gc.garbage if type(each) not in CONNECTION]
    ours = [kind.__qualname__ for kind in kinds if kind.__module__.startswith(("gateway.", "manager.", "runtimes."))]
    gc.garbage.clear()
    return holders + ours


async def post(
    gateway: RunningGateway, path: str, body: object, header: str = "X-Unheard-Of: 1", verb: str = "POST"
) -> int:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await ask(gateway, f"{verb} /v1/{path} HTTP/1.1\r\n{header}\r\n".encode(), sent)
    return answer.status


@pytest.mark.slow
async def test_no_answer_leaves_its_request_in_a_circle(tmp_path: Path, collector: None) -> None:
    given = {"x": BALLAST}
    calls = [{"function": "echo", "input": given}, {"function": "full", "input": given}, {"function": "nope"}]
    async with serving(GatewayBench(tmp_path, functions=FULL)) as gateway:
        circles()
        for statuses, path, body, header in (
            ({200}, "functions/echo/invocations", given, "Idempotency-Key: k"),
            ({200, 202}, "functions/echo/invocations?mode=async&wait=5s", given, ""),
            ({200}, "functions/echo/invocations?mode=stream", given, ""),
            ({429}, "functions/full/invocations", given, ""),
            ({429}, "functions/full/invocations?mode=async", given, ""),
            ({404}, "functions/nope/invocations", given, ""),
            ({422}, "functions/strict/invocations", given, ""),
            ({422}, "functions/echo/invocations", BALLAST.encode(), ""),
            ({422}, "functions/echo/invocations", given | {"y": 1}, "Idempotency-Key: k"),
            ({422}, "functions/echo/invocations", given, "X-Task: a b"),
            ({502}, "functions/echo/invocations", given | {"reason": "upstream"}, ""),
            ({504}, "functions/short/invocations", given | {"hangs": True}, ""),
            ({200}, "invocations:batch?wait=any", {"calls": calls}, ""),
        ):
            status = await post(gateway, path, body, header or "X-Unheard-Of: 1")
            assert status in statuses, (path, status)
            await gateway.app.store.commit()
            await until(lambda: gateway.app.connections["http"].open == 0)
            assert circles() == [], (status, path)
        assert await post(gateway, "trajectories/t/files/x", BALLAST.encode(), verb="PUT") == 404
        assert circles() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["echo", "full", "nope", "strict"])
async def test_no_rpc_leaves_its_request_in_a_circle(tmp_path: Path, collector: None, name: str) -> None:
    request = pb.InvokeRequest(function=name, input_json=json.dumps({"x": BALLAST}).encode())
    async with serving(GatewayBench(tmp_path, functions=FULL)) as gateway:
        async with peer(gateway) as opened:
            await opened.ask(head(), framed(request.SerializeToString()))
        await until(lambda: gateway.app.connections["grpc"].open == 0)
        assert circles() == []
