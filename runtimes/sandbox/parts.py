"""What each kind of sandbox has of its own: how its runner is spoken to, and how it is held from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from manager.function import SandboxSpec
from runtimes.sandbox.cgroup import CpuWeight
from runtimes.sandbox.command import (
    Command,
    CommandResult,
    FileContent,
    FileStat,
    FileStream,
    OnOutput,
    ResumableCommand,
)
from runtimes.sandbox.runner.conversation import SandboxProcess


class RunnerClient(Protocol):
    """How a sandbox is spoken to: over a stream to its runner, or by ``docker exec`` if it has none."""

    @property
    def lost(self) -> asyncio.Event: ...

    @property
    def resumable(self) -> Mapping[str, ResumableCommand]: ...

    @property
    def started(self) -> frozenset[str] | None: ...

    @property
    def hides(self) -> bool:
        """Whether commands may `Command.hide` variables from what starts them."""

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult: ...

    def keep(self, claims: str, *, detached: bool) -> None: ...

    async def spawn(self, command: Command) -> SandboxProcess: ...

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes: ...

    async def open_file(self, path: str, *, limit_bytes: int, user: str = "") -> FileStream: ...

    async def write_file(
        self, path: str, content: FileContent, *, mode: int | None, locked: bool = False, user: str = ""
    ) -> bool: ...

    async def list_files(self, path: str, *, user: str = "") -> list[FileStat]: ...

    async def rest(self, *, resting: bool) -> None:
        """Stop every process but the runner, or let them run again."""

    def lend(self, fd: int) -> bool:
        """Lend the runner what it lets its sandbox's processes go with, for its own end; False if that cannot be."""

    async def sweep(self) -> int: ...

    def close(self) -> None: ...


class SandboxControl(Protocol):
    """How a sandbox is governed from outside: cores, freezing, memory, removal."""

    async def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None: ...

    async def freeze(self, lend: Callable[[int], bool]) -> bool:
        """Stop every process but the runner, which can end itself; False if only the runner can stop them.

        ``lend`` is `RunnerClient.lend`.
        """
        ...

    async def thaw(self) -> None: ...

    def oom_kills(self) -> int:
        """Return how many processes were ended for want of memory so far, as far as can be seen."""
        ...

    def peak_memory_bytes(self) -> int: ...

    def forks_refused(self) -> int:
        """Return how many new processes were refused so far because of ``sandbox.pids``, as far as can be seen."""

    async def cause_of_death(self) -> str:
        """Return why it ended, as far as can be known; ``out_of_memory`` alone is a reason of its own."""
        ...

    async def snapshot(self, spec: SandboxSpec, id: str, place: Path, limit_bytes: int) -> int:
        """Keep its files, as an image or below an existing directory ``place``; return the bytes that they take.

        Its processes stand still. Raises TooLarge, if that is seen, beyond ``limit_bytes``, and CodedError or OSError.
        """
        ...

    async def remove(self) -> None:
        """End and remove it, with everything inside; idempotent."""
        ...
