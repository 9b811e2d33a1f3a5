"""The batch: queue mates of one service that are executed together; its chunk is free when the last has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manager.action import Action


class Kin(NamedTuple):
    """What the history tells requests apart by."""

    function: str
    #: The caller's key.
    key: str = ""
    #: That of its input, where the function declares one and the input has it.
    size: float | None = None

    @classmethod
    def of(cls, action: Action) -> Kin:
        return cls(action.function, action.profile_key, action.size)


@dataclass(frozen=True, slots=True)
class Work:
    """What the members of a batch would take alone: the longest of them, and all others in turn."""

    longest_s: float
    others_s: float

    @classmethod
    def of(cls, alone_s: Sequence[float]) -> Work:
        longest_s = max(alone_s)
        return cls(longest_s, sum(alone_s) - longest_s)

    @property
    def size(self) -> float:
        """Return how many members as long as the longest it amounts to."""
        return 1.0 + self.others_s / self.longest_s

    def seconds(self, marginal: float) -> float:
        """Return what the batch takes if a further member adds ``marginal`` of what it would take alone."""
        return self.longest_s + marginal * self.others_s


@dataclass(frozen=True, slots=True)
class Batch:
    """What the core notes of a batch when it starts."""

    #: Members by what the history tells them apart by.
    members: Mapping[Kin, int] = field(default_factory=dict)
    #: None if nothing is known of any member.
    expected_s: float | None = None


def expected_s(alone_s: Sequence[float | None], marginal: float) -> float | None:
    """Return the expected seconds of a batch by those of its members alone; an unknown one counts as their mean."""
    known = [one for one in alone_s if one is not None]
    if not known:
        return None
    guess = sum(known) / len(known)
    return Work.of([guess if one is None else one for one in alone_s]).seconds(marginal)


def mates_of(action: Action, alike: Iterable[Action], most_tokens: int) -> list[Action]:
    """Those of ``alike``, which wait for the same service, that would join its batch: first come, up to its tokens."""
    budget = most_tokens - action.batch_tokens
    mates: list[Action] = []
    for mate in alike:
        if mate is action:
            continue
        if mate.batch_tokens > budget:
            break
        budget -= mate.batch_tokens
        mates.append(mate)
    return mates
