"""What people see: plain text in a pipe, colours on a terminal, and never a stray escape."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import UTC, datetime

import pytest
from rich.console import RenderableType

from tangram.cli.printing.output import in_json, print_json, print_log, rows_table, say, show, table, tree
from tangram.types import LogLine

Look = Callable[..., str]


class Screen(io.TextIOWrapper):
    """A terminal."""

    def __init__(self) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Show something on a terminal of 40 columns; what was written to it."""
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def shown(*things: RenderableType) -> str:
        screen = Screen()
        with redirect_stdout(screen):
            show(*things)
        return screen.written.getvalue().decode()

    return shown


def test_a_table_is_as_wide_as_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    show(table(("NAME", "N"), [("a", 1), ("longer", 23), (None, None)]))
    assert capsys.readouterr().out == "NAME     N\na        1\nlonger  23\n-        -\n"


def test_what_is_piped_is_neither_coloured_nor_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    show(table(("NAME", "STORY"), [("a", "b" * 500)]), tree({"story": "c" * 500}))
    assert capsys.readouterr().out.splitlines() == ["NAME  STORY", "a     " + "b" * 500, "story: " + "c" * 500]


def test_a_terminal_gets_a_head_that_stands_out_and_whole_cells(look: Look) -> None:
    shown = look(table(("NAME", "STORY"), [("a", "b" * 60)]))
    assert "\x1b[1m" in shown
    assert "b" * 60 in shown, "they can be copied"


def test_control_characters_are_written_out(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "\x1b]0;gotcha\x07\x1b[2Jred[bold]:smile:"
    shown = look(table(("ID",), [(odd,)]), rows_table([{"id": odd}]), tree({"id": odd, odd: {"id": 1}}))
    assert "\x1b]" not in shown and "\x07" not in shown and "\x1b[2J" not in shown
    assert shown.count("[bold]:smile:") == 4, "it is shown as it is"
    say(odd)
    assert capsys.readouterr().err == "\\x1b]0;gotcha\\x07\\x1b[2Jred[bold]:smile:\n"


def test_a_table_of_rows_leaves_out_what_fits_no_cell(capsys: pytest.CaptureFixture[str]) -> None:
    deep = {"a": {"b": 1}}
    show(rows_table([{"name": "x", "cost": {"cpu": [1, 2], "gpu": 1.5}, "none": None, "deep": deep, "list": [1]}]))
    assert capsys.readouterr().out == "NAME  COST\nx     cpu=1,2 gpu=1.5\n"


def test_nested_fields_stand_beneath_their_names_and_empty_ones_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(tree({"name": "f", "cost": {"cpu": {"min": 1, "max": 8}}, "args": ["-q", "-x"], "key": None, "env": {}}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.lstrip("│├└─ ") for line in lines] == ["name: f", "cost:", "cpu:", "min: 1", "max: 8", "args: -q, -x"]


def test_json_is_one_value_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "\x1b[2Jé", "keys": {1: None}, "list": []})
    assert capsys.readouterr().out == (
        '{\n  "text": "\\u001b[2Jé",\n  "keys": {\n    "1": null\n  },\n  "list": []\n}\n'
    )


ODD = "\x1b]0;gotcha\x07\x1b[2J\x9b31m\x7f"


def test_a_log_reaches_a_terminal_as_it_was_written_only_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = LogLine(offset=0, time=datetime(2026, 1, 1, tzinfo=UTC), stream="stdout", data=f"{ODD}\tend\n")
    print_log(line, err=False)
    assert capsys.readouterr().out == "\\x1b]0;gotcha\\x07\\x1b[2J\\x9b31m\\x7f\tend\n"
    print_log(line, err=False, raw=True)
    assert capsys.readouterr().out == f"{ODD}\tend\n"


def test_json_holds_no_control_character_and_is_the_same_value(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"stdout": ODD})
    for text in (capsys.readouterr().out, in_json({"stdout": ODD})):
        assert not any((ord(each) < 32 and each != "\n") or 127 <= ord(each) < 160 for each in text)
        assert json.loads(text) == {"stdout": ODD}
