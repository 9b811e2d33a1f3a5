"""Verbs on the configuration of a running gateway: diff, apply."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from tangram import Client, InvalidConfigError
from tangram.cli.options import connected, json_option
from tangram.cli.printing.output import print_json, say, visible
from tangram.types import ConfigDiff
from tangram.types.config_files import files_of, nothing_there
from tangram.types.local_tokens import is_loopback

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PATHS_HELP = (
    "PATHS are YAML files or directories (tangram.yaml, functions/*/function.yaml); the current one by default."
)


def paths_argument(command: _Command) -> _Command:
    """PATHS of configuration files; the command's help ends with what they are."""
    command.__doc__ = f"{(command.__doc__ or '').rstrip()} {_PATHS_HELP}"
    return click.argument("paths", nargs=-1, type=click.Path(path_type=Path))(command)


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-[^}]*)?\}")
_prune = click.option("--prune", is_flag=True, help="Remove what PATHS do not name; without it that stays.")
_own = click.option("--own", is_flag=True, help="The gateway reads its own files again, instead of PATHS.")


@click.command()
@paths_argument
@_own
@_prune
@json_option
@connected
def diff(client: Client, paths: tuple[Path, ...], own: bool, prune: bool, as_json: bool) -> None:
    """What `apply` would change in a running gateway."""
    texts = _texts(paths, own, client.server)
    _show(client.apply(texts, dry_run=True, prune=prune, variables=_variables(texts)), as_json)


@click.command()
@paths_argument
@_own
@_prune
@json_option
@connected
def apply(client: Client, paths: tuple[Path, ...], own: bool, prune: bool, as_json: bool) -> None:
    """Add and change functions, tasks and resources of a running gateway; --prune also removes what is not named.

    All or nothing; nothing in flight is dropped, a changed function serves new invocations only. Handlers and models
    stay where they are: on the gateway's disk. ${NAME} in PATHS is taken from the environment of this command. What
    --prune removes is shown first, and on a terminal asked about.
    """
    texts = _texts(paths, own, client.server)
    variables = _variables(texts)
    if prune:
        planned = client.apply(texts, dry_run=True, prune=True, variables=variables)
        removed = [f"- {name}" for name in planned.removed]
        if removed:
            say("\n".join(removed))
            if sys.stdin.isatty():
                click.confirm(f"remove {len(removed)} functions?", abort=True, err=True)
    _show(client.apply(texts, dry_run=False, prune=prune, variables=variables), as_json)


def _variables(texts: Mapping[str, str] | None) -> dict[str, str]:
    """Return what the texts name of the environment."""
    named = {match[1] for text in (texts or {}).values() for match in _VARIABLE.finditer(text)}
    return {name: os.environ[name] for name in sorted(named) if name in os.environ}


def _texts(paths: Sequence[Path], own: bool, server: str) -> dict[str, str] | None:
    """Return the files' texts, each once, by absolute path; None for the gateway's own. Raises InvalidConfigError.

    Paths mean nothing on another machine: for a gateway there they are relative to the current directory.
    """
    here = is_loopback(urlsplit(server).hostname or "")
    if own:
        if paths:
            raise click.UsageError("--own takes no PATHS: the gateway knows its files")
        return None
    texts: dict[Path, tuple[str, str]] = {}
    problems = []
    for path in paths or (Path(),):
        found = files_of(path)
        if not found:
            problems.append(f"{path}: {nothing_there(path)}")
        for file in found:
            try:
                path = file.absolute() if here else Path(os.path.relpath(file))
                texts.setdefault(file.resolve(), (str(path), file.read_text(encoding="utf-8")))
            except (OSError, UnicodeError) as error:
                problems.append(f"{file}: cannot be read: {error}")
    if problems:
        raise InvalidConfigError("\n".join(problems))
    return dict(texts.values())


def _show(diff: ConfigDiff, as_json: bool) -> None:
    if as_json:
        print_json(diff)
        return
    lines = [f"+ {name}" for name in diff.added]
    for name, keys in diff.changed.items():
        lines.append(f"~ {name} ({', '.join(keys)})")
        lines += [f"    {key}: {each.was} -> {each.now}" for key, each in diff.values.get(name, {}).items()]
    lines += [f"- {name}" for name in diff.removed]
    lines += [f"~ task {name}" for name in diff.tasks]
    lines += [f"~ resource {name}" for name in diff.resources]
    lines += [f"! {key} needs a restart" for key in diff.needs_restart]
    click.echo(visible("\n".join(lines)) or "no change")
