"""Preparation: functions are made ready behind the door; one that cannot be is unavailable, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, NamedTuple

import structlog

from manager.errors import CapacityExceeded, CodedError, FunctionUnavailable, InvalidConfig
from manager.function import FunctionSpec
from tangram.types import backoff_s

#: Functions whose preparation runs at once.
CONCURRENCY = 4
#: Seconds until one that failed is prepared again, doubled each time, and at most.
AGAIN_S, AGAIN_MAX_S = 1.0, 60.0
#: Tries that must have failed before calls are refused: a disturbance of some seconds is waited out.
FAILURES_MIN = 4

#: Checks that a function can run here and warms it up: `runtimes.runtime.Runtime.prepare` of its runtime.
Prepare = Callable[[FunctionSpec], Awaitable[None]]


class Readiness(NamedTuple):
    """Whether a function's actions may start, and if it is unavailable, why."""

    status: Literal["preparing", "ready", "unavailable"]
    problem: str = ""
    #: Tries that have failed one after the other.
    failures: int = 0
    #: When it is tried again, on the event loop's clock; 0 while a try runs, or waits for room (a node that joins).
    again_s: float = 0.0
    #: What is missing stands in its configuration: a call that waits or asks again changes nothing.
    configured: bool = False

    def check(self, function: FunctionSpec, now_s: float) -> None:
        """Raise FunctionUnavailable where no try that runs or is due may make it ready in time for a call.

        In time is within the function's ``queue_timeout_s``. After ``FAILURES_MIN`` failures, or one of its
        configuration, what is missing is taken to be missing until a try says otherwise, and a call waits only for a
        try that runs. A mistake of the configuration has no time after which to ask again.
        """
        left_s = self.again_s - now_s
        if self.status != "unavailable" or left_s <= 0.0:
            return
        if self.configured or self.failures >= FAILURES_MIN or left_s > function.queue_timeout_s:
            raise FunctionUnavailable(
                f"function {function.name} is unavailable: {self.problem}; it is tried again in {left_s:.0f} s, and "
                "when a configuration is applied",
                component="admission",
                retry_after_s=None if self.configured else left_s,
            )


class Preparation:
    """How ready each function is. Use from one event loop."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._gate = asyncio.Semaphore(CONCURRENCY)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, asyncio.Event] = {}
        #: What the next try of one does in place of preparing it.
        self._instead: dict[str, Prepare] = {}
        self._states: dict[str, Readiness] = {}
        self._log = structlog.get_logger("gateway.functions")
        #: Called when one has become ready, by name; they must not wait or raise.
        self.on_ready: list[Callable[[str], None]] = []

    def of(self, name: str) -> Readiness:
        """How ready it is; one that is not known here is as ready as it will be."""
        return self._states.get(name, Readiness("ready"))

    def expect(self, functions: Iterable[FunctionSpec]) -> None:
        """They will be prepared: until `begin` they wait."""
        self._states |= {function.name: Readiness("preparing") for function in functions}

    def begin(self, functions: Iterable[FunctionSpec]) -> None:
        """Prepare them in the background, again and again where it fails."""
        for function in functions:
            self._states[function.name] = Readiness("preparing")
            self._again[function.name] = asyncio.Event()
            self._tasks[function.name] = asyncio.get_running_loop().create_task(self._until_ready(function))

    def again(self, instead: Prepare | None = None) -> None:
        """Try those again at once that could not be made ready: something has changed.

        ``instead`` is all that the try does, where what has changed is known; not if a whole one is due as well.
        """
        for name, again in self._again.items():
            if instead is None:
                self._instead.pop(name, None)
            elif not again.is_set():
                self._instead[name] = instead
            again.set()

    def note(self, name: str, told: str) -> None:
        """Tell what is done for one that is being prepared."""
        if self._states.get(name, Readiness("ready")).status == "preparing":
            self._states[name] = Readiness("preparing", told)

    async def one(self, function: FunctionSpec, prepare: Prepare | None = None) -> None:
        """Prepare one now; raises CodedError, and changes nothing that is told of it."""
        async with self._gate:
            await (prepare or self._prepare)(function)

    def switched(self, ready: Iterable[str], known: Iterable[str]) -> None:
        """These are ready in their new form, those that are ``known`` no more are forgotten, the others tried again."""
        known = set(known)
        for name in {*ready, *(self._states.keys() - known)}:
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()
            self._states.pop(name, None)
            self._tell(name)
        self.again()

    async def close(self) -> None:
        """Stop preparing."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_ready(self, function: FunctionSpec) -> None:
        name, attempt, failures = function.name, 1, 0
        while (error := await self._error(function, self._instead.pop(name, None))) is not None:
            problem = error.message
            room = isinstance(error, CapacityExceeded)  # nothing is missing for good: a node that joins makes it
            if self._states[name].problem != problem:
                say = self._log.info if room else self._log.error
                say("a function waits for a node" if room else "a function is unavailable", function=name, why=problem)
            again, loop = self._again[name], asyncio.get_running_loop()
            again_s = loop.time() + backoff_s(attempt, AGAIN_S, AGAIN_MAX_S)
            failures = 0 if room else failures + 1
            configured = isinstance(error, InvalidConfig)
            self._states[name] = Readiness("unavailable", problem, failures, 0.0 if room else again_s, configured)
            timer = loop.call_at(again_s, again.set)
            await again.wait()
            timer.cancel()
            again.clear()  # before the try: what changes meanwhile is not missed
            self._states[name] = Readiness("unavailable", problem, failures)
            attempt += 1
        self._tasks.pop(name, None)
        self._states[name] = Readiness("ready")
        self._tell(name)

    async def _error(self, function: FunctionSpec, instead: Prepare | None) -> CodedError | None:
        try:
            await self.one(function, instead)
        except CodedError as error:
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001  # a bug in one runtime keeps no other function from being served
            self._log.exception("a preparation failed", function=function.name)
            return CodedError(f"its preparation failed: {error!r}", component="functions")
        return None

    def _tell(self, name: str) -> None:
        for on_ready in self.on_ready:
            on_ready(name)
