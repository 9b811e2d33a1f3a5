"""The store: durable when it says so, one write for many changes, brought up to date in place, and its listings."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.invocations.record import Mode, Record, new_id, seq_of
from gateway.store import store as checkpoint
from gateway.store import store as listing
from gateway.store import store as store_module
from gateway.store.store import (
    COLUMNS,
    Durability,
    Filter,
    LogRow,
    OpenTrajectory,
    Store,
    StoreSpec,
    make_ready,
    queries,
    record_of,
    row_of,
    schema,
)
from manager.action import Outcome, State
from manager.errors import InvalidInput, NotFound, Reason, StorageUnavailable
from tests.gateway.conftest import until
from tests.gateway.records import accepted

NEVER_S = 1e6
CHOICES: dict[str, list[object]] = {
    "function": [None, "f0", "f1"],
    "task": [None, "rl", "eval"],
    "trajectory": [None, "t1"],
    "parent": [None, "p1"],
    "state": [None, State.QUEUED, State.FAILED],
    "dead": [None, True, False],
}


def spec(directory: Path, **given: object) -> StoreSpec:
    return StoreSpec(path=directory / "db.sqlite", retry_s=0.01, **given)  # type: ignore[arg-type]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(spec(tmp_path))
    await opened.open()
    yield opened
    await opened.close()


def crash_image(directory: Path) -> Path:
    """What a killed process leaves: the files as they are."""
    image = directory / "image"
    image.mkdir()
    for file in directory.glob("db.sqlite*"):
        shutil.copy(file, image)
    return image


@pytest.mark.promise("202 is answered once the record is durable.")
@pytest.mark.parametrize("durability", list(Durability))
async def test_a_committed_record_survives_the_death_of_the_process(tmp_path: Path, durability: Durability) -> None:
    store = Store(spec(tmp_path, durability=durability))
    await store.open()
    kept = accepted(store, input=b'{"a":1}')
    await store.commit()
    image = crash_image(tmp_path)
    await store.close()
    survivor = Store(spec(image))
    await survivor.open()
    found = await survivor.get(kept.seq)
    assert found == kept
    assert survivor.next_seq() == kept.seq + 1
    await survivor.close()


async def test_changes_that_nobody_waits_for_become_one_row_written_once(store: Store) -> None:
    changed = accepted(store)
    changed.move(State.RUNNING)
    store.save(changed)
    changed.end(State.LOST, Reason.NODE_LOST, "gone", 5.0)
    store.save(changed)
    found = await store.get(changed.seq)
    assert found == changed
    assert (store.commits, store.rows_written) == (1, 1)


async def test_a_burst_shares_its_commits(store: Store) -> None:
    async def accept() -> None:
        accepted(store)
        await store.commit()

    await asyncio.gather(*(accept() for _ in range(200)))
    assert sum((await store.counts()).values()) == 200
    assert store.commits <= 5


@pytest.mark.promise("While the disk refuses, accepted work waits and reads go on.")
async def test_a_full_disk_refuses_what_waits_keeps_what_happened_and_recovers(store: Store, tmp_path: Path) -> None:
    running = accepted(store)
    await store.commit()
    full = sqlite3.connect(tmp_path / "db.sqlite", isolation_level=None)
    full.execute("BEGIN EXCLUSIVE")  # nobody else can write
    assert store._connection is not None
    store._connection.execute("PRAGMA busy_timeout = 1")
    refused = accepted(store)
    with pytest.raises(StorageUnavailable):
        await store.commit()
    refused.end(State.FAILED, Reason.INTERNAL, "refused", 2.0)
    store.save(refused)
    with pytest.raises(StorageUnavailable):
        store.check()
    running.end(State.FAILED, Reason.INTERNAL, "while the disk was full", 3.0)
    store.save(running)
    full.execute("ROLLBACK")
    full.close()
    await store.commit()
    store.check()
    found = await store.get(running.seq)
    assert found is not None
    assert found.message == "while the disk was full"
    waiting = [each.seq for each in await store.unfinished()]
    assert refused.seq not in waiting


async def test_a_corrupt_database_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "db.sqlite").write_bytes(b"no database at all" * 1000)
    with pytest.raises(StorageUnavailable, match="not a database"):
        await Store(spec(tmp_path)).open()


async def test_a_key_is_found_until_it_expires(tmp_path: Path) -> None:
    now_s = 100.0
    store = Store(spec(tmp_path), wall=lambda: now_s)
    await store.open()
    store.save_key("f\nk", b"digest", 7, 200.0)
    assert await store.key("f\nk") == (b"digest", 7)
    now_s = 200.0
    assert await store.key("f\nk") is None
    await store.close()


def test_an_id_tells_its_row_and_odd_ones_are_refused() -> None:
    assert seq_of(new_id(77)) == 77
    for odd in ("", "../1", "a b", "\x00", "x" * 200):
        with pytest.raises(InvalidInput):
            seq_of(odd)
    with pytest.raises(NotFound):
        seq_of("abc")


def _with_message(store: Store, record: Record) -> None:
    record.message = "a\udcffb"


def _with_attempt(store: Store, record: Record) -> None:
    record.attempt = 2**64


def _with_log(store: Store, record: Record) -> None:
    store.save_log(LogRow(seq=record.seq, position=0, time_s=0.0, stream="stdout", data="a\udcff"))


def _with_delivery(store: Store, record: Record) -> None:
    store.note("save_delivery", record.seq, "a\udcff", 0.0, 0)


@pytest.mark.promise("A row that cannot be written keeps no other from the disk.")
@pytest.mark.parametrize("spoil", [_with_message, _with_attempt, _with_log, _with_delivery])
async def test_a_row_that_cannot_be_written_is_told_and_keeps_no_other_from_the_disk(
    store: Store, spoil: Callable[[Store, Record], None]
) -> None:
    accepted(store)
    await store.commit()
    bad, innocent = accepted(store), accepted(store)
    spoil(store, bad)
    async with asyncio.timeout(30):
        with pytest.raises(StorageUnavailable, match="not all of it can be written"):
            await store.commit()
        later = accepted(store)
        await store.commit()
    assert store.failure is None
    on_disk = [row["seq"] for row in await store.read("unfinished", ())]
    assert {innocent.seq, later.seq} <= set(on_disk)


async def test_memory_that_runs_short_for_one_record_leaves_the_others_their_transaction(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, innocent = accepted(store), accepted(store)

    def short(record: Record) -> list[object]:
        if record is bad:
            raise MemoryError
        return row_of(record)

    monkeypatch.setattr(store_module, "row_of", short)
    with pytest.raises(StorageUnavailable, match="MemoryError"):
        await store.commit()
    assert [row["seq"] for row in await store.read("unfinished", ())] == [innocent.seq]
    monkeypatch.undo()
    store.save(bad)
    await store.commit()
    assert [row["seq"] for row in await store.read("unfinished", ())] == [bad.seq, innocent.seq]


async def opened(directory: Path, checkpoint_s: float) -> Store:
    store = Store(StoreSpec(path=directory / "db.sqlite", checkpoint_s=checkpoint_s))
    await store.open()
    return store


def in_the_file(directory: Path) -> int:
    """Records in the file alone, without its log."""
    alone = directory / "alone.sqlite"
    alone.write_bytes((directory / "db.sqlite").read_bytes())
    with closing(sqlite3.connect(alone)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM invocations").fetchone()[0])
        except sqlite3.DatabaseError:
            return 0  # not even the schema, or it is being copied to just now
        finally:
            alone.unlink()


async def test_no_commit_waits_for_the_file(tmp_path: Path) -> None:
    store = await opened(tmp_path, NEVER_S)
    for _ in range(4):
        accepted(store, input=b"x" * 4 * 2**20)  # each more than SQLite's own 1000 pages
        await store.commit()
    assert in_the_file(tmp_path) == 0
    await store.close()
    assert in_the_file(tmp_path) == 4


async def test_a_file_that_cannot_be_copied_to_does_not_disturb_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    def copy(connection: sqlite3.Connection) -> int:
        nonlocal tried
        tried += 1
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(checkpoint, "copy", copy)
    store = await opened(tmp_path, 0.001)
    made = accepted(store)
    await store.commit()
    await until(lambda: tried >= 3)
    assert store.failure is None
    monkeypatch.undo()
    assert await store.get(made.seq) == made
    await until(lambda: in_the_file(tmp_path) == 1)
    await store.close()


def write(path: Path, *scripts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        for script in scripts:
            connection.executescript(script)


def shape(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Columns of every table and index, and the version."""
    with closing(sqlite3.connect(path)) as connection:
        kinds = connection.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
        found = {
            name: connection.execute(f"PRAGMA {'table' if kind == 'table' else 'index'}_xinfo({name})").fetchall()
            for kind, name in kinds
        }
        return found | {"version": connection.execute("PRAGMA user_version").fetchall()}


def add_step(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give the schema one step more; return its version."""
    later = max(schema()) + 1
    more = {
        **schema(),
        later: "CREATE TABLE more (x INTEGER) STRICT; ALTER TABLE nodes ADD COLUMN rack TEXT NOT NULL DEFAULT '';",
    }
    monkeypatch.setattr(store_module, "schema", lambda: more)
    return later


async def fill(path: Path) -> None:
    """Write a record, a key, a log and a trajectory."""
    store = Store(StoreSpec(path=path))
    await store.open()
    record = accepted(store, function="echo")
    store.save_key("echo\nk", b"\x00", record.seq, 2e9)
    store.save_log(LogRow(seq=record.seq, position=0, time_s=1.0, stream="stdout", data="hello"))
    store.save_trajectory("t-1", OpenTrajectory("rl", 7, 60.0))
    await store.close()


async def test_a_file_of_an_older_version_gets_the_steps_that_it_lacks_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, fresh = tmp_path / "old.sqlite", tmp_path / "fresh.sqlite"
    await fill(old)
    version = add_step(monkeypatch)
    for path in (old, fresh):
        store = Store(StoreSpec(path=path))
        await store.open()
        if path == old:
            record = await store.get(1)
            assert record is not None
            assert (record.state, record.function) == (State.QUEUED, "echo")
            assert await store.key("echo\nk") == (b"\x00", 1)
            assert [row.data for row in await store.logs(1, 0, 10)] == ["hello"]
            assert await store.trajectories() == {"t-1": OpenTrajectory("rl", 7, 60.0)}
            assert store.next_seq() == 2
        await store.close()
    assert shape(old) == shape(fresh)
    assert shape(old)["version"] == [(version,)]


async def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db.sqlite"
    await fill(path)
    write(path, "ALTER TABLE nodes ADD COLUMN rack TEXT")
    before = shape(path)
    add_step(monkeypatch)
    with pytest.raises(StorageUnavailable, match=r"rack.*db\.sqlite|db\.sqlite.*rack"):
        await Store(StoreSpec(path=path)).open()
    assert shape(path) == before


async def test_a_newer_file_is_refused_with_what_to_do_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite"
    newer = max(schema()) + 1
    write(path, f"CREATE TABLE unheard_of (x); PRAGMA user_version = {newer}")
    with pytest.raises(StorageUnavailable, match=f"newer gateway wrote it .schema version {newer}") as refused:
        await Store(StoreSpec(path=path)).open()
    assert str(path) in refused.value.message and "start that one again" in refused.value.message
    assert list(shape(path)) == ["unheard_of", "version"]


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


def some(store: Store, count: int) -> list[Record]:
    chance, made = random.Random(7), []
    for _ in range(count):
        fields = {name: chance.choice([each for each in given if each is not None]) for name, given in CHOICES.items()}
        failed = fields.pop("state") is State.FAILED
        fields["trajectory"], fields["parent"] = (chance.choice([name, None]) for name in ("t1", "p1"))
        record = accepted(store, **fields)
        if failed:
            record.end(State.FAILED, Reason.INTERNAL, "", 1.0)
            store.save(record)
        made.append(record)
    return made


async def walked(store: Store, **given: object) -> list[int]:
    """Every place that the pages of a filter lead to."""
    found: list[int] = []
    before = None
    while True:
        page = await store.find(Filter(**given, before=before, limit=7))  # type: ignore[arg-type]
        assert len(page.records) <= 7
        found += [record.seq for record in page.records]
        if (before := page.before) is None:
            return found


@pytest.mark.promise("Lists are newest first, whole over their pages, and a page takes bounded time.")
async def test_the_pages_of_every_filter_hold_what_passes_it_newest_first_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "LOOKED_AT", 10)
    path = tmp_path / "db.sqlite"
    store = Store(StoreSpec(path=path))
    await store.open()
    made = some(store, 120)
    await store.commit()
    for values in itertools.product(*CHOICES.values()):
        given = {name: value for name, value in zip(CHOICES, values, strict=True) if value is not None}
        passing = [each.seq for each in made if all(getattr(each, name) == value for name, value in given.items())]
        assert await walked(store, **given) == passing[::-1], given
    await store.close()


async def test_times_and_reasons_choose_and_the_oldest_can_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "LOOKED_AT", 10)
    store = Store(StoreSpec(path=tmp_path / "db.sqlite"))
    await store.open()
    made: list[Record] = []
    for number in range(60):
        record = accepted(store, accepted_s=100.0 + number)
        if number % 3 == 0:
            why = Reason.TIMEOUT if number % 2 else Reason.INTERNAL
            record.end(State.FAILED, why, "", 1000.0)
            store.save(record)
        made.append(record)
    await store.commit()
    for since_s, until_s, reason in itertools.product((None, 0.0, 117.5, 500.0), (None, 130.0), (None, Reason.TIMEOUT)):
        passing = [
            each.seq
            for each in made
            if (since_s is None or each.accepted_s >= since_s)
            and (until_s is None or each.accepted_s < until_s)
            and reason in (None, each.reason)
        ]
        given = {"since_s": since_s, "until_s": until_s, "reason": reason}
        assert await walked(store, **given) == passing[::-1], given
        assert await walked(store, **given, oldest=True) == passing, given
    await store.close()


def steps_of(path: Path, chosen: Filter) -> int:
    """Return how many steps of SQLite's machine a page takes."""
    taken = 0

    def count() -> int:
        nonlocal taken
        taken += 1
        return 0

    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.row_factory = sqlite3.Row
        database.set_progress_handler(count, 10)
        listing.read_page(database, chosen)
    return 10 * taken


@pytest.mark.promise("A page of a list costs the same number of database steps however many records there are.")
async def test_a_page_costs_as_many_steps_whatever_lies_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "LOOKED_AT", 50)
    store = Store(StoreSpec(path=tmp_path / "db.sqlite"))
    await store.open()
    filters: list[dict[str, object]] = [
        {},
        *({name: values[1]} for name, values in CHOICES.items()),
        {"dead": False},
        {"reason": Reason.QUOTA},
        {"function": "f0", "task": "nobody's"},
        {"state": State.FAILED, "trajectory": "t1", "dead": False},
        {"since_s": 0.0, "task": "nobody's"},
        {"function": "nobody's", "oldest": True},
        {"task": "rl", "state": State.RUNNING, "oldest": True},
    ]
    costs = []
    for count in (300, 2700):
        some(store, count)
        await store.commit()
        costs.append([steps_of(tmp_path / "db.sqlite", Filter(**given, limit=5)) for given in filters])  # type: ignore[arg-type]
    for given, few, many in zip(filters, *costs, strict=True):
        assert many <= 1.5 * few + 200, (given, few, many)
    await store.close()


async def test_a_time_is_found_across_the_holes_that_retention_leaves(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite"
    store = Store(StoreSpec(path=path))
    await store.open()
    made = [accepted(store, accepted_s=float(number)) for number in range(200)]
    await store.commit()
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("DELETE FROM invocations WHERE seq % 7 != 0")
    kept = [each for each in made if each.seq % 7 == 0]
    for second in (0.0, 50.0, 50.5, 199.0, 300.0):
        assert await walked(store, since_s=second) == [each.seq for each in kept if each.accepted_s >= second][::-1]
    await store.close()
