"""Listings: the newest (or oldest) records that pass a filter, a page at a time, each page in bounded time.

The time of acceptance grows with the place in the order of acceptance, so a bound on it is found by halving and costs
no index. Where the machine's clock was set back, records of the time that it went through twice may be left out.

One of the filter's conditions leads, by its index; the others are looked at in the rows that it leads to. Where they
hold for few of them, a page ends after so many rows: it may be short, even empty, and there are more behind it.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import NamedTuple

from gateway.invocations.record import Record
from gateway.store.rows import LISTED, record_of
from manager.action import State
from manager.errors import Reason
from tangram.types import LIST_LIMIT_MAX

#: Rows that one page looks at, at most, where more than one condition was given (some milliseconds).
LOOKED_AT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which invocations a listing shows: newest first, those before ``before`` in order of acceptance.

    With ``oldest`` the other way round: oldest first, those behind ``before``.
    """

    function: str | None = None
    task: str | None = None
    trajectory: str | None = None
    parent: str | None = None
    state: State | None = None
    reason: Reason | None = None
    dead: bool | None = None
    #: Wall-clock seconds of the acceptance: from, and before.
    since_s: float | None = None
    until_s: float | None = None
    oldest: bool = False
    before: int | None = None
    limit: int = 100


class Page(NamedTuple):
    """Records without input and result, and where the next page begins; None after the last."""

    records: list[Record]
    before: int | None


class _Condition(NamedTuple):
    """One condition, its value if it has one, and the index that leads to what passes it."""

    sql: str
    value: object
    by: str


def read_page(connection: sqlite3.Connection, chosen: Filter) -> Page:
    """Return a page; runs in a reader's thread."""
    limit = min(chosen.limit, LIST_LIMIT_MAX)
    given = _conditions(chosen)
    leading = next((each for each in given if each.by), None)
    others = [each for each in given if each is not leading]
    lead, way = ("", "NOT INDEXED") if leading is None else (f"{leading.sql} AND ", f"INDEXED BY {leading.by}")
    led = [] if leading is None or "?" not in leading.sql else [leading.value]
    low, high = _span(connection, chosen)
    direction = "ASC" if chosen.oldest else "DESC"
    seen = None
    if others:
        sql = (
            f"SELECT seq FROM invocations {way} WHERE {lead}seq >= ? AND seq < ? "
            f"ORDER BY seq {direction} LIMIT 1 OFFSET {LOOKED_AT}"
        )
        found = connection.execute(sql, (*led, low, high)).fetchone()
        if found is not None and chosen.oldest:
            seen = int(found[0]) - 1
            high = seen + 1
        elif found is not None:
            low = seen = int(found[0]) + 1
    rest = "".join(f" AND {each.sql}" for each in others)
    values = [each.value for each in others if "?" in each.sql]
    sql = (
        f"SELECT {LISTED} FROM invocations i {way} "
        f"WHERE {lead}seq >= ? AND seq < ?{rest} ORDER BY seq {direction} LIMIT {limit + 1}"
    )
    records = [record_of(row) for row in connection.execute(sql, (*led, low, high, *values))]
    if len(records) > limit:
        return Page(records[:limit], records[limit - 1].seq)
    return Page(records, seen)


def _conditions(chosen: Filter) -> list[_Condition]:
    """Return what was asked: the condition that few pass comes first, one without an index last."""
    wanted = [
        _Condition("trajectory = ?", chosen.trajectory, "invocations_trajectory"),
        _Condition("parent = ?", chosen.parent, "invocations_parent"),
        _Condition("dead = 1", chosen.dead or None, "invocations_dead"),
        _Condition("reason = ?", None if chosen.reason is None else chosen.reason.value, "invocations_reason"),
        _Condition("state = ?", None if chosen.state is None else chosen.state.value, "invocations_state"),
        _Condition("function = ?", chosen.function, "invocations_function"),
        _Condition("task = ?", chosen.task, "invocations_task"),
        _Condition("dead = 0", True if chosen.dead is False else None, ""),
        _Condition("accepted_s >= ?", chosen.since_s, ""),
        _Condition("accepted_s < ?", chosen.until_s, ""),
    ]
    return [each for each in wanted if each.value is not None]


def _span(connection: sqlite3.Connection, chosen: Filter) -> tuple[int, int]:
    """Return the first place that may be shown, and that behind the last."""
    low, high = (0, 2**63 - 1) if chosen.before is None else (0, chosen.before)
    if chosen.oldest and chosen.before is not None:
        low, high = chosen.before + 1, 2**63 - 1
    if chosen.since_s is not None:
        low = max(low, _place_at(connection, chosen.since_s))
    if chosen.until_s is not None:
        high = min(high, _place_at(connection, chosen.until_s))
    return low, high


def _place_at(connection: sqlite3.Connection, time_s: float) -> int:
    """Return the first place whose record was accepted at ``time_s`` or later, or that behind the last."""
    # Two questions: for both at once SQLite would look at every record.
    ends = "SELECT (SELECT min(seq) FROM invocations), (SELECT max(seq) FROM invocations)"
    first, last = connection.execute(ends).fetchone()
    if first is None:
        return 0
    low, high = int(first), int(last) + 1
    while low < high:
        middle = (low + high) // 2
        sql = "SELECT seq, accepted_s FROM invocations WHERE seq >= ? ORDER BY seq LIMIT 1"
        seq, accepted_s = connection.execute(sql, (middle,)).fetchone()
        if accepted_s < time_s:
            low = int(seq) + 1
        else:
            high = middle
    return low
