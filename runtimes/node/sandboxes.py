"""A node's sandboxes, as its agent sees them: what it tells the gateway, and what a daemon leaves to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from manager.function import SandboxSpec
from runtimes.node.wire import TrajectoryFacts
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.files.files import LocalFiles, SandboxFiles
from runtimes.sandbox.record import TASK
from runtimes.sandbox.session import SessionTable


class NodeSandboxes(Protocol):
    """What an agent asks of the sandboxes beside executing in them."""

    #: Called with what has changed of a trajectory's sandbox.
    on_change: Callable[[TrajectoryFacts], None]
    #: The sessions in them.
    sessions: SessionTable

    async def start(self) -> None:
        """Adopt what a daemon before left."""
        ...

    def resumable(self) -> Collection[str]:
        """Return the claims of the commands that can be taken over."""
        ...

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        """End the commands whose claims begin with none of these."""
        ...

    def facts(self) -> list[TrajectoryFacts]:
        """Return every trajectory that has a sandbox."""
        ...

    def files(self, trajectory: str) -> SandboxFiles | None:
        """Return the files of a trajectory's sandbox, if it has one."""
        ...

    def look(self, trajectory: str) -> None:
        """See whether a trajectory's sandbox is another one than was told, and tell it."""
        ...

    def acknowledge(self, trajectory: str | None, claim: str) -> None:
        """The end of an attempt is on record."""
        ...

    def mark_lost(self, trajectories: Collection[str]) -> None:
        """The next action of each is told that its sandbox was lost."""
        ...

    def choose(self, trajectory: str, spec: SandboxSpec) -> None:
        """A trajectory's sandbox is made so whenever it is made anew."""
        ...

    async def leave(self, claims: Iterable[str]) -> None:
        """Leave the sandboxes, and the attempts that run in them, to the next daemon."""
        ...


class EnvironmentSandboxes:
    """`NodeSandboxes` over the environments of this machine."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.sessions = environments.sessions
        self._told: dict[str, TrajectoryFacts] = {}
        self.on_change: Callable[[TrajectoryFacts], None] = lambda facts: None

    async def start(self) -> None:
        await self._environments.start()
        self._told = {facts.trajectory: facts for facts in self.facts()}

    def resumable(self) -> Collection[str]:
        return self._environments.resumable().keys()

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        await self._environments.end_unclaimed(taken)

    def facts(self) -> list[TrajectoryFacts]:
        names = [str(each["trajectory"]) for each in self._environments.list()]
        return [self._facts(name) for name in names]

    def _facts(self, trajectory: str) -> TrajectoryFacts:
        sandbox = self._environments.get(trajectory)
        if sandbox is None:
            return TrajectoryFacts(
                trajectory=trajectory,
                task="",
                sandbox="",
                image="",
                workdir="",
                user="",
                network="",
                memory_bytes=0,
                idle_ttl_s=0.0,
                alive=False,
            )
        spec = sandbox.spec
        return TrajectoryFacts(
            trajectory=trajectory,
            task=sandbox.labels.get(TASK, ""),
            sandbox=sandbox.id,
            image=spec.image,
            workdir=spec.workdir,
            user=spec.user,
            network=spec.network.value,
            memory_bytes=spec.memory_bytes,
            idle_ttl_s=spec.idle_ttl_s,
            alive=sandbox.alive,
        )

    def files(self, trajectory: str) -> SandboxFiles | None:
        sandbox = self._environments.get(trajectory)
        return None if sandbox is None else LocalFiles(sandbox)

    def look(self, trajectory: str) -> None:
        told, sandbox = self._told.get(trajectory), self._environments.get(trajectory)
        if told is not None and sandbox is not None and (told.sandbox, told.alive) == (sandbox.id, sandbox.alive):
            return  # one and the same sandbox stays as it was made
        facts = self._facts(trajectory)
        if self._told.get(trajectory) == facts or (not facts.sandbox and trajectory not in self._told):
            return
        if facts.sandbox:
            self._told[trajectory] = facts
        else:
            del self._told[trajectory]
        self.on_change(facts)

    def acknowledge(self, trajectory: str | None, claim: str) -> None:
        self._environments.acknowledge(trajectory, claim)

    def mark_lost(self, trajectories: Collection[str]) -> None:
        self._environments.mark_lost(trajectories)

    def choose(self, trajectory: str, spec: SandboxSpec) -> None:
        self._environments.choose(trajectory, spec)

    async def leave(self, claims: Iterable[str]) -> None:
        self._environments.keep()
        for claim in claims:
            await self._environments.leave(claim)
