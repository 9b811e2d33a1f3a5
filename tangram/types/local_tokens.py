"""Where a gateway of this machine leaves its tokens: one rule for the server and for the clients of its user.

The state directory, which is its user's alone, holds a file for each token. A link below the user's home, named after
this machine and the address, leads from an address of loopback to the state directory of whoever serves there.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Names of the files in the state directory: all of it, and all but what changes the gateway for everybody.
ADMIN, INVOKE = "admin.token", "invoke.token"
#: What is longer is no token.
TOKEN_BYTES_MAX = 4096
_LISTENS = "0A"


def links_dir() -> Path:
    """Return the directory of the links, of this user and this machine: a home may be shared by many."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "tangram" / "gateways" / (platform.node() or "localhost")


def is_loopback(host: str) -> bool:
    """Whether an address or host name can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def served_at(host: str, port: int) -> list[str]:
    """Return the loopback addresses, as names of links, at which who listens on ``host`` is reached."""
    reached = {"0.0.0.0": ["127.0.0.1"], "::": ["::1", "127.0.0.1"], "localhost": ["127.0.0.1", "::1"]}
    bare = host.strip("[]").lower()
    return [f"{each}:{port}" for each in reached.get(bare, [bare]) if is_loopback(each)]


def find_token(host: str, port: int, names: tuple[str, ...] = (ADMIN, INVOKE)) -> str | None:
    """Return the first of these tokens of the gateway that this user serves on loopback; None where there is none.

    Only what is this user's is believed: the link, the file (which nobody else may read), and whoever listens there,
    for a port that was left may be somebody else's by now.
    """
    user = os.geteuid() if hasattr(os, "geteuid") else None
    for address in served_at(host, port):
        link = links_dir() / address
        with suppress(OSError, UnicodeDecodeError):
            if link.lstat().st_uid != user or not _all_ours(port, user):
                continue
            for name in names:
                if token := _read(link / name, user):
                    return token
    return None


def lost_state_dir(host: str, port: int) -> Path | None:
    """Return the state directory that a gateway of this user left its tokens in, where they are no longer there."""
    user = os.geteuid() if hasattr(os, "geteuid") else None
    for address in served_at(host, port):
        link = links_dir() / address
        with suppress(OSError):
            if link.lstat().st_uid == user and _all_ours(port, user) and not _read(link / INVOKE, user):
                return link.readlink()
    return None


def served_by_us() -> list[str]:
    """Return the loopback addresses (``127.0.0.1:8080``, ``[::1]:8080``) at which gateways of this user serve now."""
    with suppress(OSError):
        named = sorted(each.name.rpartition(":") for each in links_dir().iterdir())
        serving = [(host, port) for host, _, port in named if port.isdigit() and find_token(host, int(port))]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in serving]
    return []


def _read(file: Path, user: int) -> str | None:
    """The token in a file that is this user's, and nobody else's to read; None for any other."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, encoding="ascii") as opened:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != user or about.st_mode & 0o077:
            return None
        return opened.read(TOKEN_BYTES_MAX).strip() or None


def _all_ours(port: int, user: int) -> bool:
    """Whether somebody listens on the port, and nobody but this user; true where the system does not tell."""
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    if not any(table.exists() for table in tables):
        return True
    owners = {owner for table in tables if table.exists() for owner in _listeners(table, port)}
    return owners == {user}


def _listeners(table: Path, port: int) -> Iterator[int]:
    """Yield the users that listen on a port; the kernel lists those who listen before all connections."""
    with table.open(encoding="ascii") as lines:
        next(lines, None)
        for line in lines:
            fields = line.split()
            local, state = fields[1], fields[3]
            if state != _LISTENS:
                return
            if int(local.rpartition(":")[2], 16) == port:
                yield int(fields[7])
