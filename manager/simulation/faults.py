"""Faults of a simulated cluster: nodes that are lost, go in a wave, are upgraded in turn, or fall silent for a while.

A fault is written ``KIND:NODES@START`` or ``KIND:NODES@START+FOR``, times in seconds:

- ``lose:3@600``: three nodes are lost at 600 s and do not come back; ``lose:3@600+300``: they join again 300 s later;
- ``wave:50@600+120``: fifty nodes are lost within 120 s, as spot machines are;
- ``upgrade:10@600+60``: all nodes in turn, ten at a time, are drained for 60 s, then lost, and join again at once;
- ``cut:40@600+30``: forty nodes are silent for 30 s: nothing is placed there, what runs there goes on and is told of
  when they are back. Silent for longer than a gateway waits, they are lost, and join again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from manager.config import NodeSpec
from manager.errors import InvalidInput
from manager.events import NodeClosed, NodeJoined, NodeLost, NodeOpened

FaultKind = Literal["lose", "wave", "upgrade", "cut"]
NodeEvent = NodeLost | NodeJoined | NodeClosed | NodeOpened
#: Seconds of silence until a gateway places nothing on a node, and until it takes it for lost: the roster's defaults.
SUSPECT_S = 3.0
LOST_S = 60.0
#: Most events that the faults of one simulation may make.
EVENTS_MAX = 100_000
_FAULT = re.compile(r"(?P<kind>[a-z]+):(?P<nodes>\d{1,6})@(?P<start>\d+(?:\.\d+)?)(?:\+(?P<span>\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """One fault. ``for_s`` is None where it was not said."""

    kind: FaultKind
    nodes: int
    start_s: float
    for_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent:
    """Something that happens to a node; in silence its ends are told at ``silent_until_s``."""

    instant_s: float
    event: NodeEvent | None
    node: str
    silent_until_s: float | None = None


@dataclass(slots=True, kw_only=True)
class FaultTally:
    """What faults have cost."""

    nodes_lost: int = 0
    #: Trajectories that lost their sandbox and began again.
    trajectories: int = 0
    #: Actions that were ended by the loss of their node or their trajectory's, and tries that ran again by themselves.
    actions: int = 0
    again: int = 0
    #: Unit-seconds by kind of what was lost while it ran.
    wasted: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {
            "nodes_lost": self.nodes_lost,
            "trajectories_begun_again": self.trajectories,
            "actions_lost": self.actions,
            "actions_run_again": self.again,
            "wasted_unit_s": {kind: round(spent, 6) for kind, spent in sorted(self.wasted.items())},
        }

    def line(self) -> str:
        """Return it for people."""
        wasted = ", ".join(f"{spent:.0f} s of {kind}" for kind, spent in sorted(self.wasted.items())) or "nothing"
        return (
            f"{self.nodes_lost} nodes lost: {self.trajectories} trajectories began again, {self.actions} actions lost "
            f"({self.again} ran again by themselves), wasted {wasted}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What befalls a cluster."""

    faults: tuple[NodeFault, ...] = ()
    #: Draws the nodes that faults meet.
    seed: int = 0


def read_fault(text: str) -> NodeFault:
    """Return the fault that a text describes; raises InvalidInput."""
    found = _FAULT.fullmatch(text)
    kinds = get_args(FaultKind)
    if found is None or found["kind"] not in kinds:
        hint = f"KIND:NODES@START or KIND:NODES@START+FOR, in seconds; kinds are {', '.join(kinds)}"
        raise InvalidInput(f"fault {text!r}: written {hint}", component="simulate")
    for_s = None if found["span"] is None else float(found["span"])
    fault = NodeFault(kind=found["kind"], nodes=int(found["nodes"]), start_s=float(found["start"]), for_s=for_s)  # type: ignore[arg-type]
    if fault.nodes == 0:
        raise InvalidInput(f"fault {text!r}: names no node", component="simulate")
    if not fault.for_s and fault.kind != "lose":
        raise InvalidInput(f"fault {text!r}: how long? {fault.kind}:NODES@START+SECONDS", component="simulate")
    return fault


def fault_events(faults: Sequence[NodeFault], nodes: Sequence[NodeSpec], seed: int) -> list[FaultEvent]:
    """Return what happens, in order of time; which nodes it meets is drawn by ``seed``, each fault anew.

    Raises InvalidInput where a fault names more nodes than there are.
    """
    chance = random.Random(seed)
    events: list[FaultEvent] = []
    for fault in faults:
        if fault.nodes > len(nodes):
            told = f"{fault.kind} of {fault.nodes} nodes: the cluster has {len(nodes)}"
            raise InvalidInput(told, component="simulate")
        drawn = chance.sample(list(nodes), len(nodes) if fault.kind == "upgrade" else fault.nodes)
        events += _events(fault, drawn, chance)
        if len(events) > EVENTS_MAX:
            raise InvalidInput(f"the faults make more than {EVENTS_MAX} events", component="simulate")
    return sorted(events, key=lambda each: each.instant_s)


def _events(fault: NodeFault, drawn: Sequence[NodeSpec], chance: random.Random) -> list[FaultEvent]:
    start_s, for_s = fault.start_s, fault.for_s or 0.0
    match fault.kind:
        case "lose":
            back_s = None if fault.for_s is None else start_s + for_s
            return [each for node in drawn for each in _loss(node, start_s, back_s)]
        case "wave":
            return [each for node in drawn for each in _loss(node, start_s + chance.uniform(0.0, for_s), None)]
        case "upgrade":
            turns = [drawn[first : first + fault.nodes] for first in range(0, len(drawn), fault.nodes)]
            return [
                each
                for turn, batch in enumerate(turns)
                for node in batch
                for each in _upgrade(node, start_s + turn * for_s, for_s)
            ]
        case "cut":
            return [each for node in drawn for each in _silence(node, start_s, start_s + for_s)]


def _loss(node: NodeSpec, lost_s: float, back_s: float | None) -> list[FaultEvent]:
    lost = FaultEvent(instant_s=lost_s, event=NodeLost(node=node.name), node=node.name)
    if back_s is None:
        return [lost]
    return [lost, FaultEvent(instant_s=back_s, event=NodeJoined(node=node), node=node.name)]


def _upgrade(node: NodeSpec, start_s: float, drain_s: float) -> list[FaultEvent]:
    closed = FaultEvent(
        instant_s=start_s, event=NodeClosed(node=node.name, why="upgrade", finishing=True), node=node.name
    )
    return [closed, *_loss(node, start_s + drain_s, start_s + drain_s)]


def _silence(node: NodeSpec, start_s: float, until_s: float) -> list[FaultEvent]:
    begins = FaultEvent(instant_s=start_s, event=None, node=node.name, silent_until_s=until_s)
    if until_s - start_s <= SUSPECT_S:
        return [begins]
    closed = NodeClosed(node=node.name, why="silent")
    suspected = FaultEvent(instant_s=start_s + SUSPECT_S, event=closed, node=node.name)
    if until_s - start_s > LOST_S:
        return [begins, suspected, *_loss(node, start_s + LOST_S, until_s)]
    return [begins, suspected, FaultEvent(instant_s=until_s, event=NodeOpened(node=node.name), node=node.name)]
