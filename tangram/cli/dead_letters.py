"""Verbs on dead letters: asynchronous work that ended badly and waits for somebody to look at it."""

from __future__ import annotations

import click

from tangram import Client, InvocationResult
from tangram.cli.ids import whole_id, whole_ids
from tangram.cli.options import connected, json_option, limit_option
from tangram.cli.printing.output import in_json, print_json, show, table, visible
from tangram.types import Attempt


@click.group()
def dlq() -> None:
    """Dead letters: asynchronous work that has failed for good."""


@dlq.command("list")
@click.option("--function", help="Only those of this function.")
@limit_option("dead letters")
@json_option
@connected
def list_letters(client: Client, function: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, newest first."""
    found = list(client.list(function=function, dead=True, limit=limit))
    if as_json:
        print_json(found)
        return
    rows = [
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
    ]
    show(table(("ID", "FUNCTION", "STATE", "REASON", "TRIES", "ENDED", "MESSAGE"), rows))


@dlq.command("show")
@click.argument("id")
@json_option
@connected
def show_letter(client: Client, id: str, as_json: bool) -> None:
    """Show why an invocation is dead: each of its tries, and its input."""
    letter = client.get(whole_id(client, id))
    if as_json:
        print_json(letter)
        return
    tries: tuple[Attempt | InvocationResult, ...] = (*letter.attempts, letter)
    for tried in tries:
        click.echo(visible(f"try {tried.attempt}: {tried.state} ({tried.reason}) {tried.message}"))
    click.echo(f"dead: {'yes' if letter.dead else 'no'}")
    click.echo(f"input: {in_json(letter.input)}")


@dlq.command()
@click.argument("ids", nargs=-1, required=True)
@json_option
@connected
def redrive(client: Client, ids: tuple[str, ...], as_json: bool) -> None:
    """Send dead letters again, each as an invocation of its own; prints the new ids."""
    sent = [client.redrive(id) for id in whole_ids(client, ids)]
    if as_json:
        print_json(sent)
    else:
        for each in sent:
            click.echo(each.id)


@dlq.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of them, or all of --function.")
@click.option("--function", help="With --all: only those of this function.")
@json_option
@connected
def purge(client: Client, ids: tuple[str, ...], everything: bool, function: str | None, as_json: bool) -> None:
    """Take dead letters off the list; their records stay."""
    if bool(ids) == everything or (function is not None and not everything):
        raise click.UsageError("name the IDS, or write --all (and --function)")
    count = client.purge_all(function) if everything else sum(client.purge(id) for id in whole_ids(client, ids))
    if as_json:
        print_json({"purged": count})
    else:
        click.echo(f"{count} purged")
