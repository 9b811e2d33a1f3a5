"""What the facades share: credentials, calls and errors."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway import serialization
from gateway.api import JSON, Api
from gateway.config.schema import FacadeSection
from gateway.errors import REASON_STATUSES, FaultKind, error_status, retry_after
from gateway.http.messages import (
    disconnected,
    read_body,
    read_call,
    read_headers,
    record_headers,
    while_connected,
)
from gateway.invocations.invocations import Admission, HeldInputs, InvocationRequest, Invocations, LiveInvocation
from gateway.invocations.record import Mode, Record
from manager.errors import CapacityExceeded, CodedError, Conflict, InvalidInput, QuotaExceeded
from manager.function import FunctionSpec
from tangram.types import CallHeaders, explained

# Errors: what went wrong, and with which status each facade says it.
#
# What its client tries again must not be lost, and what no try can mend must not be tried: the statuses are those that
# the real clients were seen to react to so.


#: The HTTP status of each; a facade replaces those that its clients take for something else.
STATUSES: dict[FaultKind, int] = {
    FaultKind.INPUT: 422,
    FaultKind.UNAUTHORIZED: 401,
    FaultKind.FORBIDDEN: 403,
    FaultKind.NOT_FOUND: 404,
    FaultKind.METHOD: 405,
    FaultKind.CONFLICT: 409,
    FaultKind.TOO_LARGE: 413,
    FaultKind.UNSUPPORTED: 501,
    FaultKind.BUSY: 503,
    FaultKind.TIMEOUT: 504,
    FaultKind.LOST: 502,
    FaultKind.FAILED: 500,
    FaultKind.INTERNAL: 500,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One refused or failed call, before a facade puts it into its clients' words."""

    kind: FaultKind
    #: The stable word for it: a code, or the reason of an invocation.
    code: str
    message: str
    invocation_id: str | None = None
    retry_after_s: float | None = None
    #: Where in the request it is, as a JSON path; empty if nowhere.
    path: str = ""


class CallFailed(Exception):
    """An invocation that ended badly, or without what its client asked for; it is answered as the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def fault_of(error: CodedError) -> Fault:
    """Return the fault of a refused request; an unknown code is our own."""
    return Fault(
        kind=error_status(error).fault,
        code=error.code,
        message=error.message,
        invocation_id=error.invocation_id,
        retry_after_s=error.retry_after_s,
        path=str(error.detail.get("path", "")),
    )


def fault_of_end(record: Record) -> Fault | None:
    """Return the fault of an invocation that has ended; None if it succeeded."""
    if record.reason is None:
        return None
    return Fault(
        kind=REASON_STATUSES[record.reason].fault,
        code=record.reason.value,
        message=f"{record.function}: {record.reason}: {record.message}",
        invocation_id=record.id,
        retry_after_s=record.retry_after_s,
        path=str(record.detail.get("path", "")),
    )


# Calls of foreign clients: held in the queue as long as the client waits, and withdrawn a second before it gives up.
#
# To wait is no failure. Most of these clients turn a 429 or 503 into a reward of zero, or end the training: a call that
# finds the queue full stands in line here, and what has not ended in time is taken back before its client is told to
# come again.

#: Seconds between the answer and the moment at which the client gives up.
MARGIN_S = 1.0
#: Seconds after which one in line tries again though nobody called it: what was full may have been another bound.
RECHECK_S = 5.0
AGAIN_S = 1.0


def deadline_s(client_timeout_s: float) -> float:
    """Return the instant on the loop's clock at which to answer a client that gives up after so many seconds."""
    now_s = asyncio.get_running_loop().time()
    return now_s + max(client_timeout_s - MARGIN_S, client_timeout_s / 2)


class WaitingLine:
    """Calls that found the queue full, first come first served; as many as there are open connections at most."""

    def __init__(self, admission: Admission) -> None:
        self._waiting: OrderedDict[asyncio.Future[None], str] = OrderedDict()
        self._by_function: Counter[str] = Counter()
        self._admission = admission
        #: Calls that wait, or have just been called; the admission is listened to while there are any.
        self._attending = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def has(self, function: str) -> bool:
        """Return whether a call of the function waits."""
        return self._by_function[function] > 0

    async def wait(self, function: str, timeout_s: float) -> None:
        """Return when it is this call's turn to try, or after ``timeout_s``."""
        turn = asyncio.get_running_loop().create_future()
        if not self._attending:
            self._admission.on_leave.append(self._left)
        self._attending += 1
        self._waiting[turn] = function
        self._by_function[function] += 1
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # called, and gone: the next one's turn
                self._left(function)
            raise
        finally:
            self._waiting.pop(turn, None)
            self._by_function[function] -= 1
            self._by_function += Counter()  # forgets those of whom none waits
            self._attending -= 1
            if not self._attending:
                self._admission.on_leave.remove(self._left)

    def _left(self, function: str) -> None:
        """A call of ``function`` left the queue: the first that waits for it may try, else the first of all."""
        if not self._waiting:
            return
        turn = next((each for each, name in self._waiting.items() if name == function), next(iter(self._waiting)))
        del self._waiting[turn]
        if not turn.done():
            turn.set_result(None)


class ForeignCalls:
    """Makes the calls of all foreign facades."""

    def __init__(self, api: Api) -> None:
        self._invocations: Invocations = api.invocations
        self._held: HeldInputs = api.held
        self.line = WaitingLine(api.admission)

    async def run(self, request: Request, calls: Sequence[InvocationRequest], until_s: float) -> list[LiveInvocation]:
        """Return the calls' invocations, ended; the caller is watched meanwhile, and takes its calls with it.

        Raises CapacityExceeded, the calls withdrawn, at ``until_s`` on the loop's clock (calls with a key go on);
        CodedError for a call that is refused; ClientDisconnect.
        """
        return await while_connected(self._run(calls, until_s), disconnected(request.receive))

    async def accept(self, call: InvocationRequest, until_s: float) -> LiveInvocation:
        """Return an asynchronous call, accepted; raises CapacityExceeded at ``until_s``, CodedError."""
        invocation = await self._admit(call, until_s)
        self.leave(invocation)
        return invocation

    async def attend(self, call: InvocationRequest, until_s: float) -> LiveInvocation:
        """Return a call, accepted, that lasts no longer than its caller, who must `leave` it; raises as `accept`."""
        return await self._admit(call, until_s)

    def leave(self, invocation: LiveInvocation) -> None:
        """Its caller is gone; one that has not ended, and is not to go on alone, ends."""
        self._invocations.leave(invocation)

    async def _run(self, calls: Sequence[InvocationRequest], until_s: float) -> list[LiveInvocation]:
        now = asyncio.get_running_loop().time
        created: list[LiveInvocation] = []
        try:
            for call in calls:
                created.append(await self._admit(call, until_s))  # noqa: PERF401  # what was made is left, also if one is refused
            for invocation in created:
                if not await invocation.has_ended(max(0.0, until_s - now())):
                    raise await self._withdrawn(created)
                if invocation.refusal is not None:
                    raise invocation.refusal
            return created
        finally:
            for invocation in created:
                if not invocation.record.terminal:
                    self._invocations.leave(invocation)

    async def _admit(self, call: InvocationRequest, until_s: float) -> LiveInvocation:
        """Return the accepted call, which may stand in line first; its bytes are counted meanwhile."""
        now = asyncio.get_running_loop().time
        full = f"calls of {call.function} wait already"
        if not self.line.has(call.function):
            try:
                return await self._invocations.invoke(call)
            except (QuotaExceeded, CapacityExceeded) as error:
                full = error.message
        while (left_s := until_s - now()) > 0:
            await self._stand(call, min(left_s, RECHECK_S))
            if now() < until_s:
                try:
                    return await self._invocations.invoke(call)
                except (QuotaExceeded, CapacityExceeded) as error:
                    full = error.message
        raise _late(full)

    async def _stand(self, call: InvocationRequest, timeout_s: float) -> None:
        self._held.take(len(call.body))
        try:
            await self.line.wait(call.function, timeout_s)
        finally:
            self._held.give(len(call.body))

    async def _withdrawn(self, created: Sequence[LiveInvocation]) -> CodedError:
        """Take back what has not ended, but for what a client's next try joins; return what the client is told."""
        left = [invocation for invocation in created if not invocation.record.terminal]
        for invocation in left:
            if not invocation.record.detached:
                with suppress(Conflict):
                    await self._invocations.cancel(invocation.record.id, "withdrawn: its client would have given up")
        error = _late("the call was not ended in the time that its client waits")
        error.invocation_id = left[0].record.id if left else None
        return error


def _late(message: str) -> CapacityExceeded:
    return CapacityExceeded(f"{message}; send it again", component="facades", retry_after_s=AGAIN_S)


T = TypeVar("T", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRoute:
    """One method on one path of a facade, and the query parameters that it may have."""

    method: str
    path: str
    endpoint: Endpoint
    query: tuple[str, ...] = ()


class Facade(ABC):
    """What all facades share; each is made once, for as long as the gateway serves."""

    #: Its field in ``server.facades``.
    name: ClassVar[str]
    statuses: ClassVar[Mapping[FaultKind, int]] = STATUSES
    #: First segment of its paths on the gateway's own port, taken off before they are looked up.
    prefix: ClassVar[str] = ""
    #: First segments that lead to it as they stand.
    roots: ClassVar[frozenset[str]] = frozenset()
    #: Media types of bodies that no web page can send to a stranger without asking first.
    media_types: ClassVar[frozenset[str]] = frozenset({JSON})

    def __init__(self, api: Api, calls: ForeignCalls, section: FacadeSection) -> None:
        self.api = api
        self.calls = calls
        self.section = section

    async def stop(self) -> None:  # noqa: B027  # most do nothing by themselves
        """Stop what it does by itself."""

    @abstractmethod
    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route of the facade."""

    @abstractmethod
    def body(self, fault: Fault, status: int) -> object:
        """Return a fault as the JSON body that its clients read."""

    def admitted(self, scope: Scope, segments: Sequence[str]) -> Scope:
        """Return the scope with its token where every facade has it; ``segments`` are those of the path within it.

        It has a role where something else than a token has proven that.
        """
        return scope

    def status(self, fault: Fault) -> int:
        """Return the status of a fault."""
        return self.statuses[fault.kind]

    def refuse(self, fault: Fault) -> Response:
        """Return the answer of a fault."""
        status = self.status(fault)
        shown: dict[str, str] = {}
        if fault.invocation_id is not None:
            shown["X-Invocation-Id"] = fault.invocation_id
        if fault.retry_after_s is not None:
            shown["Retry-After"] = retry_after(fault.retry_after_s)
        return Response(serialization.dumps(self.body(fault, status)), status, shown, JSON)

    # What the routes are made of

    def until_s(self, known_s: float) -> float:
        """Return when to answer: ``known_s`` is the time-out of the client, unless the configuration names another."""
        return deadline_s(self.section.client_timeout_s or known_s)

    def function(self, name: str) -> FunctionSpec:
        """Return the function as it is now; raises NotFound or InvalidInput."""
        return self.api.functions.get(serialization.name(name, "function"))

    async def read_object(self, request: Request) -> dict[str, object]:
        """Return the body, a JSON object; raises InvalidInput, TooLarge, CapacityExceeded, TooSlow."""
        body = await read_body(request, self.api)
        if not body:
            raise InvalidInput("the body must be a JSON object, and there is none", detail={"path": "$"})
        return serialization.loads_object(body)

    def call(
        self, request: Request, function: str, input: Mapping[str, object], *, timeout_s: float | None = None
    ) -> InvocationRequest:
        """Return the call that a request asks for, with the headers that every facade honours; raises InvalidInput."""
        created = read_call(read_headers(request, CallHeaders), function, serialization.dumps(input), Mode.SYNC)
        if created.callback_url is not None or created.max_age_s is not None:
            raise InvalidInput("X-Callback-Url and X-Max-Age are for asynchronous calls, which this facade has not")
        return created if timeout_s is None else replace(created, timeout_s=timeout_s)

    async def run(self, request: Request, calls: Sequence[InvocationRequest], known_s: float) -> list[Record]:
        """Return the records of the calls; raises as `ForeignCalls.run`, and CallFailed for the first that failed."""
        records = [each.record for each in await self.calls.run(request, calls, self.until_s(known_s))]
        for record in records:
            if (fault := fault_of_end(record)) is not None:
                raise CallFailed(fault)
        return records


def read_shape(fields: Mapping[str, object], kind: type[T]) -> T:
    """Return a JSON object as a dialect's struct; raises InvalidInput with the path of what does not fit."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        problem, place = explained(error)
        path = f"${place}"
        raise InvalidInput(f"{path}: {problem}", component="facades", detail={"path": path}) from None


def result_of(record: Record) -> object:
    """Return the result of an invocation that succeeded."""
    return None if record.result is None else serialization.loads(record.result)


def answer(value: object, record: Record | None = None, status: int = 200) -> Response:
    """Return a value as JSON, with the headers of the invocation that it comes from."""
    return Response(serialization.dumps(value), status, None if record is None else record_headers(record), JSON)


AUTHORIZATION = b"authorization"
#: Where in the path ``~TOKEN`` may stand: before or after the facade's own prefix.
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
    result = token_of(dict(reversed(scope["headers"]))) or token
    others = [(name, value) for name, value in scope["headers"] if name != AUTHORIZATION]
    if result is not None:
        others.append((AUTHORIZATION, b"Bearer " + result))
    return {**scope, "headers": others}
