"""What the next gateway reads of a sandbox: its record, whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from manager.function import Background, Isolation, Network, SandboxSpec, Warm
from runtimes.sandbox.spec import NAME, SandboxRecord, is_held, read_records

RECORD = SandboxRecord(
    name="a1b2",
    token="0f",
    spec=SandboxSpec(
        image="tangram-base:bookworm",
        network=Network.EGRESS,
        user="1000",
        allow=("10.0.0.0/8", "example.org"),
        env={"A": "b"},
        isolation=Isolation.CONTAINER,
        background=Background.RUN,
        idle_ttl_s=60.0,
        warm=Warm(min=1, max=3),
    ),
    labels={"tangram.trajectory": "t"},
    pid=7,
    started=11,
    oom_told=2,
    provider="container",
    transport="attach",
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    RECORD.write(tmp_path)
    assert SandboxRecord.read(tmp_path) == RECORD


def test_only_the_owner_can_read_a_record_for_the_tokens_sake(tmp_path: Path) -> None:
    RECORD.write(tmp_path)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: "",
        lambda whole: whole[:1],
        lambda whole: "[]",
        lambda whole: '{"name": "a"}',
        lambda whole: whole.replace('"egress"', '"moon"'),
    ],
)
def test_a_record_that_is_not_whole_is_none(tmp_path: Path, broken: Callable[[str], str]) -> None:
    (tmp_path / "one").mkdir()
    RECORD.write(tmp_path / "one")
    place = tmp_path / "one" / NAME
    place.write_text(broken(place.read_text()))
    assert read_records(tmp_path) == [(tmp_path / "one", None)]


def test_what_is_another_users_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its gateway lives cannot be seen: nothing of it is to be removed."""
    assert not is_held(tmp_path)

    def closed(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", closed)
    assert is_held(tmp_path)
