"""What the machine is doing, by pool and by device, and what waits: printed, without a screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NoReturn

import msgspec
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from tangram import Client
from tangram.cli.printing.output import print_json, rendered, rows_table, show, table, tree
from tangram.types import ModelDevice, ModelsInfo, PlacedModel, QueueEntry, ResourcesInfo, StepInfo
from tangram.types.values.quantities import show_size

#: Waiting actions that are shown.
QUEUE_SHOWN = 20


def repeat(client: Client, interval_s: float, as_json: bool) -> NoReturn:
    """Show the state again and again: in place on a terminal, one print after the other elsewhere."""
    if as_json or not sys.stdout.isatty():
        while True:
            print_state(client, as_json)
            time.sleep(interval_s)
    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            lines = rendered(*view(*_state(client)))
            screen.update(Text.from_ansi(lines, no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(interval_s)


def _state(client: Client) -> tuple[ResourcesInfo, int, Sequence[QueueEntry], Sequence[StepInfo]]:
    tasks = client.tasks()
    steps = [step for task in tasks for step in task.steps]
    return client.resources(), sum(task.queued for task in tasks), client.queue(QUEUE_SHOWN), steps


def print_state(client: Client, as_json: bool) -> None:
    """Print the state once."""
    resources, waiting, queue, steps = _state(client)
    if as_json:
        print_json({"resources": resources, "waiting": waiting, "queue": queue, "steps": steps})
    else:
        show(*view(resources, waiting, queue, steps))


def view(
    resources: ResourcesInfo, waiting: int, queue: Sequence[QueueEntry], steps: Sequence[StepInfo] = ()
) -> Iterator[RenderableType]:
    """Yield what is shown: a section for each kind of resource, steps that go on, then the queue."""
    for section, value in msgspec.to_builtins(resources).items():
        if section == "models":
            yield from models_view(resources.models)
        elif isinstance(value, dict) and value and all(isinstance(each, dict) for each in value.values()):
            yield section
            yield rows_table([{"name": name, **each} for name, each in value.items()])
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            yield section
            yield rows_table(value)
        else:
            yield tree({section: value})
        yield ""
    if steps:
        yield "steps"
        yield rows_table(msgspec.to_builtins(steps))
        yield ""
    yield f"queue: {waiting} waiting"
    if queue:
        yield rows_table(msgspec.to_builtins(queue))


def models_view(models: ModelsInfo) -> Iterator[RenderableType]:
    """Yield the counters of the model slots, and the chunk map: each device with what it computes and holds."""
    fields: Mapping[str, Any] = msgspec.to_builtins(models)
    shown: dict[str, object] = {name: value for name, value in fields.items() if isinstance(value, int | float)}
    if host := fields["host_images"]:
        bytes_of = f"{show_size(host['bytes'])} of {show_size(host['bound_bytes'])}"
        shown["host_images"] = f"{host['count']}, {bytes_of}"
    yield tree({"models": shown})
    if models.devices:
        yield ""
        yield table(
            ("DEVICE", "KIND", "STATE", "COMPUTES", "HOLDS", "RESIDENT", "OF", "USED", "RUNS", "SWAPS", "HIT RATE"),
            [_device(each) for each in models.devices],
        )


def _device(device: ModelDevice) -> tuple[object, ...]:
    return (
        device.index,
        device.name,
        "alive" if device.alive else "dead",
        None if device.running is None else _placed(device.running),
        " ".join(_placed(each) for each in device.resident) or None,
        show_size(device.resident_bytes),
        show_size(device.arena_bytes),
        None if device.used_bytes is None else show_size(device.used_bytes),
        device.executions,
        device.swaps,
        f"{device.hit_rate:.0%}",
    )


def _placed(model: PlacedModel) -> str:
    """Return a service and the devices of its chunk: ``teacher:lm@0-3``."""
    start, size = model.chunk
    devices = str(start) if size == 1 else f"{start}-{start + size - 1}"
    return f"{PurePath(model.service).name}@{devices}"
