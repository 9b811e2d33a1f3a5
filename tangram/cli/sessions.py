"""``tangram shell`` and ``tangram exec``: a command in a trajectory's sandbox, typed to from this terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import click

from tangram import Client
from tangram.cli import exit_status
from tangram.cli.options import Duration, connected
from tangram.cli.printing.output import say
from tangram.cli.printing.terminal import LocalTerminal, Relay
from tangram.client.sync.session import SessionHandle
from tangram.client.sync.trajectory import Trajectory
from tangram.errors import NotFoundError
from tangram.types import SessionEnd

#: What a shell is if nobody says: bash where there is one.
SHELL = "if command -v bash >/dev/null; then exec bash; else exec sh; fi"

_function = click.option("--function", default="shell", show_default=True, help="The exec function whose cores it has.")
_task = click.option("--task", help="The RL task it belongs to.")
_user = click.option("--user", help="Who it runs as, one of those that the function allows.")
_cwd = click.option("--cwd", help="Where it begins; the sandbox's working directory by default.")
_env = click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="An environment variable of it.")
_timeout = click.option("--timeout", "timeout_s", type=Duration(), help="Bound of the session, at most the function's.")
_new = click.option("--new", is_flag=True, help="Make the trajectory's sandbox if there is none.")


@click.command()
@click.argument("trajectory")
@click.option("--attach", help="Go on with this session instead, which another terminal left.")
@_function
@_task
@_user
@_cwd
@_env
@_timeout
@_new
@connected
def shell(
    client: Client,
    trajectory: str,
    attach: str | None,
    function: str,
    task: str | None,
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    timeout_s: float | None,
    new: bool,
) -> int:
    """Open a shell in the sandbox of TRAJECTORY.

    It is an action: it holds its cores until it ends, and the trajectory's other actions wait for it. It goes on when
    this terminal is cut off; its id is printed, and --attach ID goes on with it.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("a shell needs a terminal; use `tangram exec` in a script")
    with LocalTerminal(raw=True) as terminal:
        if attach is not None:
            session = client.session(attach)
        else:
            rollout = _rollout(client, trajectory, function, task, new=new)
            session = rollout.session(
                SHELL, terminal=terminal.size(), cwd=cwd, env=_variables(env), user=user, timeout_s=timeout_s
            )
        terminal.say(f"session {session.id}")
        end = Relay(session, terminal).run()
    return _status(session, end, lossless=False)


class CommandAfterOptions(click.Command):
    """A verb whose options may also stand after its first argument: all that follows is another command, as written."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before, rest = self._split(ctx, args)
        between, command = self._split(ctx, rest[1:])
        return super().parse_args(ctx, [*before, *between, "--", *rest[:1], *command])

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Return the options that come first, and the rest without the ``--`` that may end them."""
        options = click.Command(self.name, params=[each for each in self.params if isinstance(each, click.Option)])
        _, rest, _ = options.make_parser(ctx).parse_args(list(args))
        first = args[: len(args) - len(rest)]
        return (first[:-1] if first[-1:] == ["--"] else first), list(rest)


@click.command("exec", cls=CommandAfterOptions, context_settings={"allow_interspersed_args": False})
@click.argument("trajectory")
@click.argument("command", nargs=-1, required=True)
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input on.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal; needs one here.")
@_function
@_task
@_user
@_cwd
@_env
@_timeout
@_new
@connected
def exec_(
    client: Client,
    trajectory: str,
    command: tuple[str, ...],
    interactive: bool,
    tty: bool,
    function: str,
    task: str | None,
    user: str | None,
    cwd: str | None,
    env: tuple[str, ...],
    timeout_s: float | None,
    new: bool,
) -> int:
    """Run COMMAND in the sandbox of TRAJECTORY, as it is written; its exit status is ours.

    Options come before COMMAND; ``--`` may stand between them and it.
    Ctrl-C interrupts the command, not this program; a second one ends it.
    """
    if tty and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("-t needs a terminal here; leave it out")
    with LocalTerminal(raw=tty and interactive) as terminal:
        rollout = _rollout(client, trajectory, function, task, new=new)
        size = terminal.size() if tty else None
        variables = _variables(env)
        session = rollout.session(command, terminal=size, cwd=cwd, env=variables, user=user, timeout_s=timeout_s)
        end = Relay(session, terminal, reads=interactive).run()
    return _status(session, end, lossless=True)


def _rollout(client: Client, name: str, function: str, task: str | None, *, new: bool) -> Trajectory:
    """Return a trajectory that lives; raises NotFoundError."""
    if not new and not any(each.trajectory == name for each in client.trajectories()):
        raise NotFoundError(
            f"no trajectory {name!r} lives; --new, before any command, makes its sandbox", component="cli"
        )
    return client.trajectory(name, function=function, task=task)


def _variables(given: tuple[str, ...]) -> Mapping[str, str]:
    """Return the variables of the command: what was asked for, and what our terminal can do."""
    pairs = [each.partition("=") for each in given]
    odd = next((name for name, equals, _ in pairs if not equals or not name), None)
    if odd is not None:
        raise click.BadParameter(f"{odd!r} is not NAME=VALUE", param_hint="--env")
    ours = {name: os.environ[name] for name in ("TERM",) if name in os.environ}
    return {**ours, **{name: value for name, _, value in pairs}}


def _status(session: SessionHandle, end: SessionEnd, *, lossless: bool) -> int:
    """Return the exit status of a session, and say what went wrong with it."""
    if lossless and session.missing:
        say(f"{session.missing} bytes of its output are missing: they were no longer kept")
        return exit_status.of_code("internal")
    if end.reason is not None:
        say(f"{end.reason}: {end.message}")
        return exit_status.of_reason(end.reason)
    if end.signal is not None:
        return 128 + end.signal
    return end.exit_code or 0
