"""The page, which holds nothing of the gateway, and the key by which a browser comes in.

Whoever reaches the door may load it: what it shows is asked for like everything else, with the cookie or a
token that its user types.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.access.auth import PageSession
from gateway.dashboard.files import the_page
from gateway.http.door import Door, cookie_name

#: Where the views are.
UI = "/ui/"
#: Nothing is run that is not the page's own script to the letter; nothing is loaded, sent to or framed elsewhere.
_POLICY = (
    f"default-src 'none'; script-src {the_page().script}; style-src {the_page().style}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
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
    """`GET /` and everything below `/ui/`."""

    def __init__(self, door: Door, session: PageSession) -> None:
        self._door = door
        self._session = session

    async def show(self, request: Request) -> Response:
        """Lead a browser to the page, with the right key with a cookie; tell others where things are."""
        cookie = self._session.open(request.query_params.get("key", ""))
        if cookie is None:
            if "text/html" in request.headers.get("accept", ""):
                return RedirectResponse(UI + "now", 303, {**_HEADERS, "Cache-Control": "no-store"})
            self._door.let_in(request.scope)
            return Response(_TEXT, media_type="text/html", headers={**_HEADERS, "Cache-Control": "no-store"})
        # Not the page itself: the key must not stay in the browser's history, nor reach another page as its referrer.
        answer = RedirectResponse("/", 303, {**_HEADERS, "Cache-Control": "no-store"})
        secure = request.scope["scheme"] == "https"
        answer.set_cookie(cookie_name(request.scope), cookie, httponly=True, samesite="strict", secure=secure)
        return answer

    async def file(self, request: Request) -> Response:
        """Every view is the same page."""
        page = the_page()
        headers = {**_HEADERS, "ETag": page.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == page.etag:
            return Response(status_code=304, headers=headers)
        packed = "gzip" in request.headers.get("accept-encoding", "")
        if packed:
            headers["Content-Encoding"] = "gzip"
        return Response(page.packed if packed else page.data, media_type="text/html", headers=headers)
