"""``tangram image``: the base image of sandboxes, from what is installed."""

from __future__ import annotations

import click

from manager.function import BASE_IMAGE
from runtimes.sandbox.docker import images
from tangram.cli.options import json_option
from tangram.cli.output import print_json, say


@click.group()
def image() -> None:
    """The base image of sandboxes."""


@image.command("build")
@click.option("--tag", default=BASE_IMAGE, show_default=True, help="What to call it.")
@click.option(
    "--from",
    "source",
    default="",
    metavar="IMAGE",
    help="A Debian image to build upon; by default debootstrap where this machine has it and you are root, "
    f"else {images.SOURCE}.",
)
@click.option("--again", is_flag=True, help="Build it also if it is there.")
@click.option("--host", default="", help="The Docker engine, by default DOCKER_HOST or the usual socket.")
@json_option
def build_image(tag: str, source: str, again: bool, host: str, as_json: bool) -> None:
    """Build the base image (Debian, python3, pytest) on the engine, unless it is there."""
    built = images.build(tag, source=source, host=host, again=again, say=say)
    if as_json:
        print_json({"image": tag, "built": built})
    else:
        click.echo(f"{tag} is ready" if built else f"{tag} is there already (--again builds it anew)")
