"""The call: query and headers of an HTTP request, read into what `gateway.invocations.invocations` is asked."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from gateway import wire
from gateway.invocations.invocation import InvocationRequest
from gateway.invocations.record import Mode
from manager.errors import InvalidInput


def read_call(request: HttpRequest, function: str, body: bytes) -> InvocationRequest:
    """The request of one invocation; raises InvalidInput for anything odd."""
    headers = request.headers
    trajectory, parent = headers.get("x-trajectory-id"), headers.get("x-parent-id")
    timeout, max_age = headers.get("x-timeout"), headers.get("x-max-age")
    return InvocationRequest(
        function=wire.name(function, "function"),
        input=wire.loads_object(body),
        body=body or b"{}",
        mode=read_mode(request),
        task=wire.name(headers.get("x-task", "default"), "X-Task"),
        trajectory=None if trajectory is None else wire.name(trajectory, "X-Trajectory-Id"),
        living=read_living(request),
        parent=None if parent is None else wire.name(parent, "X-Parent-Id"),
        timeout_s=None if timeout is None else wire.duration_s(timeout, "X-Timeout"),
        max_age_s=None if max_age is None else wire.duration_s(max_age, "X-Max-Age"),
        key=_key(headers.get("idempotency-key")),
        callback_url=headers.get("x-callback-url"),
        detached=_detached(headers.get("x-on-disconnect")),
        traceparent=_traceparent(headers.get("traceparent")),
    )


def read_living(request: HttpRequest) -> bool:
    """Return whether only a living trajectory will do; raises InvalidInput."""
    expected = request.headers.get("x-trajectory-expect")
    if expected not in (None, "living"):
        raise InvalidInput("X-Trajectory-Expect must be living", detail={"path": "X-Trajectory-Expect"})
    return expected == "living"


def read_mode(request: HttpRequest) -> Mode:
    text = request.query_params.get("mode", "sync")
    try:
        return Mode(text)
    except ValueError:
        raise InvalidInput(f"mode {text[:64]!r} must be sync, async or stream", detail={"path": "mode"}) from None


def read_wait_s(request: HttpRequest, limit_s: float) -> float | None:
    """``?wait=30s``; None where it is absent."""
    text = request.query_params.get("wait")
    return None if text is None else min(wire.duration_s(text, "wait"), limit_s)


def _key(text: str | None) -> str | None:
    if text is not None and wire.KEY.fullmatch(text) is None:
        raise InvalidInput(
            "Idempotency-Key must be 1 to 255 visible ASCII characters", detail={"path": "Idempotency-Key"}
        )
    return text


def _detached(text: str | None) -> bool:
    if text not in (None, "cancel", "continue"):
        raise InvalidInput("X-On-Disconnect must be cancel or continue", detail={"path": "X-On-Disconnect"})
    return text == "continue"


def _traceparent(text: str | None) -> str | None:
    """The trace context, dropped where it is malformed, as W3C asks."""
    return text if text is not None and wire.TRACEPARENT.fullmatch(text) is not None else None
