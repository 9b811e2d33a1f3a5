"""Losses: what was accepted before the loss of its sandbox was told ends with it, and runs in no new, empty one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.invocations.invocation import LiveInvocation
from manager.action import Outcome, State
from manager.errors import CANCEL_ASKED, FILES_LOST, Reason


class EnvironmentLosses:
    """Which trajectories have lost their sandbox while nobody was told yet."""

    def __init__(
        self, living: Callable[[], Sequence[LiveInvocation]], stop: Callable[[LiveInvocation, str], object]
    ) -> None:
        self._living = living
        self._stop = stop
        #: By trajectory: with whose end its loss is told, and what is told to the others.
        self._losses: dict[str, tuple[LiveInvocation, str]] = {}

    def see(self, invocation: LiveInvocation, outcome: Outcome) -> Outcome:
        """Return the end of a try as it is to be told; if it tells a loss, stop all that was to run in that sandbox."""
        trajectory = invocation.record.trajectory
        if invocation.loss is not None and (outcome.state is State.CANCELLED or CANCEL_ASKED in outcome.detail):
            lost = replace(outcome, state=State.FAILED, reason=Reason.ENVIRONMENT_LOST, detail={FILES_LOST: True})
            return replace(lost, message=invocation.loss, component="sandbox")
        if trajectory is not None and invocation.loss is None and FILES_LOST in outcome.detail:
            self._losses[trajectory] = (invocation, f"the sandbox that it was to run in was lost: {outcome.message}")
            self.check(self._living())
        return outcome

    def check(self, invocations: Sequence[LiveInvocation]) -> None:
        """Stop those whose sandbox was lost before they began in it."""
        for invocation in invocations if self._losses else ():
            record = invocation.record
            told, message = self._losses.get(record.trajectory or "", (invocation, ""))
            under_way = record.terminal or (record.state is State.RUNNING and record.begun)
            if told is not invocation and invocation.inside and not under_way:
                invocation.loss = message
                self._stop(invocation, message)

    def tell(self, invocation: LiveInvocation) -> None:
        """Tell its end to whoever waits for it: what is accepted from now on may begin anew."""
        invocation.ended.set()
        trajectory = invocation.record.trajectory or ""
        if self._losses.get(trajectory, (None, ""))[0] is invocation:
            del self._losses[trajectory]
