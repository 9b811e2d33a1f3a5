"""Ten model services over four ``cpu`` devices: skewed popularity under load, and a device's process killed midway.

    python -m bench.model_services --quick --json

Everything is real: a gateway with its own processes, asked over HTTP. The load is a share of what the devices were
measured to do just before, so that a slow or busy machine shows the same picture, only slower.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.gateway import GATEWAY, process
from bench.model.checkpoints import TINY, write_checkpoint
from bench.report import BenchReport, Figure, median, parser, percentile
from runtimes.model.checkpoint.skeleton import Head
from tangram import AsyncClient, InvocationResult
from tangram.types import ModelDevice, ModelsInfo, ResourcesInfo

SERVICES = 10
DEVICES = 4
#: Models that fit one device at DoP 1: the ten do not fit the four.
FIT = 2
#: Zipf's exponent of the popularity.
SKEW = 1.1
#: Offered load, as a share of what the machine does one action at a time on as many devices as it has cores.
LOAD = 0.6
ACTIONS_MAX = 2000
#: Rounds over all services that measure a warm action and a cold one.
CALIBRATIONS = 3
SHAPE = {
    **TINY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "vocab_size": 4096,
}
CONFIG = """
version: 1
server: {{state_dir: {directory}/state, port: 0, grpc_port: 0}}
sandbox: {{provider: process}}
node: {{devices: {{kind: cpu, count: {devices}, memory: {device_bytes}}}}}
functions:
"""
FUNCTION = """
  {name}:
    runtime: model
    model: {{path: {path}, action: {action}}}
    cost: {{gpu: {{choices: [1, 2]}}}}
    elasticity: {{key: gpu, table: {{1: 1.0, 2: 0.6}}}}
    duration: {{profile: learned, initial: 50ms}}
"""


@dataclass(slots=True)
class KilledDevice:
    """The device whose process was killed, when (wall clock), and how long it was without one."""

    device: int
    instant_s: float
    back_s: float = 0.0

    def hit(self, one: InvocationResult) -> bool:
        """Whether the action was running then, on whichever device."""
        assert one.started_at is not None
        assert one.ended_at is not None
        return one.started_at.timestamp() <= self.instant_s <= one.ended_at.timestamp()


@dataclass(slots=True)
class OfferedLoad:
    """The gateway under load."""

    client: AsyncClient
    draw: random.Random
    names: Sequence[str]
    weights: Sequence[float]
    answers: list[InvocationResult] = field(default_factory=list)
    killed: KilledDevice | None = None

    async def one(self, name: str) -> InvocationResult:
        """One action of one service: a few sequences of token ids."""
        length = self.draw.randint(16, 96)
        rows = [[self.draw.randrange(1, 4096) for _ in range(length)] for _ in range(self.draw.randint(1, 8))]
        return await self.client.invoke(name, {"token_ids": rows})

    async def calibrate(self) -> tuple[float, float]:
        """Seconds of a warm and of a cold action, each alone, weighed by popularity."""
        warm: dict[str, list[float]] = {name: [] for name in self.names}
        cold: dict[str, list[float]] = {name: [] for name in self.names}
        for _ in range(CALIBRATIONS):
            for name in self.names:
                for _ in range(2):
                    answer = (await self.one(name)).raise_for_failure()
                    (cold if answer.usage["restored"] else warm)[name].append(answer.act_s - answer.queue_s)
        return self._weighed(warm), self._weighed(cold)

    def _weighed(self, times: Mapping[str, Sequence[float]]) -> float:
        known = [(weight, median(times[name])) for name, weight in zip(self.names, self.weights, strict=True)]
        known = [(weight, value) for weight, value in known if value == value]
        return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known)

    async def run(self, actions: int, rate_per_s: float) -> None:
        """Poisson arrivals; when half of them have come, the next process that computes is killed."""
        asked = []
        killing: asyncio.Task[None] | None = None
        for number in range(actions):
            name = self.draw.choices(self.names, self.weights)[0]
            asked.append(asyncio.create_task(self.one(name)))
            if number == actions // 2:
                killing = asyncio.create_task(self.kill())
            await asyncio.sleep(self.draw.expovariate(rate_per_s))
        self.answers = await asyncio.gather(*asked)
        assert killing is not None
        await killing

    async def kill(self) -> None:
        """SIGKILL the process of a device that computes, and wait until another one is in its place."""
        device = await self._device(lambda each: each.running is not None)
        assert device.pid is not None
        os.kill(device.pid, signal.SIGKILL)
        self.killed = killed = KilledDevice(device.index, time.time())
        await self._device(lambda each: each.index == killed.device and each.alive and each.restarts > 0)
        killed.back_s = time.time() - killed.instant_s

    async def _device(self, wanted: Callable[[ModelDevice], bool]) -> ModelDevice:
        async with asyncio.timeout(60):
            while True:
                for device in (await self.client.resources()).models.devices:
                    if wanted(device):
                        return device
                await asyncio.sleep(0.005)


async def measure(directory: Path, options: Any, report: BenchReport) -> None:
    config = _configure(directory)
    async with (
        process(GATEWAY, str(config)) as server,
        AsyncClient(f"http://127.0.0.1:{server['http']}") as client,
    ):
        weights = [1 / (rank + 1) ** SKEW for rank in range(SERVICES)]
        load = OfferedLoad(client, random.Random(0), [f"service-{index}" for index in range(SERVICES)], weights)
        warm_s, cold_s = await load.calibrate()
        before = (await client.resources()).models
        cores = len(os.sched_getaffinity(0))
        rate_per_s = LOAD * min(cores, DEVICES) / warm_s
        actions = min(ACTIONS_MAX, max(100, int(rate_per_s * (15 if options.quick else 90))))
        report.figure("warm_action_ms", warm_s * 1e3)
        report.figure("cold_action_ms", cold_s * 1e3)
        report.figure("offered_per_s", rate_per_s)
        began_s = time.monotonic()
        await load.run(actions, rate_per_s)
        report.figure("took_s", time.monotonic() - began_s)
        resources = await client.resources()
    _report(report, load, before, resources)


def _configure(directory: Path) -> Path:
    """Ten checkpoints, rewards and teachers in turns, and the YAML that names them."""
    functions, size = "", 0
    for index in range(SERVICES):
        head, action = ((Head.SCORE, "score"), (Head.LM, "logprobs"))[index % 2]
        path = write_checkpoint(directory, "qwen3", head, SHAPE, dtype="float32", device="cpu", seed=index)
        size = max(size, sum(file.stat().st_size for file in path.glob("*.safetensors")))
        functions += FUNCTION.format(name=f"service-{index}", path=path, action=action)
    config = directory / "tangram.yaml"
    head_lines = CONFIG.format(directory=directory, devices=DEVICES, device_bytes=int(size * (FIT + 0.3)))
    config.write_text(head_lines + functions)
    return config


def _report(report: BenchReport, load: OfferedLoad, before: ModelsInfo, resources: ResourcesInfo) -> None:
    models, gpu = resources.models, resources.pools["gpu"]
    done = [one for one in load.answers if one.ok]
    grown = {
        name: getattr(models, name) - getattr(before, name)
        for name in ("executions", "swaps", "evictions", "restored_bytes")
    }
    report.figure("actions", len(load.answers))
    for name, value in grown.items():
        report.figure(name, value)
    report.figure("hit_rate", 1 - grown["swaps"] / grown["executions"])
    resident = list(accumulate(sorted(load.weights, reverse=True)))[DEVICES * FIT - 1] / sum(load.weights)
    report.figure("share_of_what_fits", resident)
    report.figure("prefetches", dict(gpu.prefetches or {}))
    report.figure("in_a_batch", sum(one.usage["batch"] > 1 for one in done))
    report.figure("units", {str(k): v for k, v in sorted(Counter(one.units["gpu"] for one in done).items())})
    report.figure("act", _times(load, done))
    report.figure("services", {name: _service(load, name) for name in load.names})
    report.figure("devices", {str(each.index): _device(each) for each in models.devices})
    killed = load.killed
    assert killed is not None
    report.figure("killed", {"device": killed.device, "back_s": killed.back_s})
    for story, count in Counter(f"{one.reason}: {one.message}" for one in load.answers if not one.ok).items():
        report.note(f"{count} failed with {story}")
    restarts = {each.index: each.restarts for each in models.devices}
    report.check("failed_actions", len(load.answers) - len(done), 0, "lower")
    report.check("restarts_of_the_killed", restarts.pop(killed.device), 1, "higher")
    if max(restarts.values()):
        report.note("another device shared a chunk with the killed one, and was replaced with it")


def _times(load: OfferedLoad, done: Sequence[InvocationResult]) -> dict[str, Figure]:
    """Where the time of actions went, in milliseconds."""
    assert load.killed is not None
    groups = {
        "all": done,
        "warm": [one for one in done if not one.usage["restored"]],
        "cold": [one for one in done if one.usage["restored"]],
        "running_at_the_kill": [one for one in done if load.killed.hit(one)],
    }
    table: dict[str, Figure] = {}
    for group, members in groups.items():
        row: dict[str, Figure] = {"actions": len(members)}
        for part in ("queue", "overhead", "execution", "act"):
            times = [getattr(one, f"{part}_s") * 1e3 for one in members]
            row |= {f"{part}_p50_ms": median(times), f"{part}_p95_ms": percentile(times, 0.95)}
        table[group] = row
    return table


def _service(load: OfferedLoad, name: str) -> dict[str, Figure]:
    mine = [one for one in load.answers if one.function == name and one.ok]
    cold = sum(bool(one.usage["restored"]) for one in mine)
    return {
        "actions": len(mine),
        "found_in_place": 1 - cold / len(mine) if mine else None,
        "act_p50_ms": median([one.act_s * 1e3 for one in mine]),
        "act_p95_ms": percentile([one.act_s * 1e3 for one in mine], 0.95),
    }


def _device(device: ModelDevice) -> dict[str, Figure]:
    return {
        name: getattr(device, name) for name in ("executions", "swaps", "hit_rate", "restarts", "resident_bytes")
    } | {"holds": " ".join(f"{Path(slot.service).name}x{slot.chunk[1]}" for slot in device.resident)}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("model_services").parse_args(argv)
    report = BenchReport("model_services")
    directory = Path(tempfile.mkdtemp(prefix="bench-services-"))
    try:
        asyncio.run(measure(directory, options, report))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return report.print(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
