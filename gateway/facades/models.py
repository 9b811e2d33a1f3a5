"""The OpenAI, vLLM and SGLang APIs for model functions."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway import serialization
from gateway.errors import FaultKind
from gateway.facades.facade import (
    STATUSES,
    Endpoint,
    Facade,
    Fault,
    ForeignRoute,
    T,
    answer,
    read_shape,
    result_of,
)
from gateway.http.messages import record_headers
from gateway.invocations.record import Record
from manager.errors import InvalidInput, NotFound
from manager.function import FunctionSpec, ModelAction, ModelSpec

# Shapes of model servers: what clients of OpenAI, vLLM and SGLang post, and one judged sequence in the words of each.
#
# What a request names and nobody here reads is refused, never ignored: a bias or a stop word that does nothing would be
# a wrong number that looks right.

#: One sequence or several, as text or as token ids.
Prompts = str | list[str | int | list[int]]
Ids = list[int | list[int]]
Texts = str | list[str]
TOP_MAX = 128


class CompletionRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``/v1/completions``: judge a prompt (``prompt_logprobs``, or ``echo`` with ``logprobs``), or go on with it."""

    prompt: Prompts
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    user: str | None = None


class ChatRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``/v1/chat/completions``: the next message of a conversation."""

    messages: list[dict[str, object]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    user: str | None = None


class EmbeddingRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``/v1/embeddings``."""

    input: Prompts
    model: str | None = None
    encoding_format: str = "float"
    user: str | None = None


class ClassifyRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``/classify``; without ``use_activation`` the head's own values."""

    input: Prompts
    model: str | None = None
    use_activation: bool = True


class VllmSampling(Struct, frozen=True, forbid_unknown_fields=True):
    """``sampling_params`` of vLLM's ``/inference/v1/generate``."""

    max_tokens: int = 1
    temperature: float | None = None
    top_p: float | None = None
    prompt_logprobs: int | None = None


class VllmGenerateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``/inference/v1/generate``, as prime-rl asks its teacher."""

    token_ids: list[int]
    sampling_params: VllmSampling
    model: str | None = None


class SglangSampling(Struct, frozen=True, forbid_unknown_fields=True):
    """``sampling_params`` of SGLang's ``/generate``."""

    temperature: float | None = None
    max_new_tokens: int | None = None
    skip_special_tokens: bool = True


class SglangGenerateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's ``/generate``, as slime asks its teacher: only to judge the input."""

    text: Texts | None = None
    input_ids: Ids | None = None
    sampling_params: SglangSampling = SglangSampling()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    image_data: None = None
    stream: bool = False


class SglangClassifyRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's ``/classify``."""

    text: Texts | None = None
    input_ids: Ids | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSequence:
    """A sequence whose tokens were judged: its ids, and of each but the first what `logprobs` tells."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]
    #: [token id, log-probability], likeliest first.
    top: Sequence[Sequence[Sequence[float]]]

    def vllm(self) -> list[dict[str, object] | None]:
        """Return vLLM's ``prompt_logprobs``: of each token itself first, then the likeliest that it is not."""
        rows: list[dict[str, object] | None] = [None]
        for token, logprob, rank, top in zip(self.ids[1:], self.logprobs, self.ranks, self.top, strict=True):
            row: dict[str, object] = {str(token): _token_entry(logprob, rank)}
            for place, (other, value) in enumerate(top, 1):
                row.setdefault(str(int(other)), _token_entry(value, place))
            rows.append(row)
        return rows

    def openai(self) -> dict[str, object]:
        """Return the ``logprobs`` of an echoed prompt; tokens are written by their ids, as vLLM can be told to."""
        names = [f"token_id:{token}" for token in self.ids]
        top: list[dict[str, float] | None] = [None]
        for name, logprob, row in zip(names[1:], self.logprobs, self.top, strict=True):
            top.append({f"token_id:{int(other)}": value for other, value in row} | {name: logprob})
        return {
            "tokens": names,
            "token_logprobs": [None, *self.logprobs],
            "top_logprobs": top,
            "text_offset": [0] * len(names),
        }

    def sglang(self, start: int, top: int) -> dict[str, object]:
        """Return SGLang's ``meta_info`` of the input, from its token ``start`` on."""
        rows: list[list[object]] = [[None, self.ids[0], None]]
        rows += [[value, token, None] for value, token in zip(self.logprobs, self.ids[1:], strict=True)]
        fields: dict[str, object] = {"input_token_logprobs": rows[start:], "output_token_logprobs": []}
        if top:
            others = [None, *([[value, int(token), None] for token, value in row] for row in self.top)]
            fields["input_top_logprobs"] = others[start:]
        return fields


def _token_entry(logprob: float, rank: int) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": None}


def sequences_of(prompts: Prompts | Sequence[str] | Sequence[int] | Ids, what: str) -> dict[str, object]:
    """Return the input of a model action: ``texts`` or ``token_ids``; raises InvalidInput."""
    one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    rows: list[object] = [prompts] if one else list(prompts)
    if not rows or not all(rows):
        raise refusal(what, "must not be empty")
    if all(isinstance(row, str) for row in rows):
        return {"texts": rows}
    if not all(isinstance(row, list) and all(isinstance(token, int) for token in row) for row in rows):
        raise refusal(what, "must be texts, or token ids, of one kind")
    return {"token_ids": rows}


def vector(values: Sequence[float], encoding: str) -> object:
    """Return an embedding as a list, or as the base64 of little-endian float32; raises InvalidInput."""
    if encoding == "float":
        return values
    if encoding != "base64":
        raise refusal("encoding_format", f"{encoding[:64]!r} is none of float and base64")
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def check_scoring(max_tokens: int | None, temperature: float | None, top: int, what: str) -> None:
    """Raise InvalidInput where a request to judge asks for more than that.

    A temperature other than 1 would change the numbers in some servers and not in others; 0 says only that what is
    generated is the likeliest.
    """
    if max_tokens not in (None, 0, 1):
        raise refusal("max_tokens", "must be 0 or 1 where a prompt is judged: nothing is generated")
    if temperature not in (None, 0.0, 1.0):
        raise refusal("temperature", f"{temperature:g} is not applied to the prompt's log-probabilities: send 1.0")
    if not 0 <= top <= TOP_MAX:
        raise refusal(what, f"must be 0 to {TOP_MAX}")


def check_generating(request: CompletionRequest | ChatRequest) -> None:
    """Raise InvalidInput for what changes a generation and is not served."""
    if request.n not in (None, 1):
        raise refusal("n", "must be 1")
    if request.stop:
        raise refusal("stop", "is not served")


def refusal(what: str, message: str) -> InvalidInput:
    return InvalidInput(f"{what}: {message}", component="models", detail={"path": what})


def texts_of(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return a conversation with contents as text; raises InvalidInput for what is none."""
    result: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                each.get("text") if isinstance(each, dict) and each.get("type") == "text" else None for each in content
            ]
            if not all(isinstance(part, str) for part in parts):
                raise refusal(f"messages[{index}].content", "only parts of type text are served")
            content = "".join(str(part) for part in parts)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise refusal(f"messages[{index}]", "must have a role and a content of text")
        unknown = message.keys() - {"role", "content", "name"}
        if unknown:
            raise refusal(f"messages[{index}].{min(unknown)}", "is not served")
        result.append({"role": message["role"], "content": content})
    return result


# Teachers and reward models in the words of OpenAI, vLLM and SGLang: what trainers ask of a server of their own.
#
# One request is one action, however many sequences it has. ``/models/{function}/...`` fixes the function; elsewhere the
# request's ``model`` names it.

#: Seconds after which clients give up: TRL and the OpenAI SDK, and slime.
OPENAI_S, SGLANG_S = 600.0, 300.0
FIXED = "/models/{function}"
#: What the SDK's exceptions are called.
ERROR_TYPES: Mapping[FaultKind, str] = {
    FaultKind.INPUT: "BadRequestError",
    FaultKind.UNAUTHORIZED: "AuthenticationError",
    FaultKind.FORBIDDEN: "PermissionDeniedError",
    FaultKind.NOT_FOUND: "NotFoundError",
    FaultKind.METHOD: "MethodNotAllowedError",
    FaultKind.CONFLICT: "ConflictError",
    FaultKind.TOO_LARGE: "RequestTooLargeError",
    FaultKind.UNSUPPORTED: "NotImplementedError",
    FaultKind.BUSY: "ServiceUnavailableError",
    FaultKind.TIMEOUT: "TimeoutError",
    FaultKind.LOST: "BadGatewayError",
}


class Models(Facade):
    """The facade of model servers' clients."""

    name: ClassVar[str] = "models"
    statuses: ClassVar[Mapping[FaultKind, int]] = STATUSES | dict.fromkeys(
        (FaultKind.INPUT, FaultKind.CONFLICT, FaultKind.UNSUPPORTED), 400
    )
    prefix: ClassVar[str] = "openai"
    roots: ClassVar[frozenset[str]] = frozenset({"models"})

    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route of the facade, with the function in its path or not."""
        posts: dict[str, Endpoint] = {
            "/v1/completions": self.complete,
            "/v1/chat/completions": self.chat,
            "/v1/embeddings": self.embed,
            "/inference/v1/generate": self.vllm_generate,
            "/classify": self.classify,
            "/generate": self.sglang_generate,
        }
        gets: dict[str, Endpoint] = {
            "/v1/models": self.list_models,
            "/get_model_info": self.model_info,
            **dict.fromkeys(("/health", "/health_generate", "/ping"), self.health),
        }
        table = [("POST", path, each) for path, each in posts.items()]
        table += [("GET", path, each) for path, each in gets.items()]
        return [
            ForeignRoute(method=method, path=prefix + path, endpoint=each)
            for method, path, each in table
            for prefix in ("", FIXED)
        ]

    def body(self, fault: Fault, status: int) -> object:
        """Return a fault as OpenAI's and vLLM's servers say it."""
        name = ERROR_TYPES.get(fault.kind, "InternalServerError")
        return {"error": {"message": fault.message, "type": name, "param": fault.path or None, "code": status}}

    # Judging prompts

    async def complete(self, request: Request) -> Response:
        """Judge prompts, or go on with them."""
        body = await self._read(request, CompletionRequest)
        check_generating(body)
        if body.prompt_logprobs is None and not (body.echo and body.logprobs is not None):
            return await self._completed(request, body)
        what = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        top = max(body.prompt_logprobs or 0, body.logprobs or 0)
        check_scoring(body.max_tokens, body.temperature, top, what)
        input = sequences_of(body.prompt, "prompt")
        record, judged = await self._judge(request, body.model, input, top, OPENAI_S)
        choices = [
            {
                "index": index,
                "text": "",
                "finish_reason": "length",
                "logprobs": each.openai() if body.echo and body.logprobs is not None else None,
                "prompt_logprobs": each.vllm() if body.prompt_logprobs is not None else None,
            }
            for index, each in enumerate(judged)
        ]
        return self._answer(record, "text_completion", choices, sum(len(each.ids) for each in judged), 0, body.stream)

    async def vllm_generate(self, request: Request) -> Response:
        """vLLM's own route, by which prime-rl asks its teacher."""
        body = await self._read(request, VllmGenerateRequest)
        sampling = body.sampling_params
        if sampling.prompt_logprobs is None:
            raise refusal("sampling_params.prompt_logprobs", "must be given: this route only judges prompts")
        check_scoring(sampling.max_tokens, sampling.temperature, sampling.prompt_logprobs, "prompt_logprobs")
        input = sequences_of(body.token_ids, "token_ids")
        record, judged = await self._judge(request, body.model, input, sampling.prompt_logprobs, OPENAI_S)
        choices = [{"index": 0, "token_ids": [], "finish_reason": "length"}]
        return answer({"request_id": record.id, "choices": choices, "prompt_logprobs": judged[0].vllm()}, record)

    async def sglang_generate(self, request: Request) -> Response:
        """SGLang's route, by which slime asks its teacher."""
        body = await self._read(request, SglangGenerateRequest)
        sampling = body.sampling_params
        if not body.return_logprob or body.stream:
            raise refusal("return_logprob", "must be true, without stream: this route only judges its input")
        # Its temperature is that of what is generated, never of the input.
        check_scoring(sampling.max_new_tokens, None, body.top_logprobs_num, "top_logprobs_num")
        prompts = _one_of(body.text, body.input_ids)
        input = sequences_of(prompts, "input_ids")
        record, judged = await self._judge(request, None, input, body.top_logprobs_num, SGLANG_S)
        result = []
        for each in judged:
            start = len(each.ids) - 1 if body.logprob_start_len < 0 else body.logprob_start_len
            about = {
                "id": record.id,
                "prompt_tokens": len(each.ids),
                "completion_tokens": 0,
                "cached_tokens": 0,
                "finish_reason": {"type": "length", "length": 0},
                **each.sglang(start, body.top_logprobs_num),
            }
            result.append({"text": "", "output_ids": [], "meta_info": about})
        return answer(result if _is_batch(prompts) else result[0], record)

    async def _judge(
        self, request: Request, model: str | None, input: Mapping[str, object], top: int, client_timeout_s: float
    ) -> tuple[Record, list[JudgedSequence]]:
        """Return the record and the sequences; raises InvalidInput rather than judge one that was cut."""
        function = self._model(request, model, ModelAction.LOGPROBS)
        record, result = await self._act(request, function, {**input, "top_logprobs": top}, client_timeout_s)
        parts = (result["token_ids"], result["logprobs"], result["ranks"], result["top_logprobs"])
        return record, [
            JudgedSequence(ids=ids, logprobs=logprobs, ranks=ranks, top=likeliest)
            for ids, logprobs, ranks, likeliest in zip(*parts, strict=True)
        ]

    # Generating

    async def _completed(self, request: Request, body: CompletionRequest) -> Response:
        if body.logprobs is not None or body.echo:
            raise refusal(
                "logprobs" if body.logprobs is not None else "echo", "is served with the other of the two only"
            )
        function = self._model(request, body.model, ModelAction.GENERATE)
        input = {**sequences_of(body.prompt, "prompt"), **_sampling(body, body.max_tokens)}
        record, result = _written(await self._act(request, function, input, OPENAI_S))
        choices = [
            {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
            for index, (text, reason) in enumerate(zip(result["texts"], result["finish_reasons"], strict=True))
        ]
        return self._answer(record, "text_completion", choices, *_counts(result), body.stream)

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation."""
        body = await self._read(request, ChatRequest)
        check_generating(body)
        function = self._model(request, body.model, ModelAction.GENERATE)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        input = {"messages": [texts_of(body.messages)], **_sampling(body, most)}
        record, result = _written(await self._act(request, function, input, OPENAI_S))
        message = {"role": "assistant", "content": result["texts"][0]}
        part = "delta" if body.stream else "message"
        choices = [{"index": 0, part: message, "finish_reason": result["finish_reasons"][0], "logprobs": None}]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        return self._answer(record, kind, choices, *_counts(result), body.stream)

    def _answer(
        self, record: Record, kind: str, choices: object, prompt: int, completion: int, stream: bool
    ) -> Response:
        """Return an answer of OpenAI's form, as one event and its end where the client wants a stream."""
        body = {
            "id": record.id,
            "object": kind,
            "created": int(record.accepted_s),
            "model": record.function,
            "choices": choices,
            "usage": _usage(prompt, completion),
        }
        if not stream:
            return answer(body, record)
        events = b"data: " + serialization.dumps(body) + b"\n\ndata: [DONE]\n\n"
        return Response(events, 200, record_headers(record), "text/event-stream")

    # Vectors and scores

    async def embed(self, request: Request) -> Response:
        """A unit vector for each text."""
        body = await self._read(request, EmbeddingRequest)
        vector((), body.encoding_format)
        function = self._model(request, body.model, ModelAction.EMBED)
        record, result = await self._act(request, function, sequences_of(body.input, "input"), OPENAI_S)
        rows = [
            {"object": "embedding", "index": index, "embedding": vector(row, body.encoding_format)}
            for index, row in enumerate(result["embeddings"])
        ]
        return answer(_listed(record, rows, sum(result["tokens"])), record)

    async def classify(self, request: Request) -> Response:
        """The value of a score model's head: vLLM's form, or SGLang's, which share a path."""
        inputs = await self.read_object(request)
        if "text" in inputs or "input_ids" in inputs:
            return await self._sglang_classify(request, read_shape(inputs, SglangClassifyRequest))
        body = read_shape(inputs, ClassifyRequest)
        function = self._model(request, body.model, ModelAction.SCORE)
        record, result = await self._act(request, function, sequences_of(body.input, "input"), OPENAI_S)
        rows = []
        for index, value in enumerate(result["scores"]):
            values = value if isinstance(value, list) else [value]
            probs = _activated(values) if body.use_activation else values
            label = f"LABEL_{max(range(len(values)), key=values.__getitem__)}"
            rows.append({"index": index, "label": label, "probs": probs, "num_classes": len(values)})
        return answer(_listed(record, rows, sum(result["tokens"])), record)

    async def _sglang_classify(self, request: Request, body: SglangClassifyRequest) -> Response:
        prompts = _one_of(body.text, body.input_ids)
        function = self._model(request, None, ModelAction.SCORE)
        record, result = await self._act(request, function, sequences_of(prompts, "text"), SGLANG_S)
        rows = [
            {
                "embedding": row if isinstance(row, list) else [row],
                "meta_info": {"id": record.id, "prompt_tokens": count},
            }
            for row, count in zip(result["scores"], result["tokens"], strict=True)
        ]
        return answer(rows if _is_batch(prompts) else rows[0], record)

    # What there is

    async def health(self, request: Request) -> Response:
        """It takes work; of a function, its actions may start."""
        if "function" in request.path_params:
            self._model(request, None)
        return Response(status_code=200)

    async def list_models(self, request: Request) -> Response:
        """Every model function, or the one of the path."""
        fixed = "function" in request.path_params
        every = [self._model(request, None)] if fixed else self.api.functions.all()
        rows = [
            {
                "id": each.name,
                "object": "model",
                "created": 0,
                "owned_by": "tangram",
                "max_model_len": each.model.max_tokens,
            }
            for each in every
            if each.model is not None
        ]
        return answer({"object": "list", "data": rows})

    async def model_info(self, request: Request) -> Response:
        """What SGLang tells of its model."""
        function = self._model(request, None)
        return answer({"model_path": function.name, "is_generation": _spec(function).action is ModelAction.GENERATE})

    # What the routes are made of

    async def _read(self, request: Request, kind: type[T]) -> T:
        return read_shape(await self.read_object(request), kind)

    def _model(self, request: Request, name: str | None, action: ModelAction | None = None) -> FunctionSpec:
        """Return the function that the path or the request names, if it does this; raises NotFound, InvalidInput."""
        name = request.path_params.get("function", name)
        if name is None:
            raise refusal("model", "must name a function, here or in the path: /models/NAME/...")
        known = [each.name for each in self.api.functions.all() if each.model is not None]
        if name not in known:
            message = f"the model {str(name)[:128]!r} does not exist; known: {', '.join(known)[:500] or 'none'}"
            raise NotFound(message, component=self.name)
        function = self.function(name)
        if action is not None and _spec(function).action is not action:
            message = f"the model {name!r} does {_spec(function).action}, and this request needs one that does {action}"
            raise InvalidInput(message, component=self.name, detail={"path": "model"})
        return function

    async def _act(
        self, request: Request, function: FunctionSpec, input: Mapping[str, object], client_timeout_s: float
    ) -> tuple[Record, Mapping[str, Any]]:
        """Run one action and return its record and result; raises as `run`, and InvalidInput for a cut text."""
        (record,) = await self.run(request, [self.call(request, function.name, input)], client_timeout_s)
        result = result_of(record)
        assert isinstance(result, dict), f"{function.name} told no object"
        if result.get("truncated"):
            most = _spec(function).max_tokens
            raise refusal("prompt", f"is longer than the {most} tokens of {function.name}, and would be cut")
        if "tokens" not in result:  # of an external engine
            result["tokens"] = [0] * len(result.get("embeddings") or result.get("scores") or result.get("texts") or ())
        return record, result


def _spec(function: FunctionSpec) -> ModelSpec:
    """Return the function's model section, which every function of this facade has."""
    assert function.model is not None, f"{function.name} has no model section"
    return function.model


def _one_of(text: Texts | None, ids: Ids | None) -> Texts | Ids:
    if text is not None and ids is None:
        return text
    if ids is not None and text is None:
        return ids
    raise refusal("input_ids", "give one of text and input_ids")


def _is_batch(prompts: Texts | Ids) -> bool:
    """Whether several sequences were asked about, so that the answer is a list."""
    return not isinstance(prompts, str) and bool(prompts) and not isinstance(prompts[0], int)


def _sampling(request: CompletionRequest | ChatRequest, most: int | None) -> dict[str, object]:
    """Return how to sample, as a model action is told; OpenAI's own temperature is 1."""
    fields = {"max_new_tokens": most, "top_p": request.top_p, "seed": request.seed}
    chosen: dict[str, object] = {name: value for name, value in fields.items() if value is not None}
    return {**chosen, "temperature": 1.0 if request.temperature is None else request.temperature}


def _counts(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens that were read, and those that were made."""
    return sum(fields["tokens"]), sum(len(ids) for ids in fields.get("token_ids", ()))


def _written(ended: tuple[Record, Mapping[str, Any]]) -> tuple[Record, Mapping[str, Any]]:
    """Return a generation, if it is text; raises InvalidInput."""
    if "texts" not in ended[1]:
        raise refusal(
            "model", f"the checkpoint of {ended[0].function} has no tokenizer, and this route answers with text"
        )
    return ended


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _listed(record: Record, rows: Sequence[Mapping[str, object]], tokens: int) -> dict[str, object]:
    return {
        "id": record.id,
        "object": "list",
        "created": int(record.accepted_s),
        "model": record.function,
        "data": rows,
        "usage": _usage(tokens, 0),
    }


def _activated(values: Sequence[float]) -> list[float]:
    """Return probabilities: of one label by itself, of several together."""
    if len(values) == 1:
        return [0.5 * (1 + math.tanh(values[0] / 2))]
    highest = max(values)
    weights = [math.exp(value - highest) for value in values]
    return [weight / math.fsum(weights) for weight in weights]
