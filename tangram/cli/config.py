"""Verbs on the configuration of a running gateway: diff, apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tangram import Client, InvalidConfigError
from tangram.cli.options import connected, json_option
from tangram.cli.output import print_json, visible
from tangram.types import ConfigDiff
from tangram.types.config_files import files_of, nothing_there

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PATHS_HELP = (
    "PATHS are YAML files or directories (tangram.yaml, functions/*/function.yaml); the current one by default."
)


def paths_argument(command: _Command) -> _Command:
    """PATHS of configuration files; the command's help ends with what they are."""
    command.__doc__ = f"{(command.__doc__ or '').rstrip()} {_PATHS_HELP}"
    return click.argument("paths", nargs=-1, type=click.Path(path_type=Path))(command)


_own = click.option("--own", is_flag=True, help="The gateway reads its own files again, instead of PATHS.")


@click.command()
@paths_argument
@_own
@json_option
@connected
def diff(client: Client, paths: tuple[Path, ...], own: bool, as_json: bool) -> None:
    """What `apply` would change in a running gateway."""
    _show(client.apply(_texts(paths, own), dry_run=True), as_json)


@click.command()
@paths_argument
@_own
@json_option
@connected
def apply(client: Client, paths: tuple[Path, ...], own: bool, as_json: bool) -> None:
    """Replace the functions, tasks and resources of a running gateway.

    All or nothing; nothing in flight is dropped, a changed function serves new invocations only. Handlers and models
    stay where they are: on the gateway's disk.
    """
    _show(client.apply(_texts(paths, own), dry_run=False), as_json)


def _texts(paths: Sequence[Path], own: bool) -> dict[str, str] | None:
    """Return the files' texts by absolute path, each once; None for the gateway's own. Raises InvalidConfigError."""
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
                texts.setdefault(file.resolve(), (str(file.absolute()), file.read_text(encoding="utf-8")))
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
    lines += [f"~ {name} ({', '.join(keys)})" for name, keys in diff.changed.items()]
    lines += [f"- {name}" for name in diff.removed]
    lines += [f"~ task {name}" for name in diff.tasks]
    lines += [f"~ resource {name}" for name in diff.resources]
    lines += [f"! {key} needs a restart" for key in diff.needs_restart]
    click.echo(visible("\n".join(lines)) or "no change")
