"""What the adapters share."""

from __future__ import annotations

import base64
import errno
import io
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram.archive import LINK, Extraction, Reader, Refused, opened_directory, private_mode, take_back
from tangram.client import InvocationResult
from tangram.errors import TangramError

#: What the gateway says of a file that cannot be read or written, as the kernel says it.
_FILE_ERRORS: Mapping[str, int] = {
    "not_found": errno.ENOENT,
    "is_a_directory": errno.EISDIR,
    "not_a_directory": errno.ENOTDIR,
    "permission_denied": errno.EACCES,
    "read_only": errno.EACCES,
}


class InfrastructureFailed(Exception):
    """The gateway, a sandbox or a function failed: nothing is known of the command or the code that was to run.

    Every adapter raises it, or what its framework has for it; none makes an exit status or a reward of it. It may be
    pickled.
    """

    def __init__(self, message: str, reason: str = "internal", sandbox: str = "", invocation: str = "") -> None:
        super().__init__(message, reason, sandbox, invocation)
        self.message = message
        #: Why: a reason of an invocation (``environment_lost``), or the code of a refusal (``quota_exceeded``).
        self.reason = reason
        #: The trajectory, and the invocation that ``tangram logs ID`` explains; empty where there is none.
        self.sandbox = sandbox
        self.invocation = invocation

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """How a command ended by itself. With ``merge`` stdout holds both streams, in the order of writing."""

    #: Its exit status; 128 + n if signal n ended it, as shells say it.
    exit_code: int
    stdout: bytes
    stderr: bytes
    #: Whether a stream lacks bytes beyond the function's ``output_limit``; a line in it counts them.
    truncated: bool = False
    #: Whether the kernel ended it, or a part of it, because the sandbox had no memory left.
    out_of_memory: bool = False
    invocation: str = ""

    @property
    def output(self) -> str:
        """Stdout as text; what is not UTF-8 is replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def errors(self) -> str:
        """Stderr as text; what is not UTF-8 is replaced."""
        return self.stderr.decode("utf-8", "replace")


class CommandTimedOut(Exception):
    """A command, a suite or a function ran longer than its bound, and was ended with all that it had started.

    The bound is the caller's, or the function's own where that is shorter. It may be pickled.
    """

    def __init__(self, message: str, stdout: bytes = b"", stderr: bytes = b"", invocation: str = "") -> None:
        super().__init__(message, stdout, stderr, invocation)
        self.message = message
        #: What it had said until then.
        self.stdout, self.stderr = stdout, stderr
        self.invocation = invocation

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeReport:
    """The verdict of a suite of tests."""

    #: 0 to 1; None if the run says nothing about the code, for example because the tests are gone.
    reward: float | None
    #: Why there is no reward; else what a reader of it should know, empty for nothing.
    note: str
    #: Verdict by test id.
    tests: Mapping[str, str]
    #: The whole result, as docs/reference/runtimes.md has it.
    result: Mapping[str, Any]
    invocation: str = ""

    def score(self) -> float:
        """Return the reward; raises InfrastructureFailed where there is none, which is not a reward of 0."""
        if self.reward is None:
            raise InfrastructureFailed(f"no reward: {self.note}", "invalid_grade", invocation=self.invocation)
        return self.reward


def told_to_model(end: CommandEnd | CommandTimedOut) -> str:
    """Return how a command with ``merge`` ended, as text for the model that asked for it."""
    output = end.stdout.decode("utf-8", "replace").rstrip("\n")
    if isinstance(end, CommandTimedOut):
        return f"{output}\n[ended: it took too long]".lstrip("\n")
    return output if end.exit_code == 0 else f"{output}\n[exit status {end.exit_code}]".lstrip("\n")


def command_end(ended: InvocationResult, sandbox: str) -> CommandEnd:
    """Return the end of a command; raises CommandTimedOut, and InfrastructureFailed for what was not its own doing."""
    memory = ended.reason == "out_of_memory" and isinstance(ended.result, dict)
    if not ended.ok and not memory:
        raise failure_of(ended, sandbox)
    result = ended.result
    code, signal = result["exit_code"], result["signal"]
    return CommandEnd(
        exit_code=128 + signal if code is None else code,
        stdout=_stream(result, "stdout"),
        stderr=_stream(result, "stderr"),
        truncated=result["stdout_truncated"] or result["stderr_truncated"],
        out_of_memory=memory,
        invocation=ended.id,
    )


def grade_report(ended: InvocationResult, sandbox: str) -> GradeReport:
    """Return the verdict of a pytest function; raises CommandTimedOut and InfrastructureFailed."""
    result = result_of(ended, sandbox)
    if not isinstance(result, dict) or "reward" not in result:
        message = f"{ended.function} has no reward in its result: is its runtime pytest?"
        raise InfrastructureFailed(message, "invalid_grade", sandbox, ended.id)
    return GradeReport(
        reward=result["reward"],
        note=result.get("reason") or result.get("note") or "",
        tests=result.get("tests") or {},
        result=result,
        invocation=ended.id,
    )


def result_of(ended: InvocationResult, sandbox: str) -> Any:
    """Return what a function returned; raises CommandTimedOut and InfrastructureFailed."""
    if not ended.ok:
        raise failure_of(ended, sandbox)
    return ended.result


def failure_of(ended: InvocationResult, sandbox: str) -> Exception:
    """Return the error of an invocation that ended badly, or has not ended."""
    message = f"{ended.function} {ended.id} {ended.state} ({ended.reason}): {ended.message}"
    if ended.reason == "timeout":
        result = ended.result if isinstance(ended.result, dict) else {}
        return CommandTimedOut(message, _stream(result, "stdout"), _stream(result, "stderr"), ended.id)
    return InfrastructureFailed(message, ended.reason or ended.state, sandbox, ended.id)


def refusal_of(error: TangramError, sandbox: str, path: str = "") -> Exception:
    """Return the error of a request that was refused or lost; the built-in one where that file is at fault."""
    number = _FILE_ERRORS.get(str(error.detail.get("file_error")))
    if number is not None:
        return OSError(number, os.strerror(number), path)  # of the class that Python has for that number
    where = f"sandbox {sandbox}: " if sandbox and sandbox not in error.message else ""
    return InfrastructureFailed(where + error.message, error.code, sandbox, error.invocation_id or "")


def _stream(result: Mapping[str, Any], name: str) -> bytes:
    exact = result.get(f"{name}_base64")
    return base64.b64decode(exact) if exact else str(result.get(name, "")).encode("utf-8", "surrogatepass")


def packed(source: str | Path) -> bytes:
    """Return the contents of a directory as a tar: modes, links and empty directories; owners are the reader's.

    Raises FileNotFoundError and NotADirectoryError.
    """
    root = Path(source)
    if not root.exists():
        raise FileNotFoundError(f"no directory {root}")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is no directory")
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            archive.add(path, path.relative_to(root).as_posix(), recursive=False, filter=_anonymous)
    return held.getvalue()


def unpacked(data: bytes, target: str | Path) -> None:
    """Lay out a tar below a directory, which is made; files that are there are overwritten, nothing leaves it.

    A sandbox wrote it: entries that point outside, devices and the like raise InfrastructureFailed.
    """
    root = Path(target)
    root.mkdir(parents=True, exist_ok=True)
    reader, links = Reader(io.BytesIO(data)), []
    try:
        with opened_directory(root) as fd, Extraction(fd, into=True, mode=private_mode) as tree:
            try:
                for entry in reader:
                    tree.one(entry, reader.content())
                    links += [entry.name] if entry.kind == LINK else []
            finally:
                out = take_back(str(root), links)
        if out:
            raise Refused("invalid_input", "outside", f"links lead out of it: {sorted(out)[:10]}")
    except Refused as error:
        raise InfrastructureFailed(f"the tree of the sandbox cannot be laid out: {error}", "unsafe_tree") from error


def read_file(source: str | Path) -> tuple[bytes, int]:
    """Return the contents of a file of this machine, and its permission bits."""
    path = Path(source)
    return path.read_bytes(), path.stat().st_mode & 0o777


def write_file(target: str | Path, data: bytes) -> None:
    """Write a file of this machine, and make its parents."""
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def missing(adapter: str, package: str, error: ImportError) -> ImportError:
    """Return the error of an adapter whose framework cannot be imported; it names the extra that brings it."""
    extra = adapter.replace("_", "-")
    return ImportError(f"tangram.adapters.{adapter} needs {package} ({error}): pip install 'tangram-client[{extra}]'")
