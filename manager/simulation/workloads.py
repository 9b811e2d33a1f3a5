"""Workloads: what trajectories do, and presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from manager.action import Amdahl, EfficiencyTable, Elasticity, UnitSet
from manager.config import ServiceSpec
from manager.resources.pools import QuotaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One action of a trajectory as it really is; what the scheduler knows of it is decided by the simulator."""

    #: Seconds between the end of the step before (or the arrival) and this one: the model generates.
    think_s: float
    function: str
    cost: Mapping[str, UnitSet]
    #: Resource kind whose amount changes the duration; None for a rigid action.
    key: str | None = None
    #: Seconds with one unit of the key resource.
    t_ori_s: float
    elasticity: Elasticity | None = None
    #: Model service that it needs, for GPU actions.
    service: str | None = None
    #: Whether its units may change while it runs; by default where the key is ``cpu``.
    malleable: bool = False
    #: The caller's key for learning, for example the suite.
    profile_key: str = ""
    #: The size of its input, by which its duration may be learned; None where it has none.
    size: float | None = None
    #: What it adds to a batch of its service; 0 where it runs alone.
    batch_tokens: int = 0
    #: Seconds for which it holds its units besides the work: its sandbox or process is made ready and cleaned up.
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTrajectory:
    """One rollout: when it starts, what it holds, and its steps in order."""

    id: str
    task: str = "default"
    arrival_s: float = 0.0
    memory_bytes: int = 0
    steps: tuple[TraceStep, ...] = field(default=())


# Workloads: presets after the paper's tasks, made from a seed, and the machines that they are meant for.
#
# The distributions are assumptions, written down in the parameter classes. Shell durations follow the published SWE-
# bench trajectories of mini-swe-agent (median 0.26 s, 99th percentile 5.7 s); the rest follows the paper.

GIB = 2**30
#: Bytes a second from a pinned host image into one device, as measured on PCIe 5.
RESTORE_BYTES_PER_S = 50e9
#: Tokens of one forward pass, as a gateway has it by default: queue mates share a batch up to it.
BATCH_TOKENS = 16384
#: Seconds from the start of a search within which its provider has counted it.
ARRIVES_WITHIN_S = 0.05
#: Speed-up lost by tensor parallelism.
TENSOR_PARALLEL = EfficiencyTable(((1, 1.0), (2, 0.92), (4, 0.82), (8, 0.65)))
DEVICE_UNITS = UnitSet.of((1, 2, 4, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Trajectories and what they assume to exist besides cores and devices."""

    name: str
    trajectories: tuple[TracedTrajectory, ...]
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    quotas: Mapping[str, QuotaSpec] = field(default_factory=dict)

    @property
    def actions(self) -> int:
        return sum(len(trajectory.steps) for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """AI coding: turns of generation and a shell action, then a test suite as the reward."""

    #: Trajectories start within this many seconds: the batch is sent at once, the engine takes a while to prefill.
    spread_s: float = 20.0
    turns_median: float = 11.0
    turns_sigma: float = 0.5
    turns_max: int = 40
    #: Seconds of generation a turn.
    think_mean_s: float = 6.0
    think_sigma: float = 0.6
    shell_median_s: float = 0.26
    shell_sigma: float = 1.32
    shell_max_s: float = 20.0
    #: Core-seconds of a reward with one worker.
    reward_median_s: float = 80.0
    reward_sigma: float = 0.6
    reward_units_max: int = 32
    serial_min: float = 0.02
    serial_max: float = 0.10
    memory_bytes: int = 4 * GIB
    #: Different suites that the rewards are drawn from; 0 makes each its own.
    suites: int = 0


#: Everything at once: one short turn, then all rewards within a second.
CODING_BURST = Coding(spread_s=1.0, turns_median=1.0, turns_sigma=0.0, think_mean_s=0.5, think_sigma=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """MOPD: a rollout, then log-probabilities from the teacher of its domain."""

    services: int = 10
    bytes_per_service: int = 64 * 10**9
    #: Rollouts end around this time, with a long tail.
    rollout_median_s: float = 110.0
    rollout_sigma: float = 0.45
    #: Device-seconds of one request.
    request_median_s: float = 0.8
    request_sigma: float = 0.5
    #: Popularity of the n-th teacher is n ** -skew.
    skew: float = 0.5
    #: Tokens of a request, for batches of queue mates; 0: each runs alone, as whole rollouts fill a device.
    request_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """DeepSearch: turns of generation and a search under a quota, then a judge."""

    spread_s: float = 20.0
    turns_median: float = 12.0
    turns_sigma: float = 0.5
    turns_max: int = 40
    think_mean_s: float = 8.0
    think_sigma: float = 0.6
    call_median_s: float = 0.8
    call_sigma: float = 0.5
    #: Searches that may start in a second.
    quota: int = 200
    #: A search also parses what it found on one core; a turn in so many does.
    parse_every: int = 3
    judge_median_s: float = 3.0
    judge_sigma: float = 0.4
    judge_bytes: int = 64 * 10**9
    #: Tokens of a judge's request, as for `Teachers.request_tokens`.
    judge_tokens: int = 0


class _Draw:
    """Random values of one component; components do not disturb each other."""

    def __init__(self, seed: int, salt: int) -> None:
        self._rng = np.random.default_rng([seed, salt])

    def lognormal(self, median: float, sigma: float, most: float = float("inf")) -> float:
        return round(min(most, float(self._rng.lognormal(np.log(median), sigma))), 4)

    def lognormal_mean(self, mean: float, sigma: float) -> float:
        return self.lognormal(mean * float(np.exp(-sigma * sigma / 2)), sigma)

    def count(self, median: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(float(self._rng.lognormal(np.log(median), sigma)))))

    def uniform(self, low: float, high: float) -> float:
        return round(float(self._rng.uniform(low, high)), 4)

    def index(self, weights: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
        return int(self._rng.choice(len(weights), p=weights / weights.sum()))


def coding(batch: int, seed: int, parameters: Coding | None = None) -> Workload:
    """AI coding (paper, section 6.1)."""
    p = parameters or Coding()
    draw = _Draw(seed, 1)
    suites = [_suite(p, draw, f"suite-{index}") for index in range(p.suites)]
    trajectories = [_coder(p, draw, index, suites) for index in range(batch)]
    return Workload(name="ai-coding", trajectories=tuple(trajectories))


def _coder(p: Coding, draw: _Draw, index: int, suites: list[TraceStep]) -> TracedTrajectory:
    arrival_s = draw.uniform(0.0, p.spread_s)
    shell = [
        TraceStep(
            think_s=draw.lognormal_mean(p.think_mean_s, p.think_sigma),
            function="shell",
            cost={"cpu": UnitSet.fixed(1)},
            t_ori_s=draw.lognormal(p.shell_median_s, p.shell_sigma, p.shell_max_s),
        )
        for _ in range(draw.count(p.turns_median, p.turns_sigma, p.turns_max))
    ]
    reward = suites[int(draw.uniform(0, len(suites) - 1e-3))] if suites else _suite(p, draw, f"suite-{index}")
    return TracedTrajectory(
        id=f"coding-{index:05d}",
        task="coding",
        arrival_s=arrival_s,
        memory_bytes=p.memory_bytes,
        steps=(*shell, reward),
    )


def _suite(p: Coding, draw: _Draw, name: str) -> TraceStep:
    """A test suite: the reward, after one last generation."""
    return TraceStep(
        think_s=draw.lognormal_mean(p.think_mean_s, p.think_sigma),
        function="unit_tests",
        cost={"cpu": UnitSet.span(1, p.reward_units_max)},
        key="cpu",
        t_ori_s=draw.lognormal(p.reward_median_s, p.reward_sigma),
        elasticity=Amdahl(draw.uniform(p.serial_min, p.serial_max)),
        malleable=True,
        profile_key=name,
    )


def mopd(batch: int, seed: int, parameters: Teachers | None = None) -> Workload:
    """Multi-teacher on-policy distillation (paper, section 6.1)."""
    p = parameters or Teachers()
    draw = _Draw(seed, 2)
    weights = np.arange(1, p.services + 1, dtype=np.float64) ** -p.skew
    trajectories = []
    for index in range(batch):
        step = TraceStep(
            think_s=draw.lognormal(p.rollout_median_s, p.rollout_sigma),
            function="teacher",
            cost={"gpu": DEVICE_UNITS},
            key="gpu",
            t_ori_s=draw.lognormal(p.request_median_s, p.request_sigma),
            elasticity=TENSOR_PARALLEL,
            service=f"teacher-{draw.index(weights)}",
            batch_tokens=p.request_tokens,
        )
        trajectories.append(TracedTrajectory(id=f"mopd-{index:05d}", task="mopd", steps=(step,)))
    services = {f"teacher-{index}": service(f"teacher-{index}", p.bytes_per_service) for index in range(p.services)}
    return Workload(name="mopd", trajectories=tuple(trajectories), services=services)


def deepsearch(batch: int, seed: int, parameters: Search | None = None) -> Workload:
    """DeepSearch (paper, section 6.1): searches under a quota, then a judge on devices."""
    p = parameters or Search()
    draw = _Draw(seed, 3)
    trajectories = [_searcher(p, draw, index) for index in range(batch)]
    return Workload(
        name="deepsearch",
        trajectories=tuple(trajectories),
        services={"judge": service("judge", p.judge_bytes)},
        quotas={"search": QuotaSpec(limit=p.quota, period_s=1.0, arrives_within_s=ARRIVES_WITHIN_S)},
    )


def _searcher(p: Search, draw: _Draw, index: int) -> TracedTrajectory:
    arrival_s = draw.uniform(0.0, p.spread_s)
    calls = []
    for turn in range(draw.count(p.turns_median, p.turns_sigma, p.turns_max)):
        parses = p.parse_every > 0 and turn % p.parse_every == 0
        calls.append(
            TraceStep(
                think_s=draw.lognormal_mean(p.think_mean_s, p.think_sigma),
                function="search_and_parse" if parses else "search",
                cost={"search": UnitSet.fixed(1)} | ({"cpu": UnitSet.fixed(1)} if parses else {}),
                t_ori_s=draw.lognormal(p.call_median_s, p.call_sigma),
            )
        )
    judge = TraceStep(
        think_s=draw.lognormal_mean(p.think_mean_s, p.think_sigma),
        function="judge",
        cost={"gpu": DEVICE_UNITS},
        key="gpu",
        t_ori_s=draw.lognormal(p.judge_median_s, p.judge_sigma),
        elasticity=TENSOR_PARALLEL,
        service="judge",
        batch_tokens=p.judge_tokens,
    )
    return TracedTrajectory(id=f"search-{index:05d}", task="search", arrival_s=arrival_s, steps=(*calls, judge))


def service(name: str, total_bytes: int) -> ServiceSpec:
    """A model service whose parameters are split over the devices of its chunk."""
    by_dop = {dop: total_bytes // dop for dop in DEVICE_UNITS}
    restore_s = {dop: held / RESTORE_BYTES_PER_S for dop, held in by_dop.items()}
    return ServiceSpec(name=name, bytes_by_dop=by_dop, restore_s_by_dop=restore_s, batch_tokens=BATCH_TOKENS)


def merged(name: str, *parts: Workload) -> Workload:
    """Several tasks at the same time on the same resources."""
    return Workload(
        name=name,
        trajectories=tuple(trajectory for part in parts for trajectory in part.trajectories),
        services={key: value for part in parts for key, value in part.services.items()},
        quotas={key: value for part in parts for key, value in part.quotas.items()},
    )


def mopd_and_search(batch: int, seed: int) -> Workload:
    """Half of the batch distils, half searches; they share the devices."""
    return merged("mopd+search", mopd(batch // 2, seed), deepsearch(batch - batch // 2, seed))


def mixed(batch: int, seed: int, search: Search | None = None) -> Workload:
    """A third each of coding, distillation and search."""
    third = batch // 3
    return merged(
        "mixed", coding(batch - 2 * third, seed), mopd(third, seed), deepsearch(third, seed, search or Search(quota=60))
    )


#: Presets by name: (batch, seed) -> workload.
PRESETS: Mapping[str, Callable[[int, int], Workload]] = {
    "ai-coding": coding,
    "ai-coding-burst": lambda batch, seed: coding(batch, seed, CODING_BURST),
    "mopd": mopd,
    "deepsearch": deepsearch,
    "mopd+search": mopd_and_search,
    "mixed": mixed,
}
