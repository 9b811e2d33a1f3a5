"""The real gateway and real nodes in the world: each a process that can be killed and started again."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import structlog

import gateway.app as app_module
from gateway import limits
from gateway.app import App
from gateway.cluster import cluster as cluster_module
from gateway.config.load import GatewayConfig
from gateway.config.schema import ClusterConfig, NodeConfig, ServerConfig
from gateway.dashboard import stream as stream_module
from gateway.invocations.invocations import Invocations
from gateway.runtime_factory import Runtimes
from gateway.tls import Connections
from manager.action import UnitSet
from manager.clock import Clock, MonotonicClock
from manager.config import NodeSpec
from manager.errors import CodedError, Reason
from manager.function import FunctionSpec, Network, RequestSpec, RetrySpec, SandboxSpec
from manager.resources.pools import QuotaSpec
from runtimes.executor import LocalExecutor
from runtimes.model.request import ModelSettings
from runtimes.model.runtime import ModelRuntime
from runtimes.node import daemon as daemon_module
from runtimes.node.daemon import DaemonSettings, NodeDaemon, NodeRuntimes
from runtimes.node.membership import MembershipSettings
from runtimes.node.protocol import LinkSettings, NodeLink
from runtimes.runtime import Runtime
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.exec import ExecRuntime
from tests.sim.whole.loop import PROCESS, SimLoop, SimProcess
from tests.sim.whole.outside import BoxProvider, Ledger, SimDisk, SimMachine, SimTransport, SimUpstream, end_of

HERE = "gw"
#: Bytes of memory of a sandbox, and of a machine.
BOX_BYTES, MACHINE_BYTES = 64 * 2**20, 2**30
LINK = LinkSettings(beat_s=2.0, silent_s=5.0)
#: Seconds of silence after which a node is counted lost.
LOST_AFTER_S = 12.0
#: Where state directories are: nothing is kept in them, but that they are there.
PLACE = Path(tempfile.gettempdir()) / f"tangram-sim-{os.getpid()}"
QUOTA = QuotaSpec(limit=2, period_s=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSetting:
    """What a history has: its machines, and how they are configured."""

    local: str = "inline"
    nodes: tuple[str, ...] = ()
    cores: int = 2
    reap_every_s: float = 60.0
    drain_grace_s: float = 0.5


def functions(setting: SimSetting) -> dict[str, FunctionSpec]:
    """Return what may be called; ``there`` runs on nodes only."""
    box = SandboxSpec(image="image", network=Network.NONE, memory_bytes=BOX_BYTES, idle_ttl_s=1800.0)
    shell = FunctionSpec(
        name="shell",
        runtime="exec",
        cost={"cpu": UnitSet.fixed(1)},
        sandbox=box,
        timeout_s=8.0,
        queue_timeout_s=120.0,
        anywhere=not setting.nodes,
    )
    retry = RetrySpec(max_attempts=3, backoff_s=1.0, jitter="none", on=(Reason.TIMEOUT,))
    found = [
        shell,
        replace(shell, name="again", idempotent=True),
        replace(shell, name="flaky", timeout_s=2.0, retry=retry),
        replace(shell, name="there", nodes={"where": "there"}),
        FunctionSpec(
            name="search",
            runtime="api",
            cost={"search": UnitSet.fixed(1)},
            request=RequestSpec(url="http://upstream", method="POST"),
            input_schema={"type": "object"},
            timeout_s=8.0,
        ),
    ]
    return {each.name: each for each in found if setting.nodes or each.name != "there"}


class WorldDirectory:
    """Stands for `gateway.store.maintenance.StateDirectory`: there is one, and it stays."""

    lost = locked = damage = None
    checked = ""
    unclean = False
    database = PLACE / HERE / "tangram.sqlite"

    def is_gone(self) -> bool:
        return False

    async def watch_for_ever(self) -> None: ...

    async def check(self) -> None: ...


class NoServer:
    """Stands for the servers: callers of the world speak to the operations behind them."""

    def __init__(self, *given: object) -> None: ...

    async def open(self, *given: object) -> None: ...

    async def close(self) -> None: ...

    def drain(self) -> None: ...


class WorldApp(App):
    """The gateway as it is composed, without sockets."""

    def _bind_sockets(self, closers: AsyncExitStack) -> None:
        self._state_dir: Any = WorldDirectory()
        self._limits: Any = SimpleNamespace(connections_max=16, shortage=lambda: None)
        self.tokens = None
        self._listener: Any = SimpleNamespace(connections=Connections(limit=16))
        self._http: Any = SimpleNamespace(close_streams=lambda: None)
        self.facades: Any = SimpleNamespace(connections={})
        self._grpc_socket = self._ports_socket = self._ports_listener = None  # type: ignore[assignment]

    def _announce(self, recovered: Mapping[str, int]) -> None: ...


class WorldListener:
    """Stands for `gateway.cluster.listener.NodeListener`: connections come from the world."""

    port = 1

    def __init__(
        self,
        listener: object,
        context: object,
        settings: LinkSettings,
        *,
        handshake_s: float,
        handshakes_max: int,
        greet: Callable[[NodeLink, Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._handshake_s, self._greet = handshake_s, greet
        self.settings = settings
        self.is_open = False
        self._tasks: set[asyncio.Task[None]] = set()
        WORLD.get_world().listener = self

    def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def accept(self, link: NodeLink) -> None:
        task = asyncio.create_task(self._serve(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: NodeLink) -> None:
        limit = asyncio.timeout(self._handshake_s)
        try:
            async with limit:
                await self._greet(link, lambda: limit.reschedule(None))
        except (CodedError, TimeoutError):
            pass
        finally:
            link.close("the gateway is done with it")


class WorldDaemon(NodeDaemon):
    """The daemon of a node, which dials through the world."""

    async def _dial(self) -> NodeLink:
        world = WORLD.get_world()
        await asyncio.sleep(world.machines[self._settings.spec.name].way_s())
        return world.connect(self._settings.spec.name, self._clock)


class WORLD:
    """The world that runs now."""

    _world: SimWorld | None = None

    @classmethod
    def get_world(cls) -> SimWorld:
        assert cls._world is not None
        return cls._world


class SimWorld:
    """Machines, processes and disks of one history."""

    def __init__(self, setting: SimSetting, chance: random.Random) -> None:
        self.setting, self.chance = setting, chance
        self.loop = SimLoop(chance)  # type: ignore[abstract]  # of a loop it has what is used
        self.ledger, self.disk = Ledger(), SimDisk(chance)
        names = (HERE, *setting.nodes)
        for name in names:
            (PLACE / name).mkdir(parents=True, exist_ok=True)
        self.machines = {name: SimMachine(name, self.loop, chance, self.ledger) for name in names}
        self.listener: WorldListener | None = None
        self.app: WorldApp | None = None
        self.gateway: SimProcess | None = None
        self.nodes: dict[str, SimProcess] = {}
        self.daemons: dict[str, WorldDaemon] = {}
        self.links: dict[str, SimTransport] = {}
        self.keys: dict[str, str] = {}
        #: Nodes that nothing reaches now.
        self.cut: set[str] = set()
        #: How each gateway that was stopped, or failed to start, ended.
        self.deaths: list[str] = []
        #: What the product itself called a fault.
        self.complaints: list[str] = []
        self.wall_step_s = 0.0

    def wall(self) -> float:
        return 1_700_000_000.0 + self.loop.now_s + self.wall_step_s

    # --- processes

    def start_gateway(self) -> None:
        """Start one, unless one lives."""
        if self.gateway is not None and self.gateway.alive:
            return
        self.app = self.listener = None
        process = self.gateway = SimProcess("gateway", self.loop)
        process.spawn(self._serve(process))

    async def _serve(self, process: SimProcess) -> None:
        setting = self.setting
        config = GatewayConfig(
            functions=functions(setting),
            resources={"search": QUOTA},
            server=ServerConfig(state_dir=PLACE / HERE, auth="none", drain_grace_s=setting.drain_grace_s),
            node=NodeConfig(name=HERE),
            cluster=None
            if not setting.nodes
            else ClusterConfig(
                local=setting.local,  # type: ignore[arg-type]
                link=LINK,
                times=MembershipSettings(lost_after_s=LOST_AFTER_S, storm_share=1.0, flapping_losses=100),
            ),
        )
        try:
            async with app_module.gateway(config, make=self._make_runtimes, wall=self.wall) as app:
                assert isinstance(app, WorldApp)
                self.app = app
                await app._stopping.wait()
                self.app = None
                await app._drain()
        except CodedError as error:
            self.deaths.append(f"{self.loop.now_s:.3f}: {error.message}")
        except Exception as error:
            self.complaints.append(f"{self.loop.now_s - 1000.0:.3f} the gateway failed: {error!r}")
            raise
        finally:
            if process.alive:
                self.app = None
                process.kill()

    def _make_runtimes(self, config: GatewayConfig, clock: Clock) -> Runtimes:
        provider, environments, runtimes = self._runtimes(HERE, clock)
        runtimes["api"] = SimUpstream(self.machines[HERE])
        model = ModelRuntime(ModelSettings(device="none"))

        async def open_environment(trajectory: str, task: str, function: FunctionSpec) -> None:
            await environments.ensure(trajectory, function.sandbox, task=task)

        executor = LocalExecutor(runtimes, clock, open_environment=open_environment)
        return Runtimes(
            provider=provider,
            environments=environments,
            model=model,
            runtimes=runtimes,
            executor=executor,
        )

    def _runtimes(self, machine: str, clock: Clock) -> tuple[BoxProvider, Environments, dict[str, Runtime]]:
        provider = BoxProvider(self.machines[machine], clock)
        settings = EnvironmentSettings(reap_every_s=self.setting.reap_every_s)
        environments = Environments(provider, settings, clock)
        return provider, environments, {"exec": ExecRuntime(environments)}

    def start_node(self, name: str) -> None:
        """Start a node's daemon, unless it lives or nobody could let it in."""
        living = self.nodes.get(name)
        if living is not None and living.alive:
            return
        ticket = ""
        if name not in self.keys:
            if self.app is None or self.gateway is None:
                return
            ticket = self.gateway.context.copy().run(self.app.machines.ticket, name).ticket
        process = self.nodes[name] = SimProcess(name, self.loop)
        process.spawn(self._serve_node(process, name, ticket))

    async def _serve_node(self, process: SimProcess, name: str, ticket: str) -> None:
        clock = MonotonicClock()
        _, environments, runtimes = self._runtimes(name, clock)

        async def open_environment(trajectory: str, task: str, function: FunctionSpec) -> None:
            await environments.ensure(trajectory, function.sandbox, task=task)

        async def prepare(function: FunctionSpec) -> None:
            assert function.sandbox is not None
            environments.declare(function.name, function.sandbox)
            await runtimes[function.runtime].prepare(function)

        served = NodeRuntimes(
            executor=LocalExecutor(runtimes, clock, open_environment=open_environment),
            environments=environments,
            prepare=prepare,
            close=environments.close,
        )
        settings = DaemonSettings(
            host="gateway",
            port=1,
            fingerprint="",
            ticket=ticket,
            state_dir=PLACE / name,
            spec=node_spec(name, self.setting, labels={"where": "there"}),
        )
        daemon = self.daemons[name] = WorldDaemon(settings, served, clock=clock)
        try:
            await daemon.run()
        except CodedError as error:
            self.deaths.append(f"{self.loop.now_s:.3f}: {name}: {error.message}")
        finally:
            process.kill()

    def connect(self, name: str, clock: Clock) -> NodeLink:
        """Return a node's end of a connection to the gateway; raises OSError."""
        listener, gateway = self.listener, self.gateway
        if gateway is None or not gateway.alive or listener is None or not listener.is_open or name in self.cut:
            raise ConnectionRefusedError("nobody listens")
        link, ours = end_of(self.machines[name], LinkSettings(), clock)
        theirs_link, theirs = gateway.context.copy().run(end_of, self.machines[name], listener.settings, clock)
        ours.peer, theirs.peer = theirs, ours
        self.links[name] = ours
        self.loop.call_soon(listener.accept, theirs_link, context=gateway.context.copy())
        return link

    # --- requests from outside

    async def ask(self, work: Callable[[WorldApp], Awaitable[Any]], gone: int | None = None) -> Any:
        """Return what a request comes to; raises its CodedError, or ConnectionError if nobody answers.

        Who asked is ``gone`` after so many callbacks and writes of the gateway: the request is cancelled.
        """
        app, gateway = self.app, self.gateway
        if app is None or gateway is None or not gateway.alive:
            raise ConnectionError("nobody listens")
        answer: asyncio.Future[Any] = self.loop.create_future()
        way_s, outside = self.machines[HERE].way_s, self.loop.outside.context

        def settle(result: Any, error: BaseException | None) -> None:
            gateway.held.pop(answer, None)
            if not answer.done():
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)

        def reply(result: Any, error: BaseException | None = None) -> None:
            self.loop.call_later(way_s(), settle, result, error, context=outside.copy())

        async def carry_out() -> None:
            try:
                reply(await work(app))
            except CodedError as error:
                reply(None, error)

        def begin() -> None:
            task = self.loop.create_task(carry_out())
            left = ConnectionError("whoever asked is gone")
            task.add_done_callback(lambda done: reply(None, left) if done.cancelled() else None)
            if gone is not None:
                gateway.burn(gone, task.cancel)

        gateway.held[answer] = lambda: reply(None, ConnectionError("cut off"))
        self.loop.call_later(way_s(), begin, context=gateway.context.copy())
        return await answer


def node_spec(name: str, setting: SimSetting, *, labels: Mapping[str, str] | None = None) -> NodeSpec:
    return NodeSpec(
        name=name, numa=(tuple(range(setting.cores)),), memory_bytes=MACHINE_BYTES, labels=dict(labels or {})
    )


# --- what is replaced while a world runs


@dataclass(slots=True)
class _Chance:
    """Stands for the kernel's randomness."""

    chance: random.Random

    def token_bytes(self, count: int = 32) -> bytes:
        return self.chance.randbytes(count)

    def token_hex(self, count: int = 32) -> str:
        return self.chance.randbytes(count).hex()

    def token_urlsafe(self, count: int = 32) -> str:
        return self.chance.randbytes(count).hex()

    def randbits(self, count: int) -> int:
        return self.chance.getrandbits(count)


class NoHandlers:
    """Stands for `runtimes.node.daemon.HandlerStore`: there are no handlers in this world."""

    def __init__(self, *given: object, **more: object) -> None: ...

    def placed(self, function: FunctionSpec) -> FunctionSpec:
        return function

    @asynccontextmanager
    async def held(self, function: FunctionSpec) -> AsyncIterator[None]:
        yield


class Complaints(logging.Handler):
    """Collects what the product itself calls a fault: errors with a traceback."""

    def __init__(self, world: SimWorld) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._take(f"{record.getMessage()}: {record.exc_info[1]!r}")

    def process(self, logger: object, level: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take an event of structlog, as one of its processors."""
        error = event.get("exc_info")
        if error:
            self._take(f"{event['event']}: {sys.exc_info()[1] if error is True else error!r}")
        raise structlog.DropEvent

    def _take(self, text: str) -> None:
        if PROCESS.get().alive:
            self._world.complaints.append(f"{self._world.loop.now_s - 1000.0:.3f} {text}")


@contextmanager
def in_place(world: SimWorld) -> Iterator[None]:
    """Have the product speak to the world in place of this machine."""
    chance = _Chance(random.Random(world.chance.getrandbits(64)))
    keys, held = world.keys, set[Path]()

    @contextmanager
    def hold(state_dir: Path) -> Iterator[None]:
        assert state_dir not in held, f"two daemons in {state_dir}"
        held.add(state_dir)
        process = PROCESS.get()
        process.held[hold, state_dir] = lambda: held.discard(state_dir)
        yield

    replaced: list[tuple[object, str, object]] = [
        (time, "monotonic", world.loop.time),
        (time, "time", world.wall),
        (MonotonicClock, "now", staticmethod(world.loop.time)),
        (sqlite3, "connect", world.disk.connect),
        (app_module, "App", WorldApp),
        (app_module, "GrpcServer", NoServer),
        (limits, "describe", lambda config: node_spec(HERE, world.setting)),
        (cluster_module, "NodeListener", WorldListener),
        (cluster_module, "bind", lambda address: None),
        (cluster_module, "server_side", lambda certificate: None),
        (cluster_module, "ensure_certificate", lambda directory: SimpleNamespace(fingerprint="f" * 64)),
        (cluster_module, "signing_key", lambda state_dir: bytes(32)),
        (daemon_module, "HandlerStore", NoHandlers),
        (daemon_module, "shortage_of", lambda directory, size: ""),
        (daemon_module, "_held", hold),
        (daemon_module, "_keep_key", lambda state_dir, key: keys.__setitem__(state_dir.name, key)),
        (daemon_module, "_kept_key", lambda state_dir: keys.get(state_dir.name, "")),
        (daemon_module, "CHANCE", chance.chance),
        (daemon_module, "_version", lambda: "sim"),
        (stream_module, "version", lambda name: "sim"),
        (sys, "unraisablehook", lambda told: None),
    ]
    replaced += [
        (secrets, name, getattr(chance, name)) for name in ("token_bytes", "token_hex", "token_urlsafe", "randbits")
    ]
    kwdefaults = dict(Invocations.__init__.__kwdefaults__ or {}, chance=chance.chance.random)
    replaced.append((Invocations.__init__, "__kwdefaults__", kwdefaults))
    before, WORLD._world = WORLD._world, world
    complaints, configured, root = Complaints(world), structlog.get_config(), logging.getLogger()
    handlers, root.handlers = root.handlers, [complaints]
    if not os.environ.get("SIM_LOG"):
        wrapper = structlog.make_filtering_bound_logger(logging.ERROR)
        structlog.configure(wrapper_class=wrapper, processors=[complaints.process], cache_logger_on_first_use=False)
    try:
        with _attributes(replaced):
            yield
    finally:
        structlog.configure(**configured)
        root.handlers = handlers
        WORLD._world = before


@contextmanager
def _attributes(replaced: Sequence[tuple[object, str, object]]) -> Iterator[None]:
    """Give owners other attributes within the block (`unittest.mock` takes twenty times as long)."""
    before = [
        (owner, name, owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name))
        for owner, name, _ in replaced
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
