"""Events in, commands out: all that the core and its two shells say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from manager.action import ANYWHERE, Action, Chunk, Lease, NodeChoice, Outcome, Settlement, UnitSet, noun
from manager.config import NodeSpec, ServiceSpec, TaskSpec
from manager.errors import CodedError
from manager.resources.pools import ResourceSpec


@noun
class Submitted:
    """A formulated action asks to be queued."""

    action: Action
    #: The instant from which it may start; until then it waits in its trajectory's turn, and holds nothing.
    not_before_s: float = 0.0


@noun
class Resumed:
    """An action that was started before this core was made runs on: it enters with its units, past the queue."""

    action: Action
    #: What it was granted; it gets as many units, of its own again.
    units: Mapping[str, int]
    #: Where it runs; empty if it holds nothing of a node.
    node: str
    #: The instant at which it was started.
    started_s: float


@noun
class Finished:
    """The executor is done with an action: its processes are gone and its units may be given away."""

    action_id: str
    outcome: Outcome


@noun
class CancelRequested:
    """The caller gave up on an action; unknown and settled ones are ignored."""

    action_id: str
    message: str = ""


@noun
class TrajectoryOpened:
    """A trajectory asks for its place before its first action."""

    trajectory: str
    task: str = "default"
    memory_bytes: int = 0
    ttl_s: float = 1800.0
    #: What its actions will need at least: filters the nodes.
    cost: Mapping[str, UnitSet] = field(default_factory=dict)
    #: Which nodes are right for it besides.
    placement: NodeChoice = ANYWHERE
    #: Where it lives already, for one that was opened under an earlier core; empty if it has no place yet.
    node: str = ""


@noun
class TrajectoryEnded:
    """The caller ended a trajectory: its actions are cancelled and its memory returns."""

    trajectory: str


@noun
class NodeLost:
    """A node is gone, with everything on it."""

    node: str


@noun
class NodeJoined:
    """A node may be used from now on; one that is there already keeps what it has, but for what it is able to run."""

    node: NodeSpec


@noun
class NodeClosed:
    """Nothing is placed on a node any more; what runs there goes on. Told again, it is closed in the new way."""

    node: str
    why: str
    #: Whether the trajectories that live there go on: their actions are started. By default nothing is.
    finishing: bool = False
    #: Whether its devices serve on: what is missing there are sandboxes alone.
    devices: bool = False


@noun
class NodeOpened:
    """A node that was closed may be used again."""

    node: str


@noun
class ResidencyReported:
    """What a node's devices really hold: chunks by service, counted on the node. It is believed."""

    node: str
    resident: Mapping[str, tuple[Chunk, ...]]


@noun
class ReplicaEnded:
    """What a `Replicate` asked for is in place, or will not be (no room, a lost process): the answer to each."""

    number: int
    done: bool


@noun
class Reconfigured:
    """New bounds; None leaves what is. Nothing in flight is dropped, and nothing already held is taken away."""

    tasks: Mapping[str, TaskSpec] | None = None
    #: Declared resources by name.
    resources: Mapping[str, ResourceSpec] | None = None
    #: Most waiting actions by function name.
    function_bounds: Mapping[str, int] | None = None
    #: Model services that are new or changed; the others stay, as actions in flight may need them.
    services: Mapping[str, ServiceSpec] | None = None


@noun
class UnitsConsumed:
    """What actions consumed of a quota under another core; told before any action asks for it."""

    resource: str
    #: Instant at which their actions ended, and units.
    ended: Sequence[tuple[float, int]]
    #: Units of actions of which nobody knows when they ended: now, at the latest.
    running: int


@noun
class Tick:
    """The instant that a `WakeAt` asked for has come."""


@noun
class TryAgain:
    """A running action wants to make its call once more, which consumes what its first try did."""

    action_id: str


Event = (
    Submitted
    | Resumed
    | Finished
    | CancelRequested
    | TrajectoryOpened
    | TrajectoryEnded
    | NodeLost
    | NodeJoined
    | NodeClosed
    | NodeOpened
    | ResidencyReported
    | ReplicaEnded
    | Reconfigured
    | UnitsConsumed
    | TryAgain
    | Tick
)


class Execute(NamedTuple):
    """Run a leased action; answer with `Finished`. (A tuple like `Start`, for the same reason.)"""

    action: Action
    lease: Lease
    #: Seconds that it waited.
    queue_s: float


@noun
class Resize:
    """Give a running action the units of its new lease."""

    action: Action
    lease: Lease


@noun
class Abort:
    """Kill a running action. While its node lives the core waits for `Finished`; else it has settled already."""

    action_id: str
    message: str


@noun
class Replicate:
    """Copy a service in use into free memory of idle devices; a hint. Answer with `ReplicaEnded`."""

    number: int
    service: str
    node: str
    #: Counted on the node.
    chunk: Chunk


@noun
class Settle:
    """An action has ended; exactly one for each accepted action."""

    settlement: Settlement


@noun
class Refuse:
    """An action was not accepted, before any work."""

    action_id: str
    error: CodedError


@noun
class EndTrajectory:
    """Remove a trajectory's environment: it was ended, was idle for too long, or lost its node."""

    trajectory: str
    #: Why, if nobody asked for it.
    why: str = ""


@noun
class TryGranted:
    """What a `TryAgain` consumes was had: the call may be made."""

    action_id: str


@noun
class WakeAt:
    """Send `Tick` at ``instant_s`` at the latest; replaces the earlier wish. None: no wish."""

    instant_s: float | None


Command = Execute | Resize | Abort | Replicate | Settle | Refuse | EndTrajectory | TryGranted | WakeAt
