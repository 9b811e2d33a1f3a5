"""Verbs on dead letters: asynchronous work that ended badly and waits for somebody to look at it."""

from __future__ import annotations

import click
import orjson

from gateway.cli.output import json_option, plain, print_json, print_table, server_options
from tangram import Client


@click.group()
def dlq() -> None:
    """Dead letters: asynchronous work that has failed for good."""


@dlq.command("list")
@click.option("--function", help="Only those of this function.")
@click.option("-n", "--limit", default=20, show_default=True, type=click.IntRange(min=1), help="Most dead letters.")
@server_options
@json_option
def list_letters(function: str | None, limit: int, server: str, token: str, as_json: bool) -> None:
    """List dead letters, newest first."""
    with Client(server, token=token) as client:
        found = list(client.list(function=function, dead=True, limit=limit))
    if as_json:
        print_json([plain(each) for each in found])
        return
    print_table(
        ("ID", "FUNCTION", "STATE", "REASON", "TRIES", "ENDED", "MESSAGE"),
        [
            (
                each.id,
                each.function,
                each.state,
                each.reason,
                each.attempt,
                each.ended_at.isoformat(timespec="seconds") if each.ended_at else None,
                each.message,
            )
            for each in found
        ],
    )


@dlq.command()
@click.argument("id")
@server_options
@json_option
def show(id: str, server: str, token: str, as_json: bool) -> None:
    """Show why an invocation is dead: each of its tries, and its input."""
    with Client(server, token=token) as client:
        record = plain(client.get(id))
    if as_json:
        print_json(record)
        return
    for attempt in record["attempts"]:
        click.echo(f"try {attempt['attempt']}: {attempt['state']} ({attempt['reason']}) {attempt['message']}")
    click.echo(f"try {record['attempt']}: {record['state']} ({record['reason']}) {record['message']}")
    click.echo(f"dead: {'yes' if record['dead'] else 'no'}")
    click.echo(f"input: {orjson.dumps(record.get('input')).decode()}")


@dlq.command()
@click.argument("ids", nargs=-1, required=True)
@server_options
@json_option
def redrive(ids: tuple[str, ...], server: str, token: str, as_json: bool) -> None:
    """Send dead letters again, each as an invocation of its own; prints the new ids."""
    with Client(server, token=token) as client:
        sent = [client.redrive(id) for id in ids]
    if as_json:
        print_json([plain(each) for each in sent])
    else:
        for each in sent:
            click.echo(each.id)


@dlq.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of them, or all of --function.")
@click.option("--function", help="With --all: only those of this function.")
@server_options
@json_option
def purge(ids: tuple[str, ...], everything: bool, function: str | None, server: str, token: str, as_json: bool) -> None:
    """Take dead letters off the list; their records stay."""
    if bool(ids) == everything or (function is not None and not everything):
        raise click.UsageError("name the IDS, or write --all (and --function)")
    with Client(server, token=token) as client:
        count = client.purge_all(function) if everything else sum(client.purge(id) for id in ids)
    if as_json:
        print_json({"purged": count})
    else:
        click.echo(f"{count} purged")
