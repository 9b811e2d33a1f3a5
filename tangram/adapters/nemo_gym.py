"""NeMo-Gym's sandbox provider, found by its entry point: ``AsyncSandbox({"tangram": {"function": "swe"}})``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.adapters.aio import AsyncSandboxProvider
from tangram.adapters.provider import CommandTimedOut, InfrastructureFailed, missing, read_file, write_file
from tangram.client.aio_primitives import aside

try:
    from nemo_gym.sandbox.providers.base import (
        SandboxCreateError,
        SandboxExecResult,
        SandboxHandle,
        SandboxSpec,
        SandboxStatus,
    )
except ImportError as error:
    raise missing("nemo_gym", "nemo-gym", error) from error

#: Where NeMo-Gym wants a status and there was none, beside ``error_type``; no process ends so.
NO_STATUS = -1


class NemoGymProvider:
    """Sandboxes for NeMo-Gym.

    Keywords are those of ``AsyncSandboxProvider``, and ``idle_ttl`` for specs that say no ``ttl_s``.
    """

    name = "tangram"

    def __init__(self, server: str | None = None, *, idle_ttl: str | None = None, **options: Any) -> None:
        self._provider = AsyncSandboxProvider(server, **options)
        self._idle_ttl = idle_ttl

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Make a sandbox; raises SandboxCreateError, also for what a spec asks and no gateway has."""
        resources = spec.resources
        if spec.entrypoint:
            raise SandboxCreateError("spec.entrypoint: a sandbox has no main process; run the command with exec")
        if resources.gpu:
            raise SandboxCreateError("spec.resources.gpu: sandboxes have no GPU; models are functions of the gateway")
        if spec.provider_options:
            raise SandboxCreateError(f"spec.provider_options: nothing is known of {', '.join(spec.provider_options)}")
        try:
            sandbox = await self._provider.open(
                image=spec.image,
                env=spec.env,
                workdir=spec.workdir,
                memory=None if resources.memory_mib is None else f"{resources.memory_mib}Mi",
                idle_ttl=self._idle_ttl if spec.ttl_s is None else f"{spec.ttl_s:g}s",
            )
        except InfrastructureFailed as error:
            raise SandboxCreateError(str(error)) from error
        return SandboxHandle(sandbox_id=sandbox, provider_name=self.name, raw=None)

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run shell text. A bound of time and what is our fault have an ``error_type`` and no process's status."""
        try:
            ended = await self._provider.run(
                handle.sandbox_id,
                ["/bin/bash", "-c", command],
                cwd=cwd,
                env=env,
                user=None if user is None else str(user),
                timeout_s=timeout_s,
            )
        except CommandTimedOut as late:
            output = [stream.decode("utf-8", "replace") for stream in (late.stdout, late.stderr)]
            return SandboxExecResult(output[0], f"{output[1]}{late}", NO_STATUS, "timeout")
        except InfrastructureFailed as error:
            return SandboxExecResult(None, str(error), NO_STATUS, "sandbox")
        return SandboxExecResult(ended.output, ended.errors, ended.exit_code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy a file of this machine, with its mode."""
        data, mode = await aside(read_file, source_path)
        await self._provider.write(handle.sandbox_id, target_path, data, mode=mode)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy a file of the sandbox; parents are made."""
        data = await self._provider.read(handle.sandbox_id, source_path)
        await aside(write_file, target_path, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Return whether commands work in it."""
        if handle.sandbox_id not in self._provider.sandboxes:
            return SandboxStatus.STOPPED
        try:
            await self._provider.run(handle.sandbox_id, ["/bin/true"])
        except (InfrastructureFailed, CommandTimedOut):
            return SandboxStatus.ERROR
        return SandboxStatus.RUNNING

    async def close(self, handle: SandboxHandle) -> None:
        """End a sandbox."""
        await self._provider.end(handle.sandbox_id)

    async def aclose(self) -> None:
        """End what is left, and close the connections."""
        await self._provider.close()
