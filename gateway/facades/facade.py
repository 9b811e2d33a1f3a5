"""A facade: one door in a foreign protocol, as the routes that it has and the words that it refuses in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway import wire
from gateway.config.facades import FacadeSection
from gateway.errors import retry_after
from gateway.facades.calls import ForeignCalls, deadline_s
from gateway.facades.faults import Dialect, Fault
from gateway.http.call import read_call, read_headers
from gateway.http.messages import JSON, read_body, record_headers
from gateway.invocations.invocation import InvocationRequest
from gateway.invocations.record import Mode, Record
from gateway.services import Services
from manager.errors import InvalidInput
from manager.function import FunctionSpec
from tangram.types import CallHeaders, explained

T = TypeVar("T", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRoute:
    """One method on one path of a door; there are no query parameters."""

    method: str
    path: str
    endpoint: Endpoint


class Facade(ABC):
    """What all doors share; each is made once, for as long as the gateway serves."""

    #: Its field in ``server.facades``.
    name: ClassVar[str]
    dialect: ClassVar[Dialect]
    #: First segment of its paths on the gateway's own port, taken off before they are looked up.
    prefix: ClassVar[str] = ""
    #: First segments that lead to it as they stand.
    roots: ClassVar[frozenset[str]] = frozenset()
    #: Media types of bodies that no web page can send to a stranger without asking first.
    media_types: ClassVar[frozenset[str]] = frozenset({JSON})

    def __init__(self, services: Services, calls: ForeignCalls, section: FacadeSection) -> None:
        self.services = services
        self.calls = calls
        self.section = section

    @abstractmethod
    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route of the door."""

    @abstractmethod
    def body(self, fault: Fault, status: int) -> object:
        """Return a fault as the JSON body of the dialect."""

    def admitted(self, scope: Scope, segments: Sequence[str]) -> Scope:
        """Return the scope with its token where every door has it; ``segments`` are those of its path in the door."""
        return scope

    def refuse(self, fault: Fault) -> Response:
        """Return a fault in the dialect's words."""
        said = fault.said(self.dialect)
        shown: dict[str, str] = {}
        if fault.invocation_id is not None:
            shown["X-Invocation-Id"] = fault.invocation_id
        if fault.retry_after_s is not None:
            shown["Retry-After"] = retry_after(fault.retry_after_s)
        return Response(wire.dumps(self.body(fault, said.status)), said.status, shown, JSON)

    # What the routes are made of

    def until_s(self, known_s: float) -> float:
        """Return when to answer: ``known_s`` is the time-out of the client, unless the configuration names another."""
        return deadline_s(self.section.client_timeout_s or known_s)

    def function(self, name: str) -> FunctionSpec:
        """Return the function as it is now; raises NotFound or InvalidInput."""
        return self.services.functions.get(wire.name(name, "function"))

    async def read_object(self, request: Request) -> dict[str, object]:
        """Return the body, a JSON object; raises InvalidInput, TooLarge, CapacityExceeded, TooSlow."""
        body = await read_body(request, self.services)
        if not body:
            raise InvalidInput("the body must be a JSON object, and there is none", detail={"path": "$"})
        return wire.loads_object(body)

    def call(
        self, request: Request, function: str, input: Mapping[str, object], *, timeout_s: float | None = None
    ) -> InvocationRequest:
        """Return the call that a request asks for, with the headers that every door honours; raises InvalidInput."""
        made = read_call(read_headers(request, CallHeaders), function, wire.dumps(input), Mode.SYNC)
        if made.callback_url is not None or made.max_age_s is not None:
            raise InvalidInput("X-Callback-Url and X-Max-Age are for asynchronous calls, which this door has not")
        return made if timeout_s is None else replace(made, timeout_s=timeout_s)


def read_shape(given: Mapping[str, object], kind: type[T]) -> T:
    """Return a JSON object as a dialect's struct; raises InvalidInput with the path of what does not fit."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        said, place = explained(error)
        path = f"${place}"
        raise InvalidInput(f"{path}: {said}", component="facades", detail={"path": path}) from None


def result_of(record: Record) -> object:
    """Return the result of an invocation that succeeded."""
    return None if record.result is None else wire.loads(record.result)


def answer(value: object, record: Record | None = None, status: int = 200) -> Response:
    """Return a value as JSON, with the headers of the invocation that it comes from."""
    return Response(wire.dumps(value), status, None if record is None else record_headers(record), JSON)
