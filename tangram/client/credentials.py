"""Credentials: the bearer token of each request, the caller's own or one that the gateway left for its user."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from tangram.client.headers import given_headers
from tangram.types.local_tokens import ADMIN, INVOKE, find_token, lost_state_dir


class Bearer(httpx.Auth):
    """Adds the token that was given. Without any it looks for that of a gateway that this user serves on loopback.

    It is looked for when the first request is sent, and once more where the gateway refuses it: another may serve by
    then. An empty one that was given is none, and none is looked for.
    """

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._found: str | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if self._given is not None:
            _add(request, self._given)
            yield request
            return
        sent = self._found = self._found or find_token_of(request.url)
        _add(request, sent)
        response = yield request
        if response.status_code == httpx.codes.UNAUTHORIZED:
            self._found = find_token_of(request.url)
            if self._found not in (None, sent):
                _add(request, self._found)
                yield request


def _add(request: httpx.Request, token: str | None) -> None:
    if token:
        request.headers.update(given_headers({"Authorization": f"Bearer {token}"}))


def find_token_of(url: httpx.URL, names: tuple[str, ...] = (ADMIN, INVOKE)) -> str | None:
    """Return the first of these tokens of the gateway that this user serves at a loopback address; None without."""
    return find_token(url.host, _port(url), names)


def why_without(url: httpx.URL) -> str:
    """Return why no token was found for a gateway that this user serves; nothing where there is none such."""
    lost = lost_state_dir(url.host, _port(url))
    if lost is None:
        return ""
    return (
        f"the token of the gateway that you serve at {url.host}:{_port(url)} was in its state directory {lost}, which "
        "was removed or replaced under it: /readyz tells its state; end it and start it again, or set TANGRAM_TOKEN"
    )


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
