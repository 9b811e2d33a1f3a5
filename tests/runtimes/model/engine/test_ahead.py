"""From the queue to the device and back: what is brought in ahead is found in place, on real ``cpu`` devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

from manager.action import Action  # noqa: E402  # torch may be missing
from manager.assembly import build_core  # noqa: E402
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec  # noqa: E402
from manager.engine import Engine, Submission  # noqa: E402
from manager.executor import Call  # noqa: E402
from manager.formulation import formulate  # noqa: E402
from manager.function import FunctionSpec, ModelAction, RuntimeKind  # noqa: E402
from manager.learning.history import History  # noqa: E402
from manager.lease import Lease  # noqa: E402
from manager.outcome import Outcome, Settlement  # noqa: E402
from manager.scheduler.policy import PolicySpec  # noqa: E402
from runtimes.local import LocalExecutor  # noqa: E402
from runtimes.model.device.process import ForkServer  # noqa: E402
from runtimes.model.runtime import ModelRuntime  # noqa: E402
from runtimes.model.settings import ModelSettings  # noqa: E402
from tests.runtimes.model.asking import NoLog, function  # noqa: E402
from tests.runtimes.model.conftest import Write  # noqa: E402

DEADLINE_S = 120.0


class Lasting(LocalExecutor):
    """Lets the first action last until the prefetch beside it has ended, however fast the machine is."""

    def __init__(self, runtime: ModelRuntime) -> None:
        super().__init__({RuntimeKind.MODEL: runtime})
        self.brought = asyncio.Event()
        self.answers: list[bool] = []

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        outcome = await super().execute(action, lease, call)
        if action.id == "first":
            await self.brought.wait()
        return outcome

    async def prefetch(
        self, function: FunctionSpec, service: str, node: str, chunk: tuple[int, int], evict: tuple[str, ...]
    ) -> bool:
        done = await super().prefetch(function, service, node, chunk, evict)
        self.answers.append(done)
        self.brought.set()
        return done


def spec(settings: ModelSettings, *, prefetch: bool = False, replicate: bool = False) -> ManagerSpec:
    node = NodeSpec(
        name=settings.node, numa=(), memory_bytes=0, devices=settings.devices, device_bytes=settings.device_bytes
    )
    policies = {"default": PolicySpec(name="price")}
    return ManagerSpec(
        nodes=(node,), scheduler=SchedulerSpec(policies=policies, prefetch=prefetch, replicate=replicate)
    )


@asynccontextmanager
async def serving(
    functions: Sequence[FunctionSpec], settings: ModelSettings, fork_server: ForkServer, made: ManagerSpec
) -> AsyncIterator[tuple[Engine, Lasting]]:
    """An engine over real devices, which knows what the functions need of them."""
    runtime = ModelRuntime(settings, fork_server=fork_server)
    executor = Lasting(runtime)
    services = {service.name: service for service in [await runtime.footprint(one) for one in functions]}
    engine = Engine(build_core(replace(made, services=services)), executor)
    runtime.on_residency = lambda resident: engine.report_residency(
        settings.node, [(service, *chunk) for service, chunks in resident.items() for chunk in chunks]
    )
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


async def settled(
    first: FunctionSpec, second: FunctionSpec, settings: ModelSettings, fork_server: ForkServer, *, prefetch: bool
) -> tuple[Settlement, Engine, Lasting]:
    """The end of the second action, which waited for the device of the first; the engine is closed."""
    async with serving((first, second), settings, fork_server, spec(settings, prefetch=prefetch)) as (engine, executor):
        if not prefetch:
            executor.brought.set()
        ends = await asyncio.gather(*engine.submit([asking(first, "first"), asking(second, "second")]))
    return ends[1], engine, executor


@pytest.mark.parametrize("dop", [1, 2])
async def test_a_service_that_was_brought_in_ahead_leaves_no_restore_to_its_action(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer, dop: int
) -> None:
    first = function(checkpoint("qwen3", "lm"), ModelAction.LOGPROBS, (dop,))
    second = function(checkpoint("llama", "lm"), ModelAction.LOGPROBS, (dop,))
    size = replace(settings, devices=dop)
    end, engine, executor = await settled(first, second, size, fork_server, prefetch=True)
    assert end.lease is not None
    assert executor.answers == [True]
    assert (end.lease.grants["gpu"].restore, end.outcome.usage["restored"], end.outcome.usage["restore_s"]) == (
        False,
        0.0,
        0.0,
    )
    assert engine.prefetches()["hits"] == 1
    end, engine, _ = await settled(first, second, size, fork_server, prefetch=False)
    assert end.lease is not None
    assert (end.lease.grants["gpu"].restore, end.outcome.usage["restored"]) == (True, 1.0)
    assert engine.prefetches()["started"] == 0


async def test_a_service_in_use_is_copied_to_the_idle_device_and_found_there(
    checkpoint: Write, settings: ModelSettings, fork_server: ForkServer
) -> None:
    asked = function(checkpoint("qwen3", "lm"), ModelAction.LOGPROBS, (1,))
    assert asked.model is not None
    asked = replace(asked, model=replace(asked.model, batch_tokens=1))  # each alone
    size = replace(settings, devices=2)
    async with serving((asked,), size, fork_server, spec(size, replicate=True)) as (engine, executor):
        await asyncio.gather(*engine.submit([asking(asked, "first")]))
        assert executor.answers == [True]
        ends = await asyncio.gather(*engine.submit([asking(asked, "second"), asking(asked, "third")]))
    assert [end.outcome.usage["restored"] for end in ends] == [0.0, 0.0]
    assert {end.lease.grants["gpu"].chunk for end in ends if end.lease is not None} == {(0, 1), (1, 1)}
    assert engine.prefetches() == {"started": 1, "under_way": 0, "hits": 1, "wasted": 0, "failed": 0}
