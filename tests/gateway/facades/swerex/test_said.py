"""What bash said, without its middle: never longer than asked for, however large the pieces that it came in."""

from __future__ import annotations

import re

import pytest

from gateway.facades.swerex.bash_server import WINDOW, Said

TEXT = "".join(f"{number}\n" for number in range(20_000))


@pytest.mark.parametrize("piece", [7, 1000, 4 * WINDOW, 30_000, len(TEXT)])
@pytest.mark.parametrize("limit", [16_000, 40_000, len(TEXT) - 1])
def test_it_keeps_both_ends_within_its_limit_and_counts_what_is_left_out(piece: int, limit: int) -> None:
    said = Said(limit)
    for begin in range(0, len(TEXT), piece):
        said.add(TEXT[begin : begin + piece])
    told = said.take()
    assert len(told) <= limit
    note = re.search(r"\n\[(\d+) characters are left out here\]\n", told)
    assert note is not None
    first, last = told[: note.start()], told[note.end() :]
    assert TEXT.startswith(first)
    assert TEXT.endswith(last)
    assert len(first) > limit // 4 and len(last) > limit // 4
    assert len(first) + int(note.group(1)) + len(last) == len(TEXT)
    assert said.take() == "", "it was told"


def test_what_fits_is_told_whole() -> None:
    said = Said(len(TEXT))
    said.add(TEXT)
    assert said.take() == TEXT
