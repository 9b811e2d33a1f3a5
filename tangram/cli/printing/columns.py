"""Columns that fit a width: which are shown, how wide each is, and how a cell is cut. Shared by ``ps`` and ``top``."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

#: What stands for the end of a text that was cut, and between columns.
CUT, GAP = "~", 2


class ListColumn(NamedTuple):
    """One column of a list."""

    title: str
    #: Signs without which it says nothing, and beyond which it gets no more.
    least: int
    most: int
    right: bool = False
    #: Where the width is short the highest goes first; 0 stays to the end.
    rank: int = 0


class FittedColumn(NamedTuple):
    """A column as it is drawn: its place among all, and its width in signs."""

    place: int
    width: int


def fit(columns: Sequence[ListColumn], rows: Sequence[Sequence[str]], width: int) -> tuple[FittedColumn, ...]:
    """Return the columns that fit ``width`` signs, each as wide as its cells as far as there is room."""
    chosen = list(range(len(columns)))
    while len(chosen) > 1 and _taken([columns[at].least for at in chosen]) > width:
        dropped = max(chosen, key=lambda at: (columns[at].rank, at))
        if columns[dropped].rank == 0:
            break
        chosen.remove(dropped)
    wanted = {
        at: min(columns[at].most, max([len(columns[at].title), *(cells_of(row[at]) for row in rows)])) for at in chosen
    }
    widths = {at: min(wanted[at], columns[at].least) for at in chosen}
    left = width - _taken(list(widths.values()))
    for at in sorted(chosen, key=lambda at: columns[at].rank):
        more = min(max(0, left), wanted[at] - widths[at])
        widths[at] += more
        left -= more
    return tuple(FittedColumn(at, widths[at]) for at in chosen)


def line(columns: Sequence[ListColumn], fitted: Sequence[FittedColumn], cells: Sequence[str]) -> str:
    """Return one row, its cells cut and filled to the widths; without white space at its end."""
    shown = [padded(cells[each.place], each.width, columns[each.place].right) for each in fitted]
    return (" " * GAP).join(shown).rstrip()


def padded(text: str, width: int, right: bool = False) -> str:
    """Return the text as exactly ``width`` signs of a terminal: cut with a mark, or filled."""
    if cells_of(text) > width:
        text = cut(text, width)
    fill = " " * (width - cells_of(text))
    return fill + text if right else text + fill


def cut(text: str, width: int) -> str:
    """Return the text cut to at most ``width`` signs, with a mark where it was cut."""
    if cells_of(text) <= width:
        return text
    kept, room = "", width - len(CUT)
    for sign in text:
        room -= cells_of(sign)
        if room < 0:
            break
        kept += sign
    return (kept + CUT)[: max(0, width)]


def cells_of(text: str) -> int:
    """Return how many signs of a terminal a text takes: wide ones take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text
    )


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * max(0, len(widths) - 1)
