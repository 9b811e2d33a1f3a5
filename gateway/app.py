"""The composition root: ``async with gateway(config) as app`` is a gateway that serves."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import structlog

from gateway import limits
from gateway.api import Api
from gateway.auth import Guard, PageSessions, announced, check_listeners, open_tokens
from gateway.cluster.cluster import open_cluster
from gateway.config.load import GatewayConfig
from gateway.dashboard.stream import LOST_SHOWN_S, Troubles, Watch
from gateway.dispatcher import GatewayDispatcher
from gateway.facades.app import FacadeListeners
from gateway.grpc.server import GrpcServer
from gateway.http.app import HttpApp, HttpListener
from gateway.http.ports import PortApp
from gateway.http.server import listen
from gateway.http.streaming import GIVE_UP_STALLS
from gateway.invocations.callbacks import CallbackSender
from gateway.invocations.invocations import Admission, DeadLetters, HeldInputs, Invocations
from gateway.invocations.logs import Logs
from gateway.invocations.restart import QuotaRecord, Reattachment, Restart, TrajectoryRecovery
from gateway.limits import MachineLimits
from gateway.metrics import (
    Metrics,
    invocation_families,
    learned_families,
    node_families,
    replica_families,
    unit_families,
)
from gateway.ports import PortGrants, TrajectoryPorts
from gateway.registry import UPLOADS, AppliedConfigs, HandlerUploads, KeptFunctions, Registry
from gateway.runtime_factory import ModelServices, Runtimes, handler_copies, make_runtimes
from gateway.stats import Stats
from gateway.steps import TaskSteps
from gateway.store.maintenance import StateDirectory, prune_for_ever
from gateway.store.store import Durability, Store, StoreSpec
from gateway.tls import Connections, address_of
from gateway.trajectory_records import Leases, SnapshotCatalogue, UnreadAnswers
from manager.assembly import build_core
from manager.clock import Clock, MonotonicClock, WallClock
from manager.core.outside import OutsideQueue
from manager.engine import Engine
from manager.errors import CodedError
from manager.events import Reconfigured
from manager.learning import History, SavedHistory
from runtimes.chores import end_chores
from runtimes.node.journal import BOOT_ID

HISTORY = "history"
#: The document of the time of day: the machine's boot, and how far it was ahead of its monotonic clock.
CLOCK = "clock"
#: Seconds between two savings of the learned durations.
HISTORY_EVERY_S = 30.0
#: Allocations between two collections of each generation. The loop stands still meanwhile, and what waits survives all
#: of them: the first two are small (a fraction of a millisecond, a few of them), and a full one, which walks every
#: living invocation, is rare. Nothing of ours is left to it: an invocation that has ended is in no circle.
COLLECT_EVERY = (2_000, 5, 10_000)

#: Makes the runtimes of this machine from a configuration.
MakeRuntimes = Callable[[GatewayConfig, Clock], Runtimes]


@asynccontextmanager
async def gateway(
    config: GatewayConfig,
    *,
    paths: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    make: MakeRuntimes | None = None,
    wall: Callable[[], float] | None = None,
) -> AsyncIterator[App]:
    """A gateway with its record open, its functions ready and what an earlier one left taken up; see `App.serve`.

    ``paths`` and ``env`` are what the configuration was read from, for reloads without a body; ``wall`` is the time of
    day, if it is not this machine's. On leaving everything is let go, the youngest first. Raises InvalidConfig if it
    may not serve as configured.
    """
    check_listeners(config.server)
    async with AsyncExitStack() as closers:
        app = App(config, wall or WallClock())
        await app.prepare(closers, paths, env, make)
        app.assemble()
        await app.open(closers)
        yield app


class App:
    """One gateway: `serve` until it is told to stop; `stop` may be called from anywhere on its loop."""

    def __init__(self, config: GatewayConfig, wall: Callable[[], float]) -> None:
        self.config, self.wall, self._clock = config, wall, MonotonicClock()
        self._outside = OutsideQueue(self._clock.now)
        self._log = structlog.get_logger("gateway")
        self._stopping = asyncio.Event()

    async def prepare(
        self,
        closers: AsyncExitStack,
        paths: Sequence[Path],
        env: Mapping[str, str] | None,
        make: MakeRuntimes | None,
    ) -> None:
        """Bind the sockets, open the record, make the runtimes and prepare the functions."""
        config, server = self.config, self.config.server
        self._bind_sockets(closers)
        state_dir = self._state_dir
        spec = StoreSpec(path=state_dir.database, durability=Durability(server.durability))
        self.store = Store(spec, wall=self.wall, lost=lambda: state_dir.lost)
        await self.store.open()
        closers.push_async_callback(self.store.close)
        await self._take_up_clock()
        here, copies = limits.describe(config), handler_copies(server)
        self.machines = await open_cluster(config, here, self.store, self._clock, self.wall, copies)
        self.node = self.machines.here
        closers.push_async_callback(self.machines.close)
        self.history = self._remembered(await self.store.document(HISTORY))
        self.runtimes = make_runtimes(config, self._clock, copies) if make is None else make(config, self._clock)
        closers.push_async_callback(self.runtimes.close)
        self._trajectories = TrajectoryRecovery(self.store, self.runtimes.environments)
        #: How many trajectories were taken up, by verdict.
        self._adopted = await self._trajectories.adopt(self.machines.awaited)
        self._models = ModelServices(self.runtimes, config.node.name)
        await (applied := AppliedConfigs(self.store)).load()
        self.registry = Registry(
            config,
            prepare=self.machines.preparing(self._models.prepare),
            nodes=lambda: (self.machines.here,),
            outside=self._outside,
            pulled=lambda image: (images := self.runtimes.provider.images) is not None and images.pulls(image),
            paths=paths,
            env=env,
            kept=KeptFunctions(applied, HandlerUploads(server.state_dir / UPLOADS)),
        )
        self.registry.check()
        await self.registry.take_up()
        closers.push_async_callback(self.registry.preparation.close)

    async def _take_up_clock(self) -> None:
        """Let the time of day go on where the gateway before had it, unless the machine was started since."""
        saved = await self.store.document(CLOCK)
        if saved is not None and isinstance(self.wall, WallClock):
            boot, ahead_s = saved.split()
            if boot == _boot():
                self.wall.resume(float(ahead_s))
        self._save_clock()

    def _save_clock(self) -> None:
        if isinstance(self.wall, WallClock):
            self.store.save_document(CLOCK, f"{_boot()} {self.wall.ahead_s}")

    def _bind_sockets(self, closers: AsyncExitStack) -> None:
        """Hold the state directory, and bind the sockets."""
        config, server = self.config, self.config.server
        by_name = config.sandbox.provider.kind == "plain"  # its commands are another user's, and work below
        self._state_dir = closers.enter_context(StateDirectory(server.state_dir, entered=by_name))
        self._limits = MachineLimits.measured(server)
        self.tokens = None if server.auth == "none" else open_tokens(server.state_dir, server.token)
        silent_s = GIVE_UP_STALLS * server.stall_s
        self._http_socket = closers.enter_context(listen(server.host, server.port, silent_s))
        self._grpc_socket = closers.enter_context(listen(server.host, server.grpc_port, silent_s))
        if self.tokens is not None:
            closers.enter_context(announced(server.state_dir, server.host, self.http_port))
        self._listener = HttpListener(self._http_socket, self._limits.connections_max, server)
        closers.push_async_callback(self._listener.close)
        self.facades = FacadeListeners(server, self._limits.connections_max, silent_s, closers)
        self._ports_socket = self._ports_listener = None
        if server.ports.port is not None:
            self._ports_socket = closers.enter_context(listen(server.host, server.ports.port, silent_s))
            self._ports_listener = HttpListener(self._ports_socket, self._limits.connections_max, server)
            closers.push_async_callback(self._ports_listener.close)

    def assemble(self) -> None:
        """Make the parts that wait for nothing, and tell them of each other."""
        config, server = self.config, self.config.server
        self.runtimes.report_progress(self.registry.preparation.note)
        #: Open connections by server.
        grpc = Connections(limit=self._limits.connections_max)
        self.connections = {"http": self._listener.connections, "grpc": grpc, **self.facades.connections}
        if self._ports_listener is not None:
            self.connections["ports"] = self._ports_listener.connections
        self.logs = Logs(self.store, server, wall=self.wall)
        self.metrics, self.stats = Metrics(), Stats(self._clock.now, self.wall)
        self.traces = None
        if server.traces.endpoint:
            from gateway.tracing import TraceExporter  # its SDK is in an extra

            self.traces = TraceExporter(server.traces)
        self.admission = Admission(
            self._clock.now,
            total_max=config.scheduler.max_queued,
            task=self.registry.task,
        )
        self.held = HeldInputs(server.inputs_bytes)
        self.steps = TaskSteps(self.store, self.wall)
        self.invocations = Invocations(
            server=server,
            functions=self.registry,
            history=self.history,
            store=self.store,
            logs=self.logs,
            admission=self.admission,
            held=self.held,
            outside=self._outside,
            now=self._clock.now,
            wall=self.wall,
        )
        reattachment = self.machines.reattachment(self.runtimes.environments)
        self.restart = Restart(
            invocations=self.invocations,
            functions=self.registry,
            store=self.store,
            logs=self.logs,
            admission=self.admission,
            takeover=reattachment,
            wall=self.wall,
        )
        self._quotas = QuotaRecord(self.store, lambda: self.registry.config.resources, self.wall)
        self.engine = self._make_engine()
        self.callbacks = CallbackSender(server.callbacks, self.store, wall=self.wall)
        self.watch = self._make_watch()
        self.leases = Leases(self._clock.now, self._idle_s, self.engine.end_trajectory, self._trajectories.keep_holds)
        self.ports = self._make_ports()
        self.api = self._make_api()
        self.grpc = GrpcServer(self.api, self.connections["grpc"])
        self._bind(reattachment)

    def _bind(self, reattachment: Reattachment) -> None:
        """Tell the parts of each other."""
        self.invocations.bind(self.engine)
        self.invocations.on_detach.append(reattachment.detached)
        self.invocations.on_settled.append(reattachment.settled)
        self.invocations.on_accept += [self.stats.accepted, self.steps.accepted]
        self.invocations.on_start.append(self.steps.started)
        self.invocations.on_end += [self.stats.ended, self.steps.ended]
        if self.traces is not None:
            self.invocations.on_end.append(self.traces.ended)
        self.invocations.on_end.append(self.callbacks.ended)
        self.invocations.on_end.append(lambda record: self.runtimes.environments.sessions.close(record.id))
        self.registry.on_switch.append(self._switched)
        self.registry.preparation.on_ready.append(self._ready)
        self._note_sizes()
        self._models.report_to(self.engine)
        self._watch()

    def _make_engine(self) -> Engine:
        spec = self.registry.config.manager_spec(self.machines.specs, self._models.services)
        dispatcher = GatewayDispatcher(
            self.machines.executor(self.runtimes.executor, self._trajectories),
            invocations=self.invocations,
            store=self.store,
            trajectories=self._trajectories,
            quotas=self._quotas,
            on_end=self._trajectory_ended,
            pass_trace=None if self.traces is None else self.traces.passed_on,
        )
        return Engine(
            build_core(spec, function_bounds=_bounds(self.registry.config), outside=self._outside),
            dispatcher,
            clock=self._clock,
            history=self.history,
            listeners=[self.invocations, self.stats],
            on_fault=partial(self.stop, keep_environments=True),
        )

    def _make_watch(self) -> Watch:
        return Watch(
            summary=self.engine.summary,
            stats=self.stats,
            functions=self.registry.health,
            steps=self.steps.recent,
            troubles=lambda: Troubles(self.api.unready(), self.machines.lost(LOST_SHOWN_S)),
            wanted=self.registry.kinds,
            wall=self.wall,
        )

    def _make_ports(self) -> TrajectoryPorts:
        settings, address = self.config.server.ports, ""
        if self._ports_socket is not None:
            scheme = "http" if self.config.server.tls is None else "https"
            address = settings.advertise or f"{scheme}://{address_of(self._ports_socket)}"
        return TrajectoryPorts(
            settings=settings,
            grants=PortGrants(self.store, self.wall, settings.grants_max),
            invocations=self.invocations,
            engine=self.engine,
            functions=self.registry,
            sessions=self.runtimes.environments.sessions,
            is_crowded=lambda: self.admission.queued > 0,
            address=address.rstrip("/"),
        )

    def _make_api(self) -> Api:
        return Api(
            server=self.config.server,
            guard=Guard(self.tokens),
            pages=PageSessions(self._clock.now),
            state_dir=self._state_dir,
            limits=self._limits,
            held=self.held,
            admission=self.admission,
            invocations=self.invocations,
            dead_letters=DeadLetters(self.invocations, self.store),
            logs=self.logs,
            callbacks=self.callbacks,
            store=self.store,
            engine=self.engine,
            functions=self.registry,
            history=self.history,
            runtimes=self.runtimes,
            machines=self.machines,
            leases=self.leases,
            ports=self.ports,
            answers=UnreadAnswers(),
            snapshots=SnapshotCatalogue(self.runtimes.environments, self.machines),
            steps=self.steps,
            metrics=self.metrics,
            stats=self.stats,
            watch=self.watch,
            wall=self.wall,
        )

    async def open(self, closers: AsyncExitStack) -> None:
        """Start the engine, take up what an earlier gateway left, and open the gRPC server."""
        closers.enter_context(self._stopped_by_signals())
        await self.engine.start()
        self._models.report()
        self.machines.begin(self.engine, self.restart.awaited_on, self.registry.all, self._models)
        self._trajectories.tell(self.engine)
        self.leases.take_up(self._trajectories.holds())
        await self._quotas.take_up(self.engine)
        closers.push_async_callback(self.engine.close)
        closers.callback(self._save_history)
        await self.steps.load()
        await self.ports.grants.load(lambda name: self.engine.trajectory(name) is not None)
        closers.push_async_callback(self.ports.close)
        recovered = {**await self.restart.recover(self.machines.awaits), **self._adopted}
        self.steps.take_up(self.engine)
        self.registry.start()
        self.machines.open(self.registry.preparation.again)
        await self.grpc.open(self._grpc_socket)
        closers.push_async_callback(self.grpc.close)
        if self.traces is not None:
            closers.push_async_callback(self.traces.close)
        chores = (
            self._save_history_for_ever(),
            prune_for_ever(self.store, self.config.server.retention, self.wall),
            self.callbacks.deliver_for_ever(),
            self.leases.end_lapsed_for_ever(),
            self.machines.watch_for_ever(self.runtimes.provider.trouble),
            self._state_dir.watch_for_ever(),
            self._state_dir.check(),
        )
        for chore in chores:
            closers.push_async_callback(end_chores, asyncio.create_task(chore))
        self._announce(recovered)

    async def serve(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`, then drain.

        Raises CodedError if a bug has stopped the scheduler: the next gateway goes on from the record.
        """
        gc.set_threshold(*COLLECT_EVERY)
        self._http = HttpApp(self.api)
        self._listener.open(self.facades.open(self.api, self._http))
        if self._ports_listener is not None:
            app = PortApp(self.ports, self.api.guard, self.config.server.stream_message_bytes)
            self._ports_listener.open(app)
        try:
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait({self._listener.serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            listeners = [self._listener] if self._ports_listener is None else [self._listener, self._ports_listener]
            await asyncio.gather(*(listener.close() for listener in listeners), self.facades.close())
        if self.engine.fault is not None:
            raise CodedError(f"{self.engine.fault}; the log tells more", component="engine")

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT stop this gateway; a program around it has its own handlers back afterwards."""
        if threading.current_thread() is not threading.main_thread():  # signals arrive nowhere else
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        loop.add_signal_handler(signal.SIGTERM, self.stop, True)
        loop.add_signal_handler(signal.SIGINT, self.stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def stop(self, keep_environments: bool = False) -> None:
        """Take no new work, let what runs end within the grace, keep the rest for the next gateway.

        SIGTERM keeps the trajectories' sandboxes too, for an orchestrator starts the next gateway; SIGINT does not,
        for a person has ended it. A sandbox that no gateway comes for ends itself; of a lost record none comes.
        """
        if keep_environments and not self._state_dir.is_gone():
            self.runtimes.environments.keep()
        self.admission.draining = True
        self._stopping.set()

    async def _drain(self) -> None:
        grace_s = self.config.server.drain_grace_s if self.engine.fault is None else 0.0
        self._log.info("draining", living=len(self.invocations.living), grace_s=grace_s)
        self.api.answers.leave()
        await self.ports.close()
        left = await self.restart.drain(grace_s)
        await self.machines.let_go()
        self.watch.close()
        self._http.close_streams()
        self._log.info("drained", left_for_the_next_gateway=left)

    @property
    def http_port(self) -> int:
        return int(self._http_socket.getsockname()[1])

    def page_address(self) -> str:
        """Return an address for a browser; the key in it is new and opens the page once."""
        base = f"{'http' if self.config.server.tls is None else 'https'}://{address_of(self._http_socket)}/"
        return base if self.tokens is None else f"{base}?key={self.api.pages.issue()}"

    @property
    def grpc_port(self) -> int:
        return int(self._grpc_socket.getsockname()[1])

    # What the parts tell each other

    def _switched(self, config: GatewayConfig) -> None:
        changed = Reconfigured(
            tasks=config.tasks,
            resources=config.resources,
            function_bounds=_bounds(config),
            services=self._models.services,
        )
        self.engine.tell(changed)
        self._note_sizes()
        self._log.info("configuration applied", functions=len(config.functions))

    def _note_sizes(self) -> None:
        for function in self.registry.all():
            self.history.measured_by(function.name, function.duration.size)

    def _ready(self, name: str) -> None:
        """A function may start: the scheduler hears of its service, and what was held back goes to it."""
        self.engine.tell(Reconfigured(services=dict(self._models.services)))
        self.invocations.submit(self.invocations.pending_functions.let_go())

    def _trajectory_ended(self, trajectory: str) -> None:
        self.steps.trajectory_ended(trajectory)
        self.leases.ended(trajectory)
        self.ports.ended(trajectory)

    def _idle_s(self, trajectory: str) -> float | None:
        result = self.engine.trajectory(trajectory)
        return None if result is None or result["state"] == "ending" else float(str(result["idle_s"]))

    def _watch(self) -> None:
        watch = self.metrics.watch
        watch("tangram_store_commits", "Transactions written", lambda: self.store.commits, counter=True)
        watch("tangram_store_rows", "Records written", lambda: self.store.rows_written, counter=True)
        watch(
            "tangram_store_failing",
            "1 while the disk refuses records",
            lambda: float(self.api.unready() is not None),
        )
        dropped = "Log records dropped because the disk was too slow"
        watch("tangram_log_records_dropped", dropped, lambda: self.store.log_records_dropped, counter=True)
        register, invocations = self.metrics.register, self.invocations
        register(lambda: invocation_families(self.stats, (each.record for each in invocations.living)))
        self.logs.measured_by(self.metrics)
        for server_name, counted in self.connections.items():
            counted.measured_by(self.metrics, server_name)
        watch("tangram_input_bytes_held", "Bytes of inputs that arrive or live", lambda: self.held.bytes)
        watch("tangram_living", "Invocations that have not ended", lambda: len(self.invocations.living))
        self.watch.measured_by(self.metrics)
        if self.traces is not None:
            self.traces.measured_by(self.metrics)
        register(lambda: unit_families(self.engine.resources()))
        register(lambda: node_families(self.machines.counts()))
        register(lambda: replica_families(self.engine.replicas()))
        register(lambda: learned_families((each.name for each in self.registry.all()), self.history))

    # Chores

    async def _save_history_for_ever(self) -> None:
        while True:
            await asyncio.sleep(HISTORY_EVERY_S)
            self._save_history()
            self._save_clock()

    def _remembered(self, saved: str | None) -> History:
        """The history of an earlier run; what another version wrote is forgotten."""
        try:
            return History(msgspec.json.decode(saved, type=SavedHistory) if saved else None)
        except msgspec.ValidationError as error:
            self._log.warning("history_forgotten", error=str(error))
            return History()

    def _save_history(self) -> None:
        self.store.save_document(HISTORY, msgspec.json.encode(self.history.saved()).decode())

    def _announce(self, recovered: Mapping[str, int]) -> None:
        info = self.runtimes.provider.info
        self._log.info(
            "serving",
            http=address_of(self._http_socket),
            grpc=address_of(self._grpc_socket),
            facades=self.facades.addresses,
            auth="none: whoever reaches this machine's loopback" if self.tokens is None else "bearer token",
            sandboxes=info.kind,
            engine=info.engine,
            isolation=info.isolation,
            cores=self.machines.here.cores,
            devices=self.machines.here.devices,
            functions=len(self.registry.config.functions),
            durability=self.config.server.durability,
            recovered={verdict: count for verdict, count in recovered.items() if count},
        )


def _boot() -> str:
    return BOOT_ID.read_text(encoding="ascii").strip()


def _bounds(config: GatewayConfig) -> Mapping[str, int]:
    return {name: spec.max_queued for name, spec in config.functions.items()}
