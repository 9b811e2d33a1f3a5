"""Access to the HTTP server on loopback, and its bounds: what is refused, before any work, with which status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.app import App
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.http.server import listen
from gateway.invocations.invocations import HeldInputs
from manager.config import TaskSpec
from manager.errors import CapacityExceeded, Conflict
from tangram import AsyncClient, ForbiddenError
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving, until
from tests.gateway.grpc.peer import framed, head, peer

CALL = "/v1/functions/echo/invocations"
JSON = {"Content-Type": "application/json"}
#: What a page of somebody else's makes a browser send without asking first, or after it has bound a name of its own
#: to 127.0.0.1; the last are forms and images.
PAGES = [
    ("POST", {"Content-Type": "text/plain", "Origin": "http://page.example"}),
    ("POST", {"Content-Type": "text/plain;charset=UTF-8", "Sec-Fetch-Site": "cross-site", "Origin": "null"}),
    ("POST", {**JSON, "Origin": "http://127.0.0.1:9"}),
    ("POST", {**JSON, "Sec-Fetch-Site": "same-site"}),
    ("POST", {**JSON, "Host": "rebound.example:8080"}),
    ("POST", {**JSON, "Host": "127.0.0.1.page.example"}),
    ("POST", {**JSON, "Host": "rebound.example", "Origin": "http://rebound.example", "Sec-Fetch-Site": "same-origin"}),
    ("POST", {"Content-Type": "application/x-www-form-urlencoded"}),
    ("POST", {"Content-Type": "multipart/form-data; boundary=x"}),
    ("POST", {"Content-Type": "text/plain"}),
    ("POST", {"Content-Type": ""}),
    ("GET", {"Sec-Fetch-Site": "cross-site"}),
    ("GET", {"Host": "rebound.example"}),
]
LARGE = {"x": "y" * 600}


def stranger(gateway: RunningGateway) -> httpx.AsyncClient:
    """A client that knows the address and nothing else."""
    return httpx.AsyncClient(base_url=gateway.http.base_url, timeout=DEADLINE_S)


def key_of(app: App) -> str:
    return app.api.pages.issue()


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway as it is by default, with the tokens that it has written."""
    async with serving(GatewayBench(tmp_path, server={"auth": "token"})) as running:
        yield running


@pytest.mark.promise("Without a token only health is answered, on loopback too.")
async def test_who_has_no_token_gets_nothing_but_its_health(guarded: RunningGateway) -> None:
    async with stranger(guarded) as http:
        refused = await http.post(CALL, json={})
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        assert "tangram token" in refused.json()["detail"]
        for path in ("/", "/v1/functions", "/v1/config", "/metrics", "/v1/trajectories/t/files/x"):
            assert (await http.get(path)).status_code == 401
        for path in ("/healthz", "/readyz"):
            assert (await http.get(path)).status_code == 200
        assert "invoke.echo" not in (await http.get("/openapi.json")).text


async def test_with_a_bearer_no_content_type_and_no_origin_matters(guarded: RunningGateway) -> None:
    assert guarded.app.tokens is not None
    bearer = {"Authorization": f"Bearer {guarded.app.tokens.invoke}", "Origin": "http://page.example"}
    async with stranger(guarded) as http:
        for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
            answer = await http.post(CALL, content=b"{}", headers={**bearer, **kind})
            assert answer.status_code == 200, answer.text


@pytest.mark.promise("The invoke token changes nothing for everybody.")
async def test_the_invoke_token_changes_nothing_for_everybody(guarded: RunningGateway) -> None:
    assert guarded.app.tokens is not None
    async with stranger(guarded) as http:
        http.headers["Authorization"] = f"Bearer {guarded.app.tokens.invoke}"
        assert (await http.post(CALL, json={})).status_code == 200
        for method, path in (("PUT", "/v1/config"), ("DELETE", "/v1/dead-letters"), ("DELETE", "/v1/dead-letters/x")):
            refused = await http.request(method, path)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), path
        http.headers["Authorization"] = f"Bearer {guarded.app.tokens.admin}"
        assert (await http.delete("/v1/dead-letters")).status_code == 200


@pytest.mark.promise("A web page of another origin gets nothing, with `auth: none` too.")
async def test_without_tokens_a_web_page_still_gets_nothing(gateway: RunningGateway) -> None:
    for method, headers in PAGES:
        path = CALL if method == "POST" else "/v1/functions"
        async with stranger(gateway) as http:
            refused = await http.request(method, path, content=b"{}" if method == "POST" else b"", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert "execute" not in [verb for verb, _ in gateway.runtime.seen]


async def test_without_tokens_programs_of_this_machine_do_everything(gateway: RunningGateway) -> None:
    port = gateway.app.http_port
    async with stranger(gateway) as http:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", "[::1]:1", "127.8.8.8"):
            answer = await http.post(CALL, json={}, headers={"Host": host})
            assert answer.status_code == 200, host
        own = {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}", "Sec-Fetch-Site": "same-origin"}
        assert (await http.post(CALL, json={}, headers=own)).status_code == 200
        assert (await http.get("/")).status_code == 303


async def test_the_key_opens_the_page_once_and_becomes_a_cookie(guarded: RunningGateway) -> None:
    key = key_of(guarded.app)
    async with stranger(guarded) as http:
        opened = await http.get("/", params={"key": key})
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"].lower()
        for wanted in ("httponly", "samesite=strict", "path=/"):
            assert wanted in cookie
        page = await http.get("/")  # the client keeps the cookie, as a browser would
        assert (page.status_code, page.headers["location"]) == (303, "/ui/now")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert (await http.get("/v1/functions")).status_code == 200
    async with stranger(guarded) as late:
        typed = await late.get("/ui")
        assert (typed.status_code, typed.headers["location"]) == (303, "/ui/now"), "what somebody types leads on"
        assert (await late.get("/", params={"key": key})).status_code == 401


async def test_the_admin_token_gets_a_key_for_each_further_browser(guarded: RunningGateway) -> None:
    tokens = guarded.app.tokens
    assert tokens is not None
    async with AsyncClient(str(guarded.http.base_url), token=tokens.admin) as client:
        addresses = [await client.page_address() for _ in range(2)]
    async with AsyncClient(str(guarded.http.base_url), token=tokens.invoke) as client:
        with pytest.raises(ForbiddenError):
            await client.page_address()
    for address in addresses:
        async with stranger(guarded) as browser:
            assert (await browser.get(address)).status_code == 303
            assert (await browser.get("/v1/tasks")).status_code == 200


async def test_with_the_cookie_only_the_page_itself_sends_anything(guarded: RunningGateway) -> None:
    own = f"http://127.0.0.1:{guarded.app.http_port}"
    async with stranger(guarded) as http:
        await http.get("/", params={"key": key_of(guarded.app)})
        assert (await http.post(CALL, json={}, headers={"Origin": own})).status_code == 200
        forged: list[dict[str, str]] = [
            {**JSON, "Origin": "http://page.example"},
            {**JSON, "Origin": "http://127.0.0.1:9"},
            {**JSON, "Origin": "null"},
            JSON,
            {"Origin": own, "Content-Type": "text/plain"},
            {"Origin": own},
            {**JSON, "Origin": own, "Sec-Fetch-Site": "same-site"},
        ]
        for headers in forged:
            refused = await http.post(CALL, content=b"{}", headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), headers
        read = await http.get("/v1/functions", headers={"Sec-Fetch-Site": "same-site"})
        assert read.status_code == 403
        wrong = await http.post(CALL, json={}, headers={"Origin": own, "Authorization": "Bearer wrong"})
        assert wrong.status_code == 401
    assert [verb for verb, _ in guarded.runtime.seen].count("execute") == 1


async def test_a_cookie_of_an_earlier_gateway_is_told_so(guarded: RunningGateway) -> None:
    async with stranger(guarded) as http:
        refused = await http.get("/v1/functions", headers={"Cookie": f"tangram-{guarded.app.http_port}=old"})
        assert (refused.status_code, "earlier gateway" in refused.text) == (401, True)


async def test_null_is_no_value_of_a_query(gateway: RunningGateway) -> None:
    for name in ("dead", "limit", "state", "reason", "since"):
        for value in ("null", "NULL"):
            refused = await gateway.http.get(f"/v1/invocations?{name}={value}")
            assert (refused.status_code, refused.json()["errors"]) == (422, {"path": name}), name


@pytest.mark.promise("An unknown query parameter is refused by name.")
async def test_what_nobody_reads_of_a_query_is_refused_by_name(gateway: RunningGateway) -> None:
    for path, name in (
        ("/v1/invocations?sate=queued", "sate"),
        ("/v1/functions?limit=3", "limit"),
        ("/healthz?x", "x"),
    ):
        refused = await gateway.http.get(path)
        assert refused.status_code == 422
        assert f"'{name}'" in refused.json()["detail"]
        assert refused.json()["errors"] == {"path": name}
    assert "state" in (await gateway.http.get("/v1/invocations?sate=queued")).json()["detail"]


async def test_one_task_does_not_take_all_trajectories(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, scheduler={"trajectories_max": 4})) as gateway:
        for n in range(3):
            assert (await gateway.invoke({}, headers={"X-Task": "a", "X-Trajectory-Id": f"a{n}"})).status_code == 200
        refused = await gateway.invoke({}, headers={"X-Task": "a", "X-Trajectory-Id": "a3"})
        opened = await gateway.http.put("/v1/trajectories/a3", json={"function": "shell", "task": "a"})
        assert (refused.status_code, opened.status_code) == (503, 503) and "share is 3" in refused.json()["detail"]
        assert (await gateway.invoke({}, headers={"X-Task": "b", "X-Trajectory-Id": "b0"})).status_code == 200
        assert (await gateway.http.delete("/v1/trajectories/a0")).status_code == 204
        assert (await gateway.invoke({}, headers={"X-Task": "a", "X-Trajectory-Id": "a3"})).status_code == 200


def test_one_task_does_not_hold_all_inputs() -> None:
    held = HeldInputs(100)
    held.take(60, "a")
    with pytest.raises(CapacityExceeded, match="share is 75"):
        held.check(20, "a")
    held.check(40, "b")
    held.give(60, "a")
    held.check(75, "a")


@pytest.mark.promise("A refusal for lack of capacity is 429 or 503 with Retry-After, and nothing was started.")
@pytest.mark.slow
async def test_ten_times_what_may_wait_is_refused_before_any_work_and_leaves_nothing_behind(tmp_path: Path) -> None:
    bounded = {"bounded": function("bounded", max_queued=16)}
    async with serving(GatewayBench(tmp_path, functions=bounded)) as gateway:
        capacity = 16 + gateway.app.node.cores
        calls = [gateway.invoke({"held": True}, function="bounded", mode="async") for _ in range(10 * capacity)]
        answers = await asyncio.gather(*calls)
        refused = [answer for answer in answers if answer.status_code == 429]
        accepted = [answer.json()["id"] for answer in answers if answer.status_code == 202]
        assert len(accepted) + len(refused) == len(answers) and 16 <= len(accepted) <= capacity
        assert all(answer.json()["code"] == "quota_exceeded" and "Retry-After" in answer.headers for answer in refused)
        assert {each.record.id for each in gateway.app.invocations.living} == set(accepted)
        assert sum((await gateway.app.store.counts()).values()) == len(accepted), "a refused call leaves no record"


async def refused(gateway: RunningGateway) -> None:
    """No door takes so much more: typed, and with a time to come back."""
    answer = await gateway.invoke(LARGE)
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "capacity_exceeded", "1")
    assert "inputs_max" in answer.json()["detail"]
    request = pb.InvokeRequest(function="echo", input_json=b'{"x": "%s"}' % (b"y" * 600))
    async with peer(gateway) as other:
        status = await other.ask(head(), framed(request.SerializeToString()))
    assert (status.status, status.headers["tangram-code"], status.headers["retry-after-s"]) == (
        "14",
        "capacity_exceeded",
        "1",
    )
    assert (await gateway.invoke({})).status_code == 200, "there is room for a small one"


async def test_undeclared_tasks_are_taken_or_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    tasks = {"small": TaskSpec(max_queued=3)}
    async with serving(GatewayBench(tmp_path / "a", tasks=tasks)) as gateway:
        assert (await gateway.invoke({}, headers={"X-Task": "smal"})).json()["task"] == "smal"
    bench = GatewayBench(tmp_path / "b", tasks=tasks, scheduler={"undeclared_tasks": "refuse"})
    async with serving(bench) as gateway:
        for task in ("small", "default"):
            assert (await gateway.invoke({}, headers={"X-Task": task})).json()["task"] == task
        refused = [
            await gateway.invoke({}, headers={"X-Task": "smal"}),
            await gateway.invoke({}, headers={"X-Task": "smal"}, mode="async"),
            await gateway.http.put("/v1/trajectories/t", json={"function": "shell", "task": "smal"}),
            await gateway.http.put("/v1/tasks/smal/steps/1", json={"expected": 4}),
        ]
        for answer in refused:
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
            assert "task 'smal' is not declared; did you mean 'small'?" in answer.json()["detail"]
        assert [each["task"] for each in (await gateway.http.get("/v1/tasks")).json()["tasks"]] == ["default", "small"]


async def test_inputs_that_live_are_bounded_in_bytes(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"inputs_max": 1000})) as gateway:
        calls = [{"function": "echo", "input": LARGE | {"held": True}}] * 3
        batch = await gateway.http.post("/v1/invocations:batch", json={"calls": calls})
        assert batch.status_code == 503, "all of it is too much while it arrives"
        held = (await gateway.invoke(LARGE | {"held": True}, mode="async")).json()["id"]
        await gateway.executing(held)
        await refused(gateway)
        gateway.runtime.finish(held)
        await gateway.http.get(f"/v1/invocations/{held}?wait=5s")
        assert (await gateway.invoke(LARGE)).status_code == 200
        assert gateway.app.held.bytes == 0


async def test_files_are_written_as_they_come_and_hold_nothing_here(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"inputs_max": 1000})) as gateway:
        assert (await gateway.http.put("/v1/trajectories/t", json={"function": "shell"})).status_code == 200
        written = await gateway.http.put("/v1/trajectories/t/files/workspace/x", content=b"x" * 100_000)
        assert (written.status_code, written.json()["size_bytes"]) == (201, 100_000)


@pytest.mark.promise("Inputs are bounded in bytes, as they arrive and while they live.")
@pytest.mark.parametrize("path", ["functions/echo/invocations", "invocations:batch"])
async def test_inputs_that_arrive_are_bounded_in_bytes(tmp_path: Path, path: str) -> None:
    async with serving(GatewayBench(tmp_path, server={"inputs_max": 1000})) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.app.http_port)
        about = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 900"
        writer.write(f"POST /v1/{path} HTTP/1.1\r\n{about}\r\n\r\n{'x' * 600}".encode())
        await until(lambda: gateway.app.held.bytes == 600)
        await refused(gateway)
        writer.transport.abort()
        await until(lambda: gateway.app.held.bytes == 0)
        assert (await gateway.invoke(LARGE)).status_code == 200


async def test_what_a_killed_gateway_left_is_held_again_and_bounds_what_is_new(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, server={"inputs_max": 1000})
    async with serving(bench) as first:
        assert first.app.node is not None
        for _ in range(first.app.node.cores):
            await first.executing((await first.invoke({"hangs": True}, mode="async")).json()["id"])
        waits = (await first.invoke(LARGE | {"held": True}, mode="async")).json()["id"]
    async with serving(bench) as second:
        await second.executing(waits)
        await refused(second)
        second.runtime.finish(waits)


def test_a_port_in_use_is_told_by_its_number_with_the_remedy() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"port {port} of 127.0.0.1 is in use; .* choose another"):
            listen("127.0.0.1", port)
