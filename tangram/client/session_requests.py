"""The requests of sessions: begun, written to, steered."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgspec

from tangram.client.answers import read_invocation, reader
from tangram.client.body import json_body
from tangram.client.headers import given_headers
from tangram.client.requests import (
    JSON_BODY,
    LIVING,
    ApiRequest,
    duration_text,
    invocation_path,
    present,
    trajectory_path,
)
from tangram.client.results import InvocationResult
from tangram.types import SessionFed


def open_session(
    trajectory: str,
    function: str,
    command: str | Sequence[str],
    more: Mapping[str, object],
    terminal: tuple[int, int] | None,
    *,
    task: str | None,
    timeout_s: float | None,
    living: bool,
) -> ApiRequest[InvocationResult]:
    """Return the request that begins a session; it carries a key, so that it can be sent again."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    given = {name: value for name, value in more.items() if value is not None}
    size = None if terminal is None else {"rows": terminal[0], "columns": terminal[1]}
    key = secrets.token_urlsafe(16)
    headers = {"X-Task": task, "X-Timeout": duration_text(timeout_s), "Idempotency-Key": key}
    return ApiRequest(
        method="POST",
        path=f"{trajectory_path(trajectory)}/sessions",
        read=read_invocation,
        headers=JSON_BODY | given_headers(headers) | (LIVING if living else {}),
        content=json_body({**given, "argv": argv, "function": function, "terminal": size}),
    )


def session_path(id: str) -> str:
    return f"{invocation_path(id)}/session"


def write_session(id: str, data: bytes, offset: int | None, *, end: bool = False) -> ApiRequest[SessionFed]:
    """Return the request that passes input on; it can be sent again if it says where its input belongs."""
    return ApiRequest(
        method="POST",
        path=f"{session_path(id)}/input",
        read=reader(SessionFed),
        params=present({"offset": None if offset is None else str(offset), "end": "true" if end else None}),
        headers={"Content-Type": "application/octet-stream"},
        content=data,
        repeatable=offset is not None,
    )


def steer_session(id: str, *, size: tuple[int, int] | None = None, signal: str | None = None) -> ApiRequest[None]:
    """Return the request that resizes a session's terminal, or signals what runs in it."""
    terminal = None if size is None else {"rows": size[0], "columns": size[1]}
    return ApiRequest(
        method="POST",
        path=f"{session_path(id)}/control",
        read=lambda response: None,
        headers=JSON_BODY,
        content=msgspec.json.encode({"terminal": terminal, "signal": signal}),
        repeatable=signal is None,
    )
