"""Ten model services over four ``cpu`` devices: skewed popularity under load, and a device's process killed midway.

    python -m bench.model_services --quick --json

The whole way of an action is real: formulation, the engine with its GPU pool, leases, processes, swaps.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.model_checkpoints import TINY, write_checkpoint
from bench.report import Report, median, parser, percentile
from manager.action import EfficiencyTable, UnitSet
from manager.assembly import build_core
from manager.clock import MonotonicClock
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec
from manager.engine import Engine, Submission
from manager.executor import Call
from manager.formulation import formulate
from manager.function import DurationSpec, FunctionSpec, ModelAction, ModelSpec, RuntimeKind
from manager.history import History
from manager.outcome import Settlement, State
from manager.scheduler.policy import PolicySpec
from runtimes.local import LocalExecutor
from runtimes.model.runtime import ModelRuntime
from runtimes.model.settings import ModelSettings
from runtimes.model.skeleton import Head

SERVICES = 10
DEVICES = 4
#: Models that fit one device at DoP 1: the ten do not fit the four.
FIT = 2
#: Zipf's exponent of the popularity.
SKEW = 1.1
SHAPE = {
    **TINY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "vocab_size": 4096,
}


class NoLog:
    """Drops what a runtime logs."""

    def write(self, stream: str, data: str) -> None:
        pass


@dataclass(slots=True)
class Load:
    """The engine under load, and what it takes to submit to it."""

    engine: Engine
    runtime: ModelRuntime
    functions: list[FunctionSpec]
    clock: MonotonicClock
    history: History
    draw: random.Random

    def submit(self, number: int) -> asyncio.Future[Settlement]:
        """One action of a service chosen by popularity."""
        weights = [1 / (rank + 1) ** SKEW for rank in range(len(self.functions))]
        function = self.draw.choices(self.functions, weights)[0]
        length = self.draw.randint(16, 96)
        rows = [[self.draw.randrange(1, 4096) for _ in range(length)] for _ in range(self.draw.randint(1, 8))]
        given: Mapping[str, object] = {"token_ids": rows}
        action = formulate(
            function,
            id=f"action-{number}",
            input=given,
            trajectory=None,
            task="default",
            history=self.history,
            now_s=self.clock.now(),
        )
        call = Call(function=function, input=given, log=NoLog())
        return self.engine.submit([Submission(action=action, call=call)])[0]

    async def run(self, actions: int, rate_per_s: float) -> list[Settlement]:
        """Poisson arrivals; the process of device 1 is killed when half of them have come."""
        futures = []
        for number in range(actions):
            futures.append(self.submit(number))
            if number == actions // 2:
                self.kill(device=1)
            await asyncio.sleep(self.draw.expovariate(rate_per_s))
        return await asyncio.gather(*futures)

    def kill(self, device: int) -> None:
        pid = self.devices()[device]["pid"]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)

    def devices(self) -> list[dict[str, object]]:
        devices = self.runtime.resources()["devices"]
        assert isinstance(devices, list)
        return devices


async def measure(directory: Path, actions: int, rate_per_s: float, report: Report) -> None:
    functions = [_function(directory, index) for index in range(SERVICES)]
    size = max(sum(f.stat().st_size for f in path.glob("*.safetensors")) for path in map(_path, functions))
    settings = ModelSettings(
        device="cpu",
        devices=DEVICES,
        device_bytes=int(size * (FIT + 0.3)),
        host_bytes=int(size * SERVICES * 1.2),
        state_dir=directory / "state",
    )
    runtime = ModelRuntime(settings)
    services = [await runtime.footprint(function) for function in functions]
    node = NodeSpec(name="local", numa=((0,),), memory_bytes=2**30, devices=DEVICES, device_bytes=settings.device_bytes)
    spec = ManagerSpec(
        nodes=(node,),
        services={service.name: service for service in services},
        scheduler=SchedulerSpec(policies={"default": PolicySpec(), "gpu": PolicySpec(name="price")}),
    )
    clock, history = MonotonicClock(), History()
    engine = Engine(build_core(spec), LocalExecutor({RuntimeKind.MODEL: runtime}, clock), clock=clock, history=history)
    runtime.on_residency = lambda resident: engine.report_residency(
        "local", [(service, *chunk) for service, chunks in resident.items() for chunk in chunks]
    )
    await engine.start()
    load = Load(engine, runtime, functions, clock, history, random.Random(0))
    settled = await load.run(actions, rate_per_s)
    _report(report, settled, load)
    await engine.close()
    await runtime.close()


def _report(report: Report, settled: Sequence[Settlement], load: Load) -> None:
    done = [one for one in settled if one.outcome.state is State.SUCCEEDED]
    runtime = load.runtime.resources()
    report.figure("actions", len(settled))
    for name in ("executions", "hit_rate", "swaps", "evictions", "restored_bytes"):
        value = runtime[name]
        assert isinstance(value, int | float)
        report.figure(name, value)
    report.figure("restarts", sum(int(str(device["restarts"])) for device in load.devices()))
    report.figure("batched", sum(one.outcome.usage.get("batch", 1) > 1 for one in done))
    report.figure(
        "units", {str(k): v for k, v in sorted(Counter(int(o.outcome.usage["devices"]) for o in done).items())}
    )
    report.figure(
        "act",
        {
            part: {"p50_ms": median(times) * 1e3, "p95_ms": percentile(times, 0.95) * 1e3}
            for part, times in (
                ("queue", [one.queue_s for one in done]),
                ("overhead", [one.overhead_s for one in done]),
                ("execution", [one.execution_s for one in done]),
                ("act", [one.act_s for one in done]),
            )
        },
    )
    failures = Counter(f"{one.outcome.reason}: {one.outcome.message}" for one in settled if one not in done)
    for story, count in failures.items():
        report.note(f"{count} failed with {story}")
    report.check("failed_actions", len(settled) - len(done), 0, "lower")
    report.check("restarts_after_kill", sum(int(str(d["restarts"])) for d in load.devices()), 1, "higher")


def _function(directory: Path, index: int) -> FunctionSpec:
    head = (Head.SCORE, Head.LM)[index % 2]
    path = write_checkpoint(directory, "qwen3", head, SHAPE, dtype="float32", device="cpu", seed=index)
    return FunctionSpec(
        name=f"service-{index}",
        runtime=RuntimeKind.MODEL,
        cost={"gpu": UnitSet.of((1, 2))},
        key="gpu",
        elasticity=EfficiencyTable(((1, 1.0), (2, 0.6))),
        duration=DurationSpec(initial_s=0.05),
        timeout_s=60,
        model=ModelSpec(path=path, action=ModelAction.SCORE if head is Head.SCORE else ModelAction.LOGPROBS),
    )


def _path(function: FunctionSpec) -> Path:
    assert function.model is not None
    return function.model.path


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("model_services").parse_args(argv)
    report = Report("model_services")
    directory = Path(tempfile.mkdtemp(prefix="bench-services-"))
    actions, rate_per_s = (200, 10.0) if options.quick else (1000, 10.0)
    try:
        asyncio.run(measure(directory, actions, rate_per_s, report))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return report.print(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
