"""The model bench runs on a toy, names its checks, and goes on where a part of it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

from bench.model import __main__ as model  # noqa: E402  # torch may be missing
from bench.model import rig as rig_module  # noqa: E402
from bench.model.rig import ModelRig, median_ratio  # noqa: E402
from bench.report import BenchReport  # noqa: E402


def test_every_part_on_one_device_says_what_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig_module, "ROUNDS_S", 0.0)
    report = BenchReport("model")
    rig = ModelRig("cpu", "toy", 1, tmp_path, report)
    for part in (model.restores, model.loading, model.swaps, model.overlaps, model.parking, model.host_memory):
        part(rig)
    rig.engine.backend.close()
    found = {check.name: check for check in report.checks}
    assert set(found) == {
        "restore_over_memcpy",
        "evict_ms",
        "from_pretrained_over_restore",
        "wrong_weights",
        "swap_over_restore",
        "cold_over_max_restore_compute",
        "prefetch_slowdown",
        "wrong_cold_actions",
        "parked_bytes",
        "host_bytes_over_model",
    }
    # What does not depend on the machine's mood.
    for name in ("wrong_weights", "wrong_cold_actions", "parked_bytes", "host_bytes_over_model"):
        assert found[name].ok, found[name]


def test_what_slows_a_whole_round_cancels() -> None:
    assert median_ratio([9.0, 2.0, 20.0, 200.0], [1.0, 1.0, 10.0, 100.0]) == 2.0
