"""What a person or a program reads of a verb: JSON, tables, records, logs, sizes, times and progress."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import count
from textwrap import wrap
from typing import Any, NamedTuple

import click
import msgspec
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from tangram.types import UNSET, LogLine, show_duration, show_size

#: How many signs of a terminal a text takes.
cells_of = cell_len
#: What stands for the end of a cell that was cut, and the spaces between columns.
CUT, GAP = "~", "  "
#: The colour of a state on a terminal; others have none.
COLOURS: Mapping[str, str] = {
    **dict.fromkeys(("running", "ready", "alive", "ok", "serving"), "green"),
    **dict.fromkeys(("queued", "waiting", "pulling", "joining", "suspect", "draining", "ending"), "yellow"),
    **dict.fromkeys(("failed", "timed_out", "lost", "unavailable", "unfit", "dead", "missing"), "red"),
}
#: Columns whose cells are states.
STATES = frozenset({"STATE", "STATUS"})
#: Columns whose cells are cut at their beginning: names of rollouts differ at their end.
ENDS = frozenset({"TRAJECTORY"})
_FIGURE = re.compile(r"-|[\d.]+[a-zA-Z%]{0,2}(\d+[smh])?")
#: Control characters beyond ASCII: a terminal obeys them, or they hide or turn round what stands beside them.
_CONTROL_BEYOND_ASCII = (
    "\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
_BEYOND_ASCII = re.compile(f"[{_CONTROL_BEYOND_ASCII}]")
#: Those of ASCII too, but for tab and line feed.
_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f{_CONTROL_BEYOND_ASCII}]")
_INVOCATION_ID = re.compile(r"0*([0-9a-f]+)-[0-9a-f]{12}")
#: Seconds between two looks at transfers: for a bar that moves, and for words in a log.
LOOK_S, WORD_S = 1.0, 10.0


# --- JSON, messages and logs


def print_json(value: object) -> None:
    """Print one JSON value; of typed answers what was left out stays so."""
    click.echo(_plain(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)))


def print_either(value: object, as_json: bool, *lines: str) -> None:
    """Print a value as JSON, or its lines for people."""
    if as_json:
        print_json(value)
    else:
        show(lines)


def print_rows(
    value: object, as_json: bool, columns: Sequence[str | TableColumn], rows: Iterable[Sequence[object]]
) -> None:
    """Print a value as JSON, or as a table."""
    print_either(value, as_json, *table(columns, rows))


def in_json(value: object) -> str:
    """Return a value as JSON on one line."""
    return _plain(msgspec.json.encode(value))


def _plain(value: bytes) -> str:
    """Return JSON with every control character escaped; JSON itself lets those beyond ASCII stand."""
    return _BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], value.decode())


def say(text: str) -> None:
    """Print a line for people on standard error."""
    click.echo(visible(text), err=True)


def print_log(line: LogLine, *, err: bool, raw: bool = False) -> None:
    """Print a record, control characters written out, or with ``raw`` as it is; what the gateway says is marked."""
    ours = line.stream not in ("stdout", "stderr")
    data = line.data if raw else visible(line.data)
    text = f"[{line.stream}] {data}" if ours else data
    click.echo(text, err=err, nl=not line.data.endswith("\n"), color=True if raw else None)


def visible(text: str) -> str:
    """Return the text with its control characters written out: ``\\x1b`` instead of an escape."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else ascii(found[0])[1:-1], text)


# --- sizes (`show_size`), durations, times and ids


def show_seconds(seconds: float | None) -> str:
    """Return a duration for people, ``-`` if there is none."""
    return "-" if seconds is None else show_duration(max(0.0, seconds))


def show_time(at: datetime | None) -> str:
    """Return an instant as ``--since`` reads it, ``2026-11-27T03:20:43Z``; ``-`` if there is none."""
    return "-" if at is None else f"{at.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def age_s(at: datetime) -> float:
    """Return the seconds since an instant, at least 0: the clocks of two machines may differ."""
    return max(0.0, (datetime.now(timezone.utc) - at).total_seconds())


def short_id(id: str) -> str:
    """Return what tells an invocation of all others of its gateway: its number, without zeros before it."""
    match = _INVOCATION_ID.match(id)
    return id if match is None else match[1]


# --- tables and records


class TableColumn(NamedTuple):
    """One column of a table."""

    title: str
    #: Signs without which it says nothing; None: it is never cut.
    least: int | None = None
    #: Where the width is short the highest goes first; 0 stays to the end.
    rank: int = 0
    #: Whether it goes on in further lines instead of being cut; the last column only.
    wraps: bool = False


def show(*shown: str | Iterable[str]) -> None:
    """Print lines, tables and records; without colours where no terminal is."""
    for each in shown:
        for line in (each,) if isinstance(each, str) else each:
            click.echo(line)


def is_terminal() -> bool:
    """Return whether somebody looks at standard output."""
    return sys.stdout.isatty()


def styled(text: str, **style: Any) -> str:
    """Return the text in a style of `click.style`, on a terminal that takes colours (NO_COLOR is obeyed)."""
    return click.style(text, **style) if is_terminal() and not os.environ.get("NO_COLOR") else text


def table(
    columns: Sequence[str | TableColumn], rows: Iterable[Sequence[object]], *, width: int | None = None
) -> list[str]:
    """Return a table's lines, the titles first; numbers stand at the right, states are coloured.

    On a terminal it is at most as wide as that, or ``width``: cells are cut and columns left out by their rank, and of
    columns without one the last first. The first column is whole. Elsewhere nothing is cut.
    """
    cells = [[_shown(cell) for cell in row] for row in rows]
    specs = [_spec(each, at) for at, each in enumerate(columns)]
    natural = [max([cells_of(each.title), *(cells_of(row[at]) for row in cells)]) for at, each in enumerate(specs)]
    if width is None:
        width = shutil.get_terminal_size().columns if is_terminal() else sum(natural) + len(GAP) * len(natural)
    widths = _fit(specs, natural, width)
    right = {at for at in widths if cells and all(_FIGURE.fullmatch(row[at]) for row in cells)}

    def line(texts: Sequence[str]) -> str:
        return GAP.join(padded(texts[at], wide, at in right) for at, wide in widths.items()).rstrip()

    def row_lines(row: Sequence[str]) -> Iterator[str]:
        further: list[str] = []
        if specs[-1].wraps and len(row) - 1 in widths:
            first, *further = wrap(row[-1], widths[len(row) - 1]) or [""]
            row = [*row[:-1], first]
        shown = [padded(row[at], wide, at in right, specs[at].title in ENDS) for at, wide in widths.items()]
        for place, at in enumerate(widths):
            if specs[at].title in STATES and (colour := COLOURS.get(row[at])):
                shown[place] = styled(shown[place], fg=colour)
        yield GAP.join(shown).rstrip()
        yield from (line([*[""] * (len(row) - 1), each]) for each in further)

    titles = styled(line([each.title for each in specs]), bold=True)
    return [titles, *(each for row in cells for each in row_lines(row))]


def _spec(column: str | TableColumn, at: int) -> TableColumn:
    if isinstance(column, TableColumn):
        return column
    return TableColumn(column, max(8, len(column)) if at else None, at)


def _fit(specs: Sequence[TableColumn], natural: Sequence[int], width: int) -> dict[int, int]:
    """Return the places of the columns that fit, each with its width."""
    least = [wide if each.least is None else min(wide, each.least) for each, wide in zip(specs, natural, strict=True)]
    chosen = list(range(len(specs)))
    while chosen and _taken(least[at] for at in chosen) > width:
        last = max(chosen, key=lambda at: (specs[at].rank, at))
        if specs[last].rank == 0:
            break
        chosen.remove(last)
    widths = {at: least[at] for at in chosen}
    left = width - _taken(widths.values())
    for at in sorted(chosen, key=lambda at: (specs[at].rank, at)):
        more = min(max(0, left), natural[at] - widths[at])
        widths[at] += more
        left -= more
    return widths


def _taken(widths: Iterable[int]) -> int:
    listed = list(widths)
    return sum(listed) + len(GAP) * max(0, len(listed) - 1)


def padded(text: str, width: int, right: bool = False, keep_end: bool = False) -> str:
    """Return the text as exactly ``width`` signs of a terminal: cut with a mark, or filled."""
    if keep_end and cells_of(text) > width:
        while cells_of(text) >= width and text:
            text = text[1:]
        text = CUT + text
    text = cut(text, width)
    fill = " " * (width - cells_of(text))
    return fill + text if right else text + fill


def cut(text: str, width: int) -> str:
    """Return the text cut to at most ``width`` signs, with a mark where it was cut."""
    return text if cells_of(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + CUT[: max(0, width)]


def cells(items: Iterable[object], *columns: str | Callable[[Any], object]) -> list[tuple[object, ...]]:
    """Return the rows of a table: of each item the attributes of these names, or what a function makes of it.

    Sizes, durations and times are written for people, True as ``yes``; what is not there, or False, is empty.
    """
    return [tuple([_cell(item, column) for column in columns]) for item in items]


def _cell(item: object, column: str | Callable[[Any], object]) -> object:
    if not isinstance(column, str):
        return column(item)
    value = getattr(item, column)
    if isinstance(value, bool) or value is UNSET:
        return "yes" if value is True else ""
    return show_time(value) if isinstance(value, datetime) else _with_unit(column, value)


#: How a number is written whose name ends so; the name is shown without it.
_UNITS: Mapping[str, Callable[[float], str]] = {
    "_bytes": show_size,
    "_ms": lambda value: show_seconds(value / 1000),
    "_s": show_seconds,
}


def record(fields: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the lines of nested mappings, one field to a line; what is empty is left out.

    Sizes and durations are written for people: ``memory: 512Mi`` of ``memory_bytes``.
    """
    for name, value in fields.items():
        if value in (None, "", [], {}, ()):
            continue
        if isinstance(value, Mapping):
            yield f"{indent}{visible(name)}:"
            yield from record(value, indent + "  ")
        else:
            unit = _unit_of(name) if isinstance(value, int | float) else ""
            yield f"{indent}{visible(name.removesuffix(unit))}: {_shown(_with_unit(name, value))}"


def _unit_of(name: str) -> str:
    return next((each for each in _UNITS if name.endswith(each)), "")


def _with_unit(name: str, value: object) -> object:
    unit = _unit_of(name)
    return _UNITS[unit](value) if unit and isinstance(value, int | float) else value


def _shown(value: object) -> str:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return " ".join(f"{_shown(kind)}={_amount(amount)}" for kind, amount in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(each) for each in value)
    return "-" if value is None else str(value)


def _amount(amount: object) -> str:
    """Return units as they are written: ``4``, ``1-8``, ``1,2,4``."""
    if isinstance(amount, Mapping) and "choices" in amount:
        amount = amount["choices"]
    if isinstance(amount, tuple):
        return str(amount[0]) if len(set(amount)) == 1 else f"{amount[0]}-{amount[-1]}"
    if isinstance(amount, list):
        return ",".join(map(str, amount))
    if isinstance(amount, Mapping) and {"min", "max"} <= amount.keys():
        return f"{amount['min']}-{amount['max']}"
    return _shown(amount)


# --- progress, on a terminal's standard error


class _Bytes(ProgressColumn):
    """``1Mi of 4Mi  512Ki/s``."""

    def render(self, task: Task) -> Text:
        speed = "" if task.speed is None else f"  {show_size(task.speed)}/s"
        return Text(f"{show_size(task.completed)} of {'?' if task.total is None else show_size(task.total)}{speed}")


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
    counted = TextColumn("{task.fields[files]} of {task.fields[of]} files")
    columns = TextColumn("{task.description}"), BarColumn(), _Bytes(), counted
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
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
    columns = TextColumn("{task.description}"), BarColumn(), _Bytes()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        bars: dict[str, TaskID] = {}

        def tell(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = shown.add_task(escape(visible(name)), total=None)
            shown.update(bars[name], completed=done, total=total or None)

        yield LOOK_S, tell
