"""The door: who may send a request, seen by its headers alone, before anything of it is read.

A bearer token is proof enough. Whoever comes without one may be a web page in a browser of this machine, sent by its
user or by a stranger: the browser says where the page comes from, and lets no strange page send JSON unasked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from starlette.types import Scope

from gateway.access.auth import REMEDY, Guard, PageSession, Role
from manager.errors import Forbidden, Unauthorized
from tangram.types import is_loopback

#: Methods that change nothing: for these browsers send no Origin to a page's own server.
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_HEADERS = frozenset(
    {b"authorization", b"host", b"origin", b"sec-fetch-site", b"content-type", b"cookie", b"content-length"}
    | {b"transfer-encoding"}
)


class Door:
    """Lets requests in, as what they may do."""

    def __init__(self, guard: Guard, session: PageSession, media_types: Collection[str]) -> None:
        """``media_types`` are those of bodies that no web page can send to a stranger without asking first."""
        self._guard = guard
        self._session = session
        self._media_types = frozenset(media_types)

    def let_in(self, scope: Scope) -> Role:
        """Return what the request may do; raises Unauthorized or Forbidden with the remedy."""
        headers = {name: value for name, value in scope["headers"] if name in _HEADERS}
        if self._guard.tokenless:
            self._check_machine(headers)
            self._check_page(scope, headers)
            self._check_body(headers)
            return Role.ADMIN
        cookie = None if b"authorization" in headers else _cookie(headers, cookie_name(scope))
        if cookie is None:
            return self._guard.role(headers.get(b"authorization"))
        if not self._session.knows(cookie):
            raise Unauthorized(f"the page's cookie is of an earlier gateway: {REMEDY}", component="auth")
        self._check_page(scope, headers)
        if scope["method"] not in _READING:
            if b"origin" not in headers:
                raise Forbidden("a request with the page's cookie must say its Origin", component="auth")
            self._check_body(headers)
        return Role.ADMIN

    def _check_machine(self, headers: Mapping[bytes, bytes]) -> None:
        """A name of somebody else's that leads to this machine is how a web page reads what is on it."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not is_loopback(_without_port(host)):
            raise Forbidden(
                f"Host is {host[:128]!r}, and without tokens (server.auth: none) this gateway is called "
                "127.0.0.1, [::1] or localhost only",
                component="auth",
            )

    def _check_page(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """A page of another origin, of this machine or not, has no business here."""
        origin = headers.get(b"origin")
        own = f"{scope['scheme']}://".encode() + headers.get(b"host", b"").lower()
        site = headers.get(b"sec-fetch-site", b"none").lower()
        if (origin is not None and origin.lower() != own) or site not in (b"none", b"same-origin"):
            shown = (origin or site).decode("latin-1")[:128]
            raise Forbidden(f"a web page of another origin ({shown!r}) sends this: {REMEDY}", component="auth")

    def _check_body(self, headers: Mapping[bytes, bytes]) -> None:
        """Forms and plain text are what any page may send to anybody; it must not be one of these."""
        given = headers.get(b"content-type")
        if given is None and headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
            return
        kind = (given or b"").decode("latin-1").partition(";")[0].strip().lower()
        if kind not in self._media_types:
            wanted = ", ".join(sorted(self._media_types))
            raise Forbidden(
                f"without a bearer token a body must say what it is: Content-Type is {kind!r}, none of {wanted}",
                component="auth",
            )


def cookie_name(scope: Scope) -> str:
    """Return the name of the page's cookie: a browser sends those of all ports of a host to each of them."""
    server = scope.get("server")
    return f"tangram-{server[1] if server else 0}"


def _cookie(headers: Mapping[bytes, bytes], name: str) -> bytes | None:
    for pair in headers.get(b"cookie", b"").split(b";"):
        found, equals, value = pair.strip().partition(b"=")
        if equals and found == name.encode():
            return value
    return None


def _without_port(host: str) -> str:
    """Return the name or address of a Host header."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (not name or name[-1] == "]" or ":" not in name) else host
