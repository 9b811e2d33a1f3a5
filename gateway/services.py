"""Services: everything that the HTTP and gRPC doors speak to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.auth import Guard, PageSession
from gateway.cluster.cluster import Cluster
from gateway.config.schema import ServerConfig
from gateway.dashboard.stream import Watch
from gateway.dispatcher import GatewayDispatcher
from gateway.invocations.callbacks import CallbackSender
from gateway.invocations.invocations import Admission, DeadLetters, HeldInputs, Invocations
from gateway.invocations.logs import Logs
from gateway.metrics import Metrics
from gateway.registry import Readiness
from gateway.stats import Stats
from gateway.steps import TaskSteps
from gateway.store.store import Store
from gateway.trajectory_records import Leases, SnapshotCatalogue
from manager.config import TaskSpec
from manager.engine import Engine
from manager.errors import Unsupported
from manager.function import FunctionSpec
from runtimes.sandbox.files import LocalFiles, SandboxFiles
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import SessionTable
from runtimes.sandbox.spec import ImageKeeper, ProviderInfo
from tangram.types import ConfigDiff, FunctionUpload, RevisionChange


class FunctionCatalog(Protocol):
    """The registered functions: `gateway.registry.Registry`."""

    def get(self, name: str) -> FunctionSpec:
        """The function as it is now; raises NotFound."""
        ...

    def task(self, name: str) -> TaskSpec:
        """The task's share and bounds; raises InvalidInput for one that is not declared, where such are refused."""
        ...

    def all(self) -> tuple[FunctionSpec, ...]:
        """Every function, by name."""
        ...

    def readiness(self, name: str) -> Readiness:
        """Whether the function's actions may start."""
        ...

    def changes(self, name: str) -> tuple[RevisionChange, ...]:
        """What was changed of it since the start, the last first."""
        ...

    def source(self, name: str) -> Literal["files", "applied"]:
        """Where it comes from."""
        ...


class SandboxLookup(Protocol):
    """Where a trajectory's sandbox is found: `runtimes.sandbox.environments.Environments`."""

    def get(self, trajectory: str) -> Sandbox | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the doors open to; made once by `gateway.app`."""

    guard: Guard
    #: The browser that came with the key of the page's address.
    session: PageSession
    #: Bounds of the doors: ``server`` of the configuration.
    bounds: ServerConfig
    held: HeldInputs
    admission: Admission
    invocations: Invocations
    dead_letters: DeadLetters
    logs: Logs
    store: Store
    engine: Engine
    functions: FunctionCatalog
    environments: SandboxLookup
    #: The commands that somebody types to.
    sessions: SessionTable
    leases: Leases
    steps: TaskSteps
    metrics: Metrics
    #: Counts of invocations and tries; rates, times and failures of the last minutes.
    stats: Stats
    #: What the page is told, as it changes.
    watch: Watch
    callbacks: CallbackSender
    #: Function -> what was learned of it by key (`manager.learning.History.describe`).
    learned: Callable[[str], Mapping[str, object]]
    #: A configuration document, whether to change nothing, and whether what it does not name is removed -> the
    #: differences. Raises InvalidConfig.
    configure: Callable[[bytes, bool, bool], Awaitable[ConfigDiff]]
    #: Adds or changes one function: name, definition with files, and whether only to tell the differences.
    put: Callable[[str, FunctionUpload, bool], Awaitable[ConfigDiff]]
    #: Removes a function that was applied. Raises NotFound, or Conflict for one of the files.
    remove: Callable[[str], Awaitable[ConfigDiff]]
    #: What the sandboxes are and how isolated, in plain words.
    sandboxes: Callable[[], ProviderInfo]
    #: Snapshots of trajectories, and when one is taken.
    snapshots: SnapshotCatalogue
    turns: GatewayDispatcher
    #: The images of the sandboxes' engine; None where sandboxes have none.
    images: ImageKeeper | None
    #: The devices' processes, what is resident on them, and the counts of swaps.
    models: Callable[[], Mapping[str, object]]
    #: This machine, and the others that have joined.
    machines: Cluster
    #: The time of day in seconds.
    wall: Callable[[], float]
    #: Why the gateway takes no work now; None when it does.
    unready: Callable[[], str | None]
    #: What does not keep work out and should be looked at.
    warnings: Callable[[], Sequence[str]]
    #: What became of the check of the database after an unclean end; empty without one.
    record: Callable[[], str]

    def require_here(self, trajectory: str) -> None:
        """Raise Unsupported if a trajectory lives on another machine than this one."""
        node = self.machines.elsewhere(trajectory)
        if node:
            told = f"trajectory {trajectory!r} lives on node {node}: this works on the gateway's own machine only"
            raise Unsupported(told, component="cluster")

    def files(self, trajectory: str) -> SandboxFiles | None:
        """Return the files of a trajectory's sandbox, wherever it is; None if it has none.

        Raises CapacityExceeded while its node is not reached.
        """
        sandbox = self.environments.get(trajectory)
        return self.machines.files(trajectory) if sandbox is None else LocalFiles(sandbox)
