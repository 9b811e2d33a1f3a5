"""How far long work is, shown on a terminal's standard error and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from tangram.cli.printing.output import say, visible
from tangram.types.values.quantities import show_size

#: Seconds between two looks at transfers: for a bar that moves, and for words in a log.
LOOK_S, WORD_S = 1.0, 10.0


@contextmanager
def progress(parts: int) -> Iterator[Callable[[str], None]]:
    """Show a bar of so many parts; yields what is told the name of each part as it begins."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    with Progress(console=Console(stderr=True), transient=True) as shown:
        bar = shown.add_task("", total=parts)
        begun = count()
        yield lambda name: shown.update(bar, description=name, completed=next(begun))


@contextmanager
def copying(what: str, files: int, size_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of the bytes of so many files, and how many of these are there.

    Yields what is told of how many files more are there, and of their bytes.
    """
    if not sys.stderr.isatty():
        yield lambda files, size_bytes: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    counted = TextColumn("{task.fields[files]} of {task.fields[of]} files")
    with Progress(*columns, counted, console=Console(stderr=True), transient=True) as shown:
        bar = shown.add_task(escape(visible(what)), total=size_bytes or None, files=0, of=files)
        there = 0

        def copied(more: int, more_bytes: int) -> None:
            nonlocal there
            there += more
            shown.update(bar, advance=more_bytes, files=there)

        yield copied


@contextmanager
def transfers() -> Iterator[tuple[float, Callable[[str, int, int], None]]]:
    """Show a bar for each of several transfers, or say how far they are where nobody looks at a terminal.

    Yields how many seconds are to pass between two looks, and what is told a transfer's name, the bytes that have come
    and those that are known to come (0: unknown).
    """
    if not sys.stderr.isatty():
        yield WORD_S, lambda name, done, total: say(f"{name}: {show_size(done)} of {show_size(total)}")
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        bars: dict[str, TaskID] = {}

        def tell(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = shown.add_task(escape(visible(name)), total=None)
            shown.update(bars[name], completed=done, total=total or None)

        yield LOOK_S, tell
