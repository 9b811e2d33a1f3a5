"""scripts/house.py counts what there is, and nothing that a program wrote."""

from __future__ import annotations

import json

import pytest

from scripts import house


def test_the_last_line_is_one_object_of_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main([]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for part in ("product", "tests", "bench", "scripts"):
        assert found[f"{part}_lines"] > found[f"{part}_files"] > 0, part
    assert found["docs_words"] > 1000
    largest = list(found["largest"].values())
    assert len(largest) == house.LARGEST and largest == sorted(largest, reverse=True)


def test_what_a_program_wrote_does_not_count() -> None:
    written = [name for name in house.tracked() if name.endswith(".py") and house.is_generated(name)]
    assert any(name.startswith("tangram/client/sync") for name in written)
    assert "tangram/adapters/sync.py" in written
    assert any(name.startswith("gateway/grpc/generated/") for name in written)
    assert not any(name.startswith(("manager/", "runtimes/", "tests/", "bench/", "scripts/")) for name in written)
