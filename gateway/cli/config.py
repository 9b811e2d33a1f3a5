"""Verbs on the configuration and the server itself: serve, validate, config-schema, node."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from gateway.cli import beginning
from gateway.config.load import GatewayConfig
from tangram.cli import exit_status
from tangram.cli.options import json_option, paths_argument
from tangram.cli.output import print_json, say, show, table
from tangram.types import files_of, show_size


@click.command()
@paths_argument
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
    default="info",
    show_default=True,
    help="Level of the gateway's own log.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "json", "text"]),
    default="auto",
    show_default=True,
    help="auto: lines for people on a terminal, JSON elsewhere.",
)
@click.option(
    "--weaker-isolation", is_flag=True, help="Serve sandboxes that are weaker than those the state directory served."
)
def serve(paths: tuple[Path, ...], log_level: str, log_format: str, weaker_isolation: bool) -> None:
    """Serve until SIGTERM, then drain."""
    # Nothing that is imported and read at the start is garbage, and looking for some takes a tenth of the time.
    gc.disable()
    import uvloop

    from gateway import app
    from gateway.config import load
    from gateway.invocations import logs

    logs.configure(log_level, for_people=log_format == "text" or (log_format == "auto" and sys.stderr.isatty()))
    served = beginning.chosen(paths)
    config = load.load(served, os.environ)
    provider = replace(config.sandbox.provider, weaker=weaker_isolation)
    config = replace(config, sandbox=replace(config.sandbox, provider=provider))
    if served == (beginning.NONE,):
        beginning.tell_missing_image(config)

    async def run() -> None:
        async with app.gateway(config, paths=served, env=os.environ) as running:
            click.echo(f"page: {running.page}")
            gc.freeze()
            gc.enable()
            await running.serve()

    uvloop.run(run())


@click.command()
@paths_argument
@click.option("--no-look", is_flag=True, help="Do not look for handlers and checkpoints on this machine.")
@json_option
def validate(paths: tuple[Path, ...], no_look: bool, as_json: bool) -> None:
    """Check configuration files; every problem is told with its file, line and key.

    What this machine would refuse of a valid one (cores, images, torch) is warned of on standard error.
    """
    from gateway.config import load
    from gateway.functions import function_info
    from manager.errors import InvalidConfig

    try:
        loaded = load.load(paths or (Path(),), os.environ, look=not no_look)
    except InvalidConfig as error:
        if as_json:
            print_json({"ok": False, **error.detail})
            raise click.exceptions.Exit(exit_status.of_code(error.code)) from None
        raise
    warnings = [] if no_look else _warnings(loaded)
    if as_json:
        functions = {
            name: msgspec.to_builtins(function_info(function)) for name, function in sorted(loaded.functions.items())
        }
        files = [str(file) for file in loaded.files]
        print_json({"ok": True, "functions": functions, "files": files, "warnings": warnings})
    else:
        names = ", ".join(sorted(loaded.functions)) or "none"
        click.echo(f"{len(loaded.files)} files, {len(loaded.functions)} functions: {names}")
        for each in warnings:
            say(f"warning: {each}")


def _warnings(config: GatewayConfig) -> list[str]:
    from gateway.cli.foresight import foretold, silence

    with silence():
        return [f"{each.what}: {each.told}" for each in foretold(config) if each.state == "missing"]


@click.command("config-schema")
@click.option("--markdown", is_flag=True, help="Print the tables of docs/reference/yaml.md instead.")
def config_schema(markdown: bool) -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from gateway.config import reference
    from gateway.config.document import schema

    click.echo(reference.markdown() if markdown else json.dumps(schema(), indent=2, sort_keys=True))


@click.command("show")
@paths_argument
@json_option
def node(paths: tuple[Path, ...], as_json: bool) -> None:
    """This machine as the scheduler would see it."""
    from gateway import machine
    from gateway.config import load

    found = files_of(Path())
    loaded = load.load(paths or (Path(),), os.environ, look=False) if paths or found else load.GatewayConfig()
    described = machine.describe(loaded)
    if as_json:
        print_json(msgspec.to_builtins(described, enc_hook=str))
        return
    numa = "; ".join(" ".join(map(str, cores)) for cores in described.numa)
    show(
        table(
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
    )
