"""The verbs ``simulate`` and ``trace`` of the command line: click commands round `manager`'s functions."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import NoReturn

import click
import msgspec
from click.core import ParameterSource

from gateway.cli.trace_export import recorded
from gateway.config import load
from gateway.machine import describe
from manager.config import ManagerSpec
from manager.errors import CodedError
from manager.simulation.baselines import BASELINES
from manager.simulation.simulate import FINDABLE, SimulationResult, Size, preset, run
from manager.simulation.simulator import Physics, Scenario, read_fault
from manager.simulation.workloads import PRESETS, Workload, read_trace, write_trace
from tangram import Client
from tangram.cli.options import connected, json_option
from tangram.cli.output import progress

#: Formats of a picture, by suffix.
PICTURES = (".png", ".svg", ".pdf")
#: What `--policy` is when it is not given: ours beside the paper's.
DEFAULT_POLICIES = ("adaptive", "price", "paper")


@click.command()
@click.option("--workload", default="ai-coding", show_default=True, help=f"trace.jsonl, or one of {', '.join(PRESETS)}")
@click.option("--batch", default=256, show_default=True, help="trajectories of a preset")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--config",
    "configs",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="repeatable: a gateway's configuration, for its quotas, limits, weights and, unless sizes are given, machine",
)
@click.option("--nodes", default=5, show_default=True, help="CPU nodes")
@click.option("--cores", default=1280, show_default=True, help="cores of all nodes together")
@click.option("--gpus", default=40, show_default=True, help="devices in nodes of eight")
@click.option(
    "--policy",
    "names",
    multiple=True,
    help=f"repeatable; also the baselines {', '.join(BASELINES)}, several as k8s/static-gpu",
)
@click.option("--learned", is_flag=True, help="hide all profiles: the policies know what history tells them")
@click.option(
    "--replicate/--no-replicate",
    default=True,
    show_default=True,
    help="models in use are copied into free memory of idle devices",
)
@click.option(
    "--batch-marginal",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.0, 1.0),
    help="what a further member adds to a batch of a model's queue mates, as a fraction of what it takes alone",
)
@click.option(
    "--faults",
    "faults",
    multiple=True,
    metavar="KIND:NODES@START[+FOR]",
    help="repeatable: play each policy again with nodes that fail: lose, wave, upgrade or cut (docs/guide/sizing.md)",
)
@click.option(
    "--bound/--no-bound",
    default=True,
    show_default=True,
    help="a lower bound on the mean ACT of every possible schedule",
)
@click.option(
    "--best-fixed/--no-best-fixed",
    default=True,
    show_default=True,
    help="the best constant number of units, known only afterwards",
)
@click.option("--find", type=click.Choice(FINDABLE), help="the fewest of these that reach --target-act")
@click.option("--target-act", metavar="SECONDS", help="mean ACT of a trajectory, such as 2s")
@json_option
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="a picture of the runs")
@click.option("--export-trace", type=click.Path(dir_okay=False, path_type=Path), help="write the workload as a trace")
def simulate(
    workload: str,
    batch: int,
    seed: int,
    configs: tuple[Path, ...],
    nodes: int,
    cores: int,
    gpus: int,
    names: tuple[str, ...],
    learned: bool,
    replicate: bool,
    batch_marginal: float,
    faults: tuple[str, ...],
    bound: bool,
    best_fixed: bool,
    find: str | None,
    target_act: str | None,
    as_json: bool,
    plot: Path | None,
    export_trace: Path | None,
) -> None:
    """Play a workload on the very same scheduler under a virtual clock: what if I had other sizes or policies?"""
    size = Size(nodes=nodes, cores=cores, gpus=gpus, replicate=replicate)
    if plot is not None:
        _check_picture(plot)
    try:
        chosen = load_workload(workload, batch, seed)
        base = _configured(configs, size, chosen) if configs else None
        scenario = Scenario(faults=tuple(read_fault(text) for text in faults), seed=seed)
        wanted = [name for text in names or DEFAULT_POLICIES for name in text.split("+")]
        with progress(len(wanted) + best_fixed) as begun:
            result = run(
                chosen,
                wanted,
                size,
                base=base,
                physics=Physics(batch_marginal=batch_marginal),
                learned=learned,
                with_bound=bound,
                with_best_fixed=best_fixed,
                find=find,
                target_act_s=None if target_act is None else _seconds(target_act),
                scenario=scenario,
                begun=begun,
            )
    except CodedError as error:
        _fail(error)
    if export_trace is not None:
        export_trace.write_text("".join(f"{line}\n" for line in write_trace(chosen.trajectories)), encoding="utf-8")
    click.echo(result.to_json() if as_json else result.table())
    if plot is not None:
        _plot(result, chosen, size, base, plot)


@click.group()
def trace() -> None:
    """Traces of what trajectories did."""


@trace.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
def check(path: Path, as_json: bool) -> None:
    """Read a trace and say what is in it."""
    try:
        trajectories = read_trace(path.read_text(encoding="utf-8").splitlines())
    except CodedError as error:
        _fail(error)
    actions = sum(len(trajectory.steps) for trajectory in trajectories)
    if as_json:
        click.echo(json.dumps({"trajectories": len(trajectories), "actions": actions}))
    else:
        click.echo(f"{len(trajectories)} trajectories, {actions} actions")


@trace.command()
@click.option("--task", help="only this task's invocations")
@click.option("--limit", default=10000, show_default=True, help="newest invocations that are looked at")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="a file instead of standard output")
@connected
def export(client: Client, task: str | None, limit: int, out: Path | None) -> None:
    """Write a gateway's recorded history as a trace."""
    functions = {each.name: msgspec.to_builtins(each) for each in client.functions()}
    trajectories = recorded(client.list(task=task, state="succeeded", limit=limit), functions)
    text = "".join(f"{line}\n" for line in write_trace(trajectories))
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        click.echo(f"{len(trajectories)} trajectories written to {out}", err=True)


def load_workload(name: str, batch: int, seed: int) -> Workload:
    """A preset by its name, or a trace by its path; raises InvalidInput."""
    path = Path(name)
    if name not in PRESETS and path.is_file():
        trajectories = read_trace(path.read_text(encoding="utf-8").splitlines())
        return Workload(name=path.name, trajectories=tuple(trajectories))
    return preset(name, batch, seed)


def _configured(paths: tuple[Path, ...], size: Size, workload: Workload) -> ManagerSpec:
    """What a gateway with this configuration would schedule on: this machine, or the size asked for in its place."""
    loaded = load.load(paths, os.environ, look=False)
    source = click.get_current_context().get_parameter_source
    if any(source(name) is ParameterSource.COMMANDLINE for name in ("nodes", "cores", "gpus")):
        return loaded.manager_spec(size.spec(workload, "fixed").nodes)
    return loaded.manager_spec((describe(loaded),))


def _check_picture(path: Path) -> None:
    """Refuse before anything is played what could not be written after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'tangram-gateway[plot]'")
    if path.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{path.name!r} must end in {', '.join(PICTURES)}", param_hint="--plot")
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.absolute().parent}", param_hint="--plot")


def _plot(result: SimulationResult, workload: Workload, size: Size, base: ManagerSpec | None, path: Path) -> None:
    """matplotlib is slow to import: only here."""
    from gateway.cli.plot import plot_result

    plot_result(result, workload, size, base, path)


def _seconds(text: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no number of seconds", param_hint="--target-act") from error
    if value <= 0:
        raise click.BadParameter("must be above 0", param_hint="--target-act")
    return value


def _fail(error: CodedError) -> NoReturn:
    raise click.ClickException(f"{error.component}: {error.message}")
