"""A gateway with sixteen cores, a quota and a rollout on it, for whoever looks at the page."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from gateway.config.load import GatewayConfig
from gateway.config.schema import CpuConfig, NodeConfig
from manager.action import UnitSet
from manager.config import TaskSpec
from manager.errors import Reason
from manager.function import FunctionSpec
from manager.resources.pools import QuotaSpec
from runtimes.runtime import Execution
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving

#: Seconds of an action by function, and the share that fails and why.
SECONDS: Mapping[str, float] = {
    "shell": 0.4,
    "pytest_reward": 2.5,
    "math_reward": 0.15,
    "web_search": 0.3,
    "judge": 0.8,
}
FAILS: Mapping[str, tuple[float, Reason]] = {
    "pytest_reward": (0.08, Reason.TIMEOUT),
    "shell": (0.01, Reason.OUT_OF_MEMORY),
    "web_search": (0.05, Reason.UPSTREAM),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "What bash runs"},
        "timeout": {"type": "number", "description": "Seconds"},
        "env": {"type": "object"},
        "quiet": {"type": "boolean"},
        "shell": {"enum": ["bash", "sh"]},
    },
    "required": ["command"],
}
FUNCTIONS = {
    "shell": function("shell", input_schema=SCHEMA, description="A command in the trajectory's sandbox"),
    "pytest_reward": function("pytest_reward", cost={"cpu": UnitSet.fixed(2)}),
    "math_reward": function("math_reward"),
    "web_search": function("web_search", cost={"search": UnitSet.fixed(1)}),
    "judge": function("judge", cost={"cpu": UnitSet.fixed(1)}),
}


@dataclass(frozen=True, slots=True)
class LoadedBench(GatewayBench):
    """Sixteen cores that are not there: what runs on them only waits."""

    def config(self) -> GatewayConfig:
        topology = self.directory / "topology.json"
        cores = ", ".join(str(each) for each in range(16))
        topology.write_text(f'{{"numa": [[{cores}]], "memory_bytes": {64 * 2**30}}}')
        node = NodeConfig(name="node-a", cpu=CpuConfig(topology=topology))
        # ``super()`` does not know a class with slots.
        config = replace(GatewayBench.config(self), node=node)
        return replace(config, functions={**config.functions, **FUNCTIONS, **self.functions})


def bench(directory: Path, functions: Mapping[str, FunctionSpec] | None = None, **server: object) -> LoadedBench:
    return LoadedBench(
        directory,
        server=server,
        functions=functions or {},
        tasks={"swe-coding": TaskSpec(weight=2.0), "deep-search": TaskSpec(), "math-mopd": TaskSpec()},
        resources={"search": QuotaSpec(limit=40, period_s=10.0)},
    )


class LoadedRollout:
    """Trajectories that act, think, and act again, until `stop`."""

    def __init__(self, seed: int = 7, scale: float = 1.0) -> None:
        self._chance = random.Random(seed)
        self._scale = scale
        self._tasks: list[asyncio.Task[None]] = []

    def step_of(self, execution: Execution) -> ScriptStep:
        """What an action does: by its function, or as its input says."""
        wanted, name = execution.call.input, execution.action.function
        if "log" in wanted or "held" in wanted:
            return ScriptStep(log=str(wanted.get("log", "")), held=wanted.get("held") is True, result={"ok": True})
        share, reason = FAILS.get(name, (0.0, Reason.INTERNAL))
        failed = self._chance.random() < share
        seconds = self._scale * SECONDS.get(name, 0.2) * self._chance.uniform(0.3, 1.7)
        return ScriptStep(
            overhead_s=0.02 * self._scale,
            duration_s=seconds,
            reason=reason if failed else None,
            message="as the rollout has it",
            log=f"\x1b[32mran\x1b[0m {name} for {seconds:.2f} s\n",
            result={"reward": round(self._chance.random(), 2)},
        )

    def start(self, http: httpx.AsyncClient, trajectories: int = 48, searches: int = 8) -> None:
        for number in range(trajectories):
            name = f"swe-{1000 + number}"
            self._tasks.append(
                asyncio.create_task(self._act(http, name, "swe-coding", ["shell"] * 4 + ["pytest_reward"]))
            )
        for number in range(searches):
            self._tasks.append(
                asyncio.create_task(self._act(http, f"ds-{200 + number}", "deep-search", ["web_search", "judge"]))
            )
        self._tasks.append(asyncio.create_task(self._act(http, None, "math-mopd", ["math_reward"])))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _act(self, http: httpx.AsyncClient, trajectory: str | None, task: str, functions: list[str]) -> None:
        headers = {"X-Task": task, **({"X-Trajectory-Id": trajectory} if trajectory else {})}
        while True:
            for name in functions:
                with suppress(httpx.HTTPError):
                    path = f"/v1/functions/{name}/invocations"
                    await http.post(path, json={"command": "make test"}, headers=headers)
                await asyncio.sleep(self._scale * self._chance.uniform(0.0, 1.2))


@asynccontextmanager
async def loaded(directory: Path, rollout: LoadedRollout, **server: object) -> AsyncIterator[RunningGateway]:
    """A gateway whose actions follow the rollout, which is not started yet."""
    async with serving(bench(directory, None, **server), runtime=ScriptedRuntime(rollout.step_of)) as running:
        try:
            yield running
        finally:
            await rollout.stop()
