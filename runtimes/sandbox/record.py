"""What a gateway writes down about each sandbox, so that the next one can adopt it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manager.function import SandboxSpec

NAME = "record.json"
#: Beside it: the id of its container, once there is one.
CONTAINER = "container"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRecord:
    """One sandbox: the runner's token, and what is needed to find it again."""

    name: str
    token: str
    spec: SandboxSpec
    labels: Mapping[str, str]
    #: The runner's process and its start in ticks since boot (process sandboxes).
    pid: int = 0
    started: int = 0
    #: False for a container without python3, which is spoken to through ``docker exec``.
    runner: bool = True
    #: Processes ended for want of memory that some action was told of.
    oom_told: int = 0
    #: False while it is being made: then ``pid`` is what was started, and the next gateway removes it.
    ready: bool = True
    #: How its runner is spoken to (`runtimes.sandbox.docker.installer`).
    transport: str = "socket"

    def write(self, directory: Path) -> None:
        """Write it so that it survives a crash of the gateway; only the owner can read it, for the token's sake."""
        part = directory / f"{NAME}.part"
        part.touch(0o600)
        part.write_text(json.dumps(msgspec.to_builtins(self)), encoding="utf-8")
        part.replace(directory / NAME)

    @classmethod
    def read(cls, directory: Path) -> SandboxRecord | None:
        """Return the record of a sandbox's directory, None if there is none that is whole."""
        try:
            return msgspec.convert(json.loads((directory / NAME).read_text(encoding="utf-8")), cls)
        except (OSError, ValueError):
            return None

    def greeting(self, **more: object) -> dict[str, object]:
        """Return what its runner is told first."""
        spec = self.spec
        return {
            "token": self.token,
            "user": spec.user,
            "workdir": spec.workdir,
            "base": "",
            "env": {},
            "orphan_s": spec.idle_ttl_s,
            "unattended_s": spec.unattended_s,
            **more,
        }


def note_container(directory: Path, container: str) -> None:
    """Write down which container it is, so that the next gateway knows what to look for if the engine does not."""
    (directory / CONTAINER).write_text(container, encoding="ascii")


def noted_container(directory: Path) -> str:
    """Return the container that was noted, empty if none was."""
    try:
        return (directory / CONTAINER).read_text(encoding="ascii")
    except OSError:
        return ""


def read_records(root: Path) -> list[tuple[Path, SandboxRecord | None]]:
    """Return every sandbox directory below ``root`` with its record."""
    if not root.is_dir():
        return []
    return [(directory, SandboxRecord.read(directory)) for directory in sorted(root.iterdir()) if directory.is_dir()]
