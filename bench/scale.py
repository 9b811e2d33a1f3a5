"""The paper's coding mix in real time: a real gateway, real sockets, five nodes of 256 cores whose actions only wait.

Each part plays one batch for three minutes, which is longer than most of its trajectories take, and leaves then; the
simulator plays the same load, and what has ended by then in either is compared.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.durable import WATCHED
from bench.report import BenchReport, Figure, parser, percentile, play
from bench.serving import BenchConnection, ServerProcess, child, process_cpu_s
from manager.action import Amdahl
from manager.simulation.simulate import Size, simulate
from manager.simulation.simulator import Learning
from manager.simulation.workloads import TracedTrajectory, TraceStep, coding

SEED = 11
NODES, NODE_CORES = 5, 256
JOIN_S = 60.0
#: Table 1 of the paper, in seconds an action, where it has the batch.
PAPER: Mapping[int, Mapping[str, float]] = {
    1280: {"execution": 0.975, "queue": 0.015, "overhead": 0.024},
    1536: {"execution": 1.206, "queue": 0.428, "overhead": 0.036},
}
#: The batch whose overhead is checked.
LARGEST = 1536
CONFIG = """
version: 1
server: {{token: bench-bench-bench, state_dir: {directory}/state, port: 0, grpc_port: 0}}
cluster: {{listen: "127.0.0.1:0", local: none}}
scheduler: {{max_queued: 10000, trajectories_max: 10000}}
tasks: {{default: {{max_queued: 10000}}}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}, timeout: 5m, max_queued: 10000, sandbox: {{memory: 4Gi}}}}
  unit_tests:
    runtime: pytest
    cost: {{cpu: {{min: 1, max: 32}}}}
    duration: {{key: suite}}
    timeout: 10m
    max_queued: 10000
    sandbox: {{memory: 4Gi}}
"""


@dataclass(frozen=True, slots=True)
class MeasuredAction:
    """One action as its caller saw it, in seconds: ``act_s`` from the request to the whole answer."""

    ended_s: float
    act_s: float
    queue_s: float
    execution_s: float

    @property
    def overhead_s(self) -> float:
        """All that is neither waiting for cores nor the work: the gateway, the node, the sockets, and this bench."""
        return self.act_s - self.queue_s - self.execution_s


@dataclass(slots=True)
class RealLoad:
    """A batch of trajectories against a gateway, each of which thinks, calls, and goes on."""

    port: int
    actions: list[MeasuredAction] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def play(self, trajectories: Sequence[TracedTrajectory], window_s: float) -> None:
        """Play for so long; what is then in flight is left."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(window_s):
                await asyncio.gather(*[self._trajectory(each, began_s) for each in trajectories])
        except TimeoutError:
            return

    async def _trajectory(self, trajectory: TracedTrajectory, began_s: float) -> None:
        loop = asyncio.get_running_loop()
        connection = BenchConnection(self.port)
        try:
            await asyncio.sleep(trajectory.arrival_s)
            for step in trajectory.steps:
                await asyncio.sleep(step.think_s)
                asked_s = loop.time()
                status, answer = await connection.send(
                    "POST",
                    f"/v1/functions/{step.function}/invocations",
                    json.dumps(_input(step)).encode(),
                    f"X-Trajectory-Id: {trajectory.id}",
                )
                now_s = loop.time()
                record = json.loads(answer)
                if status != 200 or record["state"] != "succeeded":
                    self.failures.append(f"{trajectory.id}: {status}: {answer[:300].decode()}")
                    return
                queue_s, execution_s = record["queue_ms"] / 1000, record["execution_ms"] / 1000
                self.actions.append(MeasuredAction(now_s - began_s, now_s - asked_s, queue_s, execution_s))
            await connection.send("DELETE", f"/v1/trajectories/{trajectory.id}")
        finally:
            connection.close()


def _input(step: TraceStep) -> dict[str, object]:
    env = {"WORK_S": str(step.t_ori_s)}
    if step.function == "shell":
        return {"command": "true", "env": env}
    assert isinstance(step.elasticity, Amdahl)
    return {"suite": step.profile_key, "env": env | {"SERIAL": str(step.elasticity.serial_fraction)}}


async def _nodes(stack: AsyncExitStack, port: int, directory: Path, count: int) -> None:
    """Start nodes and wait until all serve."""
    connection = BenchConnection(port)
    for number in range(count):
        name = f"n{number}"
        status, answer = await connection.send("POST", "/v1/node-tickets", json.dumps({"name": name}).encode())
        if status != 201:
            raise RuntimeError(f"no ticket for {name}: {status} {answer.decode()}")
        ticket = json.loads(answer)
        host, _, node_port = str(ticket["gateway"]).rpartition(":")
        words = (host, node_port, ticket["fingerprint"], name, ticket["ticket"], str(directory / name), str(NODE_CORES))
        await stack.enter_async_context(child("-m", "bench.recorded_node", *words))
    async with asyncio.timeout(JOIN_S):
        ready: object = None
        while ready != count:
            await asyncio.sleep(0.2)
            _, answer = await connection.send("GET", "/v1/nodes")
            ready = sum(each["state"] == "ready" for each in json.loads(answer)["nodes"])
    connection.close()


async def batch(report: BenchReport, count: int, window_s: float) -> None:
    """One batch in real time, and in the simulator."""
    trajectories = coding(count, SEED).trajectories
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as name:
        directory = Path(name)
        config = directory / "tangram.yaml"
        config.write_text(CONFIG.format(directory=directory))
        server = ServerProcess(WATCHED, str(config), log=directory / "log")
        await server.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(server.end, signal.SIGKILL)
            await _nodes(stack, server.port, directory, NODES)
            load, cpu_s = RealLoad(server.port), process_cpu_s(server.pid)
            await load.play(trajectories, window_s)
            share = (process_cpu_s(server.pid) - cpu_s) / window_s
            server.process.send_signal(signal.SIGINT)
            assert server.process.stdout is not None
            stalls = json.loads(await server.process.stdout.readline())
    for failure in load.failures[:5]:
        report.note(f"batch {count}: {failure}")
    simulated = simulate(
        coding(count, SEED), "adaptive", Size(nodes=NODES, cores=NODES * NODE_CORES), knowledge=Learning(sized=False)
    )
    expected_s = [each.act_s for each in simulated.records if each.ended_s <= window_s]
    act_s = statistics.fmean(each.act_s for each in load.actions)
    found = {
        "actions": len(load.actions),
        "actions_simulated": len(expected_s),
        "act": act_s,
        "act_simulated": statistics.fmean(expected_s),
        "execution": statistics.fmean(each.execution_s for each in load.actions),
        "queue": statistics.fmean(each.queue_s for each in load.actions),
        "overhead": statistics.fmean(each.overhead_s for each in load.actions),
        "overhead_p50": percentile([each.overhead_s for each in load.actions], 0.5),
        "overhead_p99": percentile([each.overhead_s for each in load.actions], 0.99),
        "gateway_cpu_share": share,
        "loop_stall_p99_ms": float(stalls["p99_ms"]),
        "loop_stall_max_ms": float(stalls["max_ms"]),
    }
    report.figure(f"coding_{count}", dict[str, Figure](found))
    if count in PAPER:
        report.figure(f"coding_{count}_paper", dict[str, Figure](PAPER[count]))
    report.check(f"lost_{count}", len(load.failures), limit=0, better="lower")
    report.check(f"simulator_act_error_{count}", abs(found["act_simulated"] / act_s - 1), limit=0.05, better="lower")
    if count == LARGEST:
        report.check("overhead_over_execution", found["overhead"] / found["execution"], limit=0.01, better="lower")
        report.check("loop_stall_p99_ms", found["loop_stall_p99_ms"], limit=20.0, better="lower")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("scale", parts=True).parse_args(argv)
    report = BenchReport("scale")
    window_s = 30.0 if options.quick else 180.0
    batches = (LARGEST,) if options.quick else (768, 1280, LARGEST)
    report.note("seconds are real: nothing is played faster than it was; nodes and caller share these cores")
    return play(report, options, {str(each): lambda each=each: batch(report, each, window_s) for each in batches})  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(main())
