"""The outcome: how an action ended, and the three times that its ACT is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from manager.action import Action
from manager.batch import Kin
from manager.errors import Reason
from manager.lease import Lease


class State(StrEnum):
    """States of an invocation; `LEGAL_MOVES` is the whole table of transitions."""

    QUEUED = "queued"  #: accepted and recorded, not started
    RUNNING = "running"  #: leased and handed to a runtime
    SUCCEEDED = "succeeded"  #: ended with a result (a non-zero exit status is a result)
    FAILED = "failed"  #: ended with a reason
    TIMED_OUT = "timed_out"  #: one of its two clocks ran out
    CANCELLED = "cancelled"  #: the caller asked, or went away
    LOST = "lost"  #: its node or the gateway died and it may not run again

    @property
    def terminal(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.TIMED_OUT, State.CANCELLED, State.LOST})
#: What was started and ended so was completed, well or not: of such actions ACTs are told (paper, equation 2).
COMPLETED = frozenset({State.SUCCEEDED, State.FAILED, State.TIMED_OUT})

#: running -> queued is a retry.
LEGAL_MOVES: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.FAILED, State.TIMED_OUT, State.CANCELLED, State.LOST}),
    State.RUNNING: TERMINAL | {State.QUEUED},
    **{state: frozenset[State]() for state in TERMINAL},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an execution ended; made by the executor (or by the core, for work that never started) and frozen."""

    state: State
    #: The runtime's result as plain JSON values; also partial results of a failure.
    result: object = None
    #: Present exactly when the state is not ``succeeded``.
    reason: Reason | None = None
    message: str = ""
    #: The component that failed, for example ``sandbox.container`` or ``model.worker``.
    component: str = ""
    #: Seconds that the user's work itself ran; the rest between lease and end is overhead.
    execution_s: float = 0.0
    #: Seconds after which another try may help (Retry-After of an upstream).
    retry_after_s: float | None = None
    #: Measured use: cpu_s, peak_memory_bytes, restore_s, workers ...
    usage: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.state.terminal, f"an outcome is terminal, not {self.state}"
        assert (self.reason is None) == (self.state is State.SUCCEEDED), (self.state, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The end of an action, exactly one for each: its outcome and its times.

    ``queue_s + overhead_s + execution_s`` is the ACT, always (paper, equation 2, with overhead shown apart).
    """

    action: Action
    outcome: Outcome
    #: The last lease; None for work that never started.
    lease: Lease | None
    queue_s: float
    overhead_s: float
    execution_s: float
    #: Members of its batch by what the history tells apart, itself included; empty if it was started alone.
    batch: Mapping[Kin, int] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        """Whether it was started, and neither cancelled nor lost."""
        return self.lease is not None and self.outcome.state in COMPLETED

    @property
    def act_s(self) -> float:
        return self.queue_s + self.overhead_s + self.execution_s
