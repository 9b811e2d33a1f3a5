"""Grading where the agent never was: a sandbox of the same image, and only what the trajectory has changed."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manager.errors import ActionFailed, InvalidInput, NotFound, Reason, TooLarge
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.pytest import changes
from runtimes.sandbox.pytest.report import sayable
from runtimes.sandbox.sandbox import Sandbox

COMPONENT = "pytest"
_SOURCE = Path(changes.__file__).read_text(encoding="utf-8")
_NOTE_FILES = 3
#: Bytes of a listing of the fresh sandbox's files, and beside the changes for their names.
_LISTING_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTransfer:
    """How changes are brought over."""

    #: Interpreter in both sandboxes.
    python: str
    #: Files and directories, all by default.
    paths: Sequence[str]
    #: Files that stay as the fresh sandbox or the caller has them.
    left_out: Collection[str]
    #: Whether conftests and files with pytest's options stay as the image has them.
    ignore: bool
    #: Bytes that may have changed.
    limit_bytes: int
    #: Seconds for each step.
    timeout_s: float

    async def known(self, fresh: Sandbox) -> dict[str, Any]:
        """Return what the fresh sandbox has already; raises ActionFailed."""
        listed = await self._run(fresh, "list", b"", _LISTING_BYTES)
        if listed.exit_code != 0 or listed.stdout_truncated:
            why = _last(listed) or "it has too many files"
            message = f"the fresh sandbox's files cannot be listed: {why}"
            raise ActionFailed(Reason.INVALID_INPUT, message, component=COMPONENT)
        known = json.loads(listed.stdout)
        assert isinstance(known, dict)
        return known

    async def collect(self, original: Sandbox, known: dict[str, Any]) -> bytes:
        """Return what the trajectory's sandbox says that it has changed, which nobody has looked at.

        Raises ValueError if it says nothing.
        """
        told = json.dumps({"known": known, **self._rules()}).encode()
        try:
            ended = await self._run(original, "collect", told, self.limit_bytes + _LISTING_BYTES)
        except (InvalidInput, NotFound, TooLarge) as refused:  # it cannot even be entered, which is the agent's
            raise ValueError(f"the trajectory's changes could not be read: {refused.message}") from None
        except ActionFailed as failure:
            if original.condemned:
                raise ValueError(f"the trajectory's changes could not be read: {failure.message}") from None
            raise
        if ended.exit_code != 0 or ended.stdout_truncated:
            raise ValueError(f"the trajectory's changes could not be read: {_last(ended)}")
        return ended.stdout

    async def apply(self, fresh: Sandbox, changed: bytes) -> list[str]:
        """Bring them into the fresh sandbox; return notes for the record. Raises ValueError if that cannot be."""
        told = json.dumps(self._rules()).encode()
        ended = await self._run(fresh, "apply", told + b"\n" + changed, _LISTING_BYTES)
        if ended.exit_code != 0:
            raise ValueError(f"the trajectory's changes could not be applied: {_last(ended)}")
        said = json.loads(ended.stdout)
        notes = []
        if said["left_out"]:
            notes.append(f"not taken from the trajectory: {_some(said['left_out'])}")
        if said["failed"]:
            notes.append(f"could not be applied: {_some(said['failed'])}")
        return notes

    def _rules(self) -> dict[str, object]:
        """Return what may come over, for whoever packs it and for whoever unpacks it."""
        return {
            "paths": list(self.paths),
            "left_out": list(self.left_out),
            "ignore": self.ignore,
            "limit_bytes": self.limit_bytes,
        }

    async def _run(self, sandbox: Sandbox, mode: str, given: bytes, limit_bytes: int) -> CommandResult:
        return await sandbox.run(
            Command(
                argv=(self.python, "-I", "-S", "-c", _SOURCE, mode),
                stdin=given,
                timeout_s=self.timeout_s,
                kill_grace_s=0.0,
                output_limit_bytes=limit_bytes,
            )
        )


def _last(ended: CommandResult) -> str:
    """Return the last line that it wrote to standard error."""
    if ended.timed_out:
        return "it took too long"
    return (ended.stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:500]


def _some(paths: Sequence[object]) -> str:
    more = f" and {len(paths) - _NOTE_FILES} more" if len(paths) > _NOTE_FILES else ""
    return ", ".join(sayable(str(path)[:200]) for path in paths[:_NOTE_FILES]) + more
