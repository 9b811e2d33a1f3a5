"""Verbs that show the gateway's state: functions, trajectories, tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from gateway.cli.output import json_option, plain, print_json, print_table, server_options, show_seconds
from tangram import Client


@click.group()
def functions() -> None:
    """The registered functions."""


@functions.command("list")
@server_options
@json_option
def list_functions(server: str, token: str, as_json: bool) -> None:
    """List the functions."""
    with Client(server, token=token) as client:
        found = [plain(each) for each in client.functions()]
    if as_json:
        print_json(found)
        return
    print_table(
        ("NAME", "RUNTIME", "REVISION", "COST", "DESCRIPTION"),
        [(each["name"], each["runtime"], each["revision"], _cost(each["cost"]), each["description"]) for each in found],
    )


@functions.command("show")
@click.argument("name")
@server_options
@json_option
def show_function(name: str, server: str, token: str, as_json: bool) -> None:
    """Show one function as it is now, with what was learned of it."""
    with Client(server, token=token) as client:
        found = plain(client.function(name))
    if as_json:
        print_json(found)
        return
    learned = found.pop("learned", {})
    print_tree(found)
    if learned:
        click.echo()
        print_table(
            ("LEARNED KEY", "T_ORI", "ERROR", "SERIAL FRACTION", "BATCH MARGINAL", "RUNS"),
            [
                (
                    key or "(all)",
                    show_seconds(each["t_ori_s"]),
                    f"{100 * each['error']:.0f}%",
                    each["serial_fraction"],
                    each["batch_marginal"],
                    each["observations"],
                )
                for key, each in learned.items()
            ],
        )


@click.group()
def trajectories() -> None:
    """The living trajectories."""


@trajectories.command("list")
@server_options
@json_option
def list_trajectories(server: str, token: str, as_json: bool) -> None:
    """List the living trajectories."""
    with Client(server, token=token) as client:
        found = [plain(each) for each in client.trajectories()]
    print_rows(found, as_json)


@trajectories.command("end")
@click.argument("ids", nargs=-1, required=True)
@server_options
def end_trajectories(ids: tuple[str, ...], server: str, token: str) -> None:
    """End trajectories: their actions are cancelled and their sandboxes removed."""
    with Client(server, token=token) as client:
        for id in ids:
            client.end_trajectory(id)
            click.echo(f"{id} ended")


@click.command()
@server_options
@json_option
def tasks(server: str, token: str, as_json: bool) -> None:
    """RL tasks: their weights, bounds, and use in core-seconds, gpu-seconds, units of quotas and seconds of slots."""
    with Client(server, token=token) as client:
        found = [plain(each) for each in client.tasks()]
    print_rows(found, as_json)


def print_rows(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """A table whose columns are the rows' own scalar fields."""
    if as_json:
        print_json(list(rows))
        return
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
    if columns:
        print_table(
            [name.upper().replace("_", " ") for name in columns],
            [[_cell(row.get(name)) for name in columns] for row in rows],
        )


def _cell(value: object) -> object:
    if isinstance(value, Mapping):
        return _cost(value)
    return f"{value:.4g}" if isinstance(value, float) else value


def _cost(cost: Mapping[str, Any]) -> str:
    return " ".join(f"{kind}={_amount(amount)}" for kind, amount in cost.items()) or "-"


def _amount(amount: object) -> str:
    if isinstance(amount, Mapping) and "choices" in amount:
        return ",".join(map(str, amount["choices"]))
    if isinstance(amount, Mapping) and {"min", "max"} <= amount.keys():
        return f"{amount['min']}-{amount['max']}"
    return f"{amount:.4g}" if isinstance(amount, float) else str(amount)


def print_tree(value: object, indent: int = 0) -> None:
    """Nested mappings, one key to a line; what is empty is left out."""
    if not isinstance(value, Mapping):
        click.echo(" " * indent + str(value))
        return
    for key, inner in value.items():
        if inner in (None, "", [], {}):
            continue
        if isinstance(inner, Mapping):
            click.echo(f"{' ' * indent}{key}:")
            print_tree(inner, indent + 2)
        else:
            shown = ", ".join(map(str, inner)) if isinstance(inner, list) else inner
            click.echo(f"{' ' * indent}{key}: {shown}")
