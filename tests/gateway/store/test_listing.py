"""Listings: every filter and combination, page by page, in bounded work."""

from __future__ import annotations

import itertools
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gateway.invocations.record import Record
from gateway.store import store as listing
from gateway.store.store import Filter, Store, StoreSpec
from manager.action import State
from manager.errors import Reason
from tests.gateway.records import accepted

CHOICES: dict[str, list[object]] = {
    "function": [None, "f0", "f1"],
    "task": [None, "rl", "eval"],
    "trajectory": [None, "t1"],
    "parent": [None, "p1"],
    "state": [None, State.QUEUED, State.FAILED],
    "dead": [None, True, False],
}


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
