"""From the queue to the device and back: a copy of what is in use is found in place, on real ``cpu`` devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

from manager.action import (
    Action,
    Chunk,
    Lease,
    Outcome,
)
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec
from manager.engine import Engine, Submission
from manager.executor import Call
from manager.formulation import formulate
from manager.function import FunctionSpec, ModelAction
from manager.learning import History
from manager.scheduler.policy import PolicySpec
from runtimes.executor import LocalExecutor
from runtimes.model.processes import ForkServer
from runtimes.model.request import ModelSettings
from runtimes.model.runtime import ModelRuntime
from tests.runtimes.model.asking import NoLog, function
from tests.runtimes.model.conftest import Write

DEADLINE_S = 120.0


class Noting(LocalExecutor):
    """Remembers how its copies ended; its actions last until the first one has, however fast the machine is."""

    def __init__(self, runtime: ModelRuntime) -> None:
        super().__init__({"model": runtime})
        self.copied = asyncio.Event()
        self.answers: list[bool] = []

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        outcome = await super().execute(action, lease, call)
        await self.copied.wait()
        return outcome

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        done = await super().replicate(function, service, node, chunk)
        self.answers.append(done)
        self.copied.set()
        return done


def spec(settings: ModelSettings) -> ManagerSpec:
    node = NodeSpec(
        name=settings.node, numa=(), memory_bytes=0, devices=settings.devices, device_bytes=settings.device_bytes
    )
    return ManagerSpec(nodes=(node,), scheduler=SchedulerSpec(policies={"default": PolicySpec(name="price")}))


@asynccontextmanager
async def serving(
    functions: Sequence[FunctionSpec], settings: ModelSettings, fork_server: ForkServer
) -> AsyncIterator[tuple[Engine, Noting]]:
    """An engine over real devices, which knows what the functions need of them."""
    runtime = ModelRuntime(settings, fork_server=fork_server)
    executor = Noting(runtime)
    services = {service.name: service for service in [await runtime.footprint(one) for one in functions]}
    engine = Engine(build_core(replace(spec(settings), services=services)), executor)
    runtime.on_residency = lambda resident: engine.report_residency(settings.node, resident)
    await engine.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield engine, executor
    finally:
        await engine.close()
        await runtime.close()


def asking(function: FunctionSpec, id: str) -> Submission:
    given = {"token_ids": [[7, 3, 99, 12]]}
    action = formulate(function, id=id, input=given, trajectory=None, task="default", history=History(), now_s=0.0)
    return Submission(action=action, call=Call(function=function, input=given, log=NoLog()))


@pytest.mark.parametrize("dop", [1, 2])
async def test_a_service_in_use_is_copied_to_the_idle_device_and_found_there(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer, dop: int
) -> None:
    asked = function(checkpoint("qwen3", "lm"), ModelAction.LOGPROBS, (dop,))
    assert asked.model is not None
    asked = replace(asked, model=replace(asked.model, batch_tokens=1))  # each alone
    size = replace(settings, devices=2 * dop)
    async with serving((asked,), size, fork_server) as (engine, executor):
        await asyncio.gather(*engine.submit([asking(asked, "first")]))
        assert executor.answers == [True]
        ends = await asyncio.gather(*engine.submit([asking(asked, "second"), asking(asked, "third")]))
    assert [end.outcome.usage["restored"] for end in ends] == [0.0, 0.0]
    assert {end.lease.grants["gpu"].chunk for end in ends if end.lease is not None} == {(0, dop), (dop, dop)}
    assert engine.replicas() == {"started": 1, "under_way": 0, "hits": 1, "wasted": 0, "failed": 0}
