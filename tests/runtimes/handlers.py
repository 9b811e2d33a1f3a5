"""Handlers made by hand: a directory with a ``handler.py`` whose ``score`` is called."""

from __future__ import annotations

from pathlib import Path

from manager.function import HandlerSpec


def handler_in(directory: Path, *, instances_max: int = 4, requirements: tuple[str, ...] = ()) -> HandlerSpec:
    """``handler:score`` of a directory, one action in an instance at a time, none kept."""
    return HandlerSpec(
        module="handler",
        callable="score",
        directory=directory,
        per_instance=1,
        instances_min=0,
        instances_max=instances_max,
        idle_s=300.0,
        requirements=requirements,
    )
