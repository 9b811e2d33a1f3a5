"""HTTP operations on many invocations at once: batches and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gateway import wire
from gateway.errors import problem
from gateway.http.messages import json_response, read_body, record_response
from gateway.http.operation import (
    DURATION,
    KEY,
    NAME,
    Operation,
    Schema,
    json_answer,
    links,
    path_parameter,
    query,
    ref,
)
from gateway.invocations.dead_letters import DeadLetters
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.invocations.record import Mode
from gateway.services import Services
from manager.errors import CodedError, InvalidInput, TooLarge

FIELDS = ("function", "input", "trajectory", "task", "timeout", "max_age", "key")
Verdict = LiveInvocation | CodedError
CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": NAME,
        "input": {"type": "object"},
        "trajectory": NAME,
        "task": NAME,
        "timeout": DURATION,
        "max_age": DURATION,
        "key": KEY,
    },
    "additionalProperties": False,
}
#: An odd call is refused by its own verdict, so the document takes anything in its place.
ITEMS: Schema = {"anyOf": [CALL, {"description": "Anything else: its verdict is 422"}]}
CALLS: Schema = {"type": "object", "required": ["calls"], "properties": {"calls": {"type": "array", "items": ITEMS}}}


class BatchOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._dead_letters = DeadLetters(services.invocations, services.store)

    async def batch(self, request: HttpRequest) -> Response:
        """Accept many asynchronous calls with one commit; each has its own verdict, in the order of the calls."""
        wait = request.query_params.get("wait", "none")
        if wait not in ("none", "any", "all"):
            raise InvalidInput("wait must be none, any or all", detail={"path": "wait"})
        limit_s = self._services.limits.wait_s
        timeout_s = min(limit_s, wire.duration_s(request.query_params.get("timeout", f"{limit_s:.0f}s"), "timeout"))
        calls = self._calls(wire.loads_object(await read_body(request, self._services)))
        readable = [call for call in calls if isinstance(call, InvocationRequest)]
        accepted = iter(await self._services.invocations.invoke_all(readable))
        verdicts = [next(accepted) if isinstance(call, InvocationRequest) else call for call in calls]
        if wait != "none":
            await self._wait(verdicts, asyncio.FIRST_COMPLETED if wait == "any" else asyncio.ALL_COMPLETED, timeout_s)
        return json_response({"results": [_verdict_json(verdict) for verdict in verdicts]}, 200)

    def _calls(self, body: Mapping[str, object]) -> list[InvocationRequest | CodedError]:
        calls = body.get("calls")
        if not isinstance(calls, list):
            raise InvalidInput("calls must be a list", detail={"path": "$.calls"})
        if len(calls) > self._services.limits.batch_calls:
            raise TooLarge(f"{len(calls)} calls are more than {self._services.limits.batch_calls}", component="http")
        return [_read_call(call, f"$.calls[{index}]") for index, call in enumerate(calls)]

    async def _wait(self, verdicts: Sequence[Verdict], until: str, timeout_s: float) -> None:
        waits = {
            asyncio.ensure_future(verdict.ended.wait())
            for verdict in verdicts
            if isinstance(verdict, LiveInvocation) and not verdict.ended.is_set()
        }
        already = any(isinstance(verdict, LiveInvocation) and verdict.ended.is_set() for verdict in verdicts)
        if waits and not (already and until == asyncio.FIRST_COMPLETED):
            await asyncio.wait(waits, timeout=timeout_s, return_when=until)
        for wait in waits:
            wait.cancel()

    async def redrive(self, request: HttpRequest) -> Response:
        """Send a dead letter again."""
        invocation = await self._dead_letters.redrive(request.path_params["id"])
        return record_response(invocation.record, 202)

    async def purge(self, request: HttpRequest) -> Response:
        """Take a dead letter off the list."""
        await self._dead_letters.purge(request.path_params["id"])
        return json_response({"purged": 1})

    async def purge_all(self, request: HttpRequest) -> Response:
        """Take all dead letters, or those of one function, off the list."""
        function = request.query_params.get("function")
        chosen = None if function is None else wire.name(function, "function")
        return json_response({"purged": await self._dead_letters.purge_all(chosen)})

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        letter = path_parameter("id", "Id of a dead invocation")
        again = links("/id", "id", "getInvocation", "getLogs", "cancelInvocation")
        counted = json_answer("How many left the list", {"type": "object"})
        return [
            Operation(
                id="invokeBatch",
                method="POST",
                path="/v1/invocations:batch",
                endpoint=self.batch,
                summary="Accept many calls with one commit; each has its own verdict",
                tag="invocations",
                parameters=(
                    query("wait", "Wait for the ends of none, any or all", {"enum": ["none", "any", "all"]}),
                    query("timeout", "Wait no longer", DURATION),
                ),
                body={"application/json": CALLS},
                body_required=True,
                answers={200: json_answer("The verdicts, in the order of the calls", {"type": "object"})},
                problems=(413, 422),
            ),
            Operation(
                id="redriveDeadLetter",
                method="POST",
                path="/v1/dead-letters/{id}/redrive",
                endpoint=self.redrive,
                summary="Send a dead letter again, as an invocation of its own",
                tag="dead letters",
                parameters=(letter,),
                answers={202: json_answer("Accepted, and durable", ref("Invocation"), again)},
                problems=(404, 409, 422, 429),
            ),
            Operation(
                id="purgeDeadLetter",
                method="DELETE",
                path="/v1/dead-letters/{id}",
                endpoint=self.purge,
                summary="Take a dead letter off the list; its record stays",
                tag="dead letters",
                parameters=(letter,),
                answers={200: counted},
                problems=(404, 409, 422),
            ),
            Operation(
                id="purgeDeadLetters",
                method="DELETE",
                path="/v1/dead-letters",
                endpoint=self.purge_all,
                summary="Take all dead letters off the list; they are listed by GET /v1/invocations?dead=true",
                tag="dead letters",
                parameters=(query("function", "Only those of this function", NAME),),
                answers={200: counted},
                problems=(422,),
            ),
        ]


def _read_call(call: object, path: str) -> InvocationRequest | CodedError:
    """One call of a batch, or why it cannot be read."""
    try:
        return _request(call, path)
    except InvalidInput as error:
        return error


def _request(call: object, path: str) -> InvocationRequest:
    if not isinstance(call, dict):
        raise InvalidInput(f"{path} must be an object", detail={"path": path})
    unknown = sorted(call.keys() - set(FIELDS))
    if unknown:
        raise InvalidInput(f"{path}: unknown field {unknown[0]!r}", detail={"path": f"{path}.{unknown[0]}"})
    texts = {name: _text(call, name, path) for name in FIELDS if name != "input"}
    given = call.get("input", {})
    if not isinstance(given, dict):
        raise InvalidInput(f"{path}.input must be an object", detail={"path": f"{path}.input"})
    if texts["key"] is not None and wire.KEY.fullmatch(texts["key"]) is None:
        raise InvalidInput(f"{path}.key must be 1 to 255 visible ASCII characters", detail={"path": f"{path}.key"})
    return InvocationRequest(
        function=wire.name(texts["function"] or "", "function"),
        input=given,
        body=wire.dumps(given),
        mode=Mode.ASYNC,
        task=wire.name(texts["task"] or "default", "task"),
        trajectory=None if texts["trajectory"] is None else wire.name(texts["trajectory"], "trajectory"),
        timeout_s=None if texts["timeout"] is None else wire.duration_s(texts["timeout"], "timeout"),
        max_age_s=None if texts["max_age"] is None else wire.duration_s(texts["max_age"], "max_age"),
        key=texts["key"],
    )


def _text(call: Mapping[str, object], name: str, path: str) -> str | None:
    value = call.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{path}.{name} must be a string", detail={"path": f"{path}.{name}"})
    return value


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    if isinstance(verdict, CodedError):
        body = problem(verdict)
        return {"status": body["status"], "problem": body}
    return {"status": 200 if verdict.record.terminal else 202, "invocation": verdict.record.as_json()}
