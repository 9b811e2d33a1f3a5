"""Faults that were found in the product and mended, put back one at a time: a check that never fails is none.

Two more of that kind are the runner's own, and are put back under its fuzzer (`bench.runner`).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

from gateway.cluster.cluster import Cluster
from gateway.invocations.invocations import Invocations, LiveInvocation
from gateway.invocations.restart import RESTARTED, Restart, claims_of_try
from gateway.store import store
from gateway.store.store import Store
from manager.action import Outcome, Settlement, State
from manager.errors import Reason
from runtimes.node.membership import CountedOut
from runtimes.node.remote import RemoteCall, RemoteNode
from runtimes.sandbox.environments import Environments

#: A method that is replaced: its class, its name, and what stands in its place.
Replaced = tuple[type, str, Any]


def decided_before_its_node_is_back() -> list[Replaced]:
    """What may run on a node that is away holds no turn: what is behind it in its trajectory goes first."""
    waiting: dict[Restart, list[LiveInvocation]] = {}
    may_go_on, count_out = Restart._await, Cluster._count_out

    def put_aside(restart: Restart, invocation: LiveInvocation) -> bool:
        aside = invocation.record.begun and restart._takeover.may_hold(invocation)
        if aside:
            waiting.setdefault(restart, []).append(invocation)
        return aside

    def end_as_lost(restart: Restart, invocation: LiveInvocation) -> None:
        if not invocation.record.terminal:
            invocation.record.end(State.LOST, Reason.GATEWAY_RESTART, f"{RESTARTED} while it ran", restart._wall())
            restart._invocations.finish(invocation, waited=False)

    def decide(restart: Restart, node: str) -> Collection[str]:
        wanted = set()
        for invocation in [each for each in waiting.get(restart, ()) if each.record.node == node]:
            waiting[restart].remove(invocation)
            if not invocation.record.terminal and may_go_on(restart, invocation):
                wanted.add(claims_of_try(invocation.record))
            else:
                end_as_lost(restart, invocation)
        return wanted

    def lose(cluster: Cluster, verdict: CountedOut) -> None:
        for restart, aside in waiting.items():
            for invocation in [each for each in aside if each.record.node == verdict.node]:
                end_as_lost(restart, invocation)
        count_out(cluster, verdict)

    return [(Restart, "_await", put_aside), (Restart, "awaited_on", decide), (Cluster, "_count_out", lose)]


def turn_given_up_between_tries() -> list[Replaced]:
    """The next try stands at the end of its trajectory's queue."""

    def try_again(self: Invocations, invocation: LiveInvocation, settlement: Settlement, wait_s: float) -> None:
        self.requeue(invocation, invocation.record.tried(settlement.outcome, self._wall(), settlement.execution_s))
        invocation.resumed = False
        invocation.retry = asyncio.get_running_loop().call_later(wait_s, self.submit, [invocation])

    return [(Invocations, "_try_again", try_again)]


def cancelled_before_its_node_knows() -> list[Replaced]:
    """A command on a node that is not reached is told as cancelled at once."""
    kill = RemoteNode._kill

    def end(self: RemoteNode, claim: str, remote: RemoteCall) -> None:
        kill(self, claim, remote)
        if self._link is None:
            self._end(remote, Outcome(state=State.CANCELLED, reason=Reason.CANCELLED, message="cancelled"))

    return [(RemoteNode, "_kill", end)]


def reaped_before_it_has_an_owner() -> list[Replaced]:
    """The reaper takes what is made, and not entered yet, for left behind."""
    return [(Environments, "_spared", lambda self, id: nullcontext())]


def transaction_left_open() -> list[Replaced]:
    """An error that is none of SQLite's leaves the transaction open, and what cannot be written is tried for ever."""

    def write(self: Store, connection: sqlite3.Connection, batch: Any, rows: Sequence[list[object]]) -> list[Any]:
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._execute_all(connection, store._statements(batch, rows))
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return []

    return [(Store, "_write", write)]


#: By name: what is replaced, and what the judge says of it.
FAULTS: dict[str, tuple[Callable[[], list[Replaced]], tuple[str, ...]]] = {
    each.__name__: (each, says)
    for each, says in (
        (decided_before_its_node_is_back, ("runs after it", "nothing was lost", "two at once")),
        (turn_given_up_between_tries, ("runs after it",)),
        (cancelled_before_its_node_knows, ("cancelled is told",)),
        (reaped_before_it_has_an_owner, ("nothing was lost", "it was removed")),
        (transaction_left_open, ("cannot start a transaction", "does not come to rest")),
    )
}


@contextmanager
def put_back(name: str) -> Iterator[None]:
    """Have a fault in the product."""
    make, _ = FAULTS[name]
    patches = [partial(mock.patch.object, *replaced)() for replaced in make()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
