"""The row of an invocation: derived from its record, as the schema has it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.invocations.record import Mode, Record, new_id
from gateway.store.store import COLUMNS, make_ready, queries, record_of, row_of, schema
from manager.action import Outcome, State
from manager.errors import Reason


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "record.db", isolation_level=None)
    connection.row_factory = sqlite3.Row
    yield connection
    connection.close()


def full() -> Record:
    """A record in which no field has its default."""
    record = Record(
        seq=7,
        id=new_id(7),
        function="f",
        revision="r",
        task="t",
        trajectory="rollout",
        parent=new_id(6),
        mode=Mode.ASYNC,
        accepted_s=1.25,
        input=b'{"n":1}',
        detached=True,
        options={"timeout_s": 3.5, "traceparent": "00"},
        state=State.FAILED,
        reason=Reason.HANDLER_ERROR,
        message="näh",
        component="handler",
        detail={"type": "ValueError", "deep": {"er": [1, None]}},
        retry_after_s=2.0,
        result=b"[1]",
        attempt=2,
        started_s=2.0,
        ended_s=3.0,
        queue_s=0.1,
        overhead_s=0.2,
        execution_s=0.3,
        node="n0",
        units={"cpu": 2},
        usage={"cpu_s": 0.5},
        dead=True,
        callback="pending",
    )
    lost = Outcome(state=State.LOST, reason=Reason.NODE_LOST, message="gone")
    record.attempts = (record.tried(lost, 1_750_000_000.125),)
    return record


def columns(connection: sqlite3.Connection) -> set[tuple[str, str, bool]]:
    """Name, type and whether it may be NULL. The primary key never is."""
    found = connection.execute("PRAGMA table_info(invocations)").fetchall()
    return {(row["name"], row["type"], not row["notnull"] and not row["pk"]) for row in found}


def test_the_steps_of_the_schema_come_to_the_columns_of_a_record(connection: sqlite3.Connection) -> None:
    make_ready(connection, Path("record.db"), synchronous="OFF")
    assert connection.execute("PRAGMA user_version").fetchone()[0] == max(schema())
    assert columns(connection) == {(column.name, column.sql_type, column.nullable) for column in COLUMNS}


@pytest.mark.parametrize("changed", [False, True])
def test_a_record_comes_back_as_it_was_saved(connection: sqlite3.Connection, changed: bool) -> None:
    make_ready(connection, Path("record.db"), synchronous="OFF")
    sql, record = queries(), full()
    if changed:  # the second save finds a row, of which what never changes is not written again
        early = Record(**{name: getattr(record, name) for name in FIXED}, input=None)
        connection.execute(sql["save_invocation"], row_of(early))
    connection.execute(sql["save_invocation"], row_of(record))
    connection.execute(sql["save_input"], (record.seq, record.input))
    assert record_of(connection.execute(sql["get"], (record.seq,)).fetchone()) == record


FIXED = {column.name for column in COLUMNS if column.fixed}


def test_what_is_known_at_acceptance_is_written_once() -> None:
    assert {"seq", "id", "function", "task", "trajectory", "parent", "mode", "accepted_s"} == FIXED
    assert "id = excluded.id" not in queries()["save_invocation"]
    assert "state = excluded.state" in queries()["save_invocation"]
