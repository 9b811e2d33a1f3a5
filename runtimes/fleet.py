"""The fleet: one executor over many machines. An action runs on the node of its lease, one without a node here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.errors import CapacityExceeded, Reason
from manager.executor import Call, Executor
from manager.function import FunctionSpec
from runtimes.kinds import kind_of

COMPONENT = "fleet"


class FleetMachine(Executor, Protocol):
    """A machine of the fleet: `runtimes.node.remote.RemoteNode`, or this one."""

    def mark_lost(self, trajectories: Collection[str]) -> None:
        """Tell the next action of each of these that its sandbox was lost."""
        ...


class FleetExecutor:
    """A `manager.executor.Executor` that deals out to the machines, and knows which trajectory lives on which."""

    def __init__(
        self,
        here: Executor,
        local: str,
        member: Callable[[str], FleetMachine | None],
        *,
        mark_lost: Callable[[Collection[str]], None],
        lost_max: int = 65536,
    ) -> None:
        """``local`` is this machine's name as a node, ``mark_lost`` what `FleetMachine.mark_lost` is for it."""
        self._here = here
        self._local = local
        self._member = member
        self._mark_lost = mark_lost
        self._lost_max = lost_max
        #: The nodes of trajectories that do not live here.
        self._homes: dict[str, str] = {}
        #: Trajectories that were lost with their node, and of which no action was told yet; the latest last.
        self._lost: dict[str, None] = {}
        #: Where the core has placed a trajectory; empty if nowhere.
        self.place_of: Callable[[str], str] = lambda trajectory: ""
        #: Called with a trajectory whose loss is told now.
        self.on_told: Callable[[str], None] = lambda trajectory: None

    def home(self, trajectory: str) -> str:
        """Return the name of the other machine that a trajectory lives on; empty if it lives here, or nowhere yet."""
        node = self._homes.get(trajectory) or self.place_of(trajectory)
        return "" if node == self._local else node

    def settle_in(self, trajectory: str, node: str) -> None:
        """Note that a trajectory lives on a node already: an earlier gateway has put it there."""
        self._homes[trajectory] = node

    def lose(self, trajectories: Collection[str]) -> None:
        """Tell the next action of each that its sandbox was lost with its node, wherever it will run."""
        for trajectory in trajectories:
            self._homes.pop(trajectory, None)
            self._lost[trajectory] = None
        while len(self._lost) > self._lost_max:
            eldest = next(iter(self._lost))
            del self._lost[eldest]
            self.on_told(eldest)  # nobody will be

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        """Run the action where its lease says."""
        if lease.node in ("", self._local):
            self._tell_loss(action.trajectory, self._mark_lost, call.function)
            return await self._here.execute(action, lease, call)
        member = self._member(lease.node)
        if member is None:
            message = f"node {lease.node} is not there any more"
            return Outcome(state=State.LOST, reason=Reason.NODE_LOST, message=message, component=COMPONENT)
        self._tell_loss(action.trajectory, member.mark_lost, call.function)
        if action.trajectory is not None and kind_of(call.function).works_in_sandbox:
            self._homes[action.trajectory] = lease.node
        return await member.execute(action, lease, call)

    def _tell_loss(
        self, trajectory: str | None, mark_lost: Callable[[Collection[str]], None], function: FunctionSpec
    ) -> None:
        if trajectory in self._lost and trajectory is not None and kind_of(function).works_in_sandbox:
            del self._lost[trajectory]
            mark_lost([trajectory])
            self.on_told(trajectory)

    async def resize(self, action: Action, lease: Lease) -> None:
        """Give a running action other cores, where it runs."""
        member = self._here if lease.node in ("", self._local) else self._member(lease.node)
        if member is not None:
            await member.resize(action, lease)

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        """Copy a service on the node's devices; return False where it cannot be."""
        member = self._here if node == self._local else self._member(node)
        return member is not None and await member.replicate(function, service, node, chunk)

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Make the trajectory's environment where the core has placed it; raises CodedError."""
        node = self.home(trajectory)
        if not node:
            await self._here.open_trajectory(trajectory, task, function)
            return
        member = self._member(node)
        if member is None:
            raise CapacityExceeded(f"node {node} is not there any more", component=COMPONENT, retry_after_s=1.0)
        self._homes[trajectory] = node
        await member.open_trajectory(trajectory, task, function)

    async def end_trajectory(self, trajectory: str) -> None:
        """Remove the trajectory's environment, and what is kept for it here; that of an absent node when it is back."""
        node = self._homes.pop(trajectory, None)
        member = None if node is None else self._member(node)
        if member is not None:
            await member.end_trajectory(trajectory)
        await self._here.end_trajectory(trajectory)
