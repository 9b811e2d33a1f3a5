"""What a gateway writes down of each sandbox, so that the next one can adopt it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from manager.function import Background, Isolation, Network, SandboxSpec, Warm

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
        """Durable enough for a gateway's crash; readable by the owner alone, for the token's sake."""
        text = json.dumps({**asdict(self), "labels": dict(self.labels), "spec": spec_as_json(self.spec)})
        part = directory / f"{NAME}.part"
        part.touch(0o600)
        part.write_text(text, encoding="utf-8")
        part.replace(directory / NAME)

    @classmethod
    def read(cls, directory: Path) -> SandboxRecord | None:
        """None where there is none, or none that is whole."""
        try:
            value = json.loads((directory / NAME).read_text(encoding="utf-8"))
            return cls(**{**value, "spec": spec_of_json(value["spec"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def note_container(directory: Path, container: str) -> None:
    """Write down which container it is, so that the next gateway knows what to look for when the engine does not."""
    (directory / CONTAINER).write_text(container, encoding="ascii")


def noted_container(directory: Path) -> str:
    """Empty where none was noted."""
    try:
        return (directory / CONTAINER).read_text(encoding="ascii")
    except OSError:
        return ""


def read_records(root: Path) -> list[tuple[Path, SandboxRecord | None]]:
    """Every sandbox directory below ``root``."""
    if not root.is_dir():
        return []
    return [(directory, SandboxRecord.read(directory)) for directory in sorted(root.iterdir()) if directory.is_dir()]


def spec_as_json(spec: SandboxSpec) -> dict[str, object]:
    return {**asdict(spec), "env": dict(spec.env), "allow": list(spec.allow)}


def spec_of_json(value: Mapping[str, object]) -> SandboxSpec:
    """Raises KeyError, TypeError or ValueError when it does not fit."""
    known = {field.name for field in fields(SandboxSpec)}
    plain: dict[str, object] = {name: item for name, item in value.items() if name in known}
    warm, allow = plain["warm"], plain["allow"]
    if not isinstance(warm, dict) or not isinstance(allow, list):
        raise TypeError("no sandbox spec")
    plain |= {
        "network": Network(str(plain["network"])),
        "isolation": Isolation(str(plain["isolation"])),
        "background": Background(str(plain["background"])),
        "allow": tuple(allow),
        "warm": Warm(**warm),
    }
    return SandboxSpec(**plain)  # type: ignore[arg-type]  # the names were checked, the values came from us
