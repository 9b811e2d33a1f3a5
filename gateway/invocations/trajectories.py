"""Trajectories across a restart: whose environment is adopted, and whose is lost, which its next action is told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import msgspec

from gateway.store.store import OpenTrajectory, Store
from manager.engine import Engine
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.environments import Environments

#: Of an environment that is on no record.
DEFAULT_TASK = "default"


class TrajectoryRecovery:
    """Keeps on record which trajectories have an environment; the sandboxes themselves are `Environments`'."""

    def __init__(self, store: Store, environments: Environments) -> None:
        self._store = store
        self.environments = environments
        #: The node that a trajectory is on; empty for this machine.
        self.home: Callable[[str], str] = lambda name: ""
        #: This machine's name, if there are others on which the scheduler could place what lives here.
        self.here = ""
        self._open: dict[str, OpenTrajectory] = {}
        #: Those whose environment did not outlive the earlier gateway.
        self._lost: set[str] = set()
        #: The snapshots that trajectories began with.
        self._began_with: dict[str, str] = {}

    def opened(self, name: str, task: str, function: FunctionSpec) -> bool:
        """It has, or is about to get, an environment; whether that is news, to be made durable first."""
        if name in self._open:
            return False
        spec = function.sandbox or self.environments.settings.default
        memory_bytes = 0 if function.sandbox is None else spec.memory_bytes
        chosen = msgspec.json.encode(spec).decode() if spec.chosen else ""
        self._open[name] = OpenTrajectory(task, memory_bytes, spec.idle_ttl_s, chosen, self.home(name))
        if spec.snapshot:
            self._began_with[name] = spec.snapshot
        self._store.save_trajectory(name, self._open[name])
        return True

    def ended(self, name: str) -> None:
        """Its environment was removed."""
        self._began_with.pop(name, None)
        if self._open.pop(name, None) is not None:
            self._store.save_trajectory(name, None)

    def on_node(self, node: str) -> list[str]:
        """Return the trajectories that have an environment on another machine."""
        return [name for name, known in self._open.items() if known.node == node]

    def choose_on(self, node: str, choose: Callable[[str, SandboxSpec], None]) -> None:
        """Tell another machine what its trajectories have chosen, for when their sandboxes are made anew."""
        for name in self.on_node(node):
            if self._open[name].sandbox:
                choose(name, _chosen(self._open[name]))

    def snapshots_in_use(self) -> Mapping[str, str]:
        """Return the snapshots that living trajectories began with, and one trajectory of each."""
        return {snapshot: name for name, snapshot in self._began_with.items()}

    def lose(self, names: Collection[str]) -> None:
        """Their environments are lost with their node; the next action of each is to be told, by whichever gateway."""
        for name in names:
            began_with = self._began_with.pop(name, "")
            if (known := self._open.pop(name, None)) is not None:
                chosen = "" if began_with else known.sandbox  # that snapshot was on the node, too
                self._store.save_trajectory(name, replace(known, node="", sandbox=chosen))

    def told(self, name: str) -> None:
        """The loss of its environment was told."""
        if name not in self._open:
            self._store.save_trajectory(name, None)

    async def adopt(self, nodes: Collection[str] = ()) -> Mapping[str, int]:
        """Take over the environments that an earlier gateway left; how many live on, and how many are lost.

        Those on ``nodes``, which may come back, count as neither.

        To be called before anything makes a sandbox: what is no trajectory's is removed.
        """
        self._open = await self._store.trajectories()
        living = {name: self.environments.get(name) for name in await self.environments.start()}
        for name, sandbox in living.items():
            if name not in self._open and sandbox is not None:
                spec = sandbox.spec
                self._open[name] = OpenTrajectory(DEFAULT_TASK, spec.memory_bytes, spec.idle_ttl_s)
                self._store.save_trajectory(name, self._open[name])
        for name, known in self._open.items():
            if known.sandbox:
                spec = _chosen(known)
                self.environments.choose(name, spec)
                if spec.snapshot:
                    self._began_with[name] = spec.snapshot
        away = {name for name, known in self._open.items() if known.node in nodes}
        self._lost = self._open.keys() - living.keys() - away
        return {"adopted": len(living), "environment_lost": len(self._lost)}

    def part_with_lost(self) -> Collection[str]:
        """Return those whose environment is lost: the next action of each is to be told, on whichever machine."""
        lost, self._lost = self._lost, set()
        self.lose(lost)
        return lost

    def tell(self, engine: Engine) -> None:
        """Let the scheduler know of them all, before any of their actions is submitted.

        Those whose environment is lost are among them where there is no other machine: they go on here.
        """
        self.environments.mark_lost(self._lost)
        for name, known in self._open.items():
            engine.adopt_trajectory(
                name, known.task, memory_bytes=known.memory_bytes, ttl_s=known.ttl_s, node=known.node or self.here
            )


def _chosen(known: OpenTrajectory) -> SandboxSpec:
    return msgspec.json.decode(known.sandbox, type=SandboxSpec)
