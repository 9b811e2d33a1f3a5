"""What keys do: move, choose lists, filter, sort, and ask before anything is cancelled."""

from __future__ import annotations

from collections.abc import Sequence

from tangram.cli.top.drawing import listing
from tangram.cli.top.rows import Listing
from tangram.cli.top.view import TopView, Wish
from tests.tangram.cli.top.told import WAITING, running, watched

NAMED = {"\r": "enter", "\x1b": "escape", "\x7f": "backspace"}


def press(view: TopView, keys: Sequence[str]) -> Wish | None:
    """Press keys, by their signs or by names such as ``down``; return what the last one asked for."""
    wish = None
    for key in keys:
        rows = shown(view)
        named = NAMED.get(key, key)
        wish = view.press(named, named if len(named) == 1 else None, rows)
    shown(view)
    return wish


def shown(view: TopView) -> Listing:
    rows = listing(watched(), [WAITING], view)
    view.arrange(rows, 10)
    return rows


def test_the_cursor_stays_on_its_row_when_others_come_and_go() -> None:
    view = TopView()
    press(view, ["j"])
    assert view.selected == running(2)
    press(view, ["<"] * 12)
    assert view.selected == running(2), "another order"
    press(view, ["end"])
    assert view.selected == shown(view).rows[-1].key
    press(view, ["home", "k", "up"])
    assert view.selected == shown(view).rows[0].key


def test_lists_are_chosen_by_number() -> None:
    view = TopView()
    press(view, ["3"])
    assert [row.key for row in shown(view).rows] == [running(3)]
    press(view, ["4"])
    assert {row.key for row in shown(view).rows} == {"pytest_reward", "shell", "web_search"}
    press(view, ["6"])
    assert {row.key for row in shown(view).rows} == {"cpu:node-a", "search"}


def test_a_filter_holds_while_it_is_typed_and_escape_takes_it_away() -> None:
    view = TopView()
    press(view, ["/", *"fn:shell"])
    assert {row.key for row in shown(view).rows} == {running(2)}
    press(view, ["\x7f"] * 20 + [*"state:queued", "\r"])
    assert {row.sign for row in shown(view).rows} == {"w"}
    press(view, ["/"] + ["\x7f"] * 20 + [*"timeout", "\r"])
    assert {row.sign for row in shown(view).rows} == {"X"}
    press(view, ["\x1b"])
    assert {row.sign for row in shown(view).rows} == {"R", "w", "X"}


def test_lists_are_sorted_by_any_column_both_ways() -> None:
    view = TopView()
    press(view, [">"] * 8)
    ages = [row.order[7] for row in shown(view).rows]
    assert ages == sorted(ages, key=float, reverse=True)
    press(view, ["r"])
    assert [row.order[7] for row in shown(view).rows] == ages[::-1]


def test_nothing_is_cancelled_without_a_word() -> None:
    view = TopView()
    assert press(view, ["c"]) is None
    assert press(view, ["n"]) is None
    assert view.prompt is None
    assert press(view, ["c", "y"]) == Wish("cancel", (running(1),))
    assert press(view, ["C", "1", "\r"]) is None, "three would be, not one"
    assert "not their number" in view.message
    assert press(view, ["C", "3", "\r"]) == Wish("cancel", (running(1), running(2), running(9)))
    press(view, ["3", "j"])
    assert press(view, ["c"]) is None and view.prompt is None, "it has ended"


def test_enter_asks_for_the_log_and_escape_closes_it() -> None:
    view = TopView()
    assert press(view, ["\r"]) == Wish("log", (running(1),))
    assert press(view, ["\x1b"]) == Wish("close_log")
    assert press(view, ["4", "\r"]) is None, "a function has no log"


def test_help_is_left_by_any_key_and_q_leaves_the_screen() -> None:
    view = TopView()
    assert press(view, ["?", "q"]) is None
    assert press(view, ["q"]) == Wish("quit")
