"""Listings: the newest records that pass a filter, a page at a time, each page in bounded time.

One of the filter's conditions leads, by its index; the others are looked at in the rows that it leads to. Where they
hold for few of them, a page ends after so many rows: it may be short, even empty, and there are more behind it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import NamedTuple

from gateway.invocations.record import Record
from gateway.store.rows import LISTED, record_of
from manager.outcome import State
from tangram.types.scalars import LIST_LIMIT_MAX

#: Rows that one page looks at, at most, where more than one condition was given (some milliseconds).
LOOKED_AT = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which invocations a listing shows: newest first, those before ``before`` in order of acceptance."""

    function: str | None = None
    task: str | None = None
    trajectory: str | None = None
    parent: str | None = None
    state: State | None = None
    dead: bool | None = None
    before: int | None = None
    limit: int = 100


class Page(NamedTuple):
    """Records without input and result, and where the next page begins; None after the last."""

    records: list[Record]
    before: int | None


def read_page(connection: sqlite3.Connection, chosen: Filter) -> Page:
    """Return a page; runs in a reader's thread."""
    limit, top = min(chosen.limit, LIST_LIMIT_MAX), 2**63 - 1 if chosen.before is None else chosen.before
    # The condition that few pass comes first; one without an index comes last.
    wanted: list[tuple[str, object, str]] = [
        ("trajectory = ?", chosen.trajectory, "invocations_trajectory"),
        ("parent = ?", chosen.parent, "invocations_parent"),
        ("dead = 1", chosen.dead or None, "invocations_dead"),
        ("state = ?", None if chosen.state is None else chosen.state.value, "invocations_state"),
        ("function = ?", chosen.function, "invocations_function"),
        ("task = ?", chosen.task, "invocations_task"),
        ("dead = 0", True if chosen.dead is False else None, ""),
    ]
    given = [each for each in wanted if each[1] is not None]
    present = {str(row[1]) for row in connection.execute("PRAGMA index_list(invocations)")}
    leading = next((each for each in given if each[2] in present), None)
    others = [each for each in given if each is not leading]
    lead, by = ("", "NOT INDEXED") if leading is None else (f"{leading[0]} AND ", f"INDEXED BY {leading[2]}")
    led = [] if leading is None or "?" not in leading[0] else [leading[1]]
    floor = 0
    if others:
        sql = f"SELECT seq FROM invocations {by} WHERE {lead}seq < ? ORDER BY seq DESC LIMIT 1 OFFSET {LOOKED_AT}"
        found = connection.execute(sql, (*led, top)).fetchone()
        floor = 0 if found is None else int(found[0]) + 1
    rest = "".join(f" AND {condition}" for condition, _, _ in others)
    values = [value for condition, value, _ in others if "?" in condition]
    sql = (
        f"SELECT {LISTED} FROM invocations i {by} "
        f"WHERE {lead}seq < ? AND seq >= ?{rest} ORDER BY seq DESC LIMIT {limit + 1}"
    )
    records = [record_of(row) for row in connection.execute(sql, (*led, top, floor, *values))]
    if len(records) > limit:
        return Page(records[:limit], records[limit - 1].seq)
    return Page(records, floor or None)
