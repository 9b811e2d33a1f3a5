"""The one table of tokens at foreign doors: the gateway's own token, wherever a client can put one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

AUTHORIZATION = b"authorization"
#: Where in the path ``~TOKEN`` may stand: before or after the door's own prefix.
_PATH_PLACES = 2


def _bearer(value: bytes) -> bytes | None:
    scheme, _, token = value.partition(b" ")
    return token if scheme.lower() == b"bearer" else None


#: Header -> how its value is read; the first that holds a token counts.
HEADERS: tuple[tuple[bytes, Callable[[bytes], bytes | None]], ...] = (
    (AUTHORIZATION, _bearer),
    (b"x-api-key", lambda value: value or None),
    (b"x-session-api-key", lambda value: value or None),
)


def token_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the token that the headers hold, None if there is none."""
    for name, read in HEADERS:
        if name in headers and (token := read(headers[name])) is not None:
            return token
    return None


def split_path(scope: Scope) -> tuple[list[str], bytes | None]:
    """Return the segments of the path, decoded, and the token of a ``~TOKEN`` among the first of them."""
    raw = bytes(scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
    segments = raw.lstrip(b"/").split(b"/")
    token = None
    for index, segment in enumerate(segments[:_PATH_PLACES]):
        if segment.startswith((b"~", b"%7E", b"%7e")):
            token = unquote_to_bytes(segment)[1:]
            del segments[index]
            break
    return [unquote_to_bytes(segment).decode("utf-8", "replace") for segment in segments], token


def with_bearer(scope: Scope, token: bytes | None) -> Scope:
    """Return the scope with the token as a bearer; ``token`` is that of the path, which comes after the headers'."""
    found = token_of(dict(reversed(scope["headers"]))) or token
    others = [(name, value) for name, value in scope["headers"] if name != AUTHORIZATION]
    if found is not None:
        others.append((AUTHORIZATION, b"Bearer " + found))
    return {**scope, "headers": others}
