"""What people see: plain text in a pipe, tables that fit a terminal, and never a stray escape."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from datetime import UTC, datetime, timedelta, timezone

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.cli.invocations import INVOCATIONS, invocation_rows
from tangram.cli.output import (
    LOOK_S,
    WORD_S,
    TableColumn,
    cells_of,
    in_json,
    print_json,
    print_log,
    record,
    say,
    show,
    show_seconds,
    show_time,
    table,
    transfers,
)
from tangram.types import LogLine
from tests.tangram.cli.conftest import invocation

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

    def shown(*things: Callable[[], Iterable[str]]) -> str:
        screen = Screen()
        with redirect_stdout(screen):
            show(*(each() for each in things))
        return screen.written.getvalue().decode()

    return shown


def test_what_is_piped_is_neither_coloured_nor_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    show(table(("NAME", "STORY"), [("a", "b" * 500)]), record({"story": "c" * 500}))
    assert capsys.readouterr().out.splitlines() == ["NAME  STORY", "a     " + "b" * 500, "story: " + "c" * 500]


def test_a_terminal_gets_a_head_that_stands_out_colours_by_state_and_what_fits_it(look: Look) -> None:
    shown = look(lambda: table(("NAME", "STATE", "STORY"), [("a", "failed", "b" * 60)]))
    assert "\x1b[1mNAME" in shown and "\x1b[31mfailed" in shown
    assert max(len(click.unstyle(line)) for line in shown.splitlines()) == 40


def test_no_color_is_obeyed(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in look(lambda: table(("NAME", "STATE"), [("a", "failed")]))


def test_control_characters_are_written_out(look: Look, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "\x1b]0;gotcha\x07\x1b[2Jred[bold]:smile:"
    shown = look(lambda: table(("ID",), [(odd,)]), lambda: record({"id": odd, odd: {"id": 1}}))
    assert "\x1b]" not in shown and "\x07" not in shown and "\x1b[2J" not in shown
    assert shown.count("[bold]:smile:") == 3, "it is shown as it is"
    say(odd)
    assert capsys.readouterr().err == "\\x1b]0;gotcha\\x07\\x1b[2Jred[bold]:smile:\n"


def test_amounts_are_written_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    show(table(("COST",), [({"cpu": {"min": 1, "max": 8}, "gpu": {"choices": [1, 2]}},), ({"cpu": (2, 2)},)]))
    assert capsys.readouterr().out.splitlines()[1:] == ["cpu=1-8 gpu=1,2", "cpu=2"]


def test_times_are_read_by_since_and_durations_have_three_figures() -> None:
    assert show_time(datetime(2026, 11, 27, 4, 20, tzinfo=timezone(timedelta(hours=1)))) == "2026-11-27T03:20:00Z"
    assert [show_time(None), show_seconds(None), show_seconds(-1.0), show_seconds(0.047)] == ["-", "-", "0s", "47ms"]


def test_sizes_and_durations_of_a_record_are_written_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    show(record({"memory_bytes": 2**29, "timeout_s": 90, "queue_ms": 1500.0, "idempotent": False, "why_s": "text"}))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["memory: 512Mi", "timeout: 1m30s", "queue: 1.5s", "idempotent: false", "why_s: text"]


def test_a_last_column_that_wraps_goes_on_below_and_rollouts_keep_their_end() -> None:
    columns = (TableColumn("TRAJECTORY", 6), TableColumn("MEANING", 8, wraps=True))
    assert table(columns, [("swe-0007", "one two three"), ("t1", "")], width=16) == [
        "TRAJE~  MEANING",
        "~-0007  one two",
        "        three",
        "t1",
    ]


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


@pytest.mark.parametrize("sign", list("\u202e\u2066\u200f\u061c\u2028\u200b\ufeff\U000e0041\xad"))
def test_no_sign_turns_round_or_hides_what_stands_beside_it(capsys: pytest.CaptureFixture[str], sign: str) -> None:
    text = f"rm {sign}fdp.elif"
    print_log(LogLine(offset=0, time=datetime(2026, 1, 1, tzinfo=UTC), stream="stdout", data=text), err=False)
    say(text)
    print_json({"name": text})
    seen = capsys.readouterr()
    assert sign not in seen.out + seen.err + in_json(text) + "".join(table(("NAME",), [(text,)]))
    assert json.loads(in_json(text)) == text


COLUMNS = (TableColumn("ID", 4), TableColumn("NAME", 4), TableColumn("AGE", 3, 1), TableColumn("WHY", 4, 2))


@given(st.integers(16, 120), st.lists(st.text(min_size=4, max_size=4), max_size=3))
def test_no_row_is_wider_than_asked(width: int, rows: list[str]) -> None:
    assert all(cells_of(line) <= width for line in table(COLUMNS, [tuple(row) for row in rows], width=width))


PULLS = """
from tangram.cli.output import transfers
with transfers() as (look_s, tell):
    tell("one[x]", 0, 0)
    tell("two", 1024, 4096)
    tell("one[x]", 2048, 2048)
print(look_s)
"""


COPY = """
from tangram.cli.output import copying
with copying("tree[x]", 2, 4096) as copied:
    copied(1, 1024)
    copied(1, 3072)
print("done")
"""


def test_where_nobody_looks_it_says_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with transfers() as (look_s, tell):
        tell("one", 1024, 4096)
    assert capsys.readouterr() == ("", "one: 1Ki of 4Ki\n")
    assert look_s == WORD_S


def seen_of(program: str) -> tuple[str, str]:
    """What a program says on standard output, and what somebody at its terminal sees."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=follower,
        env=environment,
        timeout=60,
        check=True,
    )
    os.close(follower)
    shown = os.read(leader, 100_000).decode()
    os.close(leader)
    return done.stdout.decode(), shown


def test_on_a_terminal_each_transfer_has_a_bar_which_is_gone_at_the_end() -> None:
    said, shown = seen_of(PULLS)
    assert float(said) == LOOK_S
    assert "one[x]" in shown and "2Ki of 2Ki" in shown and "1Ki of 4Ki" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K"), "its lines are taken back"


def test_a_copy_shows_its_bytes_and_its_files() -> None:
    said, shown = seen_of(COPY)
    assert said == "done\n"
    assert "tree[x]" in shown and "4Ki of 4Ki" in shown and "2 of 2 files" in shown


@pytest.mark.parametrize(
    ("width", "there", "gone"), [(60, "AGE", "UNITS"), (80, "AGE", "OVERHEAD"), (200, "UNITS", "~")]
)
def test_a_terminal_is_never_overflowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, there: str, gone: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    show(table(INVOCATIONS, invocation_rows([invocation(0x25A, "pytest_reward", overhead_ms=44.0)], short=True)))
    head, row = capsys.readouterr().out.splitlines()
    assert len(row) <= width
    assert there in head and gone not in head + row
    assert row.split()[:2] == ["25a", "pytest_reward"] and ("s  " in row or row.endswith("s"))
