"""deepagents' sandbox backend: all its file tools are built on a command and two transfers.

agent = create_deep_agent(backend=DeepAgentsBackend(image="python:3.12"))
"""

from __future__ import annotations

import posixpath
from typing import Any

from tangram.adapters.provider import CommandTimedOut, missing
from tangram.adapters.sync import SandboxProvider

try:
    from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
    from deepagents.backends.sandbox import BaseSandbox
except ImportError as error:
    raise missing("deepagents", "deepagents", error) from error

#: What deepagents calls an error of a file; its model can mend these.
_ERRORS: tuple[tuple[type[OSError], str], ...] = (
    (FileNotFoundError, "file_not_found"),
    (IsADirectoryError, "is_directory"),
    (NotADirectoryError, "invalid_path"),
    (PermissionError, "permission_denied"),
)


class DeepAgentsBackend(BaseSandbox):
    """One sandbox as a backend; ``close`` ends it, or a ``with`` block.

    ``chosen`` is what the sandbox chooses: ``image``, ``env``, ``workdir``, ``user``, ``memory``, ``network`` and
    ``idle_ttl``.
    What is our fault raises InfrastructureFailed; a command that ran too long has no exit code, and says so.
    """

    def __init__(
        self,
        *,
        server: str | None = None,
        function: str = "shell",
        task: str | None = None,
        timeout_s: float | None = None,
        provider: SandboxProvider | None = None,
        **chosen: Any,
    ) -> None:
        self._provider = provider or SandboxProvider(server, function=function, task=task)
        self._owns = provider is None
        self._timeout_s = timeout_s
        self._sandbox = self._provider.open(**chosen)

    def __enter__(self) -> DeepAgentsBackend:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The sandbox's name."""
        return self._sandbox

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run shell text; ``timeout`` in seconds, 0 or None for the bound of the backend or the function."""
        bound_s = timeout or self._timeout_s
        try:
            ended = self._provider.run(self._sandbox, ["/bin/bash", "-c", command], merge=True, timeout_s=bound_s)
        except CommandTimedOut as late:
            output = late.stdout.decode("utf-8", "replace")
            return ExecuteResponse(output=f"{output}\n{late}".lstrip(), exit_code=None, truncated=False)
        return ExecuteResponse(output=ended.output, exit_code=ended.exit_code, truncated=ended.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files; one that cannot be written is told in its place."""
        return [FileUploadResponse(path=path, error=self._upload(path, data)) for path, data in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files; one that cannot be read is told in its place."""
        return [self._download(path) for path in paths]

    def close(self) -> None:
        """End the sandbox."""
        if self._owns:
            self._provider.close()
        else:
            self._provider.end(self._sandbox)

    def _upload(self, path: str, data: bytes) -> str | None:
        if not posixpath.isabs(path):
            return "invalid_path"
        try:
            self._provider.write(self._sandbox, path, data)
        except OSError as error:
            return _word(error)
        return None

    def _download(self, path: str) -> FileDownloadResponse:
        if not posixpath.isabs(path):
            return FileDownloadResponse(path=path, error="invalid_path")
        try:
            return FileDownloadResponse(path=path, content=self._provider.read(self._sandbox, path))
        except OSError as error:
            return FileDownloadResponse(path=path, error=_word(error))


def _word(error: OSError) -> str:
    for kind, word in _ERRORS:
        if isinstance(error, kind):
            return word
    return str(error)
