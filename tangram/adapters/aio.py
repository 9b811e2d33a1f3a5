"""What every adapter is made of, in its asynchronous form: nine verbs over one client."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tangram.adapters.provider import (
    CommandEnd,
    GradeReport,
    InfrastructureFailed,
    command_end,
    grade_report,
    packed,
    refusal_of,
    result_of,
    unpacked,
)
from tangram.client.aio import AsyncClient, AsyncTrajectory
from tangram.client.aio_primitives import aside
from tangram.errors import TangramError


class AsyncSandboxProvider:
    """Sandboxes of a gateway for a framework; use it as an async context manager, or `close` it.

    ``server`` and ``token`` default to TANGRAM_SERVER and TANGRAM_TOKEN. ``function`` is the exec function whose
    sandboxes these are, ``grader`` the pytest function that grades, ``task`` the RL task of everything.
    With ``durable`` each call has a key: it survives a gateway that is killed and started again, at the price of a
    durable record; giving up then does not cancel it, ending its sandbox does.

    A sandbox is named by a text, that of its trajectory. What goes wrong raises InfrastructureFailed, CommandTimedOut
    (a bound of time, the command's own doing), or the built-in error of a file (FileNotFoundError, PermissionError,
    IsADirectoryError, NotADirectoryError), and nothing else.

    It may be pickled and used from several event loops. A sandbox ends by `end`, by `close`, soon after its process
    has died, and by its ``idle_ttl``.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        function: str = "shell",
        grader: str = "pytest_reward",
        task: str | None = None,
        durable: bool = False,
        client: AsyncClient | None = None,
    ) -> None:
        self.function, self.grader, self.task = function, grader, task
        self._durable = durable
        self._owns = client is None
        self._client = AsyncClient(server, token=token) if client is None else client
        self._held: dict[str, AsyncTrajectory] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._client.server!r}, function={self.function!r})"

    async def __aenter__(self) -> AsyncSandboxProvider:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def sandboxes(self) -> Sequence[str]:
        """Those that were opened here and not ended, in the order of their opening."""
        return tuple(self._held)

    async def close(self) -> None:
        """End the sandboxes that were opened here, and close the client if it is this one's own."""
        failures = []
        for sandbox in self.sandboxes:
            try:
                await self.end(sandbox)
            except InfrastructureFailed as error:  # the others are ended all the same
                failures.append(error)
        if self._owns:
            await self._client.close()
        if failures:
            raise failures[0]

    async def open(
        self,
        name: str | None = None,
        *,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        memory: str | None = None,
        network: str | None = None,
        idle_ttl: str | None = None,
        step: int | None = None,
    ) -> str:
        """Make a sandbox, or find the one of that name that lives, and return its name.

        What is chosen is held against what the function allows (docs/SANDBOXES.md); without, it is the function's own.
        It counts as a rollout of the ``step`` of the task, if one is named.
        """
        choices = {"image": image, "env": dict(env) if env else None, "workdir": workdir, "user": user}
        choices |= {"memory": memory, "network": network, "idle_ttl": idle_ttl}
        chosen = {key: value for key, value in choices.items() if value is not None}
        sandbox = name or f"sandbox-{secrets.token_hex(8)}"
        async with self._refusals(sandbox):
            handle = self._client.trajectory(
                sandbox, function=self.function, task=self.task, step=step, sandbox=chosen or None
            )
            await handle.open()
        self._held[sandbox] = handle
        return sandbox

    async def run(
        self,
        sandbox: str,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        user: str | None = None,
        merge: bool = False,
        timeout_s: float | None = None,
    ) -> CommandEnd:
        """Run a command to its end: a string is text for ``sh``, a sequence an argument vector.

        With ``merge`` standard error goes to stdout, in order. ``timeout_s`` bounds the execution, not the wait for
        cores; the function's own timeout holds too.
        """
        handle = self._handle(sandbox)
        async with self._refusals(sandbox):
            ended = await handle.exec(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                user=user,
                merge=merge,
                timeout_s=timeout_s,
                key=self._key(),
            )
        return command_end(ended, sandbox)

    async def write(
        self, sandbox: str, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None
    ) -> None:
        """Write a file, and make its parents; a relative path begins at the sandbox's working directory."""
        handle = self._handle(sandbox)
        async with self._refusals(sandbox, path):
            await handle.upload(path, data, mode=mode, user=user)

    async def read(self, sandbox: str, path: str, *, user: str | None = None) -> bytes:
        """Return the contents of a file."""
        handle = self._handle(sandbox)
        async with self._refusals(sandbox, path):
            return await handle.download(path, user=user)

    async def upload_tree(self, sandbox: str, source: str | Path, target: str, *, user: str | None = None) -> None:
        """Copy what a directory of this machine holds into one of the sandbox, which is made."""
        handle = self._handle(sandbox)
        data = await aside(packed, source)
        async with self._refusals(sandbox, target):
            await handle.upload_archive(target, data, user=user)

    async def download_tree(self, sandbox: str, source: str, target: str | Path, *, user: str | None = None) -> None:
        """Copy what a directory of the sandbox holds into one of this machine, which is made."""
        handle = self._handle(sandbox)
        async with self._refusals(sandbox, source):
            data = await handle.download_archive(source, user=user)
        await aside(unpacked, data, target)

    async def grade(
        self,
        input: Mapping[str, Any],
        *,
        sandbox: str | None = None,
        function: str | None = None,
        timeout_s: float | None = None,
        step: int | None = None,
    ) -> GradeReport:
        """Run tests by a pytest function, in a sandbox as it stands or in one of its own, and return the verdict.

        Without a sandbox it counts as a rollout of the ``step`` of the task, if one is named.
        """
        ended = await self._call(function or self.grader, input, sandbox, timeout_s, step)
        return grade_report(ended, sandbox or "")

    async def invoke(
        self,
        function: str,
        input: Mapping[str, Any],
        *,
        sandbox: str | None = None,
        timeout_s: float | None = None,
        step: int | None = None,
    ) -> Any:
        """Run any function of the gateway, in a sandbox or without one, and return its result; ``step`` as `grade`."""
        return result_of(await self._call(function, input, sandbox, timeout_s, step), sandbox or "")

    async def end(self, sandbox: str) -> None:
        """End a sandbox with everything in it; one that has ended, or was never opened here, is let be."""
        handle = self._held.pop(sandbox, None)
        if handle is not None:
            async with self._refusals(sandbox):
                await handle.close()

    async def _call(
        self,
        function: str,
        input: Mapping[str, Any],
        sandbox: str | None,
        timeout_s: float | None,
        step: int | None,
    ) -> Any:
        async with self._refusals(sandbox or ""):
            if sandbox is not None:
                handle = self._handle(sandbox)
                return await handle.invoke(function, input, timeout_s=timeout_s, key=self._key())
            return await self._client.invoke(
                function, input, task=self.task, step=step, timeout_s=timeout_s, key=self._key()
            )

    def _handle(self, sandbox: str) -> AsyncTrajectory:
        try:
            return self._held[sandbox]
        except KeyError:
            message = f"sandbox {sandbox!r} was not opened by this provider, or has ended"
            raise InfrastructureFailed(message, "not_found", sandbox) from None

    def _key(self) -> str | None:
        return secrets.token_urlsafe(16) if self._durable else None

    @asynccontextmanager
    async def _refusals(self, sandbox: str, path: str = "") -> AsyncIterator[None]:
        """Raise what the gateway refuses, or cannot do, as this provider's errors."""
        try:
            yield
        except TangramError as error:
            raise refusal_of(error, sandbox, path) from error
