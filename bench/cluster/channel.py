"""The channel against the local executor: the same action by both, in turn, through the real door and a real daemon."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import yaml

from bench.cluster.children import child
from bench.cluster.echo import EchoWay, echoing
from bench.cluster.stub_runtime import StubRuntime
from bench.report import BenchReport, median, percentile
from bench.sandbox import DiscardedOutput
from bench.serving import IMAGE
from gateway.cluster.listener import NodeListener, bind
from manager.action import Action, Grant, Lease, State
from manager.executor import Call, CallHooks, Executor
from manager.function import FunctionSpec, SandboxSpec
from runtimes.executor import LocalExecutor
from runtimes.node import protocol
from runtimes.node.certificate import NodeCertificate, ensure_certificate, server_side
from runtimes.node.protocol import LinkSettings, Message, NodeLink
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.command import claims_of
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import ExecRuntime
from runtimes.sandbox.provider import ProviderSettings, make_provider

HANDSHAKE_S, JOIN_S, STOP_S = 30.0, 60.0, 30.0
#: Actions that are in flight at once where many are, lines of an action, and commands that say them at once.
IN_FLIGHT, LINES, SPEAKERS = 512, 100, 64
FRAME_BYTES = 1024
STUB = FunctionSpec(name="stub", runtime="handler")
#: One for which a sandbox is made first, as far as the channel knows: the node asks before it begins.
ASKING = FunctionSpec(name="asking", runtime="exec")
SHELL = FunctionSpec(
    name="shell", runtime="exec", sandbox=SandboxSpec(image=IMAGE, memory_bytes=256 * 2**20), timeout_s=60.0
)
_NUMBERS = count(1)


class LastingCall(CallHooks):
    """Lets a call go on without its gateway."""

    async def commit_begin(self) -> bool:
        return True


@dataclass(slots=True)
class Way:
    """One way to have an action executed."""

    name: str
    executor: Executor
    acknowledge: Callable[[str], None] = lambda claim: None

    async def act(self, function: FunctionSpec, given: Mapping[str, object], trajectory: str | None = None) -> None:
        """Execute one action to its end; raises RuntimeError unless it succeeded."""
        action = Action(id=f"{self.name}-{next(_NUMBERS)}", function=function.name, trajectory=trajectory)
        grants = {"cpu": Grant(pool="cpu:bench", units=1, cores=(0,))} if function.sandbox is not None else {}
        lease = Lease(action_id=action.id, node="bench", grants=grants)
        call = Call(function=function, input=given, log=DiscardedOutput(), hooks=LastingCall())
        outcome = await self.executor.execute(action, lease, call)
        if outcome.state is not State.SUCCEEDED:
            raise RuntimeError(f"{self.name}: {outcome.state.value}: {outcome.message}")
        self.acknowledge(claims_of(action.id, action.attempt))


class BenchDoor:
    """The nodes' door, and behind it what a gateway keeps of each node."""

    def __init__(self, certificate: NodeCertificate) -> None:
        self.nodes: dict[str, RemoteNode] = {}
        self.joined: dict[str, asyncio.Event] = {}
        #: Of those that have joined.
        self.links: dict[str, NodeLink] = {}
        self.certificate = certificate
        self.frames = 0
        settings = LinkSettings(silent_s=60.0)
        self._door = NodeListener(
            bind("127.0.0.1:0"),
            server_side(certificate),
            settings,
            handshake_s=HANDSHAKE_S,
            handshakes_max=64,
            greet=self._handshake,
        )
        self._door.open()

    @property
    def place(self) -> tuple[str, str]:
        return "127.0.0.1", str(self._door.port)

    def expect(self, name: str) -> RemoteNode:
        """Let a node of this name in."""
        self.joined[name] = asyncio.Event()
        self.nodes[name] = RemoteNode(name)
        return self.nodes[name]

    async def _handshake(self, link: NodeLink, authenticated: Callable[[], None]) -> None:
        hello = await link.receive(protocol.NodeHello, HANDSHAKE_S)
        authenticated()
        link.send(protocol.NodeWelcome(generation=1, key="k", beat_s=1.0, silent_s=60.0))
        inventory = await link.receive(protocol.Inventory, HANDSHAKE_S, frame_max_bytes=2**20)
        self.links[hello.name] = link
        self.joined[hello.name].set()
        if hello.name == "flood":
            await link.run(self._count)
            return
        self.nodes[hello.name].connect(link, inventory)
        await self.nodes[hello.name].serve(link)

    def _count(self, message: Message) -> None:
        self.frames += 1

    async def close(self) -> None:
        await asyncio.gather(*[node.close() for node in self.nodes.values()])
        await self._door.close()


@asynccontextmanager
async def opened_door(directory: Path) -> AsyncIterator[BenchDoor]:
    door = BenchDoor(ensure_certificate(directory))
    try:
        yield door
    finally:
        await door.close()


def stub_node(
    place: tuple[str, str], fingerprint: str, name: str, ticket: str, directory: Path, cores: int = 64
) -> list[str]:
    """Return the words that start a daemon whose actions do nothing."""
    where = directory / name
    return ["-m", "bench.cluster.stub_node", *place, fingerprint, name, ticket, str(where), str(cores)]


async def joined(door: BenchDoor, name: str) -> None:
    async with asyncio.timeout(JOIN_S):
        await door.joined[name].wait()


async def no_ops(report: BenchReport, rounds: int) -> float:
    """No-op actions by both ways, one at a time and many at once; return the channel's CPU time of one in us."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        async with opened_door(Path(place)) as door:
            node = door.expect("stub")
            words = stub_node(door.place, door.certificate.fingerprint, "stub", "t", Path(place))
            async with child(*words):
                await joined(door, "stub")
                runtime = StubRuntime()
                local = Way("local", LocalExecutor({"exec": runtime, "handler": runtime}))
                channel = Way("channel", node, node.acknowledge)
                async with echoing(door.certificate) as echo:
                    await compare(report, "noop", (local, channel, echo), STUB, {}, rounds)
                    await compare(report, "noop_asking", (local, channel, echo), ASKING, {}, rounds)
                report.figure("tls_echo_p50_ms", _figure(report, "noop", "echo_p50_ms"))
                difference = _difference(report, "noop")
                report.check("channel_minus_local_p50_ms", difference, 0.3, "lower")
                cpu_us = await many(report, channel, rounds * 4)
                await many(report, local, rounds * 4)
                await lines(report, channel, max(2, rounds // 200))
    return cpu_us


async def commands(report: BenchReport, rounds: int) -> None:
    """The same command in real sandboxes, here and on a node that is a daemon of its own."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        directory = Path(place)
        provider = make_provider(ProviderSettings(kind="container", state_dir=directory / "here"))
        environments = Environments(provider)
        try:
            async with opened_door(directory) as door:
                node = door.expect("node")
                async with child(*join_words(door, directory)) as process:
                    await joined(door, "node")
                    local = Way("local", LocalExecutor({"exec": ExecRuntime(environments)}))
                    ways = (local, Way("channel", node, node.acknowledge))
                    await compare(report, "exec", ways, SHELL, {"argv": ["true"]}, rounds, trajectory="bench")
                    await node.end_trajectory("bench")
                    process.terminate()
                    async with asyncio.timeout(STOP_S):
                        await process.wait()
        finally:
            await environments.close()
            await provider.reap(())
            await provider.close()
    report.check("exec_minus_local_p50_ms", _difference(report, "exec"), 0.6, "lower")
    cpu = report.figures["exec"]
    assert isinstance(cpu, dict)
    share = float(str(cpu["channel_cpu_us"])) / float(str(cpu["local_cpu_us"]))
    report.check("gateway_cpu_over_local", round(share, 3), 0.6, "lower")


def join_words(door: BenchDoor, directory: Path) -> list[str]:
    """Return the words that start a real daemon with containers, named ``node``."""
    config = directory / "node.yaml"
    sandbox = {"provider": "container", "image": IMAGE, "memory": "256Mi"}
    config.write_text(yaml.safe_dump({"sandbox": sandbox, "node": {"memory": "1Gi"}}))
    told = {
        "--gateway": ":".join(door.place),
        "--fingerprint": door.certificate.fingerprint,
        "--ticket": "t",
        "--name": "node",
        "--state-dir": str(directory / "node"),
        "--config": str(config),
        "--drain-grace": "5",
        "--log-level": "error",
    }
    return ["-m", "gateway", "node", "join", *[word for pair in told.items() for word in pair]]


async def compare(
    report: BenchReport,
    what: str,
    ways: tuple[Way | EchoWay, ...],
    function: FunctionSpec,
    given: Mapping[str, object],
    rounds: int,
    trajectory: str | None = None,
) -> None:
    """One at a time, by turns of ten, so that what else the machine does meets both alike."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    cpu_s = dict.fromkeys(times, 0.0)
    for way in ways:
        for _ in range(10):
            await way.act(function, given, trajectory)
    for _ in range(max(1, rounds // 10)):
        for way in ways:
            spent_s = time.process_time()
            for _ in range(10):
                began_s = time.perf_counter()
                await way.act(function, given, trajectory)
                times[way.name].append((time.perf_counter() - began_s) * 1e3)
            cpu_s[way.name] += time.process_time() - spent_s
    figures: dict[str, float | int] = {}
    for name, found in times.items():
        figures[f"{name}_p50_ms"] = round(median(found), 4)
        figures[f"{name}_p99_ms"] = round(percentile(found, 0.99), 4)
        figures[f"{name}_cpu_us"] = round(cpu_s[name] / len(found) * 1e6, 1)
    report.figure(what, {**figures, "n": len(times[ways[0].name])})


def _difference(report: BenchReport, what: str) -> float:
    return round(_figure(report, what, "channel_p50_ms") - _figure(report, what, "local_p50_ms"), 4)


def _figure(report: BenchReport, what: str, name: str) -> float:
    found = report.figures[what]
    assert isinstance(found, dict)
    return float(str(found[name]))


async def many(report: BenchReport, way: Way, total: int) -> float:
    """Many no-ops at once; return the CPU time of one here, in us."""
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one() -> None:
        async with gate:
            await way.act(STUB, {})

    began_s, spent_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*[one() for _ in range(total)])
    cpu_us = (time.process_time() - spent_s) / total * 1e6
    figures: dict[str, float | int] = {"per_s": round(total / (time.perf_counter() - began_s)), "cpu_us": round(cpu_us)}
    report.figure(f"noop_{IN_FLIGHT}_{way.name}", {**figures, "n": total})
    return cpu_us


async def lines(report: BenchReport, way: Way, rounds: int) -> None:
    """What a line costs here: commands that say a hundred at once, against the same that say none."""

    async def burst(number: int) -> float:
        spent_s = time.process_time()
        await asyncio.gather(*[way.act(STUB, {"lines": number}) for _ in range(SPEAKERS)])
        return time.process_time() - spent_s

    await burst(LINES)
    silent = [await burst(0) for _ in range(rounds)]
    loud = [await burst(LINES) for _ in range(rounds)]
    cost_us = (median(loud) - median(silent)) / (SPEAKERS * LINES) * 1e6
    report.check("log_line_cpu_us", round(cost_us, 3), 10.0, "lower")


async def frames(report: BenchReport, seconds: float) -> None:
    """How many frames of 1 KB a second one loop takes in, over TLS, decoded."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        async with opened_door(Path(place)) as door:
            door.expect("flood")
            given = f'{{"flood": {FRAME_BYTES}}}\n'.encode()
            async with child("-m", "bench.cluster.stub_agents", *door.place, given=given):
                await joined(door, "flood")
                await asyncio.sleep(seconds / 10)
                before, began_s = door.frames, time.perf_counter()
                await asyncio.sleep(seconds)
                rate = (door.frames - before) / (time.perf_counter() - began_s)
    report.check("channel_frames_per_s", round(rate), 30_000, "higher")
