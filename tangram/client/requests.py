"""The requests of both clients, made without sending anything."""

from __future__ import annotations

import base64
import posixpath
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from tangram.client.answers import error_of, is_answered, read_invocation, reader
from tangram.client.body import json_body
from tangram.client.headers import given_headers
from tangram.client.results import InvocationResult, result_of
from tangram.errors import InvalidInputError, TangramError, from_problem
from tangram.types import (
    ActivityInfo,
    BatchAnswer,
    BatchItem,
    BatchRequest,
    BatchVerdict,
    ConfigDiff,
    ConfigFile,
    ConfigFiles,
    FileEntry,
    FileList,
    FunctionInfo,
    FunctionList,
    FunctionUpload,
    ImageList,
    ImagesWanted,
    InvocationPage,
    Purged,
    QueuePage,
    ResourcesInfo,
    SandboxChoice,
    TrajectoryInfo,
    TrajectoryOpening,
    TrajectoryPage,
)
from tangram.types.values.quantities import is_name
from tangram.types.values.scalars import NAME_WORDS
from tangram.types.values.wording import explained

_T = TypeVar("_T")
JSON_BODY = {"Content-Type": "application/json"}
#: Only in a trajectory that lives: if it has ended, the request is refused instead of beginning a new one.
LIVING = {"X-Trajectory-Expect": "living"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCall:
    """One call of a batch."""

    function: str
    input: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    step: int | None = None
    trajectory: str | None = None
    timeout_s: float | None = None
    #: The call is given up if it still waits after so many seconds.
    max_age_s: float | None = None
    #: Drawn at random if it is not given, so that a batch can be sent again.
    key: str | None = None

    def item(self) -> BatchItem:
        """Return the call as it is sent."""
        return BatchItem(
            function=self.function,
            input=self.input,
            task=self.task,
            step=self.step,
            trajectory=self.trajectory,
            timeout=duration_text(self.timeout_s),
            max_age=duration_text(self.max_age_s),
            key=self.key or secrets.token_urlsafe(16),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest(Generic[_T]):
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

    @property
    def lasting(self) -> bool:
        """Whether its connection is in use for as long as something else takes."""
        return self.patient or "wait" in self.params

    def answer(self, response: httpx.Response) -> _T:
        """Return the typed answer; raises the TangramError of a refused request."""
        if is_answered(response):
            return self.read(response)
        raise error_of(response)


def invoke(
    function: str,
    input: Mapping[str, Any],
    *,
    mode: str,
    task: str | None = None,
    step: int | None = None,
    trajectory: str | None = None,
    parent: str | None = None,
    key: str | None = None,
    timeout_s: float | None = None,
    wait_s: float | None = None,
    callback_url: str | None = None,
    living: bool = False,
) -> ApiRequest[InvocationResult]:
    """Return the request of one invocation. An asynchronous one always carries a key, so that it can be sent again."""
    if key is None and mode == "async":
        key = secrets.token_urlsafe(16)
    headers = {
        "X-Task": task,
        "X-Step": None if step is None else str(step),
        "X-Trajectory-Id": trajectory,
        "X-Parent-Id": parent,
        "Idempotency-Key": key,
        "X-Timeout": duration_text(timeout_s),
        "X-Callback-Url": callback_url,
    }
    return ApiRequest(
        method="POST",
        path=f"{_function_path(function)}/invocations",
        read=read_invocation,
        params=present({"mode": mode, "wait": duration_text(wait_s)}),
        headers=JSON_BODY | given_headers(headers) | (LIVING if living else {}),
        content=json_body(input),
        repeatable=key is not None,
        patient=mode == "sync",
    )


def batch(
    calls: Sequence[BatchCall], wait: str, timeout_s: float | None
) -> ApiRequest[list[InvocationResult | TangramError]]:
    """Return the request of many asynchronous invocations; the verdicts come in the order of the calls."""
    read = reader(BatchAnswer)
    return ApiRequest(
        method="POST",
        path="/v1/invocations:batch",
        read=lambda response: [_verdict(each) for each in read(response).results],
        params=present({"wait": wait, "timeout": duration_text(timeout_s)}),
        headers=JSON_BODY,
        content=json_body(BatchRequest(calls=tuple(call.item() for call in calls))),
        patient=wait != "none",
    )


def _verdict(verdict: BatchVerdict) -> InvocationResult | TangramError:
    if verdict.problem:
        return from_problem(verdict.problem)
    assert verdict.invocation, "a verdict is an invocation or a problem"
    return result_of(verdict.invocation, replayed=bool(verdict.replayed))


def get_invocation(id: str, wait_s: float | None = None) -> ApiRequest[InvocationResult]:
    """Return the request of a record, which may wait for its end."""
    return ApiRequest(
        method="GET",
        path=invocation_path(id),
        read=read_invocation,
        params=present({"wait": duration_text(wait_s)}),
    )


def cancel_invocation(id: str) -> ApiRequest[InvocationResult]:
    return ApiRequest(method="POST", path=f"{invocation_path(id)}/cancel", read=read_invocation)


def list_invocations(filters: Mapping[str, str | None], limit: int, cursor: str | None) -> ApiRequest[InvocationPage]:
    params = {**filters, "limit": str(limit), "cursor": cursor}
    return get("/v1/invocations", InvocationPage, present(params))


def log_path(id: str) -> str:
    return f"{invocation_path(id)}/logs"


def redrive(id: str) -> ApiRequest[InvocationResult]:
    path = f"{_dead_letters_path(id)}/redrive"
    return ApiRequest(method="POST", path=path, read=read_invocation, repeatable=False)


def purge(id: str | None, function: str | None = None) -> ApiRequest[Purged]:
    """Return the request that takes one dead letter, or all (of one function), off the list."""
    params = present({"function": function})
    return ApiRequest(method="DELETE", path=_dead_letters_path(id), read=reader(Purged), params=params)


def list_functions() -> ApiRequest[FunctionList]:
    return get("/v1/functions", FunctionList)


def get_function(name: str) -> ApiRequest[FunctionInfo]:
    return get(_function_path(name), FunctionInfo)


def apply(
    files: Mapping[str, str] | None, dry_run: bool, prune: bool, variables: Mapping[str, str] | None
) -> ApiRequest[ConfigDiff]:
    """Return the request that applies files by path, or with None the server's own, read again."""
    listed = tuple(ConfigFile(path=path, text=text) for path, text in (files or {}).items())
    sent = None if files is None else ConfigFiles(files=listed, variables=variables or {})
    return ApiRequest(
        method="PUT",
        path="/v1/config",
        read=reader(ConfigDiff),
        params=({"dry_run": "true"} if dry_run else {}) | ({"prune": "true"} if prune else {}),
        headers=JSON_BODY,
        content=b"" if sent is None else msgspec.json.encode(sent),
    )


def put_function(
    name: str, definition: Mapping[str, Any], sources: Mapping[str, str], dry_run: bool
) -> ApiRequest[ConfigDiff]:
    """Return the request that adds or changes one function."""
    try:
        content = msgspec.json.encode(FunctionUpload(definition=definition, sources=sources))
    except TypeError as error:
        raise InvalidInputError(f"the definition of {name} is no JSON: {error}") from None
    return ApiRequest(
        method="PUT",
        path=_function_path(name),
        read=reader(ConfigDiff),
        params={"dry_run": "true"} if dry_run else {},
        headers=JSON_BODY,
        content=content,
    )


def get_resources() -> ApiRequest[ResourcesInfo]:
    return get("/v1/resources", ResourcesInfo)


def get_activity() -> ApiRequest[ActivityInfo]:
    return get("/v1/activity", ActivityInfo)


def list_images() -> ApiRequest[ImageList]:
    return get("/v1/images", ImageList)


def pull_images(images: Sequence[str], wait_s: float | None = None) -> ApiRequest[ImageList]:
    """Return the request that begins to pull images, and may wait for them."""
    return ApiRequest(
        method="PUT",
        path="/v1/images",
        read=reader(ImageList),
        params=present({"wait": duration_text(wait_s)}),
        headers=JSON_BODY,
        content=msgspec.json.encode(ImagesWanted(images=tuple(images))),
    )


def get_queue(limit: int) -> ApiRequest[QueuePage]:
    return get("/v1/queue", QueuePage, {"limit": str(limit)})


def list_trajectories(cursor: str | None) -> ApiRequest[TrajectoryPage]:
    return get("/v1/trajectories", TrajectoryPage, present({"cursor": cursor}))


def open_trajectory(
    id: str,
    function: str,
    task: str | None,
    sandbox: SandboxChoice | None = None,
    snapshot: str | None = None,
    step: int | None = None,
    lease_s: float | None = None,
) -> ApiRequest[TrajectoryInfo]:
    """Return the request that makes a trajectory's environment, or finds that it lives already."""
    task = "default" if task is None else task
    opening = TrajectoryOpening(
        function=function, task=task, step=step, sandbox=sandbox, snapshot=snapshot, lease_s=lease_s
    )
    return ApiRequest(
        method="PUT",
        path=trajectory_path(id),
        read=reader(TrajectoryInfo),
        headers=JSON_BODY,
        content=msgspec.json.encode(_said(opening)),
        patient=snapshot is not None or (sandbox is not None and sandbox.image is not None),
    )


def remove_function(name: str) -> ApiRequest[ConfigDiff]:
    return ApiRequest(method="DELETE", path=_function_path(name), read=reader(ConfigDiff))


def end_trajectory(id: str) -> ApiRequest[None]:
    return ApiRequest(method="DELETE", path=trajectory_path(id), read=lambda response: None)


def upload(
    id: str, path: str, data: bytes, mode: int | None, *, user: str | None = None, living: bool = False
) -> ApiRequest[None]:
    """Return the request that writes a file; ``mode`` has its permission bits, None those of one that is there.

    Raises InvalidInputError for a mode that is no number of such bits.
    """
    if mode is not None and not (isinstance(mode, int) and 0 <= mode <= 0o7777):
        raise InvalidInputError(
            f"mode: {mode!r} is no number of permission bits, for example 0o755", component="client"
        )
    return ApiRequest(
        method="PUT",
        path=_files_path(id),
        read=lambda response: None,
        params=present({"path": path, "mode": None if mode is None else f"{mode:03o}", "user": user}),
        headers={"Content-Type": "application/octet-stream"} | (LIVING if living else {}),
        content=data,
    )


def upload_archive(
    id: str, path: str, data: bytes, *, user: str | None = None, living: bool = False
) -> ApiRequest[None]:
    """Return the request that unpacks a tar below a directory."""
    return ApiRequest(
        method="PUT",
        path=f"{trajectory_path(id)}/archive",
        read=lambda response: None,
        params=present({"path": path, "user": user}),
        headers={"Content-Type": "application/octet-stream"} | (LIVING if living else {}),
        content=data,
        patient=True,
    )


def download_archive(id: str, path: str, *, user: str | None = None, living: bool = False) -> ApiRequest[bytes]:
    return ApiRequest(
        method="GET",
        path=f"{trajectory_path(id)}/archive",
        read=lambda response: response.content,
        params=present({"path": path, "user": user}),
        headers=LIVING if living else {},
        patient=True,
    )


def download(id: str, path: str, *, user: str | None = None, living: bool = False) -> ApiRequest[bytes]:
    return ApiRequest(
        method="GET",
        path=_files_path(id),
        read=lambda response: response.content,
        params=present({"path": path, "user": user}),
        headers=LIVING if living else {},
    )


def list_files(
    id: str, path: str, *, user: str | None = None, living: bool = False
) -> ApiRequest[tuple[FileEntry, ...]]:
    read = reader(FileList)
    return ApiRequest(
        method="GET",
        path=_files_path(id),
        read=lambda response: read(response).files,
        params=present({"path": path, "list": "true", "user": user}),
        headers=LIVING if living else {},
    )


def command(
    command: str | Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: str | bytes | None,
    user: str | None = None,
    merge: bool = False,
) -> dict[str, object]:
    """Return the input of an exec function: a string is shell text, a sequence an argument vector."""
    body: dict[str, object] = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    given = {"cwd": cwd, "env": None if env is None else dict(env), "user": user, "merge": merge or None}
    if isinstance(stdin, bytes):
        given["stdin_base64"] = base64.b64encode(stdin).decode("ascii")
    else:
        given["stdin"] = stdin
    return body | {name: value for name, value in given.items() if value is not None}


def in_workdir(workdir: str, path: str) -> str:
    """Return a path in the sandbox; without a ``workdir`` the gateway knows where a relative one begins."""
    return posixpath.join(workdir, path)


def get(path: str, kind: type[_T], params: Mapping[str, str] | None = None) -> ApiRequest[_T]:
    return ApiRequest(method="GET", path=path, read=reader(kind), params=params or {})


def _function_path(name: str) -> str:
    return f"/v1/functions/{quote(name, safe='')}"


def invocation_path(id: str) -> str:
    return f"/v1/invocations/{quote(id, safe='')}"


def _dead_letters_path(id: str | None) -> str:
    return "/v1/dead-letters" if id is None else f"/v1/dead-letters/{quote(id, safe='')}"


def trajectory_path(id: str) -> str:
    """Return the path of a trajectory; raises InvalidInputError for what names none."""
    if not is_name(id):
        raise InvalidInputError(f"trajectory {id[:64]!r} must be {NAME_WORDS}", component="client")
    return f"/v1/trajectories/{quote(id, safe='')}"


def _files_path(id: str) -> str:
    return f"{trajectory_path(id)}/files"


def duration_text(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.3f}s"


def sandbox_choice(given: Mapping[str, Any] | SandboxChoice | None) -> SandboxChoice | None:
    """Return what a trajectory chooses, from its fields by name; raises InvalidInputError for what is none of them."""
    if given is None or isinstance(given, SandboxChoice):
        return given
    try:
        return msgspec.convert(given, SandboxChoice)
    except msgspec.ValidationError as error:
        said, place = explained(error)
        raise InvalidInputError(f"sandbox{place}: {said}") from None


def _said(value: msgspec.Struct) -> object:
    """Return a request as plain values, without what it does not say."""
    fields = msgspec.to_builtins(value)
    return {
        name: {inner: each for inner, each in said.items() if each is not None} if isinstance(said, dict) else said
        for name, said in fields.items()
        if said is not None
    }


def present(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
