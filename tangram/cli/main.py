"""The command line: ``tangram VERB``. Each verb is loaded when it is used, so that the prompt answers at once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import click

from tangram.cli import exit_status

#: Entry points of this group name tables like `VERBS`: so a server adds its verbs to the same command.
GROUP = "tangram.verbs"
#: Groups of verbs in ``tangram --help``, in this order.
GROUPS = ("use", "watch", "serve", "operate")


class Verb(NamedTuple):
    """Where a command lives, what ``tangram --help`` says of it, and in which of its `GROUPS` it stands."""

    place: str
    summary: str
    group: str


#: The verbs that work from any machine.
VERBS: Mapping[str, Verb] = {
    "invoke": Verb("tangram.cli.invocations:invoke", "Run a function.", "use"),
    "cancel": Verb("tangram.cli.invocations:cancel", "End invocations and everything they started.", "use"),
    "shell": Verb("tangram.cli.sessions:shell", "Open a shell in a trajectory's sandbox.", "use"),
    "exec": Verb("tangram.cli.sessions:exec_", "Run a command in a trajectory's sandbox, as if it ran here.", "use"),
    "cp": Verb("tangram.cli.cp:cp", "Copy files into a trajectory's sandbox, or out of it.", "use"),
    "trajectories": Verb("tangram.cli.state:trajectories", "Living trajectories, their snapshots and forks.", "use"),
    "port-forward": Verb(
        "tangram.cli.ports:port_forward", "Reach a server in a sandbox at a port of this machine.", "use"
    ),
    "functions": Verb("tangram.cli.state:functions", "The registered functions.", "use"),
    "token": Verb("tangram.cli.state:token", "Print the token of your gateway on this machine, for curl.", "use"),
    "ps": Verb("tangram.cli.invocations:ps", "List invocations, newest first.", "watch"),
    "show": Verb("tangram.cli.invocations:show_invocation", "Show an invocation's record.", "watch"),
    "logs": Verb("tangram.cli.invocations:logs", "Show an invocation's log.", "watch"),
    "top": Verb("tangram.cli.top:top", "Resources, who holds them, and what waits for what.", "watch"),
    "queue": Verb("tangram.cli.top:queue", "What waits, and for what.", "watch"),
    "tasks": Verb("tangram.cli.state:tasks", "RL tasks: their weights, bounds and use.", "watch"),
    "steps": Verb("tangram.cli.state:steps", "Steps of an RL task, and when each is expected to end.", "watch"),
    "dlq": Verb("tangram.cli.invocations:dlq", "Dead letters: asynchronous work that has failed for good.", "watch"),
    "page": Verb("tangram.cli.state:page", "Print an address that opens the page in one browser, once.", "watch"),
    "diff": Verb("tangram.cli.state:diff", "What `apply` would change in a running gateway.", "operate"),
    "apply": Verb("tangram.cli.state:apply", "Change functions, tasks and resources of a running gateway.", "operate"),
    "images": Verb("tangram.cli.state:images", "Container images: pulled ahead of a run, and what there is.", "serve"),
    "completion": Verb(
        "tangram.cli.options:completion", "Print what makes bash, zsh or fish complete the verbs.", "operate"
    ),
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
        verb = self.verbs.get(cmd_name)
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
        """List the verbs by their groups, without importing any."""
        for group in GROUPS:
            with formatter.section(group.capitalize()):
                formatter.write_dl([(name, verb.summary) for name, verb in self.verbs.items() if verb.group == group])


class VerbGroup(click.Group):
    """A group of verbs, each with its whole summary."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs by name; a summary that is longer than its line goes on in the next."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in sorted(self.commands)])


def command_line(more: Mapping[str, Verb] | None = None) -> Verbs:
    """Return the command with all of its verbs, ``more`` included."""

    @click.group(cls=Verbs, more=more or {}, context_settings={"help_option_names": ["-h", "--help"]})
    @global_options
    @click.option(
        "-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
    )
    def tangram() -> None:
        """A serverless-style function gateway for agentic reinforcement learning.

        \b
        tangram invoke shell '{"command": "echo hello"}'
        tangram invoke --help
        """

    assert isinstance(tangram, Verbs)
    return tangram


def main(arguments: Sequence[str] | None = None, more: Mapping[str, Verb] | None = None) -> None:
    """Run one verb and exit; an error is told on standard error, with ``--json`` as JSON on standard output."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    _json_asked.set(False)
    try:
        status = command_line(more).main(args=words, prog_name="tangram", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(exit_status.INTERRUPTED)
    except click.ClickException as error:
        # Of a command line that cannot be read no option has been handed on.
        if _json_asked.get() or (isinstance(error, click.UsageError) and _takes_json(error.ctx) and "--json" in words):
            _print_error("usage" if isinstance(error, click.UsageError) else "failed", "cli", error.format_message())
        else:
            error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        if not isinstance(error, CodedFailure):
            raise
        if _json_asked.get():
            _print_error(error.code, error.component, error.message, getattr(error, "detail", None))
        else:
            from tangram.cli.output import say

            say(f"{error.component}: {error.code}: {error.message}")
        sys.exit(exit_status.of_code(error.code))
    sys.exit(status if isinstance(status, int) else 0)


def _takes_json(ctx: click.Context | None) -> bool:
    return ctx is not None and any(param.name == "as_json" for param in ctx.command.params)


def _print_error(code: str, component: str, message: str, detail: object = None) -> None:
    from tangram.cli.output import print_json

    problem = {"code": code, "component": component, "message": message}
    print_json({"error": {**problem, "detail": detail} if detail else problem})


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    for name in ("tangram-gateway", "tangram-client"):
        with suppress(PackageNotFoundError):
            click.echo(f"{name} {version(name)}")
    ctx.exit()


_Command = TypeVar("_Command", bound=Callable[..., Any])
#: Whether the verb that runs was asked for JSON.
_json_asked: ContextVar[bool] = ContextVar("json_asked", default=False)
#: Where a context keeps what was given before the verb.
_BEFORE = "tangram.cli.main"


def global_options(command: _Command) -> _Command:
    """``--server``, ``--token`` and ``--json`` of the command as a whole; its verbs `inherit` them."""
    for option in (
        click.option("--json", "as_json", is_flag=True, expose_value=False, callback=_remember, help="Print JSON."),
        click.option("--token", metavar="TOKEN", expose_value=False, callback=_remember, help="Bearer token."),
        click.option("--server", metavar="URL", expose_value=False, callback=_remember, help="The gateway."),
    ):
        command = option(command)
    return command


def inherit(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return the option's value, or what was given before the verb where it says nothing itself."""
    if not value and param.name is not None:
        value = given_before(ctx).get(param.name, value)
    if param.name == "as_json" and value:
        _json_asked.set(True)
    return value


def given_before(ctx: click.Context) -> dict[str, Any]:
    """Return what was given before the verb, by the parameter's name."""
    options = ctx.find_root().meta.get(_BEFORE, {})
    assert isinstance(options, dict)
    return options


def check_taken(ctx: click.Context, verb: str, command: click.Command) -> None:
    """Raise UsageError for an option before the verb that neither it nor one of its own verbs takes."""
    commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    taken = {param.name for each in commands for param in each.params}
    for name in given_before(ctx):
        if name not in taken:
            raise click.UsageError(f"{verb} takes no --{name.removeprefix('as_')}", ctx)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value and param.name is not None:
        ctx.meta.setdefault(_BEFORE, {})[param.name] = value
