"""The membership of nodes: joined, suspect, lost, drained."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from typing import Annotated, Concatenate, ParamSpec

from manager.function import Setting


class NodeState(StrEnum):
    """What the gateway makes of a node."""

    JOINING = "joining"  #: greeted, not yet reconciled
    READY = "ready"  #: serves
    UNFIT = "unfit"  #: heard, and says itself that nothing, or nothing new, can begin there; what runs there runs on
    SUSPECT = "suspect"  #: not heard: what runs there runs on, nothing new starts
    DRAINING = "draining"  #: takes nothing new, and goes when it is empty
    LOST = "lost"  #: counted out, with everything on it


#: The moves that a node may make; ``lost`` is final for a daemon, and its name may be used again.
LEGAL_NODE_MOVES: dict[NodeState, frozenset[NodeState]] = {
    NodeState.JOINING: frozenset(
        {NodeState.READY, NodeState.UNFIT, NodeState.DRAINING, NodeState.SUSPECT, NodeState.LOST}
    ),
    NodeState.READY: frozenset({NodeState.UNFIT, NodeState.SUSPECT, NodeState.DRAINING, NodeState.LOST}),
    NodeState.UNFIT: frozenset({NodeState.READY, NodeState.SUSPECT, NodeState.DRAINING, NodeState.LOST}),
    NodeState.SUSPECT: frozenset({NodeState.JOINING, NodeState.LOST}),
    NodeState.DRAINING: frozenset({NodeState.SUSPECT, NodeState.LOST}),
    NodeState.LOST: frozenset({NodeState.JOINING}),
}

#: The states of a node that is heard.
CONNECTED = frozenset({NodeState.JOINING, NodeState.READY, NodeState.UNFIT, NodeState.DRAINING})

#: The states of a node that is silent, or may be again before it serves.
UNSURE = frozenset({NodeState.SUSPECT, NodeState.JOINING})


# The membership: which nodes there are and in what state, as a pure function of what happens and of the time.
#
# Each event is a method that takes its instant and returns verdicts: no clock and no I/O. A node is joining from its
# accepted handshake until it is reconciled, then ready. It is suspect while it is not heard, and lost when that lasts;
# draining while it takes nothing new. Silence of many at once is first of all the gateway's own: then no verdict of
# loss falls for a while (the storm). Whoever is lost too often is refused for a while (flapping). What Ray says of a
# node never outweighs a link that beats.

#: Seconds after which a daemon whose name is taken may ask again: the other one may be dying.
_AGAIN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    """When a node that is not heard is given up, and who is not let in again."""

    lost_after_s: Annotated[float, Setting("silence after which a node is counted lost", gt=0)] = 60.0
    #: Part of the nodes that may be lost within `storm_window_s`: of more the network is at fault.
    storm_share: float = 0.1
    storm_window_s: float = 60.0
    #: Seconds for which none is lost when more would be.
    storm_hold_s: float = 300.0
    #: Losses within `flapping_window_s` after which a node is refused.
    flapping_losses: int = 3
    flapping_window_s: float = 3600.0
    #: Seconds for which it is refused, doubled each time up to the most.
    refused_s: float = 600.0
    refused_max_s: float = 7200.0
    drain_grace_s: Annotated[float, Setting("life of trajectories on a draining node", gt=0)] = 600.0
    #: Most nodes: what was measured to join and to beat.
    nodes_max: int = 1024


@dataclass(frozen=True, slots=True)
class Admitted:
    """The daemon is welcome; ``fence`` has it kill all that it has before it says what it holds."""

    node: str
    instance: str
    fence: bool


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """The daemon is refused, for now if ``retry_after_s`` is not 0."""

    node: str
    instance: str
    why: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Shut:
    """Nothing new may be placed on the node."""

    node: str
    why: str
    #: Whether the trajectories that live there go on, and whether its devices serve on.
    finishing: bool = False
    devices: bool = False


@dataclass(frozen=True, slots=True)
class Serves:
    """The node serves (again)."""

    node: str


@dataclass(frozen=True, slots=True)
class CountedOut:
    """The node is counted out, with everything on it; ``victims`` is false for one that left empty."""

    node: str
    why: str
    victims: bool


P = ParamSpec("P")
Verdict = Admitted | JoinRefused | Shut | Serves | CountedOut


@dataclass(slots=True)
class Member:
    """One node as the membership knows it."""

    name: str
    state: NodeState
    since_s: float
    instance: str = ""
    why: str = ""
    #: Whether it is to take nothing new once it is back, and since when.
    draining: bool = False
    drain_since_s: float = 0.0
    drain_why: str = ""
    #: Why nothing can begin there, as it says itself; empty if anything can.
    unfit: str = ""
    #: Whether, though it is unfit, the trajectories that live there go on.
    finishing: bool = False
    #: When it was last heard; what the clock of its loss runs from.
    contact_s: float = 0.0
    #: Whether it must end whatever it has before it may join.
    fenced: bool = False
    #: Whether it may be lost at once, being unheard: somebody knows that its machine is gone.
    doomed: str = ""
    #: Instants of its losses, latest last, how often it was refused for them, and until when it is.
    losses: deque[float] = field(default_factory=deque)
    refusals: int = 0
    refused_until_s: float = 0.0


def _event(
    method: Callable[Concatenate[NodeMembership, P], list[Verdict]],
) -> Callable[Concatenate[NodeMembership, float, P], list[Verdict]]:
    """Return a method that takes the instant of its event first; one before the last counts as that.

    What time alone decides by then follows.
    """

    @wraps(method)
    def step(membership: NodeMembership, now_s: float, /, *args: P.args, **kwargs: P.kwargs) -> list[Verdict]:
        membership.now_s = max(membership.now_s, now_s)
        verdicts = method(membership, *args, **kwargs)
        return [*verdicts, *membership.expire()]

    return step


class NodeMembership:
    """All nodes. Not for the machine of the gateway itself, which is never unheard."""

    def __init__(self, settings: MembershipSettings | None = None) -> None:
        self.settings = settings or MembershipSettings()
        self._members: dict[str, Member] = {}
        #: Those of them that time alone may decide on: of a thousand nodes only these are looked at in each step.
        self._timed: dict[str, Member] = {}
        #: Instants of losses of any node, for the storm.
        self._losses: deque[float] = deque()
        self._storm_until_s: float | None = None
        #: The instant of the last event.
        self.now_s = 0.0

    # -- views

    def get(self, node: str) -> Member | None:
        return self._members.get(node)

    def members(self) -> list[Member]:
        """Return every node that is known, by name."""
        return [member for _, member in sorted(self._members.items())]

    @property
    def draining(self) -> list[str]:
        """Names of the nodes that drain now."""
        return [name for name, member in self._timed.items() if member.state is NodeState.DRAINING]

    @property
    def storm_left_s(self) -> float:
        """Return the seconds for which no node is counted lost, for too many were silent; 0: no storm."""
        return 0.0 if self._storm_until_s is None else max(0.0, self._storm_until_s - self.now_s)

    def next_s(self) -> float | None:
        """Return the instant of the next verdict that time alone brings; None if there is none."""
        instants = []
        for member in self._timed.values():
            due_s = self._due_s(member)
            if due_s is not None:
                held = self._storm_until_s is not None and not _is_certain(member)
                instants.append(max(due_s, self._storm_until_s or 0.0) if held else due_s)
        return min(instants, default=None)

    # -- events

    @_event
    def greet(
        self, node: str, instance: str, draining: bool = False, unfit: str = "", finishing: bool = False
    ) -> list[Verdict]:
        """A daemon has proved who it is and asks to join (again).

        ``draining``: it drains already; ``unfit`` and ``finishing`` are as in `judge`.
        """
        member, doubted = self._members.get(node), list[Verdict]()
        if member is None:
            if len(self._members) >= self.settings.nodes_max and not self._forget_one():
                why = f"{self.settings.nodes_max} nodes have joined, which is the bound cluster.nodes_max"
                return [JoinRefused(node, instance, why, self.settings.refused_s)]
            member = self._members[node] = Member(node, NodeState.LOST, self.now_s)
        elif member.refused_until_s > self.now_s:
            why = f"it was lost {len(member.losses)} times of late"
            return [JoinRefused(node, instance, why, member.refused_until_s - self.now_s)]
        elif member.state in CONNECTED:
            if instance != member.instance:
                why = f"a living daemon has joined under the name {node}"
                return [JoinRefused(node, instance, why, _AGAIN_S)]
            doubted = self._doubt(member, "its daemon joins again")  # the old link is gone, whatever it says
        fence = member.fenced
        member.instance, member.doomed, member.unfit, member.finishing = instance, "", unfit, finishing
        if member.state is NodeState.LOST:
            member.contact_s = self.now_s
        if draining and not member.draining:
            member.draining, member.drain_since_s, member.drain_why = True, self.now_s, "its daemon drains"
        self._move(member, NodeState.JOINING, "it has greeted")
        return [*doubted, Admitted(node, instance, fence)]

    @_event
    def expect(self, node: str, *, draining: bool = False) -> list[Verdict]:
        """A node of the gateway before: as one that is not heard since this gateway's start."""
        if node in self._members:
            return []
        member = Member(node, NodeState.SUSPECT, self.now_s, contact_s=self.now_s)
        member.why = "it has not come back since the gateway was started"
        if draining:
            member.draining, member.drain_since_s, member.drain_why = True, self.now_s, "it drained before"
        self._members[node] = self._timed[node] = member
        return [Shut(node, member.why)]

    @_event
    def reconcile(self, node: str, instance: str) -> list[Verdict]:
        """What a joining node holds is known, and agrees with what the gateway knows."""
        member = self._present(node, instance)
        if member is None or member.state is not NodeState.JOINING:
            return []
        member.fenced, member.contact_s = False, self.now_s
        if member.draining:
            self._move(member, NodeState.DRAINING, member.drain_why)
            return [Serves(node), _shut_to_drain(member)]
        return [Serves(node), *self._settle(member)]

    @_event
    def judge(self, node: str, instance: str, why: str, finishing: bool = False) -> list[Verdict]:
        """A node says that nothing can begin there, and why; or, if that is empty, that anything can (again).

        ``finishing``: nothing new can, and the trajectories that live there go on.
        """
        member = self._present(node, instance)
        if member is None:
            return []
        changed = (member.unfit, member.finishing) != (why, finishing)
        member.unfit, member.finishing = why, finishing
        if changed and member.state is NodeState.DRAINING:
            return [_shut_to_drain(member)]
        if not changed or member.state not in (NodeState.READY, NodeState.UNFIT):
            return []  # it counts once it serves again
        return self._settle(member) or [Serves(member.name)]

    @_event
    def lose_link(self, node: str, instance: str, why: str) -> list[Verdict]:
        """The link of a node has gone, or was silent for too long; of another instance than the present it is stale."""
        member = self._present(node, instance)
        return [] if member is None else self._doubt(member, why)

    @_event
    def drain(self, node: str, why: str) -> list[Verdict]:
        """Somebody wants a node to take nothing new: an operator, the node itself, or Ray."""
        member = self._present(node)
        if member is None:
            return []
        if not member.draining:
            member.draining, member.drain_since_s, member.drain_why = True, self.now_s, why
        if member.state not in (NodeState.READY, NodeState.UNFIT):
            return []
        self._move(member, NodeState.DRAINING, why)
        return [_shut_to_drain(member)]

    @_event
    def empty(self, node: str) -> list[Verdict]:
        """Nothing runs or lives on a draining node any more."""
        member = self._present(node)
        if member is None or member.state is not NodeState.DRAINING:
            return []
        return self._lose(member, f"drained: {member.drain_why}", victims=False)

    @_event
    def goodbye(self, node: str, instance: str, why: str, killed: bool) -> list[Verdict]:
        """A node goes by itself; ``killed`` says that whatever it had is gone with it."""
        member = self._present(node, instance)
        if member is None:
            return []
        return self._lose(member, why, victims=True) if killed else self._doubt(member, why)

    @_event
    def note_ray(self, node: str, why: str, final: bool = False) -> list[Verdict]:
        """Ray (or a cloud) speaks of a node's machine; ``final`` if it was ended on purpose (SIGTERM, terminated).

        What was said last counts: a machine that was ended may have been begun again.
        """
        member = self._present(node)
        if member is not None:
            member.doomed = why if final else ""
        return []

    @_event
    def tick(self) -> list[Verdict]:
        """Time has passed."""
        return []

    # -- inside

    def _present(self, node: str, instance: str | None = None) -> Member | None:
        """Return a node that is not lost, with an ``instance`` only if that is its present daemon."""
        member = self._members.get(node)
        if member is None or member.state is NodeState.LOST or instance not in (None, member.instance):
            return None
        return member

    def _settle(self, member: Member) -> list[Verdict]:
        """It serves, as far as it is fit."""
        if member.unfit:
            self._move(member, NodeState.UNFIT, member.unfit)
            alone = member.finishing  # sandboxes alone are missing
            return [Shut(member.name, f"unfit: {member.unfit}", finishing=alone, devices=alone)]
        self._move(member, NodeState.READY, "")
        return []

    def _doubt(self, member: Member, why: str) -> list[Verdict]:
        if member.state is NodeState.SUSPECT:
            return []
        if member.state is not NodeState.JOINING:
            member.contact_s = self.now_s
        self._move(member, NodeState.SUSPECT, why)
        return [Shut(member.name, f"suspect: {why}")]

    # -- time

    def expire(self) -> list[Verdict]:
        """Count out who is due, unless so many are that it must be the gateway's own network."""
        overdue = self._overdue()
        silent = [member for member in overdue if not _is_certain(member)]
        if self._storm_until_s is None:
            if silent and len(silent) > self._losses_left():
                self._storm_until_s = self.now_s + self.settings.storm_hold_s
        elif not silent:
            unsure = any(member.state in UNSURE for member in self._members.values())
            self._storm_until_s = self._storm_until_s if unsure and self.now_s < self._storm_until_s else None
        held = self._storm_until_s is not None and self.now_s < self._storm_until_s
        if silent and not held:
            self._storm_until_s = None  # what is silent still was silent through the whole hold: these go
        return [verdict for member in overdue if not held or _is_certain(member) for verdict in self._time_out(member)]

    def _losses_left(self) -> int:
        """Return how many may be lost now to silence, after those of late."""
        while self._losses and self._losses[0] <= self.now_s - self.settings.storm_window_s:
            self._losses.popleft()
        living = sum(member.state is not NodeState.LOST for member in self._members.values())
        return max(1, int(self.settings.storm_share * (living + len(self._losses)))) - len(self._losses)

    def _overdue(self) -> list[Member]:
        timed = [(self._due_s(member), member) for _, member in sorted(self._timed.items())]
        return [member for due_s, member in timed if due_s is not None and due_s <= self.now_s]

    def _due_s(self, member: Member) -> float | None:
        """Return when time alone counts a node out; None if it does not."""
        match member.state:
            case NodeState.SUSPECT if member.doomed:
                return self.now_s
            case NodeState.SUSPECT:
                return member.contact_s + self.settings.lost_after_s
            case NodeState.DRAINING:
                return member.drain_since_s + self.settings.drain_grace_s
            case _:
                return None

    def _time_out(self, member: Member) -> list[Verdict]:
        if member.state is NodeState.DRAINING:
            why = f"drained: {member.drain_why}; what it still held had its grace of {self.settings.drain_grace_s:g} s"
            return self._lose(member, why, victims=True)
        if member.doomed:
            return self._lose(member, member.doomed, victims=True)
        self._losses.append(self.now_s)
        why = f"not heard for {self.now_s - member.contact_s:.0f} s ({member.why})"
        self._count_loss(member)
        return self._lose(member, why, victims=True)

    def _count_loss(self, member: Member) -> None:
        """Refuse for a while, and longer each time, who is lost again and again."""
        settings = self.settings
        while member.losses and member.losses[0] <= self.now_s - settings.flapping_window_s:
            member.losses.popleft()
        member.losses.append(self.now_s)
        if len(member.losses) >= settings.flapping_losses:
            refused_s = min(settings.refused_max_s, settings.refused_s * 2**member.refusals)
            member.refusals += 1
            member.refused_until_s = self.now_s + refused_s

    def _lose(self, member: Member, why: str, *, victims: bool) -> list[Verdict]:
        member.fenced = victims
        member.draining, member.doomed = False, ""
        self._move(member, NodeState.LOST, why)
        return [CountedOut(member.name, why, victims)]

    def _move(self, member: Member, state: NodeState, why: str) -> None:
        assert state is member.state or state in LEGAL_NODE_MOVES[member.state], (member, state)
        member.state, member.since_s, member.why = state, self.now_s, why
        if state in (NodeState.SUSPECT, NodeState.DRAINING):
            self._timed[member.name] = member
        else:
            self._timed.pop(member.name, None)

    def _forget_one(self) -> bool:
        """Make room by forgetting the node that was lost first; return whether there was one."""
        lost = [member for member in self._members.values() if member.state is NodeState.LOST]
        if not lost:
            return False
        del self._members[min(lost, key=lambda member: member.since_s).name]
        return True


def _shut_to_drain(member: Member) -> Shut:
    """What lives there goes on, unless nothing can begin there."""
    why = f", and unfit: {member.unfit}" if member.unfit else ""
    return Shut(member.name, f"draining: {member.drain_why}{why}", finishing=not member.unfit or member.finishing)


def _is_certain(member: Member) -> bool:
    """Return whether its end is no matter of silence: its grace is over, or its machine is known to be gone."""
    return member.state is NodeState.DRAINING or bool(member.doomed)
