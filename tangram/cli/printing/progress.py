"""How far long work is, shown on a terminal's standard error and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import Progress


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
