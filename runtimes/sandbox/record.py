"""What a gateway writes down about each sandbox, so that the next one can adopt it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from manager.function import AUTO, SandboxSpec

NAME = "record.json"
#: Beside it: the id of its container and the directory that was bounded for it, once there are such.
CONTAINER, BOUNDED = "container", "bounded"
#: Beside it: what a container without a network has for /etc/hosts.
HOSTS = "hosts"
#: In a state directory: the sandboxes' directories.
SANDBOXES = "sandboxes"
#: Label: the task whose sandboxes ``network: internal`` joins.
TASK = "tangram.task"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRecord:
    """One sandbox: the runner's token, and what is needed to find it again."""

    name: str
    token: str
    spec: SandboxSpec
    labels: Mapping[str, str]
    #: The runner's process and its start in ticks since boot (process sandboxes).
    pid: int = 0
    #: Its own user's, where the spec names none.
    uid: int = 0
    started: int = 0
    #: False for a container without python3, which is spoken to through ``docker exec``.
    runner: bool = True
    #: Processes ended for want of memory that some action was told of.
    oom_told: int = 0
    #: False while it is being made: then ``pid`` is what was started, and the next gateway removes it.
    ready: bool = True
    #: The kind of provider that made it (``container``, ``process``, ``plain``), and no other may take it over.
    provider: str
    #: Where its own files lie on the host, if it has no root directory of its own.
    base: str = ""
    #: How its runner is spoken to (`runtimes.sandbox.docker.installer`).
    transport: str = "socket"

    @property
    def in_container(self) -> bool:
        return self.provider == "container"

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

    def runs(self) -> bool:
        """Return whether its process lives, and is still the same one."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return False
        return self.pid > 0 and fields[0] != b"Z" and int(fields[19]) == self.started

    @property
    def user(self) -> str:
        """Return whom its commands run as: a name or an id."""
        return str(self.uid) if self.spec.user == AUTO else self.spec.user

    def greeting(self, **more: object) -> dict[str, object]:
        """Return what its runner is told first."""
        spec = self.spec
        return {
            "token": self.token,
            "user": self.user,
            "own_user": self.uid > 0,
            "root": not spec.refuses("root"),
            "workdir": spec.workdir,
            "base": self.base,
            "env": {},
            "orphan_s": spec.idle_ttl_s,
            "unattended_s": spec.unattended_s,
            **more,
        }


def hold(state_dir: Path) -> ExitStack:
    """Hold a state directory until what is returned is closed, or this process ends; others may hold it, too."""
    state_dir.mkdir(parents=True, exist_ok=True)
    held = ExitStack()
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, fd)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return held


def is_held(state_dir: Path) -> bool:
    """Return whether a provider of this machine holds the directory, or its gateway that above it."""
    for place in (state_dir, state_dir.parent / "lock"):
        try:
            fd = os.open(place, os.O_RDONLY)
        except PermissionError:
            return True  # another user's, of which we cannot know
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
    return False


def note_container(directory: Path, container: str) -> None:
    """Write down which container it is, so that the next gateway knows what to look for if the engine does not."""
    (directory / CONTAINER).write_text(container, encoding="ascii")


def noted_container(directory: Path) -> str:
    """Return the container that was noted, empty if none was."""
    try:
        return (directory / CONTAINER).read_text(encoding="ascii")
    except OSError:
        return ""


def note_bounded(directory: Path, place: Path) -> None:
    """Write down which directory elsewhere is bounded for it, so that the bound is taken away with it."""
    (directory / BOUNDED).write_text(str(place), encoding="utf-8")


def noted_bounded(directory: Path) -> Path | None:
    """Return the directory that was noted, None if none was."""
    try:
        return Path((directory / BOUNDED).read_text(encoding="utf-8"))
    except OSError:
        return None


def read_records(root: Path) -> list[tuple[Path, SandboxRecord | None]]:
    """Return every sandbox directory below ``root`` with its record."""
    if not root.is_dir():
        return []
    return [(directory, SandboxRecord.read(directory)) for directory in sorted(root.iterdir()) if directory.is_dir()]
