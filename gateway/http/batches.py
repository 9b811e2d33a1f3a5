"""HTTP operations on many invocations at once: batches and dead letters."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from gateway import wire
from gateway.errors import problem
from gateway.http.call import read_item, read_query
from gateway.http.messages import read_body, record_response, respond
from gateway.http.operation import (
    Operation,
    PathParameter,
    json_answer,
    links,
)
from gateway.invocations.invocation import InvocationRequest
from gateway.operations.batches import ReadCall, Verdict, check_batch, invoke_batch
from gateway.services import Services
from manager.errors import CodedError, InvalidInput
from tangram.types import (
    UNSET,
    BatchAnswer,
    BatchQuery,
    BatchRequest,
    BatchVerdict,
    Invocation,
    Name,
    Purged,
    PurgeQuery,
)


class BatchOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def batch(self, request: HttpRequest) -> Response:
        """Accept many asynchronous calls with one commit; each has its own verdict, in the order of the calls."""
        asked = read_query(request, BatchQuery)
        limit_s = self._services.bounds.wait_max_s
        timeout_s = limit_s if asked.timeout is None else min(limit_s, wire.duration_s(asked.timeout, "timeout"))
        calls = self._calls(wire.loads_object(await read_body(request, self._services)))
        verdicts = await invoke_batch(self._services, calls, asked.wait, timeout_s)
        answers = [self._verdict(call, verdict) for call, verdict in zip(calls, verdicts, strict=True)]
        return respond(BatchAnswer(results=tuple(answers)))

    def _calls(self, body: Mapping[str, object]) -> list[ReadCall]:
        calls = body.get("calls")
        if not isinstance(calls, list):
            raise InvalidInput("calls must be a list", detail={"path": "$.calls"})
        check_batch(self._services, len(calls))
        return [_read_call(call, f"$.calls[{index}]") for index, call in enumerate(calls)]

    def _verdict(self, call: ReadCall, verdict: Verdict) -> BatchVerdict:
        if isinstance(verdict, CodedError):
            body = problem(verdict)
            return BatchVerdict(status=body.status, problem=body)
        replayed = isinstance(call, InvocationRequest) and verdict.replays(call)
        record = self._services.invocations.shown(verdict.record)
        return BatchVerdict(
            status=200 if record.terminal else 202,
            invocation=record.as_wire(),
            replayed=True if replayed else UNSET,
        )

    async def redrive(self, request: HttpRequest) -> Response:
        """Send a dead letter again."""
        invocation = await self._services.dead_letters.redrive(request.path_params["id"])
        return record_response(self._services.invocations.shown(invocation.record), 202)

    async def purge(self, request: HttpRequest) -> Response:
        """Take a dead letter off the list."""
        await self._services.dead_letters.purge(request.path_params["id"])
        return respond(Purged(purged=1))

    async def purge_all(self, request: HttpRequest) -> Response:
        """Take all dead letters, or those of one function, off the list."""
        asked = read_query(request, PurgeQuery)
        return respond(Purged(purged=await self._services.dead_letters.purge_all(asked.function)))

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        letter = PathParameter(name="id", about="Id of a dead invocation", shape=Name)
        again = links("/id", "id", "getInvocation", "getLogs", "cancelInvocation")
        counted = json_answer("How many left the list", Purged)
        return [
            Operation(
                id="invokeBatch",
                method="POST",
                path="/v1/invocations:batch",
                endpoint=self.batch,
                summary="Accept many calls with one commit; each has its own verdict",
                tag="invocations",
                query=BatchQuery,
                body={"application/json": BatchRequest},
                body_required=True,
                answers={200: json_answer("The verdicts, in the order of the calls", BatchAnswer)},
                problems=(413, 422),
            ),
            Operation(
                id="redriveDeadLetter",
                method="POST",
                path="/v1/dead-letters/{id}/redrive",
                endpoint=self.redrive,
                summary="Send a dead letter again, as an invocation of its own",
                tag="dead letters",
                parts=(letter,),
                answers={202: json_answer("Accepted, and durable", Invocation, again)},
                problems=(404, 409, 422, 429),
            ),
            Operation(
                id="purgeDeadLetter",
                method="DELETE",
                path="/v1/dead-letters/{id}",
                endpoint=self.purge,
                summary="Take a dead letter off the list; its record stays",
                tag="dead letters",
                parts=(letter,),
                admin=True,
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
                query=PurgeQuery,
                admin=True,
                answers={200: counted},
                problems=(422,),
            ),
        ]


def _read_call(call: object, path: str) -> ReadCall:
    """Return one call of a batch, or why it cannot be read."""
    try:
        return read_item(call, path)
    except InvalidInput as error:
        return error
