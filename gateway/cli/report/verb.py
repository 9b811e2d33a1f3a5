"""The verb ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from gateway.cli.report.page import page
from gateway.cli.report.run import ReportedRun, actions_of, play, workload_of
from tangram import Client, InvocationResult, NotFoundError
from tangram.cli.options import connected, json_option, whole_id
from tangram.cli.output import print_json, say


@click.command()
@click.argument("id", required=False)
@click.option("--task", help="All of this RL task instead of one trajectory.")
@click.option("--since", help="Only what was accepted since then: 2h, or an instant of RFC 3339.")
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
    if found := _listed(client, limit, since, trajectory=id):
        return f"Trajectory {id}", found
    record = client.get(whole_id(client, id))
    if record.trajectory is None:
        return f"Invocation {record.id}", [record]
    return f"Trajectory {record.trajectory}", _listed(client, limit, since, trajectory=record.trajectory)


def _listed(
    client: Client, limit: int, since: str | None, *, task: str | None = None, trajectory: str | None = None
) -> Sequence[InvocationResult]:
    return list(client.list(task=task, trajectory=trajectory, since=since, limit=limit))
