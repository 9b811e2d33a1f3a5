"""A real daemon whose actions take the durations of a workload, and nothing else.

``python -m bench.recorded_node HOST PORT FINGERPRINT NAME TICKET DIRECTORY CORES``
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import uvloop

from manager.action import Action, Amdahl, Lease
from manager.config import NodeSpec
from manager.function import FunctionSpec
from manager.simulation.simulator import Physics
from runtimes.executor import LocalExecutor
from runtimes.node.daemon import DaemonSettings, NodeDaemon, NodeRuntimes
from runtimes.runtime import Execution, Result, Runtime
from runtimes.sandbox.command import ResumableCommand
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import SessionTable

PHYSICS = Physics()


@dataclass(slots=True)
class TimedWork:
    """Work of so many seconds on one core, which goes on at the speed of the cores that it holds now."""

    work_s: float
    #: None for work that uses one core.
    elasticity: Amdahl | None
    units: int
    workers: int
    resized: asyncio.Event = field(default_factory=asyncio.Event)

    def duration_s(self) -> float:
        """Seconds of the whole with the present units, as in `manager.simulation`."""
        if self.elasticity is None:
            return self.work_s
        alone_s = self.work_s / (self.elasticity.efficiency(self.units) * self.units)
        return alone_s + PHYSICS.worker_cost_s * self.workers / self.units

    async def run(self) -> None:
        """Wait for its end; each resize stops the work for a moment."""
        loop, done, since_s = asyncio.get_running_loop(), 0.0, asyncio.get_running_loop().time()
        while True:
            duration_s = self.duration_s()
            try:
                async with asyncio.timeout_at(since_s + (1.0 - done) * duration_s):
                    await self.resized.wait()
            except TimeoutError:
                return
            self.resized.clear()
            done += max(0.0, loop.time() - since_s) / duration_s
            since_s = loop.time() + PHYSICS.resize_cost_s


class RecordedRuntime(Runtime):
    """Executes ``{"env": {"WORK_S": seconds on one core, "SERIAL": serial fraction}}``; without SERIAL on one core."""

    def __init__(self) -> None:
        self._running: dict[str, TimedWork] = {}

    async def execute(self, execution: Execution) -> Result:
        await execution.call.hooks.commit_begin()
        wanted = execution.call.input["env"]
        assert isinstance(wanted, dict)
        grant = execution.lease.grants["cpu"]
        elasticity = Amdahl(float(wanted["SERIAL"])) if "SERIAL" in wanted else None
        work = TimedWork(float(wanted["WORK_S"]), elasticity, grant.units, max(grant.units, grant.workers))
        self._running[execution.action.id] = work
        execution.begin()
        try:
            await work.run()
        finally:
            del self._running[execution.action.id]
        execution.end()
        return Result(value={"exit_code": 0, "stdout": ""})

    async def resize(self, action: Action, lease: Lease) -> None:
        work = self._running.get(action.id)
        if work is not None:
            work.units = lease.grants["cpu"].units
            work.resized.set()


class NoEnvironments(Environments):
    """The environments of a machine that has none."""

    def __init__(self) -> None:
        self.sessions = SessionTable()

    async def start(self, trajectories: Collection[str] | None = None) -> list[str]:
        return []

    def resumable(self) -> dict[str, ResumableCommand]:
        return {}

    async def end_unclaimed(self, taken: Collection[str]) -> None: ...

    def get(self, trajectory: str) -> Sandbox | None:
        return None

    def list(self) -> list[dict[str, object]]:
        return []

    def acknowledge(self, trajectory: str | None, claims: str) -> None: ...

    def keep(self) -> None: ...

    async def leave(self, claims: str) -> bool:
        return False


def serve_node(runtime: Runtime) -> None:
    """Join as the command line says, and serve with this runtime for every function until killed."""
    host, port, fingerprint, name, ticket, directory, cores = sys.argv[1:]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

    async def check(function: FunctionSpec) -> None: ...

    async def close() -> None: ...

    async def run() -> None:
        settings = DaemonSettings(
            host=host,
            port=int(port),
            fingerprint=fingerprint,
            ticket=ticket,
            state_dir=Path(directory),
            spec=NodeSpec(name=name, numa=(tuple(range(int(cores))),), memory_bytes=2**41),
        )
        executor = LocalExecutor(dict.fromkeys(("exec", "handler", "pytest"), runtime))
        parts = NodeRuntimes(executor=executor, environments=NoEnvironments(), prepare=check, close=close)
        await NodeDaemon(settings, parts).run()

    uvloop.run(run())


if __name__ == "__main__":
    serve_node(RecordedRuntime())
