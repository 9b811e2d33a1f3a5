"""What SWE-ReX's client asks: the fields that `swerex.runtime.abstract` 1.4.0 declares, and no others."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Timeout = Annotated[float, Meta(ge=0)]
SessionName = Annotated[str, Meta(max_length=1024)]


class CreateSession(Struct, forbid_unknown_fields=True):
    """Begin a bash."""

    startup_source: list[str] = []
    session: SessionName = "default"
    session_type: Literal["bash"] = "bash"
    startup_timeout: Timeout = 1.0


class BashAction(Struct, forbid_unknown_fields=True):
    """Type a command to a session."""

    command: str
    session: SessionName = "default"
    timeout: Timeout | None = None
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: str = ""
    expect: list[str] = []
    action_type: Literal["bash"] = "bash"


class BashInterrupt(Struct, forbid_unknown_fields=True):
    """End what runs in a session's foreground."""

    session: SessionName = "default"
    timeout: Timeout = 0.2
    n_retry: int = 3
    expect: list[str] = []
    action_type: Literal["bash_interrupt"] = "bash_interrupt"


class CloseSession(Struct, forbid_unknown_fields=True):
    """End a session."""

    session: SessionName = "default"
    session_type: Literal["bash"] = "bash"


class ExecuteCommand(Struct, forbid_unknown_fields=True):
    """Run a command outside of any session."""

    command: str | list[str]
    timeout: float | None = None
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False


class ReadFile(Struct, forbid_unknown_fields=True):
    """Read a text."""

    path: str
    encoding: str | None = None
    errors: str | None = None


class WriteFile(Struct, forbid_unknown_fields=True):
    """Write a text."""

    content: str
    path: str
