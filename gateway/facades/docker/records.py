"""What is kept of a container in the gateway's record."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tangram.types import SandboxChoice

#: Exit status of what was killed, and of a main command of which none is known.
KILLED, LOST_EXIT = 137, 255

Status = Literal["created", "running", "exited"]


class ContainerRecord(Struct, kw_only=True):
    """What is kept of a container."""

    id: str
    name: str
    trajectory: str
    function: str
    task: str
    #: As it was asked for, and what the client asked beside it, to be told again.
    image: str
    config: dict[str, object]
    host_config: dict[str, object]
    #: What its trajectory chooses; None for nothing.
    sandbox: SandboxChoice | None
    #: Its main command, and where commands begin (empty: the sandbox's working directory).
    argv: tuple[str, ...]
    cwd: str
    labels: dict[str, str]
    #: Whether its main command only keeps it alive, and for how many seconds (0: for ever).
    idles: bool
    idles_s: float
    tty: bool
    reads_stdin: bool
    auto_remove: bool
    created_s: float
    status: Status = "created"
    #: Whether its trajectory was begun.
    opened: bool = False
    started_s: float = 0.0
    finished_s: float = 0.0
    exit_code: int = 0
    #: Why it ended, if that was not its main command's doing.
    error: str = ""
    out_of_memory: bool = False
    #: Whether it is going, with its trajectory: kept until that is gone, for the next gateway to go on with.
    removing: bool = False
