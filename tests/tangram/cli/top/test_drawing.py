"""The screen as text: every size is filled and none overflows, and what matters most is there on the smallest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.cli.printing.columns import cells_of
from tangram.cli.top.drawing import draw, listing
from tangram.cli.top.picture import ASCII, Signs, letters
from tangram.cli.top.view import LogView, TopView
from tangram.cli.top.watched import Watched
from tests.tangram.cli.top.told import WAITING, watched


def screen(width: int, height: int, view: TopView | None = None, signs: Signs = ASCII) -> list[str]:
    view = view or TopView()
    found = watched()
    rows = listing(found, [WAITING], view)
    return [line.plain for line in draw(found, rows, view, "http://gw1:8080", "live 0.3s", width, height, signs)]


@pytest.mark.parametrize("size", [(60, 12), (80, 24), (120, 40), (160, 50), (300, 100)])
@pytest.mark.parametrize("pane", ["all", "running", "waiting", "failed", "functions", "tasks", "nodes"])
def test_no_line_is_longer_than_the_terminal_and_none_is_missing(size: tuple[int, int], pane: str) -> None:
    width, height = size
    lines = screen(width, height, TopView(pane=pane))
    assert len(lines) == height
    assert max(cells_of(line) for line in lines) <= width


@given(st.integers(1, 200), st.integers(1, 80))
def test_no_size_is_too_small(width: int, height: int) -> None:
    view = TopView(log=LogView("0" * 24))
    for each in (TopView(), view, TopView(helping=True)):
        lines = screen(width, height, each)
        assert len(lines) <= height
        assert all(cells_of(line) <= width for line in lines)


def test_80_columns_show_why_it_waits_who_holds_what_and_what_failed() -> None:
    lines = screen(80, 24)
    text = "\n".join(lines)
    assert "gw1:8080" in lines[0] and "CPU BOUND" in lines[0] and "live" in lines[0]
    assert "run 2" in lines[1] and "wait 1, oldest 12s" in lines[1] and "fail 3" in lines[1]
    assert "cpu:node-a" in text and "3/4" in text and "[pr" in text and "sh" in text
    assert "10/40" in text and "more in 7.0s" in text
    assert "WAITS FOR  2 of cpu on node-a 1" in text
    rows = [line.lstrip(" >").split() for line in lines]
    assert ["R", "1", "pytest_reward", "swe", "swe-1", "2", "cpu"] in [row[:7] for row in rows]
    assert ["w", "9", "pytest_reward", "swe", "swe-9", "2-8", "cpu", "12s"] in [row[:8] for row in rows]
    assert any(row[:3] == ["X", "3", "pytest_reward"] and row[-1] == "timeout" for row in rows)


def test_a_step_is_shown_with_its_expected_end_while_it_goes_on() -> None:
    assert "swe 1 wait 2 run 103 done step 7 120/256 ends in 2m10" in "\n".join(screen(160, 50))
    (row,) = [
        line.split() for line in screen(160, 50, TopView(pane="tasks")) if " 120/256 " in line and "2m10" in line[60:]
    ]
    assert row[-3:] == ["7", "120/256", "2m10"]
    found = watched()
    found.sections["steps"]["swe/7"][4] = found.now_ms
    assert found.step_of("swe") is None, "it has ended, and an earlier one is nothing new"
    assert found.step_of("idle") is None


def test_a_tall_terminal_also_shows_the_last_minutes() -> None:
    lines = screen(160, 50)
    (first,) = [line for line in lines if line.startswith(" cpu:node-a 0-1")]
    assert "ppppp" in first and "X" in first, "neighbouring cores that did the same are one row"
    assert any(line.startswith(" cpu:node-a 3") for line in lines)
    assert not any(line.startswith(" cpu:node-a 0-1") for line in screen(160, 50, TopView(timeline=False)))


def test_ascii_is_ascii_and_blocks_are_the_default() -> None:
    assert all(line.isascii() for line in screen(160, 50))
    assert not all(line.isascii() for line in screen(160, 50, signs=Signs()))


def test_a_hostile_name_moves_no_cursor() -> None:
    view, found = TopView(), watched()
    found.sections["verdict"] = ["units", "\x1b[2Jgone"]
    next(iter(found.bars.values())).function = "\x1b]0;title\x07"
    rows = listing(found, [], view)
    text = "".join(each.plain for each in draw(found, rows, view, "http://x", "live", 120, 40, ASCII))
    assert "\x1b" not in text and "\x07" not in text


def test_before_the_first_word_of_the_gateway_the_screen_is_there() -> None:
    view = TopView()
    lines = draw(Watched(), listing(Watched(), [], view), view, "http://gw", "connecting", 80, 24, ASCII)
    assert "connecting" in lines[0].plain


def test_a_wide_terminal_has_the_log_beside_the_list_and_a_narrow_one_below() -> None:
    view = TopView(log=LogView("x"))
    assert view.log is not None
    view.log.lines.extend(["one", "two \x1b[31mred"])
    assert any("pytest_reward" in line and "| one" in line for line in screen(160, 50, view)) or any(
        "| one" in line for line in screen(160, 50, view)
    )
    narrow = screen(80, 24, view)
    assert any(line.startswith("one") for line in narrow)
    assert any("\\x1b[31mred" in line for line in narrow)


def test_letters_tell_functions_apart() -> None:
    assert [letters(each) for each in ("pytest_reward", "shell", "web-search", "x")] == ["pr", "sh", "ws", "x"]
