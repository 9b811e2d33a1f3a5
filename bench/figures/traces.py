"""Recorded workloads played again: our default policies against the best baseline of each, durations known and learned.

What a recording does not say is assumed here and written down: the cores or devices that give a load, what a token
costs, and how far a function that is taken to be elastic scales.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean

from bench.figures.simulated import PAPERS, Contender, Make, Row, shown, table
from bench.inputs import STEPS, VARIABLE, real_input
from bench.report import BenchReport
from manager.action import Amdahl, UnitSet
from manager.simulation.simulate import Size
from manager.simulation.workloads import DEVICE_UNITS, TENSOR_PARALLEL, TracedTrajectory, TraceStep, Workload, service

FUNCTIONS = "traces/azure_functions_2019_sample"
CODE_REQUESTS = "traces/AzureLLMInferenceTrace_code.csv"
MOONCAKE = "traces/mooncake_synthetic_trace.jsonl.gz"
#: Work that comes in over what cores or devices do at one unit an action.
LOADS = (0.86, 1.1)

#: Calls of a recording that are played where nothing else is asked for: the first ones. Agents are played whole.
SAMPLE = 1500

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


#: Ours where a request's function declares its size: the tokens of its prompt, which a caller knows.
SIZED = "adaptive, learned by size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded workload at one load."""

    make: Make
    size: Size
    #: What a constant DoP is chosen from.
    dops: Sequence[int]
    #: Whether a seed makes a difference: what is thinned out is drawn.
    drawn: bool = False
    #: Whether its calls have a size.
    sized: bool = False


def trace_figures(
    report: BenchReport, seeds: Sequence[int], sample: int = SAMPLE, *, skip: int = 0, row: str = ""
) -> None:
    """Our default policies on each recording against the best of constant DoPs, FCFS and both readings of the paper.

    Of each the first ``sample`` calls are played, of requests to a model those after the first ``skip``, which the
    report says; ``row`` is what the names of the rows begin with that are played.
    """
    rows: dict[str, Row] = {}
    ratios: dict[str, Row] = {}
    for name, recording in recordings(report, sample, skip).items():
        if not name.startswith(row):
            continue
        of = table(
            seeds if recording.drawn else seeds[:1],
            recording.make,
            recording.size,
            _contenders(sized=recording.sized),
            recording.dops,
        )
        rows.update({f"{name}, {policy}": row for policy, row in of.items()})
        ratios[name] = over_best_baseline(of)
        report.figure("traces_act_s", shown(rows))
        report.figure("traces_over_best_baseline", shown(ratios))
        report.progress(f"traces: {name}")
        report.keep()
    if not ratios:
        return
    worst = max(value for row in ratios.values() for value in row.values())
    report.check("traces_worst_over_best_baseline", worst, 1.03, "lower")


def _contenders(*, sized: bool) -> dict[str, Contender]:
    known = {"adaptive": Contender(policy="adaptive"), "fixed:1": Contender(policy="fixed:1"), **PAPERS}
    learned = {
        f"{name}, learned": replace(one, learned=True) for name, one in known.items() if not name.startswith("fixed")
    }
    by_size = {SIZED: Contender(policy="adaptive", learned=True, sized=True)} if sized else {}
    return known | learned | by_size


def over_best_baseline(rows: Mapping[str, Row]) -> Row:
    """How many times the best baseline's mean ours takes; a constant DoP needs to know nothing, the paper no size."""
    fixed_s = min(rows["fixed:1"]["mean"], rows["adaptive"]["best_fixed"])
    ratios: Row = {}
    for knowledge, ending in (("known", ""), ("learned", ", learned")):
        paper_s = min(rows[f"{name}{ending}"]["mean"] for name in PAPERS)
        ratios[knowledge] = rows[f"adaptive{ending}"]["mean"] / min(fixed_s, paper_s)
        if knowledge == "learned" and SIZED in rows:
            ratios["learned by size"] = rows[SIZED]["mean"] / min(fixed_s, paper_s)
    return ratios


def recordings(report: BenchReport, sample: int = SAMPLE, skip: int = 0) -> dict[str, Recording]:
    """The first ``sample`` calls of every recording that this machine has, at each load.

    Of requests to a model they are those after the first ``skip``. What is missing is noted, and so is what is played
    of the others.
    """
    found: dict[str, Recording] = {}
    for name, add in (
        (FUNCTIONS, _functions),
        (CODE_REQUESTS, partial(_code_requests, skip=skip)),
        (MOONCAKE, partial(_mooncake, skip=skip)),
        (STEPS, _agent_steps),
    ):
        path = real_input(name)
        if path is None:
            report.note(f"not played, as {VARIABLE} names no directory with recorded inputs: {name}")
            continue
        added, played = add(path, sample)
        report.note(f"played of {name}: {played}")
        found.update(added)
    return found


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


def _functions(path: Path, sample: int) -> tuple[dict[str, Recording], str]:
    functions = read_functions(path)
    minutes = minutes_of(functions, sample)
    found = {}
    for load in LOADS:
        size = Size(nodes=1, cores=max(1, round(_core_s(functions, minutes) / (60.0 * minutes * load))))
        for elastic in (False, True):
            found[f"functions{', elastic' if elastic else ''}, load {load}"] = Recording(
                make=lambda seed, elastic=elastic: invocations(functions, seed, minutes, elastic=elastic),  # type: ignore[misc]
                size=size,
                dops=(1, 2, 4, 8) if elastic else (1,),
                drawn=True,
            )
    return found, f"{KEPT:.0%} of the invocations of {minutes} minutes, drawn"


def minutes_of(functions: Sequence[RecordedFunction], sample: int) -> int:
    """Minutes, `MINUTES` at most, in which ``sample`` of the invocations that are kept are to be expected."""
    expected = 0.0
    for minute in range(MINUTES):
        expected += KEPT * sum(one.counts[FIRST_MINUTE + minute] for one in functions)
        if expected >= sample:
            return minute + 1
    return MINUTES


def _core_s(functions: Sequence[RecordedFunction], minutes: int) -> float:
    """Return the core-seconds that are to be expected of what is played."""
    played = slice(FIRST_MINUTE, FIRST_MINUTE + minutes)
    shares = [(index + 0.5) / 1000 for index in range(1000)]
    return KEPT * sum(sum(one.counts[played]) * mean(one.at(share) for share in shares) for one in functions)


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


def read_code_requests(path: Path, sample: int = SAMPLE, skip: int = 0) -> list[RecordedRequest]:
    """``sample`` requests of the recording of a code model, after the first ``skip``."""
    found: list[RecordedRequest] = []
    first: datetime | None = None
    for row in islice(_table(path), skip, skip + sample):
        instant = datetime.fromisoformat(row["TIMESTAMP"][:26])  # ten-millionths of a second are one digit too many
        first = first or instant
        arrival_s = (instant - first).total_seconds()
        found.append(RecordedRequest(arrival_s, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    return found


def read_mooncake(path: Path, sample: int = SAMPLE, skip: int = 0) -> list[RecordedRequest]:
    """``sample`` requests of the Mooncake recording, after the first ``skip``."""
    found = []
    first_s: float | None = None
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in islice(file, skip, skip + sample):
            request = json.loads(line)
            instant_s = request["timestamp"] / 1000
            first_s = instant_s if first_s is None else first_s
            found.append(RecordedRequest(instant_s - first_s, request["input_length"], request["output_length"]))
    return found


def _code_requests(path: Path, sample: int, skip: int) -> tuple[dict[str, Recording], str]:
    return _request_recordings("code model", read_code_requests(path, sample, skip), skip)


def _mooncake(path: Path, sample: int, skip: int) -> tuple[dict[str, Recording], str]:
    return _request_recordings("mooncake", read_mooncake(path, sample, skip), skip)


def _request_recordings(name: str, recorded: Sequence[RecordedRequest], skip: int) -> tuple[dict[str, Recording], str]:
    found = {
        f"{name}, load {load}": Recording(
            make=lambda seed, load=load: requests(name, recorded, load),  # type: ignore[misc]
            size=Size(nodes=1, cores=0, gpus=REQUEST_DEVICES),
            dops=(1, 2, 4, 8),
            sized=True,
        )
        for load in LOADS
    }
    return found, f"{len(recorded)} requests after the first {skip}" if skip else f"the first {len(recorded)} requests"


def requests(name: str, recorded: Sequence[RecordedRequest], load: float) -> Workload:
    """Requests to one model, in the order and the bursts in which they came, played so fast that they give a load."""
    span_s = max(request.arrival_s for request in recorded)
    device_s = sum(request.seconds for request in recorded)
    faster = load * REQUEST_DEVICES * span_s / device_s
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
        trajectories.append(TracedTrajectory(id=f"r{index}", arrival_s=request.arrival_s / faster, steps=(step,)))
    return Workload(name=name, trajectories=tuple(trajectories), services={"model": service("model", MODEL_BYTES)})


# -- agents


def _agent_steps(path: Path, sample: int) -> tuple[dict[str, Recording], str]:
    """All agents: they are begun at once, and fewer would leave no cores to share."""
    work = agents(path)
    busy_s = sum(step.t_ori_s for each in work.trajectories for step in each.steps)
    lives_s = [sum(step.think_s + step.t_ori_s for step in each.steps) for each in work.trajectories]
    at_once = busy_s / (sum(lives_s) / len(lives_s))
    found = {
        f"agents, load {load}": Recording(
            make=lambda seed: work, size=Size(nodes=1, cores=max(1, round(at_once / load))), dops=(1,)
        )
        for load in LOADS
    }
    return found, f"all of its {len(work.trajectories)} agents"


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
