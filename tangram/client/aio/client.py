"""The asynchronous client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import httpx
import msgspec

from tangram.client import requests, snapshot_requests
from tangram.client.address import server_of, token_of
from tangram.client.aio.connections import AsyncConnectionPool, AsyncLink
from tangram.client.aio.functions import AsyncFunctions
from tangram.client.aio.nodes import AsyncNodeCalls
from tangram.client.aio.running import AsyncOpened, for_each, pause
from tangram.client.aio.session import AsyncSessionHandle, attached
from tangram.client.aio.tasks import AsyncTaskCalls
from tangram.client.aio.trajectory import AsyncTrajectory
from tangram.client.answers import connection_lost, error_of
from tangram.client.bulk import CONCURRENCY, MapEnds, OnProgress
from tangram.client.credentials import Bearer
from tangram.client.heartbeats import LEASE_S, Heartbeats
from tangram.client.log_follower import LogFollower
from tangram.client.requests import ApiRequest, BatchCall
from tangram.client.results import InvocationResult, result_of
from tangram.client.retries import FailureStreak, Retries
from tangram.errors import ConnectionFailed, InvalidInputError, MapFailed, TangramError
from tangram.types import (
    ActivityInfo,
    ImageInfo,
    LogLine,
    QueueEntry,
    SandboxChoice,
    SnapshotInfo,
    TrajectoryInfo,
)

_T = TypeVar("_T")
#: Longest silence of an answer that is no invocation, and of a followed log, which has heartbeats.
ANSWER_S = 60.0
PAGE = 100
WAIT_SLICE_S = 30.0
#: Connections of a client, and how many of them calls that last leave to the others (cancel, upload, get ...).
CONNECTIONS = 640
SPARE = 64


class AsyncClient(AsyncFunctions, AsyncNodeCalls, AsyncTaskCalls):
    """A client of one gateway; use it as an async context manager, or `close` it.

    ``server`` and ``token`` default to TANGRAM_SERVER and TANGRAM_TOKEN; `http://127.0.0.1:8080` without, and the
    token that a gateway of this user on this machine wrote down.
    ``ca`` is a file of the certificates that a gateway with TLS is known by (TANGRAM_CA; the system's without), and
    ``cert`` one of the client's own with its key (TANGRAM_CERT), if the gateway wants to know it.
    A trajectory that it opened ends when for ``lease_s`` seconds neither this process was heard of nor an action used
    it; a thread sends the heartbeats. None: it has its ``idle_ttl`` alone.
    With ``raise_failures`` an invocation that ended badly raises InvocationFailed instead of being returned.
    Every method raises the errors of `tangram.errors`.

    It may be pickled, inherited by fork, and used from several event loops: its connections are opened where it is
    used. It opens at most ``connections``; calls that find none free wait.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        retries: Retries | None = None,
        raise_failures: bool = False,
        connections: int = CONNECTIONS,
        ca: str | None = None,
        cert: str | None = None,
        lease_s: float | None = LEASE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if connections < 2:
            raise InvalidInputError(f"connections must be at least 2, not {connections}")
        self.server = server_of(server)
        self._token = token_of(token)
        self._retries = retries or Retries()
        #: Whether a gateway has answered.
        self._reached = False
        self._raise_failures = raise_failures
        self._connections = connections
        self._ca, self._cert = ca, cert
        self._transport = transport
        #: Says to the gateway that whoever holds an opened trajectory lives.
        self.heartbeats = Heartbeats(self.server, self._token, lease_s if transport is None else None, ca, cert)
        self._opened = AsyncOpened(self._open)
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r})"

    def __getstate__(self) -> dict[str, Any]:
        # What is open stays here; the copy opens its own when it is used.
        return {name: value for name, value in self.__dict__.items() if name != "_opened"} | {"_closed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opened = AsyncOpened(self._open)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close what is open in this process and event loop; no further call is possible."""
        self._closed = True
        self.heartbeats.close()
        link = self._opened.take()
        if link is not None:
            await link.http.aclose()

    async def invoke(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        task: str | None = None,
        step: int | None = None,
        trajectory: str | None = None,
        parent: str | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        wait_s: float | None = None,
        logs: bool = False,
    ) -> InvocationResult:
        """Run the function and return its end; after ``wait_s`` the record as it stands, while the work goes on.

        Giving up (a cancelled coroutine, a broken connection) cancels the invocation, unless it has a ``key``: one
        key, one execution.
        """
        request = requests.invoke(
            function,
            input,
            mode="sync",
            task=task,
            step=step,
            trajectory=trajectory,
            parent=parent,
            key=key,
            timeout_s=timeout_s,
            wait_s=wait_s,
        )
        return await self._invoke(request, logs)

    async def submit(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        task: str | None = None,
        step: int | None = None,
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
            step=step,
            trajectory=trajectory,
            parent=parent,
            key=key,
            timeout_s=timeout_s,
            callback_url=callback_url,
        )
        return await self._send(request)

    async def submit_all(
        self, calls: Sequence[BatchCall], *, wait: str = "none", timeout_s: float | None = None
    ) -> list[InvocationResult | TangramError]:
        """Queue many with one request; return the verdict of each, in order: its record, or what refused it.

        ``wait`` is ``none``, ``any`` or ``all``: for whose end to wait first, at most ``timeout_s``.
        """
        return await self._send(requests.batch(calls, wait, timeout_s))

    @overload
    async def map(
        self,
        function: str,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task: str | None = None,
        step: int | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        concurrency: int = CONCURRENCY,
        progress: OnProgress | None = None,
        return_failures: Literal[False] = False,
    ) -> list[InvocationResult]: ...

    @overload
    async def map(
        self,
        function: str,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task: str | None = None,
        step: int | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        concurrency: int = CONCURRENCY,
        progress: OnProgress | None = None,
        return_failures: Literal[True],
    ) -> list[InvocationResult | TangramError]: ...

    async def map(
        self,
        function: str,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task: str | None = None,
        step: int | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        concurrency: int = CONCURRENCY,
        progress: OnProgress | None = None,
        return_failures: bool = False,
    ) -> list[InvocationResult] | list[InvocationResult | TangramError]:
        """Run the function once for each input and return the ends in the order of the inputs.

        At most ``concurrency`` run at once; inputs are taken when there is room, so they may be a generator.
        ``progress`` is called after each end. With a ``key`` each call has the key ``KEY-INDEX``: a map that is
        repeated after a crash runs nothing twice.

        A call that raises does not end the others: they all run, then MapFailed is raised, whose ``results`` holds
        every end; with ``return_failures`` the errors are returned in their places instead.
        """
        ends = MapEnds(inputs, progress)

        async def call(index: int, input: Mapping[str, Any]) -> None:
            own_key = None if key is None else f"{key}-{index}"
            ends.take(index, await self._end_of(function, input, task, step, own_key, timeout_s))

        if concurrency < 1:
            raise InvalidInputError(f"concurrency must be at least 1, not {concurrency}")
        await for_each(inputs, call, concurrency)
        if return_failures:
            return ends.ordered()
        succeeded = ends.succeeded()
        if succeeded is None:
            raise MapFailed(ends.ordered())
        return succeeded

    async def _end_of(
        self,
        function: str,
        input: Mapping[str, Any],
        task: str | None,
        step: int | None,
        key: str | None,
        timeout_s: float | None,
    ) -> InvocationResult | TangramError:
        try:
            return await self.invoke(function, input, task=task, step=step, key=key, timeout_s=timeout_s)
        except TangramError as error:
            return error

    async def wait(self, id: str, timeout_s: float | None = None) -> InvocationResult:
        """Return the end of an invocation; raises TimeoutError if it has not ended after ``timeout_s``."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = WAIT_SLICE_S if deadline_s is None else min(WAIT_SLICE_S, deadline_s - time.monotonic())
            result = await self._send(requests.get_invocation(id, max(0.0, left_s)))
            if result.ended:
                return self._judged(result)
            if left_s <= 0:
                raise TimeoutError(f"invocation {id} is {result.state} after {timeout_s} s")

    async def get(self, id: str) -> InvocationResult:
        """Return the record as it stands."""
        return await self._send(requests.get_invocation(id))

    async def list(
        self,
        *,
        function: str | None = None,
        task: str | None = None,
        trajectory: str | None = None,
        state: str | None = None,
        reason: str | None = None,
        since: str | None = None,
        until: str | None = None,
        dead: bool | None = None,
        before: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[InvocationResult]:
        """Yield records, newest first, without input and result; at most ``limit``; ``dead``: dead letters.

        ``since`` and ``until`` bound the acceptance: an instant of RFC 3339, or how long ago (``15m``); ``before`` is
        the id behind which it goes on.
        """
        filters = {"function": function, "task": task, "trajectory": trajectory, "state": state}
        filters |= {"reason": reason, "since": since, "until": until}
        filters["dead"] = None if dead is None else str(dead).lower()
        left, cursor = limit, before
        while left is None or left > 0:
            page = await self._send(requests.list_invocations(filters, min(PAGE, left or PAGE), cursor))
            for record in page.invocations:
                yield result_of(record)
            left = None if left is None else left - len(page.invocations)
            cursor = page.next_cursor
            if cursor is None:
                return

    async def cancel(self, id: str) -> InvocationResult:
        """Cancel it; raises ConflictError if it has ended already."""
        return await self._send(requests.cancel_invocation(id))

    async def redrive(self, id: str) -> InvocationResult:
        """Send a dead letter again, as an invocation of its own; raises ConflictError if it is none."""
        return await self._send(requests.redrive(id))

    async def purge(self, id: str) -> int:
        """Take a dead letter off the list, its record stays; raises ConflictError if it is none."""
        return (await self._send(requests.purge(id))).purged

    async def purge_all(self, function: str | None = None) -> int:
        """Take all dead letters, or those of one function, off the list; return how many they were."""
        return (await self._send(requests.purge(None, function))).purged

    async def logs(self, id: str, *, follow: bool = False, offset: int = 0) -> AsyncIterator[LogLine]:
        """Yield the log from ``offset`` on; with ``follow`` until the invocation has ended, over broken connections."""
        follower = LogFollower(offset, self._retries, to_its_end=follow)
        while not follower.ended:
            try:
                async for line in self._log_lines(id, follow, follower):
                    yield line
                if not follower.ended:
                    raise ConnectionFailed(f"the log of {id} broke off")
            except TangramError as error:
                wait_s = follower.again_s(error)
                if wait_s is None:
                    raise
                await pause(wait_s)

    async def _log_lines(self, id: str, follow: bool, follower: LogFollower) -> AsyncIterator[LogLine]:
        """Yield what one connection brings."""
        link = self._link()
        params = {"follow": "true" if follow else "false", "offset": str(follower.offset)}
        try:
            async with link.lasting, link.http.stream("GET", requests.log_path(id), params=params) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for text in response.aiter_lines():
                    if (line := follower.feed(text)) is not None:
                        yield line
        except httpx.TransportError as error:
            raise connection_lost(f"log of {id}", error) from error

    async def images(self) -> Sequence[ImageInfo]:
        """Return the container images of the gateway, and how far pulls are."""
        return (await self._send(requests.list_images())).images

    async def pull_images(self, images: Sequence[str], *, wait_s: float | None = None) -> Sequence[ImageInfo]:
        """Begin to pull container images ahead of a run, and return their states, after ``wait_s`` at the latest."""
        return (await self._send(requests.pull_images(images, wait_s))).images

    async def queue(self, limit: int = 100) -> Sequence[QueueEntry]:
        """Return the first ``limit`` (at most 1000) actions that wait, in order of service, and for what."""
        return (await self._send(requests.get_queue(limit))).queue

    async def activity(self) -> ActivityInfo:
        """Return the rates and times of the last minute, and the failures of the last 15."""
        return await self._send(requests.get_activity())

    async def trajectories(self) -> Sequence[TrajectoryInfo]:
        """Return the living trajectories."""
        found: list[TrajectoryInfo] = []
        cursor = None
        while True:
            page = await self._send(requests.list_trajectories(cursor))
            found += page.trajectories
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def end_trajectory(self, id: str) -> None:
        """End a trajectory with everything in it; raises NotFoundError."""
        await self._send(requests.end_trajectory(id))

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        """Return the snapshots of trajectories, the oldest first."""
        return (await self._send(snapshot_requests.list_snapshots())).snapshots

    async def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot; raises NotFoundError, or ConflictError while a living trajectory needs it."""
        await self._send(snapshot_requests.remove_snapshot(id))

    def trajectory(
        self,
        id: str,
        *,
        function: str = "shell",
        task: str | None = None,
        step: int | None = None,
        workdir: str = "",
        sandbox: SandboxChoice | Mapping[str, Any] | None = None,
        snapshot: str | None = None,
    ) -> AsyncTrajectory:
        """Return a rollout's environment, made like ``function``'s sandbox on entering and removed on leaving.

        It counts as a rollout of the ``step`` of its task, if one is named (`tell_step`).
        ``workdir`` is where its commands run and relative paths begin; the sandbox's own working directory by default.
        ``sandbox`` is what it chooses within what the function allows: image, env, workdir, user, memory, network and
        idle_ttl, for example ``{"image": "swebench/x", "memory": "2Gi"}``; or ``snapshot`` is the one that it begins
        with, with the choices of the trajectory of which that was taken.
        """
        chosen = requests.sandbox_choice(sandbox)
        return AsyncTrajectory(
            self, id, function=function, task=task, step=step, workdir=workdir, sandbox=chosen, snapshot=snapshot
        )

    async def session(self, id: str) -> AsyncSessionHandle:
        """Attach to a session that was begun before, here or elsewhere; raises NotFoundError."""
        return await attached(self, id)

    async def _invoke(self, request: ApiRequest[InvocationResult], logs: bool) -> InvocationResult:
        result = await self._send(request)
        if logs:
            result = msgspec.structs.replace(result, logs=tuple([line async for line in self.logs(result.id)]))
        return self._judged(result)

    async def _send(self, request: ApiRequest[_T]) -> _T:
        """Send, and send again where that is safe."""
        failing = FailureStreak(self._retries)
        while True:
            try:
                return await self._send_once(request)
            except TangramError as error:
                wait_s = failing.again_s(error, repeatable=request.repeatable, new=not self._reached)
                if wait_s is None:
                    raise
            await pause(wait_s)

    async def _send_once(self, request: ApiRequest[_T]) -> _T:
        link = self._link()
        async with AsyncExitStack() as stack:
            if request.lasting:
                await stack.enter_async_context(link.lasting)
            try:
                response = await link.http.request(
                    request.method,
                    request.path,
                    params=request.params,
                    headers=request.headers,
                    content=request.content,
                    timeout=httpx.Timeout(ANSWER_S, read=None) if request.patient else ANSWER_S,
                )
            except httpx.TransportError as error:
                raise connection_lost(self.server, error) from error
        self._reached = True
        return request.answer(response)

    def _judged(self, result: InvocationResult) -> InvocationResult:
        return result.raise_for_failure() if self._raise_failures else result

    def _link(self) -> AsyncLink:
        if self._closed:
            raise RuntimeError("the client is closed")
        return self._opened.get()

    def _open(self) -> AsyncLink:
        transport = self._transport or AsyncConnectionPool(
            httpx.URL(self.server), self._connections, self._ca, self._cert
        )
        http = httpx.AsyncClient(
            base_url=self.server,
            auth=Bearer(self._token),
            timeout=ANSWER_S,
            transport=transport,
        )
        return AsyncLink(http, max(1, self._connections - SPARE))
