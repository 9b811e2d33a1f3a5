"""The picture of a simulation: ACT over time, utilisation, where the ACT goes, and ACT against cores."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from manager.simulation.lease_audit import CELL_S
from manager.simulation.results import SimulationResult
from manager.simulation.simulate import Size, simulate
from manager.simulation.simulator import SimulationRun
from manager.simulation.workloads import Workload

#: Seconds over which ACTs are averaged in the first panel.
WINDOW_S = 10.0
#: Fractions of the cluster that the last panel tries.
FRACTIONS = (0.5, 0.75, 1.0, 1.5)


def plot_result(result: SimulationResult, workload: Workload, size: Size, path: Path) -> None:
    """Write four panels to ``path``; the format follows its suffix."""
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    kind = "cpu" if size.cores and any("cpu" in s.cost for t in workload.trajectories for s in t.steps) else "gpu"
    for name, run in result.runs.items():
        _act_over_time(axes[0][0], name, run)
        series = run.ledger.series(kind)
        axes[0][1].plot([index * CELL_S for index in range(len(series))], series, label=name)
    _breakdown(axes[1][0], result)
    _against_size(axes[1][1], result, workload, size, kind)
    axes[0][0].set(title="ACT of an action by its end", xlabel="s", ylabel="s", yscale="log")
    axes[0][1].set(title=f"units of {kind} in use", xlabel="s")
    for axis in (axes[0][0], axes[0][1], axes[1][1]):
        axis.legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)


def _act_over_time(axis: Axes, name: str, run: SimulationRun) -> None:
    windows: dict[int, list[float]] = {}
    for record in run.records:
        windows.setdefault(int(record.ended_s / WINDOW_S), []).append(record.act_s)
    cells = sorted(windows)
    axis.plot([cell * WINDOW_S for cell in cells], [sum(windows[c]) / len(windows[c]) for c in cells], label=name)


def _breakdown(axis: Axes, result: SimulationResult) -> None:
    names = [row.policy for row in result.rows]
    bottom = [0.0] * len(names)
    for part in ("execution_s", "overhead_s", "queue_s"):
        heights = [float(getattr(row, part)) for row in result.rows]
        axis.bar(names, heights, bottom=bottom, label=part.removesuffix("_s"))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if result.bound_s is not None:
        axis.axhline(result.bound_s, linestyle="--", color="black", label="lower bound")
    axis.set(title="mean ACT of a trajectory", ylabel="s")
    axis.legend(fontsize="small")


def _against_size(axis: Axes, result: SimulationResult, workload: Workload, size: Size, kind: str) -> None:
    full = size.cores if kind == "cpu" else size.gpus
    counts = [max(size.nodes if kind == "cpu" else 1, int(full * fraction)) for fraction in FRACTIONS]
    for name in result.runs:
        acts = []
        for count in counts:
            sized = (
                Size(nodes=size.nodes, cores=count, gpus=size.gpus)
                if kind == "cpu"
                else Size(nodes=size.nodes, cores=size.cores, gpus=count)
            )
            run = simulate(workload, name, sized)
            acts.append(sum(record.act_s for record in run.records) / max(1, run.trajectories))
        axis.plot(counts, acts, marker="o", label=name)
    axis.set(title=f"mean ACT against {kind}", xlabel=kind, ylabel="s", yscale="log")
