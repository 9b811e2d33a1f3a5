"""What a node that is another process costs an action: over the nodes' channel, and as this machine's own daemon.

Both ways are asked by turns in the same run, so that what else the machine does meets both alike.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import yaml

from bench.report import BenchReport, median, parser, percentile, play
from bench.sandbox import DiscardedOutput
from bench.serving import GATEWAY, IMAGE, TOKEN, child, process, process_cpu_s
from gateway.cluster.listener import NodeListener, bind
from gateway.invocations.logs import configure
from manager.action import Action, Grant, Lease, State
from manager.executor import Call, CallHooks, Executor
from manager.function import FunctionSpec, SandboxSpec
from runtimes.executor import LocalExecutor
from runtimes.node import protocol
from runtimes.node.certificate import ensure_certificate, server_side
from runtimes.node.protocol import LinkSettings, NodeLink
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.command import claims_of
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.exec import ExecRuntime
from runtimes.sandbox.provider import ProviderSettings, make_provider
from tangram import AsyncClient

HANDSHAKE_S, JOIN_S, STOP_S = 30.0, 60.0, 30.0
SHELL = FunctionSpec(
    name="shell", runtime="exec", sandbox=SandboxSpec(image=IMAGE, memory_bytes=256 * 2**20), timeout_s=60.0
)
NOOP = {"argv": ["true"]}
#: Actions of one way before it is the other's turn.
TURN = 10
#: Trajectories that run a command each at once, and commands of each in one turn.
TRAJECTORIES, COMMANDS = 8, 10
_NUMBERS = count(1)


class LastingCall(CallHooks):
    """Lets a call go on without its gateway."""

    async def commit_begin(self) -> bool:
        return True


@dataclass(slots=True)
class Way:
    """One way to have an action executed, and what its turns gave."""

    executor: Executor
    acknowledge: Callable[[str], None] = lambda claim: None
    times_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    async def turn(self, *, counted: bool = True) -> None:
        spent_s = time.process_time()
        for _ in range(TURN):
            began_s = time.perf_counter()
            await self._act()
            self.times_ms.append((time.perf_counter() - began_s) * 1e3)
        self.cpu_s += time.process_time() - spent_s
        if not counted:
            self.times_ms.clear()
            self.cpu_s = 0.0

    async def _act(self) -> None:
        """Execute one action to its end; raises RuntimeError unless it succeeded."""
        action = Action(id=f"bench-{next(_NUMBERS)}", function=SHELL.name, trajectory="bench")
        lease = Lease(action_id=action.id, node="bench", grants={"cpu": Grant(pool="cpu:bench", units=1, cores=(0,))})
        call = Call(function=SHELL, input=NOOP, log=DiscardedOutput(), hooks=LastingCall())
        outcome = await self.executor.execute(action, lease, call)
        if outcome.state is not State.SUCCEEDED:
            raise RuntimeError(f"{outcome.state.value}: {outcome.message}")
        self.acknowledge(claims_of(action.id, action.attempt))

    @property
    def p50_ms(self) -> float:
        return median(self.times_ms)

    @property
    def cpu_us(self) -> float:
        """Processor time of this process for one action."""
        return self.cpu_s / len(self.times_ms) * 1e6


async def commands(report: BenchReport, rounds: int) -> None:
    """The same command in real sandboxes, here and on a node that is a daemon of its own."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tangram-bench-")))
        local = Way(await stack.enter_async_context(_local(directory)))
        node = await stack.enter_async_context(_joined(directory))
        ways = {"local": local, "channel": Way(node, node.acknowledge)}
        for way in ways.values():
            await way.turn(counted=False)
        for _ in range(max(1, rounds // TURN)):
            for way in ways.values():
                await way.turn()
    figures = {
        name: {"p50_ms": way.p50_ms, "p99_ms": percentile(way.times_ms, 0.99), "cpu_us": way.cpu_us}
        for name, way in ways.items()
    }
    report.figure("exec", {name: dict(row) for name, row in figures.items()})
    report.check("exec_minus_local_p50_ms", ways["channel"].p50_ms - local.p50_ms, 0.6, "lower")
    report.check("gateway_cpu_over_local", ways["channel"].cpu_us / local.cpu_us, 0.6, "lower")


@asynccontextmanager
async def _local(directory: Path) -> AsyncIterator[Executor]:
    """The executor of this process, with containers."""
    provider = make_provider(ProviderSettings(kind="container", state_dir=directory / "here"))
    environments = Environments(provider)
    try:
        yield LocalExecutor({"exec": ExecRuntime(environments)})
    finally:
        await environments.close()
        await provider.reap(())
        await provider.close()


@asynccontextmanager
async def _joined(directory: Path) -> AsyncIterator[RemoteNode]:
    """A real daemon with containers, as its gateway has it."""
    node, joined = RemoteNode("node"), asyncio.Event()
    certificate = ensure_certificate(directory)

    async def greet(link: NodeLink, authenticated: Callable[[], None]) -> None:
        await link.receive(protocol.NodeHello, HANDSHAKE_S)
        authenticated()
        link.send(protocol.NodeWelcome(generation=1, key="k", beat_s=1.0, silent_s=60.0))
        inventory = await link.receive(protocol.Inventory, HANDSHAKE_S, frame_max_bytes=2**20)
        node.connect(link, inventory)
        joined.set()
        await node.serve(link)

    door = NodeListener(
        bind("127.0.0.1:0"),
        server_side(certificate),
        LinkSettings(silent_s=60.0),
        handshake_s=HANDSHAKE_S,
        handshakes_max=64,
        greet=greet,
    )
    door.open()
    try:
        async with _daemon(directory, f"127.0.0.1:{door.port}", certificate.fingerprint, "t"):
            await asyncio.wait_for(joined.wait(), JOIN_S)
            yield node
            await node.end_trajectory("bench")
    finally:
        await node.close()
        await door.close()


@asynccontextmanager
async def _daemon(directory: Path, gateway: str, fingerprint: str, ticket: str) -> AsyncIterator[None]:
    """A real daemon with containers that joins a gateway as ``node``."""
    config = directory / "node.yaml"
    sandbox = {"provider": "container", "image": IMAGE, "memory": "128Mi"}
    config.write_text(yaml.safe_dump({"sandbox": sandbox, "node": {"memory": "4Gi"}}))
    options = {
        "--gateway": gateway,
        "--fingerprint": fingerprint,
        "--ticket": ticket,
        "--name": "node",
        "--state-dir": str(directory / "node"),
        "--config": str(config),
        "--drain-grace": "5",
        "--log-level": "error",
    }
    words = [word for pair in options.items() for word in pair]
    async with child("-m", "gateway", "node", "join", *words) as daemon:
        yield
        daemon.terminate()
        await asyncio.wait_for(daemon.wait(), STOP_S)


@dataclass(slots=True)
class LocalGateway:
    """A gateway with this machine inline or by a daemon of its own, and what its turns gave."""

    pid: int
    client: AsyncClient
    per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    async def turn(self, *, counted: bool = True) -> None:
        """Run the commands of every trajectory, all trajectories at once."""
        began_s, spent_s = time.monotonic(), process_cpu_s(self.pid)
        await asyncio.gather(*[self._commands(f"t{number}") for number in range(TRAJECTORIES)])
        number = TRAJECTORIES * COMMANDS
        if counted:
            self.per_s.append(number / (time.monotonic() - began_s))
            self.cpu_us.append((process_cpu_s(self.pid) - spent_s) / number * 1e6)

    async def _commands(self, trajectory: str) -> None:
        for _ in range(COMMANDS):
            (await self.client.invoke("shell", NOOP, trajectory=trajectory)).raise_for_failure()


@asynccontextmanager
async def _served(local: str, name: str) -> AsyncIterator[LocalGateway]:
    """A gateway with this machine ``inline``, or with ``none`` and a daemon of its own on it."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"tangram-{name}-")))
        document = {
            "version": 1,
            "server": {"port": 0, "grpc_port": 0, "token": TOKEN, "state_dir": str(directory / "state")},
            "node": {"memory": "4Gi"},
            "cluster": {"listen": "127.0.0.1:0", "local": local},
            "sandbox": {"provider": "container", "image": IMAGE, "memory": "128Mi"},
            "functions": {"shell": {"runtime": "exec", "cost": {"cpu": 1}, "idempotent": True, "queue_timeout": "2m"}},
        }
        config = directory / "tangram.yaml"
        config.write_text(yaml.safe_dump(document))
        server = await stack.enter_async_context(process(GATEWAY, str(config), ending=signal.SIGINT))
        client = AsyncClient(f"http://127.0.0.1:{server.port}", token=TOKEN)
        await stack.enter_async_context(client)
        if local == "none":
            ticket = await client.node_ticket("node")
            await stack.enter_async_context(_daemon(directory, ticket.gateway, ticket.fingerprint, ticket.ticket))
        yield LocalGateway(server.pid, client)


async def local_process(report: BenchReport, turns: int) -> None:
    """What a command costs the gateway, and how many run a second: two gateways side by side, by turns."""
    async with AsyncExitStack() as stack:
        inline = await stack.enter_async_context(_served("inline", "inline"))
        daemon = await stack.enter_async_context(_served("none", "daemon"))
        for each in (inline, daemon):
            await each.turn(counted=False)
        for number in range(turns):
            for each in (inline, daemon) if number % 2 else (daemon, inline):
                await each.turn()
    rows = {"inline": inline, "process": daemon}
    figures = {name: {"cpu_us": median(each.cpu_us), "per_s": median(each.per_s)} for name, each in rows.items()}
    report.figure("local", {name: dict(row) for name, row in figures.items()})
    cpu = median([own / other for own, other in zip(daemon.cpu_us, inline.cpu_us, strict=True)])
    rate = median([own / other for own, other in zip(daemon.per_s, inline.per_s, strict=True)])
    report.check("process_cpu_over_inline", cpu, 0.6, "lower")
    report.check("process_per_s_over_inline", rate, 1.0, "higher")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("cluster", parts=True).parse_args(argv)
    report = BenchReport("cluster")
    configure("critical")  # what is lost here is lost on purpose
    parts = {
        "commands": lambda: commands(report, 100 if options.quick else 400),
        "local_process": lambda: local_process(report, 6 if options.quick else 20),
    }
    return play(report, options, parts)


if __name__ == "__main__":
    sys.exit(main())
