"""Verbs on invocations: invoke, ps, get, logs, cancel."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import orjson

from gateway.cli.output import (
    Duration,
    json_option,
    plain,
    print_json,
    print_table,
    say,
    server_options,
    show_seconds,
    show_units,
)
from gateway.errors import reason_face
from manager.errors import Reason
from tangram import Client, InvocationResult, LogLine, TangramError

#: Log lines shown of an invocation that failed.
LAST_LINES = 20


@click.command()
@click.argument("function")
@click.argument("input", default="{}")
@click.option("--trajectory", help="The rollout whose sandbox it needs.")
@click.option("--task", help="The RL task it belongs to.")
@click.option("--timeout", "timeout_s", type=Duration(), help="Bound of the execution, at most the function's.")
@click.option("--key", help="Idempotency key: the same key and input run once.")
@click.option("-f", "--follow", is_flag=True, help="Show the log on standard error while it runs.")
@click.option("--async", "detach", is_flag=True, help="Do not wait: print the id on standard output.")
@server_options
@json_option
def invoke(
    function: str,
    input: str,
    trajectory: str | None,
    task: str | None,
    timeout_s: float | None,
    key: str | None,
    follow: bool,
    detach: bool,
    server: str,
    token: str,
    as_json: bool,
) -> int:
    """Run FUNCTION on INPUT, a JSON object, @FILE, or - for standard input.

    The result is printed on standard output, the invocation's id on standard error. A failure prints component,
    reason and the last log lines, and the exit status is that of its reason (docs/reference/cli.md).
    """
    body = read_input(input)
    with Client(server, token=token) as client:
        if not (follow or detach):
            result = client.invoke(function, body, task=task, trajectory=trajectory, key=key, timeout_s=timeout_s)
            say(result.id)
            return show_end(client, result, as_json, told=False)
        result = client.submit(function, body, task=task, trajectory=trajectory, key=key, timeout_s=timeout_s)
        if detach:
            print_json(plain(result)) if as_json else click.echo(result.id)
            return 0
        say(result.id)
        try:
            for line in client.logs(result.id, follow=True):
                print_line(line, err=True)
            return show_end(client, client.wait(result.id), as_json, told=True)
        except KeyboardInterrupt:
            client.cancel(result.id)
            raise


@click.command()
@click.option("--function", help="Only those of this function.")
@click.option("--task", help="Only those of this task.")
@click.option("--trajectory", help="Only those of this trajectory.")
@click.option("--state", help="Only those in this state.")
@click.option("-n", "--limit", default=20, show_default=True, type=click.IntRange(min=1), help="Most invocations.")
@server_options
@json_option
def ps(
    function: str | None,
    task: str | None,
    trajectory: str | None,
    state: str | None,
    limit: int,
    server: str,
    token: str,
    as_json: bool,
) -> None:
    """List invocations, newest first."""
    with Client(server, token=token) as client:
        found = list(client.list(function=function, task=task, trajectory=trajectory, state=state, limit=limit))
    if as_json:
        print_json([plain(each) for each in found])
        return
    print_table(
        ("ID", "FUNCTION", "TRAJECTORY", "STATE", "REASON", "QUEUE", "OVERHEAD", "EXECUTION", "UNITS"),
        [
            (
                each.id,
                each.function,
                each.trajectory,
                each.state,
                each.reason,
                show_seconds(each.queue_s),
                show_seconds(each.overhead_s),
                show_seconds(each.execution_s),
                show_units(each.units),
            )
            for each in found
        ],
    )


@click.command()
@click.argument("id")
@click.option("--wait", "wait_s", type=Duration(), help="Wait so long for its end first.")
@server_options
@json_option
def get(id: str, wait_s: float | None, server: str, token: str, as_json: bool) -> int:
    """Show an invocation's record; once it has failed the exit status is that of its reason."""
    with Client(server, token=token) as client:
        try:
            result = client.get(id) if wait_s is None else client.wait(id, wait_s)
        except TimeoutError:
            result = client.get(id)
    if as_json:
        print_json(plain(result))
    else:
        for name, value in plain(result).items():
            if value not in (None, "", {}, []):
                shown = value if isinstance(value, str) else orjson.dumps(value).decode()
                click.echo(f"{name:<14} {shown}")
    return exit_of(result)


@click.command()
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Go on until the invocation has ended.")
@click.option("--offset", default=0, show_default=True, type=click.IntRange(min=0), help="First record to show.")
@server_options
@json_option
def logs(id: str, follow: bool, offset: int, server: str, token: str, as_json: bool) -> None:
    """Show an invocation's log: what it wrote to standard error goes to ours."""
    with Client(server, token=token) as client:
        for line in client.logs(id, follow=follow, offset=offset):
            if as_json:
                record = {"offset": line.offset, "time": line.time, "stream": line.stream, "data": line.text}
                click.echo(orjson.dumps(record, default=str))
            else:
                print_line(line, err=line.stream != "stdout")


@click.command()
@click.argument("ids", nargs=-1, required=True)
@server_options
@json_option
def cancel(ids: tuple[str, ...], server: str, token: str, as_json: bool) -> None:
    """End invocations and everything they started; one that has ended already is an error."""
    with Client(server, token=token) as client:
        ended = [client.cancel(id) for id in ids]
    if as_json:
        print_json([plain(each) for each in ended])
    else:
        for each in ended:
            click.echo(f"{each.id} {each.state}")


def read_input(text: str) -> dict[str, object]:
    """A JSON object given as text, as @FILE, or on standard input."""
    try:
        if text == "-":
            value = orjson.loads(sys.stdin.buffer.read())
        else:
            value = orjson.loads(Path(text[1:]).read_bytes() if text.startswith("@") else text)
    except (orjson.JSONDecodeError, OSError) as error:
        raise click.BadParameter(f"{text[:40]!r}: {error}", param_hint="INPUT") from None
    if not isinstance(value, dict):
        raise click.BadParameter("must be a JSON object", param_hint="INPUT")
    return value


def show_end(client: Client, result: InvocationResult, as_json: bool, *, told: bool) -> int:
    """Print the result, and for a failure its story; the exit status. ``told``: its log was shown already."""
    if as_json:
        print_json(plain(result))
    elif result.result is not None:
        print_json(result.result)
    if result.reason is not None:
        say(f"{result.component}: {result.reason}: {result.message}")
        if not told:
            for line in last_lines(client, result.id):
                print_line(line, err=True)
    return exit_of(result)


def exit_of(result: InvocationResult) -> int:
    """The exit status of an invocation's end."""
    return reason_face(None if result.reason is None else Reason(result.reason)).exit


def last_lines(client: Client, id: str) -> list[LogLine]:
    """The end of the log; nothing where even that cannot be had."""
    try:
        return list(client.logs(id))[-LAST_LINES:]
    except TangramError:
        return []


def print_line(line: LogLine, *, err: bool) -> None:
    """A record as it was written; what the gateway itself says is marked."""
    ours = line.stream not in ("stdout", "stderr")
    click.echo(f"[{line.stream}] {line.text}" if ours else line.text, err=err, nl=not line.text.endswith("\n"))
