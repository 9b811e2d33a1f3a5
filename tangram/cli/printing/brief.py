"""Numbers in few signs, for lists and for `top`: durations, counts, bytes, ids."""

from __future__ import annotations

import re

_SHORT = re.compile(r"0*([0-9a-f]+)-[0-9a-f]{12}")


def seconds(value: float | None) -> str:
    """Return a duration in six signs at most: ``47ms``, ``1.9s``, ``48s``, ``2m13``, ``3h20``, ``2d4``, or ``-``."""
    if value is None:
        return "-"
    value = max(0.0, value)
    if value < 0.9995:
        return f"{value * 1000:.0f}ms" if value >= 0.0005 else "0s"
    if value < 9.95:
        return f"{value:.1f}s"
    if value < 59.5:
        return f"{value:.0f}s"
    minutes = round(value / 60) if value >= 3600 else int(round(value) // 60)
    if minutes < 60:
        return f"{minutes}m{round(value) % 60:02d}"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}" if hours < 48 else f"{hours // 24}d{hours % 24}"


def count(value: float) -> str:
    """Return a count in at most five signs: ``2710``, ``128k``, ``3.4M``."""
    if value < 10_000:
        return f"{value:.0f}"
    if value < 1_000_000:
        return f"{value / 1000:.0f}k"
    return f"{value / 1_000_000:.1f}M"


def short_id(id: str) -> str:
    """Return what tells an invocation of all others of its gateway: its number, without zeros before it."""
    found = _SHORT.match(id)
    return id if found is None else found[1]
