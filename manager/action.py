"""Actions, their leases, batches, chunks and outcomes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar, dataclass_transform

from manager.errors import Reason


class Chunk(NamedTuple):
    """The devices [start, start + size)."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first device beyond it."""
        return self.start + self.size

    @property
    def devices(self) -> range:
        return range(self.start, self.start + self.size)

    def contains(self, other: Chunk) -> bool:
        return self.start <= other.start and other.end <= self.end

    def meets(self, other: Chunk) -> bool:
        """Return whether the two have a device in common."""
        return self.start < other.end and other.start < self.end

    def parts(self, size: int) -> Iterator[Chunk]:
        """Yield the chunks of ``size`` that it is made of, ascending; none if it is smaller."""
        for start in range(self.start, self.start + self.size - size + 1, size):
            yield Chunk(start, size)

    def without(self, part: Chunk) -> Iterator[Chunk]:
        """Yield the buddies that are left when ``part``, which it contains, is taken; the largest first."""
        start, size = self
        while size > part.size:
            size //= 2
            upper = start + size
            if part.start >= upper:
                yield Chunk(start, size)
                start = upper
            else:
                yield Chunk(upper, size)

    def moved(self, devices: int) -> Chunk:
        """Return the same chunk, counted from elsewhere."""
        return Chunk(self.start + devices, self.size)


def power_at_least(count: int) -> int:
    """Return the least power of two not below ``count``: the size of the smallest chunk that holds as many."""
    return 1 << max(0, count - 1).bit_length()


def outside(free: Iterable[Chunk], kept: Iterable[Chunk]) -> list[Chunk]:
    """Return what is left of free chunks when the places in ``kept`` are taken away; buddies again."""
    left = list(free)
    for place in kept:
        whole = next((chunk for chunk in left if chunk.contains(place)), None)
        left = [chunk for chunk in left if not chunk.meets(place)] + ([*whole.without(place)] if whole else [])
    return left


#: A size beyond this is none: no memory holds as much.
SIZE_MAX = 1e15
#: Lists within lists that are looked into.
_DEPTH_MAX = 8
#: How far beyond the sizes seen a line is followed.
_BEYOND = 2.0


class SizeLine(NamedTuple):
    """T(x) = fixed_s + per_unit_s x, with one unit, and the sizes that it was learned from."""

    fixed_s: float
    per_unit_s: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def within(self, size: float) -> float:
        """Return the size, or the nearest up to which the line is followed."""
        return min(max(size, self.least / _BEYOND), self.most * _BEYOND, SIZE_MAX)

    def at(self, size: float | None) -> float:
        """Return the seconds that a call of ``size`` is expected to take; None where none has a size."""
        return self.fixed_s if size is None else self.fixed_s + self.per_unit_s * self.within(size)


def size_at(value: object, path: str) -> float | None:
    """Return the size of what lies at a dotted ``path`` of an input; None if there is nothing that has one.

    A number is its own size, a text has its characters and a list its elements, or those of the lists that are its
    elements. Beyond a list the path goes into each element, and their sizes are added: ``messages.content``. Neither a
    negative number nor one above `SIZE_MAX` is a size.
    """
    size = _size(value, path.split("."), 0)
    return size if size is not None and 0 <= size <= SIZE_MAX else None


def _size(value: object, names: list[str], depth: int) -> float | None:
    if isinstance(value, list) and depth < _DEPTH_MAX:
        if not names and not any(isinstance(each, list) for each in value):
            return float(len(value))
        sizes = [_size(each, names, depth + 1) for each in value]
        return (
            math.fsum(size for size in sizes if size is not None) if any(size is not None for size in sizes) else None
        )
    if names:
        return _size(value[names[0]], names[1:], depth) if isinstance(value, dict) and names[0] in value else None
    if isinstance(value, str):
        return float(len(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(min(max(value, -SIZE_MAX), 2 * SIZE_MAX))  # their sum must be a number too
    return None


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
    """Return the minimum of each kind of a cost; thousands that wait have the same one."""
    return _known(tuple([(kind, units.minimum) for kind, units in cost.items()]))


@lru_cache(maxsize=1024)
def _known(demand: Demand) -> Demand:
    return demand


class NodeChoice(NamedTuple):
    """Which nodes are right for an action: those that bear these labels and are able to run its function."""

    #: Labels and their values, by label.
    labels: tuple[tuple[str, str], ...] = ()
    #: The function that a node must be able to run; empty where every node is taken to be.
    function: str = ""
    #: The only node that is right, by name; empty for any.
    node: str = ""


ANYWHERE = NodeChoice()


# Nouns: dataclasses that are made for each action and frozen for the type checker alone.
#
# A frozen dataclass guards each of its fields while it is made, which takes three times as long as the rest. mypy reads
# all of this repository, tests included, and refuses an assignment to a field of a noun as it does to a frozen one's.

Made = TypeVar("Made")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def noun(declared: type[Made]) -> type[Made]:
    """Return a dataclass with slots whose fields are given by name, once."""
    return dataclass(slots=True, kw_only=True)(declared)


@noun
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


class Kin(NamedTuple):
    """What the history tells requests apart by."""

    function: str
    #: The caller's key.
    key: str = ""
    #: That of its input, where the function declares one and the input has it.
    size: float | None = None

    @classmethod
    def of(cls, action: Action) -> Kin:
        return cls(action.function, action.profile_key, action.size)


@dataclass(frozen=True, slots=True)
class Work:
    """What the members of a batch would take alone: the longest of them, and all others in turn."""

    longest_s: float
    others_s: float

    @classmethod
    def of(cls, alone_s: Sequence[float]) -> Work:
        longest_s = max(alone_s)
        return cls(longest_s, sum(alone_s) - longest_s)

    @property
    def size(self) -> float:
        """Return how many members as long as the longest it amounts to."""
        return 1.0 + self.others_s / self.longest_s

    def seconds(self, marginal: float) -> float:
        """Return what the batch takes if a further member adds ``marginal`` of what it would take alone."""
        return self.longest_s + marginal * self.others_s


@dataclass(frozen=True, slots=True)
class Batch:
    """What the core notes of a batch when it starts."""

    #: Members by what the history tells them apart by.
    members: Mapping[Kin, int] = field(default_factory=dict)
    #: None if nothing is known of any member.
    expected_s: float | None = None


def expected_s(alone_s: Sequence[float | None], marginal: float) -> float | None:
    """Return the expected seconds of a batch by those of its members alone; an unknown one counts as their mean."""
    known = [one for one in alone_s if one is not None]
    if not known:
        return None
    guess = sum(known) / len(known)
    return Work.of([guess if one is None else one for one in alone_s]).seconds(marginal)


def mates_of(action: Action, alike: Iterable[Action], most_tokens: int) -> list[Action]:
    """Those of ``alike``, which wait for the same service, that would join its batch: first come, up to its tokens."""
    budget = most_tokens - action.batch_tokens
    mates: list[Action] = []
    for mate in alike:
        if mate is action:
            continue
        if mate.batch_tokens > budget:
            break
        budget -= mate.batch_tokens
        mates.append(mate)
    return mates


@noun
class Grant:
    """An amount of one resource kind, with its place if it has one."""

    #: The pool it was taken from, for example ``cpu:local``, ``gpu:local`` or ``google_search``.
    pool: str
    units: int
    #: CPU: the exclusive core ids of the node.
    cores: tuple[int, ...] = ()
    #: Malleable actions: the workers that are started, so the most units it may grow to; 0 means ``units``.
    workers: int = 0
    #: GPU: its devices, counted on the node.
    chunk: Chunk | None = None
    #: GPU: whether the service must be restored into the chunk first, and what is evicted for it.
    restore: bool = False
    evict: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        """Return the most units that it may ever be: what its action starts to use them, a process each."""
        return max(self.units, self.workers)


@noun
class Lease:
    """Everything granted to one action; made by the core and frozen. A resize makes a new one."""

    action_id: str
    node: str
    #: By resource kind.
    grants: Mapping[str, Grant] = field(default_factory=dict)
    #: Bytes of the node's memory newly held for it (0 when its trajectory holds them already).
    memory_bytes: int = 0
    #: Actions of the same service executed in the same batch as this one, leader first; empty when alone.
    batch: tuple[str, ...] = ()

    @property
    def chunk(self) -> Chunk | None:
        """Its devices, counted on the node."""
        return next((grant.chunk for grant in self.grants.values() if grant.chunk is not None), None)

    def units(self, kind: str) -> int:
        """Return the units granted of ``kind``; 0 if none."""
        grant = self.grants.get(kind)
        return 0 if grant is None else grant.units

    @property
    def cores(self) -> tuple[int, ...]:
        grant = self.grants.get("cpu")
        return () if grant is None else grant.cores


class State(StrEnum):
    """States of an invocation; `LEGAL_MOVES` is the whole table of transitions."""

    QUEUED = "queued"  #: accepted and recorded, not started
    RUNNING = "running"  #: leased and handed to a runtime
    SUCCEEDED = "succeeded"  #: ended with a result (a non-zero exit status is a result)
    FAILED = "failed"  #: ended with a reason
    TIMED_OUT = "timed_out"  #: one of its two clocks ran out
    CANCELLED = "cancelled"  #: the caller asked, or went away
    LOST = "lost"  #: its node or the gateway died and it may not run again

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.TIMED_OUT, State.CANCELLED, State.LOST})
#: What was started and ended so was completed, well or not: of such actions ACTs are told (paper, equation 2).
COMPLETED = frozenset({State.SUCCEEDED, State.FAILED, State.TIMED_OUT})

#: running -> queued is a retry.
LEGAL_MOVES: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.FAILED, State.TIMED_OUT, State.CANCELLED, State.LOST}),
    State.RUNNING: TERMINAL | {State.QUEUED},
    **{state: frozenset[State]() for state in TERMINAL},
}


@noun
class Outcome:
    """How an execution ended; made by the executor (or by the core, for work that never started) and frozen."""

    state: State
    #: The runtime's result as plain JSON values; also partial results of a failure.
    result: object = None
    #: Present exactly when the state is not ``succeeded``.
    reason: Reason | None = None
    message: str = ""
    #: The component that failed, for example ``sandbox.container`` or ``model.worker``.
    component: str = ""
    #: Seconds that the user's work itself ran; the rest between lease and end is overhead.
    execution_s: float = 0.0
    #: Seconds after which another try may help (Retry-After of an upstream).
    retry_after_s: float | None = None
    #: Measured use: cpu_s, peak_memory_bytes, restore_s, workers ...
    usage: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.state.terminal, f"an outcome is terminal, not {self.state}"
        assert (self.reason is None) == (self.state is State.SUCCEEDED), (self.state, self.reason)


@noun
class Settlement:
    """The end of an action, exactly one for each: its outcome and its times.

    ``queue_s + overhead_s + execution_s`` is the ACT, always (paper, equation 2, with overhead shown apart).
    """

    action: Action
    outcome: Outcome
    #: The last lease; None for work that never started.
    lease: Lease | None
    queue_s: float
    overhead_s: float
    execution_s: float
    #: Members of its batch by what the history tells apart, itself included; empty if it was started alone.
    batch: Mapping[Kin, int] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        """Whether it was started, and neither cancelled nor lost."""
        return self.lease is not None and self.outcome.state in COMPLETED

    @property
    def act_s(self) -> float:
        return self.queue_s + self.overhead_s + self.execution_s
