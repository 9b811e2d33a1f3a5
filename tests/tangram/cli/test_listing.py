"""`tangram ps` on a terminal: as wide as it is, the ids without what nobody needs to type."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from tangram import InvocationResult
from tangram.cli.listing import show_list

NOW = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)
ONE: dict[str, Any] = {
    "id": "0000000025a-964ec9f8f6c4",
    "function": "pytest_reward",
    "revision": "r",
    "task": "swe-coding",
    "trajectory": "swe-1094",
    "parent": None,
    "mode": "sync",
    "state": "failed",
    "reason": "out_of_memory",
    "message": "",
    "component": "",
    "detail": {},
    "retry_after_s": None,
    "accepted_at": NOW - timedelta(seconds=40),
    "started_at": None,
    "ended_at": None,
    "queue_ms": 1200.0,
    "overhead_ms": 44.0,
    "execution_ms": 6700.0,
    "act_ms": None,
    "node": "node-a",
    "units": {"cpu": 2},
    "usage": {},
    "attempt": 1,
    "attempts": (),
    "dead": False,
    "callback": None,
}


@pytest.mark.parametrize(
    ("width", "there", "gone"), [(60, "AGE", "UNITS"), (80, "AGE", "OVERHEAD"), (200, "UNITS", "~")]
)
def test_a_terminal_is_never_overflowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, there: str, gone: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    show_list([msgspec.convert(ONE, InvocationResult)], NOW)
    head, row = capsys.readouterr().out.splitlines()
    assert len(row) <= width
    assert there in head and gone not in head + row
    assert row.split()[:2] == ["25a", "pytest_reward"] and "40s" in row
