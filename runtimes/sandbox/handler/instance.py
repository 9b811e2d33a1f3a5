"""A warm instance of a handler: a sandbox, the worker in it, and the invocations under way."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from manager.errors import ActionFailed, CodedError, Reason
from manager.executor import LogSink
from manager.function import Background, FunctionSpec, HandlerSpec, SandboxSpec
from runtimes import exact_json
from runtimes.api.secrets import Secrets
from runtimes.runtime import Execution, Result
from runtimes.sandbox.command import Command, CommandResult, memory_ended
from runtimes.sandbox.environments import PURPOSE, EnvironmentSettings
from runtimes.sandbox.handler import worker
from runtimes.sandbox.handler.copies import HandlerCopies
from runtimes.sandbox.handler.requirements import RequirementSettings
from runtimes.sandbox.handler.sources import COMPONENT
from runtimes.sandbox.runner.conversation import SandboxProcess
from runtimes.sandbox.runner.runner import FrameDecoder, ProtocolError
from runtimes.sandbox.sandbox import Provider, Sandbox

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
    python: str = "python3"
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
            process = await sandbox.spawn(_command(function, settings, place, site))
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
                        self._on_message(cast(Mapping[str, Any], exact_json.loads(frame)))
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
            told = memory_ended("the handler's process", ended.peak_memory_bytes)
            return ActionFailed(Reason.OUT_OF_MEMORY, told, component=COMPONENT, detail=detail)
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
    told = f"its instance ended under {calls} calls (handler.per_instance), whichever of them ended it: {death.message}"
    return ActionFailed(Reason.ENVIRONMENT_LOST, told, component=COMPONENT, detail=death.detail)


def handler_of(function: FunctionSpec) -> HandlerSpec:
    assert function.handler is not None, f"function {function.name} has no handler"
    return function.handler


def _command(function: FunctionSpec, settings: HandlerSettings, place: str, site: str) -> Command:
    spec = handler_of(function)
    arguments = (place, spec.module, spec.callable, str(spec.per_instance), str(function.output_limit_bytes), site)
    return Command(
        argv=(settings.python, "-c", _SOURCE, *arguments),
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
    body = exact_json.dumps(message)
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
