"""Verbs on the configuration and the server itself: serve, validate, diff, apply, config-schema, node."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gateway.cli.output import json_option, plain, print_json, print_table, server_options
from gateway.config.quantities import show_size

_paths = click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
_PATHS_HELP = (
    "PATHS are YAML files or directories (tangram.yaml, functions/*/function.yaml); the current one by default."
)


@click.command(help=f"Serve until SIGTERM, then drain. {_PATHS_HELP}")
@_paths
@click.option("--log-level", default="info", show_default=True, help="Level of the gateway's own log.")
def serve(paths: tuple[Path, ...], log_level: str) -> None:
    import uvloop

    from gateway import app
    from gateway.config import load
    from gateway.invocations import logs

    logs.configure(log_level)
    chosen = paths or (Path(),)
    gateway = load.load(chosen, os.environ)
    uvloop.run(_serve(app.build(gateway, paths=chosen, env=os.environ)))


async def _serve(app: Any) -> None:
    """Any: importing its class would load everything before the options are read."""
    await app.serve()


@click.command(help=f"Check configuration files; every problem is told with its file, line and key. {_PATHS_HELP}")
@_paths
@click.option("--no-look", is_flag=True, help="Do not look for handlers and checkpoints on this machine.")
@json_option
def validate(paths: tuple[Path, ...], no_look: bool, as_json: bool) -> None:
    from gateway.config import load
    from gateway.view import function_json
    from manager.errors import InvalidConfig

    try:
        loaded = load.load(paths or (Path(),), os.environ, look=not no_look)
    except InvalidConfig as error:
        if as_json:
            print_json({"ok": False, **error.detail})
        raise
    if as_json:
        functions = {name: function_json(function) for name, function in sorted(loaded.functions.items())}
        print_json({"ok": True, "functions": functions, "files": [str(file) for file in loaded.files]})
    else:
        names = ", ".join(sorted(loaded.functions)) or "none"
        click.echo(f"{len(loaded.files)} files, {len(loaded.functions)} functions: {names}")


@click.command(help=f"What `apply` would change in a running gateway. {_PATHS_HELP}")
@_paths
@click.option("--own", is_flag=True, help="The gateway reads its own files again, instead of PATHS.")
@server_options
@json_option
def diff(paths: tuple[Path, ...], own: bool, server: str, token: str, as_json: bool) -> None:
    _show(_send(paths, own, server, token, dry_run=True), as_json)


@click.command(
    help="Replace the functions, tasks and resources of a running gateway. All or nothing; nothing in flight is "
    f"dropped, a changed function serves new invocations only. {_PATHS_HELP} Handlers and models stay where they "
    "are: on the gateway's disk."
)
@_paths
@click.option("--own", is_flag=True, help="The gateway reads its own files again, instead of PATHS.")
@server_options
@json_option
def apply(paths: tuple[Path, ...], own: bool, server: str, token: str, as_json: bool) -> None:
    _show(_send(paths, own, server, token, dry_run=False), as_json)


@click.command("config-schema")
@click.option("--markdown", is_flag=True, help="Print the tables of docs/reference/yaml.md instead.")
def config_schema(markdown: bool) -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from gateway.config import reference
    from gateway.config.document import schema

    click.echo(reference.markdown() if markdown else json.dumps(schema(), indent=2, sort_keys=True))


@click.command(help=f"This machine as the scheduler would see it. {_PATHS_HELP}")
@_paths
@json_option
def node(paths: tuple[Path, ...], as_json: bool) -> None:
    from gateway import machine
    from gateway.config import load
    from gateway.view import plain

    found = load.files_of(Path())
    loaded = load.load(paths or (Path(),), os.environ, look=False) if paths or found else load.GatewayConfig()
    described = machine.describe(loaded)
    if as_json:
        print_json(plain(described))
        return
    numa = "; ".join(" ".join(map(str, cores)) for cores in described.numa)
    print_table(
        ("NODE", "CORES", "NUMA", "MEMORY", "DEVICES", "DEVICE MEMORY"),
        [
            (
                described.name,
                described.cores,
                numa,
                show_size(described.memory_bytes),
                described.devices,
                show_size(described.device_bytes),
            )
        ],
    )


def _send(paths: tuple[Path, ...], own: bool, server: str, token: str, *, dry_run: bool) -> Mapping[str, Any]:
    from gateway.config import load
    from tangram import Client

    files = None
    if own and paths:
        raise click.UsageError("--own takes no PATHS: the gateway knows its files")
    if not own:
        sources, problems = load.read(paths or (Path(),))
        if problems:
            raise load.refusal(problems)
        files = {str(source.path.absolute()): source.text for source in sources}
    with Client(server, token=token) as client:
        return plain(client.apply(files, dry_run=dry_run))


def _show(diff: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(diff)
        return
    lines = [f"+ {name}" for name in diff["added"]]
    lines += [f"~ {name} ({', '.join(keys)})" for name, keys in diff["changed"].items()]
    lines += [f"- {name}" for name in diff["removed"]]
    lines += [f"~ task {name}" for name in diff["tasks"]]
    lines += [f"~ resource {name}" for name in diff["resources"]]
    lines += [f"! {key} needs a restart" for key in diff["needs_restart"]]
    click.echo("\n".join(lines) or "no change")
