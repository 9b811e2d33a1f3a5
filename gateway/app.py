"""The composition root: a configuration becomes a gateway that serves."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import IO

import orjson
import structlog

from gateway import machine
from gateway.auth import Guard, check_bind
from gateway.config.load import GatewayConfig
from gateway.connections import Connections
from gateway.grpc.server import GrpcServer
from gateway.http.app import HttpApp
from gateway.http.server import listen, serve
from gateway.http.stream import GIVE_UP_STALLS
from gateway.invocations.admission import Admission, HeldInputs
from gateway.invocations.callbacks import CallbackSender, CallbackSpec
from gateway.invocations.durable_starts import DurableStarts
from gateway.invocations.invocation import InvocationSpec
from gateway.invocations.invocations import Invocations
from gateway.invocations.logs import Logs, LogSpec
from gateway.invocations.reattach import Reattachment
from gateway.invocations.restart import Restart
from gateway.invocations.trajectories import TrajectoryRecovery
from gateway.metrics import Metrics
from gateway.registry import Registry
from gateway.runtime_factory import Runtimes, make_runtimes
from gateway.services import Limits, Services
from gateway.store.retention import RetentionSpec, prune_for_ever
from gateway.store.store import Durability, Store, StoreSpec
from gateway.view import plain
from manager.assembly import build_core
from manager.chunk import Chunk
from manager.clock import Clock, MonotonicClock, WallClock
from manager.config import NodeSpec, ServiceSpec, TaskSpec
from manager.engine import Engine
from manager.errors import CodedError, Conflict, StorageUnavailable
from manager.events import Reconfigured
from manager.function import FunctionSpec
from manager.learning.history import History, Learned

HISTORY = "history"
#: Seconds between two savings of the learned durations.
HISTORY_EVERY_S = 30.0
#: Seconds that open requests have to end after the drain.
CLOSE_GRACE_S = 5.0
#: Allocations between two collections of each generation. The loop stands still meanwhile, and what waits survives all
#: of them: the first two are small (a fraction of a millisecond, a few of them), and a full one, which walks every
#: living invocation, is rare. Nothing of ours is left to it: an invocation that has ended is in no circle.
COLLECT_EVERY = (2_000, 5, 10_000)

MakeHands = Callable[[GatewayConfig, Clock, Callable[[Mapping[str, tuple[Chunk, ...]]], None]], Runtimes]


def build(
    config: GatewayConfig,
    *,
    paths: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    hands: MakeHands = make_runtimes,
    wall: Callable[[], float] | None = None,
) -> App:
    """A gateway that is not started yet; raises InvalidConfig where it may not serve as configured.

    ``paths`` and ``env`` are what the configuration was read from, for reloads without a body; ``wall`` is the time of
    day, where it is not this machine's.
    """
    check_bind(config.server.host, config.server.token)
    return App(config, paths=paths, env=env, hands=hands, wall=wall or WallClock())


class App:
    """One gateway: `start`, then `serve` until it is told to stop; `stop` may be called from anywhere on its loop."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        paths: Sequence[Path],
        env: Mapping[str, str] | None,
        hands: MakeHands,
        wall: Callable[[], float],
    ) -> None:
        self.config = config
        self._paths = paths
        self._env = env
        self._make_hands = hands
        self._clock = MonotonicClock()
        self._wall = wall
        self._log = structlog.get_logger("gateway")
        self._stopping = asyncio.Event()
        self._closing = asyncio.Event()
        #: Every model service that was made ready, as the scheduler must know it.
        self._model_services: dict[str, ServiceSpec] = {}
        #: Open connections by door.
        self._connections = {door: Connections(limit=config.server.connections_max) for door in ("http", "grpc")}
        #: What must be let go of, the youngest first.
        self._closers = AsyncExitStack()
        self.node: NodeSpec | None = None
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine of a gateway that was started."""
        assert self._engine is not None, "the gateway has not started"
        return self._engine

    async def start(self) -> None:
        """Open the record, make the hands, prepare the functions, take up what was left, and bind the doors."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        server = self.config.server
        self._closers.enter_context(lock_state(server.state_dir))
        silent_s = GIVE_UP_STALLS * server.logs.stall_s
        self._sockets = tuple(listen(server.host, port, silent_s) for port in (server.port, server.grpc_port))
        for listener in self._sockets:
            self._closers.callback(listener.close)
        self.store = Store(
            StoreSpec(
                path=server.state_dir / "tangram.sqlite",
                durability=Durability(server.durability),
            ),
            wall=self._wall,
        )
        await self.store.open()
        self._closers.push_async_callback(self.store.close)
        self.logs = Logs(
            self.store,
            LogSpec(
                tail_chars=server.logs.tail_bytes,
                heartbeat_s=server.logs.heartbeat_s,
                stall_s=server.logs.stall_s,
                followers_max=server.logs.followers_max,
            ),
            wall=self._wall,
        )
        self.metrics = Metrics()
        await self._start_thinking()
        asked = server.callbacks
        self.callbacks = CallbackSender(
            CallbackSpec(
                allow=asked.allow,
                secret=asked.secret,
                timeout_s=asked.timeout_s,
                max_attempts=asked.max_attempts,
                backoff_s=asked.backoff_s,
                concurrency=asked.concurrency,
            ),
            self.store,
        )
        self.services = self._make_services()
        self._watch()
        self.invocations.on_end.append(self.callbacks.ended)
        recovered = {**await self.restart.recover(), **self._adopted}
        self.grpc = GrpcServer(self.services, self._connections["grpc"], server.streams_max)
        await self.grpc.open(self._sockets[1])
        self._closers.push_async_callback(self.grpc.close)
        chores = (
            self._save_history_for_ever(),
            prune_for_ever(self.store, self._retention(), self._wall),
            self.callbacks.sweep_for_ever(),
        )
        for chore in chores:
            self._closers.push_async_callback(_ended, asyncio.create_task(chore))
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():  # signals arrive nowhere else
            loop.add_signal_handler(signal.SIGTERM, self.stop, True)
            loop.add_signal_handler(signal.SIGINT, self.stop)
        self._announce(recovered)

    async def _start_thinking(self) -> None:
        """Core, engine, hands and registry; they need each other, and are tied together here only."""
        self.node = machine.describe(self.config)
        saved = await self.store.document(HISTORY)
        self.history = History.from_json(orjson.loads(saved)) if saved else History()
        self.hands = self._make_hands(self.config, self._clock, self._report_residency)
        self._closers.push_async_callback(self.hands.close)
        self.hands.model.on_footprint = self._learn_footprint
        self.trajectories = TrajectoryRecovery(self.store, self.hands.environments)
        self._adopted = await self.trajectories.adopt()
        self.registry = Registry(
            self.config,
            prepare=self._prepare,
            nodes=lambda: (self.node,) if self.node is not None else (),
            switched=self._switched,
            paths=self._paths,
            env=self._env,
        )
        await self.registry.start()
        spec = self.config.manager_spec((self.node,), self._model_services)
        core = build_core(spec, function_bounds=self._function_bounds())
        self.admission = Admission(
            self._clock.now,
            total_max=self.config.scheduler.max_queued,
            task_max=lambda task: self.registry.config.tasks.get(task, TaskSpec()).max_queued,
        )
        self.held = HeldInputs(self.config.server.inputs_bytes)
        self.invocations = Invocations(
            spec=InvocationSpec(
                idempotency_ttl_s=self.config.server.idempotency_ttl_s, max_age_s=self.config.server.max_age_s
            ),
            functions=self.registry,
            history=self.history,
            store=self.store,
            logs=self.logs,
            admission=self.admission,
            held=self.held,
            observer=self.metrics,
            now=self._clock.now,
            wall=self._wall,
        )
        takeover = Reattachment(self.hands.environments)
        self.invocations.on_detach.append(takeover.detached)
        self.invocations.on_durable.append(takeover.settled)
        self.restart = Restart(
            invocations=self.invocations,
            functions=self.registry,
            store=self.store,
            logs=self.logs,
            admission=self.admission,
            takeover=takeover,
            wall=self._wall,
        )
        self._engine = Engine(
            core,
            DurableStarts(self.hands.executor, self.invocations, self.store, self.trajectories),
            clock=self._clock,
            history=self.history,
            listeners=[self.invocations],
            on_fault=partial(self.stop, keep_environments=True),
        )
        self.invocations.bind(self.engine)
        await self.engine.start()
        self._report_residency(self.hands.model.residency())
        self.trajectories.tell(self.engine)
        self._closers.push_async_callback(self.engine.close)
        self._closers.callback(self._save_history)

    async def serve(self) -> None:
        """Start if need be, then serve until SIGTERM, SIGINT or `stop`; then drain and close.

        Raises TangramError where a bug has stopped the scheduler: the next gateway goes on from the record.
        """
        if self.node is None:
            await self.start()
        gc.set_threshold(*COLLECT_EVERY)
        connections, streams_max = self._connections["http"], self.config.server.streams_max
        serving = asyncio.create_task(
            serve(HttpApp(self.services), self._sockets[0], self._closing.wait, CLOSE_GRACE_S, connections, streams_max)
        )
        try:
            await asyncio.wait(
                {serving, asyncio.ensure_future(self._stopping.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
            await self._drain()
        finally:
            self._closing.set()
            await asyncio.gather(serving, return_exceptions=True)
            await self.close()
        if self.engine.fault is not None:
            raise CodedError(f"{self.engine.fault}; the log tells more", component="engine")

    def stop(self, keep_environments: bool = False) -> None:
        """Take no new work, let what runs end within the grace, keep the rest for the next gateway.

        SIGTERM keeps the trajectories' sandboxes too, for an orchestrator starts the next gateway; SIGINT does not,
        for a person has ended it. A sandbox that no gateway comes for ends itself.
        """
        if keep_environments:
            self.hands.environments.keep()
        self.admission.draining = True
        self._stopping.set()

    async def _drain(self) -> None:
        grace_s = self.config.server.drain_grace_s if self.engine.fault is None else 0.0
        self._log.info("draining", living=len(self.invocations.living), grace_s=grace_s)
        self.grpc.drain()
        left = await self.restart.drain(grace_s)
        self._log.info("drained", left_for_the_next_gateway=left)

    async def close(self) -> None:
        """Let go of everything; idempotent."""
        await self._closers.aclose()

    @property
    def http_port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    @property
    def grpc_port(self) -> int:
        return int(self._sockets[1].getsockname()[1])

    # What the rooms tell each other

    async def _prepare(self, function: FunctionSpec) -> None:
        await self.hands.prepare(function)
        service = await self.hands.service(function)
        if service is not None:
            self._model_services[service.name] = service

    def _switched(self, config: GatewayConfig) -> None:
        changed = Reconfigured(
            tasks=config.tasks,
            resources=config.resources,
            function_bounds={name: spec.max_queued for name, spec in config.functions.items()},
            services=self._model_services,
        )
        self.engine.tell(changed)
        self._log.info("configuration applied", functions=len(config.functions))

    def _report_residency(self, resident: Mapping[str, tuple[Chunk, ...]]) -> None:
        if self._engine is None:
            return  # a model is being prepared: the engine is told of all that is resident once it starts
        self.engine.report_residency(self.config.node.name, resident)

    def _learn_footprint(self, service: ServiceSpec) -> None:
        """A model's restore takes longer or shorter than the scheduler believes."""
        self._model_services[service.name] = service
        if self._engine is not None:
            self.engine.tell(Reconfigured(services={service.name: service}))

    def _function_bounds(self) -> dict[str, int]:
        return {name: spec.max_queued for name, spec in self.config.functions.items()}

    def _make_services(self) -> Services:
        server = self.config.server
        return Services(
            guard=Guard(server.token),
            limits=Limits(
                body_bytes=server.body_limit_bytes,
                file_bytes=server.file_limit_bytes,
                body_s=server.body_timeout_s,
                batch_calls=server.batch_max,
                wait_s=server.wait_max_s,
            ),
            held=self.held,
            invocations=self.invocations,
            logs=self.logs,
            store=self.store,
            engine=self.engine,
            functions=self.registry,
            environments=self.hands.environments,
            metrics=self.metrics,
            callbacks=self.callbacks,
            learned=self.history.describe,
            configure=self.registry.configure,
            sandboxes=self._sandboxes,
            models=self.hands.model.resources,
            unready=self._unready,
        )

    def _sandboxes(self) -> Mapping[str, object]:
        described = plain(self.hands.provider.info)
        assert isinstance(described, dict)
        return described

    def _unready(self) -> str | None:
        if self.engine.fault is not None:
            return self.engine.fault
        return "draining" if self.admission.draining else self.store.failure

    def _watch(self) -> None:
        watch = self.metrics.watch
        watch("tangram_store_commits", "Transactions written", lambda: self.store.commits, counter=True)
        watch("tangram_store_rows", "Records written", lambda: self.store.rows_written, counter=True)
        watch("tangram_store_failing", "1 while the disk refuses records", lambda: float(self._unready() is not None))
        watch("tangram_log_followers", "Log streams open", lambda: self.logs.followers)
        dropped = "Log records dropped because the disk was too slow"
        watch("tangram_log_records_dropped", dropped, lambda: self.store.log_records_dropped, counter=True)
        slow = "Followers dropped because they did not read"
        watch("tangram_log_followers_dropped", slow, lambda: self.logs.followers_dropped, counter=True)
        for door, counted in self._connections.items():
            self._watch_connections(door, counted)
        watch("tangram_input_bytes_held", "Bytes of inputs that arrive or live", lambda: self.held.bytes)
        watch("tangram_living", "Invocations that have not ended", lambda: len(self.invocations.living))
        self.metrics.watch_units(self._units)
        self.metrics.watch_replicas(self.engine.replicas)
        self.metrics.watch_learned(self._learned)

    def _watch_connections(self, door: str, counted: Connections) -> None:
        watch = self.metrics.watch
        watch(f"tangram_{door}_connections", f"Connections open at the door {door}", lambda: counted.open)
        full = f"Connections refused at the door {door} because too many were open"
        watch(f"tangram_{door}_connections_refused", full, lambda: counted.refused, counter=True)

    def _learned(self) -> Iterator[tuple[str, Learned]]:
        for function in self.registry.all():
            learned = self.history.learned(function.name)
            if learned.t_ori_s is not None:
                yield function.name, learned

    def _units(self) -> Iterator[tuple[str, str, float]]:
        pools = self.engine.resources()["pools"]
        assert isinstance(pools, dict)
        for name, pool in pools.items():
            for state in ("total", "free"):
                if state in pool:
                    yield name, state, float(pool[state])

    # Chores

    async def _save_history_for_ever(self) -> None:
        while True:
            await asyncio.sleep(HISTORY_EVERY_S)
            self._save_history()

    def _save_history(self) -> None:
        self.store.save_document(HISTORY, orjson.dumps(self.history.to_json()).decode())

    def _retention(self) -> RetentionSpec:
        kept = self.config.server.retention
        return RetentionSpec(
            records_age_s=kept.records_age_s,
            records_bytes=kept.records_bytes,
            logs_age_s=kept.logs_age_s,
            logs_bytes=kept.logs_bytes,
            interval_s=kept.interval_s,
        )

    def _announce(self, recovered: Mapping[str, int]) -> None:
        info, node = self.hands.provider.info, self.node
        assert node is not None
        self._log.info(
            "serving",
            http=_address(self._sockets[0]),
            grpc=_address(self._sockets[1]),
            auth="bearer token" if self.config.server.token else "none: this machine only",
            sandboxes=info.kind,
            engine=info.engine,
            isolation=info.isolation,
            cores=node.cores,
            devices=node.devices,
            functions=len(self.config.functions),
            durability=self.config.server.durability,
            recovered={verdict: count for verdict, count in recovered.items() if count},
        )


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def lock_state(state_dir: Path) -> IO[str]:
    """Hold the state directory; raises Conflict where another gateway does."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        held = (state_dir / "lock").open("w")
    except OSError as error:
        raise StorageUnavailable(f"server.state_dir {state_dir}: {error}", component="store") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise Conflict(f"another gateway serves from {state_dir}", component="store") from None
    return held


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
