"""How far transfers are: a bar for each on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from tangram.cli.printing.progress import LOOK_S, WORD_S, copying, transfers

PULLS = """
from tangram.cli.printing.progress import transfers
with transfers() as (look_s, tell):
    tell("one[x]", 0, 0)
    tell("two", 1024, 4096)
    tell("one[x]", 2048, 2048)
print(look_s)
"""


COPY = """
from tangram.cli.printing.progress import copying
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
    assert "one[x]" in shown and "2.0/2.0 KiB" in shown and "1.0/4.0 KiB" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K"), "its lines are taken back"


def test_a_copy_shows_its_bytes_and_its_files() -> None:
    said, shown = seen_of(COPY)
    assert said == "done\n"
    assert "tree[x]" in shown and "4.0/4.0 KiB" in shown and "2 of 2 files" in shown


def test_a_copy_that_nobody_looks_at_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with copying("tree", 1, 10) as copied:
        copied(1, 10)
    assert capsys.readouterr() == ("", "")
