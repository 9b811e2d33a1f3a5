"""What a kind of sandbox promises, and what every kind asks of a sandbox's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from manager.errors import InvalidConfig
from manager.function import SandboxSpec

COMPONENT = "sandbox"

PROMISES = (
    "filesystem", "network", "egress", "processes_hidden", "users_separate", "memory", "pids", "cores", "freeze",
    "disk", "image", "seccomp", "snapshot", "own_user", "root_separate",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderInfo:
    """Which kind of sandbox is used, and what it promises, in plain words."""

    kind: Literal["container", "process", "plain"]  #: ``process`` is bubblewrap
    engine: str  #: for example ``docker 28.2 (cgroup v1)`` or ``bubblewrap``
    isolation: str  #: one honest sentence
    #: What containers are run with unless a function says otherwise, and all that it may say (containers).
    runtime: str = ""
    runtimes: tuple[str, ...] = ()
    #: Which of the `PROMISES` are kept.
    limits: Mapping[str, bool] = field(default_factory=dict)
    #: In what it is weaker than it could be, each in plain words; told at the start, by ``/readyz`` and as a resource.
    weakenings: tuple[str, ...] = ()
    #: How what it writes is bounded: ``image`` or ``walk``.
    disk: str = "walk"


def require_workdir(spec: SandboxSpec) -> None:
    """Raise InvalidConfig unless the working directory can be one."""
    if not spec.workdir.startswith("/") or spec.workdir == "/":
        raise InvalidConfig(f"sandbox.workdir must be an absolute directory, not {spec.workdir!r}")


def require_user(spec: SandboxSpec) -> None:
    """Raise InvalidConfig unless its user is one that it may have."""
    if refused := spec.refuses(spec.user):
        raise InvalidConfig(f"sandbox.user: {refused}", component=COMPONENT)
