"""The handler runtime: ``def score(event, context)``, imported once in each warm instance."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from manager.action import Action, Lease
from manager.errors import ActionFailed, CodedError, InvalidConfig, Reason
from manager.function import FunctionSpec
from runtimes.runtime import Execution, Result
from runtimes.sandbox.handler.instance import HandlerSettings, ImportFailed, Instance, handler_of
from runtimes.sandbox.handler.layers import LayerStore
from runtimes.sandbox.handler.sources import COMPONENT
from runtimes.sandbox.runner.protocol import unmade
from runtimes.sandbox.sandbox import Provider

_LOG = structlog.get_logger(__name__)

_Spawn = Callable[[Coroutine[Any, Any, None]], None]
_Start = Callable[[FunctionSpec], Awaitable[Instance]]


class HandlerRuntime:
    """Keeps a pool of warm instances for each function, and executes each action in one of them.

    An instance holds ``per_instance`` invocations at a time; beyond ``instances_max`` actions wait here (in the
    order of arrival, as overhead). Instances idle for ``idle_s`` are ended down to ``instances_min``. A new
    revision of a function gets a pool of its own, and the old one ends with its last action.
    """

    def __init__(self, provider: Provider, settings: HandlerSettings | None = None) -> None:
        self._provider = provider
        self._settings = settings or HandlerSettings()
        self._pools: dict[tuple[str, str], _Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Ids of the instances' sandboxes, from their making to their end: no orphans.
        self.sandboxes: set[str] = set()
        #: Told, while one is prepared, the function and what is done for it; it must not wait or raise.
        self.on_progress: Callable[[str, str], None] = lambda function, told: None
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

    async def resize(self, action: Action, lease: Lease) -> None:
        """Do nothing: a handler keeps the cores that it started with."""

    async def end_trajectory(self, trajectory: str) -> None:
        """Do nothing: instances belong to no trajectory."""

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

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
            pool = self._pools[key] = _Pool(function, self._start, self._settings, self._spawn)
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
            told = f"handler directory {directory} does not exist (any more)"
            raise ActionFailed(Reason.ENVIRONMENT_LOST, told, component=COMPONENT)
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

    def _spawn(self, effect: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(effect)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("handler.instance_failed", error=repr(error))


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
        self._tidy()

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
        self._timer = None if next_s == math.inf else asyncio.get_running_loop().call_later(next_s, self._tidy)

    def _end(self, instance: Instance) -> None:
        if instance in self.instances:
            self.instances.remove(instance)
            self._spawn(instance.close())
