"""Answers that a gateway gives only in trouble, for `ScriptedGateway.trouble`."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import msgspec

from tangram.types import UNSET, Problem

#: What answers one request; it may raise an `httpx.TransportError`.
Answer = Callable[[httpx.Request], httpx.Response]


def refusal(status: int, code: str, detail: str = "as scripted", *, retry_after_s: float | None = None) -> Answer:
    """Return what refuses a request with this HTTP status and error code, for example 429 and ``quota_exceeded``."""
    return lambda request: problem_answer(status, code, detail, retry_after_s=retry_after_s)


def broken(kind: type[httpx.TransportError] = httpx.ReadError, message: str = "broken") -> Answer:
    """Return what breaks the connection: httpx.ConnectError before the request was sent, httpx.ReadError after it."""

    def answer(request: httpx.Request) -> httpx.Response:
        raise kind(message, request=request)

    return answer


def json_answer(value: object, status: int = 200) -> httpx.Response:
    """Return a response with a JSON body."""
    headers = {"Content-Type": "application/json"}
    return httpx.Response(status, headers=headers, content=msgspec.json.encode(value))


def problem_answer(status: int, code: str, detail: str, *, retry_after_s: float | None = None) -> httpx.Response:
    """Return a refusal as the gateway writes it."""
    problem = Problem(
        type=f"urn:tangram:error:{code}",
        title=code.replace("_", " ").capitalize(),
        status=status,
        code=code,
        detail=detail,
        component="gateway",
        retry_after_s=UNSET if retry_after_s is None else retry_after_s,
    )
    return json_answer(problem, status)
