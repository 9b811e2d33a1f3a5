"""Problem bodies as exceptions: the classes of `manager.errors`, found by their stable code."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import orjson

from manager.errors import (
    CapacityExceeded,
    CodedError,
    Conflict,
    Draining,
    InvalidConfig,
    InvalidInput,
    KeyReused,
    NotFound,
    QuotaExceeded,
    StorageUnavailable,
    TooLarge,
    Unauthorized,
    Unsatisfiable,
    Unsupported,
)

BY_CODE: Mapping[str, type[CodedError]] = {
    each.code: each
    for each in (
        InvalidInput,
        InvalidConfig,
        NotFound,
        Conflict,
        KeyReused,
        TooLarge,
        Unauthorized,
        Unsatisfiable,
        QuotaExceeded,
        CapacityExceeded,
        Draining,
        StorageUnavailable,
        Unsupported,
    )
}

#: Refused before any work: trying again later cannot run anything twice.
REFUSALS = (QuotaExceeded, CapacityExceeded, Draining, StorageUnavailable)


class ConnectionFailed(CodedError):
    """The gateway cannot be reached, or went away in the middle of an answer."""

    code = "connection_failed"


def error_of(response: httpx.Response) -> CodedError:
    """The exception of a refused request; a body that is no problem of ours becomes a TangramError that quotes it."""
    body = _problem(response)
    if body is None:
        text = response.text[:200]
        return CodedError(f"{response.request.url} answered {response.status_code}: {text}", component="client")
    return error_from(body, _retry_after_s(response))


def error_from(body: Mapping[str, object], retry_after_header_s: float | None = None) -> CodedError:
    """The exception of a problem body."""
    detail = body.get("errors")
    invocation_id, retry_after_s = body.get("invocation_id"), body.get("retry_after_s")
    return BY_CODE.get(str(body.get("code")), CodedError)(
        str(body.get("detail", "")),
        component=str(body.get("component", "gateway")),
        invocation_id=invocation_id if isinstance(invocation_id, str) else None,
        retry_after_s=float(retry_after_s) if isinstance(retry_after_s, int | float) else retry_after_header_s,
        detail=detail if isinstance(detail, dict) else None,
    )


def ended_invocation(response: httpx.Response) -> Mapping[str, object] | None:
    """The record in the problem body of an invocation that ended badly; None where the request itself was refused."""
    record = (_problem(response) or {}).get("invocation")
    return record if isinstance(record, dict) else None


def lost(what: str, error: httpx.TransportError) -> ConnectionFailed:
    """The exception of a broken connection; ``detail["sent"]`` says whether the request may have arrived."""
    sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    return ConnectionFailed(f"{what}: {str(error) or type(error).__name__}", component="client", detail={"sent": sent})


def _problem(response: httpx.Response) -> dict[str, object] | None:
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return None
    return body if isinstance(body, dict) and "code" in body else None


def _retry_after_s(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None
