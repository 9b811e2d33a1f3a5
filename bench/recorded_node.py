"""A real daemon whose actions take the durations of a workload: the words of `bench.cluster.stub_node`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from bench.cluster.stub_node import serve_node
from manager.action import Action, Amdahl, Lease
from manager.simulation.simulator import Physics
from runtimes.runtime import Execution, Result, Runtime

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
        """Take the time; each resize stops the work for a moment."""
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


if __name__ == "__main__":
    serve_node(RecordedRuntime())
