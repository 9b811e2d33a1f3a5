"""Each figure and table of the paper's evaluation: what is played for it, and what the paper reports.

The paper prints its figures without numbers but for those in its text and in Table 1: these stand beside ours. What it
does not give is in `ASSUMED`, and ``sensitivity`` shows how much the result depends on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.paper.simulated import bound_s, mean_act_s
from bench.report import Figure
from manager.simulation.baselines import POD_START_S, PODS_PER_NODE_S
from manager.simulation.bounds import fastest_s
from manager.simulation.simulate import Size, simulate
from manager.simulation.simulator import Physics, SimulationRun
from manager.simulation.workloads import Coding, Search, Teachers, Workload, coding, deepsearch, merged, mopd

#: Not one of those that constants were chosen on.
SEED = 11
NODE_CORES, GPUS = 256, 40
#: Actions that give a trajectory its reward; all others are its tools.
REWARDS = frozenset({"unit_tests", "teacher", "judge"})
#: Windows of time in which ACT is averaged (figure 6).
WINDOWS = 24
#: Seconds of one training phase. The paper shows it in its figures only.
TRAIN_S = 120.0
OURS, PODS, SGLANG, SERVERLESS, CALLS = "adaptive", "k8s", "static-gpu", "serverless-llm", "uncontrolled"
#: Algorithm 1 in its two readings (docs/SCHEDULING.md, R3).
PAPER, GREEDY = "paper", "paper,greedy=1"
#: The least that any order and any width could give, and the same with nothing to share.
BOUND, UNLIMITED = "bound", "unlimited"
#: Ours, where each sandbox takes what a pod takes, at the rate at which a node creates them.
CHARGED = "charged"
AS_PODS = Physics(sandbox_start_s=POD_START_S, sandboxes_per_node_s=PODS_PER_NODE_S)
LABELS = {
    OURS: "ours (adaptive)",
    PAPER: "Algorithm 1",
    GREEDY: "Algorithm 1, greedy reading",
    PODS: "Kubernetes pods",
    SGLANG: "SGLang, static",
    SERVERLESS: "ServerlessLLM",
    CHARGED: "ours, sandboxes as slow as pods",
    BOUND: "lower bound",
    UNLIMITED: "unlimited resources",
}

Measures = Mapping[str, Figure]


def _coding(batch: int, seed: int, **changed: float) -> Workload:
    return coding(batch, seed, Coding(**changed))  # type: ignore[arg-type]  # fields by name


def _search(batch: int, seed: int, **changed: float) -> Workload:
    return deepsearch(batch, seed, Search(**changed))  # type: ignore[arg-type]


def _mopd(batch: int, seed: int, **changed: float) -> Workload:
    return mopd(batch, seed, Teachers(services=9, **changed))  # type: ignore[arg-type]


def _both(batch: int, seed: int) -> Workload:
    return merged("mopd+search", _mopd(batch // 2, seed), _search(batch - batch // 2, seed))


#: The four workloads of section 6.1 by name: how one is made, and the cluster that it has.
WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "AI coding": _coding,
    "MOPD": _mopd,
    "DeepSearch": _search,
    "MOPD+Search": _both,
}
#: What the paper compares each with.
BASELINE = {
    "AI coding": PODS,
    "MOPD": SGLANG,
    "DeepSearch": f"{SGLANG}/{CALLS}",
    "MOPD+Search": f"{SGLANG}/{CALLS}",
}
#: Batch sizes of section 6.1; that of MOPD+Search is ours.
BATCH = {"AI coding": 1280, "MOPD": 2048, "DeepSearch": 2048, "MOPD+Search": 2048}
#: What the paper does not give: (workload, parameter) -> what it is.
ASSUMED: Mapping[tuple[str, str], str] = {
    ("AI coding", "think_mean_s"): "seconds of generation before each action",
    ("AI coding", "turns_median"): "shell commands of a trajectory",
    ("AI coding", "shell_median_s"): "seconds of a shell command",
    ("AI coding", "reward_median_s"): "core-seconds of a test suite",
    ("MOPD", "rollout_median_s"): "seconds of a rollout before its teacher is asked",
    ("MOPD", "request_median_s"): "device-seconds of a teacher's answer",
    ("DeepSearch", "call_median_s"): "seconds of a search",
    ("DeepSearch", "judge_median_s"): "device-seconds of the judge",
}


@dataclass(frozen=True, slots=True)
class Play:
    """One simulation: a workload on a cluster under a policy, a baseline, or as a bound."""

    workload: str
    policy: str
    batch: int
    cores: int = 1280
    gpus: int = GPUS
    changed: tuple[tuple[str, float], ...] = ()
    seed: int = SEED
    #: Steps in a row, each with the next seed.
    steps: int = 1

    def make(self) -> tuple[Workload, Size]:
        cores = 0 if self.workload == "MOPD" else self.cores
        size = Size(nodes=max(1, cores // NODE_CORES), cores=cores, gpus=self.gpus)
        if self.workload == "AI coding":
            size = replace(size, gpus=0)
        return WORKLOADS[self.workload](self.batch, self.seed, **dict(self.changed)), size

    def measure(self) -> Measures:
        """Play it, in this process; seconds throughout, of actions unless a name says trajectories."""
        if self.steps > 1:
            return trainers([value_of(each.measure(), "makespan") for each in self.one_by_one()])
        workload, size = self.make()
        if self.policy == BOUND:
            return {"act": bound_s(workload, size)}
        if self.policy == UNLIMITED:
            return {"act": sum(fastest_s(step) for each in workload.trajectories for step in each.steps) / self.batch}
        charged = self.policy == CHARGED
        run = simulate(workload, OURS if charged else self.policy, size, physics=AS_PODS if charged else None)
        count = max(1, len(run.records))
        return {
            "act": mean_act_s(run),
            "execution": sum(each.execution_s for each in run.records) / count,
            "queue": sum(each.queue_s for each in run.records) / count,
            "overhead": sum(each.overhead_s for each in run.records) / count,
            "generation": sum(step.think_s for each in workload.trajectories for step in each.steps) / self.batch,
            "tools": _per_trajectory(run, reward=False),
            "reward": _per_trajectory(run, reward=True),
            "makespan": run.makespan_s,
            "failures": run.failures,
            "windows": list(_windows(run)),
        }

    def one_by_one(self) -> list[Play]:
        """Return its steps."""
        return [replace(self, steps=1, seed=self.seed + number) for number in range(self.steps)]


def trainers(rollouts_s: Sequence[float]) -> Measures:
    """Return when so many steps are done, by how a trainer waits; the rollouts of each step take what is given.

    A synchronous trainer begins a step's rollouts when the step before is trained. One that is one step off the policy
    begins them while that step is trained, with the weights of the one before it.
    """
    generated_s, trained_s, before_s = 0.0, 0.0, 0.0
    for seconds in rollouts_s:
        generated_s = max(generated_s, before_s) + seconds
        before_s, trained_s = trained_s, max(generated_s, trained_s) + TRAIN_S
    return {
        "rollouts": sum(rollouts_s),
        "synchronous": sum(rollouts_s) + TRAIN_S * len(rollouts_s),
        "one_step_off": trained_s,
    }


def _per_trajectory(run: SimulationRun, *, reward: bool) -> float:
    acts = [each.act_s for each in run.records if (each.function in REWARDS) is reward]
    return sum(acts) / max(1, run.trajectories)


def _windows(run: SimulationRun) -> Iterator[list[Figure]]:
    """Yield the middle of each window that has a submission, and the mean ACT of what was submitted in it."""
    width_s = max((each.submitted_s for each in run.records), default=1.0) / WINDOWS or 1.0
    acts: dict[int, list[float]] = {}
    for each in run.records:
        acts.setdefault(min(WINDOWS - 1, int(each.submitted_s / width_s)), []).append(each.act_s)
    for at, values in sorted(acts.items()):
        yield [(at + 0.5) * width_s, sum(values) / len(values)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """One figure or table: what is played for it, what the paper says of it, and why ours may differ."""

    title: str
    #: What the paper reports, in its words and numbers.
    reported: str
    why: str
    x: str = ""
    #: Label of a line -> its points: the place on the axis, and what is played for it.
    lines: Mapping[str, Sequence[tuple[float, Play]]]
    #: What is drawn of each play.
    value: str = "act"
    #: Factors: name -> (what is divided, by what, the measure, the paper's factor where it gives one).
    factors: Mapping[str, tuple[Play, Play, str, float | None]]

    def plays(self) -> list[Play]:
        listed = [play for line in self.lines.values() for _, play in line]
        return listed + [play for over, under, _, _ in self.factors.values() for play in (over, under)]


def _sweep(
    workload: str, policies: Iterable[str], places: Sequence[int], axis: str
) -> dict[str, list[tuple[float, Play]]]:
    def at(policy: str, place: int) -> Play:
        base = Play(workload, policy, BATCH[workload])
        return replace(base, **{axis: place})  # type: ignore[arg-type]

    return {LABELS.get(policy, policy): [(place, at(policy, place)) for place in places] for policy in policies}


def _factor(
    workload: str, baseline: str, paper: float | None, measure: str = "act", *, batch: int, cores: int = 1280
) -> tuple[Play, Play, str, float | None]:
    """Return the baseline over ours, and what the paper reports of it."""
    return Play(workload, baseline, batch, cores), Play(workload, OURS, batch, cores), measure, paper


def _charged(batch: int) -> tuple[Play, Play]:
    return Play("AI coding", PODS, batch), Play("AI coding", CHARGED, batch)


def _ten(policy: str, batch: int) -> Play:
    return Play("AI coding", policy, batch, steps=10)


#: Constant DoPs, known to be best only afterwards: each takes fewer units than it wants, or waits for all of them.
CONSTANT = [
    Play(workload, f"fixed:{dop},wait_s={wait_s}", batch)
    for workload, batch, dops in (("AI coding", 1280, (4, 8, 16)), ("MOPD", 3072, (1, 2, 4, 8)))
    for dop in dops
    for wait_s in (0, 1e9)
]

_COLLAPSE = (
    "The largest factors of the paper measure a baseline that collapses (a control plane that times out); our "
    "models of the baselines queue for ever and never time out."
)


def figures(quick: bool = False) -> dict[str, PaperFigure]:
    """Return every figure and table of section 6 by name; ``quick``: with fewer and smaller batches."""
    small = 8 if quick else 1
    coding_batches = [each // small for each in ((1280,) if quick else (256, 768, 1280, 1536))]
    mopd_batches = [each // small for each in ((1024,) if quick else (256, 1024, 2048, 3072))]
    cores = (768, 1280) if quick else (768, 1280, 2560, 3840)
    batch = {name: each // small for name, each in BATCH.items()}
    top = coding_batches[-1]
    act = {
        f"{name}, {'ours' if policy == OURS else 'baseline'}": [(0.0, Play(name, policy, batch[name]))]
        for name in WORKLOADS
        for policy in (OURS, BASELINE[name])
    }
    by_batch = _sweep("AI coding", (OURS, CHARGED, PAPER, GREEDY, PODS, BOUND, UNLIMITED), coding_batches, "batch")
    by_gpu = _sweep("MOPD", (OURS, PAPER, GREEDY, SGLANG, SERVERLESS, BOUND), mopd_batches, "batch")
    by_cores = _sweep("AI coding", (OURS, PODS, UNLIMITED), cores, "cores")
    if quick:
        by_cores = {
            name: [(at, replace(each, batch=batch["AI coding"])) for at, each in line]
            for name, line in by_cores.items()
        }
    ablation = _sweep("AI coding", ("fixed:4", "fixed:8", "fixed:16", OURS), coding_batches[::2], "batch")
    breakdown = {
        f"{name} {size}": [(0.0, Play(name, OURS, size // small))]
        for name, size in (("AI coding", 1280), ("AI coding", 1536), ("MOPD", 2048), ("MOPD", 3072))
    }
    coded, mopd_1024, mopd_2048 = batch["AI coding"], 1024 // small, 2048 // small
    return {
        "act": PaperFigure(
            title="Figure 6: ACT while training proceeds, four tasks",
            reported="ACT is lower than the baseline's in each task throughout.",
            why="Durations and arrivals are drawn. In DeepSearch the baseline sends at once what may be refused, "
            "and the calls that it refuses four times fail for good. Ours wait for the quota and all succeed. Its "
            "units return a period after their call has arrived.",
            x="seconds since the step began",
            lines=act,
            value="windows",
            factors={name: _factor(name, BASELINE[name], None, batch=batch[name]) for name in WORKLOADS},
        ),
        "steps": PaperFigure(
            title="Figure 7: one step, generation, tools and reward of a mean trajectory",
            reported="Coding: tools 9.0 times shorter, rewards 2.8, both 4.3. Steps are 1.4 and 1.5 times shorter.",
            why="A step's length hangs on its longest rollout and on the training phase, which is not given.",
            lines=act,
            value="stages",
            factors={
                "coding tools": _factor("AI coding", PODS, 9.0, "tools", batch=coded),
                "coding reward": _factor("AI coding", PODS, 2.8, "reward", batch=coded),
                "coding, both": _factor("AI coding", PODS, 4.3, batch=coded),
                "coding step": _factor("AI coding", PODS, 1.4, "step", batch=coded),
                "DeepSearch step": _factor(
                    "DeepSearch", BASELINE["DeepSearch"], 1.5, "step", batch=batch["DeepSearch"]
                ),
            },
        ),
        "ten_steps": PaperFigure(
            title="Figure 7, ten steps in a row: AI coding, by how the trainer waits",
            reported="Steps are 1.4 times shorter. The paper does not say how its trainer waits.",
            why="Each step has other rollouts, and waits for the longest of them. Generation takes the same time while "
            "a step is trained beside it, as on machines of its own.",
            lines={LABELS[policy]: [(0.0, _ten(policy, coded))] for policy in (OURS, PODS)},
            value="trainers",
            factors={
                "ten steps, synchronous": (_ten(PODS, coded), _ten(OURS, coded), "synchronous", 1.4),
                "ten steps, one step off": (_ten(PODS, coded), _ten(OURS, coded), "one_step_off", None),
            },
        ),
        "cpu_batch": PaperFigure(
            title="Figure 8a, left: ACT of a trajectory over batch sizes, AI coding on 5 x 256 cores",
            reported="3.1 to 27.7 times shorter than with pods; at 1,536 less than twice the ACT at 128.",
            why=_COLLAPSE,
            x="batch",
            lines=by_batch,
            factors={
                f"{name}, {each:,}": factor
                for each in coding_batches[-3:]
                for name, factor in {
                    "pods": _factor("AI coding", PODS, 27.7 if each == top else None, batch=each),
                    "pods, ours as slow to start": (*_charged(each), "act", None),
                    "Algorithm 1": _factor("AI coding", PAPER, None, batch=each),
                }.items()
            },
        ),
        "cpu_cores": PaperFigure(
            title="Figure 8a, right: ACT of a trajectory over cores, AI coding, batch 1,280",
            reported="1.89 to 4.33 times shorter than with pods.",
            why="A pod of ours gets all of its four cores as long as its node has them free.",
            x="cores",
            lines=by_cores,
            factors={
                "pods, 768 cores": _factor("AI coding", PODS, 1.89, cores=cores[0], batch=coded),
                f"pods, {cores[-1]} cores": _factor("AI coding", PODS, 4.33, cores=cores[-1], batch=coded),
            },
        ),
        "gpu_batch": PaperFigure(
            title="Figure 8b, left: ACT of a trajectory over batch sizes, nine teachers on 40 devices",
            reported="3.4 times shorter than SGLang, 101.8 than ServerlessLLM at 1,024; 18.1 than SGLang at 2,048.",
            why=_COLLAPSE,
            x="batch",
            lines=by_gpu,
            factors={
                "SGLang, 1,024": _factor("MOPD", SGLANG, 3.4, batch=mopd_1024),
                "ServerlessLLM, 1,024": _factor("MOPD", SERVERLESS, 101.8, batch=mopd_1024),
                "SGLang, 2,048": _factor("MOPD", SGLANG, 18.1, batch=mopd_2048),
            },
        ),
        "gpus": PaperFigure(
            title="Figure 8b, right: ACT of a trajectory over devices, MOPD, batch 1,024",
            reported="The ACT of the over-provisioned baseline with 29 % of its devices (71.2 % saved).",
            why="The static line has a device count of its own: eight for each of nine teachers is 72.",
            x="devices",
            lines=_sweep_gpus(batch["MOPD"] // 2, quick),
            factors={},
        ),
        "ablation": PaperFigure(
            title="Figure 9: the elastic scheduler against a constant DoP, AI coding",
            reported="2.0 times shorter than DoP 4 at batch 256, 3.0 times shorter than DoP 16 at 1,280.",
            why="Here a constant DoP takes fewer cores than it wants rather than wait for them, which helps it.",
            x="batch",
            lines=ablation,
            factors={
                "DoP 4, smallest batch": _factor("AI coding", "fixed:4", 2.0, batch=coding_batches[0]),
                "DoP 16, 1,280": _factor("AI coding", "fixed:16", 3.0, batch=coded),
            },
        ),
        "breakdown": PaperFigure(
            title="Table 1: execution, queue and overhead of an action in seconds",
            reported="Coding 1,280: 0.975, 0.015, 0.024. Coding 1,536: 1.206, 0.428, 0.036. MOPD 2,048: 0.621, 0.081, "
            "0.201. MOPD 3,072: 0.705, 15.05, 0.240.",
            why="Execution is our distributions'. Overhead is the model's: a warm sandbox, and a restore over the bus; "
            "bench.gateway and bench.sandbox measure the real one.",
            lines=breakdown,
            value="breakdown",
            factors={},
        ),
    }


def _sweep_gpus(batch: int, quick: bool) -> dict[str, list[tuple[float, Play]]]:
    """Ours over devices, and the static partition with eight devices a teacher."""
    counts = (16, 24) if quick else (16, 24, 32, 40)
    ours = [(float(each), Play("MOPD", OURS, batch, gpus=each)) for each in counts]
    return {LABELS[OURS]: ours, "SGLang, 72 devices": [(72.0, Play("MOPD", SGLANG, batch, gpus=72))]}


def sensitivity() -> dict[str, list[tuple[Play, Play]]]:
    """Return for each assumption, halved and doubled: the baseline and ours on a fifth of the cluster."""
    rows: dict[str, list[tuple[Play, Play]]] = {}
    for (workload, name), what in ASSUMED.items():
        parameters = {"AI coding": Coding(), "MOPD": Teachers(), "DeepSearch": Search()}[workload]
        value = getattr(parameters, name)
        rows[f"{workload}: {what} ({value:g})"] = [
            (_fifth(workload, BASELINE[workload], changed), _fifth(workload, OURS, changed))
            for changed in [((name, value * factor),) for factor in (0.5, 1.0, 2.0)]
        ]
    return rows


def _fifth(workload: str, policy: str, changed: tuple[tuple[str, float], ...]) -> Play:
    gpus = GPUS if workload == "MOPD" else GPUS // 5
    return Play(workload, policy, BATCH[workload] // (1 if workload == "MOPD" else 5), NODE_CORES, gpus, changed)


def value_of(measures: Measures, name: str) -> float:
    """Return one measure; ``step`` is the batch's length and the training that follows."""
    value = measures["makespan"] if name == "step" else measures[name]
    assert isinstance(value, int | float)
    return value + TRAIN_S if name == "step" else float(value)


def factors_of(figure: PaperFigure, done: Mapping[Play, Measures]) -> dict[str, tuple[float, float | None]]:
    """Return each factor that was played, ours and the paper's."""
    return {
        name: (value_of(done[over], measure) / value_of(done[under], measure), paper)
        for name, (over, under, measure, paper) in figure.factors.items()
        if over in done and under in done
    }


def ratio(done: Mapping[Play, Measures], baseline: Play, ours: Play) -> float | None:
    """Return how many times the baseline's ACT ours takes; None while either was not played."""
    return value_of(done[baseline], "act") / value_of(done[ours], "act") if {baseline, ours} <= done.keys() else None
