"""The api runtime: a templated HTTP call to an external service, at the pace that the service allows.

How many calls are made at once or in a period is the scheduler's business (a quota or concurrency resource in
the function's cost). This room obeys what the service itself answers: 429, 503 and Retry-After.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx
import orjson

from manager.action import Action, Lease
from manager.errors import ActionFailed, InvalidConfig, InvalidInput, Reason
from manager.function import FunctionSpec, RequestSpec, RetrySpec
from runtimes import exact_json
from runtimes.api.connections import OriginConnections
from runtimes.api.secrets import Secrets, redact, redact_json
from runtimes.api.template import Rendered, RequestTemplate
from runtimes.runtime import Execution, Result
from tangram.types import backoff_s

_COMPONENT = "api"
_REDIRECTS_MAX = 5
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()


class ApiRuntime:
    """Calls external services through one pooled client.

    A status of the function's ``retry.on_status`` is tried again inside the action, never earlier than
    Retry-After and never past the action's timeout, and takes its units of the function's quotas as the first try did:
    these waits are execution time. Failures are ``quota``
    (429), ``upstream`` (another status, no connection, a redirect to another origin), ``timeout``, ``output_limit``
    and ``invalid_input``; where the service answered, its answer is the failure's result.
    """

    def __init__(self, secrets: Secrets, *, connections_max: int = 256, connect_timeout_s: float = 10.0) -> None:
        for library in ("httpx", "httpcore"):
            # Below warnings they log whole URLs and headers, secrets included.
            logging.getLogger(library).setLevel(logging.WARNING)
        self._secrets = secrets
        self._templates: dict[str, tuple[RequestSpec, RequestTemplate]] = {}
        self._connections_max, self._connect_timeout_s = connections_max, connect_timeout_s

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """Made with the first call: reading the machine's certificates is no part of a start."""
        return httpx.AsyncClient(
            transport=OriginConnections(self._connections_max),
            timeout=httpx.Timeout(None, connect=self._connect_timeout_s),
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

    async def resize(self, action: Action, lease: Lease) -> None:
        """A call holds nothing that could be resized."""

    async def end_trajectory(self, trajectory: str) -> None:
        """A call keeps nothing of its trajectory."""

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
            if execution.call.again is not None:
                await execution.call.again()
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
                    there = f"{request.url.scheme}://{request.url.netloc.decode('ascii', 'replace')}"
                    raise _failed(Reason.UPSTREAM, f"{origin} redirects to another origin, {there}")
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
            room = limit_bytes + 1 - len(content)
            content += piece if inflating is None else inflating.decompress(piece, room)
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
            value = exact_json.loads(text)
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
