"""Trajectories: their actions one at a time and in order, the node they are pinned to, and when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from manager.action import ANYWHERE, Demand, NodeChoice
from manager.core.expiries import Expiries
from manager.core.waiting.queue import Waiting


@dataclass(slots=True, eq=False)
class TrajectoryState:
    """One rollout's environment as the core sees it."""

    name: str
    task: str
    memory_bytes: int
    ttl_s: float
    opened_seq: int
    #: What its actions need at least, as far as it is known.
    demand: Demand = ()
    #: Which nodes are right for it.
    placement: NodeChoice = ANYWHERE
    #: Where it is pinned; empty before.
    node: str = ""
    #: Whether it waits for a node's memory.
    waiting: bool = False
    #: The action whose turn it is (eligible or running), and those behind it.
    active: Waiting | None = None
    behind: list[Waiting] = field(default_factory=list)
    #: Actions whose turn it is, but which need the place that it waits for.
    unplaced: tuple[Waiting, ...] = ()
    #: Actions invoked by the active one, queued or running.
    children: int = 0
    idle_since_s: float = 0.0
    #: Opened by the caller, who wants to know its place and keeps it without an action.
    explicit: bool = False
    ending: bool = False

    @property
    def at_rest(self) -> bool:
        """Return whether none of its actions is queued or running."""
        return self.active is None and not self.behind and not self.children


class Trajectories:
    """The living ones, those that wait for memory in order of arrival, and the instants at which idle ones end."""

    def __init__(self) -> None:
        self._living: dict[str, TrajectoryState] = {}
        #: In order of arrival, among them some that wait no more.
        self._waiting: deque[TrajectoryState] = deque()
        self._still_waiting = 0
        self._expiries = Expiries(self._is_stale)

    def __iter__(self) -> Iterator[TrajectoryState]:
        return iter(self._living.values())

    def __len__(self) -> int:
        return len(self._living)

    def get(self, name: str) -> TrajectoryState | None:
        return self._living.get(name)

    def add(self, trajectory: TrajectoryState) -> None:
        assert trajectory.name not in self._living, f"trajectory {trajectory.name} is open already"
        self._living[trajectory.name] = trajectory

    def remove(self, trajectory: TrajectoryState) -> None:
        del self._living[trajectory.name]
        self.wait_no_more(trajectory)

    def wait_for_memory(self, trajectory: TrajectoryState) -> None:
        if not trajectory.waiting:
            trajectory.waiting = True
            self._still_waiting += 1
            self._waiting.append(trajectory)

    def wait_no_more(self, trajectory: TrajectoryState) -> None:
        """Note that a trajectory has its place, or needs none any more."""
        if trajectory.waiting:
            trajectory.waiting = False
            self._still_waiting -= 1

    def waiting(self) -> Iterator[TrajectoryState]:
        """Return those that wait for memory, the longest first; they may cease to wait meanwhile."""
        if len(self._waiting) > 64 + 2 * self._still_waiting:
            self._waiting = deque(dict.fromkeys(trajectory for trajectory in self._waiting if trajectory.waiting))
        while self._waiting and not self._waiting[0].waiting:
            self._waiting.popleft()
        return (trajectory for trajectory in self._waiting if trajectory.waiting)

    def rest(self, trajectory: TrajectoryState, now_s: float) -> None:
        """Start the idle clock of a trajectory of which nothing runs or waits."""
        trajectory.idle_since_s = now_s
        self._expiries.add(now_s + trajectory.ttl_s, trajectory.opened_seq, trajectory)

    def next_expiry_s(self) -> float | None:
        """Return the instant at which the next idle trajectory ends; None if there is none."""
        return self._expiries.next_s()

    def expired(self, now_s: float) -> list[TrajectoryState]:
        """Return the trajectories that were idle for their whole ``ttl_s``."""
        return self._expiries.take(now_s, len(self._living))

    def _is_stale(self, trajectory: TrajectoryState, expiry_s: float) -> bool:
        return (
            self._living.get(trajectory.name) is not trajectory
            or not trajectory.at_rest
            or trajectory.idle_since_s + trajectory.ttl_s != expiry_s
        )
