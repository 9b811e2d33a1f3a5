"""The picture of a simulation: ACT over time, its tail, what it is made of, units in use, and ACT against size."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from manager.config import ManagerSpec
from manager.errors import CodedError
from manager.simulation.simulate import SimulationResult, Size, simulate, with_services
from manager.simulation.simulator import CELL_S, SimulationRun
from manager.simulation.workloads import Workload

#: Seconds over which ACTs are averaged in the first panel.
WINDOW_S = 10.0
#: Fractions of the cluster that the last panel tries.
FRACTIONS = (0.5, 0.75, 1.0, 1.5)
#: What of a mean ACT is drawn, the lowest first.
PARTS = ("execution_s", "overhead_s", "queue_s")


def plot_result(result: SimulationResult, workload: Workload, size: Size, base: ManagerSpec | None, path: Path) -> None:
    """Write six panels to ``path``; the format follows its suffix. ``base`` is a gateway's own configuration."""
    workload = with_services(workload)
    figure, axes = pyplot.subplots(2, 3, figsize=(17, 9), constrained_layout=True)
    kind = _kind(workload)
    total = _total(size, base, kind)
    figure.suptitle(f"{result.workload}: {result.trajectories} trajectories, {result.actions} actions")
    for name, run in result.runs.items():
        _act_over_time(axes[0][0], name, run)
        _tail(axes[0][1], name, run)
        series = run.ledger.series(kind)
        axes[0][2].plot([index * CELL_S for index in range(len(series))], series, label=name)
    axes[0][0].set(title="ACT of an action, by its end", xlabel="time (s)", ylabel="mean ACT (s)", yscale="log")
    axes[0][1].set(
        title="Tail: actions that take longer",
        xlabel="ACT (s)",
        ylabel="share of actions (%)",
        xscale="log",
        yscale="log",
    )
    axes[0][2].set(title=f"Units of {kind} in use, of {total}", xlabel="time (s)", ylabel=f"{kind} (units)")
    _breakdown(axes[1][0], result)
    _quantiles(axes[1][1], result)
    _against_size(axes[1][2], result, workload, size, base, kind)
    for row in axes:
        for axis in row:
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)


def _kind(workload: Workload) -> str:
    """Return the kind of units that most of the work is on."""
    weights: dict[str, float] = {}
    for trajectory in workload.trajectories:
        for step in trajectory.steps:
            for kind in step.cost:
                weights[kind] = weights.get(kind, 0.0) + step.t_ori_s
    return max(weights, key=lambda kind: weights[kind], default="cpu")


def _total(size: Size, base: ManagerSpec | None, kind: str) -> str:
    if base is not None and kind in ("cpu", "gpu"):
        return str(sum(node.cores if kind == "cpu" else node.devices for node in base.nodes))
    return str({"cpu": size.cores, "gpu": size.gpus}.get(kind, "what its quota allows"))


def _act_over_time(axis: Axes, name: str, run: SimulationRun) -> None:
    windows: dict[int, list[float]] = {}
    for record in run.records:
        windows.setdefault(int(record.ended_s / WINDOW_S), []).append(record.act_s)
    cells = sorted(windows)
    axis.plot([cell * WINDOW_S for cell in cells], [sum(windows[c]) / len(windows[c]) for c in cells], label=name)


def _tail(axis: Axes, name: str, run: SimulationRun) -> None:
    """Draw the share of actions that take longer than each ACT."""
    acts = sorted(max(record.act_s, 1e-4) for record in run.records)
    count = len(acts)
    axis.step(acts, [100 * (count - at) / count for at in range(count)], where="post", label=name)


def _breakdown(axis: Axes, result: SimulationResult) -> None:
    names = [row.policy for row in result.rows]
    bottom = [0.0] * len(names)
    for part in PARTS:
        heights = [float(getattr(row, part)) for row in result.rows]
        axis.bar(names, heights, bottom=bottom, label=part.removesuffix("_s"))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if result.bound_s is not None:
        axis.axhline(result.bound_s, linestyle="--", color="black", label="lower bound")
    axis.set(title="Mean ACT of a trajectory", ylabel="seconds")
    axis.tick_params(axis="x", rotation=20)


def _quantiles(axis: Axes, result: SimulationResult) -> None:
    places = range(len(result.rows))
    for shift, (name, values) in enumerate(
        {
            "p50": [row.action_p50_s for row in result.rows],
            "p99": [row.action_p99_s for row in result.rows],
        }.items()
    ):
        bars = axis.bar([at + 0.4 * shift - 0.2 for at in places], values, width=0.38, label=name)
        axis.bar_label(bars, fmt="%.3g", fontsize="small")
    axis.set_xticks(list(places), [row.policy for row in result.rows], rotation=20)
    axis.set(title="ACT of a single action", ylabel="seconds", yscale="log")


def _against_size(
    axis: Axes, result: SimulationResult, workload: Workload, size: Size, base: ManagerSpec | None, kind: str
) -> None:
    """Draw the mean ACT on other sizes; those on which the workload cannot run are left out, and said to be."""
    axis.set(title=f"Mean ACT of a trajectory against {kind}", xlabel=f"{kind} (units)", ylabel="seconds")
    full = {"cpu": size.cores, "gpu": size.gpus}.get(kind, 0)
    if base is not None or not full:
        told = "the size is that of --config" if base is not None else f"{kind} is no part of the cluster's size"
        axis.text(0.5, 0.5, told, ha="center", transform=axis.transAxes)
        return
    impossible = set()
    for name in result.runs:
        points = []
        for count in sorted({max(1, int(full * fraction)) for fraction in FRACTIONS}):
            try:
                points.append((count, _mean_act_s(workload, name, size, kind, count)))
            except CodedError:
                impossible.add(count)
        if points:
            axis.plot([count for count, _ in points], [act_s for _, act_s in points], marker="o", label=name)
            axis.set_yscale("log")
    if impossible:
        axis.set_title(
            f"{axis.get_title()}\n(not possible on {', '.join(map(str, sorted(impossible)))})", fontsize="medium"
        )


def _mean_act_s(workload: Workload, policy: str, size: Size, kind: str, count: int) -> float:
    """Return the mean ACT of a trajectory on so many units; raises CodedError where it cannot run."""
    cores, gpus = (count, size.gpus) if kind == "cpu" else (size.cores, count)
    sized = Size(nodes=min(size.nodes, cores) or 1, cores=cores, gpus=gpus, replicate=size.replicate)
    run = simulate(workload, policy, sized)
    return sum(record.act_s for record in run.records) / max(1, run.trajectories)
