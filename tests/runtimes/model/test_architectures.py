"""Every architecture that transformers has a class of gives its numbers, or is refused before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

import transformers

from bench.model.architectures import QUICK, RIGHT, classes, compare, table
from runtimes.model.checkpoint import Head
from runtimes.model.weights import FAMILIES, PADDED

ROOT = Path(__file__).parents[3]
#: The version that the table of docs/MODELS.md is of.
DOCUMENTED = "5.23.0"
CASES = [(head, kind) for head in Head for kind in classes(head)]


@pytest.mark.parametrize(
    ("head", "kind"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_an_architecture_is_equal_or_refused(head: Head, kind: str, tmp_path: Path) -> None:
    found = compare(tmp_path, kind, head)
    if found.refusal:
        assert kind not in FAMILIES
        return
    assert found.difference <= RIGHT
    assert found.batch_difference <= RIGHT


def test_what_may_be_padded_is_compared() -> None:
    assert {kind for _, kind in CASES} >= PADDED


def test_the_documented_table_is_that_of_this_version() -> None:
    if transformers.__version__ != DOCUMENTED:
        pytest.skip(f"the table is that of transformers {DOCUMENTED}")
    assert table() in (ROOT / "docs" / "MODELS.md").read_text()
