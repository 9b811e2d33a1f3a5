"""One step of a task: how many rollouts are expected, live and have ended, and a sample of how long they lived."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

#: Lifetimes that are kept of a step, drawn evenly from all of its ended rollouts; the longest is always among them.
SAMPLE_MAX = 128


@dataclass(slots=True, kw_only=True, eq=False)
class TaskStep:
    """What was told of a step, and what was seen of it since. A rollout is a trajectory, or a call of none.

    Instants are wall-clock seconds.
    """

    task: str
    number: int
    opened_s: float
    #: Rollouts that it is to have; None until that is told.
    expected: int | None = None
    ended: int = 0
    #: When the last expected one ended; None before.
    ended_s: float | None = None
    #: Most rollouts that lived at once.
    most_living: int = 0
    #: Some of the ended ones' lifetimes, in seconds.
    sample_s: list[float] = field(default_factory=list)
    #: Living trajectories by name, and living calls of none by id, with the instants from which they count.
    trajectories: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    #: When it was last told, or a rollout of it began or ended; not on record, so at the earliest this gateway's start.
    stirred_s: float = 0.0

    @property
    def living(self) -> int:
        return len(self.trajectories) + len(self.calls)

    def expect(self, expected: int, now_s: float) -> None:
        """Note how many rollouts it is to have, for the first time or anew."""
        self._stir(now_s)
        self.expected = expected
        self._conclude(now_s)

    def begin(self, rollouts: dict[str, float], name: str, since_s: float) -> None:
        """Count a rollout, one of ``trajectories`` or ``calls``, as living."""
        rollouts[name] = since_s
        self.most_living = max(self.most_living, self.living)
        self._stir(since_s)

    def end(self, since_s: float, now_s: float, *, seen: bool = True) -> None:
        """Count one that lived since then as ended; unless its end was ``seen`` nobody knows how long it lived."""
        self.ended += 1
        self._stir(now_s)
        if seen:
            self._keep(max(0.0, now_s - since_s))
        self._conclude(now_s)

    def quiet_s(self, now_s: float) -> float:
        """Return for how long it was not told, nor anything of it lived; 0 while something does."""
        return 0.0 if self.living else max(0.0, now_s - self.stirred_s)

    def _stir(self, now_s: float) -> None:
        self.stirred_s = max(self.stirred_s, now_s)

    def _conclude(self, now_s: float) -> None:
        if self.expected is None or self.ended < self.expected:
            self.ended_s = None
        elif self.ended_s is None:
            self.ended_s = now_s

    def _keep(self, lifetime_s: float) -> None:
        """Keep each lifetime with the same chance, but the longest for certain: it is the end of the step."""
        if len(self.sample_s) < SAMPLE_MAX:
            self.sample_s.append(lifetime_s)
            return
        longest = max(range(SAMPLE_MAX), key=self.sample_s.__getitem__)
        place = random.randrange(self.ended)
        if lifetime_s >= self.sample_s[longest]:
            self.sample_s[longest] = lifetime_s
        elif place < SAMPLE_MAX and place != longest:
            self.sample_s[place] = lifetime_s
