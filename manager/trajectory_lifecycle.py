"""The life of trajectories' environments: who waits for a place, and which removals are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence

from manager.core.core import Core
from manager.errors import CapacityExceeded, CodedError, Conflict, TrajectoryHasEnded, Unsatisfiable
from manager.events import Event, TrajectoryEnded, TrajectoryOpened
from manager.executor import Executor
from manager.function import FunctionSpec

#: Starts work in the background, whose failure is logged.
Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]


class TrajectoryLifecycle:
    """Opens and ends environments for the engine; one of a name begins only when an earlier one is gone."""

    def __init__(self, core: Core, executor: Executor, feed: Callable[[Sequence[Event]], None], spawn: Spawn) -> None:
        self._core = core
        self._executor = executor
        self._feed = feed
        self._spawn = spawn
        #: Callers that wait for memory on a node, and for a trajectory to leave the core, by trajectory.
        self._placing: dict[str, asyncio.Future[None]] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}
        #: Removals under way; each waits for an earlier one of its name.
        self._removals: dict[str, asyncio.Task[None]] = {}

    async def open(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Hold memory on a node, then make the environment that the function describes; idempotent.

        Raises Unsatisfiable if no node could ever hold it, CapacityExceeded if none could within the function's
        ``queue_timeout`` or too many trajectories live, and what the executor raises: Conflict if it lives otherwise.
        """
        self.check(trajectory)
        known = self._core.state.trajectories.get(trajectory) is not None
        memory_bytes = 0 if function.sandbox is None else function.sandbox.memory_bytes
        ttl_s = 1800.0 if function.sandbox is None else function.sandbox.idle_ttl_s
        placement = function.placement
        if not self._core.state.nodes.hosts_of(memory_bytes, placement):
            if placement.function:  # of a cluster, whose nodes come and go
                raise CapacityExceeded(
                    f"no node that is here could hold {memory_bytes} bytes for trajectory {trajectory}"
                    f" and is able to run {function.name} (GET /v1/nodes)",
                    component="engine",
                    retry_after_s=self._core.retry_after_s(),
                )
            raise Unsatisfiable(
                f"no node could ever hold {memory_bytes} bytes for trajectory {trajectory}", component="engine"
            )
        self._feed(
            [
                TrajectoryOpened(
                    trajectory=trajectory, task=task, memory_bytes=memory_bytes, ttl_s=ttl_s, placement=placement
                )
            ]
        )
        try:
            await self._wait_for_place(trajectory, function.queue_timeout_s)
        except asyncio.CancelledError:  # it would be given memory, and be without an environment
            if not known:
                self._feed([TrajectoryEnded(trajectory=trajectory)])
            raise
        try:
            await self.until_removed(trajectory)
            await self._executor.open_trajectory(trajectory, task, function)
        except (CodedError, asyncio.CancelledError) as error:
            # What is of this opening alone ends none that lived before it.
            if not (known and isinstance(error, Conflict | asyncio.CancelledError)):
                self._feed([TrajectoryEnded(trajectory=trajectory)])
            raise

    def check(self, trajectory: str, *, living: bool = False) -> None:
        """Raise CapacityExceeded if it may not begin now; with ``living`` TrajectoryHasEnded if it would begin."""
        known = self._core.state.trajectories.get(trajectory)
        if living and (known is None or known.ending):
            raise TrajectoryHasEnded(f"trajectory {trajectory!r} has ended", component="engine")
        crowded = self._core.crowded(trajectory)
        if crowded is not None:
            raise crowded

    async def end(self, trajectory: str) -> bool:
        """Cancel its actions, remove its environment, give its memory back; return False if there is none."""
        if self._core.state.trajectories.get(trajectory) is None:
            return False
        self._feed([TrajectoryEnded(trajectory=trajectory)])
        if self._core.state.trajectories.get(trajectory) is not None:  # something of it is being killed
            leaving = self._leaving.setdefault(trajectory, asyncio.get_running_loop().create_future())
            await asyncio.shield(leaving)
        await self.until_removed(trajectory)
        return True

    async def until_removed(self, trajectory: str) -> None:
        """Wait until an earlier environment of this name is gone."""
        removal = self._removals.get(trajectory)
        if removal is not None:
            await asyncio.wait([removal])

    @property
    def waiting(self) -> Iterable[asyncio.Future[None]]:
        """Return what callers wait on until the core says it."""
        return (*self._placing.values(), *self._leaving.values())

    def placed(self, trajectory: str) -> None:
        """Tell the callers that a trajectory has its memory."""
        placing = self._placing.pop(trajectory, None)
        if placing is not None and not placing.done():
            placing.set_result(None)

    def remove(self, trajectory: str) -> None:
        """Have the environment of a trajectory that has left the core removed, and tell the callers."""
        placing = self._placing.pop(trajectory, None)
        if placing is not None and not placing.done():
            placing.set_exception(Conflict(f"trajectory {trajectory} ended while it waited", component="engine"))
        leaving = self._leaving.pop(trajectory, None)
        if leaving is not None and not leaving.done():
            leaving.set_result(None)
        removal = self._spawn(self._remove(trajectory, self._removals.get(trajectory)))
        self._removals[trajectory] = removal
        removal.add_done_callback(lambda done: self._removed(trajectory, done))

    async def _remove(self, trajectory: str, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        await self._executor.end_trajectory(trajectory)

    def _removed(self, trajectory: str, done: asyncio.Task[None]) -> None:
        if self._removals.get(trajectory) is done:
            del self._removals[trajectory]

    async def _wait_for_place(self, trajectory: str, timeout_s: float) -> None:
        found = self._core.state.trajectories.get(trajectory)
        if found is None or not found.waiting:
            return
        placed = self._placing.get(trajectory)
        if placed is None:
            placed = self._placing[trajectory] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(asyncio.shield(placed), timeout_s)
        except TimeoutError:
            self._feed([TrajectoryEnded(trajectory=trajectory)])
            raise CapacityExceeded(
                f"no node had the memory for trajectory {trajectory} within {timeout_s:g} s",
                component="engine",
                retry_after_s=self._core.retry_after_s(),
            ) from None
