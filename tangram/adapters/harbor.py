"""Harbor's environment: ``harbor run --env tangram.adapters.harbor:HarborEnvironment --ek function=harbor ...``.

Its sandboxes need root inside, for Harbor's verifier: ``sandbox: {user: root, users: [root], capabilities: default}``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.adapters.aio import AsyncSandboxProvider
from tangram.adapters.provider import CommandTimedOut, missing, read_file, write_file
from tangram.client.aio_primitives import aside

try:
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
except ImportError as error:
    raise missing("harbor", "harbor", error) from error


class HarborEnvironment(BaseEnvironment):
    """One trial's sandbox. What is our fault raises InfrastructureFailed: the trial has an exception, and no reward.

    Cores are held while a command runs, whatever ``cpus`` a task asks for. ``image_template`` names the image of a
    task that has a Dockerfile alone (nothing is built here): ``registry.example:5000/tasks/{environment_name}``.
    """

    def __init__(
        self,
        *arguments: Any,
        server: str | None = None,
        function: str = "harbor",
        task: str | None = None,
        image_template: str | None = None,
        idle_ttl: str | None = None,
        choose_image: bool | str = True,
        **options: Any,
    ) -> None:
        self._image_template = image_template
        self._choose_image = str(choose_image).lower() not in ("false", "0", "no")
        self._idle_ttl = idle_ttl
        self._provider = AsyncSandboxProvider(server, function=function, task=task)
        self._sandbox = ""
        super().__init__(*arguments, **options)

    @staticmethod
    def type() -> str:
        """Harbor's name of it."""
        return "tangram"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """No network is what a sandbox has unless its function grants one."""
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Memory is bounded; cores are not reserved."""
        return EnvironmentResourceCapabilities(memory_limit=True, memory_request=True)

    def _validate_definition(self) -> None:
        if self._choose_image and self._image() is None:
            raise ValueError(
                f"{self.environment_name} names no docker_image, and nothing is built here: set it in task.toml, give "
                "--ek image_template=REGISTRY/{environment_name}, or --ek choose_image=false for the function's own"
            )

    def _image(self) -> str | None:
        if self.task_env_config.docker_image:
            return str(self.task_env_config.docker_image)
        if self._image_template:
            return self._image_template.format(environment_name=self.environment_name)
        return None

    async def start(self, force_build: bool) -> None:
        """Make the sandbox, and the directories that Harbor expects in it."""
        memory = self._effective_memory_mb
        self._sandbox = await self._provider.open(
            image=self._image() if self._choose_image else None,
            memory=f"{memory}Mi" if memory else None,
            network="none" if self._network_disabled else None,
            idle_ttl=self._idle_ttl,
        )
        self.logger.info("sandbox %s of %s", self._sandbox, self.environment_name)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """End the sandbox; it cannot be kept."""
        await self._provider.close()

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file of this machine, with its mode."""
        data, mode = await aside(read_file, source_path)
        await self._provider.write(self._sandbox, target_path, data, mode=mode)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what a directory holds, with modes and links."""
        await self._provider.upload_tree(self._sandbox, source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file of the sandbox; parents are made."""
        data = await self._provider.read(self._sandbox, source_path)
        await aside(write_file, target_path, data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what a directory of the sandbox holds; files that are there are overwritten."""
        await self._provider.download_tree(self._sandbox, source_dir, target_dir)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run shell text; raises TimeoutError and InfrastructureFailed."""
        whose = self._resolve_user(user)
        try:
            ended = await self._provider.run(
                self._sandbox,
                ["/bin/bash", "-c", command],
                cwd=cwd or self.task_env_config.workdir,
                env=self._merge_env(env),
                user=None if whose is None else str(whose),
                timeout_s=timeout_sec,
            )
        except CommandTimedOut as late:
            raise TimeoutError(str(late)) from late
        return ExecResult(stdout=ended.output, stderr=ended.errors, return_code=ended.exit_code)
