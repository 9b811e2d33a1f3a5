"""A drawn sequence is the list that it would be, made no further than somebody looks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manager.scheduler.rank import AHEAD, Drawn


def test_a_look_makes_what_it_reads_and_nothing_twice() -> None:
    made: list[int] = []

    def draw() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    drawn = Drawn(draw)
    assert drawn and made == [0]
    assert (drawn[2], drawn[1:4]) == (2, [1, 2, 3])
    assert made == [0, 1, 2, 3]
    assert next(iter(drawn)) == 0 and len(made) <= AHEAD
    assert list(zip(drawn, drawn, strict=True)) == [(number, number) for number in range(100)]
    assert (drawn[-1], drawn[:-98], list(drawn), len(drawn)) == (99, [0, 1], made, 100)
    assert made == list(range(100))


def test_what_is_empty_has_no_first() -> None:
    drawn = Drawn[int](lambda: iter(()))
    assert not drawn and len(drawn) == 0 and list(drawn) == [] and drawn[:3] == []
    with pytest.raises(IndexError):
        drawn[0]
