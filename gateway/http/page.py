"""The page at the root: for a browser that comes with the key that `serve` printed, where things are."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.auth import PageSession
from gateway.http.door import Door, cookie_name

#: Nothing is loaded, sent, framed or run.
_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_LINKS = {
    "/v1/functions": "registered functions",
    "/v1/invocations": "invocations, newest first",
    "/v1/trajectories": "living trajectories",
    "/v1/resources": "resources and who holds them",
    "/v1/queue": "what waits, and for what",
    "/v1/tasks": "RL tasks and their use",
    "/metrics": "metrics",
    "/openapi.json": "the API for machines",
}
_ROWS = "".join(f'<li><a href="{path}">{path}</a>: {about}</li>' for path, about in _LINKS.items())
_TEXT = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tangram gateway</title></head>'
    f"<body><h1>Tangram gateway</h1><ul>{_ROWS}</ul></body></html>"
)


class LandingPage:
    """`GET /`."""

    def __init__(self, door: Door, session: PageSession) -> None:
        self._door = door
        self._session = session

    async def show(self, request: Request) -> Response:
        """The page; with the right key a cookie, and the page's address without the key."""
        cookie = self._session.open(request.query_params.get("key", ""))
        if cookie is None:
            self._door.let_in(request.scope)
            return Response(_TEXT, media_type="text/html", headers=_HEADERS)
        # Not the page itself: the key must not stay in the browser's history, nor reach another page as its referrer.
        answer = RedirectResponse("/", 303, _HEADERS)
        secure = request.scope["scheme"] == "https"
        answer.set_cookie(cookie_name(request.scope), cookie, httponly=True, samesite="strict", secure=secure)
        return answer
