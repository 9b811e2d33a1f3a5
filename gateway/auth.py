"""Authentication: one bearer token for every door, and loopback only without one."""

from __future__ import annotations

import hmac
import ipaddress

from manager.errors import InvalidConfig, Unauthorized


class Guard:
    """Checks the Authorization value of a request in constant time; without a token everything passes."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if not token else f"Bearer {token}".encode()

    def check(self, authorization: bytes | None) -> None:
        """Raise Unauthorized unless the value is ours."""
        if self._expected is None:
            return
        if authorization is None or not hmac.compare_digest(authorization, self._expected):
            raise Unauthorized("a bearer token is needed: send 'Authorization: Bearer <token>'", component="auth")


def check_bind(host: str, token: str | None) -> None:
    """Raise InvalidConfig where the gateway would serve other machines without a token."""
    if token or is_loopback(host):
        return
    raise InvalidConfig(
        f"server.host is {host!r}, which other machines can reach, and there is no server.token: "
        "set a token, or bind 127.0.0.1",
        component="auth",
    )


def is_loopback(host: str) -> bool:
    """Whether an address or host name can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
