"""The chunk: what it contains, meets, and is made of."""

from __future__ import annotations

from manager.action import Chunk, power_at_least


def test_a_chunk_knows_its_devices_and_what_lies_in_it() -> None:
    chunk = Chunk(4, 4)
    assert (chunk.end, list(chunk.devices)) == (8, [4, 5, 6, 7])
    assert chunk.contains(Chunk(6, 2)) and chunk.contains(chunk)
    assert not chunk.contains(Chunk(6, 4)) and not Chunk(6, 2).contains(chunk)
    assert chunk.meets(Chunk(0, 8)) and not chunk.meets(Chunk(0, 4))
    assert chunk.moved(-4) == Chunk(0, 4)


def test_it_is_made_of_parts_and_a_part_that_is_taken_leaves_its_buddies() -> None:
    chunk = Chunk(8, 8)
    assert list(chunk.parts(4)) == [Chunk(8, 4), Chunk(12, 4)]
    assert list(chunk.parts(16)) == []
    assert list(chunk.without(Chunk(10, 1))) == [Chunk(12, 4), Chunk(8, 2), Chunk(11, 1)]
    assert list(chunk.without(chunk)) == []


def test_a_count_of_devices_takes_the_next_power_of_two() -> None:
    assert [power_at_least(count) for count in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]
