"""How values are shown: JSON for programs, tables and trees for people; in colour on a terminal, plain elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import click
import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tangram.types import LogLine
from tangram.types.values.quantities import show_duration

#: Columns of a line: so many that nothing is folded.
UNBOUNDED = 100_000
_FIGURE = re.compile(r"-|[\d.]+[a-zA-Z%]{0,2}(\d+[smh])?")
#: Control characters but tab and line feed: a terminal would obey them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BEYOND_ASCII = re.compile(r"[\x7f-\x9f]")


def print_json(value: object) -> None:
    """Print one JSON value; of typed answers what was left out stays so."""
    click.echo(_plain(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)))


def in_json(value: object) -> str:
    """Return a value as JSON on one line."""
    return _plain(msgspec.json.encode(value))


def _plain(json: bytes) -> str:
    """Return JSON with every control character escaped; JSON itself lets those beyond ASCII stand."""
    return _BEYOND_ASCII.sub(lambda found: f"\\u{ord(found[0]):04x}", json.decode())


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
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def show(*shown: RenderableType) -> None:
    """Print tables and trees, in colour on a terminal; nothing is cut or folded to fit it."""
    click.echo(rendered(*shown), nl=False)


def rendered(*shown: RenderableType) -> str:
    """Return the lines of tables and trees, each as wide as what is in it."""
    colours: Literal["auto"] | None = "auto" if sys.stdout.isatty() else None
    console = Console(width=UNBOUNDED, color_system=colours, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for each in shown:
            console.print(each)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table as wide as its cells, with numbers to the right; without ``columns`` it has no head."""
    cells = [[_shown(cell) for cell in row] for row in rows]
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(columns))
    for at in range(len(columns) or max(map(len, cells), default=0)):
        right = all(_FIGURE.fullmatch(row[at]) for row in cells)
        made.add_column(columns[at] if columns else "", justify="right" if right else "left")
    for row in cells:
        made.add_row(*map(Text, row))
    return made


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table whose columns are the rows' own fields; lists, what is nested deeper and what is empty are not."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if _fits_a_cell(value))
    return table(
        [name.upper().replace("_", " ") for name in names], [[row.get(name) for name in names] for row in rows]
    )


def tree(fields: Mapping[str, Any], label: str = "") -> Tree:
    """Return nested mappings, one field to a line; what is empty is left out."""
    made = Tree(Text(visible(label)), hide_root=not label)
    for name, value in fields.items():
        if value in (None, "", [], {}):
            continue
        if isinstance(value, Mapping):
            made.children.append(tree(value, f"{name}:"))
        else:
            made.add(Text(f"{visible(name)}: {_shown(value)}"))
    return made


def show_seconds(seconds: float | None) -> str:
    """Return a duration for people, ``-`` if there is none."""
    return "-" if seconds is None else show_duration(seconds)


def _fits_a_cell(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and not any(isinstance(each, Mapping) for each in value.values())
    return value not in (None, "") and not isinstance(value, list)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return visible(value)
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
    if isinstance(amount, list):
        return ",".join(map(str, amount))
    if isinstance(amount, Mapping) and {"min", "max"} <= amount.keys():
        return f"{amount['min']}-{amount['max']}"
    return _shown(amount)
