"""Requests that nobody tuned on: windows of recorded workloads, ours against what people have.

Windows of `WINDOW` calls begin at every `STRIDE`-th call of every recording, each at two loads, with durations known
and learned. What a recording does not say is assumed here and written down: the cores or devices that give a load,
what a token costs, and how far a function that is taken to be elastic scales.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from bench.inputs import STEPS, VARIABLE, real_input
from bench.paper.simulated import PAPERS, Contender, Row, best_fixed_s, row_of, shown, side_by_side
from bench.report import BenchReport
from manager.action import Amdahl, UnitSet
from manager.simulation.simulate import Size
from manager.simulation.workloads import DEVICE_UNITS, TENSOR_PARALLEL, TracedTrajectory, TraceStep, Workload, service

FUNCTIONS = "traces/azure_functions_2019_sample"
INVOCATIONS = "traces/Azure2021_200_invocations.csv"
CODE_REQUESTS = "traces/AzureLLMInferenceTrace_code.csv"
MOONCAKE = "traces/mooncake_synthetic_trace.jsonl.gz"
#: Work that comes in over what cores or devices do at one unit an action.
LOADS = (0.86, 1.1)

#: Calls of a window, and how many after the one before it each begins. A last window of less than 9 in 10 is left out.
WINDOW, STRIDE, LEAST_PART = 1000, 500, 0.9
#: Not one of the seeds that constants were chosen on: what is thinned out is drawn.
SEED = 11

#: The minute of the day from which functions are played, for how many at most, and the part of their invocations.
FIRST_MINUTE, MINUTES, KEPT = 600, 40, 0.06
#: Percentiles of a function's durations, as its columns have them.
SHARES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)
#: Least seconds of a function: the recording has whole milliseconds.
LEAST_S = 0.001
#: Where functions are taken to be elastic: most cores of one, and its serial fraction.
ELASTIC_UNITS, SERIAL = 8, (0.02, 0.10)

#: The devices that serve requests to a model, and what one of them needs for a token.
REQUEST_DEVICES = 16
PREFILL_S, DECODE_S = 1e-4, 0.02
MODEL_BYTES = 64 * 10**9

#: First come, first served, one unit each.
FCFS = "fixed:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWindow:
    """Some calls of a recording, in the order and the bursts in which they came."""

    name: str
    workload: Workload
    size: Size
    #: What a constant DoP is chosen from.
    dops: Sequence[int]

    def measure(self) -> Row:
        """Return ours over the best baseline's mean, and over the p99 of first come, first served.

        Both with durations known and learned; a constant DoP needs to know nothing. Where calls have a size, ours also
        learns by it.
        """
        played = {name: row_of(one.play(self.workload, self.size)) for name, one in self._contenders().items()}
        fixed_s = min(played[FCFS]["mean"], best_fixed_s(self.workload, self.size, self.dops))
        row: Row = {}
        for knowledge in ("known", "learned"):
            best_s = min(fixed_s, *(played[f"{paper}, {knowledge}"]["mean"] for paper in PAPERS))
            for ours in [name for name in played if name.startswith("adaptive") and knowledge in name]:
                how = ours.partition(", ")[2]
                row[f"{how}: mean"] = played[ours]["mean"] / best_s
                row[f"{how}: p99"] = played[ours]["p99"] / played[FCFS]["p99"]
        return row

    def _contenders(self) -> dict[str, Contender]:
        known = {"adaptive": Contender(policy="adaptive"), **PAPERS}
        found = {f"{name}, known": one for name, one in known.items()}
        found |= {f"{name}, learned": replace(one, learned=True) for name, one in known.items()}
        if any(step.size is not None for each in self.workload.trajectories for step in each.steps):
            found["adaptive, learned by size"] = Contender(policy="adaptive", learned=True, sized=True)
        return {FCFS: Contender(policy=FCFS), **found}


def window_figures(report: BenchReport, *, count: int | None = None, row: str = "") -> None:
    """Play every window, or the first ``count`` of each recording; all are printed, those with the worst mean first.

    ``row``: what the names of the windows begin with that are played.
    """
    rows: dict[str, Row] = {}
    chosen = [each for each in windows(report, count) if each.name.startswith(row)]
    for at in range(0, len(chosen), 8):
        some = chosen[at : at + 8]
        rows |= dict(zip([each.name for each in some], side_by_side([each.measure for each in some]), strict=True))
        report.figure("windows", shown(dict(sorted(rows.items(), key=lambda one: -worst(one[1], "mean")))))
        report.progress(f"windows: {len(rows)} of {len(chosen)}")
        report.keep()
    if rows:
        report.check("trace_worst_mean_over_best", max(worst(one, "mean") for one in rows.values()), 1.03, "lower")
        report.check("trace_worst_p99_over_fcfs", max(worst(one, "p99") for one in rows.values()), 1.1, "lower")


def worst(row: Row, measure: str) -> float:
    """Return the largest ratio of one measure, whatever was known."""
    return max(value for name, value in row.items() if name.endswith(measure))


def windows(report: BenchReport, count: int | None = None) -> Iterator[TraceWindow]:
    """Yield the windows of every recording that this machine has; what is missing is noted."""
    recordings: tuple[tuple[str, Callable[[Path, int | None], Iterator[TraceWindow]]], ...] = (
        (CODE_REQUESTS, _code_windows),
        (MOONCAKE, _mooncake_windows),
        (FUNCTIONS, _function_windows),
        (INVOCATIONS, _invocation_windows),
        (STEPS, _agent_windows),
    )
    for name, of in recordings:
        path = real_input(name)
        if path is None:
            report.note(f"not played, as {VARIABLE} names no directory with recorded inputs: {name}")
        else:
            yield from of(path, count)


def starts(calls: int, count: int | None = None) -> list[int]:
    """Return the call at which each window of a recording begins; a short recording is one window."""
    found = [at for at in range(0, calls, STRIDE) if calls - at >= LEAST_PART * WINDOW] or [0]
    return found[:count]


def _at_one_unit_s(trajectories: Sequence[TracedTrajectory]) -> float:
    return sum(step.t_ori_s for each in trajectories for step in each.steps)


def _on_cores(
    name: str, trajectories: Sequence[TracedTrajectory], dops: Sequence[int], count: int | None
) -> Iterator[TraceWindow]:
    """Yield windows of trajectories of one action each, on the cores that give a load."""
    ordered = sorted(trajectories, key=lambda each: each.arrival_s)
    for at in starts(len(ordered), count):
        some = ordered[at : at + WINDOW]
        begin_s = some[0].arrival_s
        moved = tuple(replace(each, arrival_s=each.arrival_s - begin_s) for each in some)
        rate = _at_one_unit_s(moved) / max(LEAST_S, moved[-1].arrival_s)
        for load in LOADS:
            size = Size(nodes=1, cores=max(1, round(rate / load)))
            yield TraceWindow(
                name=f"{name}, load {load}, from {at}",
                workload=Workload(name=name, trajectories=moved),
                size=size,
                dops=dops,
            )


# -- functions


@dataclass(frozen=True, slots=True)
class RecordedFunction:
    """A function of the recording: invocations by minute of the day, and seconds at `SHARES`."""

    name: str
    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, share: float) -> float:
        """Return the seconds below which a ``share`` of its invocations stay, between two percentiles geometrically."""
        upper = next(index for index, known in enumerate(SHARES) if share <= known)
        if upper == 0:
            return self.seconds[0]
        low_s, high_s = self.seconds[upper - 1 : upper + 1]
        part = (share - SHARES[upper - 1]) / (SHARES[upper] - SHARES[upper - 1])
        return float(low_s * (high_s / low_s) ** part)


def read_functions(folder: Path) -> list[RecordedFunction]:
    """Functions of ``200_inv.csv`` and ``200_run.csv``, those without durations left out."""
    columns = [f"percentile_Average_{round(100 * share)}" for share in SHARES]
    seconds = {
        row["HashFunction"]: tuple(max(LEAST_S, float(row[column]) / 1000) for column in columns)
        for row in _table(folder / "200_run.csv")
    }
    found = []
    for row in _table(folder / "200_inv.csv"):
        name = row["HashFunction"]
        if name in seconds:
            counts = tuple(int(row[f"minute_{minute}"]) for minute in range(1, len(row) - 2))
            found.append(RecordedFunction(name, counts, seconds[name]))
    return found


def _table(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _function_windows(path: Path, count: int | None) -> Iterator[TraceWindow]:
    functions = read_functions(path)
    for name, elastic, dops in (("functions", False, (1,)), ("functions, elastic", True, (1, 2, 4, 8))):
        drawn = invocations(functions, SEED, elastic=elastic).trajectories
        yield from _on_cores(name, drawn, dops, count)


def _invocation_windows(path: Path, count: int | None) -> Iterator[TraceWindow]:
    """Yield windows of a recording of single invocations, one core each."""
    found = []
    for index, row in enumerate(_table(path)):
        seconds = max(LEAST_S, float(row["duration"]))
        step = TraceStep(think_s=0.0, function=row["func"][:8], cost={"cpu": UnitSet.fixed(1)}, t_ori_s=seconds)
        arrival_s = max(0.0, float(row["end_timestamp"]) - seconds)
        found.append(TracedTrajectory(id=f"i{index}", arrival_s=arrival_s, steps=(step,)))
    yield from _on_cores("invocations", found, (1,), count)


def invocations(
    functions: Sequence[RecordedFunction], seed: int, minutes: int = MINUTES, *, elastic: bool = False
) -> Workload:
    """Some minutes of the day, a part of the invocations, each at a moment of its minute; one core each or elastic."""
    chance = random.Random(seed)
    found: list[TracedTrajectory] = []
    for function in functions:
        step = TraceStep(think_s=0.0, function=function.name, cost={"cpu": UnitSet.fixed(1)}, t_ori_s=1.0)
        serial = chance.uniform(*SERIAL)
        if elastic:
            units = UnitSet.span(1, ELASTIC_UNITS)
            step = replace(step, cost={"cpu": units}, key="cpu", elasticity=Amdahl(serial), malleable=True)
        for minute in range(minutes):
            for _ in range(function.counts[FIRST_MINUTE + minute]):
                arrival_s, seconds = 60.0 * (minute + chance.random()), function.at(chance.random())
                if chance.random() < KEPT:
                    name = f"{function.name[:8]}-{len(found)}"
                    found.append(
                        TracedTrajectory(id=name, arrival_s=arrival_s, steps=(replace(step, t_ori_s=seconds),))
                    )
    return Workload(name="functions", trajectories=tuple(found))


# -- requests to a model


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request to a model: when it came, and its tokens."""

    arrival_s: float
    prompt: int
    generated: int

    @property
    def seconds(self) -> float:
        """Return what it takes on one device."""
        return PREFILL_S * self.prompt + DECODE_S * self.generated


def read_code_requests(path: Path) -> list[RecordedRequest]:
    """Return the requests of the recording of a code model."""
    found: list[RecordedRequest] = []
    first: datetime | None = None
    for row in _table(path):
        instant = datetime.fromisoformat(row["TIMESTAMP"][:26])  # ten-millionths of a second are one digit too many
        first = first or instant
        arrival_s = (instant - first).total_seconds()
        found.append(RecordedRequest(arrival_s, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    return found


def read_mooncake(path: Path) -> list[RecordedRequest]:
    """Return the requests of the Mooncake recording."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    first_s = lines[0]["timestamp"] / 1000
    return [
        RecordedRequest(line["timestamp"] / 1000 - first_s, line["input_length"], line["output_length"])
        for line in lines
    ]


def _code_windows(path: Path, count: int | None) -> Iterator[TraceWindow]:
    yield from _request_windows("code model", read_code_requests(path), count)


def _mooncake_windows(path: Path, count: int | None) -> Iterator[TraceWindow]:
    yield from _request_windows("mooncake", read_mooncake(path), count)


def _request_windows(name: str, recorded: Sequence[RecordedRequest], count: int | None) -> Iterator[TraceWindow]:
    for at in starts(len(recorded), count):
        for load in LOADS:
            yield TraceWindow(
                name=f"{name}, load {load}, from {at}",
                workload=requests(name, recorded[at : at + WINDOW], load),
                size=Size(nodes=1, cores=0, gpus=REQUEST_DEVICES),
                dops=(1, 2, 4, 8),
            )


def requests(name: str, recorded: Sequence[RecordedRequest], load: float) -> Workload:
    """Requests to one model, in the order and the bursts in which they came, played so fast that they give a load."""
    first_s, last_s = recorded[0].arrival_s, recorded[-1].arrival_s
    device_s = sum(request.seconds for request in recorded)
    faster = load * REQUEST_DEVICES * (last_s - first_s) / device_s
    trajectories = []
    for index, request in enumerate(recorded):
        step = TraceStep(
            think_s=0.0,
            function="generate",
            cost={"gpu": DEVICE_UNITS},
            key="gpu",
            t_ori_s=max(LEAST_S, request.seconds),
            elasticity=TENSOR_PARALLEL,
            service="model",
            size=request.prompt,
        )
        trajectories.append(
            TracedTrajectory(id=f"r{index}", arrival_s=(request.arrival_s - first_s) / faster, steps=(step,))
        )
    return Workload(name=name, trajectories=tuple(trajectories), services={"model": service("model", MODEL_BYTES)})


# -- agents


def _agent_windows(path: Path, count: int | None) -> Iterator[TraceWindow]:
    """Yield windows of whole agents that are begun at once, each from the one that has the first command on."""
    every = agents(path).trajectories
    before = [sum(len(each.steps) for each in every[:index]) for index in range(len(every))]
    for at in starts(sum(len(each.steps) for each in every), count):
        some = tuple(each for each, first in zip(every, before, strict=True) if at <= first < at + WINDOW)
        lives_s = [sum(step.think_s + step.t_ori_s for step in each.steps) for each in some]
        at_once = _at_one_unit_s(some) / (sum(lives_s) / len(lives_s))
        for load in LOADS:
            yield TraceWindow(
                name=f"agents, load {load}, from {at}",
                workload=Workload(name="agents", trajectories=some),
                size=Size(nodes=1, cores=max(1, round(at_once / load))),
                dops=(1,),
            )


def agents(path: Path) -> Workload:
    """The shell commands of agents with the generation between them, all agents begun at once."""
    steps: defaultdict[str, list[TraceStep]] = defaultdict(list)
    observed_s: dict[str, float] = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            recorded = json.loads(line)
            name = f"{recorded['traj']}-{recorded['run']}"
            issued_s, answered_s = recorded["t_llm_end"], recorded["t_obs"]
            steps[name].append(
                TraceStep(
                    think_s=max(0.0, issued_s - observed_s.get(name, issued_s)),
                    function="shell",
                    cost={"cpu": UnitSet.fixed(1)},
                    t_ori_s=max(LEAST_S, answered_s - issued_s),
                )
            )
            observed_s[name] = answered_s
    trajectories = [TracedTrajectory(id=name, steps=tuple(each)) for name, each in steps.items()]
    return Workload(name="agents", trajectories=tuple(trajectories))
