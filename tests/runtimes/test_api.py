"""The api runtime against a real local server that enforces its limit: templates, connections, secrets."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import ActionFailed, InvalidConfig, InvalidInput, Reason
from manager.function import FunctionSpec, RequestSpec, RetrySpec
from runtimes.api import ApiRuntime, OriginConnections, RequestTemplate, retry_after_s
from runtimes.secrets import Secrets, redact
from scripts.quota_server import Quota, QuotaServer
from tests.listening import Answering, ThreadedServer, listening
from tests.runtimes.recorder import assert_as_declared, execution_of

SECRET = "open sesame"
DEADLINE_S = 60.0
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"

RETRY = RetrySpec(max_attempts=20, backoff_s=0.01, backoff_max_s=0.05, on_status=(429,))


@pytest.fixture
def server() -> Iterator[QuotaServer]:
    with QuotaServer(0, Quota(limit=2, period_s=0.2, concurrency=8), key=SECRET).serving() as serving:
        yield serving


@pytest.fixture
async def runtime() -> AsyncIterator[ApiRuntime]:
    runtime = ApiRuntime(Secrets(environ={"TANGRAM_SECRET_KEY": SECRET}))
    yield runtime
    await runtime.close()


def function_of(url: str, *, retry: RetrySpec | None = None, timeout_s: float = 20.0) -> FunctionSpec:
    return FunctionSpec(
        name="search",
        runtime="api",
        timeout_s=timeout_s,
        retry=retry or RetrySpec(),
        request=RequestSpec(method="GET", url=url, headers={"Authorization": "Bearer ${secret:key}"}),
    )


def search_of(server: QuotaServer, *, retry: RetrySpec | None = None, timeout_s: float = 20.0) -> FunctionSpec:
    return function_of(server.url + "/search?q={query}", retry=retry, timeout_s=timeout_s)


def search_of_url(url: str) -> FunctionSpec:
    return function_of(url + "/")


class Scripted(ThreadedServer):
    """Answers every request with the same raw head and body, and keeps the requests' heads."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(ScriptedHandler)
        self.told = status, body, headers
        self.heads: list[dict[str, str]] = []


class ScriptedHandler(Answering):
    server: Scripted

    def asked(self) -> None:
        self.server.heads.append(dict(self.headers))
        self.answer(*self.server.told)


async def test_a_call_answers_with_status_headers_and_json(server: QuotaServer, runtime: ApiRuntime) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    execution, log = execution_of(search_of(server), {"query": "config parser"}, trace=(parent, "vendor=1"))
    result = await runtime.execute(execution)
    assert_as_declared(execution.call.function, result.value)
    assert isinstance(result.value, dict)
    assert result.value["status"] == 200
    assert result.value["headers"]["content-type"] == "application/json"
    assert result.value["body"]["query"] == "config parser"
    assert "configparser" in {found["module"] for found in result.value["body"]["results"]}
    assert result.usage["attempts"] == 1
    assert execution.began_s is not None and execution.ended_s is not None
    assert "-> 200" in log.text("system")
    [request] = server.requests
    assert isinstance(request["headers"], dict)
    assert request["headers"]["Authorization"] == f"Bearer {SECRET}"
    assert (request["headers"]["traceparent"], request["headers"]["tracestate"]) == (parent, "vendor=1")


async def test_a_retry_never_comes_earlier_than_retry_after(runtime: ApiRuntime) -> None:
    with QuotaServer(0, Quota(limit=1, period_s=0.3, concurrency=1)).serving() as server:
        function = search_of(server, retry=replace(RETRY, max_attempts=2, backoff_s=0.0))
        for expected in (1, 2):
            execution, _ = execution_of(function, {"query": "x"})
            assert (await runtime.execute(execution)).usage["attempts"] == expected
        # Whether the server has already counted the last one out is its own affair.
        assert server.quota.counts() | {"running": 0} == {"served": 2, "refused": 1, "running": 0, "running_max": 1}


async def test_without_retries_a_429_is_a_quota_failure_with_its_retry_after(runtime: ApiRuntime) -> None:
    with Scripted(429, {"Retry-After": "7", "Content-Type": "text/plain"}, b"slow down") as server:
        execution, _ = execution_of(search_of_url(server.url), {})
        with pytest.raises(ActionFailed) as failure:
            await runtime.execute(execution)
    assert failure.value.reason is Reason.QUOTA
    assert failure.value.retry_after_s == 7.0
    assert isinstance(failure.value.result, dict)
    assert (failure.value.result["status"], failure.value.result["body"]) == (429, "slow down")
    assert len(server.heads) == 1


async def test_a_wait_that_the_timeout_leaves_no_room_for_is_not_waited(runtime: ApiRuntime) -> None:
    with Scripted(429, {"Retry-After": "3600"}, b"") as server:
        function = replace(search_of_url(server.url), retry=RETRY)
        with pytest.raises(ActionFailed) as failure:
            await runtime.execute(execution_of(function, {})[0])
    assert (failure.value.reason, failure.value.retry_after_s) == (Reason.QUOTA, 3600.0)
    assert len(server.heads) == 1


async def test_attempts_are_bounded_and_another_failing_status_is_upstream(runtime: ApiRuntime) -> None:
    retry = replace(RETRY, max_attempts=3, on_status=(503,))
    with Scripted(503, {}, b"") as server:
        execution, log = execution_of(replace(search_of_url(server.url), retry=retry), {})
        with pytest.raises(ActionFailed) as failure:
            await runtime.execute(execution)
    assert failure.value.reason is Reason.UPSTREAM
    assert len(server.heads) == 3
    assert failure.value.usage["attempts"] == 3
    assert "attempt 3 of 3, giving up" in log.text("system")


async def test_an_accepted_status_is_an_answer(runtime: ApiRuntime) -> None:
    with Scripted(404, {"Content-Type": "application/problem+json"}, b'{"title": "none"}') as server:
        function = search_of_url(server.url)
        assert function.request is not None
        accepting = replace(function, request=replace(function.request, accept=(404,)))
        result = await runtime.execute(execution_of(accepting, {})[0])
    assert isinstance(result.value, dict)
    assert (result.value["status"], result.value["body"]) == (404, {"title": "none"})


async def test_a_secret_shows_in_no_json_however_it_is_written(runtime: ApiRuntime) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in SECRET)
    body = f'{{"{SECRET}": 1, "deep": [{{"told": "of {escaped}"}}], "n": [10, 0.5, true, null]}}'
    with Scripted(200, {"Content-Type": "application/json"}, body.encode()) as server:
        function = search_of_url(server.url)
        result = await runtime.execute(execution_of(function, {})[0])
    assert isinstance(result.value, dict)
    assert result.value["body"] == {"[secret]": 1, "deep": [{"told": "of [secret]"}], "n": [10, 0.5, True, None]}


@pytest.mark.parametrize("body", [b'{"score": 0.', b'{"score": NaN}'])
async def test_what_is_called_json_and_is_none_is_upstreams_failure(runtime: ApiRuntime, body: bytes) -> None:
    """Whoever asks for its fields would find a text."""
    with (
        Scripted(200, {"Content-Type": "application/json"}, body) as server,
        pytest.raises(ActionFailed, match="is called application/json, and is no JSON") as failure,
    ):
        await runtime.execute(execution_of(search_of_url(server.url), {})[0])
    assert failure.value.reason is Reason.UPSTREAM
    assert failure.value.usage == {"attempts": 1, "waited_s": 0.0}
    result = failure.value.result
    assert isinstance(result, dict) and (result["status"], result["body"]) == (200, body.decode())


async def test_a_redirect_to_another_host_is_refused_and_carries_no_secret_there(runtime: ApiRuntime) -> None:
    with (
        Scripted(200, {}, b"elsewhere") as other,
        Scripted(302, {"Location": other.url + "/"}, b"") as server,
        pytest.raises(ActionFailed, match=f"redirects to another origin, {other.url}$") as failure,
    ):
        await runtime.execute(execution_of(search_of_url(server.url), {})[0])
    assert failure.value.reason is Reason.UPSTREAM
    assert other.heads == []


PLAIN = {"Content-Type": "text/plain"}


@pytest.mark.parametrize(
    ("status", "headers", "body", "reason", "told"),
    [
        (302, {"Location": "/again"}, b"", Reason.UPSTREAM, "redirects more than 5 times"),
        (200, PLAIN | {"Content-Encoding": "gzip"}, gzip.compress(bytes(2**26)), Reason.OUTPUT_LIMIT, "exceeds"),
        (200, PLAIN | {"Content-Encoding": "gzip"}, gzip.compress(bytes(10**5))[:50], Reason.UPSTREAM, "broke off"),
        (200, PLAIN | {"Content-Encoding": "gzip"}, gzip.compress(b"one") + b"two", Reason.UPSTREAM, "goes on"),
        (200, PLAIN | {"Content-Encoding": "gzip"}, b"no such thing", Reason.UPSTREAM, "is no gzip"),
        (200, PLAIN | {"Content-Encoding": "br"}, b"??", Reason.UPSTREAM, "encoded as br"),
    ],
    ids=["redirects", "too large", "cut off", "bytes behind it", "not gzip", "unknown encoding"],  # gzip has the time
)
async def test_an_answer_without_end_or_sense_is_a_typed_failure_and_bounded_as_what_it_holds(
    runtime: ApiRuntime, status: int, headers: dict[str, str], body: bytes, reason: Reason, told: str
) -> None:
    """However little of it travels: 64 MiB of zeros are 64 KiB."""
    tracemalloc.start()
    try:
        with Scripted(status, headers, body) as server, pytest.raises(ActionFailed, match=told) as failure:
            await runtime.execute(execution_of(search_of_url(server.url), {})[0])
        assert failure.value.reason is reason
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


async def test_a_packed_answer_is_read(runtime: ApiRuntime) -> None:
    with Scripted(200, {"Content-Encoding": "gzip"}, gzip.compress(b"whole " * 1000)) as server:
        result = await runtime.execute(execution_of(search_of_url(server.url), {})[0])
    assert isinstance(result.value, dict) and result.value["body"] == "whole " * 1000
    assert {name.lower(): value for name, value in server.heads[0].items()}["accept-encoding"] == "gzip"


async def test_an_answer_over_its_limit_is_a_typed_failure(runtime: ApiRuntime) -> None:
    with Scripted(200, {}, b"x" * 100_000) as server:
        function = search_of_url(server.url)
        assert function.request is not None
        small = replace(function, request=replace(function.request, response_limit_bytes=1000))
        with pytest.raises(ActionFailed, match="exceeds 1000 bytes") as failure:
            await runtime.execute(execution_of(small, {})[0])
    assert failure.value.reason is Reason.OUTPUT_LIMIT


async def test_no_connection_is_upstream(runtime: ApiRuntime) -> None:
    with Scripted(200, {}, b"") as server:
        gone = server.url
    with pytest.raises(ActionFailed, match="http://127") as failure:
        await runtime.execute(execution_of(search_of_url(gone), {})[0])
    assert failure.value.reason is Reason.UPSTREAM


async def test_cookies_of_one_call_never_reach_another(runtime: ApiRuntime) -> None:
    with Scripted(200, {"Set-Cookie": "session=1; Path=/"}, b"") as server:
        for _ in range(2):
            result = await runtime.execute(execution_of(search_of_url(server.url), {})[0])
            assert isinstance(result.value, dict) and "set-cookie" not in result.value["headers"]
    assert ["Cookie" in head for head in server.heads] == [False, False]


@pytest.mark.promise("A secret shows in no log, error or result.")
async def test_a_secret_shows_in_no_log_no_error_and_no_result(
    runtime: ApiRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with Scripted(500, {"X-Echo": SECRET}, f"you sent {SECRET}".encode()) as server:
        function = function_of(server.url + "/?key=${secret:key}")
        execution, log = execution_of(function, {})
        with pytest.raises(ActionFailed) as failure:
            await runtime.execute(execution)
    said = log.text() + caplog.text + str(failure.value) + repr(failure.value.result)
    assert "sesame" not in said
    assert "you sent [secret]" in said


async def test_a_bad_input_is_invalid_input_and_an_undefined_secret_stops_registration(
    server: QuotaServer, runtime: ApiRuntime
) -> None:
    with pytest.raises(ActionFailed) as failure:
        await runtime.execute(execution_of(search_of(server), {"q": "x"})[0])
    assert (failure.value.reason, failure.value.detail) == (Reason.INVALID_INPUT, {"path": "$.query"})
    with pytest.raises(ActionFailed) as too_long:
        await runtime.execute(execution_of(search_of(server), {"query": "x" * 100_000})[0])
    assert too_long.value.reason is Reason.INVALID_INPUT
    await runtime.prepare(search_of(server))
    with pytest.raises(InvalidConfig, match="start the gateway with TANGRAM_SECRET_OTHER"):
        await runtime.prepare(function_of("http://h/?key=${secret:other}"))
    assert len(server.requests) == 0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.25", 0.25),
        ("Fri, 20 Nov 2026 12:00:30 GMT", 30.0),
        ("Fri, 20 Nov 2026 11:00:00 GMT", 0.0),
        ("-1", None),
        ("inf", None),
        ("soon", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, datetime(2026, 11, 20, 12, 0, tzinfo=UTC)) == seconds


SECRETS = Secrets(environ={"TANGRAM_SECRET_SEARCH_KEY": "s3same/open"})

SEARCH = RequestSpec(method="GET", url="https://api.example.com:8443/v1/{place}/find?q={query}&n=5")

text = st.text(st.characters(codec="utf-8"), max_size=40)


@given(place=text.filter(lambda value: value not in (".", "..")), query=text)
def test_an_input_never_leaves_its_place_in_the_url(place: str, query: str) -> None:
    parts = urlsplit(RequestTemplate(SEARCH).render({"place": place, "query": query}, SECRETS).url)
    assert (parts.scheme, parts.netloc, parts.fragment) == ("https", "api.example.com:8443", "")
    assert [unquote(segment) for segment in parts.path.split("/")] == ["", "v1", place, "find"]
    expected = {"n": ["5"], **({"q": [query]} if query else {})}
    assert parse_qs(parts.query, strict_parsing=bool(query)) == expected or query == ""


@pytest.mark.parametrize("place", [".", ".."])
def test_a_dot_segment_is_refused(place: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        RequestTemplate(SEARCH).render({"place": place, "query": "x"}, SECRETS)
    assert refusal.value.detail == {"path": "$.place"}


@pytest.mark.parametrize("value", ["a\r\nX-Other: 1", "a\nb", "nul\0", "é"])
def test_an_input_cannot_add_a_header(value: str) -> None:
    template = RequestTemplate(RequestSpec(method="GET", url="https://h/", headers={"X-User": "u {user}"}))
    with pytest.raises(InvalidInput, match="printable ASCII") as refusal:
        template.render({"user": value}, SECRETS)
    assert refusal.value.detail == {"path": "$.user"}
    assert template.render({"user": "bob"}, SECRETS).headers == {"X-User": "u bob"}


def test_a_whole_hole_keeps_its_type_in_the_body() -> None:
    body = {"q": "{query}", "deep": [{"n": "{count}", "label": "{count} of {{all}}"}], "fixed": 3}
    template = RequestTemplate(RequestSpec(method="POST", url="https://h/x", json=body))
    rendered = template.render({"query": {"any": ["json", None]}, "count": 7}, SECRETS)
    assert rendered.body is not None
    assert json.loads(rendered.body) == {
        "q": {"any": ["json", None]},
        "deep": [{"n": 7, "label": "7 of {all}"}],
        "fixed": 3,
    }
    assert template.field_names() == {"query", "count"}


def test_a_missing_field_and_a_structured_field_in_text_are_named() -> None:
    template = RequestTemplate(SEARCH)
    with pytest.raises(InvalidInput, match="needs the field 'query'"):
        template.render({"place": "x"}, SECRETS)
    with pytest.raises(InvalidInput, match="string, a number or a boolean"):
        template.render({"place": "x", "query": ["a"]}, SECRETS)
    assert template.render({"place": 3, "query": True}, SECRETS).url.endswith("/v1/3/find?q=true&n=5")


def test_a_secret_is_resolved_late_from_its_file_before_the_environment(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path, environ={"TANGRAM_SECRET_SEARCH_KEY": "from the environment"})
    spec = RequestSpec(method="GET", url="https://h/", headers={"Authorization": "Bearer ${secret:search_key}"})
    template = RequestTemplate(spec)
    assert template.render({}, secrets).headers == {"Authorization": "Bearer from the environment"}
    (tmp_path / "search_key").write_text("from the file\n")
    rendered = template.render({}, secrets)
    assert rendered.headers == {"Authorization": "Bearer from the file"}
    assert rendered.secrets == ("from the file",)


def test_an_input_cannot_name_a_secret() -> None:
    rendered = RequestTemplate(SEARCH).render({"place": "p", "query": "${secret:search_key}"}, SECRETS)
    assert "s3same" not in rendered.url
    assert rendered.secrets == ()


def test_redaction_covers_the_percent_encoded_form_and_leaves_tiny_values_alone() -> None:
    assert redact("k=s3same/open&k=s3same%2Fopen ab", ("s3same/open", "ab")) == "k=[secret]&k=[secret] ab"
    assert redact(r"s3same\/open", ("s3same/open",)) == "[secret]"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RequestSpec(method="FETCH", url="https://h/"), "method 'FETCH'"),  # type: ignore[arg-type]  # made by hand
        (RequestSpec(method="GET", url="ftp://h/"), "must begin with http"),
        (RequestSpec(method="GET", url="https://{host}/"), "host is fixed"),
        (RequestSpec(method="GET", url="https://user:pw@h/"), "no user name"),
        (RequestSpec(method="GET", url="https://h/{not closed"), "stray '{'"),
        (RequestSpec(method="GET", url="https://h/#part"), "fragment"),
        (RequestSpec(method="GET", url="https://h/", headers={"Host": "{x}"}), "'Host' belongs"),
    ],
)
def test_a_template_that_can_never_be_a_request_is_refused(spec: RequestSpec, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        RequestTemplate(spec)


class CountingServer:
    """Answers once it is let to, and counts its connections and what was asked."""

    def __init__(self) -> None:
        self.open = self.made = 0
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.made += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.asked.append(head.split(b" ", 2)[1].decode())
                await self.may_answer.wait()
                writer.write(ANSWER)
        finally:
            self.open -= 1


@asynccontextmanager
async def counting() -> AsyncIterator[CountingServer]:
    made = CountingServer()
    async with listening(made.serve) as port:
        made.url = f"http://127.0.0.1:{port}"
        yield made


@asynccontextmanager
async def client_with(bound: int) -> AsyncIterator[httpx.AsyncClient]:
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(transport=OriginConnections(bound), timeout=None) as made:
        yield made


async def until(server: CountingServer, asked: int) -> None:
    while len(server.asked) < asked:  # noqa: ASYNC110  # the server has no other word for it
        await asyncio.sleep(0.002)


async def test_calls_at_once_have_a_connection_each_up_to_the_bound_and_use_it_again() -> None:
    async with counting() as server, client_with(5) as client:
        calls = [asyncio.create_task(client.get(server.url)) for _ in range(12)]
        await until(server, 5)
        assert server.open == 5
        server.may_answer.set()
        assert {(await call).text for call in calls} == {"ok"}
        await asyncio.gather(*(client.get(server.url) for _ in range(5)))
        assert (server.made, len(server.asked)) == (5, 17)


async def test_what_is_given_up_gives_its_place_back() -> None:
    async with counting() as server, client_with(1) as client:
        for number in range(1, 4):
            call = asyncio.create_task(client.get(server.url))
            await until(server, number)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        server.may_answer.set()
        with pytest.raises(httpx.ConnectError):
            await client.get("http://127.0.0.1:1")
        assert (await client.get(server.url)).text == "ok"


async def test_a_proxy_of_the_environment_is_used_and_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counting() as proxy, counting() as near:
        for server in (proxy, near):
            server.may_answer.set()
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with client_with(3) as client:
            assert (await client.get("http://rewards.example/x")).text == "ok"
            await client.get(near.url)
        assert (proxy.asked, near.asked) == (["http://rewards.example/x"], ["/"])
