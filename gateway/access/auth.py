"""Authentication: who may come in at any door, and as what."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from enum import IntEnum

from gateway.access.tokens import DoorTokens
from gateway.config.sections import ServerConfig
from manager.errors import Forbidden, InvalidConfig, Unauthorized
from tangram.types import is_loopback

REMEDY = "send 'Authorization: Bearer TOKEN' (`tangram token` prints it)"

#: Seconds for which the key of the page's address can be used: it stands in the log, which others may read later.
KEY_LIFE_S = 3600.0


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

    def __init__(self, tokens: DoorTokens | None) -> None:
        self._roles = () if tokens is None else ((tokens.admin, Role.ADMIN), (tokens.invoke, Role.INVOKE))

    @property
    def tokenless(self) -> bool:
        return not self._roles

    def role(self, authorization: bytes | None) -> Role:
        """Return what the Authorization value of a request allows; raises Unauthorized."""
        if self.tokenless:
            return Role.ADMIN
        scheme, _, given = (authorization or b"").partition(b" ")
        # Each is compared, so that the time does not tell which of them the value is like.
        found = [role for token, role in self._roles if hmac.compare_digest(given, token.encode())]
        if scheme.lower() != b"bearer" or not given:
            raise Unauthorized(f"a bearer token is needed: {REMEDY}", component="auth")
        if not found:
            raise Unauthorized(f"the token that was sent is wrong: {REMEDY}", component="auth")
        return found[0]


class PageSession:
    """The one browser that may come in by cookie: whoever opens the page with the key that `serve` printed, once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.key = secrets.token_urlsafe(32)
        self._now = now
        self._until_s = now() + KEY_LIFE_S
        self._cookie: str | None = None

    def open(self, key: str) -> str | None:
        """Return the cookie for the right key, the first time and in time; None for any other."""
        fresh = self._cookie is None and self._now() < self._until_s
        if not fresh or not hmac.compare_digest(key.encode(), self.key.encode()):
            return None
        self._cookie = secrets.token_urlsafe(32)
        return self._cookie

    def knows(self, cookie: bytes) -> bool:
        """Whether it is the cookie that was given, compared in constant time."""
        return self._cookie is not None and hmac.compare_digest(cookie, self._cookie.encode())


def check_doors(server: ServerConfig) -> None:
    """Raise InvalidConfig where the doors would be open to whom they should not be."""
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
