"""`tangram simulate` and `tangram trace`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
from click.core import ParameterSource

from gateway.cli.trace import Cost, cost_of, read_trace, write_trace
from gateway.config import load
from gateway.limits import describe
from manager.action import Amdahl, EfficiencyTable, Elasticity
from manager.config import ManagerSpec
from manager.errors import CodedError
from manager.learning import PRIOR_SERIAL_FRACTION
from manager.simulation.baselines import BASELINES
from manager.simulation.simulate import FINDABLE, Size, preset, run
from manager.simulation.simulator import Physics, Scenario, read_fault
from manager.simulation.workloads import (
    PRESETS,
    TracedTrajectory,
    TraceStep,
    Workload,
)
from tangram import Client, InvocationResult
from tangram.cli.main import VerbGroup
from tangram.cli.options import connected, json_option
from tangram.cli.output import progress

#: Durations below this are noise; a trace needs positive ones.
SHORTEST_S = 1e-4


def recorded(records: Iterable[InvocationResult], functions: Mapping[str, Mapping[str, Any]]) -> list[TracedTrajectory]:
    """Trajectories from succeeded invocations and the functions' descriptions; times count from the first arrival.

    An invocation without a trajectory is one of its own. Think times are the pauses between an end and the next
    acceptance. T_ori is inferred from the granted units by the function's elasticity (Amdahl's law where learned); a
    batch is shared out evenly among its members, so that together they take as long again.
    Invocations of functions that are no longer registered are left out.
    """
    lanes: dict[str, list[InvocationResult]] = {}
    for record in records:
        timed = record.accepted_at is not None and record.ended_at is not None
        if record.state == "succeeded" and timed and record.function in functions:
            lanes.setdefault(record.trajectory or record.id, []).append(record)
    for lane in lanes.values():
        lane.sort(key=lambda record: (_accepted_s(record), record.id))
    first_s = min((_accepted_s(lane[0]) for lane in lanes.values()), default=0.0)
    created = [_trajectory(name, lane, functions, first_s) for name, lane in lanes.items()]
    return sorted(created, key=lambda trajectory: (trajectory.arrival_s, trajectory.id))


def _trajectory(
    name: str, lane: list[InvocationResult], functions: Mapping[str, Mapping[str, Any]], first_s: float
) -> TracedTrajectory:
    steps = []
    free_s = _accepted_s(lane[0])
    for record in lane:
        think_s = max(0.0, _accepted_s(record) - free_s)
        assert record.ended_at is not None
        free_s = record.ended_at.timestamp()
        steps.append(_step(record, functions[record.function], think_s))
    memory = max((_memory_bytes(functions[record.function]) for record in lane), default=0)
    return TracedTrajectory(
        id=name,
        task=lane[0].task,
        arrival_s=round(_accepted_s(lane[0]) - first_s, 6),
        memory_bytes=memory,
        steps=tuple(steps),
    )


def _step(record: InvocationResult, function: Mapping[str, Any], think_s: float) -> TraceStep:
    cost = cost_of(msgspec.convert(function.get("cost") or {}, Cost))
    key = function.get("key")
    elasticity = _elasticity(function) if key is not None else None
    members = max(1.0, record.usage.get("batch", 1.0))
    earlier_s = sum(each.execution_ms or 0.0 for each in record.attempts) / 1000
    duration_s = max(SHORTEST_S, (record.execution_s - earlier_s) / members)
    overhead_s = record.overhead_s - sum(each.overhead_ms or 0.0 for each in record.attempts) / 1000
    malleable = function.get("runtime") == "pytest" and key == "cpu"
    units = record.units.get(key, 1) if key is not None else 1
    if malleable:  # what its workers cost comes on top again when it is played
        duration_s -= min(duration_s / 2, Physics().worker_cost_s * record.usage.get("workers", units) / units)
    work_s = duration_s if elasticity is None else duration_s * elasticity.efficiency(units) * units
    return TraceStep(
        think_s=round(think_s, 6),
        function=record.function,
        cost=cost,
        key=key,
        t_ori_s=round(max(SHORTEST_S, work_s), 6),
        elasticity=elasticity,
        service=record.function if function.get("model") is not None else None,
        malleable=malleable,
        size=record.usage.get("size"),
        batch_tokens=int(record.usage.get("tokens", 0.0) / members) if function.get("model") is not None else 0,
        # A model's is a restore, which the simulator plays itself.
        overhead_s=round(max(0.0, overhead_s), 6) if function.get("model") is None else 0.0,
    )


def _elasticity(function: Mapping[str, Any]) -> Elasticity:
    declared = function.get("elasticity")
    if isinstance(declared, Mapping) and "points" in declared:
        return EfficiencyTable(tuple((int(units), float(share)) for units, share in declared["points"]))
    if isinstance(declared, Mapping) and "serial_fraction" in declared:
        return Amdahl(float(declared["serial_fraction"]))
    known = [each for each in (function.get("learned") or {}).values() if each["serial_fraction"] is not None]
    if not known:
        return Amdahl(PRIOR_SERIAL_FRACTION)
    weight = sum(each["observations"] for each in known)
    return Amdahl(sum(each["serial_fraction"] * each["observations"] for each in known) / weight)


def _memory_bytes(function: Mapping[str, Any]) -> int:
    sandbox = function.get("sandbox")
    return int(sandbox.get("memory_bytes", 0)) if isinstance(sandbox, Mapping) else 0


def _accepted_s(record: InvocationResult) -> float:
    assert record.accepted_at is not None
    return record.accepted_at.timestamp()


#: What `--policy` is when it is not given: ours beside the paper's.
DEFAULT_POLICIES = ("adaptive", "price", "paper")


@click.command()
@click.option(
    "--workload",
    metavar="NAME",
    default="ai-coding",
    show_default=True,
    help=f"trace.jsonl, or one of {', '.join(PRESETS)}",
)
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
    export_trace: Path | None,
) -> None:
    """Play a workload on the very same scheduler under a virtual clock: what if I had other sizes or policies?

    \b
    tangram simulate --workload ai-coding
    """
    size = Size(nodes=nodes, cores=cores, gpus=gpus, replicate=replicate)
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


@click.group(cls=VerbGroup)
def trace() -> None:
    """Traces of what trajectories did."""


@trace.command()
@click.option("--task", metavar="NAME", help="only this task's invocations")
@click.option("--limit", default=10000, show_default=True, help="newest invocations that are looked at")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="a file instead of standard output")
@connected
def export(client: Client, task: str | None, limit: int, out: Path | None) -> None:
    """Write a gateway's recorded history as a trace.

    \b
    tangram trace export --task default > run.jsonl
    """
    functions = {each.name: msgspec.to_builtins(client.function(each.name)) for each in client.functions()}
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
