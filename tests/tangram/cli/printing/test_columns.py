"""Lists fit their width: the least important column goes first, and what is cut says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.cli.printing import brief
from tangram.cli.printing.columns import ListColumn, cells_of, cut, fit, line, padded

COLUMNS = (
    ListColumn("ID", 4, 10),
    ListColumn("NAME", 4, 20),
    ListColumn("AGE", 3, 6, right=True, rank=1),
    ListColumn("WHY", 4, 30, rank=2),
)
ROW = ("12ab", "a-rather-long-name", "3.2s", "because of something")


def test_columns_go_by_their_rank_and_the_first_never_do() -> None:
    assert [each.place for each in fit(COLUMNS, [ROW], 200)] == [0, 1, 2, 3]
    assert [each.place for each in fit(COLUMNS, [ROW], 16)] == [0, 1, 2]
    assert [each.place for each in fit(COLUMNS, [ROW], 11)] == [0, 1]
    assert [each.place for each in fit(COLUMNS, [ROW], 3)] == [0, 1]


@given(st.integers(16, 120), st.lists(st.text(min_size=4, max_size=4), max_size=3))
def test_no_row_is_wider_than_asked(width: int, rows: list[str]) -> None:
    cells = [tuple(row) for row in rows]
    fitted = fit(COLUMNS, cells, width)
    assert all(cells_of(line(COLUMNS, fitted, each)) <= width for each in cells)


@given(st.text(max_size=30), st.integers(1, 40))
def test_padding_fills_and_cuts_to_the_sign(text: str, width: int) -> None:
    assert cells_of(cut(text, width)) <= max(width, 0)
    assert cells_of(padded("名前" + text, width)) == width


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0, "0s"),
        (0.047, "47ms"),
        (0.99999, "1.0s"),
        (9.96, "10s"),
        (59.6, "1m00"),
        (133, "2m13"),
        (3599.7, "1h00"),
        (12_000, "3h20"),
        (187_200, "2d4"),
    ],
)
def test_durations_take_few_signs(seconds: float | None, shown: str) -> None:
    assert brief.seconds(seconds) == shown


def test_a_short_id_is_the_number_alone() -> None:
    assert brief.short_id("0000000025a-964ec9f8f6c4") == "25a"
    assert brief.short_id("00000000000-964ec9f8f6c4") == "0"
    assert brief.short_id("no id") == "no id"
