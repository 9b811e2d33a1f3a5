"""The journal of a node, and its logs on their way to the gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest

from manager.action import Outcome, State
from runtimes.node import journal as journal_module
from runtimes.node import protocol
from runtimes.node.journal import PENDING_BYTES, TEXT_BYTES, AttemptJournal, LogSpool
from runtimes.node.protocol import records
from tests.runtimes.node.test_protocol import ACTION, LEASE

LIMIT_BYTES = 4 * 2**20


def execute(claim: str) -> protocol.ExecuteAttempt:
    return protocol.ExecuteAttempt(claim, ACTION, LEASE, b"{}", b"m\x80", None, None, "")


def end(claim: str) -> protocol.AttemptEnd:
    return protocol.end_of(claim, Outcome(state=State.SUCCEEDED, result={"exit_code": 0}), 0)


def claims(journal: AttemptJournal) -> set[str]:
    return {entry.execute.claim for entry in journal.entries}


def next_journal(directory: Path) -> AttemptJournal:
    """Return the journal that the next daemon has: nothing was closed, what a kill leaves is all that it reads."""
    return AttemptJournal(Path(shutil.copytree(directory, directory.with_name(f"{directory.name}-next"))))


def spool(journal: AttemptJournal, *, limit_bytes: int = LIMIT_BYTES, resumed: bool = False) -> LogSpool:
    return LogSpool(journal, "a.1/", limit_bytes, lambda: None, resumed=resumed)


def output(log: LogSpool, begin: int = 0, most_bytes: int = 100) -> list[tuple[str, str]]:
    """Return what a gateway receives of a log from a place on."""
    found: list[tuple[str, str]] = []
    while piece := log.read(begin, most_bytes):
        found += records(piece)
        begin += len(piece)
    return found


def test_a_journal_tells_the_next_daemon_what_has_begun_and_how_it_ended(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path)
    journal.begin(execute("a.1/"), lasting=True)
    journal.begin(execute("b.1/"), lasting=False)
    journal.begin(execute("c.1/"), lasting=False)
    journal.end([end("a.1/"), end("c.1/")])
    journal.forget(["c.1/"])
    journal.set_lasting("b.1/", True)
    first, second = sorted(next_journal(tmp_path).entries, key=lambda entry: entry.execute.claim)
    assert (first.execute, first.lasting, first.end) == (execute("a.1/"), True, end("a.1/"))
    assert (second.execute, second.lasting, second.end) == (execute("b.1/"), True, None)


def test_a_journal_gives_back_what_its_attempts_and_logs_took(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path)
    journal.begin(execute("kept.1/"), lasting=True)
    for number in range(100):
        journal.begin(execute(f"{number}.1/"), lasting=True)
        journal.append_log(f"{number}.1/", 0, bytes(100_000))
        journal.end([end(f"{number}.1/")])
        journal.forget([f"{number}.1/"])
    journal.close()
    assert (tmp_path / "journal").stat().st_size < 2**20
    assert claims(AttemptJournal(tmp_path)) == {"kept.1/"}


@pytest.mark.parametrize("place", [0, 3 * 4096], ids=["header", "attempts"])
def test_a_file_that_a_crash_of_the_machine_has_damaged_is_begun_anew_as_another_life(
    tmp_path: Path, place: int
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("one\n")
    journal = AttemptJournal(tmp_path, boot)
    journal.begin(execute("a.1/"), lasting=True)
    journal.close()
    boot.write_text("two\n")
    with (tmp_path / "journal").open("r+b") as file:
        file.seek(place)
        file.write(os.urandom(4096))
    after = AttemptJournal(tmp_path, boot)
    assert claims(after) == set()
    assert after.epoch.partition("/")[2] != journal.epoch.partition("/")[2]
    after.begin(execute("b.1/"), lasting=True)
    after.close()
    assert claims(AttemptJournal(tmp_path, boot)) == {"b.1/"}


def test_an_epoch_ends_with_the_directory_and_with_the_machines_life(tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"

    def epoch(directory: Path, boot_id: str) -> str:
        boot.write_text(f"{boot_id}\n")
        journal = AttemptJournal(directory, boot)
        journal.close()
        return journal.epoch

    first = epoch(tmp_path, "one")
    assert epoch(tmp_path, "one") == first
    assert epoch(tmp_path, "two") != first
    other = tmp_path / "other"
    other.mkdir()
    assert epoch(other, "one") != first


def test_a_file_that_another_process_has_is_refused_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "BUSY_S", 0.0)
    journal = AttemptJournal(tmp_path)
    journal.begin(execute("a.1/"), lasting=True)
    with pytest.raises(OSError, match="locked"):
        AttemptJournal(tmp_path)
    journal.close()
    assert claims(AttemptJournal(tmp_path)) == {"a.1/"}


async def test_a_log_gives_every_record_from_any_place_written_or_not(tmp_path: Path) -> None:
    log = spool(AttemptJournal(tmp_path))
    lines = [("stdout" if number % 2 else "stderr", f"line {number} ü\n") for number in range(50)]
    for stream, text in lines[:20]:
        log.write(stream, text)
    assert output(log) == lines[:20]
    for stream, text in lines[20:]:
        log.write(stream, text)
    assert output(log) == lines
    begin = len(log.read(0, 100))
    assert output(log, begin) == lines[len(list(records(log.read(0, 100)))) :]


async def test_what_a_killed_daemon_has_not_written_is_made_whole_by_what_is_repeated(tmp_path: Path) -> None:
    words = [("stdout", "eins\n"), ("stderr", "zwei ü\n"), ("stdout", "drei ✓\n")]
    for written in range(len(words) + 1):
        directory = tmp_path / str(written)
        directory.mkdir()
        journal = AttemptJournal(directory)
        journal.begin(execute("a.1/"), lasting=True)
        log = spool(journal)
        for number, (stream, text) in enumerate(words):
            if number == written:
                log.flush()
            log.write(stream, text)
        again = spool(next_journal(directory), resumed=True)
        again.write("stderr", "zwei ü\n")
        again.write("stdout", "eins\ndrei ✓\nvier")
        by_stream = {
            name: "".join(text for stream, text in output(again) if stream == name) for name in ("stdout", "stderr")
        }
        assert by_stream == {"stdout": "eins\ndrei ✓\nvier", "stderr": "zwei ü\n"}, written


async def test_the_log_of_an_attempt_that_never_began_is_no_part_of_its_next_try(tmp_path: Path) -> None:
    log = spool(AttemptJournal(tmp_path))
    log.write("system", "an image is pulled")
    log.flush()
    assert output(spool(next_journal(tmp_path), resumed=True)) == []


async def test_long_texts_travel_in_pieces_that_end_between_characters(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path)
    log = spool(journal)
    text = "ü" * TEXT_BYTES + "✓"
    assert len(text.encode()) > PENDING_BYTES
    log.write("stdout", text)
    assert journal.read_log("a.1/", 0), "it waits in no memory"
    assert "".join(piece for _, piece in output(log)) == text


async def test_a_log_that_cannot_be_written_any_more_is_a_disk_error(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path)
    log = spool(journal)
    log.write("stdout", "too late to be written")
    journal.close()
    with pytest.raises(OSError, match="journal"):
        log.flush()


async def test_a_log_may_be_written_from_any_thread(tmp_path: Path) -> None:
    more = asyncio.Event()
    log = LogSpool(AttemptJournal(tmp_path), "a.1/", LIMIT_BYTES, more.set)
    thread = threading.Thread(target=log.write, args=("log", "from elsewhere"))
    thread.start()
    async with asyncio.timeout(30):
        await more.wait()
    thread.join()
    assert output(log) == [("log", "from elsewhere")]


def test_a_torn_piece_is_no_log() -> None:
    with pytest.raises(protocol.ChannelError):
        list(records(b"\x00\x00\x00\x00\x09short"))


SUCCEEDED = Outcome(state=State.SUCCEEDED)
