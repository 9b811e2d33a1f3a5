"""The action: one invocation as the scheduler sees it: cost vector and elasticity (paper, Action Formulation)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from manager.input_size import SizeLine

#: What a further member is taken to add to a batch, as a fraction of what it takes alone, while nothing is learned: a
#: whole sequence keeps a device busy. Batches are then expected to end no sooner than one after the other would.
PRIOR_BATCH_MARGINAL = 1.0


@dataclass(frozen=True, slots=True)
class UnitSet:
    """The admissible unit counts of one resource for one action: fixed, a range, or discrete.

    A range is ``choices is None`` with every integer of [minimum, maximum]; a discrete set lists its
    members in ``choices`` (ascending, distinct), and minimum and maximum are its ends.
    """

    minimum: int
    maximum: int
    choices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.choices is not None:
            assert self.choices == tuple(sorted(set(self.choices))), f"choices {self.choices} must ascend"
            assert (self.minimum, self.maximum) == (self.choices[0], self.choices[-1])
        assert 0 < self.minimum <= self.maximum, f"unit set [{self.minimum}, {self.maximum}] is empty"

    @classmethod
    def fixed(cls, units: int) -> UnitSet:
        return cls(units, units)

    @classmethod
    def span(cls, minimum: int, maximum: int) -> UnitSet:
        return cls(minimum, maximum)

    @classmethod
    def of(cls, choices: tuple[int, ...]) -> UnitSet:
        ordered = tuple(sorted(set(choices)))
        return cls(ordered[0], ordered[-1], ordered)

    @property
    def elastic(self) -> bool:
        return self.minimum < self.maximum

    def __contains__(self, units: int) -> bool:
        if self.choices is None:
            return self.minimum <= units <= self.maximum
        return units in self.choices

    def __iter__(self) -> Iterator[int]:
        return iter(self.choices if self.choices is not None else range(self.minimum, self.maximum + 1))

    def __len__(self) -> int:
        return len(self.choices) if self.choices is not None else self.maximum - self.minimum + 1

    def at_most(self, units: int) -> int | None:
        """Return the largest admissible count not above ``units``; None if even the minimum is too much."""
        if units < self.minimum:
            return None
        if self.choices is None:
            return min(units, self.maximum)
        return self.choices[bisect_right(self.choices, units) - 1]

    def capped(self, most: int) -> UnitSet:
        """Return the set without the counts above ``most``; its minimum stays."""
        if most >= self.maximum:
            return self
        largest = self.at_most(max(most, self.minimum)) or self.minimum
        if self.choices is None:
            return UnitSet.span(self.minimum, largest)
        return UnitSet.of(tuple(count for count in self.choices if count <= largest))

    def smallest(self, d: int) -> int:
        """Return the d-th smallest admissible count, d from 1, or else the largest (docs/SCHEDULING.md R5)."""
        if self.choices is None:
            return min(self.minimum + d - 1, self.maximum)
        return self.choices[min(d, len(self.choices)) - 1]


def capped(cost: Mapping[str, UnitSet], key: str | None, most: int | None) -> Mapping[str, UnitSet]:
    """Return a cost with at most ``most`` units of its key, or its minimum if that is more; None caps nothing."""
    if key is None or most is None or cost[key].maximum <= most:
        return cost
    return {**cost, key: cost[key].capped(most)}


class Elasticity(Protocol):
    """E(m) in (0, 1]: duration(m) = T_ori / (E(m) * m) (paper, equation 1)."""

    def efficiency(self, units: int) -> float:
        """Return E at ``units`` of the key elasticity resource."""
        ...

    def __hash__(self) -> int:
        """Return the hash of a value: equal elasticities share their tables of durations."""
        ...


@dataclass(frozen=True, slots=True)
class Amdahl:
    """Elasticity of a job of which ``serial_fraction`` cannot be shared: E(m) = 1 / (1 + s (m - 1))."""

    serial_fraction: float

    def efficiency(self, units: int) -> float:
        return 1.0 / (1.0 + self.serial_fraction * (units - 1))


@dataclass(frozen=True, slots=True)
class EfficiencyTable:
    """Elasticity measured at some counts; between them by linear interpolation of the speed E(m) * m."""

    #: Pairs (units, E), ascending; the first is at the smallest measured count.
    points: tuple[tuple[int, float], ...]

    def efficiency(self, units: int) -> float:
        counts = [count for count, _ in self.points]
        right = bisect_right(counts, units)
        if right == 0:
            return self.points[0][1]
        low_units, low = self.points[right - 1]
        if right == len(self.points):
            return low * low_units / units  # beyond the last measurement no speed is promised
        high_units, high = self.points[right]
        share = (units - low_units) / (high_units - low_units)
        return (low * low_units + share * (high * high_units - low * low_units)) / units


#: The least of each resource kind that is needed to start, in the order of the cost.
Demand = tuple[tuple[str, int], ...]


def demand_of(cost: Mapping[str, UnitSet]) -> Demand:
    """Return the minimum of each kind of a cost."""
    return tuple([(kind, units.minimum) for kind, units in cost.items()])


class NodeChoice(NamedTuple):
    """Which nodes are right for an action: those that bear these labels and are able to run its function."""

    #: Labels and their values, by label.
    labels: tuple[tuple[str, str], ...] = ()
    #: The function that a node must be able to run; empty where every node is taken to be.
    function: str = ""
    #: The only node that is right, by name; empty for any.
    node: str = ""


ANYWHERE = NodeChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One invocation, scheduled as a unit; made by formulation and frozen.

    Cost names are resource *kinds* (``cpu``, ``gpu``, ``google_search``); the managers place them on pools.
    """

    id: str
    function: str
    #: The RL task it belongs to: the unit of fairness and accounting.
    task: str = "default"
    #: The rollout whose environment it needs; actions of one trajectory run one at a time, in order.
    trajectory: str | None = None
    #: C_i: for each resource kind the admissible unit counts.
    cost: Mapping[str, UnitSet] = field(default_factory=dict)
    #: Bytes held on the node for the trajectory's life (or the action's, if it has no trajectory).
    memory_bytes: int = 0
    #: Seconds without an action after which its trajectory ends.
    trajectory_ttl_s: float = 1800.0
    #: Which nodes it may run on, as far as it runs on a node.
    placement: NodeChoice = ANYWHERE
    #: The resource kind whose amount changes the duration; None for a rigid action.
    key: str | None = None
    elasticity: Elasticity | None = None
    #: Estimated seconds with a single unit of the key resource (declared or learned); None when unknown.
    t_ori_s: float | None = None
    #: From what that was learned, by its size: what is learned of its kin since is then known of it as well.
    line: SizeLine | None = None
    #: Whether that is its function's line, while its key has none of its own.
    borrows: bool = False
    #: Whether a running action's key units may be changed (a cgroup write).
    malleable: bool = False
    #: The model service that it needs resident, for GPU actions.
    service: str | None = None
    #: Tokens (or any additive size) this action adds to a batch of its service; 0 forbids batching.
    batch_tokens: int = 0
    #: What it adds to a batch as a further member, as a fraction of what it takes alone (learned).
    batch_marginal: float = PRIOR_BATCH_MARGINAL
    #: The caller's key for learning (for example the suite); empty if there is none.
    profile_key: str = ""
    #: The size of its input, which its duration may hang on; None where none is declared, or the input has none.
    size: float | None = None
    #: Seconds on the engine's clock at which it was submitted.
    submitted_s: float = 0.0
    #: Bounds in seconds: the execution alone, and the waiting alone.
    timeout_s: float = 60.0
    queue_timeout_s: float = 600.0
    #: The invocation that waits for this one (nested actions); None at the top.
    parent: str | None = None
    #: Which try this is, from 1.
    attempt: int = 1
    #: The minimum of its cost, which the scheduler asks for again and again.
    demand: Demand = field(init=False, repr=False)
    #: The kind whose policy chooses its units: the key, else the first of the cost; empty if it has none.
    chooser: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "demand", demand_of(self.cost))  # frozen from here on
        object.__setattr__(self, "chooser", self.key if self.key is not None else next(iter(self.cost), ""))

    @property
    def units(self) -> UnitSet | None:
        """Return the unit set of the key resource, or of a rigid action's first resource (docs/SCHEDULING.md R2)."""
        return self.cost.get(self.chooser)

    def malleable_in(self, kind: str) -> bool:
        """Return whether its units of ``kind`` may change while it runs."""
        return self.malleable and self.key == kind

    def duration_s(self, units: int) -> float | None:
        """Return the expected execution seconds with ``units`` of the key resource; None if nothing is known."""
        if self.t_ori_s is None:
            return None
        if self.elasticity is None:
            return self.t_ori_s
        return self.t_ori_s / (self.elasticity.efficiency(units) * units)
