"""Commands in a sandbox, their results, and what can be told of files: the nouns of every way to speak to one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from manager.errors import TooLarge
from runtimes.sandbox.session import InteractiveSession
from tangram.types import show_size

#: Bytes of one argument or variable from which on the kernel refuses it, and characters of a piece, however long each.
ARGUMENT_MAX_BYTES = 128 * 2**10
PIECE_CHARS = 30 * 2**10
#: Bytes of one piece of a file on its way in.
PIECE_BYTES = 64 * 2**10
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
    #: Variables that it finds by other names (`runtimes.sandbox.runner.runner.HIDDEN`), so that its start ignores them.
    hide: tuple[str, ...] = ()
    #: User name or id; empty takes the sandbox's.
    user: str = ""
    stdin: bytes = b""
    #: Whether what it says on standard error goes, in order, to standard output.
    merge: bool = False
    #: Whether ``argv`` is of the Python of the sandbox's runner.
    python: bool = False
    #: Seconds until SIGTERM, then SIGKILL ``kill_grace_s`` later, for the whole process tree.
    timeout_s: float = 60.0
    kill_grace_s: float = 2.0
    #: Seconds without processor time or output after which it is ended if a process of it is stopped (SIGSTOP); 0
    #: never, None as the sandbox has it.
    still_s: float | None = None
    #: Bytes kept of each stream, of its beginning and its end; the rest is read and dropped, and counted in between.
    output_limit_bytes: int = 1 * 2**20
    #: Bytes of each stream that are shown as they come; ``output_limit_bytes`` if that is more.
    shown_limit_bytes: int = 0
    #: The name by which the next gateway can claim it: `claims_of` its action, and a number. Empty: it cannot.
    claim: str = ""
    #: Whether it outlives this gateway, for ``unattended_s`` of the sandbox at most.
    detached: bool = False
    #: Where its output goes and its input comes from, if somebody is to type to it.
    session: InteractiveSession | None = field(default=None, compare=False)

    @property
    def shown_bytes(self) -> int:
        """Bytes of each stream that are passed on from its beginning."""
        return max(self.shown_limit_bytes, self.output_limit_bytes)

    @property
    def tail_bytes(self) -> int:
        """Bytes of each stream's end that are kept."""
        return self.output_limit_bytes // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended. A non-zero exit code is data."""

    exit_code: int | None
    #: The signal that ended it (positive), or None.
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    #: Whether bytes are missing between beginning and end; a line there counts them.
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    #: Bytes of each stream that were not shown.
    unshown: Mapping[str, int] = field(default_factory=dict)
    timed_out: bool = False
    #: Whether that was because a process of it was stopped and none made progress.
    stopped: bool = False
    #: Whether its end was asked for, perhaps by an earlier gateway.
    killed: bool = False
    out_of_memory: bool = False
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    #: How often the sandbox was refused a new process while a command ran that failed.
    forks_refused: int = 0


def processes_refused(count: int, pids: int) -> str:
    """Return what is told of a command that failed while the sandbox was refused new processes."""
    times = "once" if count == 1 else f"{count} times"
    return f"new processes were refused {times}: the sandbox had {pids}, and sandbox.pids bounds it"


#: What is told of a command whose end a gateway asked for that did not live to tell it.
KILLED = "cancelled: its end was asked for before a restart"
#: What is told of a command that was ended as it stood still.
STOPPED = "made no progress: a process of it was stopped (SIGSTOP), and none worked or said anything (sandbox.still)"


def memory_ended(what: str, peak_bytes: int) -> str:
    """Return what is told of something that was ended for its memory: how much it was, and which setting bounds it."""
    return f"{what} ran out of memory (peak {show_size(peak_bytes)}); sandbox.memory bounds it"


def fitting(command: Command) -> Command:
    """Return the same command in a form that the kernel takes, which bounds one argument to 128 KiB.

    A longer script travels in pieces, in variables that are gone before its first word is read.
    """
    script = command.shell
    if len(script.encode("utf-8", "surrogateescape")) < ARGUMENT_MAX_BYTES:
        return command
    pieces = {
        f"TANGRAM_SCRIPT_{index}": script[start : start + PIECE_CHARS]
        for index, start in enumerate(range(0, len(script), PIECE_CHARS))
    }
    whole = "".join(f"${{{name}}}" for name in pieces)
    shell = f'TANGRAM_SCRIPT="{whole}"; unset {" ".join(pieces)}; eval "unset TANGRAM_SCRIPT; $TANGRAM_SCRIPT"'
    return replace(command, shell=shell, env={**command.env, **pieces})


class ResumableCommand(NamedTuple):
    """A command of an earlier gateway that can be claimed."""

    #: Seconds that it had run when that was told, or ran.
    ran_s: float
    running: bool
    #: When that was told, on this machine's monotonic clock.
    told_s: float = 0.0

    def run_s(self, now_s: float) -> float:
        """Return the seconds that it has run by now, or ran."""
        return self.ran_s + (now_s - self.told_s if self.running else 0.0)


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


#: Bytes, or pieces of them as they come.
FileSource = bytes | AsyncIterator[bytes]


class FileContent:
    """What is written to a file: bytes, or pieces as they come, of which no more is held than one."""

    def __init__(self, data: FileSource, limit_bytes: int | None = None) -> None:
        """Raises TooLarge, here or while the pieces come, for more than ``limit_bytes``."""
        self._data = data
        self._limit_bytes = limit_bytes
        #: Bytes that have come.
        self.size_bytes = 0
        if isinstance(data, bytes):
            self._count(len(data))

    @property
    def repeatable(self) -> bool:
        """Whether its pieces can be had more than once."""
        return isinstance(self._data, bytes)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield it in pieces that fit a frame; raises what its source raises."""
        if isinstance(self._data, bytes):
            for start in range(0, len(self._data), PIECE_BYTES):
                yield self._data[start : start + PIECE_BYTES]
            return
        async for chunk in self._data:
            self._count(len(chunk))
            for start in range(0, len(chunk), PIECE_BYTES):
                yield chunk[start : start + PIECE_BYTES]

    def _count(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        if self._limit_bytes is not None and self.size_bytes > self._limit_bytes:
            raise TooLarge(
                f"{self.size_bytes} bytes are more than the sandbox's disk (sandbox.disk)", component="sandbox"
            )


class FileStream(Protocol):
    """A file of a sandbox that is read piece by piece."""

    @property
    def size_bytes(self) -> int | None:
        """How long it is; None if only its end tells."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield it; raises ActionFailed if the sandbox is lost, InvalidInput if it became shorter."""
        ...

    def close(self) -> None:
        """Want no more of it; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class HeldFile:
    """One that was read whole."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.data

    def close(self) -> None:
        """Do nothing."""
