"""The synchronous client: the twin of `gateway.client.aio`, for threads and scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from gateway.client import requests
from gateway.client.following import Following
from gateway.client.problems import ConnectionFailed, error_of, lost
from gateway.client.requests import BatchCall, Request, Retries
from gateway.client.results import FileEntry, InvocationResult, LogLine
from manager.errors import CodedError, NotFound

_T = TypeVar("_T")
#: Longest silence of an answer that is no invocation, and of a followed log, which has heartbeats.
ANSWER_S = 60.0
PAGE = 100
WAIT_SLICE_S = 30.0


class Client:
    """A client of one gateway; use it as a context manager, or `close` it.

    With ``raise_failures`` an invocation that ended badly raises InvocationFailed instead of being returned.
    Every method raises the errors of `manager.errors`, and ConnectionFailed.
    """

    def __init__(
        self,
        server: str = "http://127.0.0.1:8080",
        *,
        token: str = "",
        retries: Retries | None = None,
        raise_failures: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=server,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=ANSWER_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=128),
            transport=transport,
        )
        self._retries = retries or Retries()
        self._raise_failures = raise_failures

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def invoke(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        task: str | None = None,
        trajectory: str | None = None,
        parent: str | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        wait_s: float | None = None,
        logs: bool = False,
    ) -> InvocationResult:
        """Run the function and return its end; after ``wait_s`` the record as it stands, while the work goes on.

        A connection that breaks cancels the invocation, unless it has a ``key``: one key, one execution.
        """
        request = requests.invoke(
            function,
            input,
            mode="sync",
            task=task,
            trajectory=trajectory,
            parent=parent,
            key=key,
            timeout_s=timeout_s,
            wait_s=wait_s,
        )
        result = self._send(request)
        if logs:
            result = replace(result, logs=tuple(self.logs(result.id)))
        return self._judged(result)

    def submit(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        task: str | None = None,
        trajectory: str | None = None,
        parent: str | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        callback_url: str | None = None,
    ) -> InvocationResult:
        """Queue the function and return its record at once; the acceptance is durable."""
        request = requests.invoke(
            function,
            input,
            mode="async",
            task=task,
            trajectory=trajectory,
            parent=parent,
            key=key,
            timeout_s=timeout_s,
            wait_s=None,
            callback_url=callback_url,
        )
        return self._send(request)

    def submit_all(
        self, calls: Sequence[BatchCall], *, wait: str = "none", timeout_s: float | None = None
    ) -> list[InvocationResult | CodedError]:
        """Queue many with one request; the verdict of each, in order: its record, or the error that refused it.

        ``wait`` is ``none``, ``any`` or ``all``: for whose end to wait first, at most ``timeout_s``.
        """
        return self._send(requests.batch(calls, wait, timeout_s))

    def wait(self, id: str, timeout_s: float | None = None) -> InvocationResult:
        """The end of an invocation; raises TimeoutError when it has not ended after ``timeout_s``."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_SLICE_S if deadline_s is None else min(WAIT_SLICE_S, deadline_s - time.monotonic())
            result = self._send(requests.get_invocation(id, max(0.0, left_s)))
            if result.state.terminal:
                return self._judged(result)
            if left_s <= 0:
                raise TimeoutError(f"invocation {id} is {result.state} after {timeout_s} s")

    def get(self, id: str) -> InvocationResult:
        """The record as it stands."""
        return self._send(requests.get_invocation(id))

    def list(
        self,
        *,
        function: str | None = None,
        task: str | None = None,
        trajectory: str | None = None,
        state: str | None = None,
        dead: bool | None = None,
        limit: int | None = None,
    ) -> Iterator[InvocationResult]:
        """Records, newest first, page by page, without input and result; at most ``limit``; ``dead``: dead letters."""
        filters = {"function": function, "task": task, "trajectory": trajectory, "state": state}
        filters["dead"] = None if dead is None else str(dead).lower()
        left, cursor = limit, None
        while left is None or left > 0:
            page = self._send(requests.list_invocations(filters, min(PAGE, left or PAGE), cursor))
            for record in page["invocations"]:
                yield InvocationResult.from_json(record)
            left = None if left is None else left - len(page["invocations"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def cancel(self, id: str) -> InvocationResult:
        """Cancel it; raises Conflict when it has ended already."""
        return self._send(requests.cancel_invocation(id))

    def redrive(self, id: str) -> InvocationResult:
        """Send a dead letter again, as an invocation of its own; raises Conflict when it is none."""
        return self._send(requests.redrive(id))

    def purge(self, id: str) -> int:
        """Take a dead letter off the list, its record stays; raises Conflict when it is none."""
        return self._send(requests.purge(id))

    def purge_all(self, function: str | None = None) -> int:
        """Take all dead letters, or those of one function, off the list; how many they were."""
        return self._send(requests.purge(None, function))

    def logs(self, id: str, *, follow: bool = False, offset: int = 0) -> Iterator[LogLine]:
        """The log from ``offset`` on; with ``follow`` until the invocation has ended, across broken connections."""
        following = Following(offset, self._retries.max_attempts)
        path = requests.get_invocation(id).path + "/logs"
        while not following.ended:
            params = {"follow": "true" if follow else "false", "offset": str(following.offset)}
            try:
                with self._http.stream("GET", path, params=params, timeout=ANSWER_S) as response:
                    if not response.is_success:
                        response.read()
                        raise error_of(response)
                    for text in response.iter_lines():
                        if (line := following.feed(text)) is not None:
                            yield line
            except httpx.TransportError as error:
                if not following.lost():
                    raise lost(f"log of {id}", error) from error
            else:
                if not following.ended and not following.lost():
                    raise ConnectionFailed(f"the log of {id} broke off", component="client")

    def functions(self) -> Sequence[dict[str, Any]]:
        """Every registered function."""
        return list((self._send(requests.get_json("/v1/functions")))["functions"])

    def function(self, name: str) -> dict[str, Any]:
        """One registered function; raises NotFound."""
        return dict(self._send(requests.get_json(requests.function_path(name))))

    def apply(self, files: Mapping[str, str] | None = None, *, dry_run: bool = False) -> dict[str, Any]:
        """Apply configuration files (path -> text), or the server's own files read again; the differences."""
        return dict(self._send(requests.apply(files, dry_run)))

    def resources(self) -> dict[str, Any]:
        """Pools, what is held of them, and what the sandboxes are."""
        return dict(self._send(requests.get_json("/v1/resources")))

    def queue(self, limit: int = 100) -> Sequence[dict[str, Any]]:
        """The first ``limit`` (at most 1000) of what waits, in order of service, and for what."""
        return list((self._send(requests.get_json("/v1/queue", {"limit": str(limit)})))["queue"])

    def tasks(self) -> Sequence[dict[str, Any]]:
        """RL tasks: weights, bounds and use."""
        return list((self._send(requests.get_json("/v1/tasks")))["tasks"])

    def trajectories(self) -> Sequence[dict[str, Any]]:
        """Living trajectories."""
        found: list[dict[str, Any]] = []
        params: dict[str, str] = {}
        while True:
            page = self._send(requests.get_json("/v1/trajectories", params))
            found += page["trajectories"]
            if page["next_cursor"] is None:
                return found
            params = {"cursor": page["next_cursor"]}

    def end_trajectory(self, id: str) -> None:
        """End a trajectory with everything in it; raises NotFound."""
        self._send(requests.delete(requests.trajectory_path(id)))

    def trajectory(
        self, id: str, *, function: str = "shell", task: str | None = None, workdir: str = "/workspace"
    ) -> Trajectory:
        """A rollout's environment, made like ``function``'s sandbox on entering and removed on leaving."""
        return Trajectory(self, id, function=function, task=task, workdir=workdir)

    def _send(self, request: Request[_T]) -> _T:
        """Send, and send again where that is safe."""
        attempt = 1
        while True:
            try:
                return self._send_once(request)
            except CodedError as error:
                wait_s = self._retries.wait_s(error, attempt, repeatable=request.repeatable)
                if wait_s is None:
                    raise
            time.sleep(wait_s)
            attempt += 1

    def _send_once(self, request: Request[_T]) -> _T:
        try:
            response = self._http.request(
                request.method,
                request.path,
                params=request.params,
                headers=request.headers,
                content=request.content,
                timeout=httpx.Timeout(ANSWER_S, read=None) if request.patient else ANSWER_S,
            )
        except httpx.TransportError as error:
            raise lost(str(self._http.base_url), error) from error
        return request.answer(response)

    def _judged(self, result: InvocationResult) -> InvocationResult:
        return result.raise_for_failure() if self._raise_failures else result


class Trajectory:
    """One rollout: its actions run in order in one sandbox, which is removed on leaving."""

    def __init__(self, client: Client, id: str, *, function: str, task: str | None, workdir: str) -> None:
        self.id = id
        self._client = client
        self._function = function
        self._task = task
        self._workdir = workdir

    def __enter__(self) -> Self:
        self._client._send(requests.open_trajectory(self.id, self._function, self._task))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the trajectory; idempotent."""
        try:
            self._client.end_trajectory(self.id)
        except NotFound:
            return

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout_s: float | None = None,
    ) -> InvocationResult:
        """Run a command: a string is shell text, a sequence an argument vector."""
        return self.invoke(self._function, requests.command(command, cwd, env, stdin), timeout_s=timeout_s)

    def invoke(
        self, function: str, input: Mapping[str, Any], *, timeout_s: float | None = None, logs: bool = False
    ) -> InvocationResult:
        """Run a function in this trajectory."""
        return self._client.invoke(function, input, task=self._task, trajectory=self.id, timeout_s=timeout_s, logs=logs)

    def upload(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file; a relative path begins at the working directory."""
        content = data.encode() if isinstance(data, str) else data
        self._client._send(requests.upload(self.id, requests.in_workdir(self._workdir, path), content, mode))

    def download(self, path: str) -> bytes:
        """Read a file; raises NotFound."""
        return self._client._send(requests.download(self.id, requests.in_workdir(self._workdir, path)))

    def list(self, path: str = ".") -> Sequence[FileEntry]:
        """The entries of a directory; raises NotFound."""
        return self._client._send(requests.list_files(self.id, requests.in_workdir(self._workdir, path)))
