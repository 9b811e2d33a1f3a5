"""What `tangram init` writes, and what is served where there is no configuration."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from gateway.config.load import GatewayConfig
from manager.errors import Conflict
from runtimes.sandbox.provider import docker_installed
from tangram.cli.options import json_option
from tangram.cli.output import print_json
from tangram.types import files_of

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
#: Served where a directory has no configuration, and not written by `init`.
NONE = TEMPLATES / "none.yaml"


def chosen(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return what is to be served: the paths, else this directory, else `NONE`, and say so."""
    if paths or files_of(Path()):
        return tuple(paths) or (Path(),)
    click.echo("no tangram.yaml here: serving shell and pytest_reward; `tangram init` writes one", err=True)
    return (NONE,)


def tell_missing_image(config: GatewayConfig) -> None:
    """Say the one command that makes the base image, where there is an engine and it has none."""
    settings, image = config.sandbox.provider, config.sandbox.default.image
    if settings.kind not in ("auto", "container") or not docker_installed(settings.docker.host):
        return
    from runtimes.sandbox.docker import images as base_image  # docker takes a while to import

    if base_image.lacks(image, settings.docker.host):
        click.echo(f"the base image {image} is missing: run `{base_image.remedy(image)}`", err=True)


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path())
@json_option
def init(directory: Path, as_json: bool) -> None:
    """Write a commented tangram.yaml and a function of each kind."""
    files = [file for file in sorted(TEMPLATES.rglob("*")) if file.is_file() and file != NONE]
    targets = {file: directory / file.relative_to(TEMPLATES) for file in files if "__pycache__" not in file.parts}
    there = [str(target) for target in targets.values() if target.exists()]
    if there:
        raise Conflict(f"{', '.join(there)}: there already; nothing was written", component="init")
    for file, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    written = [str(target) for target in targets.values()]
    if as_json:
        print_json({"written": written})
        return
    click.echo("\n".join(written))
    place = "" if directory == Path() else f" {directory}"
    click.echo(f"next: tangram doctor{place}; tangram serve{place}", err=True)
