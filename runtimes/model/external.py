"""The external engine: an OpenAI-compatible server (vLLM, SGLang) with sleep and wake calls, in the same slot.

It needs devices of its own: what it frees by sleeping goes back to the driver, not to our arenas. Scores come from
``/classify``, embeddings and completions from the usual routes; ``model.path`` is the name it serves the model under.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import structlog

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.errors import ActionFailed, InvalidConfig, InvalidInput, Reason
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.model.engine import (
    Answers,
    ModelJob,
    ModelRequest,
    OnAnswered,
    OnFootprint,
    Restores,
    discover,
    has_moved,
)
from runtimes.model.request import ModelInput, ModelSettings, model_of

_COMPONENT = "model.external"
_LOG = structlog.get_logger("model")
_CONNECT_S = 5.0
#: Seconds for a sleep, a wake or a question about its state: weights travel for seconds, and a hang must end. Calls are
#: bounded by their actions.
_CONTROL_S = 120.0
#: How a generation ends that is whole. A server that is put to sleep by somebody else answers 200 with ``abort``.
_WHOLE = frozenset({"stop", "length"})

#: Statuses by which the server blames the input.
_BLAMES_INPUT = frozenset({400, 413, 422})


@dataclass(slots=True)
class _Server:
    """One server: what it is known to cost, and where it is awake."""

    model: ModelSpec
    #: As the scheduler knows it; None before it is prepared.
    spec: ServiceSpec | None = None
    chunk: Chunk | None = None
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Whether the last sleep failed: nobody knows then whether it took effect, so the memory counts as held.
    doubtful: bool = False
    calls: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)


class ExternalBackend:
    """Implements `contract.ModelBackend` by HTTP calls."""

    def __init__(self, settings: ModelSettings, on_residency: Callable[[], None], on_footprint: OnFootprint) -> None:
        self._settings = settings
        self._on_residency = on_residency
        self._on_footprint = on_footprint
        self._wakes = Restores(settings.restore_bytes_per_s)
        self._servers: dict[str, _Server] = {}
        #: Of calls, and of control: a sleep must not wait for a connection behind the calls that it waits for.
        self._clients: dict[bool, httpx.AsyncClient] = {}

    # -- the contract

    async def prepare(self, function: FunctionSpec) -> ServiceSpec:
        """Reach the server, wake it once to measure that, and leave it asleep."""
        model, units = model_of(function), function.cost.get("gpu")
        if units is None:
            raise InvalidConfig(f"functions.{function.name}.cost: a model function needs gpu", component=_COMPONENT)
        if model.action is ModelAction.STEP_SCORES:
            raise InvalidConfig(
                f"functions.{function.name}.model.action: step_scores is served without an engine only",
                component=_COMPONENT,
            )
        server = _Server(model)
        self._servers[model.service] = server
        try:
            await self._call(model, "GET", "/v1/models", control=True)
            await self._wake(server, Chunk(0, units.minimum))
            await self._sleep(server)
        except ActionFailed as error:
            raise InvalidConfig(
                f"functions.{function.name}.model.engine_url: {error.message}; start the server first",
                component=_COMPONENT,
            ) from error
        whole = min(device.arena_bytes for device in await asyncio.to_thread(discover, self._settings))
        server.spec = ServiceSpec(
            name=model.service,
            bytes_by_dop=dict.fromkeys(units, whole),
            restore_s_by_dop=dict.fromkeys(units, self._wake_s(model.service)),
            replicable=False,
        )
        return server.spec

    async def admit(self, function: FunctionSpec, model_input: ModelInput) -> ModelRequest:
        """The server checks lengths and vocabulary; what it cannot take at all is refused here."""
        if model_input.conversations and model_of(function).action is not ModelAction.GENERATE:
            raise InvalidInput(
                "$.messages: an external engine takes conversations for generate only",
                component=_COMPONENT,
                detail={"path": "$.messages"},
            )
        return ModelRequest(function=function, input=model_input)

    async def restore(self, service: str, function: FunctionSpec, chunk: Chunk) -> bool:
        await self._wake(self._server(service, function), chunk)
        return True

    async def execute(self, job: ModelJob, restored: Callable[[], None], answered: OnAnswered) -> Answers:
        server = self._server(job.service, job.requests[0].function)
        began = time.monotonic()
        woken = server.chunk is None
        await self._wake(server, job.chunk)
        restored()
        arrived = time.monotonic()
        server.calls += 1
        server.quiet.clear()
        try:
            # The server batches by itself: a batch here is so many calls at once.
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._act(request)) for request in job.requests]
        except* ActionFailed as failures:
            raise failures.exceptions[0] from None
        finally:
            server.calls -= 1
            if not server.calls:
                server.quiet.set()
        usage = {
            "restored": float(woken),
            "restore_s": arrived - began if woken else 0.0,
            "restore_bytes": 0.0,
            "compute_s": time.monotonic() - arrived,
            "devices": float(job.chunk.size),
            "batch": float(len(job.requests)),
        }
        return Answers(values=tuple(call.result() for call in calls), usage=usage)

    async def evict(self, service: str, chunk: Chunk) -> None:
        server = self._servers.get(service)
        if server is not None and server.chunk is not None:
            try:
                await self._sleep(server)
            except ActionFailed as error:
                server.doubtful = True
                _LOG.warning("an engine could not be put to sleep: its memory counts as held", error=error.message)

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        return {name: (server.chunk,) for name, server in self._servers.items() if server.chunk is not None}

    async def close(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    # -- sleep and wake

    def _server(self, service: str, function: FunctionSpec) -> _Server:
        return self._servers.setdefault(service, _Server(model_of(function)))

    async def _wake(self, server: _Server, chunk: Chunk) -> None:
        async with server.moving:
            if server.chunk == chunk and not server.doubtful:
                return
            if (server.chunk is None or server.doubtful) and server.model.wake_path:
                began = time.monotonic()
                await self._call(server.model, "POST", server.model.wake_path, control=True)
                await self._check_awake(server.model)
                self._learn(server, time.monotonic() - began)
            server.chunk, server.doubtful = chunk, False
        self._on_residency()

    async def _check_awake(self, model: ModelSpec) -> None:
        """Raise ActionFailed where vLLM says that it sleeps: it answers 200 to a wake that woke a part of it."""
        try:
            answer = (await self._call(model, "GET", "/is_sleeping", control=True)).json()
        except (ActionFailed, ValueError):
            return  # a server without that route; its calls tell
        if isinstance(answer, dict) and answer.get("is_sleeping") is True:
            raise ActionFailed(Reason.UPSTREAM, f"{model.engine_url} still sleeps after its wake", component=_COMPONENT)

    def _learn(self, server: _Server, seconds: float) -> None:
        """Keep what a wake took, for any number of devices; report the estimate if it has moved."""
        service, reported = server.model.service, server.spec
        self._wakes.add(service, 1, 0, seconds)
        if reported is None:
            return
        now = dict.fromkeys(reported.restore_s_by_dop, self._wake_s(service))
        if has_moved(reported.restore_s_by_dop, now):
            server.spec = replace(reported, restore_s_by_dop=now)
            self._on_footprint(server.spec)

    def _wake_s(self, service: str) -> float:
        return self._wakes.estimate(service, {1: 0})[1]

    async def _sleep(self, server: _Server) -> None:
        """Wait for the calls in flight (a sleeping server would abort them), then let go of the memory."""
        async with server.moving:
            if server.calls:
                await server.quiet.wait()
            if server.model.sleep_path:
                await self._call(server.model, "POST", server.model.sleep_path, control=True)
            server.chunk, server.doubtful = None, False
        self._on_residency()

    # -- the actions

    async def _act(self, request: ModelRequest) -> Mapping[str, object]:
        action = model_of(request.function).action
        act = {
            ModelAction.SCORE: self._score,
            ModelAction.LOGPROBS: self._logprobs,
            ModelAction.EMBED: self._embed,
            ModelAction.GENERATE: self._generate,
        }[action]
        try:
            return await act(model_of(request.function), request.input)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ActionFailed(Reason.UPSTREAM, f"the engine's answer lacks {error!r}", component=_COMPONENT) from error

    async def _score(self, model: ModelSpec, inputs: ModelInput) -> Mapping[str, object]:
        # The head's own values, as the in-house engine tells them: the engine's default is their sigmoid or softmax.
        answer = await self._post(model, "/classify", {"input": _inputs(inputs), "use_activation": False})
        rows = [list(map(float, row["probs"])) for row in _ordered(answer["data"])]
        return {"scores": [row[0] if len(row) == 1 else row for row in rows]}

    async def _embed(self, model: ModelSpec, inputs: ModelInput) -> Mapping[str, object]:
        answer = await self._post(model, "/v1/embeddings", {"input": _inputs(inputs)})
        return {"embeddings": [list(map(float, row["embedding"])) for row in _ordered(answer["data"])]}

    async def _logprobs(self, model: ModelSpec, inputs: ModelInput) -> Mapping[str, object]:
        if inputs.top_logprobs is not None:
            message = "$.top_logprobs: of an external engine only the tokens' own log-probabilities are told"
            detail = {"path": "$.top_logprobs"}
            raise ActionFailed(Reason.INVALID_INPUT, message, component=_COMPONENT, detail=detail)
        body = {"prompt": _inputs(inputs), "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = await self._post(model, "/v1/completions", body)
        # The first token has no condition, and so no log-probability.
        rows = [list(map(float, one["logprobs"]["token_logprobs"][1:])) for one in _ordered(answer["choices"])]
        return {"logprobs": rows, "sums": [sum(row) for row in rows]}

    async def _generate(self, model: ModelSpec, inputs: ModelInput) -> Mapping[str, object]:
        sampling = inputs.sampling
        options = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if inputs.conversations:
            chats = [
                self._post(model, "/v1/chat/completions", {"messages": c, **options}) for c in inputs.conversations
            ]
            choices = [answer["choices"][0] for answer in await asyncio.gather(*chats)]
            texts = [choice["message"]["content"] for choice in choices]
        else:
            answer = await self._post(model, "/v1/completions", {"prompt": _inputs(inputs), **options})
            choices = _ordered(answer["choices"])
            texts = [choice["text"] for choice in choices]
        reasons = [choice["finish_reason"] for choice in choices]
        if not _WHOLE.issuperset(reasons):
            cut = next(reason for reason in reasons if reason not in _WHOLE)
            raise ActionFailed(Reason.UPSTREAM, f"the engine ended a generation by {cut!r}", component=_COMPONENT)
        return {"texts": texts, "finish_reasons": reasons, "seed": sampling.seed}

    async def _post(self, model: ModelSpec, path: str, body: Mapping[str, object]) -> Any:
        return (await self._call(model, "POST", path, {"model": str(model.path), **body})).json()

    async def _call(
        self,
        model: ModelSpec,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        control: bool = False,
    ) -> httpx.Response:
        """Make one call; raise ActionFailed(upstream), or (invalid_input) if the server blames the input."""
        client = self._clients.get(control)
        if client is None:
            limit = httpx.Timeout(_CONTROL_S if control else None, connect=_CONNECT_S)
            client = self._clients[control] = httpx.AsyncClient(timeout=limit)
        url = model.engine_url.rstrip("/") + path
        try:
            response = await client.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise ActionFailed(
                Reason.UPSTREAM, f"{method} {url}: {type(error).__name__} {error}", component=_COMPONENT
            ) from error
        if response.is_success:
            return response
        reason = Reason.INVALID_INPUT if response.status_code in _BLAMES_INPUT else Reason.UPSTREAM
        raise ActionFailed(
            reason, f"{method} {url} answered {response.status_code}: {response.text[:500]}", component=_COMPONENT
        )


def _inputs(inputs: ModelInput) -> list[object]:
    return [*inputs.texts, *(list(ids) for ids in inputs.token_ids)]


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by their index: a server may answer out of order."""
    return sorted(rows, key=lambda row: int(row["index"]))
