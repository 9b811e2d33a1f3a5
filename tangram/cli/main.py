"""The command line: ``tangram VERB``. Each verb is loaded when it is used, so that the prompt answers at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, NamedTuple, Protocol, runtime_checkable

import click

from tangram.cli import exit_status
from tangram.cli.global_options import check_taken, global_options

#: Entry points of this group name tables like `VERBS`: so a server adds its verbs to the same command.
GROUP = "tangram.verbs"


class Verb(NamedTuple):
    """Where a command lives, and what ``tangram --help`` says of it."""

    place: str
    summary: str


#: The verbs that work from any machine.
VERBS: Mapping[str, Verb] = {
    "invoke": Verb("tangram.cli.invocations:invoke", "Run a function."),
    "ps": Verb("tangram.cli.invocations:ps", "List invocations, newest first."),
    "get": Verb("tangram.cli.invocations:get", "Show an invocation's record."),
    "logs": Verb("tangram.cli.invocations:logs", "Show an invocation's log."),
    "cancel": Verb("tangram.cli.invocations:cancel", "End invocations and everything they started."),
    "shell": Verb("tangram.cli.sessions:shell", "Open a shell in a trajectory's sandbox."),
    "exec": Verb("tangram.cli.sessions:exec_", "Run a command in a trajectory's sandbox, as if it ran here."),
    "cp": Verb("tangram.cli.files:cp", "Copy files into a trajectory's sandbox, or out of it."),
    "dlq": Verb("tangram.cli.dead_letters:dlq", "Dead letters: asynchronous work that has failed for good."),
    "functions": Verb("tangram.cli.state:functions", "The registered functions."),
    "trajectories": Verb("tangram.cli.state:trajectories", "The living trajectories."),
    "images": Verb("tangram.cli.images:images", "Container images: pulled ahead of a run, and what there is."),
    "tasks": Verb("tangram.cli.state:tasks", "RL tasks: their weights, bounds and use."),
    "steps": Verb("tangram.cli.steps:steps", "Steps of an RL task, and when each is expected to end."),
    "top": Verb("tangram.cli.top.verb:top", "Resources, who holds them, and what waits for what."),
    "completion": Verb("tangram.cli.completion:completion", "Print what makes bash, zsh or fish complete the verbs."),
    "token": Verb("tangram.cli.token:token", "Print the token of your gateway on this machine, for curl."),
    "diff": Verb("tangram.cli.config:diff", "What `apply` would change in a running gateway."),
    "apply": Verb("tangram.cli.config:apply", "Add and change functions, tasks and resources of a running gateway."),
}


@runtime_checkable
class CodedFailure(Protocol):
    """An error that a caller can be told: the client's own, and those of verbs that were plugged in."""

    code: str
    component: str
    message: str


class Verbs(click.Group):
    """A group whose commands are imported on demand."""

    def __init__(self, *args: Any, more: Mapping[str, Verb], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._more = more

    @cached_property
    def verbs(self) -> Mapping[str, Verb]:
        """Every verb: ours, those that were given, and those of installed entry points."""
        plugged = {name: verb for point in entry_points(group=GROUP) for name, verb in point.load().items()}
        return {**VERBS, **self._more, **plugged}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name) or self.verbs.get(cmd_name)
        if verb is None:
            return None
        module, _, name = verb.place.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; for one that is not there the nearest is told."""
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = get_close_matches(args[0], known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None:
            check_taken(ctx, name, command)
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in self.verbs.items()])


def command_line(more: Mapping[str, Verb] | None = None) -> Verbs:
    """Return the command with all of its verbs, ``more`` included."""

    @click.group(cls=Verbs, more=more or {}, context_settings={"help_option_names": ["-h", "--help"]})
    @global_options
    @click.option(
        "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
    )
    def tangram() -> None:
        """A serverless-style function gateway for agentic reinforcement learning."""

    assert isinstance(tangram, Verbs)
    return tangram


def main(arguments: Sequence[str] | None = None, more: Mapping[str, Verb] | None = None) -> None:
    """Run one verb and exit; an error is one story on standard error and its status of `exit_status`."""
    try:
        status = command_line(more).main(
            args=None if arguments is None else list(arguments), prog_name="tangram", standalone_mode=False
        )
    except click.exceptions.Abort:
        sys.exit(exit_status.INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        if not isinstance(error, CodedFailure):
            raise
        from tangram.cli.printing.output import say

        say(f"{error.component}: {error.code}: {error.message}")
        sys.exit(exit_status.of_code(error.code))
    sys.exit(status if isinstance(status, int) else 0)


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    for name in ("tangram-gateway", "tangram-client"):
        with suppress(PackageNotFoundError):
            click.echo(f"{name} {version(name)}")
    ctx.exit()
