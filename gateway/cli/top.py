"""``tangram top``: what the machine is doing, by pool and by device, and what waits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import click

from gateway.cli.output import Duration, json_option, plain, print_json, print_table, server_options
from gateway.cli.state import print_rows, print_tree
from gateway.config.quantities import show_size
from tangram import Client

#: Waiting actions that are shown.
QUEUE_SHOWN = 20


@click.command()
@click.option("--interval", "interval_s", type=Duration(), help="Show it again and again.")
@server_options
@json_option
def top(interval_s: float | None, server: str, token: str, as_json: bool) -> None:
    """What the machine is doing: resources, who holds them, and what waits for what."""
    with Client(server, token=token) as client:
        while True:
            resources = plain(client.resources())
            queue = [plain(each) for each in client.queue(QUEUE_SHOWN)]
            waiting = sum(task.queued for task in client.tasks())
            if as_json:
                print_json({"resources": resources, "waiting": waiting, "queue": queue})
            else:
                if interval_s is not None:
                    click.clear()
                _print(resources, waiting, queue)
            if interval_s is None:
                return
            time.sleep(interval_s)


def _print(resources: Mapping[str, Any], waiting: int, queue: Sequence[Mapping[str, Any]]) -> None:
    for section, value in resources.items():
        if section == "models":
            _print_models(value)
        elif isinstance(value, Mapping) and value and all(isinstance(each, Mapping) for each in value.values()):
            click.echo(section)
            print_rows([{"name": name, **each} for name, each in value.items()], as_json=False)
        else:
            print_tree({section: value})
        click.echo()
    click.echo(f"queue: {waiting} waiting")
    print_rows(queue, as_json=False)


def _print_models(models: Mapping[str, Any]) -> None:
    """The counters of the model slots, and the chunk map: each device with what it computes and what it holds."""
    shown: dict[str, object] = {name: value for name, value in models.items() if isinstance(value, int | float)}
    if host := models["host_images"]:
        shown["host_images"] = f"{host['count']}, {show_size(host['bytes'])} of {show_size(host['bound_bytes'])}"
    print_tree({"models": shown})
    if models["devices"]:
        click.echo()
        print_table(
            ("DEVICE", "KIND", "STATE", "COMPUTES", "HOLDS", "RESIDENT", "OF", "USED", "RUNS", "SWAPS", "HIT RATE"),
            [_device(each) for each in models["devices"]],
        )


def _device(device: Mapping[str, Any]) -> tuple[object, ...]:
    running, used = device["running"], device["used_bytes"]
    return (
        device["index"],
        device["name"],
        "alive" if device["alive"] else "dead",
        "-" if running is None else _placed(running),
        " ".join(_placed(each) for each in device["resident"]) or "-",
        show_size(device["resident_bytes"]),
        show_size(device["arena_bytes"]),
        None if used is None else show_size(used),
        device["executions"],
        device["swaps"],
        f"{device['hit_rate']:.0%}",
    )


def _placed(slot: Mapping[str, Any]) -> str:
    """A service and the devices of its chunk: ``teacher:lm@0-3``."""
    start, size = slot["chunk"]
    devices = str(start) if size == 1 else f"{start}-{start + size - 1}"
    return f"{PurePath(slot['service']).name}@{devices}"
