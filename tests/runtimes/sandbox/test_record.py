"""What the next gateway reads of a sandbox: its own records, and those of earlier versions."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from manager.function import Background, Isolation, Network, SandboxSpec, Warm
from runtimes.sandbox.record import NAME, SandboxRecord, is_held, read_records

#: As it was written before records were converted by msgspec (the last commit of schema version 3).
KEPT = """
{"name": "a1b2", "token": "0f", "spec": {"image": "tangram-base:bookworm", "memory_bytes": 536870912,
"network": "egress", "allow": ["10.0.0.0/8", "example.org"], "user": "1000", "pids": 256, "disk_bytes": 2147483648,
"shm_bytes": 67108864, "workdir": "/workspace", "env": {"A": "b"}, "isolation": "container", "background": "run",
"idle_ttl_s": 60, "unattended_s": 600.0, "warm": {"min": 1, "max": 3}}, "labels": {"tangram.trajectory": "t"},
"pid": 7, "started": 11, "runner": true, "oom_told": 2, "ready": true, "transport": "attach"}
"""
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
    transport="attach",
)


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(KEPT)
    assert SandboxRecord.read(tmp_path) == RECORD


def test_an_earlier_version_could_read_what_is_written(tmp_path: Path) -> None:
    """It passes over what it does not know: who made it, and where its files lie."""
    RECORD.write(tmp_path)
    written, kept = json.loads((tmp_path / NAME).read_text()), json.loads(KEPT)
    written["spec"] = {key: written["spec"][key] for key in kept["spec"]}  # it passes over what it does not know
    assert {key: written[key] for key in kept} == kept


def test_only_the_owner_can_read_a_record_for_the_tokens_sake(tmp_path: Path) -> None:
    RECORD.write(tmp_path)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "a"}', KEPT.replace('"egress"', '"moon"')])
def test_a_record_that_is_not_whole_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / NAME).write_text(text)
    assert read_records(tmp_path) == [(tmp_path / "one", None)]


def test_what_is_another_users_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its gateway lives cannot be seen: nothing of it is to be removed."""
    assert not is_held(tmp_path)

    def closed(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", closed)
    assert is_held(tmp_path)
