"""The page, which holds nothing of the gateway, and the key by which a browser comes in.

Whoever reaches the door may load it: what it shows is asked for like everything else, with the cookie or a
token that its user types.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.access.auth import PageSession
from gateway.dashboard.files import WORKER, the_page
from gateway.http.door import Door, cookie_name

#: Where the views are.
UI = "/ui/"
#: What somebody types.
BARE_UI = "/ui"
#: Nothing is run that is not the page's own script to the letter, or the worker that it starts; nothing is loaded, sent
#: to or framed elsewhere.
_POLICY = (
    f"default-src 'none'; script-src {the_page().script}; style-src {the_page().style}; connect-src 'self'; "
    "worker-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
#: A worker may ask its own gateway, and nothing else.
_WORKER_POLICY = "default-src 'none'; connect-src 'self'"
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
                return await self.lead(request)
            self._door.let_in(request.scope)
            return Response(_TEXT, media_type="text/html", headers={**_HEADERS, "Cache-Control": "no-store"})
        # Not the page itself: the key must not stay in the browser's history, nor reach another page as its referrer.
        answer = RedirectResponse("/", 303, {**_HEADERS, "Cache-Control": "no-store"})
        secure = request.scope["scheme"] == "https"
        answer.set_cookie(cookie_name(request.scope), cookie, httponly=True, samesite="strict", secure=secure)
        return answer

    async def lead(self, request: Request) -> Response:
        """Lead a browser to the first view."""
        return RedirectResponse(UI + "now", 303, {**_HEADERS, "Cache-Control": "no-store"})

    async def file(self, request: Request) -> Response:
        """Every view is the same page; beside it is only its worker."""
        is_worker = request.url.path == UI + WORKER
        sent = the_page().worker if is_worker else the_page()
        headers = {**_HEADERS, "ETag": sent.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if is_worker:
            headers["Content-Security-Policy"] = _WORKER_POLICY
        if request.headers.get("if-none-match") == sent.etag:
            return Response(status_code=304, headers=headers)
        packed = "gzip" in request.headers.get("accept-encoding", "")
        if packed:
            headers["Content-Encoding"] = "gzip"
        kind = "text/javascript" if is_worker else "text/html"
        return Response(sent.packed if packed else sent.data, media_type=kind, headers=headers)
