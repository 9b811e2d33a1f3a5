"""The grammar of every door: durations ``500ms 30s 1h30m``, sizes ``512Mi 16Gi``, names and keys; nothing imported."""

from __future__ import annotations

import re

#: Seconds by unit.
DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

#: Bytes by unit: decimal and binary, as in Kubernetes.
SIZE_UNITS = {"B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}

#: Patterns without anchors, to be matched whole.
DURATION_PATTERN = r"(\d{1,9}(\.\d{1,6})?(ms|s|m|h|d))+"
#: A duration of a request, which may also be a bare number of seconds.
WAIT_PATTERN = rf"(\d{{1,9}}(\.\d{{1,6}})?|{DURATION_PATTERN})"
SIZE_PATTERN = r"\d{1,15}(\.\d{1,6})?(B|K|M|G|T|Ki|Mi|Gi|Ti)"
#: What callers name: functions, tasks, trajectories, invocations.
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}"
#: Container images: registry, path, tag and digest, as engines write them.
IMAGE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}"
#: Idempotency keys: visible ASCII.
KEY_PATTERN = r"[!-~]{1,255}"

_DURATION = re.compile(DURATION_PATTERN, re.ASCII)
_DURATION_PART = re.compile(r"([\d.]+)(ms|s|m|h|d)", re.ASCII)
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)
_SIZE = re.compile(SIZE_PATTERN, re.ASCII)
#: The same with numbers of any length: what is wrong with these is told.
_LONG_DURATION = re.compile(r"(\d+(\.\d+)?(ms|s|m|h|d))+", re.ASCII)
_LONG_SIZE = re.compile(r"\d+(\.\d+)?(B|K|M|G|T|Ki|Mi|Gi|Ti)", re.ASCII)
_DIGITS = "a number has at most {} digits before the point and 6 behind it"
_SIZE_PART = re.compile(r"([\d.]+)(\w+)", re.ASCII)
_NAME = re.compile(NAME_PATTERN, re.ASCII)
_KEY = re.compile(KEY_PATTERN, re.ASCII)


def duration_s(text: object) -> float:
    """Return the seconds of a duration; a number without its unit is refused. Raises ValueError with the remedy."""
    if not isinstance(text, str) or _DURATION.fullmatch(text) is None:
        if isinstance(text, str) and _LONG_DURATION.fullmatch(text):
            raise ValueError(f"{_shown(text)} is no duration: {_DIGITS.format(9)}")
        raise ValueError(f"{_shown(text)} is no duration: write a number with its unit, for example 500ms, 30s or 2m")
    return sum(float(number) * DURATION_UNITS[unit] for number, unit in _DURATION_PART.findall(text))


def wait_s(text: object) -> float:
    """Return the seconds of a request's duration: as `duration_s`, or a bare number of seconds. Raises ValueError."""
    if isinstance(text, str) and _SECONDS.fullmatch(text) is not None:
        return float(text)
    return duration_s(text)


def size_bytes(text: object) -> int:
    """Return the bytes of a size; a whole number without a unit counts bytes. Raises ValueError with the remedy."""
    if isinstance(text, int) and not isinstance(text, bool) and 0 <= text < 2**63:
        return text
    if not isinstance(text, str) or _SIZE.fullmatch(text) is None:
        if isinstance(text, str) and _LONG_SIZE.fullmatch(text):
            raise ValueError(f"{_shown(text)} is no size: {_DIGITS.format(15)}")
        raise ValueError(f"{_shown(text)} is no size: write a number with its unit, for example 512Mi or 16Gi")
    ((number, unit),) = _SIZE_PART.findall(text)
    return int(float(number) * SIZE_UNITS[unit])


def is_name(text: str) -> bool:
    """Return whether it may name a function, a task, a trajectory or an invocation."""
    return _NAME.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Return whether it may be an idempotency key."""
    return _KEY.fullmatch(text) is not None


def show_duration(seconds: float) -> str:
    """Return a duration for people, three figures at most: ``12.3ms``, ``4.5s``, ``2m05s``, ``3h20m``, ``2d04h``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g}ms" if seconds > 0 else "0s"
    if seconds < 59.95:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def write_duration(seconds: float) -> str:
    """Return a duration as `duration_s` reads it, exact to the millisecond: ``10m``, ``1500ms``."""
    milliseconds = round(seconds * 1000)
    unit, size = next(
        (unit, size)
        for unit, size in sorted(DURATION_UNITS.items(), key=lambda item: -item[1])
        if milliseconds % round(size * 1000) == 0
    )
    return f"{milliseconds // round(size * 1000)}{unit}"


def show_size(count_bytes: float) -> str:
    """Return a size for people: ``512Mi``, ``1.5Gi``."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if count_bytes >= SIZE_UNITS[unit]:
            return f"{count_bytes / SIZE_UNITS[unit]:.4g}{unit}"
    return f"{count_bytes:.0f}B"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
