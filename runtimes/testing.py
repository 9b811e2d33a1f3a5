"""A runtime that does what a script says: for our own tests, and for users' tests of their own functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from manager.action import Action, Chunk, Lease
from manager.errors import ActionFailed, Reason
from manager.function import FunctionSpec
from runtimes.runtime import Execution, Result, Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptStep:
    """What one action does."""

    #: Seconds before the work begins, and of the work itself.
    overhead_s: float = 0.0
    duration_s: float = 0.0
    result: object = None
    usage: Mapping[str, float] = field(default_factory=dict)
    #: Fail with this reason in place of the result.
    reason: Reason | None = None
    message: str = "as scripted"
    #: Raise this, as a runtime with a bug would.
    error: Exception | None = None
    #: Never end by itself.
    hangs: bool = False
    #: Not even when it is killed (until `ScriptedRuntime.close`).
    ignores_kill: bool = False
    #: Wait until `ScriptedRuntime.finish` is called for the action.
    held: bool = False
    log: str = ""


#: Chooses the step of an execution.
Script = Callable[[Execution], ScriptStep]


class ScriptedRuntime(Runtime):
    """Executes a script and remembers what it was asked. Waits on the event loop's clock."""

    def __init__(self, script: Script | ScriptStep | None = None) -> None:
        step = script if isinstance(script, ScriptStep) else ScriptStep()
        self._script: Script = script if callable(script) else lambda _: step
        self._gates: dict[str, asyncio.Event] = {}
        self._beginnings: dict[str, asyncio.Event] = {}
        self._copies: dict[str, asyncio.Event] = {}
        self._closed = asyncio.Event()
        #: Whether there is room for copies of services.
        self.has_room = True
        #: What happened, in order: (verb, id of the action or trajectory, or name of the function or service).
        self.seen: list[tuple[str, str]] = []
        self.running: dict[str, Execution] = {}
        self.leases: dict[str, list[Lease]] = {}

    async def prepare(self, function: FunctionSpec) -> None:
        self.seen.append(("prepare", function.name))

    async def execute(self, execution: Execution) -> Result:
        """Follow the script; raises ActionFailed where it says so."""
        action_id = execution.action.id
        self.seen.append(("execute", action_id))
        self.running[action_id] = execution
        self.leases.setdefault(action_id, []).append(execution.lease)
        step = self._script(execution)
        try:
            return await self._follow(step, execution)
        except asyncio.CancelledError:
            self.seen.append(("kill", action_id))
            if step.ignores_kill:
                await self._closed.wait()
            raise
        finally:
            del self.running[action_id]
            self.seen.append(("end", action_id))

    async def replicate(self, function: FunctionSpec, service: str, chunk: Chunk) -> bool:
        """Say whether there is room, as scripted by ``has_room``."""
        self.seen.append(("replicate", service))
        self._asking(service).set()
        return self.has_room

    async def resize(self, action: Action, lease: Lease) -> None:
        self.seen.append(("resize", action.id))
        self.leases.setdefault(action.id, []).append(lease)

    async def end_trajectory(self, trajectory: str) -> None:
        self.seen.append(("end_trajectory", trajectory))

    async def close(self) -> None:
        self._closed.set()

    async def begun(self, action_id: str) -> None:
        """Wait until an action's own work has begun."""
        await self._begun(action_id).wait()

    async def asked_for_copy(self, service: str) -> None:
        """Wait until a copy of a service was asked for."""
        await self._asking(service).wait()

    def finish(self, action_id: str) -> None:
        """Let a held action end."""
        self._gate(action_id).set()

    async def _follow(self, step: ScriptStep, execution: Execution) -> Result:
        if step.overhead_s:
            await asyncio.sleep(step.overhead_s)
        execution.begin()
        self._begun(execution.action.id).set()
        if step.log:
            execution.call.log.write("stdout", step.log)
        if step.held:
            await self._gate(execution.action.id).wait()
        if step.hangs:
            await self._closed.wait()
        if step.duration_s:
            await asyncio.sleep(step.duration_s)
        execution.end()
        if step.error is not None:
            raise step.error
        if step.reason is not None:
            raise ActionFailed(step.reason, step.message, component="fake", result=step.result)
        return Result(value=step.result, usage=step.usage)

    def _gate(self, action_id: str) -> asyncio.Event:
        return self._gates.setdefault(action_id, asyncio.Event())

    def _begun(self, action_id: str) -> asyncio.Event:
        return self._beginnings.setdefault(action_id, asyncio.Event())

    def _asking(self, service: str) -> asyncio.Event:
        return self._copies.setdefault(service, asyncio.Event())
