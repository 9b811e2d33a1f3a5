"""`tangram report`: one page about a recorded run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.cli.simulate import recorded
from manager.errors import CodedError
from manager.simulation.simulate import Row, Size, capacity_of, simulate, with_services
from manager.simulation.workloads import TracedTrajectory, Workload
from tangram import Client, InvocationResult, NotFoundError
from tangram.cli.options import connected, json_option, whole_id
from tangram.cli.output import print_json, say, show_seconds

#: What a run is compared with: name of the policy or baseline, and what it is called.
COMPARED: Mapping[str, str] = {
    "adaptive": "Tangram: adaptive",
    "price": "Tangram: price",
    "paper": "Tangram: paper",
    "fixed:1": "one unit each",
    "k8s/static-gpu": "static pods, one a trajectory, and static services",
}
#: Kinds that the simulator's cluster has; of others (quotas) a trace does not tell the limits.
PLAYED_KINDS = frozenset({"cpu", "gpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAction:
    """One action of the run; instants are seconds from the first acceptance."""

    id: str
    function: str
    task: str
    lane: str
    state: str
    reason: str
    accepted_s: float
    queue_s: float
    overhead_s: float
    execution_s: float
    units: Mapping[str, int]

    @property
    def begin_s(self) -> float:
        """When it was leased."""
        return self.accepted_s + self.queue_s

    @property
    def end_s(self) -> float:
        return self.begin_s + self.overhead_s + self.execution_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRun:
    """The same work under one policy, or why it could not be played."""

    name: str
    row: Row | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """Everything that the page shows."""

    title: str
    server: str
    actions: Sequence[RunAction]
    #: Units of the machine, by kind.
    capacity: Mapping[str, int]
    played: Sequence[PlayedRun]
    #: Kinds of cost that the comparison leaves out.
    left_out: Sequence[str]

    @property
    def span_s(self) -> float:
        """Seconds from the first acceptance to the last end."""
        return max((action.end_s for action in self.actions), default=0.0)

    def in_use(self, kind: str, cells: int) -> list[float]:
        """Return the mean units of a kind in use in each of so many equal parts of the run."""
        cell_s = max(self.span_s, 1e-9) / cells
        used = [0.0] * cells
        for action in self.actions:
            units = action.units.get(kind, 0)
            for at in range(int(action.begin_s / cell_s), cells) if units else ():
                overlap_s = min(action.end_s, (at + 1) * cell_s) - max(action.begin_s, at * cell_s)
                if overlap_s <= 0:
                    break
                used[at] += units * overlap_s / cell_s
        return used


def actions_of(records: Iterable[InvocationResult]) -> list[RunAction]:
    """Return what ended as actions of one run, in order of acceptance; without a trajectory each has its own lane."""
    ended = sorted((each for each in records if each.ended), key=lambda each: each.id)
    first_s = min((each.accepted_at.timestamp() for each in ended), default=0.0)
    return [
        RunAction(
            id=each.id,
            function=each.function,
            task=each.task,
            lane=each.trajectory or each.id,
            state=each.state,
            reason=each.reason or "",
            accepted_s=each.accepted_at.timestamp() - first_s,
            queue_s=each.queue_s,
            overhead_s=each.overhead_s,
            execution_s=each.execution_s,
            units=dict(each.units),
        )
        for each in ended
    ]


def workload_of(
    records: Sequence[InvocationResult], functions: Mapping[str, Mapping[str, Any]]
) -> tuple[Workload, list[str]]:
    """Return what succeeded as a workload of cores and devices, and the kinds of cost that it leaves out."""
    trajectories = recorded(records, functions)
    left_out = {kind for each in trajectories for step in each.steps for kind in step.cost} - PLAYED_KINDS
    played = tuple(_played_kinds(each) for each in trajectories)
    return Workload(name="run", trajectories=played), sorted(left_out)


def play(workload: Workload, nodes: int, cores: int, devices: int) -> list[PlayedRun]:
    """Return the workload under every policy that it is compared with, on a machine of this size."""
    size = Size(nodes=max(1, nodes), cores=cores, gpus=devices)
    whole = with_services(workload)
    result = []
    for policy, name in COMPARED.items():
        try:
            done = simulate(whole, policy, size)
            result.append(PlayedRun(name=name, row=Row.of(policy, done, capacity_of(size.spec(whole, "fixed")))))
        except CodedError as error:
            result.append(PlayedRun(name=name, row=None, problem=error.message))
    return result


def _played_kinds(trajectory: TracedTrajectory) -> TracedTrajectory:
    steps = tuple(
        replace(
            step,
            cost={kind: units for kind, units in step.cost.items() if kind in PLAYED_KINDS},
            key=step.key if step.key in PLAYED_KINDS else None,
            elasticity=step.elasticity if step.key in PLAYED_KINDS else None,
        )
        for step in trajectory.steps
    )
    return replace(trajectory, steps=steps)


#: Colours as on the page of the gateway.
HUES = ("#2F6FD0", "#CC8800", "#0A7F66", "#9A5B9E", "#45A0DC", "#2E374C")
OTHER, FAIL, PARTS = "#868F9C", "#C8321F", {"queue": "#B9C1CB", "overhead": "#CC8800", "execution": "#2F6FD0"}
#: Lanes and actions that are drawn, and the drawing's width in pixels.
LANES_MAX, DRAWN_MAX, WIDTH, LEFT = 120, 6000, 1180, 150
CELLS = 200
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#14181F;background:#F4F6F8;margin:0}
main{max-width:1240px;margin:0 auto;padding:16px}
section{background:#fff;border:1px solid #DFE3E8;border-radius:9px;padding:12px 16px;margin:12px 0;overflow-x:auto}
h1{font-size:20px}h2{font-size:15px;margin:0 0 8px}p{margin:4px 0}.dim{color:#59626F}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:3px 14px 3px 0;text-align:left}
td.n,th.n{text-align:right}.big{font-size:25px;font-weight:600}.kpi{display:inline-block;margin-right:32px}
i.sw{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 12px}
svg text{font:11px system-ui,sans-serif;fill:#59626F}
@media(prefers-color-scheme:dark){body{background:#14181F;color:#E6EAF0}section{background:#1C222C;border-color:#2E374C}
.dim{color:#A9B2BF}svg text{fill:#A9B2BF}}
"""


def page(run: ReportedRun) -> str:
    """Return the page."""
    colours = _colours(run.actions)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(run.title)}</title><style>{STYLE}</style>",
        f"<main><h1>{escape(run.title)}</h1><p class=dim>{escape(run.server)}, "
        f"{len(run.actions)} actions over {show_seconds(run.span_s)}</p>",
        *_numbers(run),
        *_comparison(run),
        *_timeline(run, colours),
        *_split(run, colours),
        *_utilisation(run),
        "</main></html>",
    ]
    return "\n".join(parts) + "\n"


def _colours(actions: Sequence[RunAction]) -> Mapping[str, str]:
    names = sorted({action.function for action in actions})
    return {name: HUES[at] if at < len(HUES) else OTHER for at, name in enumerate(names)}


def _numbers(run: ReportedRun) -> Iterator[str]:
    failed = sum(action.state != "succeeded" for action in run.actions)
    lanes = len({action.lane for action in run.actions})
    acts = sorted(action.end_s - action.accepted_s for action in run.actions)
    result = [
        ("trajectories", str(lanes)),
        ("actions", str(len(acts))),
        ("did not succeed", str(failed)),
        ("ACT, mean", show_seconds(sum(acts) / len(acts) if acts else None)),
        ("ACT, p50", show_seconds(acts[len(acts) // 2] if acts else None)),
        ("ACT, p99", show_seconds(acts[min(len(acts) - 1, int(0.99 * len(acts)))] if acts else None)),
        ("whole run", show_seconds(run.span_s)),
    ]
    yield "<section>"
    yield from (
        f"<span class=kpi><span class=dim>{name}</span><br><span class=big>{value}</span></span>"
        for name, value in result
    )
    yield "</section>"


def _comparison(run: ReportedRun) -> Iterator[str]:
    """Yield what the same work would have taken: played on the gateway's own scheduler under a virtual clock."""
    yield "<section><h2>What the same run would have cost</h2>"
    capacity = ", ".join(f"{units} {kind}" for kind, units in run.capacity.items())
    yield f"<p class=dim>Simulated on {escape(capacity)}: arrivals, think times and work as recorded;"
    yield " what failed is left out."
    if run.left_out:
        yield f" Waiting for {escape(', '.join(run.left_out))} is left out, as a record does not tell their limits."
    yield "</p><table><tr><th>policy<th class=n>ACT of a trajectory<th class=n>queue<th class=n>execution"
    yield "<th class=n>p99 of an action<th class=n>whole run<th class=n>in use<th class=n>against the first</tr>"
    first = next((each.row for each in run.played if each.row is not None), None)
    for each in run.played:
        yield _played(each, 0.0 if first is None else first.act_s)
    yield "</table>"
    for each in run.played:
        if first is not None and each.row is not None and each.row.act_s < 0.99 * first.act_s:
            yield f"<p class=dim>{escape(_why_better(each.name, each.row, first))}</p>"
    yield "</section>"


def _why_better(name: str, row: Row, first: Row) -> str:
    """Return where another policy saved what the first one lost."""
    saved_s = {"queues": first.queue_s - row.queue_s, "executes": first.execution_s - row.execution_s}
    parts = [f"{what} {show_seconds(abs(s))} {'less' if s > 0 else 'more'}" for what, s in saved_s.items()]
    text = f"{name} is better here by {100 * (1 - row.act_s / first.act_s):.0f} %: a trajectory {' and '.join(parts)}."
    if saved_s["queues"] > 0 > saved_s["executes"]:
        text += " Units that actions shared out did not shorten them by as much as they made others wait."
    elif saved_s["executes"] > 0 > saved_s["queues"]:
        text += " Actions got fewer units than would have paid, since others were expected to come."
    return text


def _played(played: PlayedRun, first_s: float) -> str:
    row = played.row
    if row is None:
        return (
            f"<tr><td>{escape(played.name)}<td class=dim colspan=7>could not be played: {escape(played.problem)}</tr>"
        )
    use = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in row.utilisation.items())
    times = (row.act_s, row.queue_s, row.execution_s, row.action_p99_s, row.makespan_s)
    cells = "".join(f"<td class=n>{show_seconds(each)}" for each in times)
    ratio = f"{row.act_s / first_s:.2f} x" if first_s > 0 else "-"
    return f"<tr><td>{escape(played.name)}{cells}<td class=n>{escape(use)}<td class=n>{ratio}</tr>"


def _timeline(run: ReportedRun, colours: Mapping[str, str]) -> Iterator[str]:
    """Yield a Gantt: a row a trajectory, waiting pale, execution in the function's colour, failures with an outline."""
    lanes = list(dict.fromkeys(action.lane for action in run.actions))
    shown = {lane: at for at, lane in enumerate(lanes[:LANES_MAX])}
    drawn = [action for action in run.actions if action.lane in shown][:DRAWN_MAX]
    scale = (WIDTH - LEFT) / max(run.span_s, 1e-9)
    height = 13 * len(shown) + 24
    yield "<section><h2>Timeline</h2><p>"
    yield from (f"<i class=sw style='background:{colour}'></i>{escape(name)}" for name, colour in colours.items())
    yield "<i class=sw style='background:#DFE3E8'></i>waits"
    yield f"<i class=sw style='border:2px solid {FAIL}'></i>did not succeed</p>"
    if len(lanes) > len(shown) or len(drawn) < sum(action.lane in shown for action in run.actions):
        yield f"<p class=dim>The first {len(shown)} of {len(lanes)} trajectories, {len(drawn)} actions.</p>"
    yield f"<svg width={WIDTH} height={height} role=img aria-label='Timeline'>"
    for at in range(0, 11):
        x = LEFT + at * (WIDTH - LEFT - 34) / 10
        label = show_seconds(run.span_s * (x - LEFT) / (WIDTH - LEFT))
        yield f"<line x1={x:.0f} x2={x:.0f} y1=0 y2={height - 16} stroke='#EDF0F3'/>"
        yield f"<text x={x:.0f} y={height - 3}>{label}</text>"
    for lane, at in shown.items():
        yield f"<text x=0 y={13 * at + 10}>{escape(lane[:22])}</text>"
    for action in drawn:
        yield _bar(action, 13 * shown[action.lane], scale, colours)
    yield "</svg></section>"


def _bar(action: RunAction, y: int, scale: float, colours: Mapping[str, str]) -> str:
    accepted, begin, end = (LEFT + each * scale for each in (action.accepted_s, action.begin_s, action.end_s))
    units = ", ".join(f"{count} {kind}" for kind, count in action.units.items())
    parts = zip(PARTS, (action.queue_s, action.overhead_s, action.execution_s), strict=True)
    times = ", ".join(f"{name} {show_seconds(part)}" for name, part in parts)
    title = escape(f"{action.function} {action.state} {action.reason} {units}: {times} ({action.id})")
    failed = f" stroke='{FAIL}' stroke-width=2" if action.state != "succeeded" else ""
    wait = f"<rect x={accepted:.1f} y={y + 4} width={max(0.0, begin - accepted):.1f} height=4 fill='#DFE3E8'/>"
    return (
        f"{wait}<rect x={begin:.1f} y={y} width={max(1.0, end - begin):.1f} height=11 "
        f"fill='{colours[action.function]}'{failed}><title>{title}</title></rect>"
    )


def _split(run: ReportedRun, colours: Mapping[str, str]) -> Iterator[str]:
    """Yield by function how its ACT is made up."""
    yield "<section><h2>ACT by function: queue, overhead, execution</h2><p>"
    yield from (f"<i class=sw style='background:{colour}'></i>{name}" for name, colour in PARTS.items())
    yield "</p><table><tr><th>function<th class=n>actions<th class=n>failed<th class=n>mean ACT<th>of it</tr>"
    means = {name: _mean_parts([each for each in run.actions if each.function == name]) for name in colours}
    most = max((sum(parts) for parts in means.values()), default=0.0) or 1.0
    for name, parts in means.items():
        of_it = [each for each in run.actions if each.function == name]
        failed = sum(each.state != "succeeded" for each in of_it)
        bars, x = "", 0.0
        for colour, part in zip(PARTS.values(), parts, strict=True):
            width = 560 * part / most
            bars += f"<rect x={x:.1f} width={width:.1f} height=13 fill='{colour}'/>"
            x += width
        yield (
            f"<tr><td>{escape(name)}<td class=n>{len(of_it)}<td class=n>{failed}<td class=n>{show_seconds(sum(parts))}"
            f"<td><svg width=560 height=13>{bars}</svg> {' / '.join(map(show_seconds, parts))}</tr>"
        )
    yield "</table></section>"


def _mean_parts(actions: Sequence[RunAction]) -> tuple[float, float, float]:
    count = max(1, len(actions))
    return (
        sum(each.queue_s for each in actions) / count,
        sum(each.overhead_s for each in actions) / count,
        sum(each.execution_s for each in actions) / count,
    )


def _utilisation(run: ReportedRun) -> Iterator[str]:
    """Yield for each kind how many units this run had in use, of how many there are."""
    kinds = sorted({kind for action in run.actions for kind in action.units})
    for kind in kinds:
        used = run.in_use(kind, CELLS)
        total = run.capacity.get(kind, 0)
        top = max(total, *used, 1e-9)
        mean = sum(used) / len(used)
        share = f", {100 * mean / total:.0f} % of {total}" if total else ""
        yield f"<section><h2>Units of {escape(kind)} in use by this run: {mean:.1f} in the mean{share}</h2>"
        step = (WIDTH - LEFT) / CELLS
        points = " ".join(f"{LEFT + at * step:.1f},{100 - 96 * each / top:.1f}" for at, each in enumerate(used))
        yield f"<svg width={WIDTH} height=118><text x=0 y=12>{top:.0f}</text><text x=0 y=100>0</text>"
        yield f"<polygon points='{LEFT},100 {points} {WIDTH},100' fill='{PARTS['execution']}' fill-opacity=.65 />"
        if total:
            y = 100 - 96 * total / top
            yield f"<line x1={LEFT} x2={WIDTH} y1={y:.1f} y2={y:.1f} stroke='{FAIL}' stroke-dasharray='4 3'/>"
        yield f"<text x={LEFT} y=114>0</text><text x={WIDTH - 40} y=114>{show_seconds(run.span_s)}</text>"
        yield "</svg></section>"


@click.command()
@click.argument("id", required=False)
@click.option("--task", metavar="NAME", help="All of this RL task instead of one trajectory.")
@click.option("--since", metavar="TIME", help="Only what was accepted since then: 2h, or an instant of RFC 3339.")
@click.option("--limit", default=5000, show_default=True, type=click.IntRange(1, 50_000), help="Newest invocations.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("report.html"), show_default=True)
@json_option
@connected
def report(
    client: Client, id: str | None, task: str | None, since: str | None, limit: int, out: Path, as_json: bool
) -> None:
    """Write one HTML page of a real run: timeline, ACT, use of units, and what it would have cost otherwise.

    ID is a trajectory, or an invocation, which stands for its trajectory. The comparison is played by the simulator:
    the same arrivals and work under other policies and in static pods.

    \b
    tangram report t1 --out t1.html
    """
    if (id is None) == (task is None):
        raise click.UsageError("name a trajectory or an invocation, or --task TASK")
    if id is None:
        title, records = f"Task {task}", _listed(client, limit, since, task=task)
    else:
        title, records = _of(client, id, limit, since)
    actions = actions_of(records)
    if not actions:
        raise NotFoundError(f"{title.lower()} has no invocation that has ended: there is nothing to report")
    nodes = client.resources().nodes
    cores, devices = sum(each.cores for each in nodes), sum(each.devices for each in nodes)
    functions = {each.name: msgspec.to_builtins(each) for each in client.functions()}
    workload, left_out = workload_of(records, functions)
    run = ReportedRun(
        title=title,
        server=client.server,
        actions=actions,
        capacity={kind: units for kind, units in (("cpu", cores), ("gpu", devices)) if units},
        played=play(workload, len(nodes), cores, devices) if workload.trajectories else (),
        left_out=left_out,
    )
    out.write_text(page(run), encoding="utf-8")
    if as_json:
        rows = [{"name": each.name, "row": each.row and each.row.as_json(None)} for each in run.played]
        print_json({"file": str(out), "actions": len(actions), "span_s": run.span_s, "played": rows})
    else:
        say(f"{len(actions)} actions of {title.lower()}: {out}")


def _of(client: Client, id: str, limit: int, since: str | None) -> tuple[str, Sequence[InvocationResult]]:
    """Return the title and the records of a trajectory, or of an invocation's."""
    if result := _listed(client, limit, since, trajectory=id):
        return f"Trajectory {id}", result
    record = client.get(whole_id(client, id))
    if record.trajectory is None:
        return f"Invocation {record.id}", [record]
    return f"Trajectory {record.trajectory}", _listed(client, limit, since, trajectory=record.trajectory)


def _listed(
    client: Client, limit: int, since: str | None, *, task: str | None = None, trajectory: str | None = None
) -> Sequence[InvocationResult]:
    return list(client.list(task=task, trajectory=trajectory, since=since, limit=limit))
