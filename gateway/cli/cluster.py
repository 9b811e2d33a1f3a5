"""The verb that looks at a Ray cluster before its machines are to serve."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec

from manager.errors import CodedError, InvalidInput
from runtimes.node.ray.keeper import RayMembers, RayNode, Reservation
from runtimes.node.ray.process import KEEPER
from tangram.cli.options import Duration, json_option
from tangram.cli.output import print_json, show, table, visible


class RayUnseen(CodedError):
    """The Ray cluster cannot be looked at."""

    code = "action_failed"


@click.group()
def cluster() -> None:
    """Look at the Ray cluster whose machines may serve."""


@cluster.command("check")
@click.option("--address", default="auto", show_default=True, help="the head's, such as head:6379")
@click.option("--python", default=sys.executable, help="an interpreter with the cluster's own Ray")
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="of the machines that are wanted; repeatable"
)
@click.option("--head", is_flag=True, help="the head's machine is wanted too")
@click.option("--cpus", type=click.FloatRange(min=0), help="to be reserved on each; all by default")
@click.option("--gpus", type=click.FloatRange(min=0), default=0.0, show_default=True, help="likewise")
@click.option(
    "--within", "within_s", type=Duration(), default="1m", show_default=True, help="longest that Ray may take"
)
@json_option
def check(
    address: str,
    python: str,
    labels: tuple[str, ...],
    head: bool,
    cpus: float | None,
    gpus: float,
    within_s: float,
    as_json: bool,
) -> None:
    """Say which machines would be taken, and what is in the way."""
    reservation = Reservation(cpus=cpus, gpus=gpus)
    members = RayMembers(_labels(labels), head=head, reservation=reservation)
    seen = look(python, address, within_s)
    rows = list(machines(seen, members, reservation))
    notes = list(_notes(seen, rows))
    if as_json:
        print_json({"ok": not notes, "ray": seen.get("version"), "machines": rows, "notes": notes})
    else:
        show(table(("MACHINE", "ADDRESS", "CPUS", "GPUS", "FREE", "TAKEN"), [_row(each) for each in rows]))
        for note in notes:
            click.echo(visible(f"note: {note}"))
    raise SystemExit(1 if notes else 0)


def look(python: str, address: str, within_s: float) -> dict[str, Any]:
    """Return what a keeper sees there; raises RayUnseen with Ray's words."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, str(KEEPER), "look", address], capture_output=True, timeout=within_s, env=environment
        )
    except subprocess.TimeoutExpired:
        raise RayUnseen(f"{address} did not answer within {within_s:g} s", component="cluster") from None
    except OSError as error:
        raise RayUnseen(f"{python} cannot be run: {error}", component="cluster") from None
    try:
        seen = msgspec.json.decode(done.stdout, type=dict[str, Any])
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise RayUnseen(
            f"{python} says nothing of a cluster: {said or 'nothing at all'}", component="cluster"
        ) from None
    if "why" in seen:
        raise RayUnseen(f"{address}, seen by Python {seen['python']}: {seen['why']}", component="cluster")
    return seen


def machines(seen: Mapping[str, Any], members: RayMembers, reservation: Reservation) -> Iterator[dict[str, object]]:
    """Each living machine: what it has, what of it is free, and whether it would be taken or why not yet."""
    for each in seen["nodes"]:
        resources = dict(each["total"]) | ({"node:__internal_head__": 1.0} if each["head"] else {})
        node = RayNode(id=each["id"], alive=True, labels=each["labels"], resources=resources)
        asked = dict(zip(("CPU", "GPU"), reservation.on(node), strict=True))
        free = each["free"]
        lacking = [f"{asked[name]:g} {name}s asked, {free[name]:g} free" for name in free if free[name] < asked[name]]
        taken = "no"
        if members.wants(node):
            taken = "draining" if each["draining_ms"] else "; ".join(lacking) or "yes"
        yield {"id": each["id"], "address": each["address"], "total": each["total"], "free": free, "taken": taken}


def _notes(seen: Mapping[str, Any], rows: list[dict[str, object]]) -> Iterator[str]:
    wanted = [row for row in rows if row["taken"] != "no"]
    if not wanted:
        yield "no machine would be taken: see --label and --head"
    for row in wanted:
        if row["taken"] != "yes":
            yield f"{str(row['id'])[:12]} would wait: {row['taken']}"
    if not seen["token"]:
        yield "no token (RAY_AUTH_MODE=token): whoever reaches the head's port runs code on every machine"


def _row(each: Mapping[str, Any]) -> tuple[object, ...]:
    total, free = each["total"], each["free"]
    left = f"{free['CPU']:g} CPUs, {free['GPU']:g} GPUs" if free else "not told"
    return each["id"][:12], each["address"], f"{total['CPU']:g}", f"{total['GPU']:g}", left, each["taken"]


def _labels(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for key, sign, value in pairs:
        if not key or not sign or not value:
            raise InvalidInput(f"--label {key}{sign}{value} is not KEY=VALUE", component="cluster")
    return {key: value for key, _, value in pairs}
