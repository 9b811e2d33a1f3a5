"""Verbs on the record of a gateway: backup, restore."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tangram.cli.options import json_option, paths_argument
from tangram.cli.output import print_json
from tangram.types import show_size


@click.command()
@click.argument("into", type=click.Path(path_type=Path))
@paths_argument
@json_option
def backup(into: Path, paths: tuple[Path, ...], as_json: bool) -> None:
    """Copy the record to the file INTO, of one instant; the gateway may serve meanwhile."""
    from gateway.store.backup import backup as copy
    from gateway.store.state_dir import DATABASE

    size_bytes = copy(_state_dir(paths) / DATABASE, into)
    if as_json:
        print_json({"file": str(into), "bytes": size_bytes})
    else:
        click.echo(f"{into}: {show_size(size_bytes)}")


@click.command()
@click.argument("copy", type=click.Path(path_type=Path, exists=True))
@paths_argument
@click.option("--replace", is_flag=True, help="Move the record that is there aside.")
@json_option
def restore(copy: Path, paths: tuple[Path, ...], replace: bool, as_json: bool) -> None:
    """Put a COPY of `backup` back into the state directory, from which no gateway may serve."""
    from gateway.store.backup import restore as put

    state_dir = _state_dir(paths)
    aside = put(copy, state_dir, replace=replace)
    if as_json:
        print_json({"state_dir": str(state_dir), "aside": None if aside is None else str(aside)})
    else:
        click.echo(f"{state_dir}: restored" + ("" if aside is None else f"; what was there is {aside}"))


def _state_dir(paths: tuple[Path, ...]) -> Path:
    from gateway.config import load

    return load.load(paths or (Path(),), os.environ, look=False).server.state_dir
