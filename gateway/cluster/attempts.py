"""What runs on nodes across restarts of the gateway: whose it is, and who takes it over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from gateway.invocations.invocation import LiveInvocation
from gateway.invocations.reattach import AttemptHolder, Reattachment, claims_of_try
from runtimes.node.remote import RemoteNode


class NodeAttempts:
    """The attempts that one node holds: an `AttemptHolder`."""

    def __init__(self, node: RemoteNode) -> None:
        self._node = node

    def resumable(self) -> Iterable[str]:
        return self._node.resumable()

    def never_started(self, trajectory: str, claims: str) -> bool:
        return self._node.never_started(claims)

    async def end_unclaimed(self, taken: Collection[str]) -> None:
        await self._node.end_unclaimed(taken)

    async def leave(self, claims: str) -> bool:
        return await self._node.leave(claims)

    def detach(self, claims: str) -> None:
        self._node.detach_claim(claims)

    def acknowledge(self, trajectory: str | None, claims: str) -> None:
        self._node.acknowledge(claims)


class NodeReattachment(Reattachment):
    """What goes on at one node without a gateway: handlers too, as a daemon that is no part of it executes them.

    Not models: which devices they compute on is not on record.
    """

    def __init__(self, node: RemoteNode) -> None:
        super().__init__(NodeAttempts(node))

    def _may_hold(self, invocation: LiveInvocation) -> bool:
        return invocation.inside or (invocation.function is not None and invocation.function.handler is not None)

    def never_started(self, invocation: LiveInvocation) -> bool:
        """The node knows it of all that it executes, in a trajectory or not: it writes down what begins."""
        record = invocation.record
        if super().never_started(invocation):
            return True
        known = self._may_hold(invocation)
        return known and self._environments.never_started(record.trajectory or "", claims_of_try(record))

    def settled(self, invocation: LiveInvocation) -> None:
        """The node keeps an end until it hears this, whoever waited for it."""
        self._environments.acknowledge(invocation.record.trajectory, claims_of_try(invocation.record))


class FleetReattachment(Reattachment):
    """The same for this machine and every node: an invocation belongs to where its record says that it runs."""

    def __init__(
        self,
        environments: AttemptHolder,
        node: Callable[[str], RemoteNode | None],
        nodes: Callable[[], Iterable[RemoteNode]],
    ) -> None:
        super().__init__(environments)
        self._node = node
        self._nodes = nodes

    def _elsewhere(self, invocation: LiveInvocation) -> Reattachment | None:
        name = invocation.record.node
        node = None if name is None else self._node(name)
        return None if node is None else NodeReattachment(node)

    async def leave(self, invocation: LiveInvocation) -> bool:
        other = self._elsewhere(invocation)
        return await (super().leave(invocation) if other is None else other.leave(invocation))

    def detached(self, invocation: LiveInvocation) -> None:
        other = self._elsewhere(invocation)
        if other is None:
            super().detached(invocation)
        else:
            other.detached(invocation)

    def settled(self, invocation: LiveInvocation) -> None:
        other = self._elsewhere(invocation)
        if other is None:
            super().settled(invocation)
        else:
            other.settled(invocation)
        for attempt in range(1, invocation.record.attempt):  # earlier tries, wherever they were
            for node in self._nodes():
                node.acknowledge(claims_of_try(invocation.record, attempt))
