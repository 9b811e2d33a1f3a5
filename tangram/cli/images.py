"""``tangram images``: container images, pulled ahead of a run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tangram import Client
from tangram.cli.options import connected, json_option
from tangram.cli.printing.output import print_json, show, table
from tangram.cli.printing.progress import transfers
from tangram.types import ImageInfo
from tangram.types.values.quantities import show_size


@click.group()
def images() -> None:
    """The container images of the gateway's sandboxes."""


@images.command("list")
@json_option
@connected
def list_images(client: Client, as_json: bool) -> None:
    """List the images, and how far pulls are."""
    _show(client.images(), as_json)


@images.command("pull")
@click.argument("names", nargs=-1, required=True)
@click.option("--no-wait", is_flag=True, help="Do not wait for the pulls to end.")
@json_option
@connected
def pull_images(client: Client, names: tuple[str, ...], no_wait: bool, as_json: bool) -> int:
    """Pull images ahead of a run; the status is 1 if one could not be."""
    found = client.pull_images(names)
    with transfers() as (look_s, tell):
        while not no_wait and any(each.state == "pulling" for each in found):
            wanted = [each.image for each in found if each.state != "failed"]
            found = client.pull_images(wanted, wait_s=look_s) or found
            for each in found if not as_json else ():
                if each.state == "pulling":
                    tell(each.image, each.done_bytes, each.total_bytes)
    _show(client.images() if no_wait else [each for each in client.images() if _named(each.image, names)], as_json)
    return int(any(each.state == "failed" and _named(each.image, names) for each in client.images()))


def _named(image: str, names: Sequence[str]) -> bool:
    return image in names or image.removesuffix(":latest") in names


def _show(found: Sequence[ImageInfo], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.image,
            each.state,
            show_size(each.size_bytes),
            "yes" if each.pulled else "",
            "yes" if each.kept else "",
            each.problem,
        )
        for each in found
    ]
    show(table(("IMAGE", "STATE", "SIZE", "PULLED", "KEPT", "PROBLEM"), rows))
