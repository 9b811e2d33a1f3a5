"""Verbs on invocations and on dead letters: invoke, ps, get, logs, cancel, dlq."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click
import msgspec
from rich.console import Console

from tangram import Client, InvocationResult, LogLine, NotFoundError, TangramError
from tangram.cli import exit_status
from tangram.cli.main import VerbGroup
from tangram.cli.options import (
    Duration,
    connected,
    json_option,
    limit_option,
    whole_id,
    whole_ids,
)
from tangram.cli.output import (
    TableColumn,
    age_s,
    cells,
    in_json,
    is_terminal,
    print_either,
    print_json,
    print_log,
    print_rows,
    record,
    say,
    short_id,
    show,
    show_seconds,
    table,
    visible,
)
from tangram.types import Attempt

#: Log lines shown of an invocation that failed.
LAST_LINES = 20


def _tell_if_new(client: Client, trajectory: str) -> None:
    """Say that a call begins a trajectory: whoever expects files of an earlier one is not to find an empty sandbox."""
    try:
        client.trajectory_info(trajectory)
    except NotFoundError:
        say(f"trajectory {trajectory} did not live: it begins with this call, in a new sandbox")


_raw = click.option(
    "--raw", is_flag=True, help="Print logs as they were written: a terminal obeys the control characters in them."
)


@click.command()
@click.argument("function")
@click.argument("input", default="{}")
@click.option("--trajectory", metavar="ID", help="The rollout whose sandbox it needs.")
@click.option("--task", metavar="NAME", help="The RL task it belongs to.")
@click.option("--step", type=click.IntRange(min=0), help="The step of the task that it counts for.")
@click.option("--timeout", "timeout_s", type=Duration(), help="Bound of the execution, at most the function's.")
@click.option("--key", metavar="KEY", help="Idempotency key: the same key and input run once.")
@click.option("-f", "--follow", is_flag=True, help="Show the log on standard error while it runs.")
@click.option("--async", "--no-wait", "detach", is_flag=True, help="Do not wait: print the id on standard output.")
@_raw
@json_option
@connected
def invoke(
    client: Client,
    function: str,
    input: str,
    trajectory: str | None,
    task: str | None,
    step: int | None,
    timeout_s: float | None,
    key: str | None,
    follow: bool,
    detach: bool,
    raw: bool,
    as_json: bool,
) -> int:
    """Run FUNCTION on INPUT, a JSON object, @FILE, or - for standard input.

    The result is printed on standard output, the invocation's id on standard error. A failure prints component,
    reason and the last log lines, and the exit status is that of its reason (docs/reference/cli.md).

    \b
    tangram invoke shell '{"command": "nproc"}' --trajectory t1
    tangram invoke pytest_reward @input.json --async --key t1-reward
    """
    body = read_input(input)
    if trajectory is not None:
        _tell_if_new(client, trajectory)
    if not (follow or detach):
        with waiting(function):
            result = client.invoke(
                function, body, task=task, step=step, trajectory=trajectory, key=key, timeout_s=timeout_s
            )
        say(result.id)
        return show_end(client, result, as_json, log_shown=False, raw=raw)
    result = client.submit(function, body, task=task, step=step, trajectory=trajectory, key=key, timeout_s=timeout_s)
    if detach:
        print_json(result) if as_json else click.echo(result.id)
        return 0
    say(result.id)
    try:
        for line in client.logs(result.id, follow=True):
            print_log(line, err=True, raw=raw)
        return show_end(client, client.wait(result.id), as_json, log_shown=True)
    except KeyboardInterrupt:
        client.cancel(result.id)
        raise


@click.command()
@click.option("--function", metavar="NAME", help="Only those of this function.")
@click.option("--task", metavar="NAME", help="Only those of this task.")
@click.option("--trajectory", metavar="ID", help="Only those of this trajectory.")
@click.option("--state", metavar="STATE", help="Only those in this state.")
@click.option("--reason", metavar="REASON", help="Only those that ended for this reason.")
@click.option("--since", metavar="TIME", help="Only those accepted since then: 15m, or an instant of RFC 3339.")
@limit_option("invocations")
@json_option
@connected
def ps(
    client: Client,
    function: str | None,
    task: str | None,
    trajectory: str | None,
    state: str | None,
    reason: str | None,
    since: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List invocations, newest first; on a terminal as many columns as fit it, with ids without their end.

    \b
    tangram ps --state failed --since 1h
    tangram ps --trajectory t1 --json
    """
    invocations = list(
        client.list(
            function=function,
            task=task,
            trajectory=trajectory,
            state=state,
            reason=reason,
            since=since,
            limit=limit,
        )
    )
    if as_json:
        print_json(invocations)
        return
    show(table(INVOCATIONS, invocation_rows(invocations, short=is_terminal())))


@click.command("show")
@click.argument("id")
@click.option("--wait", "wait_s", type=Duration(), help="Wait so long for its end first.")
@json_option
@connected
def show_invocation(client: Client, id: str, wait_s: float | None, as_json: bool) -> int:
    """Show an invocation's record; once it has failed the exit status is that of its reason.

    \b
    tangram show 1f
    """
    id = whole_id(client, id)
    try:
        with waiting(id):
            result = client.get(id) if wait_s is None else client.wait(id, wait_s)
    except TimeoutError:
        result = client.get(id)
    if as_json:
        print_json(result)
    else:
        fields = {name: each for name, each in msgspec.to_builtins(result).items() if each}
        plain = (str, int, float)
        show(record({name: each if isinstance(each, plain) else in_json(each) for name, each in fields.items()}))
    return exit_status.of_reason(result.reason)


@click.command()
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Go on until the invocation has ended.")
@click.option("--offset", default=0, show_default=True, type=click.IntRange(min=0), help="First record to show.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write it to a file, as it was written."
)
@_raw
@json_option
@connected
def logs(client: Client, id: str, follow: bool, offset: int, output: Path | None, raw: bool, as_json: bool) -> None:
    """Show an invocation's log: what it wrote to standard error goes to ours.

    \b
    tangram logs 1f -f
    """
    lines = client.logs(whole_id(client, id), follow=follow, offset=offset)
    if output is not None:
        save_log(lines, output, as_json)
        return
    for line in lines:
        if as_json:
            click.echo(in_json(line))
        else:
            print_log(line, err=line.stream != "stdout", raw=raw)


@click.command()
@click.argument("ids", nargs=-1, required=True)
@json_option
@connected
def cancel(client: Client, ids: tuple[str, ...], as_json: bool) -> None:
    """End invocations and everything they started; one that has ended already is an error.

    \b
    tangram cancel 1f 20
    """
    ended = [client.cancel(id) for id in whole_ids(client, ids)]
    print_either(ended, as_json, *(f"{each.id} {each.state}" for each in ended))


def save_log(lines: Iterable[LogLine], output: Path, as_json: bool) -> None:
    """Write a log to a file, each record when it comes: as it was written, or as lines of JSON."""
    records = 0
    try:
        with output.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            for line in lines:
                ours = line.stream not in ("stdout", "stderr")
                file.write(f"{in_json(line)}\n" if as_json else f"[{line.stream}] {line.data}\n" if ours else line.data)
                file.flush()
                records += 1
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror or error}") from None
    say(f"{records} records in {output}")


def read_input(text: str) -> dict[str, object]:
    """Return a JSON object given as text, as @FILE, or on standard input."""
    try:
        if text == "-":
            value = msgspec.json.decode(sys.stdin.buffer.read())
        else:
            value = msgspec.json.decode(Path(text[1:]).read_bytes() if text.startswith("@") else text)
    except (msgspec.DecodeError, UnicodeError, OSError) as error:
        raise click.BadParameter(f"{text[:40]!r}: {error}", param_hint="INPUT") from None
    if not isinstance(value, dict):
        raise click.BadParameter("must be a JSON object", param_hint="INPUT")
    return value


def show_end(client: Client, result: InvocationResult, as_json: bool, *, log_shown: bool, raw: bool = False) -> int:
    """Print the result, and the story of a failure; return the exit status."""
    if as_json:
        print_json(result)
    elif result.result is not None:
        print_json(result.result)
    if result.reason is not None:
        say(f"{result.component}: {result.reason}: {result.message}")
        if not log_shown:
            try:
                last = list(client.logs(result.id))[-LAST_LINES:]
            except TangramError:
                last = []  # the failure is told already: that its log cannot be had adds nothing
            for line in last:
                print_log(line, err=True, raw=raw)
    return exit_status.of_reason(result.reason)


def waiting(what: str) -> AbstractContextManager[object]:
    """Show on a terminal's standard error that something is waited for."""
    return Console(stderr=True, markup=False).status(what) if sys.stderr.isatty() else nullcontext()


#: The columns of invocations, in `ps` and in `top`.
INVOCATIONS = (
    TableColumn("ID"),
    TableColumn("FUNCTION", 13),
    TableColumn("TASK", 8, 4),
    TableColumn("TRAJECTORY", 8, 3),
    TableColumn("STATE", 7),
    TableColumn("REASON", 7, 2),
    TableColumn("AGE", 5, 1),
    TableColumn("QUEUE", 5, 6),
    TableColumn("OVERHEAD", 8, 8),
    TableColumn("RAN", 6, 5),
    TableColumn("UNITS", 5, 7),
)


def invocation_rows(invocations: Iterable[InvocationResult], *, short: bool) -> list[tuple[object, ...]]:
    """Return the cells of `INVOCATIONS`, with ids that are ``short`` for who looks and whole for who reads on."""
    return [
        (
            short_id(each.id) if short else each.id,
            each.function,
            each.task,
            each.trajectory,
            each.state,
            each.reason,
            *map(show_seconds, (age_s(each.accepted_at), each.queue_s, each.overhead_s, each.execution_s)),
            dict(sorted(each.units.items())),
        )
        for each in invocations
    ]


@click.group(cls=VerbGroup)
def dlq() -> None:
    """Dead letters: asynchronous work that has failed for good."""


@dlq.command("list")
@click.option("--function", metavar="NAME", help="Only those of this function.")
@limit_option("dead letters")
@json_option
@connected
def list_letters(client: Client, function: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, newest first."""
    letters = list(client.list(function=function, dead=True, limit=limit))
    id_of = (lambda each: short_id(each.id)) if is_terminal() else "id"
    rows = cells(letters, id_of, "function", "state", "reason", "attempt", "ended_at", "message")
    print_rows(letters, as_json, ("ID", "FUNCTION", "STATE", "REASON", "TRIES", "ENDED", "MESSAGE"), rows)


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
    """Send dead letters again, each as an invocation of its own; prints the new ids.

    \b
    tangram dlq redrive 1f
    """
    sent = [client.redrive(id) for id in whole_ids(client, ids)]
    print_either(sent, as_json, *(each.id for each in sent))


@dlq.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of them, or all of --function.")
@click.option("--function", metavar="NAME", help="With --all: only those of this function.")
@json_option
@connected
def purge(client: Client, ids: tuple[str, ...], everything: bool, function: str | None, as_json: bool) -> None:
    """Take dead letters off the list; their records stay.

    \b
    tangram dlq purge --function shell
    """
    if bool(ids) == everything or (function is not None and not everything):
        raise click.UsageError("name the IDS, or write --all (and --function)")
    count = client.purge_all(function) if everything else sum(client.purge(id) for id in whole_ids(client, ids))
    print_either({"purged": count}, as_json, f"{count} purged")
