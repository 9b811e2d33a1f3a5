"""The runtimes, made from the configuration; heavy libraries are imported only when they are used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from gateway.config.load import GatewayConfig
from gateway.config.schema import ServerConfig
from manager.action import Chunk
from manager.clock import Clock
from manager.config import ServiceSpec
from manager.engine import Engine
from manager.events import Reconfigured
from manager.function import FunctionSpec
from runtimes.executor import LocalExecutor
from runtimes.kind import RuntimeDeps
from runtimes.kinds import KINDS
from runtimes.model.request import ModelSettings
from runtimes.model.runtime import MODEL, ModelRuntime
from runtimes.runtime import Runtime
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.handler.runtime import HANDLER, HandlerRuntime
from runtimes.sandbox.handler.sources import HandlerCopies
from runtimes.sandbox.provider import make_provider
from runtimes.sandbox.sandbox import Provider
from runtimes.secrets import Secrets

#: In the state directory: what handlers run. Hidden, so that it counts to no handler that is kept around it.
COPIES = ".handlers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtimes:
    """The runtimes by kind, the executor over them, and the parts that the servers speak to directly."""

    provider: Provider
    environments: Environments
    model: ModelRuntime
    runtimes: Mapping[str, Runtime]
    executor: LocalExecutor

    async def prepare(self, function: FunctionSpec) -> None:
        """Check at registration that the function can ever run here; raises InvalidConfig or Unsupported."""
        if function.sandbox is not None:
            self.environments.declare(function.name, function.sandbox)
        await self.runtimes[function.runtime].prepare(function)

    def handlers_in_use(self) -> Collection[Path]:
        """Return the directories of the handlers that have instances, or may."""
        handlers = self.runtimes.get(HANDLER.name)
        return handlers.directories() if isinstance(handlers, HandlerRuntime) else ()

    def report_progress(self, on_progress: Callable[[str, str], None]) -> None:
        """Tell from now on what is done for a function that is being prepared, by its name."""
        handlers = self.runtimes.get(HANDLER.name)
        if isinstance(handlers, HandlerRuntime):
            handlers.on_progress = on_progress

    async def service(self, function: FunctionSpec) -> ServiceSpec | None:
        """What the scheduler must know of a prepared model function; None for any other."""
        return None if function.model is None else await self.model.footprint(function)

    async def close(self) -> None:
        """End every runtime, then the sandboxes, then the engine that made them, even where one of them fails."""
        async with AsyncExitStack() as closers:
            closers.push_async_callback(self.provider.close)
            closers.push_async_callback(self.environments.close)
            closers.push_async_callback(self.executor.close)


class ModelServices:
    """What the scheduler must know of the model services: what each costs, and where it is resident."""

    def __init__(self, runtimes: Runtimes, here: str) -> None:
        """``here`` is this machine's name as a node."""
        self._runtimes = runtimes
        self._here = here
        self._engine: Engine | None = None
        #: By service and node, what it costs there.
        self._by_node: dict[str, dict[str, ServiceSpec]] = {}
        #: By service, the node that is gone whose costs are kept until another node has told its own.
        self._gone: dict[str, str] = {}
        runtimes.model.on_footprint = self._keep

    @property
    def services(self) -> dict[str, ServiceSpec]:
        """Every service that was made ready on some node."""
        return {name: _on_all(by_node) for name, by_node in self._by_node.items()}

    async def prepare(self, function: FunctionSpec) -> None:
        """Make a function ready; raises the typed error of one that cannot run here."""
        await self._runtimes.prepare(function)
        service = await self._runtimes.service(function)
        if service is not None:
            self._keep(service)

    def report_to(self, engine: Engine) -> None:
        """Tell the engine from now on of what is learned, and of what comes and goes on this machine's devices."""
        self._engine = engine
        self._runtimes.model.on_footprint = lambda service: self.learn(self._here, (service,))
        self._runtimes.model.on_residency = partial(engine.report_residency, self._here)

    def learn(self, node: str, services: Sequence[ServiceSpec]) -> None:
        """Take up what services cost on a node, and tell the engine what is new."""
        for name in [each.name for each in services if self._gone.get(each.name) == node]:
            del self._gone[name]  # it is back
        news = [each for each in services if self._by_node.get(each.name, {}).get(node) != each]
        for service in news:
            self._set(node, service)
        self._report_costs([service.name for service in news])

    def forget(self, node: str) -> None:
        """A node is gone: its costs count no more, where others have the service."""
        had = [name for name, by_node in self._by_node.items() if node in by_node]
        gone = [name for name in had if len(self._by_node[name]) > 1]
        for name in gone:
            del self._by_node[name][node]
        self._gone.update((name, node) for name in had if name not in gone)
        self._report_costs(gone)

    def _report_costs(self, names: Sequence[str]) -> None:
        if names and self._engine is not None:
            self._engine.tell(Reconfigured(services={name: _on_all(self._by_node[name]) for name in names}))

    def resident(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Return what is resident on this machine's devices: chunks by service."""
        return self._runtimes.model.residency()

    def report(self) -> None:
        """Tell the engine of all that is resident now."""
        if self._runtimes.model.on_residency is not None:
            self._runtimes.model.on_residency(self._runtimes.model.residency())

    def _keep(self, service: ServiceSpec) -> None:
        self._set(self._here, service)

    def _set(self, node: str, service: ServiceSpec) -> None:
        by_node = self._by_node.setdefault(service.name, {})
        by_node.pop(self._gone.pop(service.name, ""), None)
        by_node[node] = service


def _on_all(by_node: Mapping[str, ServiceSpec]) -> ServiceSpec:
    """Return a service as the scheduler knows it: the most bytes and the mean restore of its nodes, and each one's."""
    sizes: dict[int, int] = {}
    seconds: dict[int, list[float]] = {}
    for service in by_node.values():
        for dop, size in service.bytes_by_dop.items():
            sizes[dop] = max(size, sizes.get(dop, 0))
        for dop, restore_s in service.restore_s_by_dop.items():
            seconds.setdefault(dop, []).append(restore_s)
    return replace(
        next(iter(by_node.values())),
        bytes_by_dop=sizes,
        restore_s_by_dop={dop: fmean(each) for dop, each in seconds.items()},
        restore_s_by_node={node: service.restore_s_by_dop for node, service in by_node.items()},
    )


def handler_copies(server: ServerConfig) -> HandlerCopies:
    """Return where a gateway keeps what its handlers run; the state directory must be its own by now."""
    private = [server.state_dir] if server.secrets_dir is None else [server.state_dir, server.secrets_dir]
    return HandlerCopies(server.state_dir / COPIES, private)


def make_runtimes(config: GatewayConfig, clock: Clock, copies: HandlerCopies | None = None) -> Runtimes:
    """The runtimes of this machine, which run handlers from ``copies``; without, in their own directories.

    Raises InvalidConfig or Unsupported if its sandboxes cannot be made.
    """
    default, state_dir = config.sandbox.default, config.server.state_dir
    secrets = Secrets(config.server.secrets_dir)
    provider = make_provider(replace(config.sandbox.provider, state_dir=state_dir / "sandboxes", secrets=secrets))
    settings = EnvironmentSettings(default=default, secrets=secrets, sessions=config.server.sessions)
    environments = Environments(provider, settings, clock)
    deps = RuntimeDeps(
        provider=provider,
        environments=environments,
        sandbox=default,
        models=model_settings(config),
        secrets=secrets,
        requirements=config.sandbox.requirements,
        layers_dir=state_dir / "requirements",
        copies=copies or HandlerCopies(),
    )
    runtimes = {name: kind.make(deps) for name, kind in KINDS.items()}
    model = runtimes[MODEL.name]
    assert isinstance(model, ModelRuntime), "the scheduler must know of its services"

    async def open_environment(trajectory: str, task: str, function: FunctionSpec) -> None:
        await environments.ensure(trajectory, function.sandbox, task=task)

    executor = LocalExecutor(runtimes, clock, open_environment=open_environment)
    return Runtimes(provider=provider, environments=environments, model=model, runtimes=runtimes, executor=executor)


def model_settings(config: GatewayConfig) -> ModelSettings:
    """The model runtime's settings from the YAML's ``node.devices`` and ``models``."""
    devices = config.node.devices
    return replace(
        config.models,
        device=devices.kind,
        devices=devices.count or 0,
        device_bytes=devices.memory_bytes or 0,
        state_dir=config.server.state_dir / "models",
        node=config.node.name,
    )
