"""The requests of both clients, made without sending anything, and the rule for sending one again."""

from __future__ import annotations

import posixpath
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import orjson

from gateway.client.problems import REFUSALS, ConnectionFailed, ended_invocation, error_from, error_of
from gateway.client.results import FileEntry, InvocationResult
from manager.errors import CodedError

_T = TypeVar("_T")
_BACKOFF_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often and how long a refused or lost request is tried again."""

    max_attempts: int = 5
    #: Longest single wait; a longer Retry-After is not waited for, the error is raised.
    wait_max_s: float = 30.0

    def wait_s(self, error: CodedError, attempt: int, *, repeatable: bool) -> float | None:
        """Seconds to wait before try ``attempt + 1``, or None to raise.

        Refusals ran nothing. A lost connection may have, so only a ``repeatable`` request is sent again.
        """
        if attempt >= self.max_attempts:
            return None
        if isinstance(error, REFUSALS) and error.retry_after_s is not None:
            return error.retry_after_s if error.retry_after_s <= self.wait_max_s else None
        if isinstance(error, ConnectionFailed) and (repeatable or not error.detail.get("sent", True)):
            return min(self.wait_max_s, _BACKOFF_S * 2.0**attempt) * random.uniform(0.5, 1.0)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCall:
    """One call of a batch."""

    function: str
    input: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    trajectory: str | None = None
    timeout_s: float | None = None
    max_age_s: float | None = None
    #: Drawn at random where it is not given, so that a batch can be sent again.
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Generic[_T]):
    """One HTTP request and how its answer is read."""

    method: str
    path: str
    read: Callable[[httpx.Response], _T]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    #: Whether sending it twice does the work once.
    repeatable: bool = True
    #: Whether the answer may take as long as the work does.
    patient: bool = False

    def answer(self, response: httpx.Response) -> _T:
        """The typed answer; raises TangramError for a refused request."""
        if response.is_success or ended_invocation(response) is not None:
            return self.read(response)
        raise error_of(response)


def invoke(
    function: str,
    input: Mapping[str, Any],
    *,
    mode: str,
    task: str | None,
    trajectory: str | None,
    parent: str | None,
    key: str | None,
    timeout_s: float | None,
    wait_s: float | None,
    callback_url: str | None = None,
) -> Request[InvocationResult]:
    """One invocation. An asynchronous one always carries a key, so that it can be sent again."""
    if key is None and mode == "async":
        key = secrets.token_urlsafe(16)
    headers = {
        "Content-Type": "application/json",
        "X-Task": task,
        "X-Trajectory-Id": trajectory,
        "X-Parent-Id": parent,
        "Idempotency-Key": key,
        "X-Timeout": _duration(timeout_s),
        "X-Callback-Url": callback_url,
    }
    return Request(
        method="POST",
        path=f"{function_path(function)}/invocations",
        read=read_invocation,
        params=_given({"mode": mode, "wait": _duration(wait_s)}),
        headers=_given(headers),
        content=orjson.dumps(input),
        repeatable=key is not None,
        patient=mode == "sync",
    )


def batch(
    calls: Sequence[BatchCall], wait: str, timeout_s: float | None
) -> Request[list[InvocationResult | CodedError]]:
    """Many asynchronous invocations; the verdicts come in the order of the calls."""
    written = [
        {
            "input": call.input,
            **_given(
                {
                    "function": call.function,
                    "task": call.task,
                    "trajectory": call.trajectory,
                    "timeout": _duration(call.timeout_s),
                    "max_age": _duration(call.max_age_s),
                    "key": call.key or secrets.token_urlsafe(16),
                }
            ),
        }
        for call in calls
    ]
    return Request(
        method="POST",
        path="/v1/invocations:batch",
        read=lambda response: [_verdict(each) for each in read_json(response)["results"]],
        params=_given({"wait": wait, "timeout": _duration(timeout_s)}),
        headers={"Content-Type": "application/json"},
        content=orjson.dumps({"calls": written}),
        patient=wait != "none",
    )


def redrive(id: str) -> Request[InvocationResult]:
    path = f"{dead_letters_path(id)}/redrive"
    return Request(method="POST", path=path, read=read_invocation, repeatable=False)


def purge(id: str | None, function: str | None = None) -> Request[int]:
    """One dead letter, or all (of one function)."""
    return Request(
        method="DELETE",
        path=dead_letters_path(id),
        read=lambda response: int(read_json(response)["purged"]),
        params=_given({"function": function}),
    )


def dead_letters_path(id: str | None) -> str:
    return "/v1/dead-letters" if id is None else f"/v1/dead-letters/{quote(id, safe='')}"


def get_invocation(id: str, wait_s: float | None = None) -> Request[InvocationResult]:
    return Request(
        method="GET",
        path=f"/v1/invocations/{quote(id, safe='')}",
        read=read_invocation,
        params=_given({"wait": _duration(wait_s)}),
    )


def cancel_invocation(id: str) -> Request[InvocationResult]:
    return Request(method="POST", path=f"/v1/invocations/{quote(id, safe='')}/cancel", read=read_invocation)


def list_invocations(filters: Mapping[str, str | None], limit: int, cursor: str | None) -> Request[Any]:
    params = {**filters, "limit": str(limit), "cursor": cursor}
    return get_json("/v1/invocations", _given(params))


def get_json(path: str, params: Mapping[str, str] | None = None) -> Request[Any]:
    return Request(method="GET", path=path, read=read_json, params=params or {})


def send_json(method: str, path: str, body: object, params: Mapping[str, str] | None = None) -> Request[Any]:
    return Request(
        method=method,
        path=path,
        read=read_json,
        params=params or {},
        headers={"Content-Type": "application/json"},
        content=b"" if body is None else orjson.dumps(body),
    )


def delete(path: str) -> Request[None]:
    return Request(method="DELETE", path=path, read=lambda response: None)


def trajectory_path(id: str) -> str:
    return f"/v1/trajectories/{quote(id, safe='')}"


def upload(id: str, path: str, data: bytes, mode: int) -> Request[Any]:
    return Request(
        method="PUT",
        path=file_path(id, path),
        read=read_json,
        params={"mode": f"{mode:03o}"},
        headers={"Content-Type": "application/octet-stream"},
        content=data,
    )


def download(id: str, path: str) -> Request[bytes]:
    return Request(method="GET", path=file_path(id, path), read=lambda response: response.content)


def list_files(id: str, path: str) -> Request[list[FileEntry]]:
    return Request(
        method="GET",
        path=file_path(id, path),
        read=lambda response: [FileEntry.from_json(each) for each in read_json(response)["files"]],
        params={"list": "true"},
    )


def file_path(id: str, path: str) -> str:
    return f"{trajectory_path(id)}/files/{quote(path.lstrip('/'))}"


def command(
    command: str | Sequence[str], cwd: str | None, env: Mapping[str, str] | None, stdin: str | None
) -> dict[str, object]:
    """The input of an exec function: a string is shell text, a sequence an argument vector."""
    body: dict[str, object] = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    given = {"cwd": cwd, "env": None if env is None else dict(env), "stdin": stdin}
    return body | {name: value for name, value in given.items() if value is not None}


def read_json(response: httpx.Response) -> Any:
    return orjson.loads(response.content)


def read_invocation(response: httpx.Response) -> InvocationResult:
    return InvocationResult.from_json(ended_invocation(response) or read_json(response))


def _verdict(body: Mapping[str, Any]) -> InvocationResult | CodedError:
    if "problem" in body:
        return error_from(body["problem"])
    return InvocationResult.from_json(body["invocation"])


def function_path(name: str) -> str:
    return f"/v1/functions/{quote(name, safe='')}"


def apply(files: Mapping[str, str] | None, dry_run: bool) -> Request[Any]:
    """Files by path, or None: the server reads its own again."""
    body = None if files is None else {"files": [{"path": path, "text": text} for path, text in files.items()]}
    return send_json("PUT", "/v1/config", body, {"dry_run": "true"} if dry_run else {})


def open_trajectory(id: str, function: str, task: str | None) -> Request[Any]:
    return send_json("PUT", trajectory_path(id), _given({"function": function, "task": task}))


def in_workdir(workdir: str, path: str) -> str:
    """An absolute path in the sandbox."""
    return posixpath.normpath(posixpath.join(workdir, path))


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.3f}s"


def _given(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
