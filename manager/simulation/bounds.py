"""Lower bounds of the mean completion time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from manager.action import Amdahl, Elasticity, UnitSet
from manager.resources.pools import QuotaSpec
from manager.scheduler.rank import Shape, shape_of
from manager.simulation.workloads import TracedTrajectory, TraceStep

# What trajectories take at the least: their fastest way alone, and the area bound on all of them together.
#
# Whatever is said here holds for every schedule: the relaxations are told at each function.


@dataclass(frozen=True, slots=True)
class FastestPath:
    """A trajectory at full speed: when each step could be ready at the earliest."""

    steps: tuple[TraceStep, ...]
    ready_s: tuple[float, ...]
    fastest_s: tuple[float, ...]
    ends_s: float


def fastest_path(trajectory: TracedTrajectory) -> FastestPath:
    now_s = trajectory.arrival_s
    ready, fastest = [], []
    for step in trajectory.steps:
        ready.append(now_s + step.think_s)
        fastest.append(fastest_s(step))
        now_s = ready[-1] + fastest[-1]
    return FastestPath(trajectory.steps, tuple(ready), tuple(fastest), now_s)


def fastest_s(step: TraceStep) -> float:
    """Seconds with the best admissible units."""
    return step.t_ori_s * float(step_shape(step).factors.min())


def least_s(step: TraceStep, kind: str, worker_cost_s: float) -> float:
    """The least unit-seconds of a kind that a step takes in any schedule; what workers cost is work of the key."""
    if kind not in step.cost:
        return 0.0
    if kind != step.key or step.elasticity is None:
        return step.cost[kind].minimum * fastest_s(step)
    workers_s = worker_cost_s * step.cost[kind].minimum if step.malleable else 0.0
    return step.t_ori_s * float(step_shape(step).areas.min()) + workers_s


def area_bound(
    trajectories: Sequence[TracedTrajectory], capacity: Mapping[str, int], worker_cost_s: float = 0.0
) -> float:
    """Last actions by shortest remaining work on one machine a kind; everything before them at its fastest."""
    jobs: dict[str, list[tuple[float, float]]] = {}
    total_s = 0.0
    for trajectory in trajectories:
        if not trajectory.steps:
            continue
        last = trajectory.steps[-1]
        before_s = sum(fastest_s(step) for step in trajectory.steps[:-1])
        total_s += before_s
        kind = last.key if last.key is not None else next(iter(last.cost), "")
        if kind not in capacity:
            total_s += fastest_s(last)
            continue
        ready_s = trajectory.arrival_s + before_s + sum(step.think_s for step in trajectory.steps)
        jobs.setdefault(kind, []).append((ready_s, least_s(last, kind, worker_cost_s) / capacity[kind]))
    return total_s + sum(shortest_remaining(waiting) for waiting in jobs.values())


def total_area_bound(
    trajectories: Sequence[TracedTrajectory],
    capacity: Mapping[str, int],
    quotas: Mapping[str, QuotaSpec],
    worker_cost_s: float = 0.0,
) -> float:
    """All that a trajectory takes of the kind that is scarcest for it, from its first step of that kind on.

    Its ACT is what it takes from the release of that work to the work's end, and its fastest way before and after, less
    the thinking in between. Each trajectory counts with one kind: what it takes of others is left out, so any choice is
    a relaxation.
    """
    jobs: dict[str, list[tuple[float, float]]] = {}
    total_s = 0.0
    for trajectory in trajectories:
        kind, share_s = _scarcest(trajectory, capacity, quotas, worker_cost_s)
        if share_s == 0.0:
            total_s += sum(fastest_s(step) for step in trajectory.steps)
            continue
        path, once = fastest_path(trajectory), kind in quotas
        uses = [index for index, step in enumerate(path.steps) if kind in step.cost]
        first, last = uses[0], uses[-1]
        # A call is counted at its start; work ends with its step.
        tail_s = sum(fastest_s(step) for step in path.steps[last + (not once) :])
        before_s = sum(fastest_s(step) for step in path.steps[:first])
        thought_s = sum(step.think_s for step in path.steps[first + 1 : last + 1])
        early_s = quotas[kind].period_s if once else 0.0
        jobs.setdefault(kind, []).append((path.ready_s[first] - early_s, share_s))
        total_s += before_s + tail_s - thought_s - early_s
    return total_s + sum(shortest_remaining(waiting) for waiting in jobs.values())


def _scarcest(
    trajectory: TracedTrajectory,
    capacity: Mapping[str, int],
    quotas: Mapping[str, QuotaSpec],
    worker_cost_s: float,
) -> tuple[str, float]:
    """The kind of which a trajectory takes the longest if it had all of it alone, and these seconds."""
    demands = [
        (sum(least_s(step, kind, worker_cost_s) for step in trajectory.steps) / units, kind)
        for kind, units in capacity.items()
    ]
    demands += [
        (
            sum(step.cost[kind].minimum for step in trajectory.steps if kind in step.cost) * each.period_s / each.limit,
            kind,
        )
        for kind, each in quotas.items()
    ]
    share_s, kind = max(demands, default=(0.0, ""))
    return kind, share_s


def shortest_remaining(jobs: Sequence[tuple[float, float]]) -> float:
    """Sum of flow times of (release, seconds) on one machine under shortest remaining processing time, the optimum."""
    pending: list[tuple[float, float]] = []
    now_s, total_s = -math.inf, 0.0
    arrivals = sorted(jobs)
    index = 0
    while pending or index < len(arrivals):
        if not pending:
            now_s = max(now_s, arrivals[index][0])
        while index < len(arrivals) and arrivals[index][0] <= now_s:
            heapq.heappush(pending, (arrivals[index][1], arrivals[index][0]))
            index += 1
        left_s, release_s = heapq.heappop(pending)
        until_s = arrivals[index][0] if index < len(arrivals) else math.inf
        if now_s + left_s <= until_s:
            now_s += left_s
            total_s += now_s - release_s
        else:
            heapq.heappush(pending, (left_s - (until_s - now_s), release_s))
            now_s = until_s
    return total_s


def step_shape(step: TraceStep) -> Shape:
    """Units of the key resource that make a difference; a rigid action has one."""
    if step.key is None or step.elasticity is None:
        units = next(iter(step.cost.values()), UnitSet.fixed(1))
        return shape_of(UnitSet.fixed(units.minimum), None)
    return shape_of(step.cost[step.key], step.elasticity)


# Lower bounds on the sum of ACTs of a workload, valid for every schedule, clairvoyant and unpinned ones included.
#
# Three relaxations, of which the best counts:
#
# - infinite: every action runs at its fastest at once;
# - area: what a trajectory takes of a kind at the least, on one machine as fast as all units together, in the order of
#   shortest remaining work, never before it could be ready: all of it, or its last action alone, after the others. A
#   quota of n in a period is a machine that does n calls in one, and may begin a period early;
# - price: the Lagrangian dual. With a price for every unit-second over time, each trajectory alone minimises its
#   ACT plus what it pays; the sum of these minima less the worth of the capacity bounds every feasible schedule.
#   Any prices are valid; good ones balance demand and capacity. Actions may be resized and interrupted freely,
#   but whatever uses many units at once has started as many workers, and works off what each of them costs.

Floats = NDArray[np.float64]

#: Cells of the price over time; their width follows from the workload's length.
CELLS = 480
#: Values of work tried for an elastic action, besides none.
WORTHS = 24
#: Starts after the ready instant, in cells, for which an elastic action is priced; between two of them it is
#: taken to gain all the time by which it starts later, which no start can do better.
STARTS = (0, 4, 16, 64, 256)
#: Ends looked at first; a later end costs more than that many cells anyway.
ENDS = 96
#: Most workers of each way to start a malleable action, tried once the prices are found.
WORKERS = (2, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256)
#: The price of a unit-second at first, and the least one that a price can come back from.
FIRST_PRICE = 0.05
LEAST_PRICE = 1e-6
#: Work that costs nothing is no work.
_LEAST_MARGINAL = 1e-6
#: Serial fractions are rounded down to a multiple of this: fewer tables, and still a lower bound.
SERIAL_GRAIN = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """Lower bounds on the sum of ACTs, in seconds."""

    infinite_s: float
    area_s: float
    price_s: float

    @property
    def best_s(self) -> float:
        return max(self.infinite_s, self.area_s, self.price_s)


def lower_bound(
    trajectories: Sequence[TracedTrajectory],
    capacity: Mapping[str, int],
    quotas: Mapping[str, QuotaSpec] | None = None,
    *,
    worker_cost_s: float = 0.0,
    batch_marginal: float = 1.0,
    rounds: int = 20,
) -> LowerBound:
    """Bounds for ``capacity`` units by kind (quota kinds in ``quotas``); ``rounds`` of improving the prices.

    ``worker_cost_s``: unit-seconds that each worker of a malleable action costs, in every schedule.
    ``batch_marginal``: the fraction of its own duration that a member adds to a batch, at the least.
    """
    infinite_s = sum(fastest_s(step) for trajectory in trajectories for step in trajectory.steps)
    if batch_marginal < 1.0:
        trajectories = [_shared(trajectory, batch_marginal) for trajectory in trajectories]
    dual = Dual(trajectories, capacity, quotas or {}, worker_cost_s)
    area_s = max(
        area_bound(trajectories, capacity, worker_cost_s),
        total_area_bound(trajectories, capacity, quotas or {}, worker_cost_s),
    )
    return LowerBound(infinite_s=infinite_s, area_s=area_s, price_s=dual.best(rounds))


def _shared(trajectory: TracedTrajectory, marginal: float) -> TracedTrajectory:
    """With steps that may share a batch as short as the least that each adds to one."""
    steps = [
        replace(step, t_ori_s=step.t_ori_s * max(marginal, _LEAST_MARGINAL)) if step.batch_tokens else step
        for step in trajectory.steps
    ]
    return replace(trajectory, steps=tuple(steps))


class Dual:
    """The Lagrangian dual: prices by kind and cell of time, and what every trajectory alone makes of them."""

    def __init__(
        self,
        trajectories: Sequence[TracedTrajectory],
        capacity: Mapping[str, int],
        quotas: Mapping[str, QuotaSpec],
        worker_cost_s: float,
    ) -> None:
        self._paths = [fastest_path(trajectory) for trajectory in trajectories if trajectory.steps]
        length_s = max((path.ends_s for path in self._paths), default=1.0)
        work_s = max(
            (
                sum(least_s(step, kind, 0.0) for each in trajectories for step in each.steps) / units
                for kind, units in capacity.items()
            ),
            default=0.0,
        )
        calls = {kind: _calls(trajectories, kind) for kind in quotas}
        limited_s = max((calls[kind] / each.limit * each.period_s for kind, each in quotas.items()), default=0.0)
        self._cell_s = (length_s + max(0.5 * work_s, limited_s)) / CELLS
        #: Worth of a price of one in each cell, and cells of one price.
        self._capacity: dict[str, Floats] = {
            kind: np.full(CELLS, units * self._cell_s) for kind, units in capacity.items()
        }
        self._groups: dict[str, int] = {}
        for kind, quota in quotas.items():
            self._groups[kind] = min(CELLS, max(1, math.ceil(quota.period_s / self._cell_s)))
            self._capacity[kind] = _allowed(quota, self._cell_s, self._groups[kind])
        self._quotas = frozenset(quotas)
        self._worker_cost_s = worker_cost_s
        self._prices = {kind: np.full(CELLS, FIRST_PRICE) for kind in self._capacity}

    def best(self, rounds: int) -> float:
        """The best bound found: each price follows the ratio of demand to capacity, in ever smaller steps."""
        best = -math.inf
        best_prices = self._prices
        for turn in range(rounds):
            value, used = self._evaluate()
            if value > best:
                best, best_prices = value, {kind: prices.copy() for kind, prices in self._prices.items()}
            for kind, prices in self._prices.items():
                demand = _levelled(used[kind], self._groups[kind]) if kind in self._groups else used[kind]
                factor = np.clip(demand / self._capacity[kind], 0.25, 4.0)
                prices *= factor ** (1.0 / (1.0 + 0.15 * max(0, turn - rounds // 4)))
                np.maximum(prices, LEAST_PRICE, out=prices)
                if kind in self._groups:
                    prices[:] = _levelled(prices, self._groups[kind])
        if self._worker_cost_s == 0.0:
            return best
        self._prices = best_prices
        return max(best, self._evaluate(self._worker_cost_s)[0])

    def _evaluate(self, worker_cost_s: float = 0.0) -> tuple[float, dict[str, Floats]]:
        used = {kind: np.zeros(CELLS) for kind in self._prices}
        tables = _Tables(self._prices, self._cell_s, self._quotas, worker_cost_s)
        value = sum(tables.walk(path, used) for path in self._paths)
        worth = sum(float((prices * self._capacity[kind]).sum()) for kind, prices in self._prices.items())
        return value - worth, used


class _Tables:
    """Everything that depends on the prices only, shared by all trajectories of one evaluation.

    Time is a grid a step: its earliest ready instant plus whole cells, so that a trajectory that never waits
    moves from grid point to grid point exactly. A start between two points is charged the least price around
    it, which keeps the bound valid.
    """

    def __init__(
        self, prices: Mapping[str, Floats], cell_s: float, quotas: frozenset[str], worker_cost_s: float
    ) -> None:
        self._cell_s = cell_s
        self._worker_cost_s = worker_cost_s
        self._quotas = quotas
        self._prices = {kind: np.concatenate([values, np.zeros(2 * CELLS)]) for kind, values in prices.items()}
        self._grid_s = np.arange(CELLS) * cell_s
        self._least: dict[tuple[str, int], Floats] = {}
        self._elastic: dict[tuple[str, UnitSet, Elasticity | None], _Elastic] = {}

    def walk(self, path: FastestPath, used: dict[str, Floats]) -> float:
        """The least ACT plus payment of one trajectory, and roughly where it uses what."""
        ahead_s = np.zeros(CELLS)
        for index in range(len(path.steps) - 1, -1, -1):
            step, ready_s = path.steps[index], path.ready_s[index]
            if step.elasticity is not None and step.key in self._prices:
                last = index == len(path.steps) - 1
                ahead_s = self._elastic_step(step, ready_s, path.fastest_s[index], ahead_s, last, used)
            else:
                ahead_s = self._rigid_step(step, ready_s, path.fastest_s[index], ahead_s, used)
        return float(ahead_s[0])

    def _rigid_step(
        self, step: TraceStep, ready_s: float, duration_s: float, ahead_s: Floats, used: dict[str, Floats]
    ) -> Floats:
        first = int(ready_s / self._cell_s)
        cost_s = ahead_s + duration_s
        for kind, units in step.cost.items():
            if kind not in self._prices:
                continue
            once = kind in self._quotas
            span = 2 if once else 2 + math.ceil(duration_s / self._cell_s)
            amount = units.minimum * (1.0 if once else duration_s)
            cost_s += amount * self._least_price(kind, span)[first : first + CELLS]
            if first < CELLS:
                used[kind][first] += amount
        return self._wait(cost_s)

    def _wait(self, cost_s: Floats) -> Floats:
        """Starting later costs the wait and what it costs then; after the grid everything is free."""
        later_s = cost_s + self._grid_s
        best_s: Floats = np.minimum.accumulate(later_s[::-1])[::-1] - self._grid_s
        return best_s

    def _least_price(self, kind: str, span: int) -> Floats:
        """The least price of each run of ``span`` cells."""
        least = self._least.get((kind, span))
        if least is None:
            prices = self._prices[kind]
            padded = np.concatenate([prices, np.zeros(span)])
            least = np.lib.stride_tricks.sliding_window_view(padded, span).min(axis=1)[: prices.size]
            self._least[kind, span] = least
        return least

    def _elastic_step(
        self, step: TraceStep, ready_s: float, fastest_s: float, ahead_s: Floats, last: bool, used: dict[str, Floats]
    ) -> Floats:
        assert step.key is not None
        ways = [(self._table(step, unit_set), step.t_ori_s + cost_s) for unit_set, cost_s in self._ways(step)]
        # An end between two grid points is charged the earlier one's future, less the cell that it may gain.
        future_s = np.zeros(CELLS) if last else ahead_s - self._cell_s
        cost_s = np.empty(CELLS)
        for start, stop in zip(STARTS, (*STARTS[1:], CELLS), strict=True):
            options = [table.value(t_ori_s, ready_s, fastest_s, start, future_s) for table, t_ori_s in ways]
            best = min(range(len(ways)), key=lambda index: options[index][0])
            value_s, worth = options[best]
            cost_s[start:stop] = value_s - self._grid_s[: stop - start]
            if start == 0:
                ways[best][0].use(ways[best][1], ready_s, worth, used[step.key])
        return self._wait(cost_s)

    def _ways(self, step: TraceStep) -> list[tuple[UnitSet, float]]:
        """Units by the number of workers started, and the seconds of T_ori that these cost at the least.

        Each worker costs unit-seconds at any width; a width with efficiency E does E seconds of T_ori in one.
        """
        assert step.key is not None
        units, elasticity = step.cost[step.key], step.elasticity
        if not step.malleable or self._worker_cost_s == 0.0 or units.choices is not None or elasticity is None:
            return [(units, 0.0)]
        ways: list[tuple[UnitSet, float]] = []
        fewest = units.minimum
        for most in (*(most for most in WORKERS if fewest <= most < units.maximum), units.maximum):
            least = min(elasticity.efficiency(count) for count in range(units.minimum, most + 1))
            ways.append((UnitSet.span(units.minimum, most), self._worker_cost_s * fewest * least))
            fewest = most + 1
        return ways

    def _table(self, step: TraceStep, unit_set: UnitSet) -> _Elastic:
        assert step.key is not None
        elasticity = _coarse(step.elasticity)
        table = self._elastic.get((step.key, unit_set, elasticity))
        if table is None:
            table = _Elastic(shape_of(unit_set, elasticity), self._prices[step.key], self._cell_s)
            self._elastic[step.key, unit_set, elasticity] = table
        return table


class _Elastic:
    """One shape under the prices: running costs h(t) = 1 + min_k (price k - worth speed(k)) a second.

    For a given end f and any worth of a second of T_ori, ``worth * t_ori + integral of h until f`` bounds the cost
    of having done the work by f: work beyond it only pays back its worth. The best worth counts, then the worst f.
    """

    def __init__(self, shape: Shape, prices: Floats, cell_s: float) -> None:
        # The worth that matters makes running neither gain nor lose: between no price and the highest one.
        low = float((1.0 / shape.speeds).min())
        high = float(((1.0 + float(prices.max()) * shape.counts) / shape.speeds).min())
        self._worths = np.concatenate([[0.0], np.linspace(0.995 * low, 1.005 * high, WORTHS)])
        speeds, counts = shape.speeds[:, None, None], shape.counts[:, None, None]
        net = prices[None, None, :] * counts - self._worths[None, :, None] * speeds
        choice = net.argmin(axis=0)
        least = np.minimum(np.take_along_axis(net, choice[None], axis=0)[0], 0.0)
        self._units = np.where(least < 0.0, shape.counts[choice], 0.0)
        zero = np.zeros((WORTHS + 1, 1))
        done = np.where(least < 0.0, shape.speeds[choice], 0.0)
        self._done = np.concatenate([zero, np.cumsum(done * cell_s, axis=1)], axis=1)
        self._integral = np.concatenate([zero, np.cumsum((1.0 + least) * cell_s, axis=1)], axis=1)
        self._cell_s = cell_s

    def value(
        self, t_ori_s: float, ready_s: float, fastest_s: float, start: int, future_s: Floats
    ) -> tuple[float, int]:
        """Least cost from ``start`` cells after the ready instant on, future included, and the worth that shows it."""
        begin_s = ready_s + start * self._cell_s
        here = self._worths * t_ori_s - self._at(begin_s, 1)[:, 0]
        count = ENDS
        while True:
            count = min(count, CELLS - start)
            by_end = here[:, None] + self._ends(begin_s + fastest_s, count)
            total = by_end.max(axis=0) + future_s[start : start + count]
            end = int(total.argmin())
            if count >= CELLS - start or total[end] <= (count - 1) * self._cell_s:
                return float(min(total[end], (CELLS - start) * self._cell_s)), int(by_end[:, end].argmax())
            count *= 4

    def _ends(self, first_s: float, count: int) -> Floats:
        """The least integral for an end in each of ``count`` cells from ``first_s`` on: at its ends or at its kink."""
        points = self._at(first_s, count + 1)
        edge = int(first_s / self._cell_s) + 1
        kinks = self._integral[:, edge : edge + count]
        least: Floats = np.minimum(np.minimum(points[:, :-1], points[:, 1:]), kinks)
        return least

    def _at(self, instant_s: float, count: int) -> Floats:
        """Integrals at ``instant_s`` plus whole cells, between edges by the line that they follow."""
        position = instant_s / self._cell_s
        first = int(position)
        part = position - first
        values = self._integral
        line: Floats = values[:, first : first + count] * (1.0 - part) + values[:, first + 1 : first + 1 + count] * part
        return line

    def use(self, t_ori_s: float, ready_s: float, worth: int, used: Floats) -> None:
        """Add the unit-seconds of working from the ready instant on: a direction, not part of the bound."""
        first = min(int(ready_s / self._cell_s), CELLS - 1)
        row, units = self._done[max(1, worth)], self._units[max(1, worth)]
        end = min(CELLS, int(row[first:].searchsorted(row[first] + t_ori_s)) + first)
        used[first:end] += units[first:end] * self._cell_s
        if end > first and row[end] > row[end - 1]:
            over = max(0.0, row[end] - row[first] - t_ori_s) / (row[end] - row[end - 1])
            used[end - 1] -= over * units[end - 1] * self._cell_s


def _coarse(elasticity: Elasticity | None) -> Elasticity | None:
    if isinstance(elasticity, Amdahl):
        return Amdahl(math.floor(elasticity.serial_fraction / SERIAL_GRAIN) * SERIAL_GRAIN)
    return elasticity


def _calls(trajectories: Sequence[TracedTrajectory], kind: str) -> int:
    return sum(step.cost[kind].minimum for each in trajectories for step in each.steps if kind in step.cost)


def _allowed(quota: QuotaSpec, cell_s: float, group: int) -> Floats:
    """Units that may start in each cell, on average over its group: a group is as long as a period at least.

    Prices are the same in a group, so that only its sum counts; the last group may be shorter.
    """
    allowed = np.empty(CELLS)
    for start in range(0, CELLS, group):
        cells = min(group, CELLS - start)
        windows = math.ceil(cells * cell_s / quota.period_s)
        allowed[start : start + cells] = quota.limit * windows / cells
    return allowed


def _levelled(values: Floats, group: int) -> Floats:
    """Each group's mean in all of its cells."""
    starts = np.arange(0, CELLS, group)
    sizes = np.diff(np.append(starts, CELLS))
    level: Floats = np.repeat(np.add.reduceat(values, starts) / sizes, sizes)
    return level
