"""Settling: every accepted action ends exactly once, and what it held or had reserved serves others."""

from __future__ import annotations

from dataclasses import replace

from manager.core.queue import Entry
from manager.core.state import SchedulerState
from manager.core.statistics import Accounts, Rate
from manager.core.trajectories import TrajectoryState
from manager.core.trajectory_order import TrajectoryOrder
from manager.errors import Reason
from manager.events import Abort, Settle
from manager.outcome import Outcome, Settlement, State


class Settling:
    """The ends of actions and of trajectories, and the accounts that are drawn up then."""

    def __init__(self, state: SchedulerState, lanes: TrajectoryOrder) -> None:
        self._state = state
        self._lanes = lanes
        self.count = 0
        self.accounts = Accounts()
        #: Ends of running actions.
        self.finishes = Rate()

    def retire(self, entry: Entry, outcome: Outcome) -> None:
        """A running action is over: release, account, settle."""
        self.release(entry)
        now_s = self._state.now_s
        queue_s = max(0.0, entry.started_s - min(entry.action.submitted_s, entry.started_s))
        ran_s = max(0.0, now_s - entry.started_s)
        execution_s = min(outcome.execution_s, ran_s)
        self.finishes.add(now_s)
        settlement = Settlement(
            action=entry.action,
            outcome=_with_mean_units(entry, outcome, ran_s),
            lease=entry.lease,
            queue_s=queue_s,
            overhead_s=ran_s - execution_s,
            execution_s=execution_s,
            batch={} if entry.batch is None else entry.batch.members,
        )
        self._settle(entry, settlement)

    def release(self, entry: Entry) -> None:
        """Give back what a running action holds, and charge its task for what it used."""
        state, action = self._state, entry.action
        state.executing.end(entry, state.now_s)
        state.fair.correct(action, state.weight(action.task), entry.used)
        self.accounts.of(action.task).use(entry.used)

    def end_waiting(self, entry: Entry, end_state: State, reason: Reason, message: str) -> None:
        """End an action that never started."""
        state = self._state
        state.queue.withdraw(entry)
        state.holds.pop(entry.id, None)
        outcome = Outcome(state=end_state, reason=reason, message=message, component="queue")
        queue_s = max(0.0, state.now_s - entry.action.submitted_s)
        settlement = Settlement(
            action=entry.action, outcome=outcome, lease=None, queue_s=queue_s, overhead_s=0.0, execution_s=0.0
        )
        self._settle(entry, settlement)

    def end_trajectory(
        self, trajectory: TrajectoryState, end_state: State = State.CANCELLED, reason: Reason = Reason.CANCELLED
    ) -> None:
        """Cancel what it has; the environment goes when nothing runs in it any more."""
        living = self._state.trajectories
        trajectory.ending = True
        if not trajectory.at_rest:
            self._cancel(trajectory, end_state, reason)
        if living.get(trajectory.name) is trajectory and trajectory.at_rest:
            self._lanes.close(trajectory)

    def _cancel(self, trajectory: TrajectoryState, end_state: State, reason: Reason) -> None:
        """End what waits of a trajectory and kill what runs."""
        state = self._state
        message = f"trajectory {trajectory.name} ended"
        for entry in state.queue.of_trajectory(trajectory.name):
            if entry.id in state.queue:
                self.end_waiting(entry, end_state, reason, message)
        for entry in state.executing.all():
            if entry.action.trajectory == trajectory.name:
                self.abort(entry, message)

    def abort(self, entry: Entry, message: str) -> None:
        """Have a running action killed, once."""
        if not entry.aborting:
            entry.aborting = True
            abort = Abort(action_id=entry.id, attempt=entry.action.attempt, message=message)
            self._state.commands.append(abort)

    def _settle(self, entry: Entry, settlement: Settlement) -> None:
        assert not entry.state.terminal, f"{entry.id} settles twice: {entry.state}, {settlement.outcome.state}"
        entry.state = settlement.outcome.state
        self.count += 1
        self.accounts.of(entry.action.task).add(settlement)
        self._state.commands.append(Settle(settlement=settlement))
        self._state.families.orphan(entry.id)
        self._state.families.leave(entry)
        self._lanes.leave(entry)


def _with_mean_units(entry: Entry, outcome: Outcome, ran_s: float) -> Outcome:
    """The outcome of an action whose units changed, with their mean over time, which is what its duration teaches."""
    key = entry.action.key
    if not entry.resized or key is None or ran_s <= 0 or "mean_units" in outcome.usage:
        return outcome
    return replace(outcome, usage={**outcome.usage, "mean_units": entry.used[key] / ran_s})
