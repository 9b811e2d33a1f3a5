"""`tangram backup`, `clean` and `image`."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from manager.errors import CodedError, Unsupported
from manager.function import BASE_IMAGE
from runtimes.sandbox.docker import images as base_image
from runtimes.sandbox.provider import SERVED
from runtimes.sandbox.sandbox import LocalOrphans, Orphan, Orphans
from runtimes.sandbox.spec import SANDBOXES
from tangram.cli.options import json_option, paths_argument
from tangram.cli.output import TableColumn, print_either, print_json, say, show, table
from tangram.cli.state import images
from tangram.types import show_size


@click.command()
@click.argument("into", type=click.Path(path_type=Path))
@paths_argument
@json_option
def backup(into: Path, paths: tuple[Path, ...], as_json: bool) -> None:
    """Copy the record to the file INTO, of one instant; the gateway may serve meanwhile.

    \b
    tangram backup tangram.sqlite
    """
    from gateway.store.maintenance import DATABASE
    from gateway.store.maintenance import backup as copy

    size_bytes = copy(_state_dir(paths) / DATABASE, into)
    print_either({"file": str(into), "bytes": size_bytes}, as_json, f"{into}: {show_size(size_bytes)}")


@click.command()
@click.argument("copy", type=click.Path(path_type=Path, exists=True))
@paths_argument
@click.option("--replace", is_flag=True, help="Move the record that is there aside.")
@json_option
def restore(copy: Path, paths: tuple[Path, ...], replace: bool, as_json: bool) -> None:
    """Put a COPY of `backup` back into the state directory, from which no gateway may serve.

    \b
    tangram restore tangram.sqlite --replace
    """
    from gateway.store.maintenance import restore as put

    state_dir = _state_dir(paths)
    aside = put(copy, state_dir, replace=replace)
    print_either(
        {"state_dir": str(state_dir), "aside": None if aside is None else str(aside)},
        as_json,
        f"{state_dir}: restored" + ("" if aside is None else f"; what was there is {aside}"),
    )


def _state_dir(paths: tuple[Path, ...]) -> Path:
    from gateway.config import load

    return load.load(paths or (Path(),), os.environ, look=False).server.state_dir


@click.command()
@click.argument("names", nargs=-1)
@click.option("--yes", is_flag=True, help="Remove it; without, it is only shown.")
@click.option("--all", "everything", is_flag=True, help="Also what a living gateway may need.")
@click.option(
    "--host", metavar="URL", default="", help="The Docker engine, by default DOCKER_HOST or the usual socket."
)
@json_option
def clean(names: tuple[str, ...], yes: bool, everything: bool, host: str, as_json: bool) -> None:
    """Show, and with --yes remove, what gateways left on this machine and on its engine.

    NAMES are of what is to be removed, or state directories: those alone, whoever needs them. By default it is
    everything of ours that no living gateway holds: containers, networks, process sandboxes, their directories and
    control groups, and snapshots.

    \b
    tangram clean
    tangram clean --yes
    """
    result = _found(host, names)
    if names:
        result = [(orphans, one) for orphans, one in result if {one.name, one.state_dir} & _meant(names)]
    verdicts = [(orphans, one, bool(names) or everything or not one.held) for orphans, one in result]
    removed: list[Orphan] = []
    failed: list[Orphan] = []
    for orphans, orphan, wanted in verdicts:
        if yes and wanted:
            complaint = _removed(orphans, orphan)
            (failed if complaint else removed).append(orphan)
            if complaint:
                say(f"{orphan.kind} {orphan.name}: {complaint}")
    if as_json:
        print_json(
            {
                "found": [{**msgspec.to_builtins(one), "removable": wanted} for _, one, wanted in verdicts],
                "removed": [one.name for one in removed],
                "failed": [one.name for one in failed],
            }
        )
    else:
        _show(verdicts, removed, yes=yes)
    if failed:
        raise SystemExit(1)


def _found(host: str, names: tuple[str, ...]) -> list[tuple[Orphans, Orphan]]:
    """Return what there is on the engine, if there is one, and on this machine, each with who can remove it."""
    from runtimes.sandbox.docker.engine import EngineConnection, EngineOrphans

    try:
        engine = EngineOrphans(EngineConnection.open(host, timeout_s=60.0, workers=1))
    except Unsupported as error:
        if host:
            raise
        say(f"no containers are looked for: {error.message}")
        local = LocalOrphans(_meant(names))
        return [(local, one) for one in local.find()]
    result: list[tuple[Orphans, Orphan]] = [(engine, one) for one in engine.find()]
    local = LocalOrphans({*_meant(names), *engine.state_dirs}, engine.sandboxes)
    return result + [(local, one) for one in local.find()]


def _meant(names: tuple[str, ...]) -> set[str]:
    """Return the names, and as paths the directories that they stand for.

    A gateway, or a node, has its sandboxes one level below its own state directory.
    """
    meant = set[str]()
    for name in names:
        if "/" not in name and not Path(name).exists():
            meant.add(name)
            continue
        place = Path(name).absolute()
        meant |= _sandboxes(place)
    return meant


def _sandboxes(place: Path) -> set[str]:
    below = place / SANDBOXES
    is_gateways = (below / SERVED).is_file() or (below / SANDBOXES).is_dir()
    return {str(below)} if is_gateways else {str(place)} if place.exists() else {str(place), str(below)}


def _removed(orphans: Orphans, orphan: Orphan) -> str:
    """Remove it; return why that failed, or nothing."""
    try:
        orphans.remove(orphan)
    except (CodedError, OSError) as error:
        return str(error)
    return ""


def _show(verdicts: list[tuple[Orphans, Orphan, bool]], removed: list[Orphan], *, yes: bool) -> None:
    rows = [
        (
            one.kind,
            one.name,
            one.state_dir or "-",
            one.why,
            "removed" if one in removed else "yes" if wanted else "kept",
        )
        for _, one, wanted in verdicts
    ]
    if rows:
        show(table(("KIND", TableColumn("NAME"), "STATE DIRECTORY", "WHY", "REMOVED" if yes else "WITH --yes"), rows))
    elif not yes:
        click.echo("nothing was left behind")


@images.command("build")
@click.option("--tag", metavar="IMAGE", default=BASE_IMAGE, show_default=True, help="What to call it.")
@click.option(
    "--from",
    "source",
    default="",
    metavar="IMAGE",
    help="A Debian image to build upon; by default debootstrap where this machine has it and you are root, "
    f"else {base_image.SOURCE}.",
)
@click.option("--again", is_flag=True, help="Build it also if it is there.")
@click.option(
    "--host", metavar="URL", default="", help="The Docker engine, by default DOCKER_HOST or the usual socket."
)
@json_option
def build_image(tag: str, source: str, again: bool, host: str, as_json: bool) -> None:
    """Build the base image (Debian, python3, pytest) on the engine, unless it is there.

    \b
    tangram images build
    """
    built = base_image.build(tag, source=source, host=host, again=again, say=say)
    print_either(
        {"image": tag, "built": built},
        as_json,
        f"{tag} is ready" if built else f"{tag} is there already (--again builds it anew)",
    )
