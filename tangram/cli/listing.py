"""The list of `tangram ps`: everything where it is read by programs, what fits where people look."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime

import click

from tangram import InvocationResult
from tangram.cli.printing import brief
from tangram.cli.printing.columns import ListColumn, fit, line
from tangram.cli.printing.output import show, show_seconds, table, visible

COLUMNS = (
    ListColumn("ID", 4, 24),
    ListColumn("FUNCTION", 13, 24),
    ListColumn("TASK", 8, 20, rank=4),
    ListColumn("TRAJECTORY", 8, 20, rank=3),
    ListColumn("STATE", 6, 9),
    ListColumn("REASON", 7, 16, rank=2),
    ListColumn("AGE", 5, 6, right=True, rank=1),
    ListColumn("QUEUE", 5, 6, right=True, rank=6),
    ListColumn("OVERHEAD", 6, 8, right=True, rank=8),
    ListColumn("EXECUTION", 6, 9, right=True, rank=5),
    ListColumn("UNITS", 5, 16, rank=7),
)
_COLOURS = {"running": "green", "queued": "yellow", "failed": "red", "timed_out": "red", "lost": "red"}


def show_list(found: Sequence[InvocationResult], now: datetime) -> None:
    """Print invocations: cut to the terminal's width on one, whole elsewhere."""
    if not sys.stdout.isatty():
        show(table([each.title for each in COLUMNS], [_whole(each, now) for each in found]))
        return
    width = shutil.get_terminal_size().columns
    rows = [_brief(each, now) for each in found]
    fitted = fit(COLUMNS, rows, width)
    plain = bool(os.environ.get("NO_COLOR"))
    click.echo(line(COLUMNS, fitted, [each.title for each in COLUMNS]))
    for each, row in zip(found, rows, strict=True):
        text, colour = line(COLUMNS, fitted, row), _COLOURS.get(each.state)
        click.echo(text if plain or colour is None else click.style(text, fg=colour))


def _whole(each: InvocationResult, now: datetime) -> tuple[object, ...]:
    times = (_age_s(each, now), each.queue_s, each.overhead_s, each.execution_s)
    named = (each.id, each.function, each.task, each.trajectory, each.state, each.reason)
    return (*named, *map(show_seconds, times), dict(sorted(each.units.items())))


def _brief(each: InvocationResult, now: datetime) -> tuple[str, ...]:
    times = (_age_s(each, now), each.queue_s, each.overhead_s, each.execution_s)
    units = ",".join(f"{count} {kind}" for kind, count in sorted(each.units.items()))
    named = (each.function, each.task, each.trajectory or "-", each.state, each.reason or "-")
    return (brief.short_id(each.id), *map(visible, named), *map(brief.seconds, times), units or "-")


def _age_s(each: InvocationResult, now: datetime) -> float:
    """Return the seconds since it was accepted; the clocks of two machines may differ."""
    return max(0.0, (now - each.accepted_at).total_seconds())
