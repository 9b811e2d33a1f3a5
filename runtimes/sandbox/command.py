"""Commands in a sandbox, their results, and what can be told of files: the nouns of every way to speak to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """One file or directory in a sandbox."""

    path: str
    size_bytes: int
    directory: bool
    mode: int
