"""The handle of one trajectory, for the asynchronous client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from tangram.client import requests, session_requests, snapshot_requests
from tangram.client.aio.session import AsyncSessionHandle, AsyncSessionSender
from tangram.client.heartbeats import Heartbeats
from tangram.client.requests import ApiRequest
from tangram.client.results import InvocationResult
from tangram.errors import InvalidInputError, NotFoundError, TrajectoryEndedError
from tangram.types import FileEntry, SandboxChoice, SnapshotInfo


class AsyncSender(AsyncSessionSender, Protocol):
    """Who sends what a handle asks for: the client."""

    heartbeats: Heartbeats

    async def _invoke(self, request: ApiRequest[InvocationResult], logs: bool) -> InvocationResult: ...


class AsyncTrajectory:
    """One rollout: its actions run in order in one sandbox, which is removed on leaving.

    Once it was opened (by entering it, or by `open`), whatever is asked of it raises TrajectoryEndedError after its
    end, whoever ended it: it never goes on in a new, empty sandbox. It may be pickled: copies share the trajectory.
    """

    def __init__(
        self,
        client: AsyncSender,
        id: str,
        *,
        function: str,
        task: str | None,
        step: int | None = None,
        workdir: str,
        sandbox: SandboxChoice | None = None,
        snapshot: str | None = None,
    ) -> None:
        self.id = id
        self._client = client
        self._function = function
        self._task = task
        self._step = step
        self._workdir = workdir
        self._sandbox = sandbox
        self._snapshot = snapshot
        self._opened = False
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> Self:
        """Make the sandbox as it was chosen, or find the one that lives; a closed handle begins anew.

        Raises InvalidInputError for what the function does not allow, ConflictError if it lives in another sandbox.
        """
        chosen = (self._function, self._task, self._sandbox, self._snapshot, self._step)
        request = requests.open_trajectory(self.id, *chosen, lease_s=self._client.heartbeats.lease_s)
        was_held = self._opened and not self._closed
        self._client.heartbeats.hold(self)
        try:
            await self._client._send(request)
        except BaseException:
            if not was_held:
                self._client.heartbeats.let_go(self)
            raise
        return self._begin()

    def _begin(self) -> Self:
        """Note that it was opened, and hold it from now on."""
        self._opened, self._closed = True, False
        self._client.heartbeats.hold(self)
        return self

    async def snapshot(self) -> SnapshotInfo:
        """Keep its files as they are when all that was asked of it before has ended, for others to begin with.

        Raises ConflictError while files are on their way, CapacityExceededError while its node is not reached.
        """
        self._living()
        return await self._client._send(snapshot_requests.take_snapshot(self.id))

    async def fork(self, to: Sequence[str], *, step: int | None = None) -> Sequence[Self]:
        """Open trajectories that begin with its files as they are now, and return their handles: all, or none.

        They count for a ``step`` of the task only if it is named here. Raises as `snapshot`, and ConflictError for a
        name that lives. Each handle is to be closed, or entered.
        """
        self._living()
        asked = (self.id, self._function, to, self._task, step, self._client.heartbeats.lease_s)
        answer = await self._client._send(snapshot_requests.fork(*asked))
        return [self._forked(each.trajectory, answer.snapshot.snapshot) for each in answer.trajectories]

    def _forked(self, id: str, snapshot: str) -> Self:
        chosen: dict[str, Any] = {"function": self._function, "task": self._task, "workdir": self._workdir}
        return type(self)(self._client, id, snapshot=snapshot, **chosen)._begin()

    async def close(self) -> None:
        """End the trajectory; idempotent."""
        self._closed = True
        self._client.heartbeats.let_go(self)
        try:
            await self._client._send(requests.end_trajectory(self.id))
        except NotFoundError:
            return

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        merge: bool = False,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> InvocationResult:
        """Run a command: a string is shell text, a sequence an argument vector.

        With ``merge`` standard error goes to stdout, in the order in which both were written.
        """
        given = requests.command(command, self._directory(cwd), env, stdin, user, merge)
        return await self.invoke(self._function, given, timeout_s=timeout_s, key=key)

    async def session(
        self,
        command: str | Sequence[str],
        *,
        terminal: tuple[int, int] | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSessionHandle:
        """Begin a command to type to: on a terminal of so many rows and columns, or with pipes.

        It is an action of the trajectory, so it waits for the one before, and the next one waits for its end.
        """
        request = session_requests.open_session(
            self.id,
            self._function,
            command,
            {"cwd": self._directory(cwd), "env": None if env is None else dict(env), "user": user},
            terminal,
            task=self._task,
            timeout_s=timeout_s,
            living=self._living(),
        )
        begun = await self._client._send(request)
        return AsyncSessionHandle(self._client, begun.id, begun=True)

    def _directory(self, cwd: str | None) -> str | None:
        """Return where a command runs; None for the sandbox's own working directory."""
        return requests.in_workdir(self._workdir, cwd) if cwd else self._workdir or cwd

    async def invoke(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        key: str | None = None,
        logs: bool = False,
    ) -> InvocationResult:
        """Run a function in this trajectory. One ``key``, one execution: giving up does not cancel it then."""
        request = requests.invoke(
            function,
            input,
            mode="sync",
            task=self._task,
            step=self._step,
            trajectory=self.id,
            key=key,
            timeout_s=timeout_s,
            living=self._living(),
        )
        return await self._client._invoke(request, logs)

    async def upload(self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None) -> None:
        """Write a file, as one of the users that the function allows; a relative path begins at the working directory.

        A file that is there keeps its owner and, without ``mode``, its mode. Raises ConflictError for a place that
        cannot be written to; ``detail["file_error"]`` says why.
        """
        content = data.encode() if isinstance(data, str) else data
        where = requests.in_workdir(self._workdir, path)
        await self._client._send(requests.upload(self.id, where, content, mode, user=user, living=self._living()))

    async def download(self, path: str, *, user: str | None = None) -> bytes:
        """Read a file; raises NotFoundError."""
        where = requests.in_workdir(self._workdir, path)
        return await self._client._send(requests.download(self.id, where, user=user, living=self._living()))

    async def list(self, path: str = ".", *, user: str | None = None) -> Sequence[FileEntry]:
        """Return the entries of a directory; raises NotFoundError."""
        where = requests.in_workdir(self._workdir, path)
        return await self._client._send(requests.list_files(self.id, where, user=user, living=self._living()))

    async def upload_archive(self, path: str, data: bytes, *, user: str | None = None) -> None:
        """Unpack a tar below a directory, which is made; no entry leaves it."""
        where = requests.in_workdir(self._workdir, path)
        await self._client._send(requests.upload_archive(self.id, where, data, user=user, living=self._living()))

    async def download_archive(self, path: str = ".", *, user: str | None = None) -> bytes:
        """Read a directory, or a file, as a tar; raises NotFoundError."""
        where = requests.in_workdir(self._workdir, path)
        return await self._client._send(requests.download_archive(self.id, where, user=user, living=self._living()))

    def _living(self) -> bool:
        """Return whether the gateway must know of it; raises TrajectoryEndedError if this handle was closed."""
        if self._closed:
            raise TrajectoryEndedError(f"trajectory {self.id!r} was closed")
        if (self._sandbox is not None or self._snapshot is not None) and not self._opened:
            raise InvalidInputError(f"trajectory {self.id!r} has chosen its sandbox: enter it, or call open, first")
        if self._opened:
            self._client.heartbeats.hold(self)
        return self._opened
