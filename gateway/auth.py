"""Tokens and the rights that they give."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import structlog

from gateway.config.schema import ServerConfig
from manager.errors import Forbidden, InvalidConfig, StorageUnavailable, Unauthorized
from tangram.types import ADMIN, INVOKE, TOKEN_BYTES_MAX, is_loopback, links_dir, served_at

_DRAWN_BYTES = 32
_TOKEN = re.compile(r"[!-~]{1,4096}")
#: Fewest characters of a token that somebody has thought of.
CONFIGURED_MIN = 16
_log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerTokens:
    """The tokens: one for everything, one for all but what changes the gateway for everybody."""

    admin: str
    invoke: str


def make_private(state_dir: Path, *, entered: bool = False) -> None:
    """Make the directory, or make it ours alone; raises StorageUnavailable where that cannot be.

    Where it is ``entered``, others may go through it to what they know the name of: commands of plain sandboxes, which
    work below it as another user of the machine. They can neither list it nor read a file of ours.
    """
    wanted = 0o711 if entered else 0o700
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = state_dir.stat()
    if about.st_uid not in (os.geteuid(), 0):
        raise StorageUnavailable(
            f"server.state_dir {state_dir} belongs to user {about.st_uid}, who could put tokens there: "
            "name a directory of the gateway's own user",
            component="store",
        )
    mode = stat.S_IMODE(about.st_mode)
    if mode | 0o700 == wanted:
        return
    try:
        state_dir.chmod(wanted)
    except OSError:
        raise StorageUnavailable(
            f"server.state_dir {state_dir} has mode {mode:o} where {wanted:o} is needed, and it "
            "cannot be changed: name a directory below it",
            component="store",
        ) from None
    if mode & 0o077 & ~wanted:
        _log.warning(
            "the state directory was open to others", state_dir=str(state_dir), mode=f"{mode:o}", now=f"{wanted:o}"
        )


def open_tokens(state_dir: Path, configured: str) -> BearerTokens:
    """Return the tokens of a state directory, made where there are none; ``configured`` takes the place of admin's.

    A configured one is not written down, and a file that would say otherwise is removed. Raises StorageUnavailable, or
    InvalidConfig for a file with a token that is too short.
    """
    try:
        if configured:
            (state_dir / ADMIN).unlink(missing_ok=True)
        return BearerTokens(admin=configured or _kept(state_dir / ADMIN), invoke=_kept(state_dir / INVOKE))
    except OSError as error:
        raise StorageUnavailable(f"server.state_dir {state_dir}: {error}", component="store") from None


def token_problem(token: str) -> str:
    """Return why this cannot be the admin's token; nothing where it can be."""
    if len(token) >= CONFIGURED_MIN and _TOKEN.fullmatch(token):
        return ""
    odd = "others" if re.search(r"[^!-~]", token) else str(len(token))
    message = f"a token has {CONFIGURED_MIN} to {TOKEN_BYTES_MAX} visible ASCII characters, and no spaces"
    return f"{message}; this one has {odd}: openssl rand -hex 32 makes one"


@contextmanager
def announced(state_dir: Path, host: str, port: int) -> Iterator[None]:
    """Lead this user's clients from the address to the tokens, until the block ends.

    Who has no home to write to is told, and serves all the same: its clients are given a token by name.
    """
    state_dir = state_dir.absolute()
    links = [links_dir() / address for address in served_at(host, port)]
    try:
        for link in links:
            link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _forget_gone(link.parent)
            _point(link, state_dir)
    except OSError as error:
        _log.warning("clients on this machine must be given a token: it cannot be left for them", error=str(error))
    try:
        yield
    finally:
        for link in links:
            with suppress(OSError):
                if link.readlink() == state_dir:
                    link.unlink()


def _kept(file: Path) -> str:
    """The token in the file; one that is not there, cannot be one, or was open to others is drawn anew.

    Raises InvalidConfig for one that somebody has thought of and that is too short.
    """
    try:
        about = file.lstat()
        closed = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
        text = file.read_text(encoding="utf-8", errors="replace").strip() if about.st_size <= TOKEN_BYTES_MAX else ""
        if closed and _TOKEN.fullmatch(text):
            if problem := token_problem(text):
                message = f"{file}: {problem}; without the file the next start writes one"
                raise InvalidConfig(message, component="auth")
            return text
        _log.warning("a token that others may have read, or that is none, is replaced", file=str(file))
    except FileNotFoundError:
        pass
    token = secrets.token_urlsafe(_DRAWN_BYTES)
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as opened:
        opened.write(token + "\n")
    fresh.replace(file)
    return token


def _point(link: Path, state_dir: Path) -> None:
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(state_dir)
    fresh.replace(link)


def _forget_gone(directory: Path) -> None:
    """Remove links to state directories that are no more: their gateways were killed."""
    for link in directory.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)


REMEDY = "send 'Authorization: Bearer TOKEN' (`tangram token` prints it)"

#: Seconds for which the key of the page's address can be used: it stands in the log, which others may read later.
KEY_LIFE_S = 3600.0
#: Most unused keys, and most browsers with a cookie; the oldest ends for the next.
PAGE_SESSIONS_MAX = 64


class Role(IntEnum):
    """What a caller may do: invoke functions and see everything, or also change the gateway for everybody."""

    INVOKE = 1
    ADMIN = 2

    def require(self, needed: Role) -> None:
        """Raise Forbidden where the role does not do."""
        if self < needed:
            raise Forbidden("the invoke token does not do for this: send the admin token", component="auth")


class Guard:
    """Knows the tokens, and compares them in constant time; without any everybody is an admin (``auth: none``)."""

    def __init__(self, tokens: BearerTokens | None) -> None:
        self._roles = () if tokens is None else ((tokens.admin, Role.ADMIN), (tokens.invoke, Role.INVOKE))
        self.tokenless = tokens is None

    def role(self, authorization: bytes | None) -> Role:
        """Return what the Authorization value of a request allows; raises Unauthorized."""
        if self.tokenless:
            return Role.ADMIN
        scheme, _, value = (authorization or b"").partition(b" ")
        # Each is compared, so that the time does not tell which of them the value is like.
        result = [role for token, role in self._roles if hmac.compare_digest(value, token.encode())]
        if scheme.lower() != b"bearer" or not value:
            raise Unauthorized(f"a bearer token is needed: {REMEDY}", component="auth")
        if not result:
            raise Unauthorized(f"the token that was sent is wrong: {REMEDY}", component="auth")
        return result[0]

    def capability(self, purpose: str) -> str | None:
        """Return what proves that the gateway lets its bearer do one thing; None where everybody may do everything.

        It ends with the admin's token, and tells nothing of it.
        """
        if not self._roles:
            return None
        return hmac.new(self._roles[0][0].encode(), purpose.encode(), "sha256").hexdigest()


class PageSessions:
    """The browsers that may come in by cookie: each has opened the page with a key that is good once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: When each key that nobody has used ends, the oldest first.
        self._keys: dict[str, float] = {}
        self._cookies: list[str] = []

    def issue(self) -> str:
        """Return a new key; beyond `PAGE_SESSIONS_MAX` the oldest unused one ends."""
        key = secrets.token_urlsafe(32)
        self._keys[key] = self._now() + KEY_LIFE_S
        if len(self._keys) > PAGE_SESSIONS_MAX:
            del self._keys[next(iter(self._keys))]
        return key

    def open(self, key: str) -> str | None:
        """Return a cookie for a right key, the first time and in time; None for any other."""
        found = [each for each in self._keys if hmac.compare_digest(key.encode(), each.encode())]
        if not found or self._now() >= self._keys.pop(found[0]):
            return None
        self._cookies = [*self._cookies, secrets.token_urlsafe(32)][-PAGE_SESSIONS_MAX:]
        return self._cookies[-1]

    def knows(self, cookie: bytes) -> bool:
        """Whether it is a cookie that was issued, compared in constant time."""
        return any(hmac.compare_digest(cookie, each.encode()) for each in self._cookies)


def check_listeners(server: ServerConfig) -> None:
    """Raise InvalidConfig where the servers would be open to whom they should not be."""
    if server.auth == "none" and server.token:
        raise InvalidConfig("server.auth is none, and there is a server.token: drop one of them", component="auth")
    if is_loopback(server.host):
        return
    reached = f"server.host is {server.host!r}, which other machines can reach"
    if server.auth == "none":
        raise InvalidConfig(f"{reached}, and server.auth is none: set auth: token, or bind 127.0.0.1", component="auth")
    if server.tls is None and not server.clear_text:
        raise InvalidConfig(
            f"{reached}, and tokens would cross the network in clear text: "
            "set server.tls, or server.clear_text: true if it is a trusted one, or bind 127.0.0.1",
            component="auth",
        )
