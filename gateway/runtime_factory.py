"""The hands: the five runtimes, made from the configuration; heavy libraries are imported only when they are used."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from gateway.config.load import GatewayConfig
from manager.clock import Clock
from manager.config import ServiceSpec
from manager.function import FunctionSpec, RuntimeKind
from runtimes.api.runtime import ApiRuntime
from runtimes.api.secrets import Secrets
from runtimes.local import LocalExecutor
from runtimes.model.runtime import ModelRuntime, OnResidency
from runtimes.model.settings import ModelSettings
from runtimes.runtime import Runtime
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.exec.runtime import ExecRuntime
from runtimes.sandbox.handler.instance import HandlerSettings
from runtimes.sandbox.handler.runtime import HandlerRuntime
from runtimes.sandbox.provider import DockerSettings, ProviderSettings, make_provider
from runtimes.sandbox.pytest.runtime import PytestRuntime
from runtimes.sandbox.sandbox import Provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtimes:
    """The runtimes by kind, the executor over them, and the rooms that the doors speak to directly."""

    provider: Provider
    environments: Environments
    model: ModelRuntime
    runtimes: Mapping[RuntimeKind, Runtime]
    executor: LocalExecutor

    async def prepare(self, function: FunctionSpec) -> None:
        """Check at registration that the function can ever run here; raises InvalidConfig or Unsupported."""
        await self.runtimes[function.runtime].prepare(function)

    async def service(self, function: FunctionSpec) -> ServiceSpec | None:
        """What the scheduler must know of a prepared model function; None for any other."""
        return None if function.model is None else await self.model.footprint(function)

    async def close(self) -> None:
        """End every runtime, then the sandboxes, then the engine that made them, even where one of them fails."""
        async with AsyncExitStack() as closers:
            closers.push_async_callback(self.provider.close)
            closers.push_async_callback(self.environments.close)
            closers.push_async_callback(self.executor.close)


def make_runtimes(config: GatewayConfig, clock: Clock, on_residency: OnResidency) -> Runtimes:
    """The hands of this machine; raises InvalidConfig or Unsupported where its sandboxes cannot be made."""
    default = config.sandbox.spec(config.sandbox)
    provider = make_provider(
        ProviderSettings(
            kind=config.sandbox.provider,
            state_dir=config.server.state_dir / "sandboxes",
            max_starting=config.sandbox.max_starting,
            engine_silence_s=config.sandbox.engine_silence_s,
            docker=DockerSettings(
                host=config.sandbox.docker.host,
                transport=config.sandbox.docker.transport,
                copy_limit_bytes=config.sandbox.docker.copy_limit_bytes,
            ),
        )
    )
    environments = Environments(provider, EnvironmentSettings(default=default), clock)
    handlers = HandlerRuntime(provider, HandlerSettings(sandbox=default))
    environments.exclude(lambda: handlers.sandboxes)
    model = ModelRuntime(model_settings(config), on_residency=on_residency)
    runtimes: dict[RuntimeKind, Runtime] = {
        RuntimeKind.EXEC: ExecRuntime(environments),
        RuntimeKind.PYTEST: PytestRuntime(environments),
        RuntimeKind.HANDLER: handlers,
        RuntimeKind.MODEL: model,
        RuntimeKind.API: ApiRuntime(Secrets(config.server.secrets_dir)),
    }

    async def open_environment(trajectory: str, function: FunctionSpec) -> None:
        await environments.ensure(trajectory, function.sandbox)

    executor = LocalExecutor(runtimes, clock, open_environment=open_environment)
    return Runtimes(provider=provider, environments=environments, model=model, runtimes=runtimes, executor=executor)


def model_settings(config: GatewayConfig) -> ModelSettings:
    """The model runtime's settings from the YAML's ``node.devices`` and ``models``."""
    devices = config.node.devices
    return ModelSettings(
        device=devices.kind,
        devices=devices.count or 0,
        device_bytes=devices.memory_bytes or 0,
        host_bytes=config.models.host_memory_bytes or 0,
        stuck_s=config.models.stuck_s,
        state_dir=config.server.state_dir / "models",
        node=config.node.name,
    )
