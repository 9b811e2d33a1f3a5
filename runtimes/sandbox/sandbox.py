"""The Sandbox and Provider protocols: an environment that executes commands, whatever it is made of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from manager.errors import InvalidConfig
from manager.function import Background, SandboxSpec

#: Receives (``stdout`` | ``stderr``, bytes) as the command produces them; must not block.
OnOutput = Callable[[str, bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command in a sandbox. Exactly one of ``argv`` and ``shell`` is given."""

    argv: tuple[str, ...] = ()
    #: Run by ``/bin/sh -c`` (``bash`` if the sandbox has it).
    shell: str = ""
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    #: User name or id; empty takes the sandbox's.
    user: str = ""
    stdin: bytes = b""
    #: Seconds until SIGTERM, then SIGKILL ``kill_grace_s`` later, for the whole process tree.
    timeout_s: float = 60.0
    kill_grace_s: float = 2.0
    #: Bytes kept of each stream; the rest is read and dropped, and the mark set.
    output_limit_bytes: int = 1 * 2**20
    #: The name by which the next gateway can claim it: `claims_of` its action, and a number. Empty: it cannot.
    claim: str = ""
    #: Whether it outlives this gateway, for ``unattended_s`` of the sandbox at most.
    detached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended. A non-zero exit code is data."""

    exit_code: int | None
    #: The signal that ended it (positive), or None.
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    timed_out: bool = False
    out_of_memory: bool = False
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0


class ResumableCommand(NamedTuple):
    """A command of an earlier gateway that can be claimed."""

    #: Seconds that it has run, or ran.
    ran_s: float
    running: bool


def claims_of(action_id: str, attempt: int) -> str:
    """Return what the claims of all commands of one try of an action begin with."""
    return f"{action_id}.{attempt}/"


class SandboxProcess(Protocol):
    """A long-lived command with open pipes, made by `Sandbox.spawn`; ended by `kill`, or with its sandbox.

    Nothing of it is kept: every chunk goes to its reader, and a reader that stops reading stops the command
    (backpressure through the runner), so one slow process cannot fill the gateway's memory.
    """

    async def write_stdin(self, data: bytes) -> None:
        """Append to its standard input; raises ActionFailed(environment_lost) if sandbox or process is gone."""
        ...

    async def close_stdin(self) -> None:
        """End its standard input; idempotent."""
        ...

    def chunks(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (``stdout`` | ``stderr``, bytes) in order until it has ended. One reader at a time."""
        ...

    async def wait(self) -> CommandResult:
        """Return how it ended; stdout and stderr are empty. Chunks that nobody reads meanwhile are dropped."""
        ...

    async def kill(self) -> None:
        """SIGKILL its whole process tree, setsid children included, and return when it is gone; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """One file or directory in a sandbox."""

    path: str
    size_bytes: int
    directory: bool
    mode: int


class Sandbox(Protocol):
    """A living environment. Methods raise ActionFailed(environment_lost) if it is gone, never hang."""

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        ...

    @property
    def loss_reported(self) -> bool:
        """Whether its loss was reported to somebody (an action that ended with environment_lost)."""
        ...

    @property
    def resumable(self) -> Mapping[str, ResumableCommand]:
        """The commands of an earlier gateway that can still be claimed, by claim."""
        ...

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult:
        """Execute to the end; cancelling kills the process tree, setsid children included.

        A command that is `resumable` is claimed instead: its output comes from its start, and nothing is run twice.
        """
        ...

    def keep(self, claims: str, *, detached: bool) -> None:
        """Say whether commands whose claims begin so are kept for the next gateway, running or ended.

        Resumable ones that are not to be kept are ended.
        """
        ...

    def has_detached(self, claims: str) -> bool:
        """Return whether `release` would leave a detached command with such a claim, running or ended."""
        ...

    def never_started(self, claims: str) -> bool:
        """Return whether it is certain that an earlier gateway started no detached command with such a claim.

        Holds until what was started is acknowledged by `keep`, and for commands whose end may not be on record.
        """
        ...

    def secret(self, purpose: str) -> str:
        """Return 32 hexadecimal digits that nobody inside can know, and that the next gateway knows too."""
        ...

    async def spawn(self, command: Command) -> SandboxProcess:
        """Start a long-lived process. ``stdin`` is written first and left open; no output limit applies, and
        ``timeout_s`` only if it is finite (``math.inf``: until killed)."""
        ...

    async def set_cores(self, cores: Sequence[int]) -> None:
        """Confine the sandbox to these cores (cpuset and quota, or affinity); callable while a command runs."""
        ...

    async def thaw(self) -> None:
        """Let its processes run."""
        ...

    async def quiesce(self, background: Background) -> None:
        """Freeze, kill, or leave its background processes between actions, and give the cores back."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making its directories. A path that leaves the sandbox (links included) is InvalidInput."""
        ...

    async def read_file(self, path: str, *, limit_bytes: int) -> bytes:
        """Read a file; raises NotFound, TooLarge, or InvalidInput if it is no regular file or leaves the sandbox."""
        ...

    async def list_files(self, path: str) -> list[FileStat]:
        """Return the entries of a directory, sorted by name; raises NotFound if there is none."""
        ...

    async def relabel(self, labels: Mapping[str, str]) -> None:
        """Record its owner from now on: `Provider.adopt` returns these labels."""
        ...

    async def snapshot(self, name: str) -> str:
        """Keep its file system as an image, and return the image's name; raises Unsupported if there are none."""
        ...

    async def release(self) -> None:
        """Leave it to `Provider.adopt` of the next gateway, without ending it; idempotent.

        Detached commands go on; whoever waits for one here is told environment_lost.
        """
        ...

    async def close(self) -> None:
        """Remove it and everything in it; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderInfo:
    """Which kind of sandbox is used, and what it promises, in plain words."""

    kind: str  #: ``container`` or ``process``
    engine: str  #: for example ``docker 28.2 (cgroup v1)`` or ``bubblewrap``
    isolation: str  #: one honest sentence
    limits: Mapping[str, bool] = field(default_factory=dict)  #: promise -> kept (memory, pids, network, disk ...)


def require_workdir(spec: SandboxSpec) -> None:
    """Raise InvalidConfig unless the working directory can be one."""
    if not spec.workdir.startswith("/") or spec.workdir == "/":
        raise InvalidConfig(f"sandbox.workdir must be an absolute directory, not {spec.workdir!r}")


class Provider(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def info(self) -> ProviderInfo: ...

    async def check(self, spec: SandboxSpec) -> None:
        """Raise InvalidConfig or Unsupported, with the remedy, if such a sandbox can never be made."""
        ...

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        """Make and start one. ``mounts`` maps host directories to read-only paths inside."""
        ...

    async def adopt(self) -> list[tuple[Sandbox, Mapping[str, str]]]:
        """Return the living sandboxes of an earlier gateway of the same state directory, with their labels."""
        ...

    async def reap(self, living: Collection[str]) -> int:
        """Remove what is left of this state directory's sandboxes but the ``living`` (ids); return how many."""
        ...

    async def remove_snapshot(self, name: str) -> None:
        """Forget an image made by `Sandbox.snapshot`; idempotent."""
        ...

    async def close(self) -> None:
        """Disconnect from the engine (sandboxes are closed by their owner); idempotent."""
        ...
