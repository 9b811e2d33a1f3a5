"""The door on loopback: what a web page, another user and a token of less may do, and that the rest stays shut."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.app import App
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving

CALL = "/v1/functions/echo/invocations"
JSON = {"Content-Type": "application/json"}


def stranger(gateway: RunningGateway) -> httpx.AsyncClient:
    """A client that knows the address and nothing else."""
    return httpx.AsyncClient(base_url=gateway.http.base_url, timeout=DEADLINE_S)


def key_of(app: App) -> str:
    return app.api.session.key


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway as it is by default, with the tokens that it has written."""
    async with serving(GatewayBench(tmp_path, server={"auth": "token"})) as running:
        yield running


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


@pytest.mark.parametrize(("method", "headers"), PAGES)
async def test_without_tokens_a_web_page_still_gets_nothing(
    gateway: RunningGateway, method: str, headers: dict[str, str]
) -> None:
    path = CALL if method == "POST" else "/v1/functions"
    async with stranger(gateway) as http:
        refused = await http.request(method, path, content=b"{}" if method == "POST" else b"", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert "execute" not in [verb for verb, _ in gateway.runtime.seen]


async def test_without_tokens_a_body_that_does_not_say_what_it_is_is_refused(gateway: RunningGateway) -> None:
    async with stranger(gateway) as http:
        request = http.build_request("POST", CALL, content=b"{}")
        assert "content-type" not in request.headers
        assert (await http.send(request)).status_code == 403


async def test_without_tokens_programs_of_this_machine_do_everything(gateway: RunningGateway) -> None:
    port = gateway.app.http_port
    async with stranger(gateway) as http:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", "[::1]:1", "127.8.8.8"):
            answer = await http.post(CALL, json={}, headers={"Host": host})
            assert answer.status_code == 200, host
        own = {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}", "Sec-Fetch-Site": "same-origin"}
        assert (await http.post(CALL, json={}, headers=own)).status_code == 200
        assert (await http.get("/")).status_code == 200


async def test_the_key_opens_the_page_once_and_becomes_a_cookie(guarded: RunningGateway) -> None:
    async with stranger(guarded) as http:
        opened = await http.get("/", params={"key": key_of(guarded.app)})
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"].lower()
        for wanted in ("httponly", "samesite=strict", "path=/"):
            assert wanted in cookie
        page = await http.get("/")  # the client keeps the cookie, as a browser would
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        for path in re.findall(r'href="([^"]+)"', page.text):
            assert (await http.get(path)).status_code == 200, path
    async with stranger(guarded) as late:
        typed = await late.get("/ui")
        assert (typed.status_code, typed.headers["location"]) == (303, "/ui/now"), "what somebody types leads on"
        assert (await late.get("/", params={"key": key_of(guarded.app)})).status_code == 401


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
