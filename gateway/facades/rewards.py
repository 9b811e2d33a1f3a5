"""Remote rewards, ``/rm/{function}`` as slime and OpenRLHF ask, and retrieval, ``/retrieve/{function}`` as Search-R1.

The body is the bare answer, never a record around it. What has no reward is no success: it is never 200 with null,
which these trainers would take for one or lose in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import FaultKind
from gateway.facades.facade import (
    STATUSES,
    CallFailed,
    Facade,
    Fault,
    ForeignRoute,
    answer,
    read_shape,
    result_of,
)
from gateway.invocations.record import Record
from manager.errors import InvalidInput
from manager.function import FunctionSpec, ModelAction

#: Seconds after which each client gives up.
SLIME_S, OPENRLHF_S, SEARCH_S = 120.0, 180.0, 30.0
#: Of one request.
QUERIES_MAX = 4096
#: Keys of a result that is an object.
REWARD, SCORE, EXTRA = "reward", "score", "extra_logs"


class OpenRlhfRewards(Struct, forbid_unknown_fields=True):
    """What OpenRLHF posts: lists of one length; ``query`` is the whole text, prompt and answer."""

    query: list[str]
    prompts: list[str]
    labels: list[object]


class SlimeReward(Struct, forbid_unknown_fields=True):
    """What slime's remote_rm posts; ``prompt`` is a text or a conversation."""

    prompt: str | list[dict[str, object]]
    response: str
    label: object = None


class Retrieval(Struct, forbid_unknown_fields=True):
    """What Search-R1's clients post: ``queries``, or with SkyRL-Gym one ``query``."""

    queries: list[str] | None = None
    query: str | None = None
    topk: int = 3
    return_scores: bool = False


class Rewards(Facade):
    """The facade of remote rewards and retrieval."""

    name: ClassVar[str] = "rewards"
    # Its clients try again everything but 2xx; TRL, 500, 502 and 503 only, and ends a training at a 429.
    statuses: ClassVar[Mapping[FaultKind, int]] = STATUSES | {
        FaultKind.UNSUPPORTED: 422,
        FaultKind.BUSY: 504,
        FaultKind.FAILED: 502,
    }
    roots: ClassVar[frozenset[str]] = frozenset({"rm", "retrieve"})

    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route of the facade."""
        return (
            ForeignRoute(method="POST", path="/rm/{function}", endpoint=self.reward),
            ForeignRoute(method="POST", path="/retrieve/{function}", endpoint=self.retrieve),
        )

    def body(self, fault: Fault, status: int) -> object:
        """Return a fault as a body: none of these dialects has a shape for it, their clients log the text."""
        fields = {"code": fault.code, "message": fault.message, "invocation_id": fault.invocation_id}
        return {"error": {name: value for name, value in fields.items() if value is not None}}

    async def reward(self, request: Request) -> Response:
        """A reward, or one for each answer of a batch; whose words they are is told by the keys."""
        function = _repeatable(self.function(request.path_params["function"]))
        value = await self.read_object(request)
        if "query" in value or "prompts" in value:
            return await self._openrlhf(request, function, read_shape(value, OpenRlhfRewards))
        return await self._slime(request, function, read_shape(value, SlimeReward))

    async def _slime(self, request: Request, function: FunctionSpec, body: SlimeReward) -> Response:
        if _scores(function):
            input = _conversation(body)
        else:
            input = {"prompt": body.prompt, "response": body.response, "label": body.label}
        (record,) = await self.run(request, [self.call(request, function.name, input)], SLIME_S)
        value = result_of(record)
        if _scores(function):
            value = _each(value)[0]
        if isinstance(value, dict):
            value = {name: _as_number(each) for name, each in value.items()}
            # A trainer may read another field than reward (its reward_key): then one of them has to be a number.
            worths = [value[REWARD]] if REWARD in value else [each for each in value.values() if _is_reward(each)]
            worth = worths[0] if worths else None
        else:
            worth = value = _as_number(value)
        if not _is_reward(worth):
            raise _no_reward(record, worth)
        return answer(value, record)

    async def _openrlhf(self, request: Request, function: FunctionSpec, body: OpenRlhfRewards) -> Response:
        if not len(body.query) == len(body.prompts) == len(body.labels):
            raise InvalidInput("query, prompts and labels must be of one length", detail={"path": "$.query"})
        if not 0 < len(body.query) <= QUERIES_MAX:
            raise InvalidInput(f"query must have 1 to {QUERIES_MAX} texts", detail={"path": "$.query"})
        if _scores(function):
            calls = [self.call(request, function.name, {"texts": body.query})]
        else:
            calls = [self.call(request, function.name, input) for input in _answers(body)]
        if len(calls) > 1 and calls[0].key is not None:
            raise InvalidInput("an Idempotency-Key is of one call, and this request makes several")
        records = await self.run(request, calls, OPENRLHF_S)
        values = [result_of(record) for record in records]
        rows = _each(values[0]) if _scores(function) else values
        worths = [_as_number(row.get(REWARD) if isinstance(row, dict) else row) for row in rows]
        for index, worth in enumerate(worths):
            if not _is_reward(worth):
                raise _no_reward(records[min(index, len(records) - 1)], worth)
        return answer({"rewards": worths} | _further(rows), records[0])

    async def retrieve(self, request: Request) -> Response:
        """Documents for each query, wrapped with their scores only where the client asks for scores."""
        function = _repeatable(self.function(request.path_params["function"]))
        body = read_shape(await self.read_object(request), Retrieval)
        if (body.queries is None) == (body.query is None):
            raise InvalidInput("needs exactly one of queries and query", detail={"path": "$"})
        queries = body.queries if body.queries is not None else [str(body.query)]
        if not 0 < len(queries) <= QUERIES_MAX:
            raise InvalidInput(f"queries must have 1 to {QUERIES_MAX} texts", detail={"path": "$.queries"})
        call = self.call(request, function.name, {"queries": queries, "topk": body.topk})
        (record,) = await self.run(request, [call], SEARCH_S)
        result = result_of(record)
        rows = result.get("result") if isinstance(result, dict) else result
        shown = _documents(rows, len(queries), body.return_scores)
        if shown is None:
            message = "must return a list of {document, score} for each query"
            raise _failed(record, f"{function.name} {message}, under result or by itself")
        return answer({"result": shown}, record)


def _no_reward(record: Record, worth: object) -> CallFailed:
    shown = "null, or no finite number" if worth is None else f"{str(worth)[:64]!r}"
    return _failed(record, f"{record.function} gave no reward: {shown}")


def _failed(record: Record, message: str) -> CallFailed:
    return CallFailed(Fault(kind=FaultKind.FAILED, code="no_reward", message=message, invocation_id=record.id))


def _repeatable(function: FunctionSpec) -> FunctionSpec:
    """Return the function, if a trainer's next try may run it again; raises InvalidInput with the remedy."""
    if function.idempotent or function.runtime == "model":
        return function
    raise InvalidInput(
        f"function {function.name!r} is not idempotent, and clients of this facade send a call again without a key: "
        "declare idempotent: true if it may run twice",
        component="facades",
        detail={"path": "function"},
    )


def _scores(function: FunctionSpec) -> bool:
    return function.model is not None and function.model.action is ModelAction.SCORE


def _conversation(request: SlimeReward) -> dict[str, object]:
    """Return the input of a score model: the conversation with its answer, or the text as it goes on."""
    if isinstance(request.prompt, str):
        return {"texts": [request.prompt + request.response]}
    return {"messages": [*request.prompt, {"role": "assistant", "content": request.response}]}


def _answers(request: OpenRlhfRewards) -> list[dict[str, object]]:
    """Return the input of one call for each answer: slime's, and the whole text beside it."""
    return [
        {"prompt": prompt, "response": query.removeprefix(prompt), "label": label, "query": query}
        for query, prompt, label in zip(request.query, request.prompts, request.labels, strict=True)
    ]


def _each(value: object) -> list[object]:
    """Return the scores of a score model."""
    scores = value.get("scores") if isinstance(value, dict) else None
    return scores if isinstance(scores, list) and scores else [None]


def _as_number(worth: object) -> object:
    """Return 1.0 and 0.0 for true and false, which trainers make no number of; anything else as it is."""
    return float(worth) if isinstance(worth, bool) else worth


def _is_reward(worth: object) -> bool:
    return isinstance(worth, int | float) and math.isfinite(worth)


def _further(rows: Sequence[object]) -> dict[str, object]:
    """Return what OpenRLHF takes besides rewards, where every result has it."""
    objects: list[Mapping[str, object]] = [row for row in rows if isinstance(row, dict)]
    if len(objects) != len(rows):
        return {}
    result: dict[str, object] = {}
    if all(_is_reward(row.get(SCORE)) for row in objects):
        result["scores"] = [row[SCORE] for row in objects]
    logs = [extra for row in objects if isinstance(extra := row.get(EXTRA), dict)]
    if len(logs) == len(rows):
        shared = [name for name in logs[0] if all(_is_reward(each.get(name)) for each in logs)]
        result[EXTRA] = {name: [each[name] for each in logs] for name in shared}
    return result


def _documents(rows: object, queries: int, scores: bool) -> list[list[object]] | None:
    """Return the documents as the client reads them; None if they are none."""
    if not isinstance(rows, list) or len(rows) != queries or not all(isinstance(row, list) for row in rows):
        return None
    result = [[_wrapped(each) for each in row] for row in rows]
    if any(each is None for row in result for each in row):
        return None
    return [[each if scores else each["document"] for each in row if each is not None] for row in result]


def _wrapped(result: object) -> dict[str, object] | None:
    """Return a document with its score, whichever way the function tells them; None if it is neither."""
    if not isinstance(result, dict):
        return None
    if isinstance(result.get("document"), dict):
        return {"document": result["document"], "score": result.get("score", 0.0)}
    if "contents" not in result:
        return None
    document = {name: value for name, value in result.items() if name != "score"}
    return {"document": document, "score": result.get("score", 0.0)}
