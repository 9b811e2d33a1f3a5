"""Requests and answers, whatever carries them."""

from __future__ import annotations

import base64
import logging
import math
import os
import random
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

import httpx
import msgspec

from tangram import types
from tangram.errors import (
    CapacityExceededError,
    ConnectionFailed,
    DrainingError,
    FunctionUnavailableError,
    InvalidConfigError,
    InvalidInputError,
    InvocationFailed,
    QuotaExceededError,
    StorageUnavailableError,
    TangramError,
    UnauthorizedError,
    UnreadableAnswerError,
    from_problem,
)
from tangram.stream import StreamAnswer, StreamCall, StreamWait

COMPONENT = "client"


def json_body(value: object) -> bytes:
    """Return a value as JSON; raises InvalidInputError for what JSON cannot hold, with its place.

    That is text which is no Unicode, numbers that are none (NaN, infinity), and objects of other libraries.
    """
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        place = error.object[max(0, error.start - 20) : error.end + 20]
        problem = f"the input has text that is no Unicode, a lone surrogate in {place!r}"
        raise InvalidInputError(f"{problem}; send bytes as stdin_base64 or in a file", component=COMPONENT) from None
    except TypeError as error:
        problem = f"the input is no JSON: {error}; of numpy and torch send .item() or .tolist()"
        raise InvalidInputError(problem, component=COMPONENT) from None
    if b"null" in body:  # as which msgspec writes numbers that are none
        for path, number in _not_finite(value, "$"):
            problem = f"{path} is {number}, which JSON does not have: send null or a text, as the function expects it"
            raise InvalidInputError(problem, component=COMPONENT, detail={"path": path})
    return body


def _not_finite(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers that are none, with their places; the value could be written, so it is no circle."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield path, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _not_finite(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _not_finite(each, f"{path}.{name}")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, each in enumerate(value):
            yield from _not_finite(each, f"{path}[{index}]")


_CARRIED = re.compile(r"[ -~]*", re.ASCII)


def given_headers(values: Mapping[str, str | None]) -> dict[str, str]:
    """Return the headers that have a value; raises InvalidInputError where one has more than visible ASCII."""
    headers = {name: value for name, value in values.items() if value is not None}
    for name, value in headers.items():
        if _CARRIED.fullmatch(value) is None:
            raise InvalidInputError(
                f"{name}: {value[:64]!r} has characters that no header carries; write it in ASCII",
                component="client",
                detail={"path": name},
            )
    return headers


class InvocationResult(types.Invocation, frozen=True, kw_only=True, omit_defaults=True):
    """An invocation as its record stood when it was answered; its times are those of all its tries."""

    #: The log, if it was asked for with ``logs=True``.
    logs: tuple[types.LogLine, ...] = ()
    #: Whether the call's key was known: it ran nothing, and this is the invocation of the first call.
    replayed: bool = False

    @property
    def stdout(self) -> str:
        """What a command said on standard output; empty without."""
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        """What a command said on standard error; empty without."""
        return self._text("stderr")

    @property
    def exit_code(self) -> int | None:
        """The exit status of a command or of a suite; None if a signal ended it, or it did not come to its end."""
        found = self._found("exit_code")
        return found if isinstance(found, int) else None

    @property
    def reward(self) -> float | None:
        """The reward of a suite, or of a handler that returns one; None without, which is not 0."""
        found = self._found("reward")
        return float(found) if isinstance(found, int | float) else None

    @property
    def note(self) -> str:
        """What a reader of the reward should know, or why there is none; empty for nothing."""
        return self._text("note") or self._text("reason")

    def _text(self, name: str) -> str:
        found = self._found(name)
        return found if isinstance(found, str) else ""

    def _found(self, name: str) -> object:
        return self.result.get(name) if isinstance(self.result, Mapping) else None

    def raise_for_failure(self) -> InvocationResult:
        """Return itself if it succeeded or has not ended; raises InvocationFailed."""
        if self.ended and not self.ok:
            raise InvocationFailed(self)
        return self


def result_of(invocation: types.Invocation, *, replayed: bool = False) -> InvocationResult:
    """Return the result of a call whose record is part of another answer."""
    fields = {name: getattr(invocation, name) for name in msgspec.structs.asdict(invocation)}
    return InvocationResult(**{**fields, "replayed": replayed})


#: Calls of one ``map`` that are under way at once.
CONCURRENCY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MapProgress:
    """How far a ``map`` has come; told after each end, never twice at once."""

    #: Calls that have an end, and how many of them raised an error.
    done: int
    failed: int
    #: How many there will be, if the inputs can be counted.
    total: int | None
    #: The index of the input whose call has just ended, and its end.
    index: int
    result: InvocationResult | TangramError


OnProgress = Callable[[MapProgress], None]


class MapEnds:
    """The ends of the calls of one ``map``, as they come in: from one event loop, or from many threads."""

    def __init__(self, inputs: Iterable[Mapping[str, Any]], progress: OnProgress | None) -> None:
        self._total = len(inputs) if isinstance(inputs, Sized) else None
        self._progress = progress
        self._by_index: dict[int, InvocationResult | TangramError] = {}
        self._failed = 0
        self._lock = threading.Lock()

    def take(self, index: int, result: InvocationResult | TangramError) -> None:
        """Note how the call of the input at ``index`` has ended, and tell; one at a time."""
        with self._lock:
            self._by_index[index] = result
            self._failed += isinstance(result, TangramError)
            if self._progress is not None:
                done, failed = len(self._by_index), self._failed
                self._progress(MapProgress(done=done, failed=failed, total=self._total, index=index, result=result))

    def ordered(self) -> list[InvocationResult | TangramError]:
        """Return the ends in the order of the inputs."""
        return [self._by_index[index] for index in range(len(self._by_index))]

    def succeeded(self) -> list[InvocationResult] | None:
        """Return the results in the order of the inputs; None if any call raised an error."""
        results = [each for each in self.ordered() if not isinstance(each, TangramError)]
        return results if len(results) == len(self._by_index) else None


class Bearer(httpx.Auth):
    """Adds the token that was given. Without any it looks for that of a gateway that this user serves on loopback.

    It is looked for when the first request is sent, and once more where the gateway refuses it: another may serve by
    then. An empty one that was given is none, and none is looked for.
    """

    def __init__(self, token: str | None) -> None:
        self._given = token
        self._found: str | None = None

    def headers(self, url: httpx.URL) -> dict[str, str]:
        """Return what a request is sent with that no flow sends again."""
        if self._given is None:
            self._found = self._found or find_token_of(url)
        token = self._given or self._found
        return given_headers({"Authorization": f"Bearer {token}"}) if token else {}

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


def find_token_of(url: httpx.URL, names: tuple[str, ...] = (types.ADMIN, types.INVOKE)) -> str | None:
    """Return the first of these tokens of the gateway that this user serves at a loopback address; None without."""
    return types.find_token(url.host, _port(url), names)


def why_without(url: httpx.URL) -> str:
    """Return why no token was found for a gateway that this user serves; nothing where there is none such."""
    lost = types.lost_state_dir(url.host, _port(url))
    if lost is None:
        return ""
    return (
        f"the token of the gateway that you serve at {url.host}:{_port(url)} was in its state directory {lost}, which "
        "was removed or replaced under it: /readyz tells its state; end it and start it again, or set TANGRAM_TOKEN"
    )


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


#: The gateway's own default address.
DEFAULT = "http://127.0.0.1:8080"
SERVER, TOKEN = "TANGRAM_SERVER", "TANGRAM_TOKEN"
CA, CERT = "TANGRAM_CA", "TANGRAM_CERT"
_REMEDY = "write http://HOST:PORT, https://HOST:PORT or HOST:PORT"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]")


def server_of(address: str | None) -> str:
    """Return the base URL of the gateway: ``given``, or TANGRAM_SERVER, or `DEFAULT`.

    An address without a scheme is one of http. Raises InvalidConfigError, naming where the address came from.
    """
    if address is not None:
        return _checked(address, "server")
    return _checked(os.environ.get(SERVER) or DEFAULT, SERVER)


def token_of(value: str | None) -> str | None:
    """Return the bearer token: ``given`` (an empty one is none), or TANGRAM_TOKEN; None where neither is there.

    Raises InvalidConfigError.
    """
    token = (os.environ.get(TOKEN) or None) if value is None else value
    if token is not None and not (token.isascii() and token.isprintable()):
        where = TOKEN if value is None else "token"
        raise InvalidConfigError(f"{where}: a token is printable ASCII, without line breaks (a trailing newline?)")
    return token


def trust_of(https: bool, ca: str | None, cert: str | None) -> ssl.SSLContext:
    """Return whom connections trust; raises InvalidConfigError for files that cannot be used.

    ``ca`` (or TANGRAM_CA) is a file of certificates in place of the system's, ``cert`` (or TANGRAM_CERT) one of the
    caller's own with its key, both in PEM. http needs none, and reading them takes a while.
    """
    if not https:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    where = (CA if ca is None else "ca", CERT if cert is None else "cert")
    ca, cert = ca or os.environ.get(CA) or None, cert or os.environ.get(CERT) or None
    try:
        context = httpx.create_ssl_context() if ca is None else ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise _unusable(where[0], ca, "certificates", error) from None
    try:
        if cert is not None:
            context.load_cert_chain(cert)
    except OSError as error:
        raise _unusable(where[1], cert, "a certificate followed by its key, or the key by it,", error) from None
    return context


def _unusable(where: str, file: str | None, wanted: str, error: OSError) -> InvalidConfigError:
    """Return the exception of a file that cannot be used (an SSLError is an OSError, too)."""
    if isinstance(error, ssl.SSLError):
        return InvalidConfigError(f"{where} names {file}, which does not hold {wanted} in PEM: {error}")
    if isinstance(error, FileNotFoundError):
        return InvalidConfigError(f"{where} names {file}, and there is no such file")
    return InvalidConfigError(f"{where} names {file}, which cannot be read: {error.strerror or error}")


#: An answer may take as long as work does; it is the kernel that notices within two minutes that a machine is gone.
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, option), value)
        for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
        if hasattr(socket, option)
    ),
]


def _checked(address: str, where: str) -> str:
    def wrong(why: str) -> InvalidConfigError:
        return InvalidConfigError(f"{where}: {address!r} {why}; {_REMEDY}")

    if not address or re.search(r"\s", address):
        raise wrong("is empty" if not address else "has white space in it")
    if address.count(":") > 1 and "/" not in address and "[" not in address:
        raise wrong("is no address (IPv6 is written in [])")
    scheme = _SCHEME.match(address)
    if scheme is not None and scheme[1].lower() not in ("http", "https"):
        raise wrong(f"begins with {scheme[1]}:, and the gateway speaks http and https only")
    try:
        url = urlsplit(address if scheme is not None else f"http://{address}")
        port = url.port
    except ValueError as error:
        raise wrong(f"is no address ({error})") from None
    odd = _odd_part(url)
    if odd is not None:
        raise wrong(odd)
    host = url.netloc.rpartition(":")[0] if port is not None else url.netloc.removesuffix(":")
    if _HOST.fullmatch(host) is None:
        raise wrong("names no host")
    return f"{url.scheme.lower()}://{host}" + ("" if port is None else f":{port}")


def _odd_part(url: SplitResult) -> str | None:
    """What this has that no address of a gateway has."""
    if "@" in url.netloc:
        return "has a user name in it; the bearer token goes into token or TANGRAM_TOKEN"
    if url.path not in ("", "/"):
        return f"has the path {url.path!r}, and the gateway answers at the root of its host only"
    return "has a query or a fragment" if url.query or url.fragment else None


_T = TypeVar("_T")
_QUOTED = 200
_PROBLEM = msgspec.json.Decoder(types.Problem)
_INVOCATION = msgspec.json.Decoder(InvocationResult)


def reader(kind: type[_T]) -> Callable[[httpx.Response], _T]:
    """Return what reads the body of an answer as this type; it raises UnreadableAnswerError for what is none."""
    decoder = msgspec.json.Decoder(kind)
    return lambda response: _decoded(decoder, response)


def read_invocation(response: httpx.Response) -> InvocationResult:
    """Return the invocation of an answer, also that of a problem body which tells how it ended."""
    replayed = types.REPLAY in response.headers
    if response.is_success:
        invocation = _decoded(_INVOCATION, response)
        return msgspec.structs.replace(invocation, replayed=True) if replayed else invocation
    problem = problem_of(response)
    assert problem is not None and problem.invocation, "read only what is_answered"
    return result_of(problem.invocation, replayed=replayed)


def read_streamed(answer: StreamAnswer) -> InvocationResult:
    """Return the invocation of an answer of the stream; raises the TangramError of a refused call."""
    try:
        if answer.status < httpx.codes.MULTIPLE_CHOICES:
            invocation = _INVOCATION.decode(answer.body)
            return msgspec.structs.replace(invocation, replayed=True) if answer.replayed else invocation
        problem = _PROBLEM.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = answer.body[:_QUOTED].decode(errors="replace")
        raise UnreadableAnswerError(f"the stream answered what is not understood ({error}): {text}") from error
    if not problem.invocation:
        raise from_problem(problem)
    return result_of(problem.invocation, replayed=answer.replayed)


def is_answered(response: httpx.Response) -> bool:
    """Return whether the request was granted: an invocation that ended badly is an answer, too."""
    if response.is_success:
        return True
    problem = problem_of(response)
    return problem is not None and bool(problem.invocation)


def problem_of(response: httpx.Response) -> types.Problem | None:
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


#: Seconds within which a peer hangs up that wants TLS or a certificate.
HANG_UP_S = 0.5


def was_read(error: httpx.TransportError, lasted_s: float) -> bool:
    """Return whether a request that broke off after so long was read: a peer that wants TLS hangs up at once."""
    return isinstance(error, httpx.ReadError | httpx.RemoteProtocolError) and lasted_s >= HANG_UP_S


def connection_lost(what: str, error: httpx.TransportError, *, reached: bool = False) -> ConnectionFailed:
    """Return the exception of a broken connection.

    ``detail["sent"]`` says whether the request may have arrived; ``detail["tls"]`` that one of the two does not trust
    the other, ``detail["foreign"]`` that what answered speaks no HTTP: no further try mends either; and
    ``detail["refused"]`` that nobody listens there, or that who does hung up without a word, as one does of which TLS
    or a certificate was to be shown. Where no gateway answered at all, the message says what may mend that; where one
    was ``reached`` before, a hang-up is that gateway's end.
    """
    if _is_foreign(error):
        message = f"{what}: what answers there speaks no HTTP (a gateway's port of gRPC does not){_remedy()}"
        return ConnectionFailed(message, detail={"sent": False, "foreign": True})
    sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError)
    detail = {"sent": sent, "tls": True} if _is_distrust(error) else {"sent": sent}
    if _is_refused(error):
        detail["refused"] = True
    remedy = _remedy() if isinstance(error, httpx.ConnectError) and "tls" not in detail else ""
    if not reached and what.startswith("http") and isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
        detail["refused"] = True
        remedy = f" (a gateway with server.tls.client_ca hangs up without a certificate of yours: {CERT})"
        if what.startswith("http://"):
            remedy = " (a gateway with TLS is named by https://)"
    return ConnectionFailed(f"{what}: {str(error) or type(error).__name__}{remedy}", detail=detail)


def _remedy() -> str:
    """Return where gateways of this user are, or that none is seen."""
    addresses = [f"http://{address}" for address in types.served_by_us()]
    where = f"yours serves at {' and '.join(addresses)}" if addresses else "is `tangram serve` running?"
    return f"; {where} (--server or {SERVER} names the address)"


def is_answer_lost(error: BaseException) -> bool:
    """Whether a request may have been granted though it failed: nobody knows the answer."""
    known = isinstance(error, TangramError) and not isinstance(error, ConnectionFailed | UnreadableAnswerError)
    return not known and not (isinstance(error, ConnectionFailed) and not error.detail.get("sent", True))


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


JSON_BODY = {"Content-Type": "application/json"}
BYTES_BODY = {"Content-Type": "application/octet-stream"}
#: Only in a trajectory that lives: if it has ended, the request is refused instead of beginning a new one.
LIVING = {"X-Trajectory-Expect": "living"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCall:
    """One call of a batch."""

    function: str
    input: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    step: int | None = None
    trajectory: str | None = None
    timeout_s: float | None = None
    #: The call is given up if it still waits after so many seconds.
    max_age_s: float | None = None
    #: Drawn at random if it is not given, so that a batch can be sent again.
    key: str | None = None

    def item(self) -> types.BatchItem:
        """Return the call as it is sent."""
        return types.BatchItem(
            function=self.function,
            input=self.input,
            task=self.task,
            step=self.step,
            trajectory=self.trajectory,
            timeout=duration_text(self.timeout_s),
            max_age=duration_text(self.max_age_s),
            key=self.key or secrets.token_urlsafe(16),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest(Generic[_T]):
    """One HTTP request and how its answer is read."""

    method: str
    path: str
    read: Callable[[httpx.Response], _T]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    #: Whether sending it twice does the work once.
    repeatable: bool = True
    #: Whether the answer may take as long as the work does, or what that waits for: memory, a snapshot, a build.
    patient: bool = False
    #: The connections that it takes one of. Those that wait for memory (``opening``) leave some to the other calls that
    #: last, and both leave the ``spare`` ones: whoever has memory can act and end, so that others get it.
    lane: Literal["spare", "lasting", "opening"] = "spare"
    #: The same as a stream of calls carries it, if it is of an invocation.
    streamed: StreamCall | StreamWait | None = None

    def answer(self, response: httpx.Response) -> _T:
        """Return the typed answer; raises the TangramError of a refused request."""
        if is_answered(response):
            return self.read(response)
        raise error_of(response)


def sent(
    method: str,
    path: str,
    read: Callable[[httpx.Response], _T],
    body: object = None,
    *,
    params: Mapping[str, str | None] | None = None,
    repeatable: bool = True,
    patient: bool = False,
    lane: Literal["spare", "lasting", "opening"] = "spare",
) -> ApiRequest[_T]:
    """Return a request; a ``body`` is sent as JSON, and parameters that are None are left out."""
    return ApiRequest(
        method=method,
        path=path,
        read=read,
        params=present(params or {}),
        headers={} if body is None else JSON_BODY,
        content=None if body is None else msgspec.json.encode(body),
        repeatable=repeatable,
        patient=patient,
        lane=lane,
    )


def get(path: str, kind: type[_T], params: Mapping[str, str | None] | None = None) -> ApiRequest[_T]:
    return sent("GET", path, reader(kind), params=params)


def nothing(response: httpx.Response) -> None:
    """Read an answer that has no body."""


def invoke(
    function: str,
    input: Mapping[str, Any],
    *,
    mode: str,
    task: str | None = None,
    step: int | None = None,
    trajectory: str | None = None,
    parent: str | None = None,
    key: str | Literal[True] | None = None,
    timeout_s: float | None = None,
    wait_s: float | None = None,
    callback_url: str | None = None,
    living: bool = False,
) -> ApiRequest[InvocationResult]:
    """Return the request of one invocation. An asynchronous one always carries a key, so that it can be sent again."""
    if key is True or (key is None and mode == "async"):
        key = secrets.token_urlsafe(16)
    options = {
        "mode": mode,
        "wait": duration_text(wait_s),
        "task": task,
        "step": step,
        "trajectory": trajectory,
        "expect": "living" if living else None,
        "parent": parent,
        "key": key,
        "timeout": duration_text(timeout_s),
        "callback_url": callback_url,
    }
    texts = {name: None if value is None else str(value) for name, value in options.items()}
    content = json_body(input)
    return ApiRequest(
        method="POST",
        path=f"{function_path(function)}/invocations",
        read=read_invocation,
        params=present({name: texts.pop(name) for name in ("mode", "wait")}),
        headers=JSON_BODY | given_headers({_HEADERS[name]: text for name, text in texts.items()}),
        content=content,
        repeatable=key is not None,
        patient=mode == "sync",
        lane="lasting" if mode == "sync" or wait_s is not None else "spare",
        streamed=StreamCall(0, function, content, types.CallOptions(**options)),
    )


#: The headers of a call by the names of its options.
_HEADERS = dict(zip(types.CallHeaders.__struct_fields__, types.CallHeaders.__struct_encode_fields__, strict=True))


def batch(
    calls: Sequence[BatchCall], wait: str, timeout_s: float | None
) -> ApiRequest[list[InvocationResult | TangramError]]:
    """Return the request of many asynchronous invocations; the verdicts come in the order of the calls."""
    read = reader(types.BatchAnswer)
    return ApiRequest(
        method="POST",
        path="/v1/invocations:batch",
        read=lambda response: [_verdict(each) for each in read(response).results],
        params=present({"wait": wait, "timeout": duration_text(timeout_s)}),
        headers=JSON_BODY,
        content=json_body(types.BatchRequest(calls=tuple(call.item() for call in calls))),
        patient=wait != "none",
        lane="spare" if wait == "none" else "lasting",
    )


def _verdict(verdict: types.BatchVerdict) -> InvocationResult | TangramError:
    if verdict.problem:
        return from_problem(verdict.problem)
    assert verdict.invocation, "a verdict is an invocation or a problem"
    return result_of(verdict.invocation, replayed=bool(verdict.replayed))


def get_invocation(id: str, wait_s: float | None = None) -> ApiRequest[InvocationResult]:
    """Return the request of a record, which may wait for its end."""
    wait = duration_text(wait_s)
    if wait is None:
        return sent("GET", invocation_path(id), read_invocation)
    request = sent("GET", invocation_path(id), read_invocation, params={"wait": wait}, lane="lasting")
    return replace(request, streamed=StreamWait(0, id, wait))


def cancel_invocation(id: str) -> ApiRequest[InvocationResult]:
    return sent("POST", f"{invocation_path(id)}/cancel", read_invocation)


def redrive(id: str) -> ApiRequest[InvocationResult]:
    return sent("POST", f"{_dead_letters_path(id)}/redrive", read_invocation, repeatable=False)


def purge(id: str | None, function: str | None = None) -> ApiRequest[types.Purged]:
    """Return the request that takes one dead letter, or all (of one function), off the list."""
    return sent("DELETE", _dead_letters_path(id), reader(types.Purged), params={"function": function})


def apply(
    files: Mapping[str, str] | None, dry_run: bool, prune: bool, variables: Mapping[str, str] | None
) -> ApiRequest[types.ConfigDiff]:
    """Return the request that applies files by path, or with None the server's own, read again."""
    listed = tuple(types.ConfigFile(path=path, text=text) for path, text in (files or {}).items())
    body = None if files is None else types.ConfigFiles(files=listed, variables=variables or {})
    return ApiRequest(
        method="PUT",
        path="/v1/config",
        read=reader(types.ConfigDiff),
        params=present({"dry_run": _flag(dry_run), "prune": _flag(prune)}),
        headers=JSON_BODY,
        content=b"" if body is None else msgspec.json.encode(body),
        patient=True,
    )


def put_function(
    name: str, definition: Mapping[str, Any], sources: Mapping[str, str], dry_run: bool
) -> ApiRequest[types.ConfigDiff]:
    """Return the request that adds or changes one function."""
    upload = types.FunctionUpload(definition=definition, sources=sources)
    try:
        params = {"dry_run": _flag(dry_run)}
        return sent("PUT", function_path(name), reader(types.ConfigDiff), upload, params=params, patient=True)
    except TypeError as error:
        raise InvalidInputError(f"the definition of {name} is no JSON: {error}") from None


def pull_images(images: Sequence[str], wait_s: float | None = None) -> ApiRequest[types.ImageList]:
    """Return the request that begins to pull images, and may wait for them."""
    body, params = types.ImagesWanted(images=tuple(images)), {"wait": duration_text(wait_s)}
    lane: Literal["spare", "lasting"] = "spare" if wait_s is None else "lasting"
    return sent("PUT", "/v1/images", reader(types.ImageList), body, params=params, patient=True, lane=lane)


def open_trajectory(
    id: str,
    function: str,
    task: str | None,
    sandbox: types.SandboxChoice | None = None,
    snapshot: str | None = None,
    step: int | None = None,
    lease_s: float | None = None,
    holder: str | None = None,
    new: bool = False,
) -> ApiRequest[types.TrajectoryInfo]:
    """Return the request that makes a trajectory's environment, or finds that it lives already."""
    opening = types.TrajectoryOpening(
        function=function,
        task="default" if task is None else task,
        step=step,
        sandbox=sandbox,
        snapshot=snapshot,
        lease_s=lease_s,
        holder=holder,
        opening=drawn_name(),
        new=new,
    )
    return sent("PUT", trajectory_path(id), reader(types.TrajectoryInfo), _said(opening), patient=True, lane="opening")


def remove_function(name: str, dry_run: bool = False) -> ApiRequest[types.ConfigDiff]:
    params = {"dry_run": _flag(dry_run)}
    return sent("DELETE", function_path(name), reader(types.ConfigDiff), params=params, patient=True)


def end_trajectory(id: str) -> ApiRequest[None]:
    return sent("DELETE", trajectory_path(id), nothing, patient=True)


def _flag(value: bool) -> str | None:
    return "true" if value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequests:
    """Requests of files in a trajectory's sandbox, as one of its users; of a ``living`` one only."""

    trajectory: str
    user: str | None
    living: bool

    def upload(self, path: str, data: bytes, mode: int | None) -> ApiRequest[None]:
        """Return the request that writes a file; ``mode`` has its permission bits, None those of one that is there.

        Raises InvalidInputError for a mode that is no number of such bits.
        """
        if mode is not None and not (isinstance(mode, int) and 0 <= mode <= 0o7777):
            raise InvalidInputError(
                f"mode: {mode!r} is no number of permission bits, for example 0o755", component="client"
            )
        text = None if mode is None else f"{mode:03o}"
        return self._request("files", path, nothing, data, mode=text)

    def upload_archive(self, path: str, data: bytes) -> ApiRequest[None]:
        """Return the request that unpacks a tar below a directory."""
        return replace(self._request("archive", path, nothing, data), lane="lasting")

    def download(self, path: str) -> ApiRequest[bytes]:
        return self._request("files", path, _content)

    def download_archive(self, path: str) -> ApiRequest[bytes]:
        return replace(self._request("archive", path, _content), lane="lasting")

    def list(self, path: str) -> ApiRequest[types.FileList]:
        return self._request("files", path, reader(types.FileList), list="true")

    def _request(
        self,
        what: str,
        path: str,
        read: Callable[[httpx.Response], _T],
        content: bytes | None = None,
        **params: str | None,
    ) -> ApiRequest[_T]:
        return ApiRequest(
            method="GET" if content is None else "PUT",
            path=f"{trajectory_path(self.trajectory)}/{what}",
            read=read,
            params=present({"path": path, **params, "user": self.user}),
            headers=({} if content is None else BYTES_BODY) | (LIVING if self.living else {}),
            content=content,
            patient=True,
        )


def _content(response: httpx.Response) -> bytes:
    return response.content


def command(
    command: str | Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: str | bytes | None,
    user: str | None = None,
    merge: bool = False,
) -> dict[str, object]:
    """Return the input of an exec function: a string is shell text, a sequence an argument vector."""
    body: dict[str, object] = {"command": command} if isinstance(command, str) else {"argv": list(command)}
    options = {"cwd": cwd, "env": None if env is None else dict(env), "user": user, "merge": merge or None}
    if isinstance(stdin, bytes):
        options["stdin_base64"] = base64.b64encode(stdin).decode("ascii")
    else:
        options["stdin"] = stdin
    return body | {name: value for name, value in options.items() if value is not None}


def function_path(name: str) -> str:
    return f"/v1/functions/{quote(name, safe='')}"


def invocation_path(id: str) -> str:
    return f"/v1/invocations/{quote(id, safe='')}"


def _dead_letters_path(id: str | None) -> str:
    return "/v1/dead-letters" if id is None else f"/v1/dead-letters/{quote(id, safe='')}"


def trajectory_path(id: str) -> str:
    """Return the path of a trajectory; raises InvalidInputError for what names none."""
    if not types.is_name(id):
        raise InvalidInputError(f"trajectory {id[:64]!r} must be {types.NAME_WORDS}", component="client")
    return f"/v1/trajectories/{quote(id, safe='')}"


def drawn_name() -> str:
    """Return a name for a trajectory that nobody else draws."""
    return f"t-{secrets.token_hex(6)}"


def duration_text(seconds: float | str | None) -> str | None:
    """Return a header's duration; raises InvalidInputError for a text, which callers without type checks pass."""
    if isinstance(seconds, str):
        raise InvalidInputError(f"seconds are a number, not {seconds!r}")
    return None if seconds is None else f"{seconds:.3f}s"


def sandbox_choice(choice: Mapping[str, Any] | types.SandboxChoice | None) -> types.SandboxChoice | None:
    """Return what a trajectory chooses, from its fields by name; raises InvalidInputError for what is none of them."""
    if choice is None or isinstance(choice, types.SandboxChoice):
        return choice
    try:
        return msgspec.convert(choice, types.SandboxChoice)
    except msgspec.ValidationError as error:
        problem, place = types.explained(error)
        raise InvalidInputError(f"sandbox{place}: {problem}") from None


def _said(value: msgspec.Struct) -> object:
    """Return a request as plain values, without what it does not say."""
    fields = msgspec.to_builtins(value)
    return {
        name: {inner: each for inner, each in said.items() if each is not None} if isinstance(said, dict) else said
        for name, said in fields.items()
        if said is not None
    }


def present(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def drain_node(name: str, why: str = "") -> ApiRequest[types.NodeStatus]:
    """Return the request that has a machine take no new work."""
    body = types.DrainWanted(why=why) if why else types.DrainWanted()
    return sent("POST", f"/v1/nodes/{quote(name, safe='')}/drain", reader(types.NodeStatus), body)


def open_session(
    trajectory: str,
    function: str,
    command: str | Sequence[str],
    more: Mapping[str, object],
    terminal: tuple[int, int] | None,
    *,
    task: str | None,
    timeout_s: float | None,
    living: bool,
    holder: str | None = None,
) -> ApiRequest[InvocationResult]:
    """Return the request that begins a session; it carries a key, so that it can be sent again."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    options = {name: value for name, value in more.items() if value is not None}
    size = None if terminal is None else {"rows": terminal[0], "columns": terminal[1]}
    key = secrets.token_urlsafe(16)
    headers = {"X-Task": task, "X-Timeout": duration_text(timeout_s), "Idempotency-Key": key}
    return ApiRequest(
        method="POST",
        path=f"{trajectory_path(trajectory)}/sessions",
        read=read_invocation,
        headers=JSON_BODY | given_headers(headers) | (LIVING if living else {}),
        content=json_body({**options, "argv": argv, "function": function, "terminal": size, "holder": holder}),
    )


def open_port(trajectory: str, function: str, port: int, ttl_s: float | None) -> ApiRequest[types.PortInfo]:
    """Return the request that lets a port be reached; sent twice it would be open twice."""
    body = {"port": port, "function": function, "ttl_s": ttl_s}
    return sent("POST", f"{trajectory_path(trajectory)}/ports", reader(types.PortInfo), body=body, repeatable=False)


def withdraw_port(trajectory: str, id: str) -> ApiRequest[None]:
    return sent("DELETE", f"{trajectory_path(trajectory)}/ports/{quote(id, safe='')}", nothing)


def session_path(id: str) -> str:
    return f"{invocation_path(id)}/session"


def write_session(id: str, data: bytes, offset: int | None, *, end: bool = False) -> ApiRequest[types.SessionFed]:
    """Return the request that passes input on; it can be sent again if it says where its input belongs."""
    return ApiRequest(
        method="POST",
        path=f"{session_path(id)}/input",
        read=reader(types.SessionFed),
        params=present({"offset": None if offset is None else str(offset), "end": "true" if end else None}),
        headers=BYTES_BODY,
        content=data,
        repeatable=offset is not None,
        patient=True,
    )


def steer_session(id: str, *, size: tuple[int, int] | None = None, signal: str | None = None) -> ApiRequest[None]:
    """Return the request that resizes a session's terminal, or signals what runs in it."""
    terminal = None if size is None else {"rows": size[0], "columns": size[1]}
    body = {"terminal": terminal, "signal": signal}
    return sent("POST", f"{session_path(id)}/control", nothing, body, repeatable=signal is None)


def take_snapshot(trajectory: str, holder: str | None = None) -> ApiRequest[types.SnapshotInfo]:
    """Return the request that keeps the files of a trajectory's sandbox; sent twice it would keep them twice."""
    path = f"/v1/trajectories/{quote(trajectory, safe='')}/snapshots"
    answer = reader(types.SnapshotInfo)
    return sent("POST", path, answer, params={"holder": holder}, repeatable=False, patient=True, lane="lasting")


def fork(
    trajectory: str,
    function: str,
    to: Sequence[str],
    task: str | None,
    step: int | None = None,
    lease_s: float | None = None,
    holder: str | None = None,
) -> ApiRequest[types.ForkAnswer]:
    """Return the request that opens trajectories with the files of another; raises InvalidInputError for one text."""
    if isinstance(to, str) or not to:
        raise InvalidInputError("name the trajectories to open in a list, at least one")
    path = f"/v1/trajectories/{quote(trajectory, safe='')}/fork"
    body = types.ForkRequest(function=function, to=tuple(to), task=task, step=step, lease_s=lease_s, holder=holder)
    return sent("POST", path, reader(types.ForkAnswer), body, repeatable=False, patient=True, lane="opening")


def steps_path(task: str) -> str:
    return f"/v1/tasks/{quote(task, safe='')}/steps"


logger = logging.getLogger("tangram.client")
#: Of the kernel: numbers of the process itself may be somebody's who wants them again, and are alike after a fork.
CHANCE = random.SystemRandom()

#: Refused before any work: trying again later cannot run anything twice.
REFUSALS = (
    QuotaExceededError,
    CapacityExceededError,
    DrainingError,
    StorageUnavailableError,
    FunctionUnavailableError,
)
#: Of these, what a restart answers with: they end by themselves.
OUTAGES = (DrainingError, StorageUnavailableError)
#: Half of the first wait after a lost connection; it doubles with each further one, up to the second.
BACKOFF_S, BACKOFF_MAX_S = 0.2, 5.0
#: Tries of a request that is refused by a bound, unless ``max_attempts`` says otherwise.
ATTEMPTS = 5
#: One outage fails every call that is under way: seconds for which the same is not told again, and how much is kept.
TELL_EVERY_S, TOLD_MAX = 10.0, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often and how long a refused or lost request is tried again."""

    #: Tries of one request, whatever becomes of them; None: five of one that is refused by a bound, and for an outage
    #: as many as ``outage_s`` has room for.
    max_attempts: int | None = None
    #: Longest single wait in seconds; a longer Retry-After is not waited for, the error is raised.
    wait_max_s: float = 30.0
    #: Seconds for which a gateway that cannot be reached, drains or starts is waited for.
    outage_s: float = 60.0
    #: The same for an address at which nobody listens, or who does hangs up, while nobody has answered this client yet;
    #: None: as long.
    refused_s: float | None = 1.0

    def patience_s(self, error: TangramError, *, new: bool) -> float:
        """Return for how long an outage is waited for; ``new`` if nobody has answered yet."""
        refused = new and self.refused_s is not None and error.detail.get("refused")
        return self.refused_s if refused and self.refused_s is not None else self.outage_s

    def next_try_s(
        self, error: TangramError, attempt: int, failing_s: float, *, repeatable: bool, new: bool = False
    ) -> float | None:
        """Return the seconds to wait before try ``attempt + 1``, or None if the error is to be raised.

        ``failing_s`` is how long it has failed. Refusals ran nothing. A lost connection may have, so only a
        ``repeatable`` request is sent again.
        """
        if error.detail.get("tls") or error.detail.get("foreign"):
            return None
        lost = isinstance(error, ConnectionFailed)
        outage = lost or isinstance(error, OUTAGES)
        most = self.max_attempts or (None if outage else ATTEMPTS)
        left_s = self.patience_s(error, new=new) - failing_s if outage else math.inf
        if (most is not None and attempt >= most) or left_s <= 0:
            return None
        if isinstance(error, REFUSALS) and error.retry_after_s is not None:
            return error.retry_after_s if error.retry_after_s <= self.wait_max_s else None
        if lost and (repeatable or not error.detail.get("sent", True)):
            most_s = min(BACKOFF_MAX_S, self.wait_max_s)
            return min(left_s, types.backoff_s(attempt + 1, BACKOFF_S, most_s, CHANCE.uniform(0.5, 1.0)))
        return None


class Teller:
    """Warns once of what many calls, of all clients in the process, meet at the same time."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def warn(self, failure: str, then: str) -> None:
        """Warn of the failure and what is done about it, unless that failure was told within ``TELL_EVERY_S``."""
        now_s = time.monotonic()
        with self._lock:
            told_s = self._told_s.pop(failure, None)
            again = told_s is None or now_s - told_s >= TELL_EVERY_S
            self._told_s[failure] = now_s if told_s is None or again else told_s
            while len(self._told_s) > TOLD_MAX:
                del self._told_s[next(iter(self._told_s))]
        logger.log(logging.WARNING if again else logging.DEBUG, "%s; %s", failure, then)


TELLER = Teller()


class FailureStreak:
    """How long, and how often, one thing has failed in a row."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._attempt = 0
        self._since_s = 0.0

    def again_s(self, error: TangramError, *, repeatable: bool = True, new: bool = False) -> float | None:
        """It failed: return the seconds to wait before the next try, or None if the error is to be raised."""
        now_s = time.monotonic()
        if self._attempt == 0:
            self._since_s = now_s
        self._attempt += 1
        wait_s = self._retries.next_try_s(error, self._attempt, now_s - self._since_s, repeatable=repeatable, new=new)
        if wait_s is not None and self._attempt == 1:
            if isinstance(error, ConnectionFailed):
                TELLER.warn(str(error), f"trying again for {self._retries.patience_s(error, new=new):g} s")
            elif isinstance(error, FunctionUnavailableError):
                TELLER.warn(str(error), f"asking again in {wait_s:.0f} s")
        return wait_s

    def succeeded(self) -> None:
        """It did not fail this time."""
        self._attempt = 0
