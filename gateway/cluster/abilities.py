"""Abilities: which machine can run which function, as each machine says itself when it is asked to prepare it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from manager.errors import CapacityExceeded, CodedError
from manager.function import FunctionSpec

#: Checks that a function can run on a machine, and warms it up; raises CodedError.
PrepareThere = Callable[[FunctionSpec], Awaitable[None]]
logger = structlog.get_logger("gateway.cluster")
#: Functions that are prepared on one machine at once.
CONCURRENCY = 8


class Abilities:
    """What each machine is able to run. Use from one event loop."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        """``changed`` is called with the name of a machine that is able to run another set of functions than before."""
        self._changed = changed
        self._machines: dict[str, PrepareThere] = {}
        self._able: dict[str, set[str]] = {}
        #: By machine and function, why not.
        self._unable: dict[str, dict[str, CodedError]] = {}

    def able(self, machine: str) -> frozenset[str]:
        return frozenset(self._able.get(machine, ()))

    def unable(self, machine: str) -> Mapping[str, str]:
        """Return the functions that a machine cannot run, and why."""
        return {function: problem.message for function, problem in self._unable.get(machine, {}).items()}

    def join(self, machine: str, prepare: PrepareThere) -> None:
        """Ask this machine too from now on."""
        self._machines[machine] = prepare
        self._able.setdefault(machine, set())

    def leave(self, machine: str) -> None:
        """Ask it no more; what it was able to run stands until it is asked again."""
        self._machines.pop(machine, None)

    def forget(self, machine: str) -> None:
        """It is gone for good."""
        self.leave(machine)
        self._able.pop(machine, None)
        self._unable.pop(machine, None)

    async def prepare(self, function: FunctionSpec) -> None:
        """Have every machine prepare a function; it holds when one can. Raises what the first one says that cannot."""
        machines = dict(self._machines)
        if not machines:
            raise CapacityExceeded("no node has joined yet that could run it (docs/CLUSTER.md)", component="cluster")
        problems = await asyncio.gather(*[self.prepare_on(machine, function) for machine in machines])
        errors = [problem for problem in problems if problem is not None]
        if len(errors) == len(machines):
            raise errors[0]

    def require_on(self, machine: str, function: FunctionSpec) -> None:
        """Raise what the machine said when it was asked last, unless it is able to run the function."""
        if function.name not in self._able.get(machine, ()):
            told = self._unable.get(machine, {}).get(function.name)
            raise told or CapacityExceeded(f"node {machine} has not said yet that it can", component="cluster")

    async def prepare_all(self, machine: str, functions: tuple[FunctionSpec, ...]) -> None:
        """Have one machine prepare these, a few at once; what it cannot run is noted."""
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(function: FunctionSpec) -> None:
            async with gate:
                await self.prepare_on(machine, function)

        async with asyncio.TaskGroup() as group:
            for function in functions:
                group.create_task(one(function))

    async def prepare_on(self, machine: str, function: FunctionSpec) -> CodedError | None:
        """Have one machine prepare a function; return why it cannot run it."""
        prepare = self._machines.get(machine)
        if prepare is None:
            return CapacityExceeded(f"node {machine} is not there", component="cluster")
        problem: CodedError | None = None
        try:
            await prepare(function)
        except CodedError as error:
            problem = error
        except Exception as error:  # the others must not lose their machine for it
            logger.exception("a function could not be prepared", node=machine, function=function.name)
            problem = CodedError(f"a fault of the gateway: {error!r}", component="cluster")
        if self._machines.get(machine) is not prepare:
            return problem  # it has gone meanwhile, and was asked again since
        able, unable = self._able.setdefault(machine, set()), self._unable.setdefault(machine, {})
        before = function.name in able
        if problem is None:
            able.add(function.name)
            unable.pop(function.name, None)
        else:
            able.discard(function.name)
            unable[function.name] = problem.with_traceback(None)
        if before != (problem is None):
            self._changed(machine)
        return problem
