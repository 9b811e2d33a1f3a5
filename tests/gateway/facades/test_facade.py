"""Every facade: foreign calls wait instead of failing, and hostile bytes are answered in its words."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
import pytest

from gateway.errors import FaultKind
from gateway.facades.facade import STATUSES, deadline_s
from gateway.facades.mcp import RPC_CODES
from manager.action import State, UnitSet
from manager.resources.pools import ConcurrencySpec
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving, until
from tests.gateway.facades.world import doors

SLIME = {"prompt": "", "response": ""}
#: Bodies of each kind, and the seed of all of them.
COUNT, SEED = 25, 15
ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    2**60,
    1e308,
    "",
    "\u0000",
    "x" * 3000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    ["x", 1],
)
#: Words of our own that no stranger is told: a traceback, a path of a module, the token.
SECRETS = ("Traceback", 'File "', "s3cret", "gateway/", "object at 0x")
PYTHON = {"languages": {"python": "shell"}}
TOOL = {"name": "reward", "arguments": {}}
META: Mapping[str, object] = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
SINGLE = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": "reward"}
MESSAGE = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
TOOLS = {"functions": ["reward"]}
SWEREX = {"function": "shell"}
E2B = {"function": "shell"}

HELD = ScriptStep(result=1.0, held=True)

#: One of it runs, one waits, and every further one finds the queue full.
NARROW = {"narrow": function("narrow", max_queued=1, idempotent=True, cost={"door": UnitSet.fixed(1)})}


def narrow(directory: Path, **facade: object) -> GatewayBench:
    return GatewayBench(
        directory,
        functions=NARROW,
        resources={"door": ConcurrencySpec(limit=1)},
        server={"facades": {"rewards": facade}},
    )


def waiting(running: RunningGateway) -> int:
    """Calls that found the queue full."""
    assert running.app.facades.calls is not None
    return len(running.app.facades.calls.line)


async def test_calls_beyond_the_queue_wait_and_all_are_answered(tmp_path: Path) -> None:
    async with serving(narrow(tmp_path), runtime=ScriptedRuntime(lambda _: HELD)) as running:
        native = await running.invoke({}, function="narrow", mode="async")
        await running.executing(native.json()["id"])
        calls = [asyncio.create_task(running.http.post("/rm/narrow", json=SLIME)) for _ in range(8)]
        await until(lambda: waiting(running) == 7)
        refused = await running.invoke({}, function="narrow")
        assert refused.status_code == 429, "the native door refuses what the foreign one holds"
        for _ in range(9):
            await until(lambda: bool(running.runtime.running))
            (running_id,) = running.runtime.running
            running.runtime.finish(running_id)
            await until(lambda ended=running_id: ended not in running.runtime.running)  # type: ignore[misc]
        answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert [answer.json() for answer in answers] == [1.0] * 8


async def test_a_call_that_waits_too_long_is_withdrawn_and_told_to_come_again(tmp_path: Path) -> None:
    bench = narrow(tmp_path, client_timeout="100ms")
    async with serving(bench, runtime=ScriptedRuntime(lambda _: HELD)) as running:
        native = (await running.invoke({}, function="narrow", mode="async")).json()["id"]
        await running.executing(native)
        queued, full = await asyncio.gather(*(running.http.post("/rm/narrow", json=SLIME) for _ in range(2)))
        assert {queued.status_code, full.status_code} == {504}
        assert queued.headers["retry-after"] == full.headers["retry-after"] == "1"
        ids = [each for answer in (queued, full) if (each := answer.headers.get("x-invocation-id")) is not None]
        assert ids, "one of them was in the queue"
        for made in ids:
            record = (await running.http.get(f"/v1/invocations/{made}", params={"wait": "5s"})).json()
            assert (record["state"], record["started_at"]) == ("cancelled", None)
        assert waiting(running) == 0
        running.runtime.finish(native)


async def test_a_caller_that_goes_takes_its_calls_with_it(tmp_path: Path) -> None:
    async with serving(narrow(tmp_path), runtime=ScriptedRuntime(lambda _: HELD)) as running:
        address = f"http://127.0.0.1:{running.app.http_port}"
        async with httpx.AsyncClient(base_url=address, timeout=DEADLINE_S) as leaving:
            calls = [asyncio.create_task(leaving.post("/rm/narrow", json=SLIME)) for _ in range(3)]
            await until(lambda: bool(running.runtime.running) and waiting(running) == 1)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: not running.app.invocations.living and waiting(running) == 0)
        found = (await running.http.get("/v1/invocations")).json()["invocations"]
        assert {each["state"] for each in found} == {State.CANCELLED}


async def test_what_is_not_a_door_stays_the_gateways_own(tmp_path: Path) -> None:
    async with doors(tmp_path, {}, lambda _: ScriptStep(result=1.0)) as running:
        closed = await running.http.post("/rm/reward", json=SLIME)
        assert (closed.status_code, closed.headers["content-type"]) == (404, "application/problem+json")
    async with doors(tmp_path / "2", {"rewards": {}}, lambda _: ScriptStep(result=1.0)) as running:
        assert (await running.http.post("/rm/reward", json=SLIME)).status_code == 200
        assert (await running.http.get("/healthz")).json()["status"] == "ok"


async def test_a_door_with_a_port_serves_there_from_the_root(tmp_path: Path) -> None:
    async with doors(tmp_path, {"rewards": {"port": 0}}, lambda _: ScriptStep(result=1.0)) as running:
        port = running.app.facades.ports["rewards"]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
            assert (await client.post("/rm/reward", json=SLIME)).json() == 1.0
            assert (await client.get("/v1/invocations")).status_code == 404


async def test_routes_methods_and_queries_are_refused_by_name(tmp_path: Path) -> None:
    async with doors(tmp_path, {"rewards": {}}, lambda _: ScriptStep(result=1.0)) as running:
        unknown = await running.http.post("/rm/reward/more", json=SLIME)
        method = await running.http.get("/rm/reward")
        query = await running.http.post("/rm/reward?verbose=1", json=SLIME)
        function = await running.http.post("/rm/nowhere", json=SLIME)
    assert (unknown.status_code, method.status_code, query.status_code, function.status_code) == (404, 405, 422, 404)
    assert "POST /rm/{function}" in unknown.json()["error"]["message"]
    assert "verbose" in query.json()["error"]["message"]
    assert "nowhere" in function.json()["error"]["message"]


async def test_the_token_is_known_wherever_a_client_can_put_it(tmp_path: Path) -> None:
    async with doors(
        tmp_path, {"rewards": {}}, lambda _: ScriptStep(result=1.0), auth="token", token="s3cret"
    ) as running:
        for where in ("bearer", "x-api-key", "x-session-api-key", "path", "path, after", "escaped"):
            path, headers = presented(where, "s3cret")
            right = await running.http.post(path, json=SLIME, headers={"Authorization": ""} | headers)
            path, headers = presented(where, "wrong")
            wrong = await running.http.post(path, json=SLIME, headers={"Authorization": ""} | headers)
            assert (right.status_code, wrong.status_code) == (200, 401), where
            assert wrong.json()["error"]["code"] == "unauthorized"
        none = await running.http.post("/rm/reward", json=SLIME, headers={"Authorization": ""})
    assert none.status_code == 401


def presented(where: str, token: str) -> tuple[str, dict[str, str]]:
    """A path and headers that hold the token."""
    match where:
        case "bearer":
            return "/rm/reward", {"Authorization": f"Bearer {token}"}
        case "path":
            return f"/~{token}/rm/reward", {}
        case "path, after":
            return f"/rm/~{token}/reward", {}
        case "escaped":
            return "/rm/%7E" + "".join(f"%{ord(each):02x}" for each in token) + "/reward", {}
        case _:
            return "/rm/reward", {where: token}


async def test_without_a_token_a_strange_page_reaches_no_door(tmp_path: Path) -> None:
    async with doors(tmp_path, {"rewards": {}}, lambda _: ScriptStep(result=1.0)) as running:
        origin = await running.http.post("/rm/reward", json=SLIME, headers={"Origin": "http://evil.example"})
        form = await running.http.post("/rm/reward", json=SLIME, headers={"Content-Type": "text/plain"})
        host = await running.http.post("/rm/reward", json=SLIME, headers={"Host": "evil.example"})
    assert [each.status_code for each in (origin, form, host)] == [403] * 3


async def test_the_bodys_bound_holds_at_the_doors(tmp_path: Path) -> None:
    async with doors(tmp_path, {"rewards": {}}, lambda _: ScriptStep(result=1.0), body_limit="1Ki") as running:
        answer = await running.http.post("/rm/reward", json=SLIME | {"response": "x" * 2048})
    assert answer.status_code == 413


def test_every_error_has_its_status() -> None:
    assert STATUSES.keys() == RPC_CODES.keys() == set(FaultKind)


async def test_an_answer_comes_a_second_before_the_client_gives_up() -> None:
    now_s = asyncio.get_running_loop().time()
    assert deadline_s(30.0) == pytest.approx(now_s + 29.0, abs=0.5)
    assert deadline_s(1.0) == pytest.approx(now_s + 0.5, abs=0.25)


@dataclass(frozen=True, slots=True)
class FuzzedRoute:
    """One route of a door with a body that it takes."""

    door: str
    path: str
    body: Mapping[str, object]
    facade: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


ROUTES = [
    FuzzedRoute("rewards", "/rm/reward", {"prompt": "p", "response": "r", "label": "l"}),
    FuzzedRoute("rewards", "/rm/reward", {"query": ["pr"], "prompts": ["p"], "labels": ["l"]}),
    FuzzedRoute("rewards", "/retrieve/reward", {"queries": ["q"], "topk": 3, "return_scores": True}),
    FuzzedRoute("sandboxfusion", "/sandboxfusion/run_code", {"code": "", "language": "python"}, PYTHON),
    FuzzedRoute("swerex", "/swerex/shell/t/run_in_session", {"command": "true", "check": "silent"}, SWEREX),
    FuzzedRoute("swerex", "/swerex/shell/t/write_file", {"path": "p", "content": "c"}, SWEREX),
    FuzzedRoute("e2b", "/e2b/v2/sandboxes", {"templateID": "none", "timeout": 0, "metadata": {"a": "b"}}, E2B),
    FuzzedRoute("e2b", "/e2b/process.Process/SendInput", {"process": {"pid": 1}, "input": {"stdin": "YQ=="}}, E2B),
    FuzzedRoute("mcp", "/mcp", MESSAGE | {"params": TOOL}, TOOLS, {"x-trajectory-id": "mine"}),
    FuzzedRoute("mcp", "/mcp", MESSAGE | {"params": TOOL | {"_meta": META}, "more": 1}, TOOLS, SINGLE),
]


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.door} {route.path} {len(route.body)}")
async def test_odd_bodies_end_in_the_doors_own_error_and_leave_nothing(tmp_path: Path, route: FuzzedRoute) -> None:
    chance = random.Random(SEED)
    async with doors(
        tmp_path,
        {route.door: route.facade},
        lambda _: ScriptStep(result={"reward": 0.5}),
        auth="token",
        token="s3cret",
    ) as running:
        for _ in range(COUNT):
            await sound(running, route, chance.randbytes(chance.randrange(1, 300)))
            await sound(running, route, orjson.dumps(almost(route.body, chance)))
            for whole in (b"", b"{", b"[" * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300, b"\xff\xfe", b"null", b"1"):
                if chance.random() < 0.2:
                    await sound(running, route, whole)
        await left_alone(running)


async def sound(running: RunningGateway, route: FuzzedRoute, body: bytes) -> None:
    """Send it, and look at what comes back."""
    answer = await running.http.post(route.path, content=body, headers=dict(route.headers))
    assert answer.status_code != 500, (body[:200], answer.text)
    if answer.status_code == 202 and route.door == "mcp":  # a notification, which is not answered
        assert answer.content == b""
        return
    assert answer.headers["content-type"].startswith("application/json"), body[:200]
    assert answer.text.strip(), body[:200]
    orjson.loads(answer.content)
    told = "" if answer.is_success else answer.text  # a success holds what the caller's own program said
    assert not [word for word in SECRETS if word in told], (body[:200], told)


async def left_alone(running: RunningGateway) -> None:
    """Nothing lives, waits or is held."""
    await until(lambda: not running.app.invocations.living)
    assert running.app.facades.calls is not None
    assert len(running.app.facades.calls.line) == 0
    assert running.app.held.bytes == 0
    assert running.app.admission.queued == 0


def almost(body: Mapping[str, object], chance: random.Random) -> object:
    """A body with one to three things changed: a value, a key more, or one less."""
    odd = copy.deepcopy(dict(body))
    for _ in range(chance.randrange(1, 4)):
        name = chance.choice([*body, "unheard_of"])
        match chance.randrange(3):
            case 0:
                odd[name] = chance.choice(ODD)
            case 1:
                odd.pop(name, None)
            case _:
                value = odd.get(name)
                odd[name] = [value, chance.choice(ODD)] if not isinstance(value, list) else [*value, chance.choice(ODD)]
    return odd
