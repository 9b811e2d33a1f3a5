"""A machine whose commands outlive the daemon that started them, as those of runners do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manager.action import Action, Lease
from manager.config import NodeSpec
from manager.errors import ActionFailed, Reason
from manager.function import FunctionSpec, Network, SandboxSpec
from runtimes.executor import LocalExecutor
from runtimes.node.daemon import DaemonSettings, NodeDaemon, NodeRuntimes
from runtimes.runtime import Execution, Result, Runtime
from runtimes.sandbox.command import ResumableCommand, claims_of
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import SessionTable

BOX = SandboxSpec(image="image", workdir="/workspace", network=Network.NONE, memory_bytes=1)
#: What a command says: (stream, text) in order.
Words = tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class MachineCommand:
    """One command: what it says, and whether it has ended."""

    words: Words
    lease: Lease
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Machine:
    """What is left when a daemon is killed: commands, trajectories, and the count of what was ever begun."""

    def __init__(self, words: Mapping[str, Words] | None = None) -> None:
        self.words = words or {}
        self.begun: Counter[str] = Counter()
        self.killed: list[str] = []
        self.commands: dict[str, MachineCommand] = {}
        self.acknowledged: list[str] = []
        self.trajectories: dict[str, MachineSandbox] = {}
        self.resized: list[tuple[str, Lease]] = []
        #: Actions whose commands run until `finish`.
        self.long: set[str] = set()
        #: Whether the daemon is being killed: what runs is not.
        self.dying = False
        self._running = asyncio.Condition()

    def open(self, *trajectories: str) -> None:
        """Let trajectories have a sandbox."""
        self.trajectories |= {name: MachineSandbox(name) for name in trajectories}

    def finish(self, claim: str) -> None:
        """Let a long command end."""
        self.long.discard(claim)
        if claim in self.commands:
            self.commands[claim].ended.set()

    async def runs(self, claim: str) -> None:
        """Wait until a command runs."""
        async with self._running:
            await self._running.wait_for(lambda: claim in self.commands)

    async def begin(self, claim: str, lease: Lease) -> MachineCommand:
        """Begin a command, or take over the one that runs."""
        if claim not in self.commands:
            self.begun[claim] += 1
            async with self._running:
                self.commands[claim] = MachineCommand(self.words.get(claim, ()), lease)
                self._running.notify_all()
        command = self.commands[claim]
        if claim not in self.long:
            command.ended.set()
        return command


class MachineRuntime(Runtime):
    """Executes commands of a machine the way the exec runtime does those of sandboxes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def execute(self, execution: Execution) -> Result:
        machine, action = self._machine, execution.action
        claim = claims_of(action.id, action.attempt)
        if claim not in machine.commands:
            await execution.call.hooks.commit_begin()
        execution.begin()
        command = await machine.begin(claim, execution.lease)
        try:
            for stream, text in command.words:
                execution.call.log.write(stream, text)
            await command.ended.wait()
        except asyncio.CancelledError:
            if not machine.dying:
                machine.killed.append(claim)
                machine.commands.pop(claim, None)
            raise
        execution.end()
        if action.function == "fails":
            raise ActionFailed(Reason.UPSTREAM, "as asked", component="machine", detail={"why": "asked"}, result=[1])
        value: dict[str, object] = {"said": len(command.words), "echo": dict(execution.call.input)}
        if (handler := execution.call.function.handler) is not None:
            value["files"] = files_of(handler.directory)
        return Result(value=value, usage={"cpu_s": 0.5})

    async def resize(self, action: Action, lease: Lease) -> None:
        self._machine.resized.append((action.id, lease))

    async def end_trajectory(self, trajectory: str) -> None:
        self._machine.trajectories.pop(trajectory, None)


class MachineSandbox(Sandbox):
    """The sandbox of a trajectory there, which the gateway is told of."""

    def __init__(self, trajectory: str) -> None:
        self.id, self.spec = f"box-{trajectory}", BOX

    @property
    def alive(self) -> bool:
        return True


class MachineEnvironments(Environments):
    """The environments of such a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.sessions = SessionTable()

    async def start(self, trajectories: Collection[str] | None = None) -> list[str]:
        return list(self._machine.trajectories)

    def resumable(self) -> dict[str, ResumableCommand]:
        return {claim: ResumableCommand(0.0, True) for claim in self._machine.commands}

    def never_started(self, trajectory: str, claims: str) -> bool:
        return trajectory in self._machine.trajectories and not self._machine.begun[claims]

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        for claim in set(self._machine.commands) - set(taken):
            self._machine.killed.append(claim)
            del self._machine.commands[claim]

    def get(self, trajectory: str) -> Sandbox | None:
        return self._machine.trajectories.get(trajectory)

    def list(self) -> list[dict[str, object]]:
        return [{"trajectory": name} for name in self._machine.trajectories]

    def acknowledge(self, trajectory: str | None, claims: str) -> None:
        self._machine.acknowledged.append(claims)
        self._machine.commands.pop(claims, None)

    def choose(self, trajectory: str, spec: SandboxSpec) -> None: ...

    def keep(self) -> None:
        self._machine.dying = True

    async def leave(self, claims: str) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRuntimes(NodeRuntimes):
    """What a daemon executes with on such a machine."""

    prepared: list[str]

    @classmethod
    def on(cls, machine: Machine) -> MachineRuntimes:
        """Return what a new daemon has there."""
        machine.dying = False

        async def open_environment(trajectory: str, task: str, function: FunctionSpec) -> None:
            machine.open(trajectory)

        runtime = MachineRuntime(machine)
        executor = LocalExecutor({"exec": runtime, "handler": runtime}, open_environment=open_environment)
        prepared: list[str] = []

        async def prepare(function: FunctionSpec) -> None:
            prepared.append(function.name)

        async def close() -> None: ...

        environments = MachineEnvironments(machine)
        return cls(executor=executor, environments=environments, prepare=prepare, close=close, prepared=prepared)


def daemon_settings(directory: Path, **more: object) -> DaemonSettings:
    """Return the settings of a daemon in a state directory; without ``host`` and ``port`` it is never to dial."""
    known = {
        "host": "127.0.0.1",
        "port": 1,
        "fingerprint": "",
        "ticket": "ticket",
        "state_dir": directory,
        "spec": NodeSpec(name="n1", numa=((0,),), memory_bytes=1, labels={"pool": "big"}),
    }
    return DaemonSettings(**{**known, **more})  # type: ignore[arg-type]


def daemon_on(machine: Machine, directory: Path, **more: object) -> NodeDaemon:
    """Return a daemon of a machine."""
    return NodeDaemon(daemon_settings(directory, **more), MachineRuntimes.on(machine))


def files_of(directory: Path) -> dict[str, str]:
    """Return the files below a directory by name."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in found}
