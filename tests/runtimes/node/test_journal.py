"""The journal and the spools on real files, as kills leave them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from manager.action import Outcome, State
from runtimes.node import protocol
from runtimes.node.daemon import AttemptJournal, JournalSettings, epoch
from runtimes.node.protocol import TAIL_BYTES, TEXT_BYTES, Spool, records
from tests.runtimes.node.test_wire import ACTION, LEASE

LIMIT_BYTES = 4 * 2**20


def execute(claim: str) -> protocol.ExecuteAttempt:
    return protocol.ExecuteAttempt(claim, ACTION, LEASE, "digest", b"m\x80", None, None, {})


def end(claim: str) -> protocol.AttemptEnd:
    return protocol.end_of(claim, Outcome(state=State.SUCCEEDED, result={"exit_code": 0}), 0)


def written(directory: Path) -> None:
    journal = AttemptJournal(directory)
    journal.begun(execute("a.1/"), b"{}", lasting=True)
    journal.begun(execute("b.1/"), b"{}", lasting=False)
    journal.begun(execute("c.1/"), b"{}", lasting=False)
    journal.ended(end("a.1/"))
    journal.acknowledged("c.1/")
    journal.lasting("b.1/", True)
    journal.close()


def test_a_journal_tells_the_next_daemon_what_has_begun_and_how_it_ended(tmp_path: Path) -> None:
    written(tmp_path)
    journal = AttemptJournal(tmp_path)
    assert set(journal.attempts) == {"a.1/", "b.1/"}
    assert journal.attempts["a.1/"].end == end("a.1/")
    assert (journal.attempts["b.1/"].end, journal.attempts["b.1/"].lasting) == (None, True)
    assert journal.attempts["b.1/"].execute == execute("b.1/")
    assert journal.functions == {"digest": b"{}"}


def test_a_journal_torn_anywhere_tells_a_beginning_of_it_and_goes_on(tmp_path: Path) -> None:
    written(tmp_path)
    data = (tmp_path / "journal").read_bytes()
    for size in range(len(data)):
        (tmp_path / "journal").write_bytes(data[:size])
        journal = AttemptJournal(tmp_path)
        assert set(journal.attempts) <= {"a.1/", "b.1/", "c.1/"}
        journal.begun(execute("d.1/"), b"{}", lasting=True)
        journal.close()
        after = AttemptJournal(tmp_path)
        assert "d.1/" in after.attempts
        after.close()


def test_a_byte_gone_wrong_ends_the_reading_there(tmp_path: Path) -> None:
    written(tmp_path)
    data = bytearray((tmp_path / "journal").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "journal").write_bytes(bytes(data))
    journal = AttemptJournal(tmp_path)
    assert "a.1/" in journal.attempts
    assert journal.attempts["a.1/"].end is None


def test_a_journal_is_written_anew_when_it_has_grown_and_loses_nothing(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path, JournalSettings(compact_bytes=8 * 2**10))
    journal.begun(execute("kept.1/"), b"{}", lasting=True)
    for number in range(200):
        journal.begun(execute(f"{number}.1/"), b"{}", lasting=True)
        journal.ended(end(f"{number}.1/"))
        journal.acknowledged(f"{number}.1/")
    assert (tmp_path / "journal").stat().st_size < 16 * 2**10
    journal.close()
    assert set(AttemptJournal(tmp_path).attempts) == {"kept.1/"}


def test_an_epoch_ends_with_the_directory_and_with_the_machines_life(tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("one\n")
    first = epoch(tmp_path, boot)
    assert epoch(tmp_path, boot) == first
    boot.write_text("two\n")
    assert epoch(tmp_path, boot) != first
    other = tmp_path / "other"
    other.mkdir()
    boot.write_text("one\n")
    assert epoch(other, boot) != first


def heard(spool: Spool, begin: int = 0, most_bytes: int = 100) -> list[tuple[str, str]]:
    """Return what a gateway hears of a spool from an offset on."""
    found: list[tuple[str, str]] = []
    while piece := spool.read(begin, most_bytes):
        found += records(piece)
        begin += len(piece)
    return found


async def test_a_spool_gives_every_record_from_any_offset_whatever_lies_in_memory(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", LIMIT_BYTES, lambda: None)
    lines = [("stdout" if number % 2 else "stderr", f"line {number} ü\n") for number in range(50)]
    for stream, text in lines:
        spool.write(stream, text)
    assert heard(spool) == lines
    spool.flush()
    spool.sent(spool.end // 2)
    assert heard(spool) == lines
    spool.sent(spool.end)
    assert heard(spool) == lines
    begin = len(spool.read(0, 100))
    assert heard(spool, begin) == lines[len(list(records(spool.read(0, 100)))) :]


async def test_a_spool_torn_anywhere_is_made_whole_by_what_is_said_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", LIMIT_BYTES, lambda: None)
    words = [("stdout", "eins\n"), ("stderr", "zwei ü\n"), ("stdout", "drei ✓\n")]
    for stream, text in words:
        spool.write(stream, text)
    spool.flush()
    spool.close()
    data = (tmp_path / "s").read_bytes()
    for size in range(len(data) + 1):
        (tmp_path / "s").write_bytes(data[:size])
        again = Spool(tmp_path / "s", LIMIT_BYTES, lambda: None)
        again.write("stderr", "zwei ü\n")
        again.write("stdout", "eins\ndrei ✓\nvier")
        by_stream = {
            name: "".join(text for stream, text in heard(again) if stream == name) for name in ("stdout", "stderr")
        }
        assert by_stream == {"stdout": "eins\ndrei ✓\nvier", "stderr": "zwei ü\n"}, size
        again.remove()


async def test_an_attempt_that_says_nothing_costs_no_file(tmp_path: Path) -> None:
    for end in (Spool.close, Spool.remove):
        spool = Spool(tmp_path / "s", LIMIT_BYTES, lambda: None)
        spool.flush()
        assert spool.read(0, 100) == b""
        end(spool)
        assert not (tmp_path / "s").exists()


async def test_a_spool_that_was_closed_makes_no_file_any_more(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", LIMIT_BYTES, lambda: None)
    spool.write("stdout", "said too late to be written")
    spool.close()
    with pytest.raises(OSError):
        spool.flush()
    assert not (tmp_path / "s").exists()


async def test_a_spool_is_bounded_and_counts_what_it_drops(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", 10, lambda: None)
    spool.write("stdout", "12345")
    spool.write("stdout", "678ü9")
    spool.write("stdout", "more")
    spool.omit(100)
    assert "".join(text for _, text in heard(spool)) == "12345678ü"
    assert spool.omitted_bytes == 1 + 4 + 100


async def test_long_texts_travel_in_pieces_that_end_between_characters(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", LIMIT_BYTES, lambda: None)
    text = "ü" * TEXT_BYTES + "✓"
    spool.write("stdout", text)
    assert "".join(piece for _, piece in heard(spool)) == text
    assert len(text.encode()) > TAIL_BYTES  # so that it was written out on the way
    assert (tmp_path / "s").stat().st_size >= len(text.encode())


async def test_a_spool_may_be_written_from_any_thread(tmp_path: Path) -> None:
    more = asyncio.Event()
    spool = Spool(tmp_path / "s", LIMIT_BYTES, more.set)
    thread = threading.Thread(target=spool.write, args=("log", "from elsewhere"))
    thread.start()
    async with asyncio.timeout(30):
        await more.wait()
    thread.join()
    assert heard(spool) == [("log", "from elsewhere")]


def test_a_torn_piece_is_no_log() -> None:
    with pytest.raises(protocol.ChannelError):
        list(records(b"\x00\x00\x00\x00\x09short"))
