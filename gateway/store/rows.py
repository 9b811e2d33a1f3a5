"""The row of an invocation, derived from the fields of its record: columns, statements, and values both ways.

A field without a default is known at acceptance and never changes after it. Mappings and tuples are kept as JSON.
The input has a table of its own, so that a change of state rewrites a short row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from gateway import wire
from gateway.invocations.record import Record

#: SQLite's type of each Python type.
SQL_TYPES: Mapping[type, str] = {bool: "INTEGER", int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: where it lies in the row, and how its value is read."""

    name: str
    sql_type: str
    nullable: bool
    #: Whether it is written once.
    fixed: bool
    #: Whether it holds JSON.
    json: bool
    #: The field's value of the column's; None if they are the same. Any: rows have no types.
    read: Callable[[Any], object] | None


def _column(name: str, hint: Any, *, fixed: bool) -> Column:
    """Return the column of one field. Any: a type hint."""
    arms = get_args(hint) if NoneType in get_args(hint) else (hint,)
    kind = next(arm for arm in arms if arm is not NoneType)
    if get_origin(kind) is Literal:
        kind = str
    json = not isinstance(kind, type)
    read: Callable[[Any], object] | None = None
    if json:
        read = msgspec.json.Decoder(hint).decode
    elif kind is bool or issubclass(kind, StrEnum):
        read = partial(msgspec.convert, type=hint, strict=False)
    sql_type = "TEXT" if json else next(SQL_TYPES[base] for base in kind.__mro__ if base in SQL_TYPES)
    return Column(name, sql_type, len(arms) > 1, fixed, json, read)


_HINTS = get_type_hints(Record)
#: In the order of the fields.
COLUMNS = tuple(
    _column(each.name, _HINTS[each.name], fixed=each.default is MISSING and each.default_factory is MISSING)
    for each in fields(Record)
    if each.name != "input"
)
_NAMES = ", ".join(column.name for column in COLUMNS)
_values = attrgetter(*(column.name for column in COLUMNS))
_JSON = tuple(index for index, column in enumerate(COLUMNS) if column.json)

#: What a query of ``invocations i`` selects for `record_of`, beside the input.
SELECTED = ", ".join(f"i.{column.name}" for column in COLUMNS)
#: The same for a listing, which leaves out what may be large.
LISTED = ", ".join("NULL" if column.name == "result" else f"i.{column.name}" for column in COLUMNS) + ", NULL AS input"
SAVE = (
    f"INSERT INTO invocations ({_NAMES}) VALUES ({', '.join('?' * len(COLUMNS))}) ON CONFLICT (seq) DO UPDATE SET "
    + ", ".join(f"{column.name} = excluded.{column.name}" for column in COLUMNS if not column.fixed)
)


def row_of(record: Record) -> list[object]:
    """Return the values of `SAVE`."""
    row: list[object] = list(_values(record))
    for index in _JSON:
        row[index] = wire.encode(row[index]).decode()
    return row


def record_of(row: sqlite3.Row) -> Record:
    """Return the record of a row of `SELECTED` and ``input``. Any: rows have no types."""
    values: dict[str, Any] = {
        column.name: value if column.read is None else column.read(value)
        for column, value in zip(COLUMNS, row, strict=False)
    }
    return Record(**values, input=row["input"])
