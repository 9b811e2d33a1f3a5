"""Engines: servers of vLLM's API with sleep and wake calls, in the same slot. They run already, or are started here.

They need devices of their own: what one frees by sleeping goes back to the driver, not to our arenas. Scores come from
``/classify``, embeddings and completions from the usual routes; ``model.path`` is the name it serves the model under.
After each wake, before the first answer, a fixed prompt must give the numbers that it gave before the sleep.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import structlog

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.errors import ActionFailed, InvalidConfig, InvalidInput, Reason
from manager.function import EngineSpec, FunctionSpec, ModelAction, ModelSpec
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
from runtimes.model.engine_process import EngineProcess
from runtimes.model.request import ModelInput, ModelSettings, Sampling, model_of

_COMPONENT = "model.external"
_LOG = structlog.get_logger("model")
_CONNECT_S = 5.0
#: Seconds for a sleep, a wake or a question about its state: weights travel for seconds, and a hang must end. Calls are
#: bounded by their actions.
_CONTROL_S = 120.0
#: How a generation ends that is whole. A server that is put to sleep by somebody else answers 200 with ``abort``.
_WHOLE = frozenset({"stop", "length"})

#: What an engine is asked after its start and after each wake, and how often after a start: the first may differ.
_PROMPT = ModelInput(token_ids=(tuple(range(3, 19)),), sampling=Sampling(max_new_tokens=1))
_PROBES = 3
#: Difference that is none, and how many times the spread of the probes is one.
_SAME, _SPREADS = 1e-6, 3.0
#: Seconds between two questions whether a started engine serves.
_POLL_S = 0.2

#: Statuses by which the server blames the input.
_BLAMES_INPUT = frozenset({400, 413, 422})


@dataclass(slots=True, eq=False)
class _Server:
    """One server: what it is known to cost, and where it is awake."""

    function: FunctionSpec
    #: As the scheduler knows it; None before it is prepared.
    declared: ServiceSpec | None = None
    chunk: Chunk | None = None
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Whether the last sleep failed: nobody knows then whether it took effect, so the memory counts as held.
    doubtful: bool = False
    calls: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    #: What was started here, and the task that waits for its end.
    process: EngineProcess | None = None
    watch: asyncio.Task[None] | None = None
    #: The numbers of the fixed prompt, and how far they may be from these; None before they were asked.
    expected: tuple[tuple[float, ...], float] | None = None
    #: Of calls, and of control: a sleep must not wait for a connection behind the calls that it waits for.
    clients: dict[bool, httpx.AsyncClient] = field(default_factory=dict)

    @property
    def model(self) -> ModelSpec:
        return model_of(self.function)

    @property
    def engine(self) -> EngineSpec:
        assert self.model.engine is not None, "a function of an engine"
        return self.model.engine

    @property
    def url(self) -> str:
        return (self.process.url if self.process is not None else self.engine.url).rstrip("/")


def engine_problems(engine: EngineSpec) -> Iterator[str]:
    """Tell what is wrong with an engine's section."""
    if bool(engine.url) == bool(engine.command):
        yield "give url (a server that runs already) or command (one that is started)"
    if bool(engine.sleep) != bool(engine.wake):
        yield "sleep and wake are given together"
    if engine.command and not any(word in part for part in engine.command for word in ("{socket}", "{port}")):
        yield "command must say where to serve: {socket} or {port}"


class ExternalBackend:
    """Implements `runtimes.model.engine.ModelBackend` by HTTP calls."""

    def __init__(self, settings: ModelSettings, on_residency: Callable[[], None], on_footprint: OnFootprint) -> None:
        self._settings = settings
        self._on_residency = on_residency
        self._on_footprint = on_footprint
        self._wakes = Restores(settings.restore_bytes_per_s)
        self._servers: dict[str, _Server] = {}

    # -- the contract

    async def prepare(self, function: FunctionSpec) -> ServiceSpec:
        """Reach the server that runs, and put it to sleep; what is started here starts with its first action.

        Neither is awake before the manager has given it devices.
        """
        model, units = model_of(function), function.cost.get("gpu")
        if units is None:
            raise InvalidConfig(f"functions.{function.name}.cost: a model function needs gpu", component=_COMPONENT)
        if model.action is ModelAction.STEP_SCORES:
            raise InvalidConfig(
                f"functions.{function.name}.model.action: step_scores is served without an engine only",
                component=_COMPONENT,
            )
        server = self._server(model.service, function)
        if server.engine.command:
            self._check_command(function, server.engine.command[0])
        elif server.chunk is None:
            try:
                await self._call(server, "GET", "/v1/models", control=True)
                await self._sleep(server)
            except ActionFailed as error:
                raise InvalidConfig(
                    f"functions.{function.name}.model.engine: {error.message}; start the server first",
                    component=_COMPONENT,
                ) from error
        whole = min(device.arena_bytes for device in await asyncio.to_thread(discover, self._settings))
        server.declared = ServiceSpec(
            name=model.service,
            bytes_by_dop=dict.fromkeys(units, whole),
            restore_s_by_dop=dict.fromkeys(units, self._wake_s(model.service)),
            replicable=False,
        )
        return server.declared

    def _check_command(self, function: FunctionSpec, program: str) -> None:
        """Raise InvalidConfig where the program of a command is not there, or no engine may be started."""
        if not self._settings.engines:
            message = "a node starts no engines"
        elif shutil.which(program) is None:
            message = f"{program} is no program of this machine"
        else:
            return
        raise InvalidConfig(f"functions.{function.name}.model.engine.command: {message}", component=_COMPONENT)

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
                calls = [group.create_task(self._act(server, request)) for request in job.requests]
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
        """End what was started, and every connection."""
        servers, self._servers = self._servers, {}
        await asyncio.gather(*map(self._end, servers.values()))
        for server in servers.values():
            await self._disconnect(server)

    # -- sleep and wake

    def _server(self, service: str, function: FunctionSpec) -> _Server:
        return self._servers.setdefault(service, _Server(function))

    async def _wake(self, server: _Server, chunk: Chunk) -> None:
        async with server.moving:
            if server.chunk == chunk and not server.doubtful:
                return
            began, is_asleep = time.monotonic(), server.chunk is None or server.doubtful
            if server.engine.command:
                await self._wake_or_start(server, chunk)
            elif is_asleep:
                # Until it is known to be awake it may be: a wake that failed or was left may still take effect.
                server.chunk, server.doubtful = chunk, True
                await self._wake_and_check(server)
            if is_asleep:
                self._learn(server, time.monotonic() - began)
            server.chunk, server.doubtful = chunk, False
        self._on_residency()

    async def _wake_or_start(self, server: _Server, chunk: Chunk) -> None:
        """Wake what was started, or start it: on another chunk, after its end, and where it does not wake as it was."""
        process = server.process
        if process is not None and process.chunk != chunk and server.calls:
            await server.quiet.wait()  # to move it ends it, and with it the calls in flight
        if process is not None and process.chunk == chunk and not process.is_over and not server.doubtful:
            try:
                await self._wake_and_check(server)
                return
            except ActionFailed as error:
                _LOG.warning("an engine did not wake as it was: it is started anew", error=error.message)
            except BaseException:
                await self._end(server)  # it may wake still, and nobody would know
                raise
        await self._end(server)
        devices = (await asyncio.to_thread(discover, self._settings))[chunk.start : chunk.start + chunk.size]
        ids = ",".join(device.uuid for device in devices if device.kind == "cuda")
        server.process = process = EngineProcess(server.model, chunk, {"CUDA_VISIBLE_DEVICES": ids} if ids else {})
        try:
            await process.start()
            async with asyncio.timeout(server.engine.start_s):
                await self._serves(server, process)
            await self._remember(server)
        except BaseException as error:
            reason, over = process.reason(), process.is_over
            await self._end(server)
            if isinstance(error, OSError | TimeoutError):
                late = f"the engine did not serve within {server.engine.start_s:g} s"
                message = f"{'the engine ended while it started' if over else late}: {reason}"
                raise ActionFailed(Reason.UPSTREAM, message, component=_COMPONENT) from error
            raise
        server.watch = asyncio.create_task(self._watched(server, process))

    async def _serves(self, server: _Server, process: EngineProcess) -> None:
        """Return when it answers; raise OSError if it ends before."""
        while True:
            if process.is_over:
                raise OSError(process.reason())
            with suppress(ActionFailed):
                await self._call(server, "GET", "/v1/models", control=True)
                return
            await asyncio.sleep(_POLL_S)

    async def _watched(self, server: _Server, process: EngineProcess) -> None:
        """Tell of an engine that ended by itself; the next action starts it anew."""
        await process.wait()
        if server.process is process:
            _LOG.warning("an engine has ended", service=server.model.service, why=process.reason())
            server.chunk = None
            self._on_residency()

    async def _end(self, server: _Server) -> None:
        """End what was started; nothing of it holds memory afterwards."""
        process, server.process = server.process, None
        watch, server.watch = server.watch, None
        server.chunk, server.expected = None, None
        if process is not None:
            await process.end()
            await self._disconnect(server)
        if watch is not None:
            watch.cancel()

    async def _disconnect(self, server: _Server) -> None:
        clients, server.clients = server.clients, {}
        for client in clients.values():
            await client.aclose()

    async def _wake_and_check(self, server: _Server) -> None:
        """Post the wake; raise ActionFailed unless it is awake with the numbers that it had before."""
        if not server.engine.wake:
            return
        await self._call(server, "POST", server.engine.wake, control=True)
        await self._check_awake(server)
        if server.expected is None:
            await self._remember(server)
            return
        (expected, tolerance), numbers = server.expected, await self._probe(server)
        if _difference(numbers, expected) > tolerance:
            raise ActionFailed(
                Reason.UPSTREAM,
                f"the engine of {server.model.service} computes other numbers after its wake: "
                f"a fixed prompt differs by {_difference(numbers, expected):.3g}",
                component=_COMPONENT,
            )

    async def _check_awake(self, server: _Server) -> None:
        """Raise ActionFailed where vLLM says that it sleeps: it answers 200 to a wake that woke a part of it."""
        try:
            answer = (await self._call(server, "GET", "/is_sleeping", control=True)).json()
        except (ActionFailed, ValueError):
            return  # a server without that route; its calls tell
        if isinstance(answer, dict) and answer.get("is_sleeping") is True:
            raise ActionFailed(Reason.UPSTREAM, f"{server.url} still sleeps after its wake", component=_COMPONENT)

    async def _remember(self, server: _Server) -> None:
        """Keep the numbers of the fixed prompt, which those after each wake must equal."""
        probes = [await self._probe(server) for _ in range(_PROBES)]
        spread = max(_difference(probe, probes[-1]) for probe in probes[1:])
        server.expected = probes[-1], max(_SAME, _SPREADS * spread)

    async def _probe(self, server: _Server) -> tuple[float, ...]:
        """Return what the engine computes for the fixed prompt; raise ActionFailed where that is no number."""
        action = server.model.action
        if action is ModelAction.GENERATE:
            action = ModelAction.LOGPROBS
        request = ModelRequest(function=server.function, input=_PROMPT)
        try:
            answer = await asyncio.wait_for(self._act(server, request, action), _CONTROL_S)
        except TimeoutError:
            message = f"the engine of {server.model.service} computed nothing for {_CONTROL_S:g} s"
            raise ActionFailed(Reason.UPSTREAM, message, component=_COMPONENT) from None
        numbers = tuple(_numbers(answer))
        if not all(map(math.isfinite, numbers)):
            message = f"the engine of {server.model.service} computes no numbers for a fixed prompt"
            raise ActionFailed(Reason.UPSTREAM, message, component=_COMPONENT)
        return numbers

    def _learn(self, server: _Server, seconds: float) -> None:
        """Keep what a wake took, for any number of devices; report the estimate if it has moved."""
        service, reported = server.model.service, server.declared
        self._wakes.add(service, 1, 0, seconds)
        if reported is None:
            return
        now = dict.fromkeys(reported.restore_s_by_dop, self._wake_s(service))
        if has_moved(reported.restore_s_by_dop, now):
            server.declared = replace(reported, restore_s_by_dop=now)
            self._on_footprint(server.declared)

    def _wake_s(self, service: str) -> float:
        return self._wakes.estimate(service, {1: 0})[1]

    async def _sleep(self, server: _Server) -> None:
        """Wait for the calls in flight (a sleeping server would abort them), then let go of the memory."""
        async with server.moving:
            if server.calls:
                await server.quiet.wait()
            if server.process is None:
                if server.engine.sleep:
                    await self._call(server, "POST", server.engine.sleep, control=True)
            elif server.engine.sleep:
                try:
                    await self._call(server, "POST", server.engine.sleep, control=True)
                except ActionFailed as error:
                    _LOG.warning("an engine could not be put to sleep: it is ended", error=error.message)
                    await self._end(server)
            else:
                await self._end(server)
            server.chunk, server.doubtful = None, False
        self._on_residency()

    # -- the actions

    async def _act(
        self, server: _Server, request: ModelRequest, action: ModelAction | None = None
    ) -> Mapping[str, object]:
        act = {
            ModelAction.SCORE: self._score,
            ModelAction.LOGPROBS: self._logprobs,
            ModelAction.EMBED: self._embed,
            ModelAction.GENERATE: self._generate,
        }[action or model_of(request.function).action]
        try:
            return await act(server, request.input)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ActionFailed(Reason.UPSTREAM, f"the engine's answer lacks {error!r}", component=_COMPONENT) from error

    async def _score(self, server: _Server, inputs: ModelInput) -> Mapping[str, object]:
        # The head's own values, as the in-house engine tells them: the engine's default is their sigmoid or softmax.
        answer = await self._post(server, "/classify", {"input": _inputs(inputs), "use_activation": False})
        rows = [list(map(float, row["probs"])) for row in _ordered(answer["data"])]
        return {"scores": [row[0] if len(row) == 1 else row for row in rows]}

    async def _embed(self, server: _Server, inputs: ModelInput) -> Mapping[str, object]:
        answer = await self._post(server, "/v1/embeddings", {"input": _inputs(inputs)})
        return {"embeddings": [list(map(float, row["embedding"])) for row in _ordered(answer["data"])]}

    async def _logprobs(self, server: _Server, inputs: ModelInput) -> Mapping[str, object]:
        # A token is always generated. Echoed prompts need a tokenizer, and tell no ranks.
        top = inputs.top_logprobs
        options = {"max_tokens": 1, "prompt_logprobs": top or 0, "return_token_ids": True}
        answer = await self._post(server, "/v1/completions", {"prompt": _inputs(inputs), **options})
        choices = _ordered(answer["choices"])
        ids = [list(map(int, choice["prompt_token_ids"])) for choice in choices]
        # Of each token but the first, which has no condition: itself and the likeliest in its place, by their ids.
        places = [choice["prompt_logprobs"][1:] for choice in choices]
        own = [
            [place[str(token)] for token, place in zip(row[1:], found, strict=True)]
            for row, found in zip(ids, places, strict=True)
        ]
        rows = [[float(each["logprob"]) for each in row] for row in own]
        value: dict[str, object] = {"logprobs": rows, "sums": [sum(row) for row in rows]}
        if top is not None:
            value["token_ids"], value["ranks"] = ids, [[int(each["rank"]) for each in row] for row in own]
            value["top_logprobs"] = [[_likeliest(place, top) for place in found] for found in places]
        return value

    async def _generate(self, server: _Server, inputs: ModelInput) -> Mapping[str, object]:
        sampling = inputs.sampling
        options = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if inputs.conversations:
            chats = [
                self._post(server, "/v1/chat/completions", {"messages": c, **options}) for c in inputs.conversations
            ]
            choices = [answer["choices"][0] for answer in await asyncio.gather(*chats)]
            texts = [choice["message"]["content"] for choice in choices]
        else:
            answer = await self._post(server, "/v1/completions", {"prompt": _inputs(inputs), **options})
            choices = _ordered(answer["choices"])
            texts = [choice["text"] for choice in choices]
        reasons = [choice["finish_reason"] for choice in choices]
        if not _WHOLE.issuperset(reasons):
            cut = next(reason for reason in reasons if reason not in _WHOLE)
            raise ActionFailed(Reason.UPSTREAM, f"the engine ended a generation by {cut!r}", component=_COMPONENT)
        return {"texts": texts, "finish_reasons": reasons, "seed": sampling.seed}

    async def _post(self, server: _Server, path: str, body: Mapping[str, object]) -> Any:
        return (await self._call(server, "POST", path, {"model": str(server.model.path), **body})).json()

    async def _call(
        self,
        server: _Server,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        control: bool = False,
    ) -> httpx.Response:
        """Make one call; raise ActionFailed(upstream), or (invalid_input) if the server blames the input."""
        client = server.clients.get(control)
        if client is None:
            limit = httpx.Timeout(_CONTROL_S if control else None, connect=_CONNECT_S)
            path_of_socket = None if server.process is None or server.process.socket is None else server.process.socket
            transport = None if path_of_socket is None else httpx.AsyncHTTPTransport(uds=str(path_of_socket))
            client = server.clients[control] = httpx.AsyncClient(timeout=limit, transport=transport)
        url = server.url + path
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


def _likeliest(place: Mapping[str, Mapping[str, Any]], top: int) -> list[list[int | float]]:
    """Return ids and log-probabilities of the likeliest tokens of one place."""
    ordered = sorted(place.items(), key=lambda item: int(item[1]["rank"]))
    return [[int(token), float(each["logprob"])] for token, each in ordered[:top]]


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by their index: a server may answer out of order."""
    return sorted(rows, key=lambda row: int(row["index"]))


def _numbers(value: object) -> Iterator[float]:
    """Yield the numbers of an answer in their order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield float(value)


def _difference(numbers: tuple[float, ...], others: tuple[float, ...]) -> float:
    """Return the largest difference; infinite where they are not as many."""
    if len(numbers) != len(others):
        return math.inf
    return max((abs(one - other) for one, other in zip(numbers, others, strict=True)), default=0.0)
