"""Settling: every accepted action ends exactly once, and what it held or had reserved serves others."""

from __future__ import annotations

from dataclasses import replace

from manager.action import Action
from manager.core.executing import Running
from manager.core.state import SchedulerState
from manager.core.statistics import Accounts, Rate
from manager.core.trajectories import TrajectoryState
from manager.core.waiting.queue import Waiting
from manager.core.waiting.trajectory_order import TrajectoryOrder
from manager.errors import FILES_LOST, Reason
from manager.events import Abort, Settle
from manager.outcome import Outcome, Settlement, State


class Settling:
    """The ends of actions and of trajectories, and the accounts that are drawn up then."""

    def __init__(self, state: SchedulerState, order: TrajectoryOrder) -> None:
        self._state = state
        self._order = order
        self.count = 0
        self.accounts = Accounts()
        #: Ends of running actions.
        self.finishes = Rate()

    def retire(self, running: Running, outcome: Outcome) -> None:
        """Release, account and settle a running action that is over."""
        self.release(running)
        action, now_s = running.action, self._state.now_s
        ran_s = max(0.0, now_s - running.started_s)
        execution_s = min(outcome.execution_s, ran_s)
        self.finishes.add(now_s)
        self._settle(
            Settlement(
                action=action,
                outcome=_with_size(action, _with_mean_units(running, outcome, ran_s)),
                lease=running.lease,
                queue_s=max(0.0, running.started_s - action.submitted_s),
                overhead_s=ran_s - execution_s,
                execution_s=execution_s,
                batch={} if running.batch is None else running.batch.members,
            )
        )
        self._order.leave(running.waited)

    def release(self, running: Running) -> None:
        """Give back what a running action holds, and charge its task for what it used."""
        state, action = self._state, running.action
        state.executing.end(running, state.now_s)
        state.fair.correct(action, state.weight(action.task), running.used)
        self.accounts.of(action.task).use(running.used)

    def end_waiting(self, waiting: Waiting, end_state: State, reason: Reason, message: str) -> None:
        """End an action that never started."""
        state, action = self._state, waiting.action
        state.queue.withdraw(waiting)
        state.fair.leaves(action, state.weight(action.task))
        state.holds.pop(waiting.id, None)
        state.children.leave(waiting)
        detail = {FILES_LOST: True} if reason is Reason.ENVIRONMENT_LOST else {}
        outcome = Outcome(state=end_state, reason=reason, message=message, component="queue", detail=detail)
        queue_s = max(0.0, state.now_s - action.submitted_s)
        self._settle(
            Settlement(action=action, outcome=outcome, lease=None, queue_s=queue_s, overhead_s=0.0, execution_s=0.0)
        )
        self._order.leave(waiting)

    def end_trajectory(
        self, trajectory: TrajectoryState, end_state: State = State.CANCELLED, reason: Reason = Reason.CANCELLED
    ) -> None:
        """Cancel what a trajectory has; its environment goes when nothing runs in it any more."""
        living = self._state.trajectories
        trajectory.ending = True
        if not trajectory.at_rest:
            self._cancel(trajectory, end_state, reason)
        if living.get(trajectory.name) is trajectory and trajectory.at_rest:
            self._order.close(trajectory)

    def _cancel(self, trajectory: TrajectoryState, end_state: State, reason: Reason) -> None:
        """End what waits of a trajectory and kill what runs."""
        state = self._state
        message = f"trajectory {trajectory.name} ended"
        for waiting in state.queue.of_trajectory(trajectory.name):
            if waiting.id in state.queue:
                self.end_waiting(waiting, end_state, reason, message)
        for running in state.executing.all():
            if running.action.trajectory == trajectory.name:
                self.abort(running, message)

    def abort(self, running: Running, message: str) -> None:
        """Have a running action killed, once."""
        if not running.aborting:
            running.aborting = message or "cancelled"
            abort = Abort(action_id=running.id, attempt=running.action.attempt, message=message)
            self._state.commands.append(abort)

    def _settle(self, settlement: Settlement) -> None:
        """Tell the end of an action that has left the queue or the executing set, which each leaves once."""
        action = settlement.action
        self.count += 1
        self.accounts.of(action.task).add(settlement)
        self._state.commands.append(Settle(settlement=settlement))
        self._state.children.orphan(action.id)


def _with_mean_units(running: Running, outcome: Outcome, ran_s: float) -> Outcome:
    """Add the mean of the units over time, which is what a duration teaches, if they changed."""
    key = running.action.key
    if not running.resized or key is None or ran_s <= 0 or "mean_units" in outcome.usage:
        return outcome
    return replace(outcome, usage={**outcome.usage, "mean_units": running.used[key] / ran_s})


def _with_size(action: Action, outcome: Outcome) -> Outcome:
    """Add the size of the call, which its duration may hang on: an exported trace has it from the record."""
    return outcome if action.size is None else replace(outcome, usage={**outcome.usage, "size": action.size})
