"""Answers of the gateway: typed values, and errors where there is none."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import msgspec

from tangram.client.address import SERVER
from tangram.client.credentials import why_without
from tangram.client.results import InvocationResult, result_of
from tangram.errors import ConnectionFailed, TangramError, UnauthorizedError, UnreadableAnswerError, from_problem
from tangram.types import Problem
from tangram.types.invocations import REPLAY
from tangram.types.local_tokens import served_by_us

_T = TypeVar("_T")
_QUOTED = 200
_PROBLEM = msgspec.json.Decoder(Problem)
_INVOCATION = msgspec.json.Decoder(InvocationResult)


def reader(kind: type[_T]) -> Callable[[httpx.Response], _T]:
    """Return what reads the body of an answer as this type; it raises UnreadableAnswerError for what is none."""
    decoder = msgspec.json.Decoder(kind)
    return lambda response: _decoded(decoder, response)


def read_invocation(response: httpx.Response) -> InvocationResult:
    """Return the invocation of an answer, also that of a problem body which tells how it ended."""
    replayed = REPLAY in response.headers
    if response.is_success:
        found = _decoded(_INVOCATION, response)
        return msgspec.structs.replace(found, replayed=True) if replayed else found
    problem = problem_of(response)
    assert problem is not None and problem.invocation, "read only what is_answered"
    return result_of(problem.invocation, replayed=replayed)


def is_answered(response: httpx.Response) -> bool:
    """Return whether the request was granted: an invocation that ended badly is an answer, too."""
    if response.is_success:
        return True
    problem = problem_of(response)
    return problem is not None and bool(problem.invocation)


def problem_of(response: httpx.Response) -> Problem | None:
    """Return the problem in the body of a refusal; None if it is no problem of a gateway."""
    try:
        return _PROBLEM.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def error_of(response: httpx.Response) -> TangramError:
    """Return the exception of a refused request; of a body that is no problem of ours one that quotes it."""
    problem = problem_of(response)
    if problem is not None:
        error = from_problem(problem, _retry_after_s(response))
        if isinstance(error, UnauthorizedError) and "authorization" not in response.request.headers:
            why = why_without(response.request.url)
            return UnauthorizedError(f"no token was sent: {why}") if why else error
        return error
    text = response.text[:_QUOTED]
    return UnreadableAnswerError(f"{response.request.url} answered {response.status_code}: {text}")


def connection_lost(what: str, error: httpx.TransportError) -> ConnectionFailed:
    """Return the exception of a broken connection.

    ``detail["sent"]`` says whether the request may have arrived; ``detail["tls"]`` that one of the two does not trust
    the other, ``detail["foreign"]`` that what answered speaks no HTTP: no further try mends either; and
    ``detail["refused"]`` that nobody listens there. Where no gateway answered at all, the message says what may mend
    that.
    """
    if _is_foreign(error):
        message = f"{what}: what answers there speaks no HTTP (a gateway's port of gRPC does not){_remedy()}"
        return ConnectionFailed(message, detail={"sent": False, "foreign": True})
    sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError)
    told = {"sent": sent, "tls": True} if _is_distrust(error) else {"sent": sent}
    if _is_refused(error):
        told["refused"] = True
    remedy = _remedy() if isinstance(error, httpx.ConnectError) and "tls" not in told else ""
    return ConnectionFailed(f"{what}: {str(error) or type(error).__name__}{remedy}", detail=told)


def _remedy() -> str:
    """Return where gateways of this user are, or that none is seen."""
    found = [f"http://{address}" for address in served_by_us()]
    where = f"yours serves at {' and '.join(found)}" if found else "is `tangram serve` running?"
    return f"; {where} (--server or {SERVER} names the address)"


def _is_foreign(error: httpx.TransportError) -> bool:
    """Whether the first line of the answer was none of HTTP/1.1; a peer that hung up said nothing."""
    return isinstance(error, httpx.RemoteProtocolError) and str(error).startswith("illegal ")


def _is_distrust(error: BaseException | None) -> bool:
    """Whether the TLS handshake failed for good; a peer that is gone in the midst of one is not meant."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        error = error.__cause__ or error.__context__
    return False


def _is_refused(error: BaseException | None) -> bool:
    """Whether nobody listens there, or no such machine is known; the end of what has listened is not meant."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def _decoded(decoder: msgspec.json.Decoder[_T], response: httpx.Response) -> _T:
    try:
        return decoder.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = response.text[:_QUOTED]
        raise UnreadableAnswerError(
            f"{response.request.url} answered what is not understood ({error}): {text}"
        ) from error


def _retry_after_s(response: httpx.Response) -> float | None:
    text: Any = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None
