"""Options that may stand before the verb as well as behind it; only click is imported, so that the prompt answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])
#: Where a context keeps what was given before the verb.
_BEFORE = "tangram.cli.global_options"


def global_options(command: _Command) -> _Command:
    """``--server``, ``--token`` and ``--json`` of the command as a whole; its verbs `inherit` them."""
    for made in (
        click.option("--json", "as_json", is_flag=True, expose_value=False, callback=_remember, help="Print JSON."),
        click.option("--token", expose_value=False, callback=_remember, help="Bearer token."),
        click.option("--server", expose_value=False, callback=_remember, help="The gateway."),
    ):
        command = made(command)
    return command


def inherit(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return the option's value, or what was given before the verb where it says nothing itself."""
    if value or param.name is None:
        return value
    return given_before(ctx).get(param.name, value)


def given_before(ctx: click.Context) -> dict[str, Any]:
    """Return what was given before the verb, by the parameter's name."""
    found = ctx.find_root().meta.get(_BEFORE, {})
    assert isinstance(found, dict)
    return found


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
