"""What a node says of its fitness is passed on, the worst of it first, and never more than people can read."""

from __future__ import annotations

from runtimes.node.protocol import Beat, FitnessChanged
from runtimes.node.remote import WHY_MAX, RemoteFitness


def test_the_worst_is_passed_on_bounded_and_what_lives_there_goes_on_only_if_that_is_all() -> None:
    heard: list[tuple[str, bool]] = []
    fitness = RemoteFitness(lambda why, finishing: heard.append((why, finishing)))
    for why, newcomers in (("full", "no engine"), ("", "no engine"), ("", ""), ("x" * 2 * WHY_MAX, "")):
        assert fitness.take(FitnessChanged(why, newcomers))
    assert heard == [("full", False), ("no engine", True), ("", False), ("x" * WHY_MAX, False)]
    assert not fitness.take(Beat())
