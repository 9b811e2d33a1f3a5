"""The `api` runtime: templated HTTP requests under a quota."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Annotated, Any, TypedDict
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
import orjson
from msgspec import Meta

from manager.errors import ActionFailed, InvalidConfig, InvalidInput, Reason
from manager.function import FunctionSpec, RequestSpec, RetrySpec, Setting
from runtimes import runtime
from runtimes.kind import DeclarationSite, Kind, RuntimeDeps, Schema, schema_of
from runtimes.runtime import Execution, Result, Runtime
from runtimes.secrets import Secrets, redact, redact_json
from tangram.types import backoff_s

#: Seconds after which a connection that nobody uses is closed.
IDLE_S = 30.0


class OriginConnections(httpx.AsyncBaseTransport):
    """Finds a free connection to an origin at once, however many there are.

    httpx's own pool looks at all of its connections for each request: with 100 of them a call took six times the
    processor time. Here each connection is an httpx transport with one connection, and the free ones of an origin are
    a stack. Whoever finds none free and the bound reached waits, in order of arrival.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._slots = asyncio.Semaphore(bound)
        self._trust = httpx.create_ssl_context()
        #: Of each origin those that are free, and when each became so (on the monotonic clock), the latest last.
        self._free: dict[str, deque[tuple[float, httpx.AsyncHTTPTransport]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over a free connection, or a new one; it is free again once the answer is closed."""
        origin = f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"
        await self._slots.acquire()
        connection = None
        try:
            connection = self._take(origin, request.url)
            answer = await connection.handle_async_request(request)
        except BaseException:
            self._slots.release()
            if connection is not None:
                await _close(connection)
            raise
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        return httpx.Response(
            answer.status_code,
            headers=answer.headers,
            stream=_Body(self, origin, connection, answer.stream),
            extensions=answer.extensions,
        )

    async def aclose(self) -> None:
        """Close those that are free."""
        free, self._free = self._free, {}
        for stack in free.values():
            for _, connection in stack:
                await _close(connection)

    async def give_back(self, origin: str, connection: httpx.AsyncHTTPTransport) -> None:
        """Let the next call use it, and close those that were free for too long, or are too many."""
        now_s = time.monotonic()
        self._free.setdefault(origin, deque()).append((now_s, connection))
        self._slots.release()
        while (eldest := self._superfluous(now_s)) is not None:
            await _close(eldest)

    def _take(self, origin: str, url: httpx.URL) -> httpx.AsyncHTTPTransport:
        if stack := self._free.get(origin):
            return stack.pop()[1]
        return httpx.AsyncHTTPTransport(
            verify=self._trust,
            proxy=_proxy_of(url),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S),
        )

    def _superfluous(self, now_s: float) -> httpx.AsyncHTTPTransport | None:
        """Take out the one that has been free for longest, if that is too long or more are free than may be open."""
        free = [(stack[0][0], origin) for origin, stack in self._free.items() if stack]
        if not free:
            return None
        since_s, origin = min(free)
        if since_s >= now_s - IDLE_S and sum(map(len, self._free.values())) <= self._bound:
            return None
        stack = self._free[origin]
        connection = stack.popleft()[1]
        if not stack:
            del self._free[origin]
        return connection


class _Body(httpx.AsyncByteStream):
    """The body of an answer; closing it frees its connection."""

    def __init__(
        self, pool: OriginConnections, origin: str, connection: httpx.AsyncHTTPTransport, body: httpx.AsyncByteStream
    ) -> None:
        self._pool, self._origin, self._connection, self._body = pool, origin, connection, body
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        """Close the body, once."""
        if not self._open:
            return
        self._open = False
        try:
            await self._body.aclose()
        finally:
            await self._pool.give_back(self._origin, self._connection)


def _proxy_of(url: httpx.URL) -> httpx.Proxy | None:
    """Return the proxy that the environment names for an address, as httpx's own client would."""
    proxies = getproxies()
    entry = proxies.get(url.scheme) or proxies.get("all")
    if entry is None or proxy_bypass(url.host):
        return None
    return httpx.Proxy(entry if "://" in entry else f"http://{entry}")


async def _close(connection: httpx.AsyncHTTPTransport) -> None:
    with suppress(httpx.HTTPError, OSError):
        await connection.aclose()


# The request template: a function's fixed request with holes, filled from one input without escaping its place.
#
# ``{name}`` takes a field of the input, ``${secret:name}`` a secret, ``{{`` and ``}}`` stand for braces. A hole in the
# path or query is percent-encoded, one in a header must be printable, and a JSON string that is nothing but a hole
# takes the field's value with its type. Scheme, host, port and header names have no holes.

_TOKEN = re.compile(r"\$\{secret:(?P<secret>[^}]+)\}|\{(?P<field>[A-Za-z_][A-Za-z0-9_]*)\}|\{\{|\}\}|[{}]")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})

#: Headers that would move or reframe the request.
_RESERVED_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A request ready to be sent, and the secrets in it, to be redacted from whatever is said about it."""

    method: str
    url: str
    headers: Mapping[str, str]
    #: JSON text, or None to send no body.
    body: bytes | None
    secrets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Hole:
    """A place to fill: a field of the input, or a secret."""

    name: str
    secret: bool


_Text = tuple[str | _Hole, ...]


class RequestTemplate:
    """A `RequestSpec` taken apart once; InvalidConfig when it can never be a request."""

    def __init__(self, spec: RequestSpec) -> None:
        self._method = spec.method.upper()
        if self._method not in _METHODS:
            raise _refused(f"method {spec.method!r} is none of {', '.join(sorted(_METHODS))}")
        self.origin, path, query = _split(spec.url)
        self._path = [_parse(segment) for segment in path.split("/")]
        self._query = _parse(query)
        self._headers = {name: _parse(value) for name, value in spec.headers.items()}
        for name in self._headers:
            if name.lower() in _RESERVED_HEADERS:
                raise _refused(f"header {name!r} belongs to the connection and cannot be set")
        self._body = _parse_json(spec.json)

    def render(self, values: Mapping[str, object], secrets: Secrets) -> Rendered:
        """The request for the input ``values``; InvalidInput names the field at fault, InvalidConfig the secret."""
        used = {name: secrets.get(name) for name in self.secret_names()}

        def fill(text: _Text, encode: Callable[[str], str]) -> str:
            return "".join(part if isinstance(part, str) else _fill(part, values, used, encode) for part in text)

        segments = [fill(segment, _quote) for segment in self._path]
        self._refuse_dots(segments)
        query = fill(self._query, _quote)
        body = _fill_json(self._body, values, lambda text: fill(text, str))
        return Rendered(
            method=self._method,
            url=self.origin + "/".join(segments) + ("?" + query if query else ""),
            headers={name: fill(text, _header_value) for name, text in self._headers.items()},
            body=None if self._body is None else _json_bytes(body),
            secrets=tuple(used.values()),
        )

    def secret_names(self) -> frozenset[str]:
        return frozenset(hole.name for hole in self._holes() if hole.secret)

    def field_names(self) -> frozenset[str]:
        return frozenset(hole.name for hole in self._holes() if not hole.secret)

    def _holes(self) -> Iterator[_Hole]:
        texts = [*self._path, self._query, *self._headers.values(), *_texts(self._body)]
        return (part for text in texts for part in text if isinstance(part, _Hole))

    def _refuse_dots(self, segments: list[str]) -> None:
        """A client folds ``..``: the input would leave the path that the YAML fixed."""
        for text, segment in zip(self._path, segments, strict=True):
            if segment in (".", "..") and text != (segment,):
                names = [part.name for part in text if isinstance(part, _Hole)]
                raise _invalid(names[0], f"{segment!r} is no path segment")


def _split(url: str) -> tuple[str, str, str]:
    """Origin, path and query of the URL's template; the origin has no holes and no user."""
    if "#" in url:
        raise _refused("a url fragment is never sent")
    head, _, query = url.partition("?")
    parts = urlsplit(head)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise _refused(f"url {url!r} must begin with http:// or https:// and a host")
    if any(sign in parts.netloc for sign in "{}$@") or not parts.hostname:
        raise _refused("the url's host is fixed: no placeholder, no secret and no user name in it")
    return f"{parts.scheme}://{parts.netloc}", parts.path or "/", query


def _parse(text: str) -> _Text:
    parts: list[str | _Hole] = []
    at = 0
    for token in _TOKEN.finditer(text):
        parts.append(text[at : token.start()])
        at = token.end()
        if token["secret"] is not None:
            parts.append(_Hole(token["secret"], secret=True))
        elif token["field"] is not None:
            parts.append(_Hole(token["field"], secret=False))
        elif token[0] in ("{{", "}}"):
            parts.append(token[0][0])
        else:
            raise _refused(f"stray {token[0]!r} in {text!r}: write {token[0] * 2} for a brace, {{name}} for a field")
    parts.append(text[at:])
    return tuple(part for part in parts if part != "")


def _parse_json(value: object) -> object:
    """The JSON template with its strings parsed; a `_Text` is the only tuple in it."""
    if isinstance(value, str):
        return _parse(value)
    if isinstance(value, Mapping):
        return {str(key): _parse_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_parse_json(item) for item in value]
    return value


def _texts(body: object) -> Iterator[_Text]:
    if isinstance(body, tuple):
        yield body
    elif isinstance(body, dict):
        for item in body.values():
            yield from _texts(item)
    elif isinstance(body, list):
        for item in body:
            yield from _texts(item)


def _fill_json(body: object, values: Mapping[str, object], fill: Callable[[_Text], str]) -> object:
    if isinstance(body, tuple):
        if len(body) == 1 and isinstance(body[0], _Hole) and not body[0].secret:
            return _field(values, body[0].name)
        return fill(body)
    if isinstance(body, dict):
        return {key: _fill_json(item, values, fill) for key, item in body.items()}
    if isinstance(body, list):
        return [_fill_json(item, values, fill) for item in body]
    return body


def _fill(hole: _Hole, values: Mapping[str, object], used: Mapping[str, str], encode: Callable[[str], str]) -> str:
    """The hole's value, encoded for its place; the refusal never repeats a secret."""
    try:
        return encode(used[hole.name] if hole.secret else _scalar(values, hole.name))
    except ValueError as error:
        if hole.secret:
            raise _refused(f"secret {hole.name!r} cannot stand in its place") from None
        raise _invalid(hole.name, str(error)) from None


def _field(values: Mapping[str, object], name: str) -> object:
    if name not in values:
        raise _invalid(name, f"the request needs the field {name!r}")
    return values[name]


def _scalar(values: Mapping[str, object], name: str) -> str:
    value = _field(values, name)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise _invalid(name, f"the request's text needs a string, a number or a boolean as {name!r}")


def _quote(value: str) -> str:
    return quote(value, safe="")


def _header_value(value: str) -> str:
    if not value.isascii() or not value.isprintable():
        raise ValueError("a header takes printable ASCII only")
    return value


def _json_bytes(body: object) -> bytes:
    try:
        return runtime.dumps(body)
    except TypeError as error:
        raise InvalidInput(f"the request's body is no JSON: {error}", component="api") from None


def _invalid(name: str, message: str) -> InvalidInput:
    return InvalidInput(message, component="api", detail={"path": f"$.{name}"})


def _refused(message: str) -> InvalidConfig:
    return InvalidConfig(f"request: {message}", component="api")


# The api runtime: a templated HTTP call to an external service, at the pace that the service allows.
#
# How many calls are made at once or in a period is the scheduler's business (a quota or concurrency resource in the
# function's cost). This room obeys what the service itself answers: 429, 503 and Retry-After.

_COMPONENT = "api"
_REDIRECTS_MAX = 5
#: Connections that may be open at once, and seconds for a new one.
CONNECTIONS_MAX, CONNECT_TIMEOUT_S = 256, 10.0
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()


class ApiRuntime(Runtime):
    """Calls external services through one pooled client.

    A status of the function's ``retry.on_status`` is tried again inside the action, never earlier than
    Retry-After and never past the action's timeout, and takes its units of the function's quotas as the first try did:
    these waits are execution time. Failures are ``quota``
    (429), ``upstream`` (another status, no connection, a redirect to another origin), ``timeout``, ``output_limit``
    and ``invalid_input``; where the service answered, its answer is the failure's result.
    """

    def __init__(self, secrets: Secrets) -> None:
        for library in ("httpx", "httpcore"):
            # Below warnings they log whole URLs and headers, secrets included.
            logging.getLogger(library).setLevel(logging.WARNING)
        self._secrets = secrets
        self._templates: dict[str, tuple[RequestSpec, RequestTemplate]] = {}

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """Made with the first call: reading the machine's certificates is no part of a start."""
        return httpx.AsyncClient(
            transport=OriginConnections(CONNECTIONS_MAX),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            # One caller's session must never reach another's call.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )

    async def prepare(self, function: FunctionSpec) -> None:
        """Check the template and that its secrets are defined; InvalidConfig otherwise."""
        for name in sorted(self._template(function).secret_names()):
            self._secrets.get(name)

    async def execute(self, execution: Execution) -> Result:
        call = execution.call
        spec = _spec_of(call.function)
        template = self._template(call.function)
        try:
            rendered = template.render(call.input, self._secrets)
        except InvalidInput as error:
            raise ActionFailed(
                Reason.INVALID_INPUT, error.message, component=_COMPONENT, detail=error.detail
            ) from error
        except InvalidConfig as error:
            raise ActionFailed(Reason.INTERNAL, error.message, component=error.component) from error
        execution.begin()
        try:
            return await self._call(execution, spec, template.origin, rendered)
        finally:
            execution.end()

    async def close(self) -> None:
        if "_client" in vars(self):
            await self._client.aclose()

    def _template(self, function: FunctionSpec) -> RequestTemplate:
        """The function's template, taken apart once for each revision."""
        spec = _spec_of(function)
        known = self._templates.get(function.name)
        if known is None or known[0] is not spec:
            known = self._templates[function.name] = (spec, RequestTemplate(spec))
        return known[1]

    async def _call(self, execution: Execution, spec: RequestSpec, origin: str, rendered: Rendered) -> Result:
        retry = execution.call.function.retry
        waited_s = 0.0
        for attempt in range(1, retry.max_attempts + 1):
            sent_s = execution.execution_s
            answer = await self._send(execution, spec, origin, rendered)
            line = f"{rendered.method} {rendered.url} -> {answer.status} in {execution.execution_s - sent_s:.3f} s"
            usage = {"attempts": attempt, "waited_s": waited_s}
            if answer.accepted(spec):
                _log(execution, rendered, line)
                if answer.broken:
                    raise _failed(Reason.UPSTREAM, answer.broken, result=answer.value(), usage=usage)
                return Result(value=answer.value(), usage=usage)
            wait_s = _wait_s(answer, retry, attempt, execution.action.timeout_s - execution.execution_s)
            if wait_s is None:
                _log(execution, rendered, f"{line}, attempt {attempt} of {retry.max_attempts}, giving up")
                raise answer.failure(usage)
            _log(execution, rendered, f"{line}, attempt {attempt} of {retry.max_attempts}, again in {wait_s:.3f} s")
            before_s = execution.execution_s
            await asyncio.sleep(wait_s)
            await execution.call.hooks.again()
            waited_s += execution.execution_s - before_s
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, execution: Execution, spec: RequestSpec, origin: str, rendered: Rendered) -> _Answer:
        """One request and its answer, redirects within the origin included."""
        trace = {"traceparent": execution.call.traceparent, "tracestate": execution.call.tracestate}
        headers = {"accept-encoding": "gzip", **{name: value for name, value in trace.items() if value}}
        if rendered.body is not None:
            headers["content-type"] = "application/json"
        try:
            request = self._client.build_request(
                rendered.method, rendered.url, content=rendered.body, headers={**headers, **rendered.headers}
            )
            for _ in range(_REDIRECTS_MAX + 1):
                response = await self._client.send(request, stream=True)
                try:
                    if response.next_request is None:
                        return await _read(response, spec.response_limit_bytes, rendered.secrets)
                    request = response.next_request
                finally:
                    await response.aclose()
                if _origin(request.url) != _origin(httpx.URL(origin)):
                    target = f"{request.url.scheme}://{request.url.netloc.decode('ascii', 'replace')}"
                    raise _failed(Reason.UPSTREAM, f"{origin} redirects to another origin, {target}")
        except httpx.InvalidURL as error:
            raise _failed(Reason.INVALID_INPUT, f"the input makes no url: {error}") from error
        except httpx.TimeoutException as error:
            raise _failed(Reason.UPSTREAM, f"no connection to {origin}: {type(error).__name__}") from error
        except httpx.HTTPError as error:
            message = redact(str(error), rendered.secrets) or type(error).__name__
            raise _failed(Reason.UPSTREAM, f"{origin}: {message}") from error
        raise _failed(Reason.UPSTREAM, f"{origin} redirects more than {_REDIRECTS_MAX} times")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What the service answered, secrets removed."""

    status: int
    headers: Mapping[str, str]
    body: object
    retry_after_s: float | None
    #: Why the body is not the JSON that it was said to be; empty if it is, or was not said to be.
    broken: str

    def accepted(self, spec: RequestSpec) -> bool:
        return 200 <= self.status < 300 or self.status in spec.accept

    def value(self) -> dict[str, object]:
        return {"status": self.status, "headers": dict(self.headers), "body": self.body}

    def failure(self, usage: Mapping[str, float]) -> ActionFailed:
        reason = Reason.QUOTA if self.status == 429 else Reason.UPSTREAM
        message = "the service's own quota is used up" if self.status == 429 else "the service failed"
        return _failed(
            reason,
            f"{message}: status {self.status}",
            result=self.value(),
            retry_after_s=self.retry_after_s,
            usage=usage,
        )


async def _read(response: httpx.Response, limit_bytes: int, secrets: tuple[str, ...]) -> _Answer:
    """The whole answer within its limit; ActionFailed(output_limit) beyond it."""
    content = bytearray()
    encoding = response.headers.get("content-encoding", "").strip().lower()
    # Not httpx's own, which makes of each piece all that there is in it.
    inflating = zlib.decompressobj(wbits=31) if encoding in ("gzip", "x-gzip") else None
    if inflating is None and encoding not in ("", "identity"):
        raise _failed(Reason.UPSTREAM, f"the service's answer is encoded as {encoding}, which was not asked for")
    async for piece in response.aiter_raw():
        try:
            limit = limit_bytes + 1 - len(content)
            content += piece if inflating is None else inflating.decompress(piece, limit)
        except zlib.error as error:
            raise _failed(Reason.UPSTREAM, f"the service's answer is no {encoding}: {error}") from None
        if len(content) > limit_bytes:
            raise _failed(
                Reason.OUTPUT_LIMIT, f"the service's answer exceeds {limit_bytes} bytes (request.response_limit)"
            )
    whole = inflating is None or (inflating.eof and not inflating.unused_data)
    if not whole and response.num_bytes_downloaded:
        raise _failed(Reason.UPSTREAM, "the service's answer broke off, or goes on behind its end")
    text = content.decode(response.encoding or "utf-8", errors="replace")
    body, broken = _body(text, response.headers.get("content-type", ""), secrets)
    return _Answer(
        status=response.status_code,
        headers={name: redact(value, secrets) for name, value in response.headers.items() if name != "set-cookie"},
        body=body,
        retry_after_s=retry_after_s(response.headers.get("retry-after"), datetime.now(UTC)),
        broken=broken,
    )


def _body(text: str, content_type: str, secrets: tuple[str, ...]) -> tuple[object, str]:
    """The JSON value of a JSON answer, else the text, and why it is none where the JSON is broken."""
    media_type = content_type.partition(";")[0].strip().lower()
    if text and (media_type == "application/json" or media_type.endswith("+json")):
        try:
            value = runtime.loads(text)
            return redact_json(value, secrets) if secrets else value, ""
        except (orjson.JSONDecodeError, RecursionError) as error:
            return redact(text, secrets), f"the service's answer is called {media_type}, and is no JSON: {error}"
    return redact(text, secrets), ""


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """Seconds to wait by a Retry-After header: a number of seconds or an HTTP date; None for anything else."""
    if header is None:
        return None
    try:
        seconds = float(header)
        return seconds if 0.0 <= seconds < float("inf") else None
    except ValueError:
        pass
    try:
        instant = parsedate_to_datetime(header)
    except ValueError:
        return None
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return max(0.0, (aware - now).total_seconds())


def _wait_s(answer: _Answer, retry: RetrySpec, attempt: int, remaining_s: float) -> float | None:
    """Seconds until the next try; None when there is none, or none that the timeout leaves room for.

    With full jitter the backoff comes on top of Retry-After, lest all who were refused together return together.
    """
    if answer.status not in retry.on_status or attempt >= retry.max_attempts:
        return None
    floor_s = answer.retry_after_s or 0.0
    part = CHANCE.random() if retry.jitter == "full" else 1.0
    pause_s = backoff_s(attempt, retry.backoff_s, retry.backoff_max_s, part)
    wait_s = floor_s + pause_s if retry.jitter == "full" else max(floor_s, pause_s)
    return wait_s if wait_s < remaining_s else None


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _spec_of(function: FunctionSpec) -> RequestSpec:
    assert function.request is not None, f"function {function.name} has no request"
    return function.request


def _log(execution: Execution, rendered: Rendered, line: str) -> None:
    execution.call.log.write("system", redact(line, rendered.secrets) + "\n")


def _failed(
    reason: Reason,
    message: str,
    *,
    result: object = None,
    retry_after_s: float | None = None,
    usage: Mapping[str, float] | None = None,
) -> ActionFailed:
    return ActionFailed(reason, message, component=_COMPONENT, result=result, retry_after_s=retry_after_s, usage=usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """The keys of an api function."""

    request: Annotated[RequestSpec, Setting("the call")]


class ApiResult(TypedDict):
    """What the service answered, secrets removed."""

    status: Annotated[int, Meta(description="HTTP status: 2xx, or one of request.accept")]
    headers: Annotated[dict[str, str], Meta(description="Response headers; cookies are left out")]
    body: Annotated[Any, Meta(description="The value of a JSON answer, else its text")]


RESULT = schema_of(ApiResult)


def _input_schema(function: FunctionSpec) -> Schema:
    """Exactly the fields of the request template, and those that the learning looks at."""
    assert function.request is not None, f"{function.name} has no request section"
    fields = sorted(RequestTemplate(function.request).field_names())
    return {
        "type": "object",
        "properties": dict.fromkeys((*function.duration.fields, *fields), True),
        "required": fields,
        "additionalProperties": False,
    }


def _spec(section: ApiKeys, place: DeclarationSite) -> Mapping[str, object]:
    try:
        RequestTemplate(section.request)
    except InvalidConfig as error:
        place.refuse(("request",), error.message.removeprefix("request: "))
    return {"request": section.request}


def _make(deps: RuntimeDeps) -> Runtime:

    return ApiRuntime(deps.secrets)


API = Kind(
    name="api",
    meaning="a templated HTTP call under quotas",
    make=_make,
    section=ApiKeys,
    cost=None,
    spec=_spec,
    input_schema=_input_schema,
    result_schema=lambda function: RESULT,
    shown={"": (None, RESULT)},
)
