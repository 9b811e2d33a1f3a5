"""Takeover: which commands that run in sandboxes are whose, from one gateway to the next."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from gateway.invocations.invocation import LiveInvocation
from gateway.invocations.record import Record, action_id_of
from manager.action import State
from runtimes.sandbox.command import claims_of


class AttemptHolder(Protocol):
    """What holds commands of a gateway before: `runtimes.sandbox.environments.Environments`, or a node."""

    def resumable(self) -> Iterable[str]:
        """Return the claims of commands that can be taken over."""
        ...

    def never_started(self, trajectory: str, claims: str) -> bool:
        """Return whether it is certain that no command with such a claim was started."""
        ...

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        """End every command whose claim begins with none of these."""
        ...

    async def leave(self, claims: str) -> bool:
        """Leave a running command to the next gateway; return False if that cannot be."""
        ...

    def detach(self, claims: str) -> None:
        """Let it outlive this gateway."""
        ...

    def acknowledge(self, trajectory: str | None, claims: str) -> None:
        """Forget it: its end is on record."""
        ...


class Reattachment:
    """Joins the records of an earlier gateway to what its sandboxes still hold, and leaves to the next what runs."""

    def __init__(self, environments: AttemptHolder) -> None:
        self._environments = environments
        #: What the claims of each held try begin with.
        self._resumable: set[str] = set()
        self._taken: set[str] = set()

    def look(self) -> None:
        """See what the adopted sandboxes hold."""
        self._resumable = {claim.rpartition("/")[0] + "/" for claim in self._environments.resumable()}

    def holds(self, invocation: LiveInvocation) -> bool:
        """Return whether a living sandbox holds the present try, which the record says has begun."""
        record = invocation.record
        begun = record.detached and record.state is State.RUNNING
        return begun and self._may_hold(invocation) and claims_of_try(record) in self._resumable

    def _may_hold(self, invocation: LiveInvocation) -> bool:
        """Return whether work of its kind outlives the gateway that began it."""
        return invocation.inside

    def never_started(self, invocation: LiveInvocation) -> bool:
        """Whether the present try is certain not to have begun, whatever the record feared."""
        record = invocation.record
        if not invocation.inside or not record.begun:
            return not record.begun
        return record.trajectory is not None and self._environments.never_started(
            record.trajectory, claims_of_try(record)
        )

    def take(self, invocation: LiveInvocation) -> None:
        """It goes on under this gateway."""
        self._taken.add(claims_of_try(invocation.record))

    async def end_unclaimed(self) -> None:
        """End what was not taken."""
        await self._environments.end_unclaimed(self._taken)
        self._resumable.clear()

    async def leave(self, invocation: LiveInvocation) -> bool:
        """Leave a running command to the next gateway, as it runs; False where that cannot be."""
        return self._may_hold(invocation) and await self._environments.leave(claims_of_try(invocation.record))

    def detached(self, invocation: LiveInvocation) -> None:
        """It goes on without its caller, and from now on without this gateway too."""
        if self._may_hold(invocation):
            self._environments.detach(claims_of_try(invocation.record))

    def settled(self, invocation: LiveInvocation) -> None:
        """No gateway asks for its end again: no sandbox needs to keep it."""
        if self._may_hold(invocation) and invocation.record.detached:
            self._environments.acknowledge(invocation.record.trajectory, claims_of_try(invocation.record))


def claims_of_try(record: Record, attempt: int = 0) -> str:
    """Return what the claims of the present try begin with, or those of an earlier one."""
    number = attempt or record.attempt
    return claims_of(action_id_of(record.id, number), number)
