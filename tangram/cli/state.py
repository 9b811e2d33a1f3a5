"""Verbs that show the gateway's state: functions, trajectories, tasks."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from tangram import Client
from tangram.cli.options import connected, json_option
from tangram.cli.output import print_json, rows_table, show, show_seconds, table, tree


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
                each.observations,
            )
            for key, each in found.learned.items()
        ]
        show("", table(("LEARNED KEY", "T_ORI", "ERROR", "SERIAL FRACTION", "BATCH MARGINAL", "RUNS"), rows))


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
