"""Services: everything that the HTTP and gRPC doors speak to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.auth import Guard
from gateway.config.sections import ServerConfig
from gateway.invocations.admission import HeldInputs
from gateway.invocations.callbacks import CallbackSender
from gateway.invocations.invocations import Invocations
from gateway.invocations.logs import Logs
from gateway.metrics import Metrics
from gateway.store.store import Store
from manager.engine import Engine
from manager.function import FunctionSpec
from runtimes.sandbox.sandbox import ProviderInfo, Sandbox
from tangram.types import ConfigDiff


class FunctionCatalog(Protocol):
    """The registered functions: `gateway.registry.Registry`."""

    def get(self, name: str) -> FunctionSpec:
        """The function as it is now; raises NotFound."""
        ...

    def all(self) -> tuple[FunctionSpec, ...]:
        """Every function, by name."""
        ...


class SandboxLookup(Protocol):
    """Where a trajectory's sandbox is found: `runtimes.sandbox.environments.Environments`."""

    def get(self, trajectory: str) -> Sandbox | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the doors open to; made once by `gateway.app`."""

    guard: Guard
    #: Bounds of the doors: ``server`` of the configuration.
    bounds: ServerConfig
    held: HeldInputs
    invocations: Invocations
    logs: Logs
    store: Store
    engine: Engine
    functions: FunctionCatalog
    environments: SandboxLookup
    metrics: Metrics
    callbacks: CallbackSender
    #: Function -> what was learned of it by key (`manager.learning.history.History.describe`).
    learned: Callable[[str], Mapping[str, object]]
    #: A configuration document and whether to change nothing -> the differences. Raises InvalidConfig.
    configure: Callable[[bytes, bool], Awaitable[ConfigDiff]]
    #: What the sandboxes are and how isolated, in plain words.
    sandboxes: Callable[[], ProviderInfo]
    #: The devices' processes, what is resident on them, and the counts of swaps.
    models: Callable[[], Mapping[str, object]]
    #: Why the gateway takes no work now; None when it does.
    unready: Callable[[], str | None]
