"""What is kept of a session's output: the last bytes, numbered, in memory that the bytes bound."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import pytest

from runtimes.sandbox.session import (
    PAGE_PIECES,
    UNDER_WAY_BYTES,
    ByteLog,
    InteractiveSession,
    SessionPiece,
    SessionSettings,
)

KEEP_BYTES = 64 * 2**10


def told(tail: ByteLog, offset: int, most_bytes: int = 4096) -> list[SessionPiece]:
    """All from an offset on, page by page."""
    found: list[SessionPiece] = []
    while pieces := tail.pieces(offset, most_bytes):
        found += pieces
        offset = pieces[-1].offset + len(pieces[-1].data)
    return found


@pytest.mark.parametrize("streams", [("stdout",), ("stdout", "stderr")])
async def test_an_output_of_single_bytes_takes_a_few_times_its_bytes(streams: tuple[str, ...]) -> None:
    session = InteractiveSession(SessionSettings(output_bytes=KEEP_BYTES), None)
    tracemalloc.start()
    try:
        for number in range(2 * KEEP_BYTES):
            session.said(streams[number % len(streams)], b"x")
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (session.start, session.end) == (KEEP_BYTES, 2 * KEEP_BYTES)
    assert taken_bytes < 8 * KEEP_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_the_end_of_what_was_said_stream_by_stream(seed: int) -> None:
    chance = random.Random(seed)
    tail, said = ByteLog(10_000), []
    for _ in range(100):
        stream, data = chance.choice(("stdout", "stderr")), chance.randbytes(chance.choice((0, 1, 7, 300, 5_000)))
        tail.add(stream, data)
        said += [(stream, byte) for byte in data]
        assert (tail.end, tail.start) == (len(said), max(0, len(said) - 10_000))
    for offset in (0, tail.start, tail.start + 1, tail.end - 7_000, tail.end - 1, tail.end):
        begin = max(offset, tail.start)
        found = told(tail, offset)
        assert [(piece.stream, byte) for piece in found for byte in piece.data] == said[begin:]
        assert not found or found[0].offset == begin
        assert all(one.offset + len(one.data) == after.offset for one, after in pairwise(found))
    assert tail.joined() == bytes(byte for _, byte in said[tail.start :])


def test_a_page_is_bounded_in_bytes_and_in_pieces() -> None:
    tail = ByteLog(KEEP_BYTES)
    for number in range(3 * PAGE_PIECES):
        tail.add(("stdout", "stderr")[number % 2], b"x")
    assert len(tail.pieces(0, KEEP_BYTES)) == PAGE_PIECES
    tail.add("stdout", bytes(50_000))
    assert sum(len(piece.data) for piece in tail.pieces(0, 100)) == 100


def test_what_was_not_heard_is_a_hole_and_the_rest_keeps_its_numbers() -> None:
    tail = ByteLog(100)
    tail.add("stdout", b"before")
    tail.skip(50)
    tail.skip(20)
    tail.add("stdout", b"after")
    assert told(tail, 0) == [SessionPiece(0, "stdout", b"before"), SessionPiece(50, "stdout", b"after")]
    assert (tail.start, tail.end) == (0, 55)
    tail.add("stderr", bytes(60))
    assert tail.start == 50, "of what lies before the hole nothing is kept any more"
    assert told(tail, 0) == [SessionPiece(50, "stdout", b"after"), SessionPiece(55, "stderr", bytes(60))]


def test_what_its_reader_has_not_had_is_kept_beyond_the_bound_and_that_has_a_bound_too() -> None:
    tail = ByteLog(KEEP_BYTES)
    for _ in range(10):
        tail.add("stdout", bytes(KEEP_BYTES), 100)
    assert (tail.start, tail.end) == (100, 10 * KEEP_BYTES)
    tail.forget(5 * KEEP_BYTES)
    assert tail.start == 5 * KEEP_BYTES, "that was read"
    tail.forget()
    assert tail.start == 9 * KEEP_BYTES, "nobody reads"
    for _ in range(2 * UNDER_WAY_BYTES // KEEP_BYTES):
        tail.add("stdout", bytes(KEEP_BYTES), 0)
    assert tail.end - tail.start == KEEP_BYTES + UNDER_WAY_BYTES


async def test_what_was_under_way_when_its_command_was_told_to_wait_is_not_lost_to_a_slow_reader() -> None:
    """A loop that comes late to its sockets finds all in them at once, and its readers' turns come after."""
    session = InteractiveSession(SessionSettings(output_bytes=KEEP_BYTES), None)
    read, pages = 1, session.read(0, 60.0)
    session.said("stdout", b"x")
    assert len(await anext(pages)) == 1, "somebody is attached"
    for _ in range(5):
        for number in range(20):
            session.said("stdout", bytes([number]) * (KEEP_BYTES // 4))
        while read < session.end:
            for piece in await anext(pages):
                assert piece.offset == read
                read += len(piece.data)
    session.said("stdout", bytes(3 * KEEP_BYTES))
    assert 3 * KEEP_BYTES <= session.end - session.start <= 4 * KEEP_BYTES + 1, "but for the page that is being read"
    await pages.aclose()
    assert session.end - session.start == KEEP_BYTES, "nobody reads any more"
