"""What a node says of its fitness is passed on, the worst of it first, and never more than people can read."""

from __future__ import annotations

import msgspec

from runtimes.node.fitness.messages import FitnessChanged
from runtimes.node.fitness.remote import WHY_MAX, RemoteFitness
from runtimes.node.message import Message
from runtimes.node.wire import Beat


class OlderFitness(Message):
    """The same as daemons and gateways before knew it."""

    why: str


def test_the_worst_is_passed_on_bounded_and_what_lives_there_goes_on_only_if_that_is_all() -> None:
    heard: list[tuple[str, bool]] = []
    fitness = RemoteFitness(lambda why, finishing: heard.append((why, finishing)))
    for why, newcomers in (("full", "no engine"), ("", "no engine"), ("", ""), ("x" * 2 * WHY_MAX, "")):
        assert fitness.take(FitnessChanged(why, newcomers))
    assert heard == [("full", False), ("no engine", True), ("", False), ("x" * WHY_MAX, False)]
    assert not fitness.take(Beat())


def test_both_sides_may_be_older() -> None:
    older = msgspec.msgpack.encode(OlderFitness("full"))
    assert msgspec.msgpack.decode(older, type=FitnessChanged) == FitnessChanged("full")
    newer = msgspec.msgpack.encode(FitnessChanged("", "no engine"))
    assert msgspec.msgpack.decode(newer, type=OlderFitness) == OlderFitness("")
