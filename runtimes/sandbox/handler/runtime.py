"""The `handler` runtime: Python functions in sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import structlog

from manager.errors import ActionFailed, CodedError, InvalidConfig, Reason
from manager.executor import LogSink
from manager.function import Background, FunctionSpec, HandlerSpec, SandboxSpec, Setting
from runtimes import runtime
from runtimes.chores import Chores
from runtimes.kind import DeclarationSite, Kind, RuntimeDeps
from runtimes.runtime import Execution, Result, Runtime
from runtimes.sandbox.command import STOPPED, Command, CommandResult, memory_ended
from runtimes.sandbox.environments import PURPOSE, EnvironmentSettings
from runtimes.sandbox.handler import worker
from runtimes.sandbox.handler.layers import LayerStore
from runtimes.sandbox.handler.sources import (
    COMPONENT,
    HandlerCopies,
    RequirementSettings,
    handler_problem,
    requirement_lines,
    sources_digest,
)
from runtimes.sandbox.runner.client import SandboxProcess, unmade
from runtimes.sandbox.runner.runner import FrameDecoder, ProtocolError
from runtimes.sandbox.sandbox import Provider, Sandbox
from runtimes.secrets import Secrets

_SOURCE = Path(worker.__file__).read_text(encoding="utf-8")
_MOUNT, _LAYER = "/function", "/requirements"
#: Bytes of a frame beside the result that it carries: usage, a traceback, a line of log.
_FRAME_SLACK_BYTES = 256 * 2**10
_TAIL_MAX_BYTES = 8 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """How instances are made; for functions that say nothing themselves."""

    #: For functions that have no ``sandbox`` section; its image also for those that name none.
    sandbox: SandboxSpec = field(default_factory=lambda: EnvironmentSettings().default)
    #: What ``${secret:NAME}`` in its environment stands for.
    secrets: Secrets = field(default_factory=Secrets)
    requirements: RequirementSettings = field(default_factory=RequirementSettings)
    #: Where their layers are kept.
    layers_dir: Path = Path("requirements")
    #: What each revision runs in place of its directory, which may change.
    copies: HandlerCopies = field(default_factory=HandlerCopies)
    #: Seconds for the import of the handler.
    start_timeout_s: float = 60.0
    #: Seconds that the other invocations of an instance get to end when one of them must be killed.
    kill_grace_s: float = 2.0
    #: Seconds without an invocation after which an instance is frozen and its cores are given back.
    rest_s: float = 0.05

    def sandbox_of(self, function: FunctionSpec) -> SandboxSpec:
        spec = function.sandbox or self.sandbox
        return spec if spec.image else replace(spec, image=self.sandbox.image)


class ImportFailed(ActionFailed):
    """The handler could not be imported; ``detail["traceback"]`` says why."""


@dataclass(slots=True)
class _Pending:
    answer: asyncio.Future[Mapping[str, Any]]
    log: LogSink
    cores: tuple[int, ...]


class Instance:
    """Executes up to ``per_instance`` invocations at a time; dead once ``alive`` is false, for good."""

    def __init__(
        self,
        function: FunctionSpec,
        settings: HandlerSettings,
        sandbox: Sandbox,
        process: SandboxProcess,
        living: set[str],
    ) -> None:
        self.function = function
        self.spec = handler_of(function)
        self.alive = True
        #: Invocations that hold a slot, those that wait for cores included.
        self.claimed = 0
        self.idle_since_s = time.monotonic()
        self.cores: tuple[int, ...] = ()
        #: Frozen, and without cores of its own.
        self.resting = False
        #: Told when it dies, whoever is the first to notice.
        self.on_death: Callable[[], None] = lambda: None
        self._settings = settings
        self._sandbox = sandbox
        self._process = process
        self._living = living
        self._pending: dict[str, _Pending] = {}
        limit = function.output_limit_bytes + _FRAME_SLACK_BYTES
        self._decoder = FrameDecoder(worker.HEADER, limit=limit)
        self._tail = bytearray()  # the last raw output, for the story of a crash
        self._tail_missing = 0
        self._ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._posture = asyncio.Lock()
        self._death: ActionFailed | None = None
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        provider: Provider,
        function: FunctionSpec,
        settings: HandlerSettings,
        living: set[str],
        directory: Path,
        layer: Path | None = None,
    ) -> Instance:
        """Make the sandbox and import the handler; ImportFailed, or another ActionFailed.

        The sandbox's id is among the ``living`` from its making to its end; ``directory`` holds the handler's files,
        ``layer`` what it requires.
        """
        sandbox = await provider.create(
            settings.secrets.filled(settings.sandbox_of(function)),
            name=secrets.token_hex(8),
            labels={PURPOSE: "handler", "tangram.function": function.name},
            mounts={str(directory): _MOUNT, **({} if layer is None else {str(layer): _LAYER})},
        )
        living.add(sandbox.id)
        # Without a root of its own a sandbox sees the host's directories where they are.
        own_root = provider.info.limits.get("filesystem", True)
        place = _MOUNT if own_root else str(directory)
        site = "" if layer is None else _LAYER if own_root else str(layer)
        try:
            process = await sandbox.spawn(_command(function, place, site))
        except BaseException:
            living.discard(sandbox.id)
            await sandbox.close()
            raise
        instance = cls(function, settings, sandbox, process, living)
        try:
            await instance._imported()
            if instance._death is not None:
                raise instance._death
        except BaseException:
            await instance.close()
            raise
        return instance

    @property
    def free(self) -> bool:
        return self.alive and self.claimed < self.spec.per_instance

    async def invoke(self, execution: Execution) -> Result:
        """Call the handler; cancelling ends the instance, as nothing else surely ends the user's code."""
        if self._death is not None:
            raise self._death
        key = execution.action.id
        pending = _Pending(asyncio.get_running_loop().create_future(), execution.call.log, execution.lease.cores)
        self._pending[key] = pending
        try:
            await self._stand_up()
            frame = _frame(_request(execution))
            execution.begin()
            await self._process.write_stdin(frame)
            answer = await pending.answer
        except asyncio.CancelledError:
            await self._retire()
            raise
        except CodedError:
            self.alive = False
            raise
        finally:
            execution.end()
            self._pending.pop(key, None)
        return _result(answer, execution.call.log)

    async def rest(self) -> None:
        """Freeze it and give its cores back, if it is still idle."""
        async with self._posture:
            if not self.alive or self.claimed or self.resting:
                return
            background = self._sandbox.spec.background
            try:
                # To kill what an idle instance runs would be to kill the instance.
                await self._sandbox.quiesce(Background.FREEZE if background is Background.KILL else background)
            except CodedError:
                self.alive = False
            self.resting = True
            self.cores = ()

    async def close(self) -> None:
        """End it, and fail what it still had under way; idempotent."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._fail(ActionFailed(Reason.ENVIRONMENT_LOST, "the instance was closed", component=COMPONENT))
        try:
            await self._sandbox.close()
        finally:
            self._living.discard(self._sandbox.id)  # what could not be removed is the reaper's

    async def _imported(self) -> None:
        limit_s = self._settings.start_timeout_s
        try:
            first = await asyncio.wait_for(self._ready, limit_s)
        except TimeoutError:
            message = f"the import of {self.spec.module!r} took longer than {limit_s:g} s"
            raise ImportFailed(Reason.HANDLER_ERROR, message, component=COMPONENT) from None
        except ActionFailed as error:
            if error.reason is Reason.ENVIRONMENT_LOST:
                raise
            message = f"cannot load {self.spec.module}:{self.spec.callable}: {error.message}"
            detail: Mapping[str, object] = {"traceback": error.detail.get("output", "")}
            raise ImportFailed(error.reason, message, component=COMPONENT, detail=detail) from error
        if "fatal" in first:
            fatal = first["fatal"]
            message = f"cannot load {self.spec.module}:{self.spec.callable}: {fatal['type']}: {fatal['message']}"
            if fatal["type"] == "PermissionError":
                message += f"; the sandbox's user must be able to read {self.spec.directory}: chmod -R a+rX it"
            detail = {"traceback": fatal["traceback"]}
            raise ImportFailed(Reason.HANDLER_ERROR, message, component=COMPONENT, detail=detail)

    async def _stand_up(self) -> None:
        """Thaw it, and confine it to the cores of all its invocations, if they were leased any."""
        if not self._posture.locked() and not self.resting and self._wanted_cores() in ((), self.cores):
            return
        async with self._posture:
            wanted = self._wanted_cores()
            if wanted not in ((), self.cores):
                await self._sandbox.set_cores(wanted)
                self.cores = wanted
            if self.resting:
                await self._sandbox.thaw()
                self.resting = False

    def _wanted_cores(self) -> tuple[int, ...]:
        if len(self._pending) == 1:
            return next(iter(self._pending.values())).cores
        return tuple(sorted({core for pending in self._pending.values() for core in pending.cores}))

    async def _retire(self) -> None:
        """Kill the worker. Neighbours of the cancelled invocation get a grace; beyond it they fail."""
        self.alive = False
        others = [pending.answer for pending in self._pending.values() if not pending.answer.done()]
        if others:
            await asyncio.wait(others, timeout=self._settings.kill_grace_s)
        with contextlib.suppress(ActionFailed):
            await self._process.kill()

    async def _read(self) -> None:
        """Hand every frame to its invocation until the worker ends; then tell those that still wait why."""
        try:
            async for stream, data in self._process.chunks():
                if stream == "stdout":
                    for _, frame in self._decoder.feed(data):
                        self._on_message(cast(Mapping[str, Any], runtime.loads(frame)))
                else:
                    self._raw(data)
            self._fail(self._post_mortem(self._sandbox.with_shortage(await self._process.wait())))
        except ActionFailed as error:
            self._fail(error)
        except (ProtocolError, ValueError, KeyError, TypeError, AttributeError):
            # Only foreign code that found our descriptor writes no frame: nothing it says is believed any more.
            with contextlib.suppress(ActionFailed):
                await self._process.kill()
            self._fail(ActionFailed(Reason.HANDLER_ERROR, "the worker's protocol was broken", component=COMPONENT))

    def _on_message(self, message: Mapping[str, Any]) -> None:
        pending = self._pending.get(message.get("id", ""))
        if "ready" in message or "fatal" in message:
            if not self._ready.done():
                self._ready.set_result(message)
        elif pending is None:
            return  # it was cancelled meanwhile
        elif "log" in message:
            stream, text = message["log"]
            pending.log.write(str(stream), str(text))
        elif not pending.answer.done():
            pending.answer.set_result(message)

    def _raw(self, data: bytes) -> None:
        """Log output that bypassed Python for all that run: it cannot be told whose it is."""
        self._tail += data
        self._tail_missing += max(0, len(self._tail) - _TAIL_MAX_BYTES)
        del self._tail[:-_TAIL_MAX_BYTES]
        text = data.decode("utf-8", "replace")
        for pending in self._pending.values():
            pending.log.write("stderr", text)

    def _fail(self, death: ActionFailed) -> None:
        self.alive = False
        if self._death is None:
            self._death = death
            asyncio.get_running_loop().call_soon(self.on_death)
        if not self._ready.done():
            self._ready.set_exception(death)
            self._ready.exception()  # seen: nobody waits for it after the start
        left = [pending.answer for pending in self._pending.values() if not pending.answer.done()]
        for answer in left:
            answer.set_exception(death if len(left) == 1 else _shared(death, len(left)))

    def _post_mortem(self, ended: CommandResult) -> ActionFailed:
        missing = f"[... {self._tail_missing} bytes are missing here ...]\n" if self._tail_missing else ""
        detail = {"output": missing + self._tail.decode("utf-8", "replace")}
        if ended.out_of_memory:
            description = memory_ended("the handler's process", ended.peak_memory_bytes)
            return ActionFailed(Reason.OUT_OF_MEMORY, description, component=COMPONENT, detail=detail)
        if ended.stopped:
            told = f"the handler's process {STOPPED}"
            return ActionFailed(Reason.TIMEOUT, told, component=COMPONENT, detail=detail)
        if ended.signal == 9:
            return ActionFailed(
                Reason.ENVIRONMENT_LOST, "the handler's process was killed", component=COMPONENT, detail=detail
            )
        how = f"exit code {ended.exit_code}" if ended.signal is None else f"signal {ended.signal}"
        message = f"the handler ended its own process ({how})"
        return ActionFailed(Reason.HANDLER_ERROR, message, component=COMPONENT, detail=detail)


def _shared(death: ActionFailed, calls: int) -> ActionFailed:
    """Return why one of several calls ended with their instance: nobody knows which of them has ended it."""
    if death.reason not in (Reason.HANDLER_ERROR, Reason.OUT_OF_MEMORY):
        return death
    message = (
        f"its instance ended under {calls} calls (handler.per_instance), whichever of them ended it: {death.message}"
    )
    return ActionFailed(Reason.ENVIRONMENT_LOST, message, component=COMPONENT, detail=death.detail)


def handler_of(function: FunctionSpec) -> HandlerSpec:
    assert function.handler is not None, f"function {function.name} has no handler"
    return function.handler


def _command(function: FunctionSpec, place: str, site: str) -> Command:
    spec = handler_of(function)
    arguments = (place, spec.module, spec.callable, str(spec.per_instance), str(function.output_limit_bytes), site)
    return Command(
        argv=("python3", "-c", _SOURCE, *arguments),
        env={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"},
        timeout_s=math.inf,
    )


def _request(execution: Execution) -> Mapping[str, object]:
    action = execution.action
    context = {
        "function": action.function,
        "trajectory": action.trajectory,
        "task": action.task,
        "attempt": action.attempt,
        "timeout_s": action.timeout_s,
        "traceparent": execution.call.traceparent,
        "tracestate": execution.call.tracestate,
    }
    return {"id": action.id, "event": execution.call.input, "context": context}


def _frame(message: Mapping[str, object]) -> bytes:
    body = runtime.dumps(message)
    return worker.HEADER.pack(len(body)) + body


_REASONS: Mapping[str, Reason] = {"limit": Reason.OUTPUT_LIMIT, "memory": Reason.OUT_OF_MEMORY}


def _result(answer: Mapping[str, Any], log: LogSink) -> Result:
    usage = {str(name): float(value) for name, value in answer.get("usage", {}).items()}
    error = answer.get("error")
    if error is None:
        return Result(value=answer.get("result"), usage=usage)
    if error["traceback"]:
        log.write("stderr", error["traceback"])
    named = f"{error['type']}: {error['message']}" if error["kind"] == "raised" else str(error["message"])
    detail = {"type": error["type"], "traceback": error["traceback"]}
    reason = _REASONS.get(error["kind"], Reason.HANDLER_ERROR)
    raise ActionFailed(reason, named, component=COMPONENT, detail=detail, usage=usage)


_LOG = structlog.get_logger(__name__)

_Spawn = Callable[[Coroutine[Any, Any, None]], object]
_Start = Callable[[FunctionSpec], Awaitable[Instance]]


class HandlerRuntime(Runtime):
    """Keeps a pool of warm instances for each function, and executes each action in one of them.

    An instance holds ``per_instance`` invocations at a time; beyond ``instances_max`` actions wait here (in the
    order of arrival, as overhead). Instances idle for ``idle_s`` are ended down to ``instances_min``. A new
    revision of a function gets a pool of its own, and the old one ends with its last action.
    """

    def __init__(self, provider: Provider, settings: HandlerSettings | None = None) -> None:
        self._provider = provider
        self._settings = settings or HandlerSettings()
        self._pools: dict[tuple[str, str], _Pool] = {}
        self._chores = Chores(lambda error: _LOG.warning("handler.instance_failed", error=repr(error)))
        #: Ids of the instances' sandboxes, from their making to their end: no orphans.
        self.sandboxes: set[str] = set()
        #: Told, while one is prepared, the function and what is done for it; it must not wait or raise.
        self.on_progress: Callable[[str, str], None] = lambda function, message: None
        #: The layer of each pool's function, which none may remove.
        self._in_use: dict[tuple[str, str], Path] = {}
        self._layers = LayerStore(
            provider,
            self._settings.requirements,
            self._settings.layers_dir,
            self._settings.secrets,
            self.sandboxes,
            lambda: self._in_use.values(),
        )

    async def prepare(self, function: FunctionSpec) -> None:
        """Import the handler once and warm ``instances_min`` instances; InvalidConfig with its traceback."""
        spec = handler_of(function)
        await self._provider.check(self._settings.sandbox_of(function))
        if not spec.directory.is_dir():
            raise InvalidConfig(f"handler directory {spec.directory} does not exist", component=COMPONENT)
        pool = self._pool(function)
        await self._settings.copies.of(function)
        await self._layer(function)
        try:
            await pool.warm(max(1, spec.instances_min))
        except ImportFailed as error:
            trace = str(error.detail.get("traceback", ""))
            message = f"{error.message}\n{trace}".rstrip()
            self._settings.copies.forget(function)  # it may be mended before the next try
            raise InvalidConfig(message, component=COMPONENT, detail=error.detail) from error

    async def execute(self, execution: Execution) -> Result:
        pool = self._pool(execution.call.function)
        if pool.awaits_first:
            self._retire_older(pool)
        try:
            instance = await pool.acquire(execution.lease.cores)
        except CodedError as error:
            raise unmade(error) from error
        try:
            return await instance.invoke(execution)
        finally:
            pool.release(instance)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()
        while self._chores.tasks:
            await asyncio.gather(*self._chores.tasks, return_exceptions=True)

    def instances(self) -> dict[str, int]:
        """Return how many instances live, by function, all revisions together."""
        counts: dict[str, int] = {}
        for (name, _), pool in self._pools.items():
            counts[name] = counts.get(name, 0) + len(pool.instances)
        return counts

    def directories(self) -> set[Path]:
        """Return the directories of the functions that have instances, or may."""
        return {handler_of(pool.function).directory for pool in self._pools.values() if not pool.over}

    def _pool(self, function: FunctionSpec) -> _Pool:
        key = (function.name, function.revision)
        pool = self._pools.get(key)
        if pool is None:
            self._pools = {known: held for known, held in self._pools.items() if not held.over}
            self._in_use = {known: held for known, held in self._in_use.items() if known in (*self._pools, key)}
            pool = self._pools[key] = _Pool(function, self._start, self._settings, self._chores.begin)
        return pool

    def _retire_older(self, serving: _Pool) -> None:
        """A revision is served from its first action on, and no sooner: what was prepared with it may have failed."""
        serving.first()
        for pool in self._pools.values():
            if pool.function.name == serving.function.name and pool.prepared < serving.prepared:
                pool.retire()

    async def _start(self, function: FunctionSpec) -> Instance:
        directory = await self._settings.copies.of(function)
        if not await asyncio.to_thread(directory.is_dir):  # engines would mount an empty one
            message = f"handler directory {directory} does not exist (any more)"
            raise ActionFailed(Reason.ENVIRONMENT_LOST, message, component=COMPONENT)
        layer = await self._layer(function)
        return await Instance.start(self._provider, function, self._settings, self.sandboxes, directory, layer)

    async def _layer(self, function: FunctionSpec) -> Path | None:
        """Return the directory of what the function requires, which is there from its preparation on."""
        spec = handler_of(function)
        if not spec.requirements:
            return None

        def on_line(line: str) -> None:
            self.on_progress(function.name, f"installing requirements: {line}")

        sandbox = self._settings.sandbox_of(function)
        layer = await self._layers.layer(spec.requirements, sandbox, on_line)
        self._in_use[function.name, function.revision] = layer
        return layer


class _Pool:
    """The instances of one revision of one function, and the actions that wait for a slot in them."""

    def __init__(self, function: FunctionSpec, start: _Start, settings: HandlerSettings, spawn: _Spawn) -> None:
        self.instances: list[Instance] = []
        self.function = function
        #: When it was last prepared, on the clock of `time.monotonic`, and whether it has served nothing since then.
        self.prepared, self.awaits_first = 0.0, False
        self._start_instance = start
        self._spec = handler_of(function)
        self._settings = settings
        self._spawn = spawn
        self._starting = 0
        self._waiting: deque[asyncio.Future[Instance]] = deque()
        self._retired = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = 0.0

    @property
    def over(self) -> bool:
        """Whether it is retired and empty."""
        return self._retired and not self.instances and not self._starting and not self._waiting

    async def acquire(self, cores: tuple[int, ...]) -> Instance:
        """Return a living instance with a slot: one on these cores if there is one, else the one used last."""
        free = [instance for instance in self.instances if instance.free]
        if free and not self._waiting:
            instance = max(free, key=lambda one: (bool(cores) and one.cores == cores, one.idle_since_s))
            instance.claimed += 1
            return instance
        turn: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grow()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release(turn.result())
            raise

    def release(self, instance: Instance) -> None:
        """Give the slot to the action that waits longest; end a dead or superfluous instance."""
        instance.claimed -= 1
        instance.idle_since_s = time.monotonic()
        if not instance.alive:
            self._end(instance)
            self._grow(0 if self._retired else self._spec.instances_min)
        self._serve()
        self._tidy_within(0.0 if self._retired else min(self._settings.rest_s, self._spec.idle_s))

    async def warm(self, count: int) -> None:
        """Start ``count`` instances unless they are there or a newer revision serves; raises what a start raises."""
        self._retired = False
        self.prepared, self.awaits_first = time.monotonic(), True
        while not self._retired and len(self.instances) < min(count, self._spec.instances_max):
            self._starting += 1
            await self._add()

    def first(self) -> None:
        """It serves its first action since it was prepared."""
        self.awaits_first = self._retired = False

    def retire(self) -> None:
        self._retired = True
        self._tidy()

    async def close(self) -> None:
        self._retired = self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting:
            self._refuse(ActionFailed(Reason.ENVIRONMENT_LOST, "the handler runtime closes", component=COMPONENT))
        ending, self.instances = self.instances, []
        for failure in await asyncio.gather(*(instance.close() for instance in ending), return_exceptions=True):
            if failure is not None:
                _LOG.warning("handler.instance_not_removed", error=repr(failure))

    def _serve(self) -> None:
        for instance in self.instances:
            while self._waiting and instance.free:
                turn = self._waiting.popleft()
                if not turn.done():
                    instance.claimed += 1
                    turn.set_result(instance)

    def _grow(self, minimum: int = 0) -> None:
        """Start an instance for each slotful of waiting actions, and up to ``minimum``, within the bound."""
        slotfuls = -(-len(self._waiting) // self._spec.per_instance)
        wanted = max(slotfuls, minimum - len(self.instances))
        while self._starting < wanted and len(self.instances) + self._starting < self._spec.instances_max:
            self._starting += 1
            self._spawn(self._start())

    async def _start(self) -> None:
        try:
            await self._add()
        except Exception as error:
            if not self._waiting:
                raise
            self._refuse(error)
            self._grow()

    async def _add(self) -> None:
        try:
            instance = await self._start_instance(self.function)
        finally:
            self._starting -= 1
        if self._closed:
            await instance.close()
            return
        self.instances.append(instance)
        instance.on_death = self._bury
        self._serve()
        self._tidy()

    def _bury(self) -> None:
        """Remove an instance that died idle, and let those that wait have another in its place."""
        self._tidy()
        self._grow()

    def _refuse(self, error: Exception) -> None:
        """Tell the action that waits longest that there will be no instance for it."""
        turn = self._waiting.popleft()
        if not turn.done():
            turn.set_exception(error)

    def _tidy(self) -> None:
        """Let idle instances rest, end those that idle too long, and come back for the next of these moments."""
        now_s = time.monotonic()
        keep, limit_s = (0, 0.0) if self._retired else (self._spec.instances_min, self._spec.idle_s)
        next_s = math.inf
        for instance in [one for one in self.instances if one.claimed == 0]:
            idle_s = now_s - instance.idle_since_s
            superfluous = len(self.instances) > keep
            if not instance.alive or (superfluous and idle_s >= limit_s):
                self._end(instance)
                continue
            if idle_s < self._settings.rest_s:
                next_s = min(next_s, self._settings.rest_s - idle_s)
            elif not instance.resting:
                self._spawn(instance.rest())
            if superfluous:
                next_s = min(next_s, limit_s - idle_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_s < math.inf:
            self._tidy_within(next_s)

    def _tidy_within(self, seconds: float) -> None:
        """Look again by then, unless that is to be done sooner."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + seconds
        if self._timer is None or self._rings_s > at_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._rings_s = loop.call_at(at_s, self._tidy), at_s

    def _end(self, instance: Instance) -> None:
        if instance in self.instances:
            self.instances.remove(instance)
            self._spawn(instance.close())


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConcurrency:
    """What one warm instance takes at a time."""

    per_instance: Annotated[int, Setting("actions that one instance executes at once", ge=1)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many warm instances there are."""

    min: Annotated[int, Setting("always kept, on every machine that can run it", ge=0)] = 0
    max: Annotated[int, Setting("most at once on one machine", ge=1)] = 8
    idle_s: Annotated[float, Setting("an instance above min ends after this time")] = 300.0

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerKeys:
    """The keys of a handler function."""

    handler: Annotated[
        str,
        Setting(
            "module:callable beside the YAML file, called as callable(event, context)",
            pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
            words="module:callable, for example reward:score",
        ),
    ]
    requirements: Annotated[
        tuple[str, ...],
        Setting(
            "packages that it imports, each as pip takes it (name==1.2, with --hash=sha256:... if wanted), or -r FILE "
            "for a file beside the YAML; installed once, from where sandbox.requirements says"
        ),
    ] = ()
    concurrency: Annotated[InstanceConcurrency, Setting("actions of one instance")] = InstanceConcurrency()
    scale: Annotated[Scale, Setting("warm instances")] = Scale()


def _spec(section: HandlerKeys, place: DeclarationSite) -> Mapping[str, object]:
    module, _, name = section.handler.partition(":")
    if place.look and (problem := handler_problem(place.directory, module, name)) is not None:
        place.refuse(("handler",), problem)
    try:
        requirements = requirement_lines(section.requirements, place.directory, place.look)
    except ValueError as error:
        place.refuse(("requirements",), str(error))
        requirements = ()
    return {
        "handler": HandlerSpec(
            module=module,
            callable=name,
            directory=place.directory,
            per_instance=section.concurrency.per_instance,
            instances_min=section.scale.min,
            instances_max=section.scale.max,
            idle_s=section.scale.idle_s,
            requirements=requirements,
        )
    }


def _source(function: FunctionSpec) -> str:
    assert function.handler is not None, f"{function.name} has no handler"
    return sources_digest(function.handler.directory)


def _make(deps: RuntimeDeps) -> Runtime:
    settings = HandlerSettings(
        sandbox=deps.sandbox,
        secrets=deps.secrets,
        requirements=deps.requirements,
        layers_dir=deps.layers_dir,
        copies=deps.copies,
    )
    runtime = HandlerRuntime(deps.provider, settings)
    deps.environments.exclude(lambda: runtime.sandboxes)
    return runtime


HANDLER = Kind(
    name="handler",
    meaning="a Python function, imported once per warm instance",
    make=_make,
    section=HandlerKeys,
    sandbox="the environment of an instance",
    spec=_spec,
    source=_source,
    input_schema=lambda function: None,
    result_schema=lambda function: None,
    shown={"": (None, None)},
)
