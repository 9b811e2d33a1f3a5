"""What a node says of its fitness: the worst of it first, and never more than people can read."""

from __future__ import annotations

import pytest

from runtimes.node.remote import WHY_MAX, unfitness


@pytest.mark.parametrize(
    ("why", "newcomers", "found"),
    [
        ("full", "no engine", ("full", False)),
        ("", "no engine", ("no engine", True)),
        ("", "", ("", False)),
        ("x" * 2 * WHY_MAX, "", ("x" * WHY_MAX, False)),
    ],
)
def test_the_worst_is_told_bounded_and_what_lives_there_goes_on_only_if_that_is_all(
    why: str, newcomers: str, found: tuple[str, bool]
) -> None:
    assert unfitness(why, newcomers) == found
