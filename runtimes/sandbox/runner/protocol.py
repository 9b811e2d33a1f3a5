"""The wire between gateway and runner, seen from the gateway: frames, requests and answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from manager.errors import (
    FILES_LOST,
    NOT_BEGUN,
    ActionFailed,
    CapacityExceeded,
    CodedError,
    InvalidConfig,
    InvalidInput,
    NotFound,
    Reason,
    StorageUnavailable,
    TooLarge,
    Unsupported,
)
from runtimes.sandbox.choice import OtherSandbox
from runtimes.sandbox.command import Command, CommandResult, FileStat, ResumableCommand
from runtimes.sandbox.runner import runner
from runtimes.sandbox.runner.runner import ProtocolError, as_json, encode

COMPONENT = "sandbox"
COMMAND_FORM = "give exactly one of argv and shell"
#: The runner, and where it and its socket lie inside a sandbox.
RUNNER = Path(runner.__file__)
INSIDE = "/.tangram"
ISOLATED = ("-I", "-S")
#: In the detail of an error: what is wrong with a file.
FILE_ERROR = "file_error"
T = TypeVar("T")


def encode_json(kind: int, number: int, value: Mapping[str, object]) -> bytes:
    return encode(kind, number, as_json(value))


def run_request(command: Command, *, marker: str, interactive: bool) -> dict[str, object]:
    """Return a command as the runner wants it; raises InvalidInput unless it has one of argv and shell."""
    if bool(command.argv) == bool(command.shell):
        raise InvalidInput(COMMAND_FORM, component=COMPONENT)
    session = command.session
    given = {} if session is None else {"keep": session.settings.output_bytes, "terminal": session.terminal}
    return {
        "marker": marker,
        "argv": list(command.argv),
        "shell": command.shell,
        "cwd": command.cwd,
        "env": dict(command.env),
        "user": command.user,
        "stdin": interactive or bool(command.stdin) or session is not None,
        "merge": command.merge,
        "python": command.python,
        **({"hide": list(command.hide)} if command.hide else {}),
        "timeout_s": command.timeout_s if math.isfinite(command.timeout_s) else None,
        "grace_s": command.kill_grace_s,
        "limit": None if interactive or session is not None else command.shown_bytes,
        "tail": command.tail_bytes,
        **({"claim": command.claim, "lasting": command.detached} if command.claim else {}),
        **({"session": given} if given else {}),
    }


class RunnerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a greeting; its fields bear the names of protocol 1."""

    protocol: int = 0
    #: Whether the runner knew the token already (it is no new one).
    known: bool = False
    #: Commands of an earlier gateway that can be claimed.
    held: dict[str, ResumableCommand] = {}
    #: Claims of detached commands that were started and whose end may not be on record; None if unknown.
    begun: frozenset[str] | None = None
    #: The last command of this gateway, if any, that the runner took over an earlier connection.
    taken: int | None = None


class RunnerEntry(msgspec.Struct, frozen=True):
    """One entry of a listing."""

    name: str
    size: int
    directory: bool
    mode: int


class RunnerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an exchange: of a command (EXIT), or of another request (DONE)."""

    code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: tuple[bool, bool] = (False, False)
    #: Bytes of standard output and error that were dropped before their ends.
    dropped: tuple[int, int] = (0, 0)
    duration_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    entries: list[RunnerEntry] = []
    #: Whether a file that was written is out of its user's hands.
    locked: bool = False
    #: Processes that a sweep has ended.
    swept: int = 0

    def result(self) -> CommandResult:
        """Return it as a result without output."""
        return CommandResult(
            exit_code=self.code,
            signal=self.signal,
            stdout_truncated=self.truncated[0],
            stderr_truncated=self.truncated[1],
            timed_out=self.timed_out,
            out_of_memory=self.out_of_memory,
            duration_s=self.duration_s,
            cpu_s=self.cpu_s,
            peak_memory_bytes=self.peak_bytes,
        )

    def files(self, directory: str) -> list[FileStat]:
        prefix = f"{directory.rstrip('/')}/" if directory else ""
        return [
            FileStat(path=prefix + entry.name, size_bytes=entry.size, directory=entry.directory, mode=entry.mode)
            for entry in self.entries
        ]


#: What a runner counts; it is not trusted to count right.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class SessionStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How a session of an earlier gateway stands, before its output is repeated (STANDING)."""

    #: Where the output that is kept begins.
    start: _Count
    #: Bytes of input that it was sent, and how many of them its command has not taken.
    input: _Count
    waiting: _Count


class RunnerRefusal(msgspec.Struct, frozen=True):
    """Why a request was not carried out (ERROR)."""

    code: str = ""
    message: str = "refused"
    #: What is wrong with a file, for programs; empty for what is no file's fault.
    file_error: str = ""

    def error(self) -> CodedError:
        kinds: dict[str, type[CodedError]] = {
            "not_found": NotFound,
            "too_large": TooLarge,
            "capacity_exceeded": CapacityExceeded,
        }
        if self.code == "internal":
            return ActionFailed(Reason.INTERNAL, self.message[:1000], component=COMPONENT)
        detail = {FILE_ERROR: self.file_error[:100]} if self.file_error else None
        return kinds.get(self.code, InvalidInput)(self.message[:1000], component=COMPONENT, detail=detail)


def decode(payload: bytes, wanted: type[T]) -> T:
    """Return what the runner sent; raises ProtocolError if it does not fit."""
    try:
        # Not msgspec's own parser: names of files may hold lone surrogates.
        return msgspec.convert(json.loads(payload), wanted)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"an answer that does not fit: {error}") from None


def unmade(error: CodedError) -> ActionFailed:
    """Return the end of an action whose sandbox could not be made: its function's fault, or the engine's."""
    if isinstance(error, ActionFailed):
        return error
    if isinstance(error, OtherSandbox):
        return ActionFailed(Reason.INVALID_INPUT, error.message, component=error.component)
    theirs = isinstance(error, InvalidConfig | InvalidInput | Unsupported)
    short = isinstance(error, CapacityExceeded | StorageUnavailable)
    return ActionFailed(
        Reason.INVALID_INPUT if theirs else Reason.ENVIRONMENT_LOST,
        f"no sandbox could be made: {error.message}",
        component=error.component,
        retry_after_s=error.retry_after_s,
        detail={NOT_BEGUN: True} if short else None,
    )


def lost(message: str, *, result: object = None) -> ActionFailed:
    """Return the end of an action whose sandbox died under it."""
    detail = {FILES_LOST: True}
    return ActionFailed(Reason.ENVIRONMENT_LOST, message, component=COMPONENT, result=result, detail=detail)


def cut_off(message: str, *, result: object = None) -> ActionFailed:
    """Return the end of an action whose sandbox is out of reach and perhaps lives on."""
    message = f"{message}; the sandbox may live on"
    return ActionFailed(Reason.NODE_LOST, message, component=COMPONENT, result=result)


def out_of_memory(result: CommandResult, peak_memory_bytes: int) -> CommandResult:
    """Return the same result with what the kernel knows about its end."""
    return replace(result, out_of_memory=True, peak_memory_bytes=max(peak_memory_bytes, result.peak_memory_bytes))
