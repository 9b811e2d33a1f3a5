"""Inspect's sandbox, found by its entry point: ``inspect eval task.py --sandbox tangram:swe.yaml``.

# swe.yaml, or InspectSandboxConfig(...) in Python; all of it is optional
function: swe
image: swebench/sweb.eval.x86_64.django_1776_django-1
user: root
"""

from __future__ import annotations

import json
import posixpath
from pathlib import Path
from typing import Any

from tangram.adapters.aio import AsyncSandboxProvider
from tangram.adapters.provider import CommandEnd, CommandTimedOut, InfrastructureFailed, missing
from tangram.client.aio_primitives import aside

try:
    import yaml
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentLimits,
        sandboxenv,
    )
    from inspect_ai.util._sandbox.environment import SandboxUnavailableError
    from pydantic import BaseModel
except ImportError as error:
    raise missing("inspect", "inspect-ai", error) from error

#: What a shell says of a program that it cannot execute.
NOT_EXECUTABLE = 126


class InspectSandboxConfig(BaseModel, extra="forbid", frozen=True):
    """What a task or a sample chooses; the rest is the function's own. Unknown keys are refused."""

    server: str | None = None
    function: str = "shell"
    task: str | None = None
    image: str | None = None
    env: dict[str, str] | None = None
    workdir: str | None = None
    user: str | None = None
    memory: str | None = None
    network: str | None = None
    idle_ttl: str | None = None

    def chosen(self) -> dict[str, Any]:
        """Return what the sandbox chooses."""
        return self.model_dump(exclude={"server", "function", "task"}, exclude_none=True)


@sandboxenv(name="tangram")
class InspectSandbox(SandboxEnvironment):
    """One sample's sandbox. Errors are those of Inspect's contract; what is our fault is SandboxUnavailableError."""

    def __init__(self, provider: AsyncSandboxProvider, sandbox: str, workdir: str) -> None:
        super().__init__()
        self._provider, self.sandbox, self._workdir = provider, sandbox, workdir

    @classmethod
    def config_files(cls) -> list[str]:
        """A file of this name beside a task is its configuration."""
        return ["tangram-sandbox.yaml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration of a log that is read again."""
        return InspectSandboxConfig(**config)

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """Make the sample's sandbox; raises SandboxUnavailableError."""
        wanted = await aside(_config, config)
        provider = AsyncSandboxProvider(wanted.server, function=wanted.function, task=wanted.task)
        try:
            sandbox = await provider.open(**wanted.chosen())
            workdir = (await provider.run(sandbox, ["/bin/pwd"])).output.rstrip("\n")
        except (InfrastructureFailed, CommandTimedOut) as error:
            await _close(provider)
            raise SandboxUnavailableError(str(error)) from error
        return {"default": cls(provider, sandbox, workdir)}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        """End the sample's sandbox, also after an interruption."""
        for environment in environments.values():
            if isinstance(environment, InspectSandbox):
                await _close(environment._provider)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command; raises TimeoutError, PermissionError, OutputLimitExceededError and SandboxUnavailableError.

        ``timeout_retry`` is ignored: what ran once may not be safe to run again.
        """
        try:
            ended = await self._provider.run(
                self.sandbox,
                cmd,
                cwd=posixpath.join(self._workdir, cwd) if cwd else None,
                env=env,
                stdin=input,
                user=user,
                timeout_s=timeout,
            )
        except CommandTimedOut as late:
            raise TimeoutError(str(late)) from late
        except InfrastructureFailed as error:
            if user is not None and error.reason == "invalid_input" and "user" in error.message:
                return ExecResult(False, NOT_EXECUTABLE, "", error.message)
            raise SandboxUnavailableError(str(error)) from error
        return _checked(ended)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file; a relative path begins at the sample's directory."""
        await self._file(self._provider.write(self.sandbox, self._at(file), contents))

    async def read_file(self, file: str, text: bool = True) -> str | bytes:  # type: ignore[override]
        """Read a file; raises OutputLimitExceededError beyond Inspect's limit, and UnicodeDecodeError."""
        data: bytes = await self._file(self._provider.read(self.sandbox, self._at(file)))
        if len(data) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode("utf-8") if text else data

    def _at(self, file: str) -> str:
        return posixpath.join(self._workdir, file)

    async def _file(self, verb: Any) -> Any:
        try:
            return await verb
        except InfrastructureFailed as error:
            raise SandboxUnavailableError(str(error)) from error


def _config(value: Any) -> InspectSandboxConfig:
    """Return the configuration of a task: a model, a YAML or JSON file, or nothing."""
    if value is None:
        return InspectSandboxConfig()
    if isinstance(value, InspectSandboxConfig):
        return value
    path = Path(str(value))
    text = path.read_text(encoding="utf-8")
    return InspectSandboxConfig(**((json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)) or {}))


def _checked(ended: CommandEnd) -> ExecResult[str]:
    limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    if ended.truncated or max(len(ended.stdout), len(ended.stderr)) > limit:
        longest = max(ended.stdout, ended.stderr, key=len)[:limit].decode("utf-8", "replace")
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, longest)
    if ended.exit_code == NOT_EXECUTABLE and "ermission denied" in ended.errors:
        raise PermissionError(ended.errors.strip())
    return ExecResult(ended.exit_code == 0, ended.exit_code, ended.output, ended.errors)


async def _close(provider: AsyncSandboxProvider) -> None:
    try:
        await provider.close()
    except InfrastructureFailed as error:
        raise SandboxUnavailableError(str(error)) from error
