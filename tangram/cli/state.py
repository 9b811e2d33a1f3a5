"""Verbs that show the gateway's state: functions, trajectories, tasks."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from tangram import Client
from tangram.cli.options import connected, json_option
from tangram.cli.printing.output import print_json, rows_table, show, show_seconds, table, tree
from tangram.types.values.quantities import show_size


@click.group()
def functions() -> None:
    """The registered functions."""


@functions.command("list")
@json_option
@connected
def list_functions(client: Client, as_json: bool) -> None:
    """List the functions."""
    found = client.functions()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.name,
            each.runtime,
            each.revision,
            each.status or "",
            each.source or "",
            msgspec.to_builtins(each.cost),
            each.problem or each.description,
        )
        for each in found
    ]
    show(table(("NAME", "RUNTIME", "REVISION", "STATUS", "SOURCE", "COST", "DESCRIPTION"), rows))


@functions.command("show")
@click.argument("name")
@json_option
@connected
def show_function(client: Client, name: str, as_json: bool) -> None:
    """Show one function as it is now, with what was learned of it."""
    found = client.function(name)
    if as_json:
        print_json(found)
        return
    fields = msgspec.to_builtins(found)
    fields.pop("learned", None)
    show(tree(fields))
    if found.learned:
        rows = [
            (
                key or "(all)",
                show_seconds(each.t_ori_s),
                f"{100 * each.error:.0f}%",
                each.serial_fraction,
                each.batch_marginal,
                "" if each.size is None else f"{each.size.fixed_s:.3g} + {each.size.per_unit_s:.3g} x size",
                each.observations,
            )
            for key, each in found.learned.items()
        ]
        show(
            "",
            table(("LEARNED KEY", "T_ORI", "ERROR", "SERIAL FRACTION", "BATCH MARGINAL", "BY SIZE [s]", "RUNS"), rows),
        )


@functions.command("remove")
@click.argument("names", nargs=-1, required=True)
@json_option
@connected
def remove_functions(client: Client, names: tuple[str, ...], as_json: bool) -> None:
    """Remove functions that were applied; nothing in flight is dropped."""
    removed = [name for each in names for name in client.remove_function(each).removed]
    if as_json:
        print_json({"removed": removed})
    else:
        click.echo("\n".join(f"{name} removed" for name in removed))


@click.group()
def trajectories() -> None:
    """The living trajectories."""


@trajectories.command("list")
@json_option
@connected
def list_trajectories(client: Client, as_json: bool) -> None:
    """List the living trajectories."""
    _show_all(client.trajectories(), as_json)


@trajectories.command("open")
@click.argument("id")
@click.option("--function", default="shell", show_default=True, help="The function whose sandbox it is.")
@click.option("--task", help="The RL task that it belongs to.")
@click.option("--step", type=click.IntRange(min=0), help="The step of the task that it counts for.")
@click.option("--image", help="Container image, of those that the function allows.")
@click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="An environment variable; may be repeated.")
@click.option("--workdir", help="Working directory.")
@click.option("--user", help="User name or id.")
@click.option("--memory", help="For example 2Gi.")
@click.option("--network", type=click.Choice(["none", "internal", "egress"]), help="What it may reach.")
@click.option("--idle-ttl", help="It ends after so long without an action, for example 30m.")
@click.option("--snapshot", help="Begin with a snapshot, in place of choices.")
@json_option
@connected
def open_trajectory(
    client: Client,
    /,
    id: str,
    function: str,
    task: str | None,
    step: int | None,
    env: tuple[str, ...],
    snapshot: str | None,
    as_json: bool,
    **chosen: str | None,
) -> None:
    """Make a trajectory's sandbox before its first action, with what it chooses."""
    given: dict[str, object] = {name: value for name, value in chosen.items() if value is not None}
    if env:
        given["env"] = dict(_variable(each) for each in env)
    chosen_sandbox = given or None
    client.trajectory(id, function=function, task=task, step=step, sandbox=chosen_sandbox, snapshot=snapshot).open()
    if as_json:
        print_json({"opened": id})
    else:
        click.echo(f"{id} is open")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--env")
    return name, value


@trajectories.command("snapshot")
@click.argument("id")
@json_option
@connected
def take_snapshot(client: Client, id: str, as_json: bool) -> None:
    """Keep the files of a trajectory's sandbox, when its actions so far have ended; print the snapshot's id."""
    taken = client.trajectory(id).snapshot()
    if as_json:
        print_json(taken)
    else:
        click.echo(taken.snapshot)


@trajectories.command("fork")
@click.argument("id")
@click.argument("to", nargs=-1, required=True)
@click.option("--function", default="shell", show_default=True, help="The function whose sandbox it is.")
@click.option("--task", help="The RL task that they belong to, by default the other's.")
@click.option("--step", type=click.IntRange(min=0), help="The step of the task that they count for.")
@json_option
@connected
def fork_trajectory(
    client: Client, id: str, to: tuple[str, ...], function: str, task: str | None, step: int | None, as_json: bool
) -> None:
    """Open trajectories TO that begin with the files of ID as they are now."""
    opened = client.trajectory(id, function=function, task=task).fork(to, step=step)
    if as_json:
        print_json({"opened": [each.id for each in opened]})
        return
    for each in opened:
        click.echo(f"{each.id} is open")


@trajectories.group("snapshots")
def snapshots() -> None:
    """The snapshots of trajectories."""


@snapshots.command("list")
@json_option
@connected
def list_snapshots(client: Client, as_json: bool) -> None:
    """List the snapshots, the oldest first."""
    found = client.snapshots()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.snapshot,
            each.trajectory,
            each.task,
            f"{each.node} (lost)" if each.lost else each.node,
            show_size(each.size_bytes),
            f"{each.made_at:%Y-%m-%d %H:%M:%S}",
            "yes" if each.in_use else "",
        )
        for each in found
    ]
    show(table(("SNAPSHOT", "TRAJECTORY", "TASK", "NODE", "SIZE", "TAKEN", "IN USE"), rows))


@snapshots.command("remove")
@click.argument("ids", nargs=-1, required=True)
@json_option
@connected
def remove_snapshots(client: Client, ids: tuple[str, ...], as_json: bool) -> None:
    """Remove snapshots; one that a living trajectory began with is kept, with status 73."""
    for id in ids:
        client.remove_snapshot(id)
        if not as_json:
            click.echo(f"{id} removed")
    if as_json:
        print_json({"removed": ids})


@trajectories.command("end")
@click.argument("ids", nargs=-1, required=True)
@connected
def end_trajectories(client: Client, ids: tuple[str, ...]) -> None:
    """End trajectories: their actions are cancelled and their sandboxes removed."""
    for id in ids:
        client.end_trajectory(id)
        click.echo(f"{id} ended")


@click.command()
@json_option
@connected
def tasks(client: Client, as_json: bool) -> None:
    """RL tasks: their weights, bounds, and use in core-seconds, gpu-seconds, units of quotas and seconds of slots."""
    _show_all(client.tasks(), as_json)


def _show_all(found: Sequence[msgspec.Struct], as_json: bool) -> None:
    if as_json:
        print_json(found)
    elif found:
        show(rows_table(msgspec.to_builtins(found)))
