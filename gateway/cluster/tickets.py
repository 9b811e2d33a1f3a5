"""Tickets and keys: how a node shows who it is. A ticket admits one name once, soon; a key admits it again."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manager.errors import CapacityExceeded, InvalidInput, StorageUnavailable, Unauthorized

COMPONENT = "cluster.tickets"
#: File of the key that signs tickets, in the state directory.
SIGNING_KEY = "cluster.signing-key"
#: Variable that holds a daemon's ticket: what a command says stands in the list of processes, for every user to read.
TICKET_VARIABLE = "TANGRAM_TICKET"
#: Most bytes of a ticket that are read from a file.
TICKET_BYTES_MAX = 4096
_KEY_BYTES = 32
#: Tickets that were used and have not expired, of which each is remembered.
USED_MAX = 65536
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # as `manager.config.ResourceName`


def signing_key(state_dir: Path) -> bytes:
    """Return the key of the state directory, made at the first call; raises StorageUnavailable."""
    path = state_dir / SIGNING_KEY
    try:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
        key = path.read_bytes()
    except OSError as error:
        raise StorageUnavailable(f"{path} cannot be used: {error}", component=COMPONENT) from None
    if len(key) != _KEY_BYTES:
        raise StorageUnavailable(f"{path} holds no key: remove it, and start again", component=COMPONENT)
    return key


def check_name(name: str) -> str:
    """Return the name of a node; raises InvalidInput for what is none."""
    if not _NAME.fullmatch(name):
        told = f"{name[:128]!r} is no name of a node: letters, digits or . _ -, at most 128"
        raise InvalidInput(told, component=COMPONENT, detail={"path": "$.name"})
    return name


def new_node_key() -> str:
    """Return what a node shows from its second time on."""
    return secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> str:
    """Return what the gateway keeps of a node's key."""
    return hashlib.sha256(key.encode()).hexdigest()


class TicketOffice:
    """Issues tickets and takes each once. One of an earlier start of the gateway is worth nothing."""

    def __init__(
        self,
        key: bytes,
        generation: int,
        ttl_s: float,
        *,
        wall: Callable[[], float] = time.time,
        used_max: int = USED_MAX,
    ) -> None:
        self._key = key
        self._generation = generation
        self._ttl_s = ttl_s
        self._wall = wall
        self._used_max = used_max
        #: When each used ticket expires, by what is random of it.
        self._used: dict[str, float] = {}

    def issue(self, name: str) -> tuple[str, float]:
        """Return a ticket for a name and the instant at which it expires; raises InvalidInput."""
        expires_s = self._wall() + self._ttl_s
        return self._written(check_name(name), int(expires_s * 1000), secrets.token_urlsafe(12)), expires_s

    def take(self, ticket: str, name: str) -> None:
        """Admit a node by its ticket; raises Unauthorized for one that is not ours, not its own, used, or too old."""
        told_name, expires_ms, nonce = _read(ticket)
        expected = self._written(told_name, expires_ms, nonce)
        if not hmac.compare_digest(expected.encode(), ticket.encode()):
            raise Unauthorized("the ticket is of no gateway's, or of an earlier start of it", component=COMPONENT)
        if told_name != name:
            raise Unauthorized(f"the ticket admits {told_name}, not {name}", component=COMPONENT)
        now_s = self._wall()
        if expires_ms / 1000 <= now_s:
            raise Unauthorized("the ticket has expired: ask for another (tangram node ticket)", component=COMPONENT)
        if nonce in self._used:
            raise Unauthorized("the ticket was used already: each admits once", component=COMPONENT)
        self._forget_expired(now_s)
        self._used[nonce] = expires_ms / 1000

    def _forget_expired(self, now_s: float) -> None:
        if len(self._used) >= self._used_max:
            self._used = {nonce: expires_s for nonce, expires_s in self._used.items() if expires_s > now_s}
        if len(self._used) >= self._used_max:
            raise CapacityExceeded("too many tickets are used at once", component=COMPONENT, retry_after_s=self._ttl_s)

    def _written(self, name: str, expires_ms: int, nonce: str) -> str:
        body = f"{base64.urlsafe_b64encode(name.encode()).decode().rstrip('=')}.{expires_ms}.{nonce}"
        signed = hmac.new(self._key, f"{self._generation}.{body}".encode(), hashlib.sha256).hexdigest()
        return f"{body}.{signed}"


def _read(ticket: str) -> tuple[str, int, str]:
    """Return the name, the expiry and the random part; raises Unauthorized for what has another form."""
    try:
        name, expires_ms, nonce, _ = ticket.split(".")
        if not (expires_ms.isascii() and expires_ms.isdecimal() and len(expires_ms) <= 16):
            raise ValueError(expires_ms)
        padded = name + "=" * (-len(name) % 4)
        return base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True).decode(), int(expires_ms), nonce
    except (ValueError, UnicodeError, binascii.Error):
        raise Unauthorized("this is no ticket", component=COMPONENT) from None
